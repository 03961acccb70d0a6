"""Llama 2's tokenizer."""

from torchtune.models._tokenizer_builders import tokenizer_builder, with_defaults
from torchtune.models.llama2._prompt_template import Llama2ChatTemplate
from torchtune.tokenizers import SentencePieceChatTokenizer


class Llama2Tokenizer(SentencePieceChatTokenizer):
    """SentencePiece tokenizer with Llama 2's prompt template.

    Args:
        path: path of ``tokenizer.model``.
        max_seq_len: maximum number of tokens; ``None``: no truncation.
        prompt_template: template of conversations; ``None`` concatenates the messages.
        truncation_type: ``"right"`` cuts the end of a long row, ``"left"`` the beginning.

    Raises:
        DataError: the file is missing or broken.
    """

    __init__ = with_defaults(SentencePieceChatTokenizer.__init__, prompt_template=Llama2ChatTemplate())


llama2_tokenizer = tokenizer_builder(Llama2Tokenizer, "llama2_tokenizer", "Llama 2")

"""Mistral's tokenizer."""

from torchtune.models._tokenizer_builders import tokenizer_builder, with_defaults
from torchtune.models.mistral._prompt_template import MistralChatTemplate
from torchtune.tokenizers import SentencePieceChatTokenizer


class MistralTokenizer(SentencePieceChatTokenizer):
    """SentencePiece tokenizer with Mistral's prompt template.

    Args:
        path: path of ``tokenizer.model``.
        max_seq_len: maximum number of tokens; ``None``: no truncation.
        prompt_template: template of conversations; ``None`` concatenates the messages.
        truncation_type: ``"right"`` cuts the end of a long row, ``"left"`` the beginning.

    Raises:
        DataError: the file is missing or broken.
    """

    __init__ = with_defaults(SentencePieceChatTokenizer.__init__, prompt_template=MistralChatTemplate())


mistral_tokenizer = tokenizer_builder(MistralTokenizer, "mistral_tokenizer", "Mistral")

"""Gemma's tokenizer."""

from typing import ClassVar

from torchtune.models._tokenizer_builders import tokenizer_builder
from torchtune.tokenizers import SentencePieceChatTokenizer


class GemmaTokenizer(SentencePieceChatTokenizer):
    """SentencePiece tokenizer of Gemma and Gemma 2. ``prompt_template`` adds the turn markers.

    Turn markers are control tokens only in the template; in the content of a message they are plain text.

    Args:
        path: path of ``tokenizer.model``.
        max_seq_len: maximum number of tokens; ``None``: no truncation.
        prompt_template: template of conversations; ``None`` concatenates the messages.
        truncation_type: ``"right"`` cuts the end of a long row, ``"left"`` the beginning.

    Raises:
        DataError: the file is missing or broken.
    """

    control_texts: ClassVar[tuple[str, ...]] = ("<start_of_turn>", "<end_of_turn>")


gemma_tokenizer = tokenizer_builder(GemmaTokenizer, "gemma_tokenizer", "Gemma")

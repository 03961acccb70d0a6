"""Gemma's tokenizer."""

from typing import ClassVar

from torchtune.data._prompt_templates import TemplateType, get_prompt_template
from torchtune.modules.transforms.tokenizers._sentencepiece_chat import SentencePieceChatTokenizer


class GemmaTokenizer(SentencePieceChatTokenizer):
    """SentencePiece tokenizer for Gemma and Gemma 2. ``prompt_template`` adds the chat layout.

    Turn markers are control tokens in the template only; in the text of a turn they are plain text.

    Args:
        path: ``tokenizer.model``.
        max_seq_len: longest row; ``None`` does not cut.
        prompt_template: layout of conversations; ``None`` joins the texts as they are.
        truncation_type: which end of a long row is kept: ``"right"`` cuts the end, ``"left"`` the beginning.

    Raises:
        DataError: the file is missing or broken.
    """

    control_texts: ClassVar[tuple[str, ...]] = ("<start_of_turn>", "<end_of_turn>")


def gemma_tokenizer(
    path: str,
    max_seq_len: int | None = None,
    prompt_template: TemplateType | None = None,
    truncation_type: str = "right",
) -> GemmaTokenizer:
    """Gemma's tokenizer.

    Args:
        path: ``tokenizer.model``.
        max_seq_len: longest row; ``None`` does not cut.
        prompt_template: dotted path of a template, or a mapping role -> [text before, text after].
        truncation_type: which end of a long row is kept: ``"right"`` cuts the end, ``"left"`` the beginning.

    Raises:
        DataError: the file is missing or broken.
    """
    return GemmaTokenizer(path, max_seq_len, get_prompt_template(prompt_template), truncation_type)

"""Qwen 3's tokenizer."""

from collections.abc import Mapping
from typing import Any

from torchtune.data import PromptTemplateInterface
from torchtune.data._prompt_templates import TemplateType
from torchtune.models.qwen2._tokenizer import (
    DEFAULT_QWEN2_TOKENIZER_BPE_CACHE_SIZE,
    ENDOFTEXT,
    IM_END,
    tokenizer_arguments,
)
from torchtune.models.qwen2_5._tokenizer import QWEN2_5_SPECIAL_TOKENS, Qwen2_5Tokenizer

QWEN3_SPECIAL_TOKENS = {
    **QWEN2_5_SPECIAL_TOKENS,
    "<tool_response>": 151665,
    "</tool_response>": 151666,
    "<think>": 151667,
    "</think>": 151668,
}


class Qwen3Tokenizer(Qwen2_5Tokenizer):
    """Byte-level BPE with Qwen 3's special tokens and Qwen 2.5's layout; no reasoning is added or taken away.

    Takes the arguments of :class:`torchtune.models.qwen2.Qwen2Tokenizer`.
    """

    def __init__(
        self,
        path: str,
        merges_file: str,
        special_tokens: Mapping[str, int] = QWEN3_SPECIAL_TOKENS,
        max_seq_len: int | None = None,
        *,
        prompt_template: PromptTemplateInterface | None = None,
        errors: str = "replace",
        unk_token: str | None = None,
        bos_token: str | None = None,
        eos_token: str = IM_END,
        pad_token: str | None = ENDOFTEXT,
        bpe_cache_size: int = DEFAULT_QWEN2_TOKENIZER_BPE_CACHE_SIZE,
        truncation_type: str = "right",
    ) -> None:
        super().__init__(
            path,
            merges_file,
            special_tokens,
            max_seq_len,
            prompt_template=prompt_template,
            errors=errors,
            unk_token=unk_token,
            bos_token=bos_token,
            eos_token=eos_token,
            pad_token=pad_token,
            bpe_cache_size=bpe_cache_size,
            truncation_type=truncation_type,
        )


def qwen3_tokenizer(
    path: str,
    merges_file: str,
    special_tokens_path: str | None = None,
    max_seq_len: int | None = None,
    prompt_template: TemplateType | None = None,
    truncation_type: str = "right",
    **kwargs: Any,
) -> Qwen3Tokenizer:
    """Qwen 3's tokenizer.

    Args:
        path: ``vocab.json``.
        merges_file: ``merges.txt``.
        special_tokens_path: a ``tokenizer.json`` whose special tokens are used instead of Qwen's.
        max_seq_len: longest row; ``None`` does not cut.
        prompt_template: dotted path of a template, or a mapping role -> [text before, text after].
        truncation_type: which end of a long row is kept: ``"right"`` cuts the end, ``"left"`` the beginning.
        **kwargs: further arguments of :class:`Qwen3Tokenizer`.

    Raises:
        DataError: a file is missing or broken.
    """
    arguments = tokenizer_arguments(
        QWEN3_SPECIAL_TOKENS, path, merges_file, special_tokens_path, max_seq_len, prompt_template, truncation_type
    )
    return Qwen3Tokenizer(**arguments, **kwargs)

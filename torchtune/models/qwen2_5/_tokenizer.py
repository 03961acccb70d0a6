"""Qwen 2.5's tokenizer."""

from collections.abc import Mapping
from typing import Any

from torchtune.data import Message, PromptTemplateInterface
from torchtune.data._prompt_templates import TemplateType
from torchtune.models.qwen2._tokenizer import (
    DEFAULT_QWEN2_TOKENIZER_BPE_CACHE_SIZE,
    ENDOFTEXT,
    IM_END,
    IM_START,
    QWEN2_SPECIAL_TOKENS,
    Qwen2Tokenizer,
    tokenizer_arguments,
)
from torchtune.modules.transforms.tokenizers._protocols import text_only

QWEN2_5_SPECIAL_TOKENS = {
    **QWEN2_SPECIAL_TOKENS,
    "<|object_ref_start|>": 151646,
    "<|object_ref_end|>": 151647,
    "<|box_start|>": 151648,
    "<|box_end|>": 151649,
    "<|quad_start|>": 151650,
    "<|quad_end|>": 151651,
    "<|vision_start|>": 151652,
    "<|vision_end|>": 151653,
    "<|vision_pad|>": 151654,
    "<|image_pad|>": 151655,
    "<|video_pad|>": 151656,
    "<tool_call>": 151657,
    "</tool_call>": 151658,
    "<|fim_prefix|>": 151659,
    "<|fim_middle|>": 151660,
    "<|fim_suffix|>": 151661,
    "<|fim_pad|>": 151662,
    "<|repo_name|>": 151663,
    "<|file_sep|>": 151664,
}


class Qwen2_5Tokenizer(Qwen2Tokenizer):
    """Byte-level BPE with Qwen 2.5's layout of conversations, tool calls and tools' answers included.

    Takes the arguments of :class:`torchtune.models.qwen2.Qwen2Tokenizer`.
    """

    def __init__(
        self,
        path: str,
        merges_file: str,
        special_tokens: Mapping[str, int] = QWEN2_5_SPECIAL_TOKENS,
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
        parse_special_tokens: bool = False,
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
            parse_special_tokens=parse_special_tokens,
        )

    def _turn(self, messages: list[Message], index: int, begun: str = "") -> str:
        message = messages[index]
        body = text_only(message, type(self).__name__)
        if message.role == "ipython":
            follows = index > 0 and messages[index - 1].role == "ipython"
            precedes = index + 1 < len(messages) and messages[index + 1].role == "ipython"
            before = "\n" if follows else f"{IM_START}user\n"
            after = "" if precedes else f"{IM_END}\n"
            return f"{before}<tool_response>\n{body}\n</tool_response>{after}"
        if message.role == "assistant" and message.ipython:
            body = f"<tool_call>\n{body}\n</tool_call>"
        return self._block(message.role, begun + body, is_open=self._stays_open(messages, index))


def qwen2_5_tokenizer(
    path: str,
    merges_file: str,
    special_tokens_path: str | None = None,
    max_seq_len: int | None = None,
    prompt_template: TemplateType | None = None,
    truncation_type: str = "right",
    **kwargs: Any,
) -> Qwen2_5Tokenizer:
    """Qwen 2.5's tokenizer.

    Args:
        path: ``vocab.json``.
        merges_file: ``merges.txt``.
        special_tokens_path: a ``tokenizer.json`` with special tokens that replace Qwen's.
        max_seq_len: longest row; ``None`` does not cut.
        prompt_template: dotted path of a template, or a mapping role -> [text before, text after].
        truncation_type: which end of a long row is kept: ``"right"`` cuts the end, ``"left"`` the beginning.
        **kwargs: further arguments of :class:`Qwen2_5Tokenizer`.

    Raises:
        DataError: a file is missing or broken.
    """
    arguments = tokenizer_arguments(
        QWEN2_5_SPECIAL_TOKENS, path, merges_file, special_tokens_path, max_seq_len, prompt_template, truncation_type
    )
    return Qwen2_5Tokenizer(**arguments, **kwargs)

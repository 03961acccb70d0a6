"""Tokenizer of gpt-oss (Harmony format with channels)."""

from collections.abc import Mapping
from datetime import date
from functools import partial
from pathlib import Path

from torchtune.data import PromptTemplateInterface
from torchtune.models._tokenizer_builders import tokenizer_builder
from torchtune.tokenizers import (
    O200K_PATTERN,
    HarmonyTokenizer,
    HuggingFaceBaseTokenizer,
    TikTokenBaseTokenizer,
    parse_hf_tokenizer_json,
)

_NAMED = {
    199998: "<|startoftext|>",
    199999: "<|endoftext|>",
    200002: "<|return|>",
    200003: "<|constrain|>",
    200005: "<|channel|>",
    200006: "<|start|>",
    200007: "<|end|>",
    200008: "<|message|>",
    200012: "<|call|>",
    200018: "<|endofprompt|>",
}
GPT_OSS_SPECIAL_TOKENS = {_NAMED.get(i, f"<|reserved_{i}|>"): i for i in range(199998, 201088)}
_SYSTEM = (
    "You are ChatGPT, a large language model trained by OpenAI.\nKnowledge cutoff: 2024-06\nCurrent date: {}\n\n"
    "Reasoning: {}\n\n# Valid channels: analysis, commentary, final. Channel must be included for every message."
)


class GptOssTokenizer(HarmonyTokenizer):
    """Harmony tokenizer with gpt-oss's vocabulary and system message.

    Args:
        path: path of ``tokenizer.json``, or of tiktoken's rank file ``o200k_base.tiktoken``.
        special_tokens: text -> id; by default from ``tokenizer.json``, or gpt-oss's.
        max_seq_len: maximum number of tokens; ``None``: no truncation.
        prompt_template: adds texts to the messages before they are formatted.
        truncation_type: ``"right"`` cuts the end of a long row, ``"left"`` the beginning.
        reasoning_effort: ``"low"``, ``"medium"`` or ``"high"``, for the system message.
        current_date: date for the system message, such as ``"2025-06-28"``; by default today.

    Raises:
        DataError: the file is missing or broken, or a required special token is missing.
    """

    def __init__(
        self,
        path: str,
        special_tokens: Mapping[str, int] | None = None,
        max_seq_len: int | None = None,
        prompt_template: PromptTemplateInterface | None = None,
        truncation_type: str = "right",
        reasoning_effort: str = "medium",
        current_date: str | None = None,
    ) -> None:
        is_json = Path(path).suffix == ".json"
        if special_tokens is None:
            special_tokens = parse_hf_tokenizer_json(path) if is_json else GPT_OSS_SPECIAL_TOKENS
        base: HuggingFaceBaseTokenizer | TikTokenBaseTokenizer
        if is_json:
            base = HuggingFaceBaseTokenizer(path)
            base.tokenizer.encode_special_tokens = True  # special tokens in a message are plain text
            decode = partial(base.decode, skip_special_tokens=False)
        else:
            base = TikTokenBaseTokenizer(path, "o200k_harmony", O200K_PATTERN, 0, 0, special_tokens)
            decode = partial(base.decode, truncate_at_eos=False)
        day = date.today().isoformat() if current_date is None else current_date
        system = _SYSTEM.format(day, reasoning_effort)
        super().__init__(base, decode, special_tokens, system, max_seq_len, prompt_template, truncation_type)


gpt_oss_tokenizer = tokenizer_builder(GptOssTokenizer, "gpt_oss_tokenizer", "gpt-oss")

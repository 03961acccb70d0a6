"""The tokenizer of gpt-oss (Harmony layout with channels)."""

from collections.abc import Mapping
from datetime import date
from functools import partial
from pathlib import Path

from torchtune.data import PromptTemplateInterface
from torchtune.data._prompt_templates import TemplateType, get_prompt_template
from torchtune.modules.transforms.tokenizers import (
    HuggingFaceBaseTokenizer,
    TikTokenBaseTokenizer,
    parse_hf_tokenizer_json,
)
from torchtune.modules.transforms.tokenizers._harmony import HarmonyTokenizer
from torchtune.modules.transforms.tokenizers._patterns import O200K_PATTERN

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
    """The layout Harmony with gpt-oss's vocabulary and system message.

    Args:
        path: ``tokenizer.json``, or tiktoken's file of ranks, ``o200k_base.tiktoken``.
        special_tokens: text -> id; by default gpt-oss's, or those of ``tokenizer.json``.
        max_seq_len: longest row; ``None`` does not cut.
        prompt_template: texts added to the turns before the layout.
        truncation_type: which end of a long row is kept: ``"right"`` cuts the end, ``"left"`` the beginning.
        reasoning_effort: ``"low"``, ``"medium"`` or ``"high"``, as the system message says it.
        current_date: as the system message says it, ``"2025-06-28"``; by default today's.

    Raises:
        DataError: the file is missing or broken, or a special token that the layout needs is missing.
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
            base.tokenizer.encode_special_tokens = True  # those in a text are plain text
            decode = partial(base.decode, skip_special_tokens=False)
        else:
            base = TikTokenBaseTokenizer(path, "o200k_harmony", O200K_PATTERN, 0, 0, special_tokens)
            decode = partial(base.decode, truncate_at_eos=False)
        day = date.today().isoformat() if current_date is None else current_date
        system = _SYSTEM.format(day, reasoning_effort)
        super().__init__(base, decode, special_tokens, system, max_seq_len, prompt_template, truncation_type)


def gpt_oss_tokenizer(
    path: str,
    special_tokens_path: str | None = None,
    max_seq_len: int | None = None,
    prompt_template: TemplateType | None = None,
    truncation_type: str = "right",
    reasoning_effort: str = "medium",
    current_date: str | None = None,
) -> GptOssTokenizer:
    """The tokenizer of gpt-oss.

    Args:
        path: ``tokenizer.json``, or tiktoken's file of ranks, ``o200k_base.tiktoken``.
        special_tokens_path: a ``tokenizer.json`` with special tokens that replace gpt-oss's.
        max_seq_len: longest row; ``None`` does not cut.
        prompt_template: dotted path of a template, or a mapping role -> [text before, text after].
        truncation_type: which end of a long row is kept: ``"right"`` cuts the end, ``"left"`` the beginning.
        reasoning_effort: ``"low"``, ``"medium"`` or ``"high"``, as the system message says it.
        current_date: as the system message says it, ``"2025-06-28"``; by default today's.

    Raises:
        DataError: a file is missing or broken.
    """
    return GptOssTokenizer(
        path,
        special_tokens=parse_hf_tokenizer_json(special_tokens_path) if special_tokens_path is not None else None,
        max_seq_len=max_seq_len,
        prompt_template=get_prompt_template(prompt_template),
        truncation_type=truncation_type,
        reasoning_effort=reasoning_effort,
        current_date=current_date,
    )

"""Qwen 2's tokenizer."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torchtune.data import DataError, PromptTemplateInterface
from torchtune.data._prompt_templates import TemplateType, get_prompt_template
from torchtune.modules.transforms.tokenizers import parse_hf_tokenizer_json
from torchtune.modules.transforms.tokenizers._chatml_turns import IM_END, IM_START, ChatMLTurns

PRETOKENIZE_REGEX = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
ENDOFTEXT = "<|endoftext|>"
QWEN2_SPECIAL_TOKENS = {ENDOFTEXT: 151643, IM_START: 151644, IM_END: 151645}
DEFAULT_QWEN2_TOKENIZER_BPE_CACHE_SIZE = 152064


class Qwen2Tokenizer(ChatMLTurns):
    """Byte-level BPE with Qwen 2's layout of conversations.

    Control tokens (``<|…|>``) in the text of a turn are encoded as plain text unless ``parse_special_tokens`` is True.
    Tags such as ``<think>`` are always encoded as special tokens.

    Args:
        path: ``vocab.json``.
        merges_file: ``merges.txt``.
        special_tokens: text -> id.
        max_seq_len: longest row; ``None`` does not cut.
        prompt_template: texts added to the turns before the layout.
        errors: accepted for compatibility; invalid bytes decode to the replacement character.
        unk_token: the unknown token, which byte-level BPE never uses.
        bos_token: the beginning-of-sequence token, or None.
        eos_token: the end-of-sequence token.
        pad_token: the padding token.
        bpe_cache_size: accepted for compatibility.
        truncation_type: which end of a long row is kept: ``"right"`` cuts the end, ``"left"`` the beginning.
        parse_special_tokens: control tokens in the text of a turn become their ids.

    Raises:
        DataError: a file is missing or broken, or ``special_tokens`` lacks one of the tokens above.
    """

    def __init__(
        self,
        path: str,
        merges_file: str,
        special_tokens: Mapping[str, int] = QWEN2_SPECIAL_TOKENS,
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
        if unk_token is not None and unk_token not in special_tokens:
            raise DataError(f"special_tokens lacks {unk_token}.")
        super().__init__(
            path,
            merges_file,
            special_tokens,
            pattern=PRETOKENIZE_REGEX,
            bos_token=bos_token,
            eos_token=eos_token,
            pad_token=pad_token,
            max_seq_len=max_seq_len,
            prompt_template=prompt_template,
            truncation_type=truncation_type,
            parse_special_tokens=parse_special_tokens,
        )


def tokenizer_arguments(
    default_special_tokens: Mapping[str, int],
    path: str,
    merges_file: str | None,
    special_tokens_path: str | None,
    max_seq_len: int | None,
    prompt_template: TemplateType | None,
    truncation_type: str,
) -> dict[str, Any]:
    """Convert the settings of a Qwen tokenizer's builder to the arguments of the tokenizer class."""
    return {
        "path": path,
        "merges_file": merges_file or str(Path(path).expanduser().with_name("merges.txt")),
        "special_tokens": (
            parse_hf_tokenizer_json(special_tokens_path) if special_tokens_path is not None else default_special_tokens
        ),
        "max_seq_len": max_seq_len,
        "prompt_template": get_prompt_template(prompt_template),
        "truncation_type": truncation_type,
    }


def qwen2_tokenizer(
    path: str,
    merges_file: str | None = None,
    special_tokens_path: str | None = None,
    max_seq_len: int | None = None,
    prompt_template: TemplateType | None = None,
    truncation_type: str = "right",
    **kwargs: Any,
) -> Qwen2Tokenizer:
    """Qwen 2's tokenizer.

    Args:
        path: ``vocab.json``.
        merges_file: ``merges.txt``; by default the one beside ``path``.
        special_tokens_path: a ``tokenizer.json`` with special tokens that replace Qwen's.
        max_seq_len: longest row; ``None`` does not cut.
        prompt_template: dotted path of a template, or a mapping role -> [text before, text after].
        truncation_type: which end of a long row is kept: ``"right"`` cuts the end, ``"left"`` the beginning.
        **kwargs: further arguments of :class:`Qwen2Tokenizer`.

    Raises:
        DataError: a file is missing or broken.
    """
    arguments = tokenizer_arguments(
        QWEN2_SPECIAL_TOKENS, path, merges_file, special_tokens_path, max_seq_len, prompt_template, truncation_type
    )
    return Qwen2Tokenizer(**arguments, **kwargs)

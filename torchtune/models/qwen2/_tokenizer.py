"""Qwen 2's tokenizer."""

from collections.abc import Mapping
from pathlib import Path

from torchtune.data import DataError, PromptTemplateInterface
from torchtune.models._tokenizer_builders import tokenizer_builder
from torchtune.tokenizers import IM_END, IM_START, ChatMLTurns

PRETOKENIZE_REGEX = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
ENDOFTEXT = "<|endoftext|>"
QWEN2_SPECIAL_TOKENS = {ENDOFTEXT: 151643, IM_START: 151644, IM_END: 151645}
DEFAULT_QWEN2_TOKENIZER_BPE_CACHE_SIZE = 152064


class Qwen2Tokenizer(ChatMLTurns):
    """Byte-level BPE with Qwen 2's chat format.

    Control tokens (``<|…|>``) in a message are encoded as plain text unless ``parse_special_tokens`` is True.
    Tags such as ``<think>`` are always encoded as special tokens.

    Args:
        path: path of ``vocab.json``.
        merges_file: path of ``merges.txt``; ``None``: in the folder of ``path``.
        special_tokens: text -> id.
        max_seq_len: maximum number of tokens; ``None``: no truncation.
        prompt_template: adds texts to the messages before they are formatted.
        errors: accepted for compatibility; invalid bytes decode to the replacement character.
        unk_token: the unknown token, which byte-level BPE never uses.
        bos_token: the beginning-of-sequence token, or None.
        eos_token: the end-of-sequence token.
        pad_token: the padding token.
        bpe_cache_size: accepted for compatibility.
        truncation_type: ``"right"`` cuts the end of a long row, ``"left"`` the beginning.
        parse_special_tokens: encode control tokens in a message as their ids.

    Raises:
        DataError: a file is missing or broken, or one of the tokens above is not in ``special_tokens``.
    """

    def __init__(
        self,
        path: str,
        merges_file: str | None,
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
            merges_file or str(Path(path).expanduser().with_name("merges.txt")),
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


qwen2_tokenizer = tokenizer_builder(Qwen2Tokenizer, "qwen2_tokenizer", "Qwen 2", merges_file=None)

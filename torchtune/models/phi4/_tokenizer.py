"""Phi-4's tokenizer."""

from collections.abc import Mapping

from torchtune.data import PromptTemplateInterface
from torchtune.data._prompt_templates import TemplateType, get_prompt_template
from torchtune.modules.transforms.tokenizers import parse_hf_tokenizer_json
from torchtune.modules.transforms.tokenizers._byte_level_bpe import ByteLevelBPE
from torchtune.modules.transforms.tokenizers._marked_turns import MarkedTurnsTokenizer, required_ids
from torchtune.modules.transforms.tokenizers._patterns import CL100K_PATTERN

# The vocabulary, the ids of these tokens and the split pattern are tiktoken's cl100k_base.
_NAMED = {
    100257: "<|endoftext|>",
    100258: "<|fim_prefix|>",
    100259: "<|fim_middle|>",
    100260: "<|fim_suffix|>",
    100264: "<|im_start|>",
    100265: "<|im_end|>",
    100266: "<|im_sep|>",
    100276: "<|endofprompt|>",
}
_DUMMIES = [token_id for token_id in range(100256, 100352) if token_id not in _NAMED]
PHI4_SPECIAL_TOKENS = {
    **{token: token_id for token_id, token in _NAMED.items()},
    **{f"<|dummy_{i}|>": token_id for i, token_id in enumerate(_DUMMIES)},
}


class Phi4Tokenizer(MarkedTurnsTokenizer):
    """Byte-level BPE with Phi-4's layout, ``<|im_start|>{role}<|im_sep|>{text}<|im_end|>`` for every turn.

    Args:
        merges_path: ``merges.txt``.
        vocab_path: ``vocab.json``.
        special_tokens: text -> id; by default Phi-4's.
        max_seq_len: longest row; ``None`` does not cut.
        prompt_template: texts added to the turns before the layout.
        truncation_type: which end of a long row is kept: ``"right"`` cuts the end, ``"left"`` the beginning.

    Raises:
        DataError: a file is missing or broken, or a special token that the layout needs is missing.
    """

    def __init__(
        self,
        merges_path: str,
        vocab_path: str,
        special_tokens: Mapping[str, int] | None = None,
        max_seq_len: int | None = None,
        prompt_template: PromptTemplateInterface | None = None,
        truncation_type: str = "right",
    ) -> None:
        self.special_tokens = dict(special_tokens if special_tokens is not None else PHI4_SPECIAL_TOKENS)
        names = ("<|endoftext|>", "<|im_start|>", "<|im_sep|>", "<|im_end|>")
        self.bos_id, self._start_id, self._separator_id, self.eos_id = required_ids(self.special_tokens, names, "Phi-4")
        self.pad_id = self.special_tokens.get("<|dummy_85|>", self.bos_id)
        self.stop_tokens = [self.eos_id]
        self._bpe = ByteLevelBPE(
            vocab_path, merges_path, pattern=CL100K_PATTERN, special_tokens=self.special_tokens, nfc=False
        )
        self.max_seq_len = max_seq_len
        self.prompt_template = prompt_template
        self.truncation_type = truncation_type

    @property
    def vocab_size(self) -> int:
        """One more than the largest id."""
        return self._bpe.vocab_size

    def encode(self, text: str, add_bos: bool = True, add_eos: bool = True) -> list[int]:
        """Token ids of ``text``; special tokens in it are encoded as plain text."""
        ids = self.body(text)
        return [*([self.bos_id] if add_bos else []), *ids, *([self.eos_id] if add_eos else [])]

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        """Text of token ids, without special tokens unless they are asked for."""
        return self._bpe.decode(ids, skip_special_tokens=skip_special_tokens)

    def header(self, role: str) -> list[int]:
        """``<|im_start|>{role}<|im_sep|>``."""
        return [self._start_id, *self.body(role), self._separator_id]

    def body(self, text: str) -> list[int]:
        """Token ids of ``text``."""
        return self._bpe.encode(text, parse_special=False)

    def turn_end(self) -> list[int]:
        """``<|im_end|>``."""
        return [self.eos_id]


def phi4_tokenizer(
    vocab_path: str,
    merges_path: str,
    special_tokens_path: str | None = None,
    max_seq_len: int | None = None,
    prompt_template: TemplateType | None = None,
    truncation_type: str = "right",
) -> Phi4Tokenizer:
    """Phi-4's tokenizer.

    Args:
        vocab_path: ``vocab.json``.
        merges_path: ``merges.txt``.
        special_tokens_path: a ``tokenizer.json`` with special tokens that replace Phi-4's.
        max_seq_len: longest row; ``None`` does not cut.
        prompt_template: dotted path of a template, or a mapping role -> [text before, text after].
        truncation_type: which end of a long row is kept: ``"right"`` cuts the end, ``"left"`` the beginning.

    Raises:
        DataError: a file is missing or broken.
    """
    return Phi4Tokenizer(
        merges_path,
        vocab_path,
        special_tokens=parse_hf_tokenizer_json(special_tokens_path) if special_tokens_path is not None else None,
        max_seq_len=max_seq_len,
        prompt_template=get_prompt_template(prompt_template),
        truncation_type=truncation_type,
    )

"""Phi-4.

Phi-3's architecture with another tokenizer (https://arxiv.org/abs/2412.08905).
"""

from collections.abc import Mapping
from dataclasses import replace

from torchtune._lazy import former_package
from torchtune.data import PromptTemplateInterface
from torchtune.models._builders import model_builders
from torchtune.models._tokenizer_builder import tokenizer_builder
from torchtune.models.phi3 import FORMAT
from torchtune.models.phi3 import SPEC as PHI3_SPEC
from torchtune.tokenizers import (
    CL100K_PATTERN,
    ByteLevelBPE,
    MarkedTurnsTokenizer,
    PublishedFiles,
    required_ids,
)

SPEC = replace(PHI3_SPEC, name="phi4", model_types=("PHI4", "PHI3_MINI"))

SIZES = {
    "phi4_14b": FORMAT.describe(
        vocab_size=100_352,
        num_layers=40,
        embed_dim=5120,
        intermediate_dim=17_920,
        max_seq_len=16_384,
        num_heads=40,
        num_kv_heads=10,
        rope_base=250_000.0,
    ),
}
BUILDERS = model_builders(__name__, "Phi-4", SPEC, SIZES)
phi4_14b = BUILDERS["phi4_14b"]
lora_phi4_14b = BUILDERS["lora_phi4_14b"]
qlora_phi4_14b = BUILDERS["qlora_phi4_14b"]


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
    """Byte-level BPE with Phi-4's chat format, ``<|im_start|>{role}<|im_sep|>{text}<|im_end|>`` for every turn.

    Args:
        merges_path: path of ``merges.txt``.
        vocab_path: path of ``vocab.json``.
        special_tokens: text -> id; by default Phi-4's.
        max_seq_len: maximum number of tokens; ``None``: no truncation.
        prompt_template: adds texts to the messages before they are formatted.
        truncation_type: ``"right"`` cuts the end of a long row, ``"left"`` the beginning.

    Raises:
        DataError: a file is missing or broken, or a required special token is missing.
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
        super().__init__(max_seq_len, prompt_template, truncation_type)
        self.published = PublishedFiles(vocab_path)
        self.special_tokens = dict(special_tokens if special_tokens is not None else PHI4_SPECIAL_TOKENS)
        names = ("<|endoftext|>", "<|im_start|>", "<|im_sep|>", "<|im_end|>")
        self.bos_id, self._start_id, self._separator_id, self.eos_id = required_ids(self.special_tokens, names, "Phi-4")
        self.pad_id = self.special_tokens.get("<|dummy_85|>", self.bos_id)
        self.stop_tokens = [self.eos_id]
        self._bpe = ByteLevelBPE(
            vocab_path, merges_path, pattern=CL100K_PATTERN, special_tokens=self.special_tokens, nfc=False
        )

    @property
    def vocab_size(self) -> int:
        """Largest token id plus 1."""
        return self._bpe.vocab_size

    def encode(self, text: str, add_bos: bool = True, add_eos: bool = True) -> list[int]:
        """Encode ``text`` to token ids; special tokens in it are encoded as plain text."""
        ids = self.body(text)
        if add_bos:
            ids = [self.bos_id, *ids]
        if add_eos:
            ids = [*ids, self.eos_id]
        return ids

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        """Decode token ids to text, by default without special tokens."""
        return self._bpe.decode(ids, skip_special_tokens=skip_special_tokens)

    def header(self, role: str) -> list[int]:
        """Return ``<|im_start|>{role}<|im_sep|>``."""
        return [self._start_id, *self.body(role), self._separator_id]

    def body(self, text: str) -> list[int]:
        """Encode ``text``."""
        return self._bpe.encode(text, parse_special=False)

    def turn_end(self) -> list[int]:
        """Return ``<|im_end|>``."""
        return [self.eos_id]


phi4_tokenizer = tokenizer_builder(Phi4Tokenizer, "phi4_tokenizer", "Phi-4", first="vocab_path")

__all__ = ["SPEC", *BUILDERS, "Phi4Tokenizer", "phi4_tokenizer"]
__getattr__, __path__ = former_package(__name__)

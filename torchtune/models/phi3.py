"""Phi-3.

Llama's architecture (https://arxiv.org/abs/2404.14219), but files hold queries, keys and values in one matrix, and gate
and up projections in another.
"""

from collections.abc import Mapping

from torch import Tensor

from torchtune._lazy import former_package
from torchtune.data import PromptTemplateInterface
from torchtune.models._builders import component_builders, model_builders
from torchtune.models._hf_config import HFFormat
from torchtune.models._spec import family
from torchtune.models._tokenizer_builder import tokenizer_builder
from torchtune.models._weight_map import Identity
from torchtune.models._weight_names import hf_names
from torchtune.models.convert_weights import convert_by, describe_state_dict
from torchtune.modules.position_embeddings import RotaryPositionalEmbeddings
from torchtune.tokenizers import MarkedTurnsTokenizer, PublishedFiles, SentencePieceBaseTokenizer, required_ids

FORMAT = HFFormat(
    "Phi3ForCausalLM",
    "phi3",
    "half",
    windows="sliding_window",
    ropes=("partial",),
    unused=("full_attn_mod", "interpolate_factor"),  # in files of Phi-4 mini
    defaults={
        "max_position_embeddings": 4096,
        "original_max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
    },
)
SPEC = family("phi3", FORMAT, hf_names(Identity(), fused=("qkv", "gate_up")), model_types=("PHI3_MINI", "PHI4"))

SIZES = {
    "phi3_mini": FORMAT.describe(
        vocab_size=32_064,
        num_layers=32,
        embed_dim=3072,
        intermediate_dim=8192,
        max_seq_len=4096,
        num_heads=32,
        num_kv_heads=32,
        window=2047,  # as published; the context is 4096
        window_layers=tuple(range(32)),
    ),
}
BUILDERS = model_builders(__name__, "Phi-3", SPEC, SIZES)
phi3_mini = BUILDERS["phi3_mini"]
lora_phi3_mini = BUILDERS["lora_phi3_mini"]
qlora_phi3_mini = BUILDERS["qlora_phi3_mini"]

COMPONENTS = component_builders(
    __name__,
    "phi3",
    "Phi-3",
    SPEC,
    FORMAT.describe,
    ("vocab_size", "num_layers", "num_heads", "num_kv_heads", "embed_dim", "intermediate_dim", "max_seq_len"),
    attn_dropout=0.0,
    norm_eps=1e-5,
    rope_base=10_000,
)
phi3 = COMPONENTS["phi3"]
lora_phi3 = COMPONENTS["lora_phi3"]


PHI3_SPECIAL_TOKENS = {
    "<|endoftext|>": 32000,
    "<|assistant|>": 32001,
    "<|placeholder1|>": 32002,
    "<|placeholder2|>": 32003,
    "<|placeholder3|>": 32004,
    "<|placeholder4|>": 32005,
    "<|system|>": 32006,
    "<|end|>": 32007,
    "<|placeholder5|>": 32008,
    "<|placeholder6|>": 32009,
    "<|user|>": 32010,
}


class Phi3MiniTokenizer(MarkedTurnsTokenizer):
    """SentencePiece tokenizer with Phi-3's chat format, ``<|user|>\\n{text}<|end|>\\n`` for every turn.

    Args:
        path: path of ``tokenizer.model``.
        special_tokens: text -> id; by default Phi-3's.
        max_seq_len: maximum number of tokens; ``None``: no truncation.
        prompt_template: adds texts to the messages before they are formatted.
        truncation_type: ``"right"`` cuts the end of a long row, ``"left"`` the beginning.

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
    ) -> None:
        super().__init__(max_seq_len, prompt_template, truncation_type)
        self.published = PublishedFiles(path)
        self.special_tokens = dict(special_tokens if special_tokens is not None else PHI3_SPECIAL_TOKENS)
        names = ("<|endoftext|>", "<|end|>", *(f"<|{role}|>" for role in self.roles))
        self.eos_id, self.end_id, *headers = required_ids(self.special_tokens, names, "Phi-3")
        self._headers = dict(zip(self.roles, headers, strict=True))
        self._special_texts = {token_id: token for token, token_id in self.special_tokens.items()}
        self._spm_model = SentencePieceBaseTokenizer(path)
        self.bos_id = self._spm_model.bos_id
        self.pad_id = self.eos_id
        self.stop_tokens = [self.eos_id, self.end_id]

    @property
    def vocab_size(self) -> int:
        """Largest token id plus 1."""
        return max(self._spm_model.vocab_size - 1, *self.special_tokens.values()) + 1

    def encode(
        self, text: str, add_bos: bool = True, add_eos: bool = True, trim_leading_whitespace: bool = False
    ) -> list[int]:
        """Encode ``text`` to token ids; special tokens in it are encoded as plain text."""
        ids = self._spm_model.encode(
            text, add_bos=add_bos, add_eos=False, trim_leading_whitespace=trim_leading_whitespace
        )
        return [*ids, self.eos_id] if add_eos else ids

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        """Decode token ids to text, by default without special tokens."""
        texts: list[str] = []
        plain: list[int] = []
        for token_id in ids:
            if token_id < self._spm_model.vocab_size:
                plain.append(token_id)
            elif not skip_special_tokens and token_id in self._special_texts:
                texts += [self._spm_model.decode(plain), self._special_texts[token_id]]
                plain = []
        return "".join([*texts, self._spm_model.decode(plain)])

    def opening(self) -> list[int]:
        """Return the beginning-of-sequence token."""
        return [self.bos_id]

    def header(self, role: str) -> list[int]:
        """Return ``<|role|>``; the newline after it is encoded with the text."""
        return [self._headers[role]]

    def body(self, text: str) -> list[int]:
        """Encode a newline and ``text`` as the continuation of a special token."""
        return self.encode(f"\n{text}", add_bos=False, add_eos=False, trim_leading_whitespace=True)

    def turn_end(self) -> list[int]:
        """Return ``<|end|>`` and a newline."""
        return [self.end_id, *self.body("")]

    def closing(self) -> list[int]:
        """Return ``<|endoftext|>``."""
        return [self.eos_id]


phi3_mini_tokenizer = tokenizer_builder(Phi3MiniTokenizer, "phi3_mini_tokenizer", "Phi-3 mini")


class Phi3RotaryPositionalEmbeddings(RotaryPositionalEmbeddings):
    """Rotary embeddings that rotate pairs of channels half a head apart.

    Args:
        dim: h, channels of a head.
        max_seq_len: informational.
        base: base (theta) of the frequencies.
    """

    def __init__(self, dim: int, max_seq_len: int = 4096, base: float = 10_000) -> None:
        super().__init__(dim, max_seq_len, base, layout="half")


def phi3_hf_to_tune(
    state_dict: dict[str, Tensor],
    num_heads: int | None = None,
    num_kv_heads: int | None = None,
    dim: int | None = None,
) -> dict[str, Tensor]:
    """Convert weights from Hugging Face names to ours, splitting fused projections.

    Args:
        state_dict: state dict with Hugging Face names.
        num_heads: number of query heads; by default queries, keys and values have equal sizes.
        num_kv_heads: number of key and value heads; by default ``num_heads``.
        dim: width of the residual stream; by default that of the weights.
    """
    num_heads = num_heads or 1  # one head as wide as the model, for queries, keys and values of equal sizes
    embed_dim = dim or 4096
    intermediate_dim = 1  # of a state dict without feed-forward layers
    # The conversion splits fused projections by these sizes, which all layers share.
    for name, tensor in state_dict.items():
        if name.endswith("gate_up_proj.weight"):  # [2 * intermediate_dim, embed_dim]
            intermediate_dim = tensor.shape[0] // 2
            embed_dim = dim or tensor.shape[1]
            break
    description = describe_state_dict(
        state_dict,
        num_heads,
        num_kv_heads or num_heads,
        embed_dim,
        intermediate_dim=intermediate_dim,
        biases=False,
    )
    return convert_by(SPEC.weight_map(), state_dict, description, to_tune=True)


def phi3_tune_to_hf(state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
    """Convert weights from our names to Hugging Face names; the inverse of :func:`phi3_hf_to_tune`."""
    description = describe_state_dict(state_dict, 1, 1, 2, biases=False)
    return convert_by(SPEC.weight_map(), state_dict, description, to_tune=False)


__all__ = [
    "SPEC",
    *BUILDERS,
    *COMPONENTS,
    "Phi3MiniTokenizer",
    "Phi3RotaryPositionalEmbeddings",
    "phi3_hf_to_tune",
    "phi3_mini_tokenizer",
    "phi3_tune_to_hf",
]
__getattr__, __path__ = former_package(__name__)

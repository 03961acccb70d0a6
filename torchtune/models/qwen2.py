"""Qwen 2.

Llama's architecture with biases of queries, keys and values, and a larger RoPE base (https://arxiv.org/abs/2407.10671).
"""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from torchtune._lazy import former_package
from torchtune.data import DataError, PromptTemplateInterface
from torchtune.models._builders import Builder, component_builders, model_builders
from torchtune.models._description import Description, ModelError
from torchtune.models._hf_config import QWEN2
from torchtune.models._spec import ModelSpec, family
from torchtune.models._tokenizer_builder import tokenizer_builder
from torchtune.models._weight_names import GGUF, HF_HALF
from torchtune.models.convert_weights import convert_by, describe_state_dict
from torchtune.modules.position_embeddings import RotaryPositionalEmbeddings
from torchtune.tokenizers import IM_END, IM_START, ChatMLTurns

SPEC = family("qwen2", QWEN2, HF_HALF, formats={"gguf": GGUF}, model_types=("QWEN2",))

qwen2_size = partial(
    QWEN2.describe,
    vocab_size=151_936,
    max_seq_len=32_768,
    rope_base=1_000_000.0,
    norm_eps=1e-6,
)

SIZES = {
    "qwen2_0_5b": qwen2_size(
        num_layers=24, embed_dim=896, intermediate_dim=4864, num_heads=14, num_kv_heads=2, tie_word_embeddings=True
    ),
    "qwen2_1_5b": qwen2_size(
        num_layers=28, embed_dim=1536, intermediate_dim=8960, num_heads=12, num_kv_heads=2, tie_word_embeddings=True
    ),
    "qwen2_7b": qwen2_size(
        vocab_size=152_064, num_layers=28, embed_dim=3584, intermediate_dim=18_944, num_heads=28, num_kv_heads=4
    ),
}
BUILDERS = model_builders(__name__, "Qwen2", SPEC, SIZES)
qwen2_0_5b = BUILDERS["qwen2_0_5b"]
lora_qwen2_0_5b = BUILDERS["lora_qwen2_0_5b"]
qlora_qwen2_0_5b = BUILDERS["qlora_qwen2_0_5b"]
qwen2_1_5b = BUILDERS["qwen2_1_5b"]
lora_qwen2_1_5b = BUILDERS["lora_qwen2_1_5b"]
qlora_qwen2_1_5b = BUILDERS["qlora_qwen2_1_5b"]
qwen2_7b = BUILDERS["qwen2_7b"]
lora_qwen2_7b = BUILDERS["lora_qwen2_7b"]
qlora_qwen2_7b = BUILDERS["qlora_qwen2_7b"]


def _describe(
    head_dim: int | None,
    q_proj_bias: bool,
    k_proj_bias: bool,
    v_proj_bias: bool,
    q_norm: bool,
    k_norm: bool,
    *,
    qk_norm: str,
    **sizes: Any,
) -> Description:
    """Make a description from the arguments of the component builders; ``qk_norm`` is the kind of norms, if any."""
    if q_norm != k_norm:
        raise ModelError("q_norm and k_norm must be given together.")
    if not q_norm:
        qk_norm = "none"
    return QWEN2.describe(
        **sizes,
        head_dim=head_dim or 0,
        q_bias=q_proj_bias,
        k_bias=k_proj_bias,
        v_bias=v_proj_bias,
        qk_norm=qk_norm,
    )


def qwen_components(module: str, name: str, title: str, spec: ModelSpec, qk_norm: str) -> dict[str, Builder]:
    """Make the component builders of a Qwen family.

    Args:
        module: ``__name__`` of the module that exports them.
        name: name of the plain builder; the one with adapters is ``lora_<name>``.
        title: name of the family in docstrings.
        spec: the model family.
        qk_norm: value of ``Description.qk_norm`` if queries and keys have norms.
    """
    return component_builders(
        module,
        name,
        title,
        spec,
        partial(_describe, qk_norm=qk_norm),
        required=(
            "vocab_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "embed_dim",
            "intermediate_dim",
            "max_seq_len",
        ),
        head_dim=None,
        attn_dropout=0.0,
        norm_eps=1e-5,
        rope_base=1_000_000.0,
        tie_word_embeddings=False,
        q_proj_bias=True,
        k_proj_bias=True,
        v_proj_bias=True,
        q_norm=False,
        k_norm=False,
    )


COMPONENTS = qwen_components(__name__, "qwen2", "Qwen 2", SPEC, "after_rope")
qwen2 = COMPONENTS["qwen2"]
lora_qwen2 = COMPONENTS["lora_qwen2"]


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


class Qwen2RotaryPositionalEmbeddings(RotaryPositionalEmbeddings):
    """Rotary embeddings that rotate pairs of channels half a head apart.

    Args:
        dim: h, channels of a head.
        max_seq_len: informational.
        base: base (theta) of the frequencies.
    """

    def __init__(self, dim: int, max_seq_len: int = 4096, base: float = 1_000_000.0) -> None:
        super().__init__(dim, max_seq_len, base, layout="half")


QWEN2_TIED_KEY = "lm_head.weight"


def qwen2_hf_to_tune(
    state_dict: dict[str, Tensor],
    num_heads: int = 32,
    num_kv_heads: int = 32,
    dim: int = 4096,
    head_dim: int | None = None,
    tie_word_embeddings: bool = False,
) -> dict[str, Tensor]:
    """Convert weights from Hugging Face names to ours, without a tied ``lm_head.weight``."""
    description = describe_state_dict(state_dict, num_heads, num_kv_heads, dim, head_dim, tie_word_embeddings)
    return convert_by(HF_HALF, state_dict, description, to_tune=True)


def qwen2_tune_to_hf(
    state_dict: dict[str, Tensor],
    num_heads: int = 32,
    num_kv_heads: int = 32,
    dim: int = 4096,
    head_dim: int | None = None,
    tie_word_embeddings: bool = False,
) -> dict[str, Tensor]:
    """Convert weights from our names to Hugging Face names, without a tied ``lm_head.weight``."""
    description = describe_state_dict(state_dict, num_heads, num_kv_heads, dim, head_dim, tie_word_embeddings)
    return convert_by(HF_HALF, state_dict, description, to_tune=False)


__all__ = [
    "SPEC",
    *BUILDERS,
    *COMPONENTS,
    "Qwen2RotaryPositionalEmbeddings",
    "Qwen2Tokenizer",
    "qwen2_hf_to_tune",
    "qwen2_tokenizer",
    "qwen2_tune_to_hf",
]
__getattr__, __path__ = former_package(__name__)

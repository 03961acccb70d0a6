"""Sizes of Qwen 2."""

from functools import partial
from typing import Any

from torchtune._lazy import former_names
from torchtune.models._family import (
    GGUF,
    HF_HALF,
    QWEN2,
    Builder,
    Description,
    ModelError,
    ModelSpec,
    component_builders,
    family,
    model_builders,
)

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
    if q_norm != k_norm:
        raise ModelError("q_norm and k_norm must be given together.")
    return QWEN2.describe(
        **sizes,
        head_dim=head_dim or 0,
        q_bias=q_proj_bias,
        k_bias=k_proj_bias,
        v_bias=v_proj_bias,
        qk_norm=qk_norm if q_norm else "none",
    )


def qwen_components(module: str, name: str, title: str, spec: ModelSpec, qk_norm: str) -> dict[str, Builder]:
    """Make the component builders of a Qwen family.

    Args:
        module: ``__name__`` of the module that exports them.
        name: name of the first function.
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
        "vocab_size num_layers num_heads num_kv_heads embed_dim intermediate_dim max_seq_len",
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

__getattr__ = former_names(__name__)

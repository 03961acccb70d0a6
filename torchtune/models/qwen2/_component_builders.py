"""Component builders of Qwen 2."""

from functools import partial
from typing import Any

from torchtune.models._builders import Builder, component_builders
from torchtune.models._description import Description, ModelError
from torchtune.models._spec import ModelSpec
from torchtune.models.qwen2._model_builders import SPEC


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
    return Description(
        **sizes,
        head_dim=head_dim or 0,
        q_bias=q_proj_bias,
        k_bias=k_proj_bias,
        v_bias=v_proj_bias,
        qk_norm=qk_norm if q_norm else "none",
        rope_layout="half",
    )


def qwen_builders(name: str, module: str, title: str, spec: ModelSpec, qk_norm: str) -> tuple[Builder, Builder]:
    """Make the component builders of a Qwen family.

    Args:
        name: name of the first function.
        module: ``__name__`` of the module that exports them.
        title: name of the family in docstrings.
        spec: the model family.
        qk_norm: value of ``Description.qk_norm`` if queries and keys have norms.
    """
    return component_builders(
        name,
        module,
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


qwen2, lora_qwen2 = qwen_builders("qwen2", __name__, "Qwen 2", SPEC, "after_rope")

"""Qwen 2 from its numbers."""

from collections.abc import Callable

from torchtune.models._build import build
from torchtune.models._builders import dress, from_numbers, lora_builder
from torchtune.models._description import Description, ModelError
from torchtune.models._spec import ModelSpec
from torchtune.models.qwen2._model_builders import SPEC
from torchtune.modules.transformer import TransformerDecoder


def qwen_builder(
    name: str, module: str, title: str, spec: ModelSpec, qk_norm: str
) -> Callable[..., TransformerDecoder]:
    """The builder of a Qwen family from its numbers.

    Args:
        name: of the new function.
        module: ``__name__`` of the module that publishes it.
        title: name of the family in sentences.
        spec: the family.
        qk_norm: where queries and keys are normalised, if they are.
    """

    def builder(
        vocab_size: int,
        num_layers: int,
        num_heads: int,
        num_kv_heads: int,
        embed_dim: int,
        intermediate_dim: int,
        max_seq_len: int,
        head_dim: int | None = None,
        attn_dropout: float = 0.0,
        norm_eps: float = 1e-5,
        rope_base: float = 1_000_000.0,
        tie_word_embeddings: bool = False,
        q_proj_bias: bool = True,
        k_proj_bias: bool = True,
        v_proj_bias: bool = True,
        q_norm: bool = False,
        k_norm: bool = False,
    ) -> TransformerDecoder:
        if q_norm != k_norm:
            raise ModelError("q_norm and k_norm must be given together.")
        description = Description(
            vocab_size=vocab_size,
            num_layers=num_layers,
            embed_dim=embed_dim,
            intermediate_dim=intermediate_dim,
            max_seq_len=max_seq_len,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim or 0,
            attn_dropout=attn_dropout,
            q_bias=q_proj_bias,
            k_bias=k_proj_bias,
            v_bias=v_proj_bias,
            qk_norm=qk_norm if q_norm else "none",
            rope_base=rope_base,
            rope_layout="half",
            norm_eps=norm_eps,
            tie_word_embeddings=tie_word_embeddings,
        )
        return build(description, spec)

    raises = "Raises:\n        ModelError: only one of ``q_norm`` and ``k_norm``.\n    "
    doc = f"Build a decoder of the {title} family from its numbers.\n\n    {raises}"
    return from_numbers(dress(builder, name, module, doc))


qwen2 = qwen_builder("qwen2", __name__, "Qwen 2", SPEC, "after_rope")
lora_qwen2 = lora_builder(qwen2, "lora_qwen2", __name__, "a Qwen 2 decoder with LoRA adapters from its numbers")

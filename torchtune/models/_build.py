"""The one builder: a description in, a module out."""

from collections.abc import Callable
from functools import partial

from torch import nn

from torchtune.models._description import Description
from torchtune.models._spec import ModelSpec
from torchtune.modules.attention import MultiHeadAttention
from torchtune.modules.feed_forward import FeedForward
from torchtune.modules.position_embeddings import RotaryPositionalEmbeddings, ScaledRotaryPositionalEmbeddings
from torchtune.modules.rms_norm import RMSNorm
from torchtune.modules.tied_linear import TiedLinear
from torchtune.modules.transformer import TransformerDecoder, TransformerSelfAttentionLayer

_ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "silu": nn.SiLU,
    "gelu": nn.GELU,
    "gelu_tanh": partial(nn.GELU, approximate="tanh"),
}


def build(description: Description, spec: ModelSpec | None = None) -> TransformerDecoder:
    """Build a decoder, on the device and in the dtype that tensors are being made in.

    Under ``torch.device("meta")`` it costs nothing, and ``to_empty`` makes it real later: no state lies outside the
    parameters.

    Args:
        description: what to build.
        spec: the family that it belongs to; checkpoints and parallelism read it from the model.

    Returns:
        The model, with ``description`` and ``spec`` attached.
    """
    rope = _rope(description)
    embeddings = nn.Embedding(description.vocab_size, description.embed_dim)
    layers = nn.ModuleList([_layer(description, rope) for _ in range(description.num_layers)])
    if description.tie_word_embeddings:
        output = TiedLinear(embeddings)
    else:
        output = nn.Linear(description.embed_dim, description.vocab_size, bias=False)
    model = TransformerDecoder(
        tok_embeddings=embeddings,
        layers=layers,
        max_seq_len=description.max_seq_len,
        num_heads=description.num_heads,
        head_dim=description.head_dim,
        norm=RMSNorm(description.embed_dim, description.norm_eps),
        output=output,
    )
    model.description = description
    model.spec = spec
    return model


def _layer(d: Description, rope: nn.Module) -> TransformerSelfAttentionLayer:
    attn = MultiHeadAttention(
        embed_dim=d.embed_dim,
        num_heads=d.num_heads,
        num_kv_heads=d.num_kv_heads,
        head_dim=d.head_dim,
        q_proj=nn.Linear(d.embed_dim, d.q_dim, bias=d.q_bias),
        k_proj=nn.Linear(d.embed_dim, d.kv_dim, bias=d.k_bias),
        v_proj=nn.Linear(d.embed_dim, d.kv_dim, bias=d.v_bias),
        output_proj=nn.Linear(d.q_dim, d.embed_dim, bias=d.attn_output_bias),
        pos_embeddings=rope,
        q_norm=RMSNorm(d.head_dim, d.norm_eps) if d.has_qk_norm else None,
        k_norm=RMSNorm(d.head_dim, d.norm_eps) if d.has_qk_norm else None,
        qk_norm_before_rope=d.qk_norm == "before_rope",
        max_seq_len=d.max_seq_len,
        attn_dropout=d.attn_dropout,
    )
    mlp = FeedForward(
        gate_proj=nn.Linear(d.embed_dim, d.intermediate_dim, bias=d.mlp_bias),
        down_proj=nn.Linear(d.intermediate_dim, d.embed_dim, bias=d.mlp_bias),
        up_proj=nn.Linear(d.embed_dim, d.intermediate_dim, bias=d.mlp_bias),
        activation=_ACTIVATIONS[d.activation](),
    )
    return TransformerSelfAttentionLayer(
        attn, mlp, sa_norm=RMSNorm(d.embed_dim, d.norm_eps), mlp_norm=RMSNorm(d.embed_dim, d.norm_eps)
    )


def _rope(d: Description) -> RotaryPositionalEmbeddings:
    scaling = d.rope_scaling
    if scaling is None:
        return RotaryPositionalEmbeddings(d.head_dim, d.max_seq_len, d.rope_base, layout=d.rope_layout)
    return ScaledRotaryPositionalEmbeddings(
        d.head_dim,
        d.max_seq_len,
        d.rope_base,
        scale_factor=scaling.factor,
        low_freq_factor=scaling.low_freq_factor,
        high_freq_factor=scaling.high_freq_factor,
        old_context_len=scaling.original_max_seq_len,
        layout=d.rope_layout,
    )

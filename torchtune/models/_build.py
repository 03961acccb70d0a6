"""Build a model from its description."""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from torchtune.models._description import (
    Description,
    DynamicRopeScaling,
    LinearRopeScaling,
    Llama3RopeScaling,
    LongRopeScaling,
    ProportionalRopeScaling,
    YarnRopeScaling,
)
from torchtune.models._spec import ModelSpec
from torchtune.modules.attention import LatentAttention, MultiHeadAttention
from torchtune.modules.embeddings import LayerEmbedding, LayerEmbeddings
from torchtune.modules.feed_forward import FeedForward, SquaredReLU
from torchtune.modules.moe import ClampedExperts, GroupedExperts, MoE, TokenChoiceTopKRouter, UngatedExperts
from torchtune.modules.output_projection import CappedLinear, ClassifierHead, TiedLinear
from torchtune.modules.position_embeddings import (
    DynamicRotaryPositionalEmbeddings,
    LongRotaryPositionalEmbeddings,
    ProportionalRotaryPositionalEmbeddings,
    RotaryPositionalEmbeddings,
    ScaledRotaryPositionalEmbeddings,
    YarnRotaryPositionalEmbeddings,
)
from torchtune.modules.rms_norm import Multiplier, OutputScale, RMSNorm
from torchtune.modules.transformer import TransformerDecoder, TransformerSelfAttentionLayer

ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "silu": nn.SiLU,
    "gelu": nn.GELU,
    "gelu_tanh": partial(nn.GELU, approximate="tanh"),
    "relu2": SquaredReLU,
}


def build(description: Description, spec: ModelSpec | None = None) -> TransformerDecoder:
    """Build a decoder, or a family's composite model, on the default device and in the default dtype.

    Under ``torch.device("meta")`` no memory is allocated; call ``to_empty`` later. All state is in the parameters.

    Args:
        description: the description of the model.
        spec: the model family; checkpoints and parallelism read it from the model.

    Returns:
        The model, with ``description`` and ``spec`` attached.

    Example:
        >>> with torch.device("meta"):
        ...     same = torchtune.models.build(model.description, model.spec)
        >>> len(same.layers)
        2
    """
    if spec is not None and spec.builder is not None:  # of a composite model: a decoder with a vision tower
        return spec.builder(description, spec)
    return _build_decoder(description, spec)


def _build_decoder(d: Description, spec: ModelSpec | None) -> TransformerDecoder:
    rope, window_rope = _rotary_embeddings(d)  # the same two objects in all layers
    embeddings = nn.Embedding(d.vocab_size, d.embed_dim)
    # The order in which modules are built decides about their random weights.
    layers = nn.ModuleList([_layer(d, layer, rope, window_rope) for layer in range(d.num_layers)])
    output = _output(d, embeddings)
    layer_embeddings = None
    if d.layer_embed_dim:
        width = d.num_layers * d.layer_embed_dim
        layer_embeddings = LayerEmbeddings(
            embeddings=nn.Embedding(d.layer_embed_vocab, width),
            projection=nn.Linear(d.embed_dim, width, bias=False),
            norm=_norm(d, d.layer_embed_dim),
        )
    return TransformerDecoder(
        tok_embeddings=embeddings,
        layers=layers,
        max_seq_len=d.max_seq_len,
        num_heads=d.num_heads,
        head_dim=d.head_dim,
        norm=_norm(d, d.embed_dim),
        output=output,
        embed_scale=d.embed_scale,
        hidden_scale=d.hidden_scale,
        layer_embeddings=layer_embeddings,
        kv_sources={layer: d.kv_source(layer) for layer in d.shared_kv},
        description=d,
        spec=spec,
    )


def _output(d: Description, embeddings: nn.Embedding) -> nn.Linear | TiedLinear:
    """Build the output projection to classes or to the vocabulary."""
    if d.is_classifier:
        return ClassifierHead(d.embed_dim, d.num_classes)
    if d.tie_word_embeddings:
        return TiedLinear(embeddings, d.logit_softcap)
    if d.logit_softcap is not None:
        return CappedLinear(d.embed_dim, d.vocab_size, d.logit_softcap)
    return nn.Linear(d.embed_dim, d.vocab_size, bias=False)


def _norm(d: Description, dim: int) -> RMSNorm:
    return RMSNorm(dim, d.norm_eps, unit_offset=d.norm_unit_offset, rounds_last=d.norm_rounds_last)


def _residual_scale(d: Description, scale: float) -> nn.Module | None:
    """Return the norm or constant factor of the outputs of attention and feed-forward, before the residual addition."""
    if d.has_post_norm:
        return _norm(d, d.embed_dim)
    scale *= d.residual_scale
    if scale == 1.0:
        return None
    return Multiplier(scale)


def _layer(
    d: Description, layer: int, rope: RotaryPositionalEmbeddings, window_rope: RotaryPositionalEmbeddings
) -> TransformerSelfAttentionLayer:
    """Build a decoder layer; the lists of layers in the description decide about its attention and feed-forward.

    Args:
        d: the description of the model.
        layer: index of the layer.
        rope: rotary embeddings of layers without a sliding window.
        window_rope: rotary embeddings of sliding-window layers.
    """
    mixer = None
    if layer in d.mixer_layers:
        mixer = d.mixer.build(d.embed_dim, d.norm_eps)
    if layer not in d.attn_layers:
        # The mixer takes the place of attention. A layer may have neither.
        attn = mixer
        mixer = None
    elif d.kv_latent_dim:
        attn = _latent_attention(d, layer, rope)
    elif layer in d.window_layers:
        attn = _attention(d, layer, window_rope)
    else:
        attn = _attention(d, layer, rope)

    mlp: FeedForward | MoE | None = None
    if layer in d.expert_layers:
        mlp = _mixture_of_experts(d)
    elif layer in d.mlp_layers:
        intermediate_dim = d.intermediate_dim
        if layer in d.shared_kv and d.shared_kv_intermediate_dim:  # Gemma 4 E2B: wider there
            intermediate_dim = d.shared_kv_intermediate_dim
        mlp = feed_forward(d, intermediate_dim, d.mlp_gate_scale)

    layer_embed = None
    if d.layer_embed_dim:
        layer_embed = LayerEmbedding(
            embed_gate=nn.Linear(d.embed_dim, d.layer_embed_dim, bias=False),
            embed_proj=nn.Linear(d.layer_embed_dim, d.embed_dim, bias=False),
            norm=_norm(d, d.embed_dim),
            activation=ACTIVATIONS[d.activation](),
        )
    return TransformerSelfAttentionLayer(
        attn,
        mlp,
        sa_norm=_norm(d, d.embed_dim) if layer in d.sa_norm_layers else None,
        mlp_norm=_norm(d, d.embed_dim) if layer in d.mlp_norm_layers else None,
        sa_scale=_residual_scale(d, d.attn_out_scale),
        mlp_scale=_residual_scale(d, d.mlp_out_scale),
        layer_embed=layer_embed,
        layer_scale=OutputScale() if d.layer_scale else None,
        mixer=mixer,
    )


def _latent_attention(d: Description, layer: int, rope: nn.Module) -> LatentAttention:
    """Build latent attention (MLA): keys and values of all heads are projections of one latent per position.

    The last ``rope_dim`` channels of a key are rotated; they are a projection of the input that all heads share.
    """
    # Norms of latents have this eps in all families, whatever the eps of the other norms.
    norm = partial(RMSNorm, eps=1e-6, unit_offset=d.norm_unit_offset, rounds_last=d.norm_rounds_last)
    q_down_proj = None
    q_down_norm = None
    if d.q_latent_dim:
        q_down_proj = nn.Linear(d.embed_dim, d.q_latent_dim, bias=d.q_bias)
        q_down_norm = norm(d.q_latent_dim)
    q_input_dim = d.q_latent_dim or d.embed_dim
    unrotated_dim = d.head_dim - d.rope_dim
    scale = d.attn_scale
    if not scale:
        scale = d.head_dim**-0.5
        if isinstance(d.rope_scaling, YarnRopeScaling):
            # Elsewhere, YaRN's magnitude scales cosine and sine. Here, most channels of a key are not rotated.
            scale *= d.rope_scaling.latent_magnitude
    return LatentAttention(
        embed_dim=d.embed_dim,
        num_heads=d.num_heads,
        key_dim=d.head_dim,
        rope_dim=d.rope_dim,
        value_dim=d.value_dim,
        kv_dim=d.kv_latent_dim,
        q_down_proj=q_down_proj,
        q_down_norm=q_down_norm,
        q_proj=nn.Linear(q_input_dim, d.num_heads * d.head_dim, bias=False),
        # The latent, and the rotated channels of the keys.
        kv_down_proj=nn.Linear(d.embed_dim, d.kv_latent_dim + d.rope_dim, bias=d.k_bias),
        kv_down_norm=norm(d.kv_latent_dim),
        # For each head, the other channels of its key, and its value.
        kv_proj=nn.Linear(d.kv_latent_dim, d.num_heads * (unrotated_dim + d.value_dim), bias=False),
        output_proj=nn.Linear(d.num_heads * d.value_dim, d.embed_dim, bias=d.attn_output_bias),
        pos_embeddings=None if layer in d.unrotated_layers else rope,
        max_seq_len=d.max_seq_len,
        attn_dropout=d.attn_dropout,
        is_causal=d.is_causal,
        scale=scale,
        growth=_growth(d, layer),
    )


def _attention(d: Description, layer: int, rope: RotaryPositionalEmbeddings) -> MultiHeadAttention:
    """Build the attention of a layer, with the rotary embeddings for its kind of attention."""
    has_rope = layer not in d.unrotated_layers
    has_keys = layer in d.key_layers  # otherwise the layer takes the keys and values of an earlier one
    head_dim, num_kv_heads = d.attn_heads(layer)
    q_dim = d.num_heads * head_dim
    kv_dim = num_kv_heads * head_dim
    q_proj_dim = q_dim
    if d.attn_gate:
        q_proj_dim = 2 * q_dim  # the projection of queries returns the gate beside each head
    scale = d.attn_scale
    if d.key_scale != 1.0:
        # A factor of the keys is a factor of the scores.
        scale = (scale or head_dim**-0.5) * d.key_scale
    q_norm = None
    k_norm = None
    if d.has_qk_norm:
        # A norm is over all heads together, or over each head.
        q_norm = _norm(d, q_proj_dim if d.qk_norm_whole else head_dim)
        if has_keys:
            k_norm = _norm(d, kv_dim if d.qk_norm_whole else head_dim)
    return MultiHeadAttention(
        embed_dim=d.embed_dim,
        num_heads=d.num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        q_proj=nn.Linear(d.embed_dim, q_proj_dim, bias=d.q_bias),
        k_proj=nn.Linear(d.embed_dim, kv_dim, bias=d.k_bias) if has_keys else None,
        # Without it, a layer with keys has them as values, too.
        v_proj=nn.Linear(d.embed_dim, kv_dim, bias=d.v_bias) if layer in d.value_layers else None,
        output_proj=nn.Linear(q_dim, d.embed_dim, bias=d.attn_output_bias),
        pos_embeddings=rope if has_rope else None,
        q_norm=q_norm,
        k_norm=k_norm,
        v_norm_eps=d.norm_eps if d.v_norm else None,
        qk_norm_before_rope=d.qk_norm == "before_rope",
        qk_norm_whole=d.qk_norm_whole,
        max_seq_len=d.max_seq_len,
        attn_dropout=d.attn_dropout,
        is_causal=d.is_causal,
        scale=scale,
        softcap=d.attn_softcap,
        window=d.window if layer in d.window_layers else None,
        sinks=d.attn_sinks,
        gated=d.attn_gate,
        growth=_growth(d, layer),
        chunk=d.chunk if layer in d.chunk_layers else None,
        qk_norm_eps=d.norm_eps if d.qk_unit_norm and has_rope else None,  # Llama 4: not in layers without RoPE
    )


def _growth(d: Description, layer: int) -> tuple[float, int, int] | None:
    """Return factor, span and first position of the scaling of queries; None in layers without it."""
    if not d.query_growth or (d.query_growth_layers and layer not in d.query_growth_layers):
        return None
    return d.query_growth, d.query_growth_span, d.query_growth_first


def feed_forward(d: Any, width: int, gate_scale: float = 1.0) -> FeedForward:
    """Build the feed-forward of a description, also of a vision tower."""
    return FeedForward(
        gate_proj=nn.Linear(d.embed_dim, width, bias=d.mlp_bias),
        down_proj=nn.Linear(width, d.embed_dim, bias=d.mlp_bias),
        up_proj=nn.Linear(d.embed_dim, width, bias=d.mlp_bias) if d.mlp_gated else None,
        activation=ACTIVATIONS[d.activation](),
        gate_scale=gate_scale,
    )


def _mixture_of_experts(d: Description) -> MoE:
    """Build the router and the experts of a layer, and the shared expert, if any."""
    router = TokenChoiceTopKRouter(
        gate=nn.Linear(d.embed_dim, d.num_experts, bias=d.router_bias),
        dim=d.embed_dim,
        num_experts=d.num_experts,
        experts_per_token=d.experts_per_token,
        score_function=d.router_scores,
        normalize=d.router_normalize,
        sum_eps=d.router_sum_eps,
        scale=d.router_scale,
        selection_bias=d.router_selection_bias,
        groups=d.router_groups,
        top_groups=d.router_top_groups,
        norm_eps=d.norm_eps if d.router_norm else None,
    )
    sizes = {
        "dim": d.expert_latent_dim or d.embed_dim,
        "hidden_dim": d.expert_dim,
        "num_experts": d.num_experts,
    }
    if d.expert_limit is not None:
        # The experts of gpt-oss, which have biases and no shared expert.
        return MoE(experts=ClampedExperts(**sizes, limit=d.expert_limit), router=router)
    experts_class = GroupedExperts if d.mlp_gated else UngatedExperts
    experts = experts_class(**sizes, activation=ACTIVATIONS[d.activation]())
    if not d.shared_expert_dim:
        return MoE(experts=experts, router=router, scales_input=d.router_scales_input)
    shared_gate = None
    if d.shared_expert_gate:
        shared_gate = nn.Linear(d.embed_dim, 1, bias=False)
    shared_expert = feed_forward(d, d.shared_expert_dim)
    norms = None
    if d.expert_norms:
        norms = {name: _norm(d, d.embed_dim) for name in ("input", "output", "shared_input", "shared_output")}
    latent = None
    if d.expert_latent_dim:
        # Only the experts work in the latent: router and shared expert take the input itself.
        latent = (
            nn.Linear(d.embed_dim, d.expert_latent_dim, bias=False),
            nn.Linear(d.expert_latent_dim, d.embed_dim, bias=False),
        )
    return MoE(
        experts=experts,
        router=router,
        shared_expert=shared_expert,
        shared_gate=shared_gate,
        scales_input=d.router_scales_input,
        norms=norms,
        latent=latent,
    )


def _rotary_embeddings(d: Description) -> tuple[RotaryPositionalEmbeddings, RotaryPositionalEmbeddings]:
    """Return the rotary embeddings of full-attention and of sliding-window layers, one object if they are equal."""
    sizes: dict[str, Any] = {
        # In layers without a window, all channels of their larger heads are rotated (Gemma 4).
        "dim": d.full_head_dim or d.rope_dim,
        "max_seq_len": d.max_seq_len,
        "base": d.rope_base,
        "layout": d.rope_layout,
    }
    rope: RotaryPositionalEmbeddings
    match d.rope_scaling:
        case None:
            rope = RotaryPositionalEmbeddings(**sizes)
        case LinearRopeScaling(factor=factor):
            rope = RotaryPositionalEmbeddings(**sizes, stretch=factor)
        case ProportionalRopeScaling(fraction=fraction, factor=factor):
            rope = ProportionalRotaryPositionalEmbeddings(**sizes, fraction=fraction, factor=factor)
        case DynamicRopeScaling() as scaling:
            rope = DynamicRotaryPositionalEmbeddings(
                **sizes, factor=scaling.factor, original_max_seq_len=scaling.original_max_seq_len
            )
        case Llama3RopeScaling() as scaling:
            rope = ScaledRotaryPositionalEmbeddings(
                **sizes,
                scale_factor=scaling.factor,
                low_freq_factor=scaling.low_freq_factor,
                high_freq_factor=scaling.high_freq_factor,
                old_context_len=scaling.original_max_seq_len,
            )
        case YarnRopeScaling() as scaling:
            rope = YarnRotaryPositionalEmbeddings(
                **sizes,
                factor=scaling.factor,
                original_max_seq_len=scaling.original_max_seq_len,
                beta_fast=scaling.beta_fast,
                beta_slow=scaling.beta_slow,
                truncate=scaling.truncate,
                magnitude=scaling.magnitude,
            )
        case LongRopeScaling() as scaling:
            rope = LongRotaryPositionalEmbeddings(
                **sizes,
                short_factors=scaling.short_factors,
                long_factors=scaling.long_factors,
                original_max_seq_len=scaling.original_max_seq_len,
                magnitude=scaling.magnitude,
            )
    rope.axes = list(d.rope_axes)  # M-RoPE: the coordinate that rotates each pair of channels; empty without it
    if d.rope_window_base is None:
        return rope, rope
    # Windows are shorter than the pre-training context: their rotary embeddings have no scaling.
    return rope, RotaryPositionalEmbeddings(d.rope_dim, d.max_seq_len, d.rope_window_base, layout=d.rope_layout)

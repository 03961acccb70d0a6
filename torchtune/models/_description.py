"""Descriptions of architectures, from which every model is built: text decoders, vision towers, and both together."""

import math
from collections.abc import Collection
from dataclasses import dataclass, fields
from typing import Literal

from torchtune.models._mixers import Mixer
from torchtune.utils import UserError


class ModelError(UserError, ValueError):
    """Raised when a model cannot be described, built or found; the message names the invalid field or name."""


@dataclass(frozen=True, kw_only=True)
class Llama3RopeScaling:
    """Llama 3.1's scaling of low rotary frequencies (``rope_type: llama3`` in a Hugging Face config).

    Attributes:
        factor: divisor of frequencies with wavelengths above ``original_max_seq_len / low_freq_factor``.
        low_freq_factor: see ``factor``.
        high_freq_factor: frequencies with wavelengths below ``original_max_seq_len / high_freq_factor`` are unchanged;
            frequencies in between are interpolated.
        original_max_seq_len: pre-training context length.

    Example:
        >>> torchtune.models.Llama3RopeScaling(factor=32.0).original_max_seq_len
        8192
    """

    factor: float = 8.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_seq_len: int = 8192


@dataclass(frozen=True, kw_only=True)
class LinearRopeScaling:
    """Linear scaling: positions are divided by ``factor`` (``rope_type: linear``).

    Attributes:
        factor: divisor of the positions.

    Example:
        >>> torchtune.models.LinearRopeScaling(factor=4.0).factor
        4.0
    """

    factor: float


@dataclass(frozen=True, kw_only=True)
class DynamicRopeScaling:
    """Dynamic NTK scaling: the base grows with sequences beyond ``original_max_seq_len`` (``rope_type: dynamic``).

    Attributes:
        factor: growth rate of the base.
        original_max_seq_len: sequences up to this length are not scaled.

    Example:
        >>> torchtune.models.DynamicRopeScaling(factor=2.0, original_max_seq_len=2048).factor
        2.0
    """

    factor: float
    original_max_seq_len: int


@dataclass(frozen=True, kw_only=True)
class YarnRopeScaling:
    """YaRN (https://arxiv.org/abs/2309.00071; ``rope_type: yarn``).

    Attributes:
        factor: divisor of low frequencies.
        original_max_seq_len: pre-training context length.
        beta_fast: channels with at least this many rotations in ``original_max_seq_len`` are unchanged.
        beta_slow: channels with at most this many rotations are divided by ``factor``; others are interpolated.
        truncate: whether the interpolation range is rounded to whole channels.
        attention_factor: factor of cosine and sine; None: computed from ``factor``, ``mscale`` and ``mscale_all_dim``.
        mscale: coefficient in the numerator of the computed factor; used only with ``mscale_all_dim``.
        mscale_all_dim: coefficient in the denominator; see ``mscale``.

    Example:
        >>> torchtune.models.YarnRopeScaling(factor=4.0, original_max_seq_len=4096).beta_fast
        32.0
    """

    factor: float
    original_max_seq_len: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None

    @property
    def magnitude(self) -> float:
        """Factor of cosine and sine."""
        if self.attention_factor is not None:
            return self.attention_factor
        grown = math.log(max(self.factor, 1.0)) / 10
        if self.mscale and self.mscale_all_dim:
            return (self.mscale * grown + 1.0) / (self.mscale_all_dim * grown + 1.0)
        return grown + 1.0

    @property
    def latent_magnitude(self) -> float:
        """Additional factor of latent attention's scores."""
        return ((self.mscale_all_dim or 0.0) * math.log(max(self.factor, 1.0)) / 10 + 1.0) ** 2


@dataclass(frozen=True, kw_only=True)
class LongRopeScaling:
    """LongRoPE (https://arxiv.org/abs/2402.13753; ``rope_type: longrope``).

    Attributes:
        short_factors: multipliers of the wavelengths in sequences of up to ``original_max_seq_len`` tokens, one per
            rotated pair of channels.
        long_factors: multipliers in longer sequences.
        original_max_seq_len: pre-training context length.
        factor: ratio of the extended to the pre-training context length.
        attention_factor: factor of cosine and sine; None: computed from ``factor``.

    Example:
        >>> factors = {"short_factors": (1.0, 1.0), "long_factors": (2.0, 4.0)}
        >>> scaling = torchtune.models.LongRopeScaling(**factors, original_max_seq_len=4096, factor=32.0)
        >>> scaling.original_max_seq_len
        4096
    """

    short_factors: tuple[float, ...]
    long_factors: tuple[float, ...]
    original_max_seq_len: int
    factor: float
    attention_factor: float | None = None

    @property
    def both(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Short and long factors."""
        return self.short_factors, self.long_factors

    @property
    def magnitude(self) -> float:
        """Factor of cosine and sine."""
        if self.attention_factor is not None:
            return self.attention_factor
        return math.sqrt(1 + math.log(max(self.factor, 1.0)) / math.log(self.original_max_seq_len))


@dataclass(frozen=True, kw_only=True)
class ProportionalRopeScaling:
    """Partial RoPE that rotates the pairs of channels with the highest frequencies (``rope_type: proportional``).

    The frequencies are computed for the full head, unlike with ``rope_dim``.

    Attributes:
        fraction: fraction of a head's pairs that are rotated.
        factor: divisor of the positions.
    """

    fraction: float = 1.0
    factor: float = 1.0


RopeScaling = (
    Llama3RopeScaling
    | LinearRopeScaling
    | DynamicRopeScaling
    | YarnRopeScaling
    | LongRopeScaling
    | ProportionalRopeScaling
)


# Upper limits of sizes: larger than in any model, but small enough to build the modules on the meta device.
_LARGEST = {
    "vocab_size": 2**28,
    "num_layers": 2**11,
    "embed_dim": 2**20,
    "intermediate_dim": 2**22,
    "num_heads": 2**14,
    "head_dim": 2**14,
    "full_head_dim": 2**14,
    "kv_latent_dim": 2**16,
    "q_latent_dim": 2**16,
    "value_dim": 2**14,
    "layer_embed_dim": 2**16,
    "layer_embed_vocab": 2**28,
    "shared_kv_intermediate_dim": 2**22,
    "num_experts": 2**13,
    "expert_dim": 2**22,
    "expert_latent_dim": 2**20,
    "shared_expert_dim": 2**22,
    "num_classes": 2**20,
}
# Pairs of fields that are set together, or not at all.
_TOGETHER = (
    ("window", "window_layers"),
    ("chunk", "chunk_layers"),
    ("kv_latent_dim", "value_dim"),
    ("num_experts", "expert_dim"),
    ("num_experts", "experts_per_token"),
    ("layer_embed_dim", "layer_embed_vocab"),
    ("mixer", "mixer_layers"),
)
# (field, field that it requires)
_REQUIRES = (
    ("q_latent_dim", "kv_latent_dim"),
    ("query_growth", "query_growth_span"),
    ("shared_expert_dim", "num_experts"),
    ("shared_expert_gate", "shared_expert_dim"),
    ("expert_norms", "shared_expert_dim"),
    ("expert_latent_dim", "shared_expert_dim"),
)


@dataclass(frozen=True, kw_only=True)
class Description:
    """Complete description of a text decoder's parameters and computation.

    The meaning of fields does not depend on the model family. Frozen and hashable: ``dataclasses.replace`` makes a
    variant.

    Raises:
        ModelError: a field is invalid, or fields are inconsistent.

    Example:
        >>> description = torchtune.models.Description(
        ...     vocab_size=50, num_layers=2, embed_dim=32, intermediate_dim=64, max_seq_len=99, num_heads=4,
        ...     num_kv_heads=2
        ... )
        >>> description.head_dim
        8
    """

    # Sizes
    vocab_size: int
    num_layers: int
    embed_dim: int
    intermediate_dim: int
    max_seq_len: int

    # Attention
    num_heads: int
    num_kv_heads: int
    head_dim: int = 0  # 0 is replaced by embed_dim // num_heads
    attn_dropout: float = 0.0
    is_causal: bool = True  # a position sees no later ones; False: it sees all of its document
    q_bias: bool = False
    k_bias: bool = False
    v_bias: bool = False
    attn_output_bias: bool = False
    qk_norm: Literal["none", "before_rope", "after_rope"] = "none"  # RMSNorm over each head of queries and keys
    qk_unit_norm: bool = False  # RMSNorm without weight over query and key heads after RoPE; not in NoPE layers
    qk_norm_whole: bool = False  # qk_norm normalizes all heads together, before RoPE
    attn_scale: float | None = None  # scale of the scores; None: head_dim ** -0.5
    attn_softcap: float | None = None  # scores become softcap * tanh(score / softcap)
    window: int | None = None  # sliding window in positions, including the query's own position
    window_layers: tuple[int, ...] = ()  # layers with sliding-window attention
    chunk: int | None = None  # chunk size of chunked attention: positions attend only within their chunk of a document
    chunk_layers: tuple[int, ...] = ()  # layers with chunked attention
    full_head_dim: int = 0  # head_dim of layers without a window; 0: head_dim
    full_num_kv_heads: int = 0  # num_kv_heads of layers without a window; 0: num_kv_heads
    full_keys_as_values: bool = False  # layers without a window have no v_proj: values are the projected keys
    v_norm: bool = False  # RMSNorm without weight over each head of values
    shared_kv_layers: int = 0  # number of last layers that reuse keys and values of an earlier layer of the same kind
    attn_sinks: bool = False  # attention sinks: a learned logit per head in the softmax's denominator
    attn_gate: bool = False  # q_proj also returns a gate per head, and its sigmoid scales the head's output

    # Latent attention (MLA): keys and values of all heads are projections of one latent per position
    kv_latent_dim: int = 0  # width of the latent of keys and values; 0: no latent attention
    q_latent_dim: int = 0  # width of the latent of queries; 0: queries are projections of the input
    value_dim: int = 0  # size of a value head; the last rope_dim channels of a key are rotated and shared by all heads

    # Layers without attention, or without a feed-forward
    attnless_layers: tuple[int, ...] = ()  # only a feed-forward
    mlpless_layers: tuple[int, ...] = ()  # only attention or a mixer
    mixer: Mixer | None = None  # replaces attention in mixer_layers
    mixer_layers: tuple[int, ...] = ()
    mixer_beside_attn: bool = False  # mixer_layers also have parallel attention; the outputs are added

    # Positions
    rope_base: float = 10_000.0
    rope_layout: Literal["interleaved", "half"] = "interleaved"  # rotated pairs: (2i, 2i + 1) or (i, i + d/2)
    rope_scaling: RopeScaling | None = None
    rope_dim: int = 0  # partial RoPE: only the first rope_dim channels are rotated; 0 is replaced by head_dim
    rope_axes: tuple[int, ...] = ()  # M-RoPE: the coordinate (0 time, 1 row, 2 column) that rotates each pair
    rope_window_base: float | None = None  # RoPE base of sliding-window layers, without scaling
    unrotated_layers: tuple[int, ...] = ()  # layers without RoPE (NoPE)
    query_growth: float = 0.0  # queries are scaled by 1 + query_growth * ln(1 + position // query_growth_span)
    query_growth_span: int = 0
    query_growth_first: int = 0  # offset added to the position in the formula of query_growth
    query_growth_layers: tuple[int, ...] = ()  # layers with scaled queries; (): all

    # Feed-forward
    activation: Literal["silu", "gelu", "gelu_tanh", "relu2"] = "silu"
    mlp_gated: bool = True  # w2(activation(w1(x)) * w3(x)), also in experts; False: w2(activation(w1(x)))
    mlp_bias: bool = False
    shared_kv_intermediate_dim: int = 0  # width of the feed-forward in shared_kv_layers; 0: intermediate_dim

    # Mixture of experts
    num_experts: int = 0  # experts per layer; 0: dense feed-forward layers
    experts_per_token: int = 0
    expert_dim: int = 0  # intermediate width of an expert
    expert_latent_dim: int = 0  # experts work in a projection of their input to this width; 0: no projection
    expert_limit: float | None = None  # limit of clamped SwiGLU experts with biases (gpt-oss)
    expertless_layers: tuple[int, ...] = ()  # layers with a dense feed-forward instead of experts
    router_scores: Literal["softmax", "sigmoid"] = "softmax"  # over all experts, or per expert
    router_normalize: bool = False  # scores of the selected experts sum to one
    router_sum_eps: float = 0.0  # added to the sum for router_normalize
    router_scale: float = 1.0  # factor of the routing weights
    router_bias: bool = False
    router_selection_bias: bool = False  # bias added to scores for the selection only; not trained by the loss
    router_groups: int = 1  # number of expert groups of equal size
    router_top_groups: int = 1  # number of groups from which a token selects experts
    shared_expert_dim: int = 0  # intermediate width of the shared expert; 0: none
    shared_expert_gate: bool = False  # scale the shared expert's output by a sigmoid gate, a projection of the token
    expert_norms: bool = False  # separate input and output norms of experts and shared expert, instead of mlp_norm
    router_norm: bool = False  # normalize and scale the router's input; scale the routing weight of each expert
    router_scales_input: bool = False  # routing weights multiply an expert's input, not its output
    router_balance: float = 0.0  # coefficient of the load-balancing loss, if enabled in training

    # Norms
    norm_eps: float = 1e-5
    norm_order: Literal["pre", "post", "both"] = "pre"  # before and/or after attention and feed-forward
    norm_unit_offset: bool = False  # norms scale by 1 + weight, then round to the dtype of their input
    norm_rounds_last: bool = False  # norms scale by the weight, then round to the dtype of their input
    layer_scale: bool = False  # scale each layer's output by an untrained scalar

    # Per-layer token embeddings, added to each layer's output
    layer_embed_dim: int = 0  # width of the embeddings; 0: none
    layer_embed_vocab: int = 0  # vocabulary size of the embeddings

    # Constant factors
    embed_scale: float = 1.0  # factor of token embeddings, rounded to their dtype
    residual_scale: float = 1.0  # factor of the outputs of attention and feed-forward
    key_scale: float = 1.0  # factor of the keys
    attn_out_scale: float = 1.0  # factor of the output of attention
    mlp_gate_scale: float = 1.0  # factor of the activation's input in dense feed-forward layers
    mlp_out_scale: float = 1.0  # factor of the output of the feed-forward
    hidden_scale: float = 1.0  # factor of the output projection's input

    # Output
    logit_softcap: float | None = None  # logits become softcap * tanh(logit / softcap)
    num_classes: int = 0  # outputs of a classifier or reward model; 0: the model predicts tokens
    class_names: tuple[str, ...] = ()  # names of the outputs, if they are known
    problem_type: str | None = None  # of a classifier, as config.json names it; None: unknown
    tie_word_embeddings: bool = False  # the output projection shares the embedding matrix; there is no output.weight

    def __post_init__(self) -> None:
        for field in ("vocab_size", "num_layers", "embed_dim", "intermediate_dim", "max_seq_len", "num_heads"):
            if getattr(self, field) < 1:
                raise ModelError(f"{field} must be at least 1, got {getattr(self, field)}.")
        # With larger sizes, which no model has, even modules on the meta device may fail to be built.
        for field, most in _LARGEST.items():
            if getattr(self, field) > most:
                raise ModelError(f"{field} must be at most {most:,}, got {getattr(self, field):,}.")
        self._check_heads()  # sets head_dim, which the next checks read
        for field, partner in _TOGETHER:
            if bool(getattr(self, field)) != bool(getattr(self, partner)):
                raise ModelError(f"{field} (got {getattr(self, field)}) and {partner} go together.")
        for field, required in _REQUIRES:
            if getattr(self, field) and not getattr(self, required):
                raise ModelError(f"{field} ({getattr(self, field)}) needs {required}.")
        self._check_positions()  # sets rope_dim
        self._check_latents()
        self._check_experts()
        self._check_layers()
        if not 0.0 <= self.attn_dropout <= 1.0:
            raise ModelError(f"attn_dropout must lie in [0, 1], got {self.attn_dropout}.")
        causal_part = self.causal_part()
        if not self.is_causal and causal_part is not None:
            raise ModelError(f"is_causal must be True in a model with {causal_part}.")

    def causal_part(self) -> str | None:
        """Return the part of the model that cannot see later positions, in words; None if there is none.

        Example:
            >>> sizes = {"vocab_size": 50, "num_layers": 1, "embed_dim": 32, "intermediate_dim": 64, "num_heads": 4}
            >>> sizes |= {"num_kv_heads": 4, "max_seq_len": 99}
            >>> torchtune.models.Description(**sizes, window=8, window_layers=(0,)).causal_part()
            'sliding windows'
        """
        parts = {
            "layers that read the text in its direction (linear attention, Mamba, short convolutions)": self.mixer,
            "sliding windows": self.window,
            "chunked attention": self.chunk,
            "a soft cap of attention scores": self.attn_softcap,
            "attention sinks": self.attn_sinks,
        }
        for words, value in parts.items():
            if value:
                return words
        return None

    def _set_default(self, field: str, value: int) -> None:
        """Replace a field that is 0; a frozen dataclass has no ordinary assignment."""
        object.__setattr__(self, field, value)

    def _check_heads(self) -> None:
        if self.num_kv_heads < 1 or self.num_heads % self.num_kv_heads:
            raise ModelError(f"num_heads ({self.num_heads}) must be a multiple of num_kv_heads ({self.num_kv_heads}).")
        if self.head_dim == 0:
            if self.embed_dim % self.num_heads:
                raise ModelError(
                    f"embed_dim ({self.embed_dim}) is not a multiple of num_heads ({self.num_heads}): state head_dim."
                )
            self._set_default("head_dim", self.embed_dim // self.num_heads)
        if self.head_dim % 2:
            raise ModelError(f"head_dim must be even for rotary positions, got {self.head_dim}.")

    def _check_positions(self) -> None:
        if self.rope_dim == 0:
            self._set_default("rope_dim", self.head_dim)
        if self.rope_dim % 2 or not 0 < self.rope_dim <= self.head_dim:
            raise ModelError(f"rope_dim must be even and at most head_dim ({self.head_dim}), got {self.rope_dim}.")
        num_pairs = self.rope_dim // 2
        if self.rope_axes and (len(self.rope_axes) != num_pairs or not set(self.rope_axes) <= {0, 1, 2}):
            raise ModelError(f"rope_axes must be a coordinate (0, 1, 2) for each of {num_pairs} pairs.")
        scaling = self.rope_scaling
        if isinstance(scaling, LongRopeScaling) and any(len(factors) != num_pairs for factors in scaling.both):
            raise ModelError(f"LongRoPE needs {num_pairs} factors, one for each rotated pair of channels.")
        if self.window is not None and self.window < 1:
            raise ModelError(f"window must be at least 1, got {self.window}.")
        if set(self.chunk_layers) & set(self.window_layers):
            raise ModelError("chunk_layers must be layers without a window.")
        # torchtune.modules.attention computes these variants without dropout.
        if self.attn_dropout and (self.window or self.chunk or self.attn_softcap or self.attn_sinks):
            raise ModelError("attn_dropout must be 0 in a model with an attention window, chunks, soft cap or sinks.")

    def _check_latents(self) -> None:
        """Raise for settings that latent attention does not have; a model without it passes."""
        if not self.kv_latent_dim:
            return
        # Every query head has its own keys and values, computed from the latent.
        if self.num_kv_heads != self.num_heads:
            raise ModelError(
                f"kv_latent_dim needs num_kv_heads = num_heads ({self.num_heads}), got {self.num_kv_heads}."
            )
        for field in (
            "window",
            "chunk",
            "attn_softcap",
            "attn_sinks",
            "attn_gate",
            "v_norm",
            "shared_kv_layers",
            "has_qk_norm",
            "qk_unit_norm",
        ):
            if getattr(self, field):
                raise ModelError(f"kv_latent_dim and {field} do not go together.")

    def _check_experts(self) -> None:
        if not 0 <= self.experts_per_token <= self.num_experts:
            raise ModelError(
                f"experts_per_token ({self.experts_per_token}) must be at most num_experts ({self.num_experts})."
            )
        groups = self.router_groups
        top_groups = self.router_top_groups
        # A group is scored by its two best experts.
        too_few_experts = groups > 1 and self.num_experts < 2 * groups
        if not 1 <= top_groups <= groups or self.num_experts % groups or too_few_experts:
            raise ModelError(
                f"router_top_groups ({top_groups}) of router_groups ({groups}) do not fit num_experts "
                f"({self.num_experts})."
            )

    def _check_layers(self) -> None:
        if self.full_head_dim % 2:
            raise ModelError(f"full_head_dim must be even for rotary positions, got {self.full_head_dim}.")
        if self.full_num_kv_heads and self.num_heads % self.full_num_kv_heads:
            raise ModelError(
                f"num_heads ({self.num_heads}) must be a multiple of full_num_kv_heads ({self.full_num_kv_heads})."
            )
        # kv_source may return a layer with a mixer, which has no keys and values.
        if self.shared_kv_layers and (self.mixer or any(self.kv_source(layer) < 0 for layer in self.shared_kv)):
            raise ModelError(
                f"shared_kv_layers ({self.shared_kv_layers}): a layer of each kind must come before these layers."
            )
        if self.mixer is not None:
            problem = self.mixer.problem()
            if problem is not None:
                raise ModelError(f"mixer: {problem}.")
        if set(self.attnless_layers) & {*self.mlpless_layers, *self.mixer_layers}:
            raise ModelError(
                "attnless_layers have no mixer, and a feed-forward: mlpless_layers and mixer_layers do not."
            )
        if self.norm_order == "pre":
            return
        # Norms of outputs are in every layer, and take the place of the factors of outputs.
        if self.attnless_layers or self.mlpless_layers:
            raise ModelError(f"attnless_layers and mlpless_layers need norm_order 'pre', got '{self.norm_order}'.")
        for field in ("residual_scale", "attn_out_scale", "mlp_out_scale"):
            if getattr(self, field) != 1.0:
                raise ModelError(f"{field} needs norm_order 'pre', got '{self.norm_order}'.")

    @property
    def text(self) -> "Description":
        """Description of the text decoder of a composite model."""
        return Description(**{field.name: getattr(self, field.name) for field in fields(Description)})

    def other_numbers(self, layer: int) -> dict[str, int]:
        """Return further layer numbers for templates of weight names, by placeholder."""
        return {}

    def attn_heads(self, layer: int) -> tuple[int, int]:
        """Return the head dimension and the number of key heads of a layer."""
        if layer in self.window_layers:
            return self.head_dim, self.num_kv_heads
        return self.full_head_dim or self.head_dim, self.full_num_kv_heads or self.num_kv_heads

    def kv_source(self, layer: int) -> int:
        """Return the index of the layer with the keys and values that this layer reuses; -1 if it has its own."""
        has_window = layer in self.window_layers
        # The last layer of the same kind that computes keys and values of its own.
        for source in reversed(range(self.num_layers - self.shared_kv_layers)):
            if (source in self.window_layers) == has_window:
                return source
        return -1

    @property
    def shared_kv(self) -> tuple[int, ...]:
        """Layers that reuse keys and values of an earlier layer."""
        return tuple(range(self.num_layers - self.shared_kv_layers, self.num_layers))

    @property
    def key_layers(self) -> tuple[int, ...]:
        """Layers with a key projection."""
        if self.kv_latent_dim:
            return ()
        shared_kv = self.shared_kv
        return tuple(layer for layer in self.attn_layers if layer not in shared_kv)

    @property
    def value_layers(self) -> tuple[int, ...]:
        """Layers with a value projection."""
        if not self.full_keys_as_values:
            return self.key_layers
        return tuple(layer for layer in self.key_layers if layer in self.window_layers)

    @property
    def sa_norm_layers(self) -> tuple[int, ...]:
        """Layers with a norm before attention or a mixer."""
        if not self.has_pre_norm:
            return ()
        return self._layers_without(self.attnless_layers)

    @property
    def mlp_norm_layers(self) -> tuple[int, ...]:
        """Layers with ``mlp_norm``, a norm before the feed-forward."""
        if not self.has_pre_norm:
            return ()
        excluded = {*self.mlpless_layers}
        if self.expert_norms:  # experts and shared expert have norms of their own
            excluded.update(self.expert_layers)
        return self._layers_without(excluded)

    @property
    def attn_layers(self) -> tuple[int, ...]:
        """Layers with attention."""
        excluded = {*self.attnless_layers}
        if not self.mixer_beside_attn:
            excluded.update(self.mixer_layers)
        return self._layers_without(excluded)

    @property
    def mixer_has_norm(self) -> bool:
        """Whether mixers have a norm inside."""
        return self.mixer is None or self.mixer.has_norm

    @property
    def expert_layers(self) -> tuple[int, ...]:
        """Layers with a mixture of experts."""
        if not self.num_experts:
            return ()
        return self._layers_without({*self.expertless_layers, *self.mlpless_layers})

    @property
    def mlp_layers(self) -> tuple[int, ...]:
        """Layers with a dense feed-forward."""
        return self._layers_without({*self.expert_layers, *self.mlpless_layers})

    def _layers_without(self, excluded: Collection[int]) -> tuple[int, ...]:
        """Return the layers that are not excluded."""
        return tuple(layer for layer in range(self.num_layers) if layer not in excluded)

    @property
    def q_dim(self) -> int:
        """Output width of the query projection: ``num_heads * head_dim``, doubled with ``attn_gate``."""
        return self.num_heads * self.head_dim * (1 + self.attn_gate)

    @property
    def kv_dim(self) -> int:
        """Output width of the key and of the value projection, ``num_kv_heads * head_dim``."""
        return self.num_kv_heads * self.head_dim

    @property
    def untied(self) -> bool:
        """Whether the output projection has its own weight and predicts tokens."""
        return not self.tie_word_embeddings and not self.num_classes

    @property
    def is_classifier(self) -> bool:
        """Whether the model returns class logits or a reward instead of token logits."""
        return self.num_classes > 0

    @property
    def has_pre_norm(self) -> bool:
        """Whether the inputs of attention and feed-forward are normalized."""
        return self.norm_order != "post"

    @property
    def has_post_norm(self) -> bool:
        """Whether the outputs of attention and feed-forward are normalized."""
        return self.norm_order != "pre"

    @property
    def has_qk_norm(self) -> bool:
        """Whether queries and keys are normalized per head."""
        return self.qk_norm != "none"


_TOWER_SIZES = ("patch_size", "embed_dim", "output_dim", "merge")
_TOWER_LAYER_SIZES = ("num_layers", "intermediate_dim", "num_heads")  # of a tower with layers
_LARGEST_IN_TOWER = 2**20


@dataclass(frozen=True, kw_only=True)
class VisionDescription:
    """Complete description of a vision tower and its projector.

    The meaning of fields does not depend on the model family, as in :class:`Description`.

    Raises:
        ModelError: a field is invalid, or fields are inconsistent.

    Example:
        >>> tower = torchtune.models.VisionDescription(
        ...     patch_size=14, num_layers=2, embed_dim=32, intermediate_dim=64, num_heads=4, output_dim=48
        ... )
        >>> tower.head_dim, tower.patch_values
        (8, 588)
    """

    # Patches
    patch_size: int
    frames_per_patch: int = 1
    num_channels: int = 3
    patch_bias: bool = True
    patch_norms: bool = False  # norms before and after the embedding of patches

    # Layers
    num_layers: int = 0  # 0: patches are only embedded and projected
    embed_dim: int
    intermediate_dim: int = 0
    num_heads: int = 0
    attn_bias: bool = True  # biases of the query, key and value projections
    attn_output_bias: bool = True
    mlp_bias: bool = True
    mlp_gated: bool = False
    activation: Literal["silu", "gelu", "gelu_tanh"] = "gelu_tanh"
    norm: Literal["layer", "rms"] = "layer"
    norm_eps: float = 1e-6
    post_norms: bool = False  # norms of the outputs of attention and feed-forward
    head_norms: bool = False  # RMSNorms of queries and keys, and an RMSNorm without weight of values
    attn_scale: float | None = None
    clipped: bool = False  # linear layers clip their input and output
    first_norm: bool = False  # norm before the layers
    last_norm: bool = False  # norm after the layers
    window: int = 0  # rows and columns of tokens in an attention window; 0: none
    full_layers: tuple[int, ...] = ()  # layers with attention to the whole frame

    # Positions
    positions: Literal["none", "interpolated", "classed", "axes"] = "none"  # kind of learned position embeddings
    positions_side: int = 0  # rows and columns of the embedding table
    rope: Literal["none", "axial", "alternating", "halves", "neighbors"] = "none"  # see GridRotaryPositionalEmbeddings
    rope_base: float = 10_000.0

    # Projector
    merge: int = 1  # rows and columns of patches that become one token
    output_dim: int  # width of the text decoder
    merge_channels_first: bool = False
    merge_pools: bool = False  # a token is the mean of its patches
    merge_standardized: bool = False  # merged patches are shifted and scaled, without training
    merge_norm: Literal["none", "layer", "rms", "plain"] = "none"  # of patches or pooled tokens; plain: no weight
    merge_norm_eps: float = 1e-6
    merge_reduces: bool = False  # merged patches are projected to the width of one patch
    projector_dim: int = 0  # intermediate width; 0: the projector is one linear layer
    projector_first: bool = False  # the projector has a further first layer of width projector_dim
    projector_bias: bool = True
    deep_layers: tuple[int, ...] = ()  # layers with outputs that are added in the decoder's first layers (DeepStack)

    def __post_init__(self) -> None:
        sizes = _TOWER_SIZES
        if self.num_layers:  # otherwise, patches are only embedded and projected
            sizes = (*_TOWER_SIZES, *_TOWER_LAYER_SIZES)
        for field in sizes:
            if not 1 <= getattr(self, field) <= _LARGEST_IN_TOWER:
                raise ModelError(
                    f"vision: {field} must be from 1 to {_LARGEST_IN_TOWER:,}, got {getattr(self, field):,}."
                )
        if self.num_layers:
            if self.embed_dim % self.num_heads:
                raise ModelError(
                    f"vision: embed_dim ({self.embed_dim}) must be a multiple of num_heads ({self.num_heads})."
                )
            if self.rope != "none" and self.head_dim % 4:  # rows and columns rotate half of the pairs of channels each
                raise ModelError(
                    f"vision: embed_dim ({self.embed_dim}) must be num_heads ({self.num_heads}) times a multiple of 4."
                )
        for field in ("deep_layers", "full_layers"):
            if not all(0 <= layer < self.num_layers for layer in getattr(self, field)):
                raise ModelError(f"vision: {field} must be layers of the tower, got {list(getattr(self, field))}.")
        if bool(self.positions_side) != (self.positions != "none"):
            raise ModelError(f"vision: positions ('{self.positions}') and positions_side go together.")
        if self.full_layers and not self.window:
            raise ModelError("vision: full_layers needs window.")
        # With these positions, a class token is among the patches, which belongs to no window or image token.
        if self.positions == "classed" and (self.window or self.deep_layers):
            raise ModelError("vision: positions 'classed' do not go with window or deep_layers.")
        # Both are the layer before the projector's first one.
        if self.projector_first and (self.merge_reduces or not self.projector_dim):
            raise ModelError("vision: projector_first needs projector_dim, and no merge_reduces.")

    @property
    def head_dim(self) -> int:
        """Size of a head."""
        return self.embed_dim // self.num_heads

    @property
    def patch_values(self) -> int:
        """Number of values of a patch."""
        return self.num_channels * self.frames_per_patch * self.patch_size**2

    @property
    def patch_shape(self) -> tuple[int, ...]:
        """Shape of a patch in the convolution of a checkpoint: channels, frames (unless 1), rows, columns."""
        frames = (self.frames_per_patch,) if self.frames_per_patch > 1 else ()
        return (self.num_channels, *frames, self.patch_size, self.patch_size)

    @property
    def num_deep_layers(self) -> int:
        """Number of ``deep_layers``."""
        return len(self.deep_layers)


@dataclass(frozen=True, kw_only=True)
class ImageTextDescription(Description):
    """Description of a vision-language model: a text decoder with image tokens in the text sequence.

    Raises:
        ModelError: a field is invalid, or fields are inconsistent.

    Example:
        >>> isinstance(model.description, torchtune.models.ImageTextDescription)
        False
    """

    vision: VisionDescription
    image_tokens: tuple[int, ...]  # ids of the placeholder tokens of images and videos
    pad_token: int | None = None  # token that is embedded instead of placeholders; None: they are embedded
    image_blocks: bool = False  # tokens of an image attend to each other in both directions in sliding-window layers

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.vision.output_dim != self.embed_dim:
            raise ModelError(
                f"vision: output_dim ({self.vision.output_dim}) must be embed_dim of the text ({self.embed_dim})."
            )
        if len(self.vision.deep_layers) > self.num_layers:
            raise ModelError(f"vision: the text has fewer layers ({self.num_layers}) than deep_layers.")
        if not self.image_tokens or not all(0 <= token < self.vocab_size for token in self.image_tokens):
            raise ModelError(f"image_tokens {list(self.image_tokens)} must be tokens of the vocabulary.")

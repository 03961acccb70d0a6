"""Parameters of RoPE scaling: context extension beyond the pre-training length."""

import math
from dataclasses import dataclass


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

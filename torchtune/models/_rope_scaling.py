"""The ways in which rotary positions are stretched beyond the context of pre-training, in numbers."""

import math
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Llama3RopeScaling:
    """Llama 3.1's stretching of the slow rotary frequencies (``rope_type: llama3`` in a Hugging Face config).

    Attributes:
        factor: frequencies whose wavelength exceeds ``original_max_seq_len / low_freq_factor`` are divided by it.
        low_freq_factor: see ``factor``.
        high_freq_factor: wavelengths below ``original_max_seq_len / high_freq_factor`` are left alone; those in
            between are interpolated.
        original_max_seq_len: context length of the pre-training that is being stretched.
    """

    factor: float = 8.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_seq_len: int = 8192


@dataclass(frozen=True, kw_only=True)
class LinearRopeScaling:
    """Every position divided by a number (``rope_type: linear``).

    Attributes:
        factor: the number.
    """

    factor: float


@dataclass(frozen=True, kw_only=True)
class DynamicRopeScaling:
    """A base that grows with texts longer than ``original_max_seq_len`` (``rope_type: dynamic``).

    Attributes:
        factor: how fast it grows.
        original_max_seq_len: up to this length nothing changes.
    """

    factor: float
    original_max_seq_len: int


@dataclass(frozen=True, kw_only=True)
class YarnRopeScaling:
    """YaRN (https://arxiv.org/abs/2309.00071; ``rope_type: yarn``).

    Attributes:
        factor: by which channels that turn seldom are slowed down.
        original_max_seq_len: context length of the pre-training that is being stretched.
        beta_fast: channels with at least so many turns in it stay as they are.
        beta_slow: channels with at most so many are slowed down in full.
        truncate: whether the ramp between the two begins and ends at whole channels.
        attention_factor: what cosine and sine are multiplied by; None: it follows from ``factor`` and the next two.
        mscale: if it and the next are given, the factor is the ratio of what each makes of ``factor``.
        mscale_all_dim: see ``mscale``.
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
        """What cosine and sine are multiplied by."""
        if self.attention_factor is not None:
            return self.attention_factor
        grown = math.log(max(self.factor, 1.0)) / 10
        if self.mscale and self.mscale_all_dim:
            return (self.mscale * grown + 1.0) / (self.mscale_all_dim * grown + 1.0)
        return grown + 1.0


@dataclass(frozen=True, kw_only=True)
class LongRopeScaling:
    """LongRoPE (https://arxiv.org/abs/2402.13753; ``rope_type: longrope``).

    Attributes:
        short_factors: by which wavelengths are multiplied in texts of up to ``original_max_seq_len`` tokens, one for
            each pair of channels that turns.
        long_factors: the same for longer texts.
        original_max_seq_len: context length of the pre-training that is being stretched.
        factor: how far it is stretched in all.
        attention_factor: what cosine and sine are multiplied by; None: it follows from ``factor``.
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
        """What cosine and sine are multiplied by."""
        if self.attention_factor is not None:
            return self.attention_factor
        return math.sqrt(1 + math.log(max(self.factor, 1.0)) / math.log(self.original_max_seq_len))


RopeScaling = Llama3RopeScaling | LinearRopeScaling | DynamicRopeScaling | YarnRopeScaling | LongRopeScaling

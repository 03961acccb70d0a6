"""Rotary position embeddings (Su et al. 2021, https://arxiv.org/abs/2104.09864)."""

import math
from typing import Literal

import torch
from torch import Tensor, nn

Layout = Literal["interleaved", "half"]


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor, layout: Layout) -> Tensor:
    """Turn pairs of channels by the angle of their position; computed in float32.

    Args:
        x: ``[b, s, n, h]``.
        cos: float32 ``[b or 1, s, 1, r / 2]``, cosine of every angle; channels from r ≤ h on stay as they are.
        sin: the same for the sine.
        layout: the pairs: ``"interleaved"`` (0, 1), (2, 3) …, or ``"half"`` (0, h/2), (1, h/2 + 1) ….

    Returns:
        Tensor of the shape and dtype of ``x``.
    """
    turning = 2 * cos.shape[-1]
    if turning < x.shape[-1]:
        first, rest = x.split([turning, x.shape[-1] - turning], dim=-1)
        return torch.cat((apply_rope(first, cos, sin, layout), rest), dim=-1)
    if torch.compiler.is_compiling():
        return _rotate(x, cos, sin, layout)
    return _Rotation.apply(x, cos, sin, layout)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, layout: Layout) -> Tensor:
    wide = x.float()
    if layout == "interleaved":
        if not torch.compiler.is_compiling():
            pairs = torch.view_as_complex(wide.unflatten(-1, (-1, 2)).contiguous())
            return torch.view_as_real(pairs * torch.complex(cos, sin)).flatten(-2).to(x.dtype)
        first, second = wide.unflatten(-1, (-1, 2)).unbind(-1)
        turned = torch.stack((first * cos - second * sin, second * cos + first * sin), dim=-1)
        return turned.flatten(-2).to(x.dtype)
    first, second = wide.chunk(2, dim=-1)
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return turned.to(x.dtype)


class _Rotation(torch.autograd.Function):
    """The gradient of a rotation is the rotation back: nothing of ``x`` is kept."""

    @staticmethod
    def forward(ctx, x: Tensor, cos: Tensor, sin: Tensor, layout: Layout) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.layout = layout
        return _rotate(x, cos, sin, layout)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotate(grad, cos, -sin, ctx.layout), None, None, None


class RotaryPositionalEmbeddings(nn.Module):
    """Rotary positions.

    Holds no tensors: the frequencies are numbers of Python, so that building on the meta device, ``to_empty`` and
    casts lose nothing. :meth:`cos_sin` is meant to be called once per forward pass and shared by all layers.

    Args:
        dim: channels of a head that turn: all of them, h, or the first so many.
        max_seq_len: kept for information; positions beyond it work too.
        base: of the geometric series of wavelengths.
        layout: which channels of a head form a pair; see :func:`apply_rope`.
        stretch: every wavelength is multiplied by it (linear scaling of positions).

    Attributes:
        by_reach: whether the angles depend on how long a text is, so that :meth:`cos_sin` wants its ``reach``.
        switch_at: the longest text that has the angles of short ones, where all change at once beyond it.
        magnitude: what cosine and sine are multiplied by.
    """

    by_reach = False
    switch_at: int | None = None
    magnitude = 1.0

    def __init__(
        self,
        dim: int,
        max_seq_len: int = 4096,
        base: float = 10_000,
        *,
        layout: Layout = "interleaved",
        stretch: float = 1.0,
    ) -> None:
        super().__init__()
        self.layout = layout
        self.stretch = stretch
        if dim % 2:
            raise ValueError(f"Rotary positions need an even head size, got {dim}.")
        self.dim = dim
        self.max_seq_len = max_seq_len
        self.base = base
        exponents = torch.arange(0, dim, 2, dtype=torch.int64, device="cpu").float() / dim
        self._frequencies: list[float] = self._scale(1.0 / (base**exponents)).tolist()

    def _scale(self, frequencies: Tensor) -> Tensor:
        """Hook for variants: float32 [h / 2] to float32 [h / 2]."""
        return frequencies / self.stretch

    def rope_init(self) -> None:
        """Nothing to do; kept for callers that materialise models by hand."""

    def _frequencies_of(self, reach: Tensor) -> Tensor:
        """Hook for variants: lengths ``[b or 1, s or 1]`` to float32 ``[h / 2]``, or one for each position."""
        return torch.tensor(self._frequencies, dtype=torch.float32, device=reach.device)

    @torch.no_grad()
    def cos_sin(self, input_pos: Tensor, reach: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Cosine and sine of the angles, times ``magnitude``.

        Args:
            input_pos: positions ``[b, s]`` or ``[s]``.
            reach: int64 ``[b or 1, s or 1]``, how many positions the text of each has; by default each row is one
                text, up to its last position. It matters if ``by_reach``.

        Returns:
            Two float32 tensors ``[b or 1, s, 1, h / 2]``.
        """
        if input_pos.ndim == 1:
            input_pos = input_pos.unsqueeze(0)
        if reach is None:
            reach = input_pos.amax(dim=-1, keepdim=True) + 1
        angles = input_pos.to(torch.float32)[:, :, None, None] * self._frequencies_of(reach)
        if self.magnitude == 1.0:
            return angles.cos(), angles.sin()
        return angles.cos() * self.magnitude, angles.sin() * self.magnitude

    def forward(self, x: Tensor, input_pos: Tensor | None = None) -> Tensor:
        """Rotate queries or keys.

        Args:
            x: ``[b, s, n, h]``.
            input_pos: positions ``[b, s]`` or ``[s]``; by default 0 … s - 1.

        Returns:
            Tensor of the shape and dtype of ``x``.
        """
        if input_pos is None:
            input_pos = torch.arange(x.shape[1], device=x.device)
        return apply_rope(x, *self.cos_sin(input_pos), self.layout)

    def extra_repr(self) -> str:
        """Head size and base."""
        return f"dim={self.dim}, base={self.base}, layout={self.layout}"


class ScaledRotaryPositionalEmbeddings(RotaryPositionalEmbeddings):
    """Rotary positions whose slow frequencies are stretched as in Llama 3.1 (arXiv:2407.21783).

    Wavelengths above ``old_context_len / low_freq_factor`` are multiplied by ``scale_factor``; those below
    ``old_context_len / high_freq_factor`` stay; frequencies in between are interpolated linearly.

    Args:
        dim: channels of a head, h.
        max_seq_len: kept for information.
        base: of the geometric series of wavelengths.
        scale_factor: see above.
        low_freq_factor: see above.
        high_freq_factor: see above.
        old_context_len: see above.
        layout: which channels of a head form a pair.
    """

    def __init__(
        self,
        dim: int,
        max_seq_len: int = 4096,
        base: float = 10_000,
        scale_factor: float = 8,
        low_freq_factor: float = 1,
        high_freq_factor: float = 4,
        old_context_len: int = 8192,
        *,
        layout: Layout = "interleaved",
    ) -> None:
        self.scale_factor = scale_factor
        self.low_freq_factor = low_freq_factor
        self.high_freq_factor = high_freq_factor
        self.old_context_len = old_context_len
        super().__init__(dim, max_seq_len, base, layout=layout)

    def _scale(self, frequencies: Tensor) -> Tensor:
        wavelengths = 2 * math.pi / frequencies
        low, high = self.low_freq_factor, self.high_freq_factor
        slow = wavelengths > self.old_context_len / low
        fast = wavelengths < self.old_context_len / high
        if high == low:  # no band in between
            return torch.where(slow, frequencies / self.scale_factor, frequencies)
        blend = (self.old_context_len / wavelengths - low) / (high - low)
        between = (1 - blend) * frequencies / self.scale_factor + blend * frequencies
        return torch.where(slow, frequencies / self.scale_factor, torch.where(fast, frequencies, between))


class YarnRotaryPositionalEmbeddings(RotaryPositionalEmbeddings):
    """Rotary positions stretched by YaRN (Peng et al. 2023, https://arxiv.org/abs/2309.00071).

    Channels that turn often within the original context stay, those that turn seldom are slowed down by a factor,
    and a ramp over the channels joins the two; scores grow by a constant.

    Args:
        dim: channels of a head that turn.
        max_seq_len: kept for information.
        base: of the geometric series of wavelengths.
        factor: by which slow channels are slowed down.
        original_max_seq_len: context length that is being stretched.
        beta_fast: channels with at least so many turns in the original context stay.
        beta_slow: those with at most so many are slowed down in full.
        truncate: whether the ramp begins and ends at whole channels.
        magnitude: what cosine and sine are multiplied by.
        layout: which channels of a head form a pair.
    """

    def __init__(
        self,
        dim: int,
        max_seq_len: int,
        base: float,
        *,
        factor: float,
        original_max_seq_len: int,
        beta_fast: float = 32.0,
        beta_slow: float = 1.0,
        truncate: bool = True,
        magnitude: float = 1.0,
        layout: Layout = "interleaved",
    ) -> None:
        self.factor = factor
        first, last = (
            dim * math.log(original_max_seq_len / (turns * 2 * math.pi)) / (2 * math.log(base))
            for turns in (beta_fast, beta_slow)
        )
        if truncate:
            first, last = math.floor(first), math.ceil(last)
        self.ramp = (max(first, 0), min(last, dim - 1))
        super().__init__(dim, max_seq_len, base, layout=layout)
        self.magnitude = magnitude

    def _scale(self, frequencies: Tensor) -> Tensor:
        first, last = self.ramp
        width = last - first or 0.001
        slowed = ((torch.arange(len(frequencies), dtype=torch.float32, device="cpu") - first) / width).clamp(0, 1)
        return frequencies / self.factor * slowed + frequencies * (1 - slowed)


class LongRotaryPositionalEmbeddings(RotaryPositionalEmbeddings):
    """Rotary positions of LongRoPE (Ding et al. 2024, https://arxiv.org/abs/2402.13753): a factor for each channel.

    Texts longer than the original context have other factors than those that fit; each text, be it packed with
    others, has those of its own length. Keys that were cached while a text was short do not serve a longer one: a
    text that outgrows the original context has to be read again, as ``transformers`` does for Phi-3.

    Args:
        dim: channels of a head that turn, r.
        max_seq_len: kept for information.
        base: of the geometric series of wavelengths.
        short_factors: r / 2 numbers by which wavelengths are multiplied in texts that fit.
        long_factors: the same for longer texts.
        original_max_seq_len: the length up to which a text fits.
        magnitude: what cosine and sine are multiplied by.
        layout: which channels of a head form a pair.
    """

    by_reach = True

    def __init__(
        self,
        dim: int,
        max_seq_len: int,
        base: float,
        *,
        short_factors: tuple[float, ...],
        long_factors: tuple[float, ...],
        original_max_seq_len: int,
        magnitude: float = 1.0,
        layout: Layout = "interleaved",
    ) -> None:
        super().__init__(dim, max_seq_len, base, layout=layout)
        self.original_max_seq_len = self.switch_at = original_max_seq_len
        self.magnitude = magnitude
        plain = torch.tensor(self._frequencies, device="cpu")
        self._frequencies = (plain / torch.tensor(short_factors, device="cpu")).tolist()
        self._long_frequencies: list[float] = (plain / torch.tensor(long_factors, device="cpu")).tolist()

    def _frequencies_of(self, reach: Tensor) -> Tensor:
        both = torch.tensor([self._frequencies, self._long_frequencies], dtype=torch.float32, device=reach.device)
        return both[(reach > self.original_max_seq_len).long()].unsqueeze(2)


class DynamicRotaryPositionalEmbeddings(RotaryPositionalEmbeddings):
    """Rotary positions whose base grows with texts longer than the context (``rope_type: dynamic``).

    A text of length l > ``original_max_seq_len`` has the base times ``(factor * l / original_max_seq_len - (factor -
    1)) ** (r / (r - 2))``; shorter ones, each by itself also when packed with others, have the base as it is. In a
    key-value cache, as in that of ``transformers``, a key stays as it was turned when the text was as long as that.

    Args:
        dim: channels of a head that turn, r.
        max_seq_len: kept for information.
        base: of the geometric series of wavelengths.
        factor: see above.
        original_max_seq_len: see above.
        layout: which channels of a head form a pair.
    """

    by_reach = True

    def __init__(
        self,
        dim: int,
        max_seq_len: int,
        base: float,
        *,
        factor: float,
        original_max_seq_len: int,
        layout: Layout = "interleaved",
    ) -> None:
        super().__init__(dim, max_seq_len, base, layout=layout)
        self.factor = factor
        self.original_max_seq_len = original_max_seq_len

    def _frequencies_of(self, reach: Tensor) -> Tensor:
        longer = reach.clamp(min=self.original_max_seq_len) / self.original_max_seq_len
        growth = (self.factor * longer - (self.factor - 1)) ** (self.dim / (self.dim - 2))
        exponents = torch.arange(0, self.dim, 2, device=reach.device).float() / self.dim
        return 1.0 / (self.base * growth[:, :, None, None]) ** exponents

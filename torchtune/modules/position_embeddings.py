"""Rotary position embeddings (Su et al. 2021, https://arxiv.org/abs/2104.09864)."""

import math
from typing import Literal

import torch
from torch import Tensor, nn

from torchtune.data import Documents
from torchtune.modules.kernels.documents import check_coverage
from torchtune.utils import launches_kernels, to_device

Layout = Literal["interleaved", "half", "halves"]


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor, layout: Layout) -> Tensor:
    """Apply rotary embeddings in float32: rotate pairs of channels by the angles of their position.

    Args:
        x: ``[b, s, n, h]``.
        cos: float32 ``[b or 1, s, 1, r / 2]``, cosine of the angles; only the first r ≤ h channels are rotated.
        sin: sine of the angles, of the same shape.
        layout: pairs of channels: ``"interleaved"`` (0, 1), (2, 3) …, ``"half"`` (0, r/2), (1, r/2 + 1) …, or
            ``"halves"``, which is ``"half"`` within each half of the channels.

    Returns:
        Tensor of the shape and dtype of ``x``.

    Example:
        >>> x, angle = torch.tensor([[[[1.0, 0.0]]]]), torch.full((1, 1, 1, 1), torch.pi / 2)
        >>> torchtune.modules.apply_rope(x, angle.cos(), angle.sin(), "interleaved").round()
        tensor([[[[-0., 1.]]]])
    """
    rotated_channels = 2 * cos.shape[-1]  # r
    unrotated_channels = x.shape[-1] - rotated_channels
    if unrotated_channels > 0:
        first_channels, last_channels = x.split([rotated_channels, unrotated_channels], dim=-1)
        rotated = apply_rope(first_channels, cos, sin, layout)
        return torch.cat((rotated, last_channels), dim=-1)
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return _rotate(x, cos, sin, layout)
    return _Rotation.apply(x, cos, sin, layout, 1)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, layout: Layout, direction: int = 1) -> Tensor:
    """Rotate by the angles, or with ``direction`` -1 by their negatives."""
    is_compiling = torch.compiler.is_compiling()
    if not is_compiling and launches_kernels(x.device):  # where operators convert dtypes while they read
        return _rotate_in_three_launches(x, cos, sin, layout, direction)
    if direction < 0:  # the inverse rotation, for the backward pass
        sin = -sin
    x_float = x.float()
    if layout == "halves":
        # Each half of the channels is rotated for itself.
        halves = x_float.unflatten(-1, (2, -1))  # [b, s, n, 2, r / 2]
        cos = cos.unflatten(-1, (2, -1))  # [b or 1, s, 1, 2, r / 4]
        sin = sin.unflatten(-1, (2, -1))
        rotated = _rotate(halves, cos, sin, "half")
        return rotated.flatten(-2).to(x.dtype)
    if layout == "interleaved":
        pairs = x_float.unflatten(-1, (-1, 2))  # [b, s, n, r / 2, 2]
        if is_compiling:  # the compiler has no complex numbers
            first, second = pairs.unbind(-1)
            rotated_first = first * cos - second * sin
            rotated_second = second * cos + first * sin
            rotated = torch.stack((rotated_first, rotated_second), dim=-1)
        else:
            # A rotation is the product with a complex number of length 1.
            numbers = torch.view_as_complex(pairs.contiguous())  # [b, s, n, r / 2]
            rotated = torch.view_as_real(numbers * torch.complex(cos, sin))
        return rotated.flatten(-2).to(x.dtype)
    first, second = x_float.chunk(2, dim=-1)  # [b, s, n, r / 2]
    if is_compiling:
        rotated_first = first * cos - second * sin
        rotated_second = second * cos + first * sin
        return torch.cat((rotated_first, rotated_second), dim=-1).to(x.dtype)
    # Four passes over memory, where the lines above take eight.
    rotated = torch.empty_like(x_float)
    rotated_first, rotated_second = rotated.chunk(2, dim=-1)
    torch.mul(first, cos, out=rotated_first).addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=rotated_second).addcmul_(first, sin)
    return rotated.to(x.dtype)


def _rotate_in_three_launches(x: Tensor, cos: Tensor, sin: Tensor, layout: Layout, direction: int) -> Tensor:
    """As :func:`_rotate`, ``first * cos - second * sin`` and ``second * cos + first * sin`` in three launches."""
    rotated = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    # The shape of the channels with a dimension of pairs.
    shape: tuple[int, ...]
    if layout == "interleaved":
        shape = (-1, 2)
        pair_dim = -1
    elif layout == "half":
        shape = (2, -1)
        pair_dim = -2
    else:
        shape = (2, 2, -1)
        pair_dim = -2
        cos = cos.unflatten(-1, (2, -1))
        sin = sin.unflatten(-1, (2, -1))
    pairs = x.unflatten(-1, shape)
    first, second = pairs.unbind(pair_dim)
    rotated_first, rotated_second = rotated.unflatten(-1, shape).unbind(pair_dim)
    # Mixed dtypes compute in the widest, float32, and are rounded once, into `rotated`.
    products = pairs * cos.unsqueeze(pair_dim)
    first_product, second_product = products.unbind(pair_dim)
    torch.addcmul(first_product, second, sin, value=-direction, out=rotated_first)
    torch.addcmul(second_product, first, sin, value=direction, out=rotated_second)
    return rotated


class _Rotation(torch.autograd.Function):
    """Rotation; its gradient is the inverse rotation, so ``x`` is not saved for the backward pass."""

    @staticmethod
    def forward(ctx, x: Tensor, cos: Tensor, sin: Tensor, layout: Layout, direction: int) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.layout = layout
        ctx.direction = direction
        return _rotate(x, cos, sin, layout, direction)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        cos, sin = ctx.saved_tensors
        grad_x = _Rotation.apply(grad, cos, sin, ctx.layout, -ctx.direction)
        return grad_x, None, None, None, None


def positions_of(x: Tensor, documents: Documents | None) -> Tensor:
    """Return the position of each element of ``x`` ``[b, s, ...]`` in its document; without documents, ``[s]``.

    Raises:
        ValueError: the documents do not cover the ``b * s`` positions.
    """
    if documents is None:
        return torch.arange(x.shape[1], device=x.device)
    batch_size, seq_len = x.shape[:2]
    check_coverage(documents.num_tokens, batch_size * seq_len)
    return documents.positions().view(batch_size, seq_len).to(x.device)


def seq_lens_of(input_pos: Tensor, documents: Documents | None) -> Tensor | None:
    """Return the document length of each position ``[b, s]``, or None without documents."""
    if documents is None:
        return None
    lengths = documents.cu_seqlens.diff().to(input_pos.device)  # [documents]
    # With output_size, the host does not wait for the sum of the lengths.
    length_of_position = lengths.repeat_interleave(lengths, output_size=documents.num_tokens)  # [b * s]
    return length_of_position.view(input_pos.shape)


class RotaryPositionalEmbeddings(nn.Module):
    """Rotary position embeddings.

    The module has no tensors: frequencies are Python numbers, unaffected by the meta device, ``to_empty`` and casts.
    Call :meth:`cos_sin` once per forward pass and share the result between layers.

    Args:
        dim: r, number of rotated channels of a head: h, or fewer for partial rotary embeddings (the first ones).
        max_seq_len: informational; positions beyond it work too.
        base: base (theta) of the frequencies.
        layout: which channels of a head form a pair; see :func:`apply_rope`.
        stretch: divisor of the positions (linear scaling).

    Attributes:
        axes: for positions with several coordinates, the coordinate that rotates each of the r / 2 pairs of channels.
        depends_on_length: whether the angles depend on the sequence length, argument ``seq_lens`` of :meth:`cos_sin`.
        switch_at: the sequence length beyond which all angles change (LongRoPE), or None.
        magnitude: factor of cosine and sine.

    Example:
        >>> rope, x = torchtune.modules.RotaryPositionalEmbeddings(dim=4), torch.ones(1, 3, 2, 4)
        >>> torch.equal(rope(x)[:, 0], x[:, 0])  # position 0 is not rotated
        True
    """

    depends_on_length = False
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
        self.axes: list[int] = []
        if dim % 2:
            raise ValueError(f"Rotary positions need an even head size, got {dim}.")
        self.dim = dim
        self.max_seq_len = max_seq_len
        self.base = base
        exponents = torch.arange(0, dim, 2, dtype=torch.int64, device="cpu").float() / dim
        self._frequencies: list[float] = self._scale(1.0 / (base**exponents)).tolist()
        self._frequencies_on_device: Tensor | None = None  # on the CUDA device that asked last

    def _scale(self, frequencies: Tensor) -> Tensor:
        """Hook for variants: float32 ``[r / 2]`` to float32 ``[r / 2]``."""
        return frequencies / self.stretch

    def rope_init(self) -> None:
        """Do nothing; exists for callers that materialize models by hand."""

    def _frequencies_of(self, seq_lens: Tensor) -> Tensor:
        """Hook for variants: lengths ``[b or 1, s or 1]`` to float32 ``[r / 2]``, or to one row per position."""
        device = seq_lens.device
        copy = self._frequencies_on_device
        if copy is not None and copy.device == device:
            return copy
        frequencies = to_device(self._frequencies, device, torch.float32)
        # A graph of CUDA cannot repeat the copy from the host. A fake tensor is not for later calls.
        if device.type == "cuda" and type(frequencies) is Tensor:
            self._frequencies_on_device = frequencies
        return frequencies

    @torch.no_grad()
    def cos_sin(self, input_pos: Tensor, seq_lens: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Compute cosine and sine of the angles, times ``magnitude``.

        Args:
            input_pos: positions ``[b, s]`` or ``[s]``, or ``[coordinates, b, s]`` with ``axes``.
            seq_lens: int64 ``[b or 1, s or 1]``, sequence length of each position; by default each row is one sequence
                that ends at its last position. Used if ``depends_on_length``.

        Returns:
            Two float32 tensors ``[b or 1, s, 1, r / 2]``.
        """
        if input_pos.ndim == 1:
            input_pos = input_pos.unsqueeze(0)
        if input_pos.ndim == 3:
            coordinates = input_pos[self.axes].movedim(0, -1)  # [b, s, r / 2], one of each pair of channels
            # For the length below, time is enough: text, which ends a sequence, has the same number in all coordinates.
            input_pos = input_pos[0]
        else:
            coordinates = input_pos[..., None]  # [b, s, 1]
        if seq_lens is None:
            seq_lens = input_pos.amax(dim=-1, keepdim=True) + 1
        # With a dimension for heads, which have the same angles: [b, s, 1, r / 2].
        angles = coordinates.to(torch.float32)[:, :, None] * self._frequencies_of(seq_lens)
        cos = angles.cos()
        sin = angles.sin()
        if self.magnitude != 1.0:
            cos = cos * self.magnitude
            sin = sin * self.magnitude
        return cos, sin

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
        cos, sin = self.cos_sin(input_pos)
        return apply_rope(x, cos, sin, self.layout)

    def extra_repr(self) -> str:
        """Return the rotated channels, base and layout for ``repr``."""
        return f"dim={self.dim}, base={self.base}, layout={self.layout}"


class GridRotaryPositionalEmbeddings(RotaryPositionalEmbeddings):
    """Rotary embeddings of patches: rows rotate half of the pairs of channels, columns the other half.

    Args:
        dim: size of a head; a multiple of 4.
        base: base (theta) of the frequencies.
        kind: ``"axial"``: rows and columns have the same frequencies, the even ones (Qwen); ``"alternating"``: rows
            have the even ones, columns the odd ones (Pixtral); ``"halves"``: as axial, but columns rotate the first
            half of the channels, rows the second (Gemma 4); ``"neighbors"``: as halves, but neighboring channels form
            a pair (Llama 4).
    """

    def __init__(self, dim: int, base: float = 10_000, *, kind: str = "axial") -> None:
        self.kind = kind
        layouts: dict[str, Layout] = {"halves": "halves", "neighbors": "interleaved"}
        super().__init__(dim, base=base, layout=layouts.get(kind, "half"))
        # Coordinate 0 is the row, 1 the column; in these layouts columns rotate the first half of the channels.
        first_axis = 1 if kind in layouts else 0
        second_axis = 1 - first_axis
        self.axes = [first_axis] * (dim // 4) + [second_axis] * (dim // 4)

    def _scale(self, frequencies: Tensor) -> Tensor:
        of_rows = frequencies[0::2]
        of_columns = of_rows
        if self.kind == "alternating":
            of_columns = frequencies[1::2]
        return torch.cat([of_rows, of_columns])


class ScaledRotaryPositionalEmbeddings(RotaryPositionalEmbeddings):
    """Rotary embeddings with Llama 3.1's scaling of low frequencies (arXiv:2407.21783).

    Wavelengths above ``old_context_len / low_freq_factor`` are multiplied by ``scale_factor``; those below
    ``old_context_len / high_freq_factor`` are unchanged; frequencies in between are interpolated linearly.

    Args:
        dim: r, number of rotated channels of a head.
        max_seq_len: informational.
        base: base (theta) of the frequencies.
        scale_factor: factor of long wavelengths.
        low_freq_factor: defines the long wavelengths.
        high_freq_factor: defines the short wavelengths.
        old_context_len: pre-training context length.
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
        low = self.low_freq_factor
        high = self.high_freq_factor
        wavelengths = 2 * math.pi / frequencies
        scaled = frequencies / self.scale_factor
        is_long = wavelengths > self.old_context_len / low
        is_short = wavelengths < self.old_context_len / high
        if high == low:  # nothing to interpolate
            return torch.where(is_long, scaled, frequencies)
        blend = (self.old_context_len / wavelengths - low) / (high - low)  # 0: long, 1: short
        interpolated = (1 - blend) * frequencies / self.scale_factor + blend * frequencies
        unchanged_or_interpolated = torch.where(is_short, frequencies, interpolated)
        return torch.where(is_long, scaled, unchanged_or_interpolated)


class YarnRotaryPositionalEmbeddings(RotaryPositionalEmbeddings):
    """Rotary embeddings with YaRN scaling (Peng et al. 2023, https://arxiv.org/abs/2309.00071).

    High frequencies are unchanged, low frequencies are divided by a factor, and frequencies in between are
    interpolated. Cosine and sine are multiplied by a constant.

    Args:
        dim: r, number of rotated channels of a head.
        max_seq_len: informational.
        base: base (theta) of the frequencies.
        factor: divisor of low frequencies.
        original_max_seq_len: pre-training context length.
        beta_fast: channels with at least this many rotations in the pre-training context are unchanged.
        beta_slow: channels with at most this many rotations are divided by ``factor``.
        truncate: whether the interpolation range is rounded to whole channels.
        magnitude: factor of cosine and sine.
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

        def find_channel(turns: float) -> float:
            """The channel, a fraction of one, that turns so often in the pre-training context."""
            # The wavelength of channel i is 2 π base ** (2 i / dim); this is the one wanted, over 2 π.
            positions_per_radian = original_max_seq_len / (turns * 2 * math.pi)
            return dim * math.log(positions_per_radian) / (2 * math.log(base))

        first = find_channel(beta_fast)
        last = find_channel(beta_slow)
        if truncate:
            first = math.floor(first)
            last = math.ceil(last)
        # Channels that are interpolated. The limit dim - 1 is that of the reference implementation, although there are
        # dim / 2 channels.
        self.ramp = (max(first, 0), min(last, dim - 1))
        super().__init__(dim, max_seq_len, base, layout=layout)  # calls _scale, which reads factor and ramp
        self.magnitude = magnitude

    def _scale(self, frequencies: Tensor) -> Tensor:
        first, last = self.ramp
        width = last - first or 0.001  # no division by zero
        channels = torch.arange(len(frequencies), dtype=torch.float32, device="cpu")
        slowed_share = ((channels - first) / width).clamp(0, 1)  # 0: unchanged, 1: divided by the factor
        slowed = frequencies / self.factor
        return slowed * slowed_share + frequencies * (1 - slowed_share)


class LongRotaryPositionalEmbeddings(RotaryPositionalEmbeddings):
    """Rotary embeddings with LongRoPE scaling, a factor per channel (Ding et al. 2024, arXiv:2402.13753).

    Sequences longer than the pre-training context use other factors than shorter ones; the length is that of the packed
    document. When a sequence outgrows the pre-training context, cached keys are invalid and the sequence must be
    prefilled again, as ``transformers`` does for Phi-3.

    Args:
        dim: r, number of rotated channels of a head.
        max_seq_len: informational.
        base: base (theta) of the frequencies.
        short_factors: r / 2 multipliers of the wavelengths for sequences up to ``original_max_seq_len``.
        long_factors: r / 2 multipliers for longer sequences.
        original_max_seq_len: pre-training context length.
        magnitude: factor of cosine and sine.
        layout: which channels of a head form a pair.
    """

    depends_on_length = True

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
        self.original_max_seq_len = original_max_seq_len
        self.switch_at = original_max_seq_len
        self.magnitude = magnitude
        plain = torch.tensor(self._frequencies, device="cpu")
        short = plain / torch.tensor(short_factors, device="cpu")
        long = plain / torch.tensor(long_factors, device="cpu")
        self._frequencies = short.tolist()
        self._long_frequencies: list[float] = long.tolist()

    def _frequencies_of(self, seq_lens: Tensor) -> Tensor:
        short_and_long = to_device([self._frequencies, self._long_frequencies], seq_lens.device, torch.float32)
        is_long = (seq_lens > self.original_max_seq_len).long()  # [b or 1, s or 1], 0 or 1
        return short_and_long[is_long].unsqueeze(2)


class ProportionalRotaryPositionalEmbeddings(RotaryPositionalEmbeddings):
    """Rotary embeddings that rotate a fraction of a head's pairs of channels (``rope_type: proportional``).

    The frequencies are computed for the full head; pairs beyond the fraction have frequency 0.

    Args:
        dim: h, channels of a head.
        max_seq_len: informational.
        base: base (theta) of the frequencies.
        fraction: fraction of the pairs that are rotated, the first ones.
        factor: divisor of the positions.
        layout: which channels of a head form a pair.
    """

    def __init__(
        self,
        dim: int,
        max_seq_len: int,
        base: float,
        *,
        fraction: float,
        factor: float = 1.0,
        layout: Layout = "interleaved",
    ) -> None:
        self.fraction = fraction
        super().__init__(dim, max_seq_len, base, layout=layout, stretch=factor)

    def _scale(self, frequencies: Tensor) -> Tensor:
        num_rotated = int(self.fraction * self.dim // 2)  # pairs
        rotated = super()._scale(frequencies[:num_rotated])
        unrotated = torch.zeros(self.dim // 2 - num_rotated, device="cpu")
        return torch.cat((rotated, unrotated))


class DynamicRotaryPositionalEmbeddings(RotaryPositionalEmbeddings):
    """Rotary embeddings with dynamic NTK scaling: the base grows with long sequences (``rope_type: dynamic``).

    For a sequence of length l > ``original_max_seq_len``, the base is multiplied by ``(factor * l /
    original_max_seq_len - (factor - 1)) ** (r / (r - 2))``. The length is that of the packed document. Keys in a KV
    cache keep the rotation for the length at which they were cached, as in ``transformers``.

    Args:
        dim: r, number of rotated channels of a head.
        max_seq_len: informational.
        base: base (theta) of the frequencies.
        factor: factor of the context length.
        original_max_seq_len: pre-training context length.
        layout: which channels of a head form a pair.
    """

    depends_on_length = True

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

    def _frequencies_of(self, seq_lens: Tensor) -> Tensor:
        longer = seq_lens.clamp(min=self.original_max_seq_len) / self.original_max_seq_len  # [b or 1, s or 1]
        growth = (self.factor * longer - (self.factor - 1)) ** (self.dim / (self.dim - 2))
        bases = self.base * growth[:, :, None, None]
        exponents = torch.arange(0, self.dim, 2, device=seq_lens.device).float() / self.dim  # [r / 2]
        return 1.0 / bases**exponents

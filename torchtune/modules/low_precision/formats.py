"""Storage formats of frozen weights in 4 and 8 bits.

A format stores a weight ``[..., rows, columns]`` as several tensors with the same leading dimensions. A row of a stored
tensor depends only on the same row of the weight, so ranks quantize the rows of their shards independently. All stored
tensors are integers, because ``module.to(dtype)`` would cast floating-point tensors; scales are stored as the bits of
float32 values.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from torchtune.modules.conversion import ConversionError

# The quantiles of a normal distribution, scaled to [-1, 1] (Dettmers et al., "QLoRA", 2023, appendix E).
NF4_LEVELS = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
_ELEMENTS_AT_ONCE = 2**22  # number of elements to quantize at once, which limits the memory of temporary tensors
_TINY = torch.finfo(torch.float32).tiny  # the smallest scale, so that rows of zeros are not divided by zero


class Stored(NamedTuple):
    """A frozen weight in its storage format.

    Attributes:
        decode: computes the full weight from ``tensors``.
        tensors: the stored tensors.
        dtype: dtype of the full weight.
    """

    decode: Callable[..., Tensor]
    tensors: tuple[Tensor, ...]
    dtype: torch.dtype

    def full(self) -> Tensor:
        """Decode the full weight."""
        return self.decode(*self.tensors)


class WeightFormat(ABC):
    """Base class of storage formats of a weight.

    Args:
        dtype: dtype of the decoded weight.
    """

    # For each stored tensor, the suffix of its name after the name of the weight.
    suffixes: ClassVar[tuple[str, ...]]

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def explain_unsupported(self, columns: int) -> str:
        """Return the reason if rows with this number of columns cannot be stored, otherwise an empty string."""
        return ""

    @abstractmethod
    def storage_shapes(self, shape: Sequence[int]) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Return the shape and dtype of each tensor that stores a weight of this shape."""

    @abstractmethod
    def encode_rows(self, rows: Tensor) -> tuple[Tensor, ...]:
        """Quantize float32 rows ``[n, columns]``."""

    @abstractmethod
    def decode(self, *tensors: Tensor) -> Tensor:
        """Dequantize the weight ``[..., columns]`` to ``dtype``."""

    def tensor_names(self, weight_name: str) -> tuple[str, ...]:
        """Return the names of the stored tensors of a weight."""
        return tuple(weight_name + suffix for suffix in self.suffixes)

    def empty(self, like: Tensor) -> list[Tensor]:
        """Make uninitialized storage tensors for a weight, on the same device."""
        tensors = []
        for shape, dtype in self.storage_shapes(like.shape):
            tensors.append(torch.empty(shape, dtype=dtype, device=like.device))
        return tensors

    @torch.no_grad()
    def encode(self, weight: Tensor) -> list[Tensor]:
        """Quantize ``weight`` and return the tensors that store it, on the same device."""
        tensors = self.empty(weight)
        rows = weight.flatten(0, -2)  # [..., rows, columns] -> [n, columns]
        row_views = [tensor.flatten(0, weight.dim() - 2) for tensor in tensors]
        rows_at_once = max(1, _ELEMENTS_AT_ONCE // weight.shape[-1])
        for start in range(0, len(rows), rows_at_once):
            chunk = slice(start, start + rows_at_once)
            encoded = self.encode_rows(rows[chunk].float())
            for view, values in zip(row_views, encoded, strict=True):
                view[chunk] = values
        return tensors


class NF4(WeightFormat):
    """4-bit NormalFloat: the nearest of 16 levels times the largest magnitude of a block of columns.

    The scales are also quantized (double quantization): to 8 bits between the smallest and the largest scale of a row.
    With n columns and blocks of 64, an element takes 4.125 + 64 / n bits.

    Args:
        dtype: dtype of the decoded weight.
        block_size: number of columns that share a scale.

    Raises:
        ConversionError: ``block_size`` is not a positive even number.
    """

    # Two codes per byte, the 8-bit codes of the scales, and (minimum, step) of the scales of each row.
    suffixes = ("", "_scale", "_range")

    def __init__(self, dtype: torch.dtype, block_size: int = 64) -> None:
        super().__init__(dtype)
        if not isinstance(block_size, int) or block_size < 2 or block_size % 2:
            raise ConversionError(f"NF4: block_size is {block_size!r}, give an even number, for example 64.")
        self.block_size = block_size

    def explain_unsupported(self, columns: int) -> str:
        if columns % self.block_size == 0:
            return ""
        return f"the block size {self.block_size} does not divide {columns}"

    def storage_shapes(self, shape: Sequence[int]) -> list[tuple[tuple[int, ...], torch.dtype]]:
        *rows, columns = shape
        packed = (*rows, columns // 2)
        scale_codes = (*rows, columns // self.block_size)
        scale_range = (*rows, 2)
        return [(packed, torch.uint8), (scale_codes, torch.uint8), (scale_range, torch.int32)]

    def encode_rows(self, rows: Tensor) -> tuple[Tensor, ...]:
        blocks = rows.unflatten(1, (-1, self.block_size))  # [n, blocks, block_size]

        # Quantize the scales: 8 bits between the smallest and the largest one of the row.
        scale = blocks.abs().amax(-1)  # [n, blocks]
        lowest, highest = scale.aminmax(dim=1, keepdim=True)  # [n, 1]
        step = (highest - lowest) / 255
        steps_above_lowest = (scale - lowest) / step.clamp(min=_TINY)
        scale_codes = steps_above_lowest.round().to(torch.uint8)  # [n, blocks]
        # The bits of float32 numbers as integers, which module.to(dtype) does not cast.
        scale_range = torch.cat([lowest, step], 1).view(torch.int32)  # [n, 2]
        # Decoding uses the quantized scales, so the nearest levels are those of the decoded scales.
        decoded_scale = _decode_scales(scale_codes, scale_range).clamp(min=_TINY)
        levels = torch.tensor(NF4_LEVELS, device=rows.device)
        midpoints = (levels[1:] + levels[:-1]) / 2
        scaled_blocks = blocks / decoded_scale.unsqueeze(-1)
        codes = torch.bucketize(scaled_blocks, midpoints, out_int32=True)
        codes = codes.flatten(1).to(torch.uint8)  # [n, columns], each 0 to 15
        packed = codes[:, ::2] << 4 | codes[:, 1::2]  # the first of two columns in the high bits
        return packed, scale_codes, scale_range

    def decode(self, packed: Tensor, scale_codes: Tensor, scale_range: Tensor) -> Tensor:
        table = _byte_to_levels(packed, self.dtype)
        pairs = table.index_select(0, packed.flatten().int())  # two elements in each
        blocks = pairs.view(self.dtype).view(*scale_codes.shape, self.block_size)  # [..., blocks, block_size]
        scale = _decode_scales(scale_codes, scale_range).unsqueeze(-1)  # [..., blocks, 1]
        return blocks.mul_(scale).flatten(-2)


def _decode_scales(scale_codes: Tensor, scale_range: Tensor) -> Tensor:
    """Decode float32 scales of blocks from their 8-bit codes and the (minimum, step) of each row."""
    lowest, step = scale_range.view(torch.float32).split(1, -1)
    return torch.addcmul(lowest, scale_codes.float(), step)


_BYTE_TO_LEVELS: dict[tuple[torch.device, torch.dtype], Tensor] = {}  # one table per device and dtype


def _byte_to_levels(packed: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a lookup table from a byte to its two levels, packed in one integer: a lookup writes two elements."""
    key = packed.device, dtype
    # Tables of fake tensors and of traced graphs have no values, so they are not kept.
    has_values = type(packed) in (Tensor, torch.nn.Parameter) and not torch.compiler.is_compiling()
    if has_values and key in _BYTE_TO_LEVELS:
        return _BYTE_TO_LEVELS[key]
    pairs = []  # in the order of bytes, whose high bits are the code of the first element
    for high_level in NF4_LEVELS:
        for low_level in NF4_LEVELS:
            pairs.append([high_level, low_level])
    levels = torch.tensor(pairs, dtype=dtype, device=packed.device)  # [256, 2]
    # By the size of an element: a dtype of twice that size, whose values index_select copies as they are.
    dtypes_of_pairs = {2: torch.int32, 4: torch.int64, 8: torch.complex128}
    dtype_of_pair = dtypes_of_pairs[dtype.itemsize]
    table = levels.view(dtype_of_pair).flatten()  # [256]
    if has_values and type(table) is Tensor:  # not a fake tensor
        _BYTE_TO_LEVELS[key] = table
    return table


class _ScaledRows(WeightFormat):
    """Base class of formats with 8 bits per element and a scale per row."""

    suffixes = ("", "_scale")
    largest_value: ClassVar[float]  # that an element represents
    storage_dtype: ClassVar[torch.dtype]

    def storage_shapes(self, shape: Sequence[int]) -> list[tuple[tuple[int, ...], torch.dtype]]:
        *rows, columns = shape
        values = (*rows, columns)
        scale = (*rows, 1)
        return [(values, self.storage_dtype), (scale, torch.int32)]

    def _scale_rows(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return rows divided by their scales ``[n, columns]``, and the bits of the scales ``[n, 1]``."""
        largest = rows.abs().amax(1, keepdim=True).clamp(min=_TINY)  # [n, 1]
        scale = largest / self.largest_value
        # The division may round the largest element up, beyond the range of the dtype.
        scaled = (rows / scale).clamp(-self.largest_value, self.largest_value)
        return scaled, scale.view(torch.int32)


class Int8(_ScaledRows):
    """int8 with a scale per row: multiples of 1 / 127 of the row's largest magnitude."""

    largest_value = 127.0
    storage_dtype = torch.int8

    def encode_rows(self, rows: Tensor) -> tuple[Tensor, ...]:
        scaled, scale = self._scale_rows(rows)
        return scaled.round().to(torch.int8), scale

    def decode(self, values: Tensor, scale: Tensor) -> Tensor:
        scaled = values.to(self.dtype)
        return scaled.mul_(scale.view(torch.float32))


class Float8(_ScaledRows):
    """float8 (e4m3) with a scale per row."""

    largest_value = 448.0
    storage_dtype = torch.uint8  # the bits, because ``module.to(dtype)`` would cast float8

    def encode_rows(self, rows: Tensor) -> tuple[Tensor, ...]:
        scaled, scale = self._scale_rows(rows)
        return scaled.to(torch.float8_e4m3fn).view(torch.uint8), scale

    def decode(self, values: Tensor, scale: Tensor) -> Tensor:
        scaled = values.view(torch.float8_e4m3fn).to(self.dtype)
        return scaled.mul_(scale.view(torch.float32))

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
_CHUNK = 2**22  # number of elements to quantize at once, which limits the memory of temporary tensors
_TABLES: dict[tuple[torch.device, torch.dtype], Tensor] = {}


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

    def empty(self, like: Tensor) -> list[Tensor]:
        """Make uninitialized storage tensors for a weight, on the same device."""
        return [torch.empty(shape, dtype=dtype, device=like.device) for shape, dtype in self.storage_shapes(like.shape)]

    @torch.no_grad()
    def encode(self, weight: Tensor) -> list[Tensor]:
        """Quantize ``weight`` and return the tensors that store it, on the same device."""
        tensors = self.empty(weight)
        rows, parts = weight.flatten(0, -2), [tensor.flatten(0, weight.dim() - 2) for tensor in tensors]
        step = max(1, _CHUNK // weight.shape[-1])
        for start in range(0, len(rows), step):
            chunk = slice(start, start + step)
            for part, values in zip(parts, self.encode_rows(rows[chunk].float()), strict=True):
                part[chunk] = values
        return tensors


class NF4(WeightFormat):
    """4-bit NormalFloat: the nearest of 16 levels times the largest magnitude of a block of columns.

    The scales are also quantized (double quantization): to 8 bits between the smallest and the largest scale of a row.
    With n columns and blocks of 64, an element takes 4.125 + 64 / n bits.
    """

    suffixes = ("", "_scale", "_range")

    def __init__(self, dtype: torch.dtype, block_size: int = 64) -> None:
        super().__init__(dtype)
        if block_size < 2 or block_size % 2:
            raise ConversionError(f"NF4: block_size is {block_size}, give an even number, for example 64.")
        self.block_size = block_size

    def explain_unsupported(self, columns: int) -> str:
        return f"the block size {self.block_size} does not divide {columns}" if columns % self.block_size else ""

    def storage_shapes(self, shape: Sequence[int]) -> list[tuple[tuple[int, ...], torch.dtype]]:
        *rows, columns = shape
        return [
            ((*rows, columns // 2), torch.uint8),
            ((*rows, columns // self.block_size), torch.uint8),
            ((*rows, 2), torch.int32),
        ]

    def encode_rows(self, rows: Tensor) -> tuple[Tensor, ...]:
        blocks = rows.unflatten(1, (-1, self.block_size))
        scale = blocks.abs().amax(-1)
        low, high = scale.aminmax(dim=1, keepdim=True)
        extent = torch.cat([low, (high - low) / 255], 1)
        scale = ((scale - low) / extent[:, 1:].clamp(min=torch.finfo(torch.float32).tiny)).round().to(torch.uint8)
        # Decoding uses the quantized scales, so the codes are chosen for them.
        decoded = _scales(scale, extent.view(torch.int32)).clamp(min=torch.finfo(torch.float32).tiny)
        levels = torch.tensor(NF4_LEVELS, device=rows.device)
        codes = torch.bucketize(blocks / decoded.unsqueeze(-1), (levels[1:] + levels[:-1]) / 2, out_int32=True)
        codes = codes.flatten(1).to(torch.uint8)
        return codes[:, ::2] << 4 | codes[:, 1::2], scale, extent.view(torch.int32)

    def decode(self, codes: Tensor, scale: Tensor, extent: Tensor) -> Tensor:
        table = _level_pairs(codes, self.dtype)
        weight = table.index_select(0, codes.flatten().int()).view(self.dtype)
        blocks = weight.view(*scale.shape, self.block_size)
        return blocks.mul_(_scales(scale, extent).unsqueeze(-1)).flatten(-2)


def _scales(codes: Tensor, extent: Tensor) -> Tensor:
    """Decode float32 scales of blocks from their 8-bit codes and the (minimum, step) of each row."""
    low, step = extent.view(torch.float32).split(1, -1)
    return torch.addcmul(low, codes.float(), step)


def _level_pairs(codes: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a lookup table from a byte to its two levels, packed in one integer: a lookup writes two elements."""
    key = codes.device, dtype
    is_real = type(codes) in (Tensor, torch.nn.Parameter) and not torch.compiler.is_compiling()
    if is_real and key in _TABLES:
        return _TABLES[key]
    both = [[first, second] for first in NF4_LEVELS for second in NF4_LEVELS]
    table = torch.tensor(both, dtype=dtype, device=codes.device)
    table = table.view({2: torch.int32, 4: torch.int64, 8: torch.complex128}[dtype.itemsize]).flatten()
    if is_real and type(table) is Tensor:  # not a fake tensor
        _TABLES[key] = table
    return table


class _ByRow(WeightFormat):
    """Base class of formats with 8 bits per element and a scale per row."""

    suffixes = ("", "_scale")
    largest: ClassVar[float]
    codes: ClassVar[torch.dtype]

    def storage_shapes(self, shape: Sequence[int]) -> list[tuple[tuple[int, ...], torch.dtype]]:
        *rows, columns = shape
        return [((*rows, columns), self.codes), ((*rows, 1), torch.int32)]

    def _scaled(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        scale = rows.abs().amax(1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny) / self.largest
        return (rows / scale).clamp(-self.largest, self.largest), scale.view(torch.int32)


class Int8(_ByRow):
    """int8 with a scale per row: multiples of 1 / 127 of the row's largest magnitude."""

    largest, codes = 127.0, torch.int8

    def encode_rows(self, rows: Tensor) -> tuple[Tensor, ...]:
        scaled, scale = self._scaled(rows)
        return scaled.round().to(torch.int8), scale

    def decode(self, codes: Tensor, scale: Tensor) -> Tensor:
        return codes.to(self.dtype).mul_(scale.view(torch.float32))


class Float8(_ByRow):
    """float8 (e4m3) with a scale per row."""

    largest, codes = 448.0, torch.uint8

    def encode_rows(self, rows: Tensor) -> tuple[Tensor, ...]:
        scaled, scale = self._scaled(rows)
        return scaled.to(torch.float8_e4m3fn).view(torch.uint8), scale

    def decode(self, codes: Tensor, scale: Tensor) -> Tensor:
        return codes.view(torch.float8_e4m3fn).to(self.dtype).mul_(scale.view(torch.float32))

"""How frozen weights are stored in four and eight bits.

A format turns a weight ``[..., rows, columns]`` into a few tensors with the same leading dimensions, each row of them
from the same row of the weight alone: a rank quantises the rows of its shard and gets the bits that one device gets.
All of them are integers, because ``module.to(dtype)`` casts what is floating point, and scales are float32.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

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
_CHUNK = 2**22  # elements that are quantised at once, so that temporaries stay small beside the weight
_TABLES: dict[tuple[torch.device, torch.dtype], Tensor] = {}


class WeightFormat(ABC):
    """A form of a weight.

    Args:
        dtype: of the decoded weight.
    """

    # What is appended to the name of a weight for each of its tensors.
    suffixes: ClassVar[tuple[str, ...]]
    # Which of these have a dimension for the columns of the weight, their last one.
    by_column: ClassVar[tuple[bool, ...]]

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def refusal(self, columns: int) -> str:
        """Why rows of so many columns cannot be stored; empty if they can."""
        return ""

    @abstractmethod
    def outlines(self, shape: Sequence[int]) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of the tensors that store a weight of this shape."""

    @abstractmethod
    def encode_rows(self, rows: Tensor) -> tuple[Tensor, ...]:
        """Quantise float32 rows ``[n, columns]``."""

    @abstractmethod
    def decode(self, *tensors: Tensor) -> Tensor:
        """The weight ``[..., columns]``, in ``dtype``."""

    def empty(self, like: Tensor) -> list[Tensor]:
        """Unfilled tensors for a weight, on its device."""
        return [torch.empty(shape, dtype=dtype, device=like.device) for shape, dtype in self.outlines(like.shape)]

    @torch.no_grad()
    def encode(self, weight: Tensor) -> list[Tensor]:
        """The tensors that store ``weight``, on its device."""
        tensors = self.empty(weight)
        rows, parts = weight.flatten(0, -2), [tensor.flatten(0, weight.dim() - 2) for tensor in tensors]
        step = max(1, _CHUNK // weight.shape[-1])
        for start in range(0, len(rows), step):
            chunk = slice(start, start + step)
            for part, values in zip(parts, self.encode_rows(rows[chunk].float()), strict=True):
                part[chunk] = values
        return tensors


class NF4(WeightFormat):
    """Four bits an element, the nearest of 16 levels times the largest magnitude of a block of columns.

    These scales are quantised too (double quantisation): to eight bits, between the smallest and the largest of a row.
    With n columns and blocks of 64 that makes 4.125 + 64 / n bits an element.
    """

    suffixes = ("", "_scale", "_range")
    by_column = (True, True, False)

    def __init__(self, dtype: torch.dtype, block_size: int = 64) -> None:
        super().__init__(dtype)
        if block_size < 2 or block_size % 2:
            raise ConversionError(f"NF4: block_size is {block_size}, give an even number, for example 64.")
        self.block_size = block_size

    def refusal(self, columns: int) -> str:
        return f"the block size {self.block_size} does not divide {columns}" if columns % self.block_size else ""

    def outlines(self, shape: Sequence[int]) -> list[tuple[tuple[int, ...], torch.dtype]]:
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
        # Levels are chosen for the scale that decoding will use.
        decoded = _scales(scale, extent.view(torch.int32)).clamp(min=torch.finfo(torch.float32).tiny)
        levels = torch.tensor(NF4_LEVELS, device=rows.device)
        codes = torch.bucketize(blocks / decoded.unsqueeze(-1), (levels[1:] + levels[:-1]) / 2, out_int32=True)
        codes = codes.flatten(1).to(torch.uint8)
        return codes[:, ::2] << 4 | codes[:, 1::2], scale, extent.view(torch.int32)

    def decode(self, codes: Tensor, scale: Tensor, extent: Tensor) -> Tensor:
        table = _pairs(codes, self.dtype)
        weight = table.index_select(0, codes.flatten().int()).view(self.dtype)
        blocks = weight.view(*scale.shape, self.block_size)
        return blocks.mul_(_scales(scale, extent).unsqueeze(-1)).flatten(-2)


def _scales(codes: Tensor, extent: Tensor) -> Tensor:
    """Scales of blocks in float32, out of eight bits each and two numbers for each row."""
    low, step = extent.view(torch.float32).split(1, -1)
    return torch.addcmul(low, codes.float(), step)


def _pairs(codes: Tensor, dtype: torch.dtype) -> Tensor:
    """Both levels of every byte, as one integer each: a look-up reads a byte and writes two elements."""
    key = codes.device, dtype
    is_real = type(codes) in (Tensor, torch.nn.Parameter) and not torch.compiler.is_compiling()
    if is_real and key in _TABLES:
        return _TABLES[key]
    both = [[first, second] for first in NF4_LEVELS for second in NF4_LEVELS]
    table = torch.tensor(both, dtype=dtype, device=codes.device)
    table = table.view({2: torch.int32, 4: torch.int64, 8: torch.complex128}[dtype.itemsize]).flatten()
    if is_real and type(table) is Tensor:  # not of a simulation
        _TABLES[key] = table
    return table


class _ByRow(WeightFormat):
    """Eight bits an element and a scale for every row."""

    suffixes = ("", "_scale")
    by_column = (True, False)
    largest: ClassVar[float]
    codes: ClassVar[torch.dtype]

    def outlines(self, shape: Sequence[int]) -> list[tuple[tuple[int, ...], torch.dtype]]:
        *rows, columns = shape
        return [((*rows, columns), self.codes), ((*rows, 1), torch.int32)]

    def _scaled(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        scale = rows.abs().amax(1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny) / self.largest
        return (rows / scale).clamp(-self.largest, self.largest), scale.view(torch.int32)


class Int8(_ByRow):
    """Eight bits an element: whole multiples of 1 / 127 of the largest magnitude of a row."""

    largest, codes = 127.0, torch.int8

    def encode_rows(self, rows: Tensor) -> tuple[Tensor, ...]:
        scaled, scale = self._scaled(rows)
        return scaled.round().to(torch.int8), scale

    def decode(self, codes: Tensor, scale: Tensor) -> Tensor:
        return codes.to(self.dtype).mul_(scale.view(torch.float32))


class Float8(_ByRow):
    """Eight bits an element: float8 (four bits of exponent, three of mantissa), scaled by row."""

    largest, codes = 448.0, torch.uint8

    def encode_rows(self, rows: Tensor) -> tuple[Tensor, ...]:
        scaled, scale = self._scaled(rows)
        return scaled.to(torch.float8_e4m3fn).view(torch.uint8), scale

    def decode(self, codes: Tensor, scale: Tensor) -> Tensor:
        return codes.view(torch.float8_e4m3fn).to(self.dtype).mul_(scale.view(torch.float32))

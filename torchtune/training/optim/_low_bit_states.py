"""States of an optimizer in 8 or 4 bits an element, in blocks with a scale of their own.

The numbers are those of torchao's ``AdamW8bit`` (arXiv 2110.02861), ``AdamW4bit`` (2309.01507) and ``AdamWFp8``, whose
maps and block sizes are read. What differs is when they are computed: a bounded number of elements at a time, by the
optimizer that steps float32 stand-ins, so that no state is ever whole in float32 and nothing has to be compiled.
"""

import functools
from dataclasses import dataclass

import torch

from torchtune.modules._torchao import StateFormat, state_map
from torchtune.utils import computes_on_cpu

# Below this number of elements states stay as they are: norms and biases gain nothing.
SMALLEST = 4096


def _tables(name: str, signed: bool, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What :func:`_make_tables` returns, made once but for simulations, whose tensors may not outlive them."""
    make = _make_tables if computes_on_cpu(torch.device("cpu")) else _make_tables.__wrapped__
    return make(name, signed, device)


@functools.lru_cache(maxsize=8)
def _make_tables(name: str, signed: bool, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(values of the codes, midpoints between them, code of the lowest number that shares the upper 16 bits)."""
    values = state_map(name, signed)
    middles = torch.cat([(values[1:] - values[:-1]) * 0.5 + values[:-1], torch.tensor([torch.inf])])
    upper = torch.arange(2**16, dtype=torch.int64)
    upper += (upper >= 2**15).long()  # among negative numbers the lowest has the greatest bits
    bits = torch.where(upper >= 2**15, upper - 2**16, upper).clamp(max=2**15 - 1) * 2**16
    lowest = bits.to(torch.int32).view(torch.float32).nan_to_num(0.0)
    codes = torch.bucketize(lowest, middles[:-1], right=True).to(torch.uint8)
    return values.to(device), middles.to(device), codes.to(device)


def _nearest(scaled: torch.Tensor, name: str, signed: bool) -> torch.Tensor:
    """Codes (uint8) of the values nearest to numbers from -1 to 1; the greater of two as near.

    A table over the upper 16 bits names a code that is right or one too low: no two midpoints share these bits. On a
    CPU this takes a twentieth of the time of a binary search.
    """
    _, middles, codes = _tables(name, signed, scaled.device)
    index = (scaled.view(torch.int32) >> 16).bitwise_and_(0xFFFF)
    low = codes.index_select(0, index.view(-1))
    low += scaled.view(-1) >= middles.index_select(0, low.int())
    return low


@dataclass(frozen=True, eq=False)
class LowBitState:
    """A state of a parameter, or of the shard of it that this rank holds.

    Attributes:
        codes: uint8 [blocks * block size * bits / 8].
        scale: float32 [blocks].
        format: how to read them.
        signed: whether the state has negative numbers.
    """

    codes: torch.Tensor
    scale: torch.Tensor
    format: StateFormat
    signed: bool

    @staticmethod
    def zeros(numel: int, format: StateFormat, *, signed: bool, device: torch.device) -> "LowBitState":
        """A state of zeros."""
        blocks = -(-numel // format.block_size)
        codes = torch.zeros(blocks * format.block_size * format.bits // 8, dtype=torch.uint8, device=device)
        return LowBitState(codes, torch.zeros(blocks, device=device), format, signed)

    def _pieces(self, start: int, numel: int) -> tuple[torch.Tensor, torch.Tensor]:
        size, bits = self.format.block_size, self.format.bits
        first, last = start // size, -(-(start + numel) // size)
        return self.codes[first * size * bits // 8 : last * size * bits // 8], self.scale[first:last]

    def read(self, start: int, numel: int) -> torch.Tensor:
        """Elements from ``start``, a multiple of the block size, as float32 [numel]."""
        codes, scale = self._pieces(start, numel)
        if self.format.name == "fp8":
            values = codes.view(torch.float8_e4m3fn).float()
        else:
            if self.format.bits == 4:
                codes = torch.stack([codes >> 4, codes & 0xF], -1).view(-1)
            values = _tables(self.format.name, self.signed, codes.device)[0].index_select(0, codes.int())
        return values.view(len(scale), -1).mul_(scale[:, None]).view(-1)[:numel]

    def write(self, start: int, values: torch.Tensor) -> None:
        """Store float32 ``values`` [n] from ``start`` on: whole blocks, but for the end of the state."""
        codes, scale = self._pieces(start, values.numel())
        missing = len(scale) * self.format.block_size - values.numel()
        values = torch.nn.functional.pad(values, (0, missing)) if missing else values
        blocks = values.view(len(scale), -1)
        largest = blocks.abs().amax(-1).clamp_(min=1e-12)
        if self.format.name == "fp8":
            largest /= torch.finfo(torch.float8_e4m3fn).max
            new = (blocks / largest[:, None]).to(torch.float8_e4m3fn).view(torch.uint8).view(-1)
        else:
            new = _nearest(blocks / largest[:, None], self.format.name, self.signed)
            if self.format.bits == 4:
                new = new[::2] << 4 | new[1::2]
        codes.copy_(new)
        scale.copy_(largest)

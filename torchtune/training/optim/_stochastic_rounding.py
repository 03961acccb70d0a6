"""Rounding float32 to bfloat16 up or down at random, so that the mean is exact.

A bfloat16 number is the upper half of a float32. Between two neighbours ``a < x < b`` the result is ``b`` with
probability ``(x - a) / (b - a)``: its expectation is ``x``, and an update far below the spacing of bfloat16 takes
effect with the right frequency instead of never. On the bits: add a uniform 16-bit number, drop the lower half.
"""

import functools
import random

import torch

from torchtune.utils import computes_on_cpu

# Elements handled at a time. What is drawn depends on it, so it must not depend on the number of threads.
_CHUNK_CPU = 2**20
_CHUNK_ACCELERATOR = 2**23

_TABLE_WINDOW = 2**20
_UPPER_HALF = -65536  # 0xFFFF0000 as int32


def chunk_size(device: torch.device) -> int:
    """Elements to be handled at a time on ``device``."""
    return _CHUNK_CPU if computes_on_cpu(device) else _CHUNK_ACCELERATOR


@functools.lru_cache(maxsize=2)
def _table(seed: int) -> torch.Tensor:
    """int32 [window + chunk] of uniform 16-bit numbers."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 2**16, (_TABLE_WINDOW + _CHUNK_CPU,), dtype=torch.int32, generator=generator)


class RandomBits:
    """Uniform 16-bit numbers that depend on nothing but (seed, stream, step) and the order of the calls.

    On a CPU drawing one number per element would take longer than the optimizer's arithmetic. A chunk therefore takes
    a window of one fixed table, at a random offset, and flips it with a random 16-bit mask. The mask alone makes
    every element uniform and the elements of different chunks or steps pairwise independent; inside a chunk that
    is so because the table is random. Means and variances are hence those of independent draws.

    Args:
        seed: of the run.
        stream: tells apart what is rounded in the same step by different optimizers, or of different shards.
        step: number of the optimizer step.
    """

    def __init__(self, seed: int, stream: int | str, step: int) -> None:
        self._seed = seed % 2**63
        self._draw = random.Random(f"{seed}/{stream}/{step}")
        self._generators: dict[torch.device, torch.Generator] = {}
        self._buffers: dict[torch.device, torch.Tensor] = {}

    def next(self, count: int, device: torch.device) -> torch.Tensor:
        """int32 [count] from 0 to 65535, valid until the next call; ``count`` is at most the device's chunk."""
        buffer = self._buffers.get(device)
        if buffer is None or buffer.numel() < count:
            buffer = self._buffers[device] = torch.empty(count, dtype=torch.int32, device=device)
        out = buffer[:count]
        if computes_on_cpu(device):
            offset, mask = self._draw.randrange(_TABLE_WINDOW), self._draw.getrandbits(16)
            return torch.bitwise_xor(_table(self._seed)[offset : offset + count], mask, out=out)
        if device not in self._generators:
            self._generators[device] = torch.Generator(device=device).manual_seed(self._draw.getrandbits(62))
        return out.random_(0, 2**16, generator=self._generators[device])


def round_stochastically_(values: torch.Tensor, bits: RandomBits) -> torch.Tensor:
    """Round float32 ``values`` in place to numbers that bfloat16 represents; zeros, infinities and NaN stay.

    Args:
        values: float32, contiguous.
        bits: source of randomness.

    Returns:
        ``values``.
    """
    for piece in values.view(-1).split(chunk_size(values.device)):
        noise = bits.next(piece.numel(), piece.device)
        if piece.device.type != "cpu":  # the NaN of other devices has all bits set and would wrap around to -0
            noise.masked_fill_(piece.isnan(), 0)
        piece.view(torch.int32).add_(noise).bitwise_and_(_UPPER_HALF)
    return values


def spread_within_rounding_(values: torch.Tensor, bits: RandomBits) -> torch.Tensor:
    """Move each of ``values``, numbers that bfloat16 represents, to a random place that rounds to it again.

    Args:
        values: float32, contiguous; zeros and what is not finite stay.
        bits: source of randomness.

    Returns:
        ``values``.
    """
    for piece in values.view(-1).split(chunk_size(values.device)):
        noise = bits.next(piece.numel(), piece.device)
        noise.clamp_(min=1).sub_(2**15)  # from 1 - 2**15 to 2**15 - 1: never as far as a tie
        noise.masked_fill_((piece == 0) | ~piece.isfinite(), 0)
        piece.view(torch.int32).add_(noise)
    return values


def shares_storage(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors look at the same allocation; asked of the storages, as fake tensors have no addresses."""
    return one.untyped_storage()._cdata == other.untyped_storage()._cdata


def merge_neighbours(values: list[torch.Tensor]) -> list[torch.Tensor]:
    """Flat views that cover ``values``; those that lie one after another in the same memory become one."""
    runs: list[torch.Tensor] = []
    for value in values:
        last = runs[-1] if runs else None
        if (
            last is not None
            and shares_storage(last, value)
            and last.storage_offset() + last.numel() == value.storage_offset()
        ):
            runs[-1] = last.as_strided((last.numel() + value.numel(),), (1,))
        else:
            runs.append(value.view(-1))
    return runs

"""Means of named values over micro-batches and ranks."""

from collections.abc import Mapping
from typing import Any

import torch

from torchtune.training.parallel._parallel_dims import ParallelDims

# Name -> (sum, count).
Figures = Mapping[str, tuple[torch.Tensor | float, torch.Tensor | int]]


class Means:
    """Sums and counts by name, for means over all ranks; all ranks add the same names, with ``prefix`` before each."""

    def __init__(self, prefix: str = "") -> None:
        self._prefix = prefix
        self._sums: dict[str, list[Any]] = {}

    def add(self, figures: Figures) -> None:
        """Add the sums and counts of a micro-batch, without a host sync."""
        for name, pair in figures.items():
            sums = self._sums.setdefault(self._prefix + name, [0.0, 0.0])
            sums[:] = [before + _wide(value) for before, value in zip(sums, pair, strict=True)]

    def numbers(self) -> list[Any]:
        """Sum and count of every name, for an all-reduce."""
        return [number for pair in self._sums.values() for number in pair]

    def over(self, dims: ParallelDims) -> dict[str, float]:
        """The means over all ranks; a collective."""
        return self.of(dims.exchange(self.numbers())[0])

    def of(self, sums: list[float]) -> dict[str, float]:
        """The means, from the all-reduced :meth:`numbers`; names with a count of 0 are left out."""
        pairs = zip(self._sums, sums[::2], sums[1::2], strict=True)
        return {name: total / count for name, total, count in pairs if count}

    def clear(self) -> None:
        """Remove all values."""
        self._sums = {}


def _wide(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return float(value)
    return value.detach().to(torch.float32 if value.device.type == "mps" else torch.float64)

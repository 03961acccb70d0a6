"""Means of named figures over micro-batches and processes."""

from collections.abc import Mapping
from typing import Any

import torch

from torchtune.training.parallel._parallel_dims import ParallelDims

# Name -> (sum, number of what it is a sum of).
Figures = Mapping[str, tuple[torch.Tensor | float, torch.Tensor | int]]


class Means:
    """Sums of named figures; their means are taken over all processes, which all add the same names.

    Args:
        prefix: of the names.
    """

    def __init__(self, prefix: str = "") -> None:
        self._prefix = prefix
        self._sums: dict[str, list[Any]] = {}

    def add(self, figures: Figures) -> None:
        """Add what a micro-batch contributes; tensors stay on their device, which is not waited for.

        Args:
            figures: name -> (sum, number of what it is a sum of).
        """
        for name, pair in figures.items():
            sums = self._sums.setdefault(self._prefix + name, [0.0, 0.0])
            sums[:] = [before + _wide(value) for before, value in zip(sums, pair, strict=True)]

    def numbers(self) -> list[Any]:
        """What processes add up: sum and number of every figure."""
        return [number for pair in self._sums.values() for number in pair]

    def over(self, dims: ParallelDims) -> dict[str, float]:
        """The means over all processes, which call it together."""
        return self.of(dims.exchange(self.numbers())[0])

    def of(self, sums: list[float]) -> dict[str, float]:
        """The means, of the sums over all processes of :meth:`numbers`; a figure of nothing is left out."""
        pairs = zip(self._sums, sums[::2], sums[1::2], strict=True)
        return {name: total / count for name, total, count in pairs if count}

    def clear(self) -> None:
        """Begin anew."""
        self._sums = {}


def _wide(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return float(value)
    return value.detach().to(torch.float32 if value.device.type == "mps" else torch.float64)

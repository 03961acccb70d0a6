"""Numbers of a step that arrive one step later, as they do from a CUDA device, in runs on the CPU."""

from typing import Any

import pytest
import torch

from torchtune.training import ParallelDims
from torchtune.training.optim import _gradients


class LateNumbers:
    """In place of ``LateExchange``, whose numbers are on their way from a device."""

    has_arrived = True

    def __init__(self, sums: list[float], flags: list[bool]) -> None:
        self.message = torch.tensor([*sums, *flags], dtype=torch.float64)
        self._received = (sums, flags)

    def wait(self) -> tuple[list[float], list[bool]]:
        """The numbers."""
        return self._received


def decide_late(patch: pytest.MonkeyPatch) -> None:
    """Let runs on the CPU decide on a step as those on a CUDA device do."""

    def start_exchange(self: ParallelDims, numbers: list[Any], flags: list[Any]) -> LateNumbers:
        return LateNumbers(*self.exchange(numbers, flags))

    patch.setattr(ParallelDims, "sends_from_device", lambda self, numbers: True)
    patch.setattr(ParallelDims, "start_exchange", start_exchange)
    patch.setattr(_gradients, "_DEVICES_AHEAD", {"cpu"})

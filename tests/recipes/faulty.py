"""What goes wrong at chosen steps: losses, named in the YAML of the tests, and a disk."""

import os
from pathlib import Path
from typing import Any

import torch

from tests.torchtune.training.checkpointing.small import leave_free
from torchtune.modules.loss import LinearCrossEntropyLoss


class _InfiniteGradient(torch.autograd.Function):
    """The identity, whose gradient is infinite."""

    @staticmethod
    def forward(ctx: Any, loss: torch.Tensor) -> torch.Tensor:
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * float("inf")


class FaultyLoss(LinearCrossEntropyLoss):
    """On one rank, the loss of some calls is NaN, or its gradient is infinite, or it is multiplied by 100.

    Args:
        rank: where it goes wrong.
        nan: calls (from 1) that give NaN.
        inf: calls with an infinite gradient.
        spike: calls whose loss is far too large.
        **kwargs: for the loss.
    """

    def __init__(
        self,
        rank: int = 0,
        nan: list[int] | None = None,
        inf: list[int] | None = None,
        spike: list[int] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.here = int(os.environ.get("RANK", "0")) == rank
        self.nan, self.inf, self.spike = nan or [], inf or [], spike or []
        self.calls = 0

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """The loss, or what became of it."""
        self.calls += 1
        loss = super().forward(*args, **kwargs)
        if not self.here:
            return loss
        if self.calls in self.nan:
            return loss * float("nan")
        if self.calls in self.spike:
            return loss * 100
        return _InfiniteGradient.apply(loss) if self.calls in self.inf else loss


def fill(recipe: Any, disk: str, *, first: int, last: int) -> None:
    """Let nearly no space be left on the disk from step ``first`` to ``last``; all processes call it."""
    recipe.checkpointer.close()
    recipe.dims.any(False)
    if recipe.dims.is_main and recipe.global_step == first - 1:
        leave_free(Path(disk), 50_000)
    if recipe.dims.is_main and recipe.global_step == last:
        (Path(disk) / "filler").unlink()
    recipe.dims.any(False)

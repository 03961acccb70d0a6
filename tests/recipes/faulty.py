"""What goes wrong at chosen steps: losses, named in the YAML of the tests."""

import os
from typing import Any

import torch

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
    """On one rank, the loss of some training calls is NaN, or its gradient is infinite, or it is multiplied by 100.

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
        self.nan = nan or []
        self.inf = inf or []
        self.spike = spike or []
        self.calls = 0

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """The loss, or what became of it."""
        self.calls += torch.is_grad_enabled()
        loss = super().forward(*args, **kwargs)
        if not self.here or not torch.is_grad_enabled():
            return loss
        if self.calls in self.nan:
            return loss * float("nan")
        if self.calls in self.spike:
            return loss * 100
        return _InfiniteGradient.apply(loss) if self.calls in self.inf else loss

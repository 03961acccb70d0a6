"""Losses of single positions, for who looks at them beside the sum."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from torch import Tensor

_kept: ContextVar[list[Tensor] | None] = ContextVar("kept", default=None)


@contextmanager
def keep_row_losses() -> Iterator[list[Tensor]]:
    """Inside the block, losses that are computed by position add them, detached [n], in order, to the list.

    Example:
        >>> loss, labels = torchtune.modules.loss.LinearCrossEntropyLoss(), torch.tensor([[5, -100, 7]])
        >>> with torchtune.modules.loss.keep_row_losses() as kept:
        ...     total, count = loss.sum_and_count(torch.randn(1, 3, 8), labels, torch.nn.Linear(8, 16, bias=False))
        >>> len(torch.cat(kept)) == int(count) == 2
        True
    """
    found: list[Tensor] = []
    token = _kept.set(found)
    try:
        yield found
    finally:
        _kept.reset(token)


def seen(losses: Tensor) -> Tensor:
    """``losses`` [n] themselves, added to the list of :func:`keep_row_losses`."""
    found = _kept.get()
    if found is not None:
        found.append(losses.detach())
    return losses

"""Recording of per-token losses."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from torch import Tensor

_recorded: ContextVar[list[Tensor] | None] = ContextVar("kept", default=None)


@contextmanager
def keep_row_losses() -> Iterator[list[Tensor]]:
    """Record per-token losses inside the block: losses append them, detached [n], to the yielded list.

    Example:
        >>> loss, labels = torchtune.modules.loss.LinearCrossEntropyLoss(), torch.tensor([[5, -100, 7]])
        >>> with torchtune.modules.loss.keep_row_losses() as kept:
        ...     total, count = loss.sum_and_count(torch.randn(1, 3, 8), labels, torch.nn.Linear(8, 16, bias=False))
        >>> len(torch.cat(kept)) == int(count) == 2
        True
    """
    found: list[Tensor] = []
    token = _recorded.set(found)
    try:
        yield found
    finally:
        _recorded.reset(token)


def record_row_losses(losses: Tensor) -> Tensor:
    """Append ``losses`` [n] to the list of :func:`keep_row_losses`, if any, and return them."""
    found = _recorded.get()
    if found is not None:
        found.append(losses.detach())
    return losses

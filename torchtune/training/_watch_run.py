"""What looks after the loop of a recipe, in one line of it."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torchtune.training._out_of_memory import explain_out_of_memory
from torchtune.training._parallel_dims import ParallelDims
from torchtune.training._throughput import Throughput
from torchtune.training._watchdog import Watchdog


@contextmanager
def watch_run(
    cfg: Any, dims: ParallelDims, throughput: Throughput, hang_timeout_minutes: float | None
) -> Iterator[None]:
    """Inside the block a run that stands still is ended, and one that lacks memory says which settings need less.

    Args:
        cfg: settings of the recipe, for the advice.
        dims: the processes of the run.
        throughput: knows what this process is doing.
        hang_timeout_minutes: after which a run stands still, see :class:`Watchdog`; None does not look.

    Raises:
        OutOfMemoryError: see :func:`explain_out_of_memory`.
    """
    minutes = hang_timeout_minutes
    with (
        Watchdog(throughput.activity, dims, None if minutes is None else 60 * minutes),
        explain_out_of_memory(cfg, throughput.activity, dims),
    ):
        yield

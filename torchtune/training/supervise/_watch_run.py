"""What looks after a run, from its first process group to its last file."""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from torchtune.training._recipe_settings import RecipeSettings
from torchtune.training.measure._throughput import Throughput
from torchtune.training.parallel._parallel_dims import ParallelDims
from torchtune.training.supervise._out_of_memory import explain_out_of_memory
from torchtune.training.supervise._watchdog import Watchdog
from torchtune.utils import Activity, watch_activity, watched_activity

T = TypeVar("T")


def watched(recipe_main: Callable[[Any], T]) -> Callable[[Any], T]:
    """Decorate ``recipe_main``: a run that stands still in set-up, loop or end is ended, see :class:`Watchdog`.

    The settings say after how long: ``hang_timeout_minutes``, None does not look.
    """

    @functools.wraps(recipe_main)
    def run(cfg: Any) -> T:
        activity, minutes = Activity(None, "set-up"), RecipeSettings.of(cfg).hang_timeout_minutes
        with watch_activity(activity), Watchdog(activity, None, None if minutes is None else 60 * minutes):
            return recipe_main(cfg)

    return run


@contextmanager
def watch_run(
    cfg: Any, dims: ParallelDims, throughput: Throughput, hang_timeout_minutes: float | None
) -> Iterator[None]:
    """Inside the block a run that lacks memory says which settings need less, and one that stands still is ended.

    Args:
        cfg: settings of the recipe, for the advice.
        dims: the processes of the run.
        throughput: knows what this process is doing.
        hang_timeout_minutes: after which a run stands still, see :class:`Watchdog`; None does not look. Where
            :func:`watched` looks after the whole run, it says so already.

    Raises:
        OutOfMemoryError: see :func:`explain_out_of_memory`.
    """
    minutes = None if watched_activity() is throughput.activity else hang_timeout_minutes
    with (
        Watchdog(throughput.activity, dims, None if minutes is None else 60 * minutes),
        explain_out_of_memory(cfg, throughput.activity, dims),
    ):
        yield

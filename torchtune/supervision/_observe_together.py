"""Observers that communicate with other ranks: all ranks leave them out, or none does."""

from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from torchtune.supervision._heartbeats import is_connection_error
from torchtune.training.parallel import ParallelDims
from torchtune.utils import LostRankError, ObserverGuard, UserError

T = TypeVar("T")
# Longest that a rank may need for an observer, after a rank that was faster.
_TIMEOUT = timedelta(hours=3)
# Time in which the other ranks fail, too, if an observer fails on all ranks.
_FAILED_TOGETHER = timedelta(seconds=60)


class LeftOutError(UserError):
    """An observer has failed on another rank."""


def observe_together(guard: ObserverGuard, function: Callable[[], T], dims: ParallelDims) -> T | None:
    """Call a function that only watches a run and uses collectives, on all ranks; if it fails on any, all go on.

    Errors are usually the same on all ranks, for example a model without a method that is measured. If one rank alone
    fails between two collectives, the others wait for it in the next one, and there is no way to call them back: its
    error is then raised, which ends the run as an error of training does.

    Args:
        guard: logs the warning.
        function: called on every rank.
        dims: processes of the run.

    Returns:
        The result of ``function``; None on all ranks if it failed on any of them.

    Example:
        >>> guard = torchtune.utils.ObserverGuard("measurement")
        >>> torchtune.supervision.observe_together(guard, lambda: 1, torchtune.training.ParallelDims())
        1
    """
    if dims.world_size == 1:
        return guard.call(function)
    result = None
    failure = None
    # A group of its own, because ranks may wait in a collective of another group for a rank that failed.
    group = dist.new_group(backend="gloo", timeout=_TIMEOUT)
    try:
        result = function()
    except LostRankError:
        raise
    except Exception as error:
        if is_connection_error(error):  # the ranks can no longer agree on anything
            raise
        failure = error
    failed = torch.tensor([int(failure is not None)])
    if failure is None:
        # In torch's own function, because the watchdog recognizes by it that this rank waits for another one.
        dist.all_reduce(failed, dist.ReduceOp.MAX, group=group)
    else:
        # A short timeout: the other ranks end `function` soon, too, or wait in a collective of it and never come here.
        try:
            dist.all_reduce(failed, dist.ReduceOp.MAX, group=group, async_op=True).wait(_FAILED_TOGETHER)
        except RuntimeError:
            raise failure from None
    dist.destroy_process_group(group)
    if not failed.item():
        return result
    guard.warn(failure or LeftOutError("it failed on another rank"))
    return None

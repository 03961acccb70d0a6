"""Two ranks whose observers fail: on both, on one after the last collective, and on one between two collectives."""

from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from torchtune.supervision import _observe_together, observe_together
from torchtune.training import ParallelDims
from torchtune.utils import ObserverGuard


def main(folder: Path) -> None:
    """Compare what both ranks go on with."""
    dims = ParallelDims.start(torch.device("cpu"), dp_shard=-1)
    rank = dist.get_rank()

    def measure(fails_on: tuple[int, ...], *, early: bool = False) -> int:
        if early and rank in fails_on:
            raise ValueError("before the others communicate")
        total = dims.sum(rank + 1)[0]
        if rank in fails_on:
            raise ValueError("after all have communicated")
        return total

    guard = ObserverGuard("measurement")
    assert observe_together(guard, lambda: measure(()), dims) == 3
    assert not guard.has_failed
    for fails_on in ((0, 1), (1,), (0,)):
        guard = ObserverGuard("measurement")
        assert observe_together(guard, lambda ranks=fails_on: measure(ranks), dims) is None
        assert guard.has_failed
        assert dims.sum(1) == [2], "the ranks are in step"
    # One rank leaves the other alone in a collective: it cannot go on, and says why instead of waiting for ever.
    _observe_together._FAILED_TOGETHER = timedelta(seconds=0.2)
    with pytest.raises(ValueError if rank == 1 else RuntimeError):
        observe_together(ObserverGuard("measurement"), lambda: measure((1,), early=True), dims)

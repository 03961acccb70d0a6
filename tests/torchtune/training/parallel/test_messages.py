"""What the processes of a run send each other on the host, and what of it grows with their number."""

import json
from typing import Any

import pytest

from tests.devices import DEVICE
from tests.recipes.killing import launch
from tests.recipes.runs import write_config
from tests.torchtune.training.parallel.messages import NAME

Counted = dict[tuple[int, int], dict[str, Any]]
SIZES = (2, 4)
HOST = "allreduce_ torch.float64 all"


@pytest.fixture(scope="module")
def counted(tmp_path_factory):
    """What every process of a run counted, by (number of processes, rank)."""
    folder = tmp_path_factory.mktemp("messages")
    write_config(NAME, folder, folder / "output", batch_size=1, max_steps_per_epoch=3, clip_grad_norm=1.0)
    counts = {}
    for size in SIZES:
        launch("training.parallel.messages", size, folder)
        for rank in range(size):
            counts[size, rank] = json.loads((folder / f"{size}_{rank}" / "counted.json").read_text())
    return counts


@pytest.mark.slow
def test_ranks_exchange_one_message_per_step(counted):
    """Fourteen numbers: loss, norm, 2 means, 3 counts, 5 flags. The first step of an epoch also sends its 3 counts.

    On CUDA devices, a message of its own has those that are there, so that no host waits for them.
    """
    messages = 1 if DEVICE == "cpu" else 2
    for (size, _), run in counted.items():
        steps = run["steps"]
        assert [step["calls"][HOST] for step in steps] == [messages + 1, messages, messages], size
        assert [step["bytes"][HOST] for step in steps] == [8 * 17, 8 * 14, 8 * 14], size


def test_no_kind_of_collective_is_called_more_often_by_more_processes(counted):
    """Besides it: gathers and reductions of shards, and the norm of the gradient. No object is gathered."""
    calls = []
    for run in counted.values():
        calls += [step["calls"] for step in run["steps"][1:]]
    assert all(rank_calls == calls[0] for rank_calls in calls)
    assert not any("uint8" in kind for kind in calls[0]), calls[0]
    assert calls[0].keys() - {HOST} == {
        "_allgather_base_ torch.float32 all",
        "_reduce_scatter_base_ torch.float32 all",
        "allreduce_ torch.float32 all",
    }

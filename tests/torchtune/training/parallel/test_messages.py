"""What the processes of a run send each other on the host, and what of it grows with their number."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.torchtune.training.parallel.messages import SIZES

ROOT = Path(__file__).parents[4]
HOST = "allreduce_ torch.float64 all"


@pytest.fixture(scope="module")
def counted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("messages")
    command = [sys.executable, str(Path(__file__).with_name("messages.py")), str(folder)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    environment.pop("TORCH_GLOO_LAZY_INIT", None)
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment)
    assert done.returncode == 0, done.stderr[-4000:]
    return {path.stem: json.loads(path.read_text()) for path in folder.glob("*_*_*.json")}


def runs(counted: dict[str, Any]) -> list[tuple[int, list[dict[str, Any]]]]:
    """(ranks, steps) of every process."""
    return [(int(name.split("_")[1]), run["steps"]) for name, run in counted.items() if name.startswith("ours")]


@pytest.mark.slow
def test_one_message_a_step(counted: dict[str, Any]) -> None:
    """The first step of an epoch has one more, for its own counts: 3 numbers; then 9: loss, 3 counts and 5 flags."""
    assert len(runs(counted)) == sum(SIZES)
    for size, steps in runs(counted):
        assert [step["calls"][HOST] for step in steps] == [2, 1, 1], size
        assert [step["bytes"][HOST] for step in steps] == [8 * 12, 8 * 9, 8 * 9], size


def test_no_kind_of_collective_is_called_more_often_by_more_processes(counted: dict[str, Any]) -> None:
    """Besides it: gathers and reductions of shards, and the norm of the gradient. No object is gathered."""
    calls = [step["calls"] for _, steps in runs(counted) for step in steps[1:]]
    assert all(found == calls[0] for found in calls)
    assert not any("uint8" in kind for kind in calls[0]), calls[0]
    assert calls[0].keys() - {HOST} == {
        "_allgather_base_ torch.float32 all",
        "_reduce_scatter_base_ torch.float32 all",
        "allreduce_ torch.float32 all",
    }


def test_set_up_gathers_nothing_from_every_rank(counted: dict[str, Any]) -> None:
    """Ranks agree that nothing failed by a number, and hear what rank 0 found from it alone."""
    calls = [run["setup"]["calls"] for name, run in counted.items() if name.startswith("ours")]
    assert all(found == calls[0] for found in calls)
    assert not any(kind.startswith("allgather_") for kind in calls[0]), calls[0]
    sent = {size: counted[f"ours_{size}_1"]["setup"]["bytes"] for size in SIZES}
    kinds = [kind for kind in sent[2] if "int64" in kind or "uint8" in kind]
    assert kinds
    assert all(sent[8][kind] == pytest.approx(sent[2][kind], abs=16) for kind in kinds), sent  # the folder's name


def test_sockets_do_not_grow_with_the_number_of_processes(counted: dict[str, Any]) -> None:
    """Rank 0 serves the store here, which under torchrun its agent does: a socket more for each process."""
    most = dict.fromkeys(SIZES, 0)
    for name, run in counted.items():
        kind, size, rank = name.split("_")
        if kind == "ours":
            most[int(size)] = max(most[int(size)], max(step["sockets"] for step in run["steps"]) * (rank != "0"))
    assert most[4] == most[8] <= 12, most  # with two processes both neighbours are one
    # What torch opens where it connects every process with every other: this is what it is measured against.
    assert counted["torch_8_7"]["sockets"] - counted["torch_4_3"]["sockets"] >= 4
    served = {size: max(step["sockets"] for step in counted[f"ours_{size}_0"]["steps"]) - most[size] for size in (4, 8)}
    assert served[8] - served[4] <= 2 * 4, "of each process the store knows its own connection and its heartbeat's"

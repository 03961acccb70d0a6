"""A process that reads a stream ahead: nothing shows of it but the time it saves."""

import errno
import gc
import itertools
import json
import multiprocessing
import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.torchtune.datasets.test_streamed import CAPACITY, ids, transform, write_rows
from torchtune.data import BatchLoader, DataError
from torchtune.datasets import StreamedDataset, mixed_dataset, workers
from torchtune.utils import close_run_logger, get_run_logger

KINDS: dict[str, dict[str, Any]] = {
    "rows": {},
    "packs": {"pack_length": CAPACITY},
    "cut packs": {"pack_length": CAPACITY, "split_across_pack": True, "shuffle_buffer": 5},
    "filtered": {"filter_fn": lambda row: row["id"] % 7 > 2, "shuffle_buffer": 3},  # some windows are empty
    "drawn": {"transform": lambda row: {name: [int(np.random.randint(99))] for name in ("tokens", "labels")}},
    "mixed": {},
}


@pytest.fixture(autouse=True)
def two_cores():
    with workers(2):
        yield


def is_running(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def is_gone(pid):
    end = time.monotonic() + 20
    while is_running(pid) and time.monotonic() < end:
        time.sleep(0.02)
    return not is_running(pid)


class Streams:
    """Makes loaders of one stream, with and without a process that reads it ahead."""

    def __init__(self, monkeypatch, paths, **how):
        self._patch = monkeypatch
        self._paths = paths
        self._is_mixed = how.pop("mixed", False)
        self._how = {"transform": transform, "limit": None, "shuffle_buffer": 8} | how

    def loader(self, ahead, rank=0, ranks=1, is_refused=False):
        self._patch.setattr("torchtune.datasets._streamed._SMALL", 0 if ahead else 1 << 30)
        before = set(multiprocessing.active_children())
        dataset = StreamedDataset(source="json", data_files=self._paths, **self._how)
        if self._is_mixed:
            rows = [{"tokens": [1000 + i], "labels": [1]} for i in range(5)]
            dataset = mixed_dataset(None, datasets={"stream": dataset, "rows": rows}, weights={"stream": 2, "rows": 1})
        few = {"batch_size": 4 // ranks, "seed": 2, "max_steps_per_epoch": 5, "collate_fn": list}
        batch_loader = BatchLoader(dataset, shuffle=True, rank=rank, world_size=ranks, **few)
        self.process = next(iter(set(multiprocessing.active_children()) - before), None)
        assert (self.process is not None) == (ahead and not is_refused)
        return batch_loader


def steps(loader, count):
    """Examples, where they come from, and the state after them, of steps of any number of epochs."""
    steps_seen = []
    for batches in itertools.islice(itertools.chain.from_iterable(itertools.repeat(loader)), count):
        state = json.loads(json.dumps(loader.state_dict()))
        examples = itertools.chain.from_iterable(batches)
        steps_seen.append((list(map(ids, examples)), loader.rows(), state))
    return steps_seen


@pytest.mark.parametrize("kind", KINDS)
def test_prefetched_steps_states_and_resume_equal_those_without(kind, tmp_path, monkeypatch):
    streams = Streams(monkeypatch, write_rows(tmp_path, [17, 14]), mixed=kind == "mixed", **KINDS[kind])
    expected = steps(streams.loader(False), 13)
    assert steps(streams.loader(True), 13) == expected
    for ahead in (True, False):
        resumed = streams.loader(ahead)
        next(iter(resumed))  # what was read ahead is not what comes
        resumed.load_state_dict(expected[6][2])
        assert steps(resumed, 6) == expected[7:]
    if kind != "drawn":  # ranks draw numbers of their own
        rank_steps = [steps(streams.loader(True, rank, 2), 13) for rank in (0, 1)]
        for first_rank, second_rank, both in zip(*rank_steps, expected, strict=True):
            assert sorted(first_rank[0] + second_rank[0]) == sorted(both[0])


def test_prefetching_reports_the_same_errors_and_skipped_rows(tmp_path, monkeypatch):
    paths = write_rows(tmp_path, [60])
    lines = Path(paths[0]).read_text().splitlines()
    lines[50] = "{broken"
    lines[20] = '{"id": 1, "length": 0}'
    Path(paths[0]).write_text("\n".join(lines))
    outcomes = []
    for ahead, bad in itertools.product((False, True), ("stop", "skip")):
        loader = Streams(monkeypatch, paths, on_bad_row=bad, pack_length=CAPACITY).loader(ahead)
        seen = []
        get_run_logger(out := tmp_path / f"{ahead} {bad}", "ERROR")
        try:
            for examples, _, _ in (steps(loader, 1)[0] for _ in range(14)):
                left_out = out / "skipped_rows.jsonl"
                seen.append((examples, left_out.read_text() if left_out.exists() else ""))
        except DataError as error:
            seen.append(str(error))
        finally:
            close_run_logger()
        outcomes.append(seen)
    assert outcomes[2:] == outcomes[:2]
    assert "0.jsonl, line 21: no label is left; correct it" in outcomes[0][-1]
    assert 1 < len(outcomes[0]) < 6
    assert [json.loads(line)["line"] for line in outcomes[1][-1][1].splitlines()] == [21, 51]
    assert outcomes[1][0][1] == ""  # not before the run comes to them


def test_error_that_cannot_be_pickled_is_raised_in_the_parent(tmp_path, monkeypatch):
    class Own(Exception):
        def __init__(self, one, two):
            super().__init__(f"{one} and {two}")

    def failing(row):
        raise Own(1, 2)

    with pytest.raises(RuntimeError, match="Own: 1 and 2") as caught:
        steps(Streams(monkeypatch, write_rows(tmp_path, [40]), transform=failing).loader(True), 9)
    assert "in failing" in caught.value.__notes__[0]


def test_killed_prefetch_process_is_reported(tmp_path, monkeypatch):
    streams = Streams(monkeypatch, write_rows(tmp_path, [300]))
    loader = streams.loader(True)
    steps(loader, 2)
    process = streams.process
    for number in (signal.SIGINT, signal.SIGTERM):  # of the whole group: the run may still save
        os.kill(process.pid, number)
    steps(loader, 20)
    state = loader.state_dict()
    os.kill(process.pid, signal.SIGKILL)
    with pytest.raises(DataError, match=r"tokenizes .*0\.jsonl.* was killed, .* memory ran out"):
        steps(loader, 40)
    resumed = streams.loader(True)
    resumed.load_state_dict(state)
    assert steps(resumed, 1)


def test_no_process_is_left_behind(tmp_path, monkeypatch):
    streams = Streams(monkeypatch, write_rows(tmp_path, [300]))
    loader = streams.loader(True)
    steps(loader, 1)
    pid = streams.process.pid
    streams.process = None
    del loader
    gc.collect()
    assert is_gone(pid)
    reading, writing = os.pipe()
    if (child := os.fork()) == 0:
        loader = streams.loader(True)
        steps(loader, 1)
        os.write(writing, str(streams.process.pid).encode())
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    assert is_gone(int(os.read(reading, 20)))
    os.close(reading)
    os.close(writing)


def test_fork_of_the_run_does_not_use_the_prefetch_process(tmp_path, monkeypatch):
    loader = Streams(monkeypatch, write_rows(tmp_path, [300])).loader(True)
    expected = [ids(loader.dataset[i]) for i in range(12)]
    reading, writing = os.pipe()
    if (child := os.fork()) == 0:
        os.write(writing, json.dumps([ids(loader.dataset[i]) for i in range(12)]).encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert json.loads(os.read(reading, 1 << 16)) == expected
    assert ids(loader.dataset[12]) != []
    os.close(reading)
    os.close(writing)


def test_resume_cancels_earlier_requests(tmp_path, monkeypatch):
    here = os.getpid()
    begun = tmp_path / "begun"

    def slow(row):
        if os.getpid() != here and row["id"] < 150:  # of the first window
            with begun.open("a") as file:
                file.write(".")
            time.sleep(1.0)
        return transform(row)

    how = {"transform": slow, "pack_length": CAPACITY, "shuffle_buffer": 150}
    streams = Streams(monkeypatch, write_rows(tmp_path, [1500]), **how)
    expected = steps(streams.loader(False), 30)
    assert expected[20][2]["stream"]["window"] > 0
    loader = streams.loader(True)
    while not begun.exists():
        time.sleep(0.01)
    loader.load_state_dict(expected[20][2])
    assert steps(loader, 9) == expected[21:]
    assert len(begun.read_text()) < 150, "the first window is read to its end"


def test_run_that_cannot_start_processes_reads_without_prefetching(tmp_path, monkeypatch, caplog):
    streams = Streams(monkeypatch, write_rows(tmp_path, [30]))
    expected = steps(streams.loader(False), 3)

    def refused():
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fork", refused)
        assert steps(streams.loader(True, is_refused=True), 3) == expected
    assert "No process can be started to tokenize" in caplog.text
    assert os.strerror(errno.EAGAIN) in caplog.text

"""Many rows are prepared by several processes, and nothing shows of it."""

import errno
import multiprocessing
import os
import signal
import sys

import pytest

from tests.tiny import OPENAI, read_lines, write_conversations, write_lines
from torchtune.data import DataError
from torchtune.datasets import SFTDataset, chat_dataset, kto_dataset, preference_dataset, prompt_dataset, workers
from torchtune.datasets._processes import _FEW, Worker, in_parts, picklable_error

COUNT = 2500


def write(path, bad=0):
    rows = read_lines(write_conversations(path, COUNT))
    return str(write_lines(path, [*rows[: COUNT - bad], *[{"messages": rows[0]["messages"][:1]}] * bad]))


def build(tokenizer, source, count, monkeypatch, cache):
    monkeypatch.setenv("TORCHTUNE_CACHE", str(cache))
    with workers(count):
        return chat_dataset(tokenizer, source=source, **OPENAI)


def test_any_number_of_processes_writes_the_same(tokenizer, tmp_path, monkeypatch):
    source = write(tmp_path / "rows.jsonl")
    single, parallel = (build(tokenizer, source, count, monkeypatch, tmp_path / str(count)) for count in (1, 2))
    assert len(single) == len(parallel) == COUNT
    assert single.fingerprint == parallel.fingerprint
    assert all(single[i] == parallel[i] for i in range(0, COUNT, 97))
    with pytest.raises(DataError, match=rf"rows {COUNT - 3}, {COUNT - 2}, {COUNT - 1}: a conversation needs at least"):
        build(tokenizer, write(tmp_path / "bad.jsonl", bad=3), 2, monkeypatch, tmp_path / "bad")


def test_parent_works_alone_if_no_process_starts(monkeypatch, caplog):
    monkeypatch.setattr("torchtune.datasets._processes._FEW", 100)
    fork = os.fork
    left = iter(range(2))
    before = set(multiprocessing.active_children())

    def limited():
        if next(left, None) is None:
            raise BlockingIOError(errno.EAGAIN, "no more processes")
        return fork()

    monkeypatch.setattr(os, "fork", limited)
    with workers(4):
        assert list(in_parts(range(600), lambda start, rows: (start, len(rows)))) == [(0, 256), (256, 256), (512, 88)]
    assert "4 processes cannot be started to work on rows (no more processes): this one does it alone" in caplog.text
    assert next(left, None) is None
    assert set(multiprocessing.active_children()) == before  # at exit they are waited for


@pytest.mark.parametrize("builder", [kto_dataset, prompt_dataset, preference_dataset])
def test_any_number_of_processes_gives_the_same_answers_and_prompts(builder, tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr("torchtune.datasets._processes._FEW", 100)
    rows = [
        {"prompt": "x" * (n % 7 + 1), "completion": "ab", "chosen": "ab", "rejected": "ba", "label": n % 3 == 0}
        for n in range(600)
    ]
    built = []
    started = []
    for count in (1, 2):
        monkeypatch.setenv("TORCHTUNE_CACHE", str(tmp_path / str(count)))
        with workers(count), monkeypatch.context() as patch:
            patch.setattr("torchtune.datasets._processes.Worker", lambda *how: started.append(how) or Worker(*how))
            built.append(builder(tokenizer, source=rows))
    assert len(started) == 2
    assert built[0].fingerprint == built[1].fingerprint
    for index in (0, 255, 256, 599):
        single_row = built[0][index]
        parallel_row = built[1][index]
        turns = list(map(vars, single_row.pop("messages", [])))
        assert turns == list(map(vars, parallel_row.pop("messages", [])))
        assert single_row == parallel_row


def test_killed_worker_is_reported():
    def work(start, rows):
        if start > 1000:
            os.kill(os.getpid(), signal.SIGKILL)
        return start

    with workers(2), pytest.raises(DataError, match=r"killed, most likely because memory ran out.*--workers 1"):
        list(in_parts(range(COUNT), work))


def test_error_of_a_transform_is_raised_in_the_parent(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHTUNE_CACHE", str(tmp_path))

    def broken(row):
        return {"tokens": [1, 2], "mask": [True, False]} if row["n"] < 1000 else row["no such key"]

    with workers(2), pytest.raises(KeyError, match="no such key"):
        SFTDataset(source=[{"n": n} for n in range(COUNT)], message_transform=dict, model_transform=broken)
    assert not list((tmp_path / "rows").rglob("*.arrow"))


@pytest.mark.skipif(sys.version_info < (3, 11), reason="errors have no notes")
def test_only_errors_that_users_did_not_cause_carry_a_traceback():
    assert not hasattr(picklable_error(DataError("row 1: broken")), "__notes__")
    (note,) = picklable_error(KeyError("column")).__notes__
    assert note.startswith("In another process:\n")


@pytest.mark.parametrize(("num_rows", "num_processes"), [(_FEW, 2), (_FEW + 1, 1)])
def test_few_rows_and_a_single_process_start_no_worker(num_rows, num_processes, monkeypatch):
    monkeypatch.setattr("torchtune.datasets._processes.Worker", None)
    with workers(num_processes):
        assert sum(in_parts(range(num_rows), lambda start, rows: len(rows))) == num_rows

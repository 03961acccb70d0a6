"""Rows are tokenized once a machine, kept between runs where that is safe, and never half there."""

import inspect
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import torchtune
from tests.tiny import OPENAI, write_lines, write_tokenizer
from torchtune.data import DataError
from torchtune.datasets import (
    Fingerprint,
    _fingerprint,
    chat_dataset,
    preference_dataset,
    preview,
    text_completion_dataset,
)
from torchtune.tokenizers import hf_tokenizer

# Forks a process for every line that it reads, which makes a dataset as a rank of a run does. Imports are done once.
RANKS = """
import json, os, signal, sys, time
import datasets
from torchtune.datasets import SFTDataset
from torchtune.tokenizers import hf_tokenizer

class Ask:
    def __init__(self, folder, fingerprint, seconds):
        self.calls, self.seconds = f"{folder}/calls", seconds
        if fingerprint:
            self.fingerprint = fingerprint
    def __call__(self, row):
        with open(self.calls, "a") as file:
            file.write(f"{row['n']}\\n")
        time.sleep(self.seconds)
        return {"messages": [{"role": "user", "content": "red", "masked": True},
                             {"role": "assistant", "content": "blue " * row["n"]}]}

def rank(folder, fingerprint, seconds, env, result):
    os.environ.update(env)
    rows = [{"n": n} for n in range(1, 9)]
    dataset = SFTDataset(source=rows, message_transform=Ask(folder, fingerprint, seconds),
                         model_transform=hf_tokenizer(folder))
    with open(result + ".part", "w") as file:
        json.dump([dataset[i] for i in range(len(dataset))], file)
    os.rename(result + ".part", result)

signal.signal(signal.SIGCHLD, signal.SIG_IGN)
for line in sys.stdin:
    pid = os.fork()
    if not pid:
        try:
            rank(*json.loads(line))
        finally:
            os._exit(0)
    print(pid, flush=True)
"""


@pytest.fixture(scope="module")
def forker():
    server = subprocess.Popen([sys.executable, "-c", RANKS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert server.stdin
    assert server.stdout
    with server:
        yield server


class Rank:
    """A process that makes the dataset."""

    def __init__(
        self,
        forker,
        folder,
        rank=0,
        fingerprint="",
        seconds=0.02,
        **env,
    ):
        self._result = folder / f"result{time.monotonic_ns()}"
        run = {"TORCHELASTIC_RUN_ID": "one", "LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "RANK": str(rank)}
        cache = {"TORCHTUNE_CACHE": str(folder / "cache")}
        job = [str(folder), fingerprint, seconds, run | cache | env, str(self._result)]
        forker.stdin.write(json.dumps(job) + "\n")
        forker.stdin.flush()
        self.pid = int(forker.stdout.readline())

    def rows(self):
        deadline = time.monotonic() + 300
        while not self._result.exists():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        return json.loads(self._result.read_text())


@pytest.fixture
def folder(tmp_path, monkeypatch):
    write_tokenizer(tmp_path)
    write_lines(tmp_path / "rows.jsonl", [{"n": n, "text": "red " * n} for n in range(1, 9)])
    monkeypatch.setenv("TORCHTUNE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    return tmp_path


def is_mapped(array, folder):
    """Whether an array lies in a mapped file of a folder."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, end = (int(address, 16) for address in line.split()[0].split("-"))
        if start <= array.ctypes.data < end:
            return line.split()[-1].startswith(str(folder))
    return False


def calls(folder):
    return [int(line) for line in (folder / "calls").read_text().splitlines()]


def kept(folder):
    return sorted(path.name for path in (folder / "cache" / "rows").iterdir() if path.is_dir())


@pytest.mark.parametrize("fingerprint", ["", "first version"])
def test_two_processes_transform_every_row_once(folder, forker, fingerprint):
    ranks = [Rank(forker, folder, rank, fingerprint) for rank in range(2)]
    first_rows, second_rows = (rank.rows() for rank in ranks)
    assert calls(folder) == list(range(1, 9))
    assert first_rows == second_rows
    assert [len(row["tokens"]) for row in first_rows] == sorted(len(row["tokens"]) for row in first_rows)
    assert len(first_rows) == 8
    assert len(kept(folder)) == (1 if fingerprint else 0), "what cannot be told apart is not kept"
    again = Rank(forker, folder, 0, fingerprint, TORCHELASTIC_RUN_ID="two", LOCAL_WORLD_SIZE="1").rows()
    assert again == first_rows
    assert len(calls(folder)) == (8 if fingerprint else 16)


def test_rows_of_a_killed_process_are_not_reused(folder, forker):
    killed = Rank(forker, folder, 0, "first version", seconds=600.0)
    while not (folder / "calls").exists():
        time.sleep(0.02)
    waiting = Rank(forker, folder, 1, "first version", seconds=0.0)
    time.sleep(0.3)
    assert 0 < len(calls(folder)) < 8
    os.kill(killed.pid, signal.SIGKILL)
    rows = waiting.rows()
    assert len(rows) == 8
    assert calls(folder)[-8:] == list(range(1, 9)), "the other one begins from the beginning"
    root = folder / "cache" / "rows"
    for path in root.glob("*/*.arrow"):
        path.write_bytes(b"")  # damaged, so that it is prepared again
    left = [path for path in root.iterdir() if path.name.endswith(".tmp")]
    assert left
    for path in left:  # as if it had happened yesterday
        for entry in [*path.iterdir(), path]:
            os.utime(entry, (0, 0))
        (root / "own-0").mkdir()
        (root / "own-0").rename(root / path.name.replace(".tmp", ".other.tmp"))  # of a process that still writes
    assert Rank(forker, folder, 0, "first version").rows() == rows
    assert not any(path.exists() for path in left)
    assert len(kept(folder)) == 1 + len(left)


def chat(folder, tokenizer=None, rows=None, **settings):
    turns = [{"role": "user", "content": "red"}, {"role": "assistant", "content": "blue one"}]
    return chat_dataset(
        tokenizer or hf_tokenizer(str(folder), max_seq_len=64),
        source=[{"messages": turns, "other": turns}] if rows is None else rows,
        **OPENAI | settings,
    )


def test_rows_are_reused_only_with_the_same_settings(folder):
    chat(folder)
    chat(folder)
    assert len(kept(folder)) == 1
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}<|im_end|>{% endfor %}"
    changes = [
        {"tokenizer": hf_tokenizer(str(folder), max_seq_len=63)},
        {"tokenizer": hf_tokenizer(str(folder), max_seq_len=64, truncation_type="left")},
        {"tokenizer": hf_tokenizer(str(folder), max_seq_len=64, chat_template=template)},
        {"tokenizer": hf_tokenizer(str(folder), max_seq_len=64, parse_special_tokens=True)},
        {"masking_strategy": "train_on_all"},
        {"new_system_prompt": "short"},
        {"conversation_column": "other"},
        {"rows": [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}]},
    ]
    for number, change in enumerate(changes):
        chat(folder, **change)
        assert len(kept(folder)) == number + 2, change
    chat(folder)
    chat(folder, filter_fn=lambda row: True)
    assert len(kept(folder)) == len(changes) + 1, "a lambda says nothing about itself"


def test_rows_are_reused_only_with_the_same_tokenizer_code(folder):
    root = Path(str(torchtune.__file__)).parent
    parts = [hf_tokenizer(str(folder))]
    for part in parts:  # grows
        file = Path(inspect.getfile(type(part))).relative_to(root)
        assert any(file.is_relative_to(room) for room in _fingerprint._ROOMS), file
        for component in vars(part).values():
            is_own = type(component).__module__.startswith("torchtune.")
            if is_own and not any(component is seen_part for seen_part in parts):
                parts.append(component)
    assert len(parts) > 3


def test_changed_file_is_tokenized_again(folder):
    tokenizer = hf_tokenizer(str(folder))
    path = folder / "rows.jsonl"
    before = text_completion_dataset(tokenizer, str(path))[0]
    assert text_completion_dataset(tokenizer, str(path))[0] == before
    path.write_text(path.read_text().replace("red", "cat"))
    assert text_completion_dataset(tokenizer, str(path))[0] != before
    pair = {side: [{"role": "user", "content": "a"}, {"role": "assistant", "content": side}] for side in
            ("chosen", "rejected")}  # fmt: skip
    assert preference_dataset(tokenizer, source=[pair])[0] == preference_dataset(tokenizer, source=[pair])[0]
    assert len(kept(folder)) == 3


def test_rows_of_a_preview_are_not_cached(folder):
    tokenizer = hf_tokenizer(str(folder))
    path = folder / "rows.jsonl"
    with preview(1) as seen:
        assert len(text_completion_dataset(tokenizer, str(path))) == 1
    assert seen.total > 1
    assert kept(folder) == []
    assert len(text_completion_dataset(tokenizer, str(path))) == seen.total
    assert len(kept(folder)) == 1


@pytest.mark.parametrize(
    ("clock", "is_exact"),
    [("strftime_now('%d %b %Y')", True), ("strftime_now('%H:%M')", False), ("strftime_now(layout)", False)],
)
def test_fingerprint_is_exact_unless_the_template_reads_the_time_of_day(folder, clock, is_exact):
    template = "{% if strftime_now is defined %}{{ " + clock + " }}{% endif %}{{ messages[0].content }}"
    tokenizer = hf_tokenizer(str(folder), chat_template=template)
    assert Fingerprint({"tokenizer": tokenizer}).is_exact is is_exact


@pytest.mark.parametrize("name", ["0000.arrow", "meta.json"])
@pytest.mark.parametrize("damage", [lambda data: data[:-4], lambda data: bytes(len(data)), lambda _: b"[" * 9999])
def test_damaged_store_is_written_again(folder, caplog, name, damage):
    before = chat(folder)[0]
    (path,) = (folder / "cache" / "rows").glob(f"*/{name}")
    file_bytes = path.read_bytes()
    path.write_bytes(damage(file_bytes))
    assert chat(folder)[0] == before
    assert path.read_bytes() == file_bytes
    assert "are damaged: they are prepared anew" in caplog.text


def test_any_damaged_byte_of_tokens_and_labels_is_found(folder, caplog):
    before = chat(folder)[0]
    (path,) = (folder / "cache" / "rows").glob("*/*.arrow")
    file_bytes = path.read_bytes()
    for values in before["tokens"], before["labels"]:
        position = file_bytes.index(np.array(values, np.int32).tobytes())
        for offset in range(0, 4 * len(values), 7):
            damaged = bytearray(file_bytes)
            damaged[position + offset] ^= 1
            path.write_bytes(damaged)
            caplog.clear()
            assert chat(folder)[0] == before
            assert "are damaged" in caplog.text


def test_lock_file_that_is_a_link_or_a_folder_is_refused(folder):
    chat(folder)
    (rows,) = (path for path in (folder / "cache" / "rows").iterdir() if path.is_dir())
    precious = folder / "precious"
    precious.write_text("mine")
    lock = rows.with_name(f"{rows.name}.lock")
    for make in (lambda: lock.symlink_to(precious), lambda: lock.symlink_to(folder / "new"), lock.mkdir):
        shutil.rmtree(rows, ignore_errors=True)
        lock.unlink(missing_ok=True)
        make()
        with pytest.raises(DataError, match=r"The lock .*\.lock cannot be opened .*: remove it, or set"):
            chat(folder)
    assert precious.read_text() == "mine"
    assert not (folder / "new").exists()


@pytest.mark.parametrize("mode", [0o770, 0o702])
def test_a_cache_that_others_may_write_to_is_not_used(folder, mode):
    chat(folder)
    (folder / "cache" / "rows").chmod(mode)
    with pytest.raises(DataError, match=rf"may be written to by other users \(mode {mode:o}\): .*chmod go-w"):
        chat(folder)


def test_rows_lie_in_mapped_files_that_are_the_users_own(folder, monkeypatch):
    array = chat(folder).store[0]["tokens"]
    root = folder / "cache" / "rows"
    assert is_mapped(array, root)
    assert not array.flags.writeable
    assert root.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in root.iterdir() if path.is_dir()} == {0o700}
    monkeypatch.setattr(os, "getuid", lambda: root.stat().st_uid + 1)
    with pytest.raises(DataError, match="belongs to another user: set the environment variable TORCHTUNE_CACHE"):
        chat(folder)

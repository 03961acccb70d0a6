"""A folder belongs to one run; the dead leave it to the next, wherever they died."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from torchtune.utils import FolderLock, UserError, get_logger

HOLD = """if True:
    import sys, time
    from pathlib import Path
    from torchtune.utils import FolderLock
    FolderLock(Path(sys.argv[1]), beat=0.05).acquire()
    print("held", flush=True)
    if len(sys.argv) == 2:
        sys.stdin.read()
"""


@pytest.fixture
def hold(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen]]:
    """Starts a process that holds the folder ``run``."""
    started = []

    def start(*arguments: str) -> subprocess.Popen:
        command = [sys.executable, "-c", HOLD, str(tmp_path / "run"), *arguments]
        started.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
        assert started[-1].stdout.readline() == "held\n"
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def refusal(lock: FolderLock) -> str:
    with pytest.raises(UserError) as caught:
        lock.acquire()
    text = str(caught.value)
    assert "\n" not in text
    assert text.endswith(".")
    return text


def elsewhere(folder: Path, **changes: object) -> Path:
    """Make the lock in ``folder`` that of another machine."""
    path = folder / ".run.lock"
    owner = json.loads(path.read_text()) | {"machine": ["another"], "host": "other", "token": "theirs"} | changes
    path.write_text(json.dumps(owner))
    return path


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    """A lock that a process on another machine has left."""
    folder = tmp_path / "run"
    lock = FolderLock(folder)
    lock.acquire()
    copy = (folder / ".run.lock").read_text()
    (folder / "work").touch()
    lock.release()
    (folder / ".run.lock").write_text(copy)
    return elsewhere(folder)


def test_two_runs(hold: Callable, tmp_path: Path) -> None:
    first = hold()
    text = refusal(FolderLock(tmp_path / "run"))
    with pytest.raises(UserError) as caught:
        FolderLock(tmp_path / "run").refuse_used()
    assert str(caught.value) == text
    assert str(tmp_path / "run") in text
    assert f"process {first.pid} on {os.uname().nodename}, since 2" in text
    assert "another output_dir" in text
    first.communicate("")
    assert not (tmp_path / "run").exists(), "a process that ends leaves no lock, nor a folder that it has only locked"
    lock = FolderLock(tmp_path / "run")
    lock.acquire()
    assert lock.is_held
    lock.release()


def test_killed_on_this_machine(hold: Callable, tmp_path: Path) -> None:
    first = hold()
    first.send_signal(signal.SIGKILL)
    while Path(f"/proc/{first.pid}/stat").read_text().rpartition(") ")[2][0] != "Z":
        time.sleep(0.001)
    FolderLock(tmp_path / "run").refuse_used()
    # before anybody has waited for the dead: a launcher may never do it
    lock = FolderLock(tmp_path / "run", patience=600)
    start = time.monotonic()
    lock.acquire()
    assert time.monotonic() - start < 300
    assert json.loads((tmp_path / "run" / ".run.lock").read_text())["pid"] == os.getpid()
    lock.release()


def test_a_process_id_that_was_given_again(hold: Callable, tmp_path: Path) -> None:
    hold()
    path = tmp_path / "run" / ".run.lock"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"started": "1"}))
    lock = FolderLock(tmp_path / "run")
    lock.acquire()
    lock.release()


def test_another_machine_that_lives(theirs: Path) -> None:
    """Its clock does not matter, only that the time of the lock moves."""
    beating = f"import os, time\nwhile True:\n    os.utime({str(theirs)!r}); time.sleep(0.1)"
    with subprocess.Popen([sys.executable, "-c", beating]) as process:
        try:
            assert "on other" in refusal(FolderLock(theirs.parent, beat=0.5, patience=5))
        finally:
            process.kill()


def test_another_machine_that_is_dead(theirs: Path) -> None:
    lock = FolderLock(theirs.parent, beat=0.1, patience=0.6)
    start = time.monotonic()
    lock.acquire()
    assert time.monotonic() - start > 0.2
    lock.release()
    (theirs.parent / "work").touch()


def test_another_machine_that_has_long_been_dead(theirs: Path) -> None:
    os.utime(theirs, (time.time() - 3600,) * 2)
    lock = FolderLock(theirs.parent, patience=600)
    start = time.monotonic()
    lock.acquire()
    assert time.monotonic() - start < 300
    lock.release()


@pytest.mark.parametrize(
    ("job", "count"),
    [("SLURM_JOB_ID", "SLURM_RESTART_COUNT"), ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")],
)
def test_a_launcher_that_starts_the_job_again(
    theirs: Path, monkeypatch: pytest.MonkeyPatch, job: str, count: str
) -> None:
    """The earlier life is over, even where it ran on another machine."""
    elsewhere(theirs.parent, lives={job: ["7", 0]})
    monkeypatch.setenv(job, "7")
    monkeypatch.setenv(count, "1")
    lock = FolderLock(theirs.parent, patience=1000)
    lock.acquire()
    lock.release()


@pytest.mark.parametrize("content", ["", "{", "[]", '{"pid": "x", "machine": 3, "lives": 4}', "[" * 100_000])
def test_a_lock_that_says_nothing(tmp_path: Path, content: str) -> None:
    (tmp_path / ".run.lock").write_text(content)
    lock = FolderLock(tmp_path, beat=0.1, patience=0.3)
    lock.acquire()
    lock.release()
    assert list(tmp_path.iterdir()) == []


def test_killed_while_it_took_the_lock(hold: Callable, tmp_path: Path) -> None:
    """What it had put aside goes with the next run; that of the living, who are taking it too, stays."""
    process, lock = hold(), tmp_path / "run" / ".run.lock"
    dead, living, old = (lock.with_name(f".run.lock.{name * 8}") for name in "0ab")
    process.kill()
    process.wait()
    lock.rename(dead)
    living.write_text(json.dumps(json.loads(dead.read_text()) | {"machine": ["another"]}))
    old.touch()
    os.utime(old, (time.time() - 3600,) * 2)
    mine = FolderLock(tmp_path / "run")
    mine.acquire()
    assert {path.name for path in lock.parent.iterdir()} == {lock.name, living.name}
    mine.release()


def test_removed_and_taken(tmp_path: Path) -> None:
    """Whoever removes the folder under a run is told so; who takes it over ends the run that stood still."""
    folder, said = tmp_path / "run", []
    handler = type("Handler", (), {"level": 0, "handle": lambda self, record: said.append(record.getMessage())})()
    get_logger().addHandler(handler)
    try:
        lock = FolderLock(folder, beat=0.05)
        lock.acquire()
        (folder / ".run.lock").unlink()
        folder.rmdir()
        deadline = time.monotonic() + 120
        while not (folder / ".run.lock").exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        lock.check()
        assert any("was removed, with everything in it, under the running run" in text for text in said), said
        elsewhere(folder)
        with pytest.raises(UserError, match=r"taken over by another run .* on other"):
            lock.check()
        lock.release()
        assert (folder / ".run.lock").exists(), "it is somebody else's"
    finally:
        get_logger().removeHandler(handler)


def test_a_block(tmp_path: Path) -> None:
    lock = FolderLock(tmp_path)
    with lock.held(), lock.held():
        assert (tmp_path / ".run.lock").exists()
    assert not (tmp_path / ".run.lock").exists()

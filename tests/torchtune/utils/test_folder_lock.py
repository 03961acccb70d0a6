"""A folder belongs to one run at a time; the lock of a dead one is free at once."""

import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest

from torchtune.utils import FolderLock, UserError, get_logger

PATIENCE = "torchtune.utils._folder_lock._PATIENCE"
HOLD = """if True:
    import os, sys, time
    from pathlib import Path
    from torchtune.utils import FolderLock
    FolderLock(Path(sys.argv[1])).acquire()
    if sys.argv[2:] == ["forks"] and os.fork() == 0:
        time.sleep(600)
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def hold(tmp_path):
    """Starts a process that holds the folder ``run``."""
    started = []

    def start(*arguments):
        command = [sys.executable, "-c", HOLD, str(tmp_path / "run"), *arguments]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        started.append(subprocess.Popen(command, text=True, start_new_session=True, **pipes))
        assert started[-1].stdout.readline() == "held\n"
        return started[-1]

    yield start
    for process in started:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


@pytest.fixture
def said():
    lines = []
    handler = type("Handler", (), {"level": 0, "handle": lambda self, record: lines.append(record.getMessage())})()
    get_logger().addHandler(handler)
    yield lines
    get_logger().removeHandler(handler)


def refusal(lock):
    with pytest.raises(UserError) as caught:
        lock.acquire()
    text = str(caught.value)
    assert "\n" not in text
    assert text.endswith(".")
    assert not lock.is_held
    return text


def test_second_run_in_a_folder_is_refused(hold, tmp_path, monkeypatch):
    first = hold()
    text = refusal(FolderLock(tmp_path / "run"))
    monkeypatch.setattr(PATIENCE, 0.1)
    with pytest.raises(UserError) as caught:
        FolderLock(tmp_path / "run").check_unused()
    assert str(caught.value) == text
    assert str(tmp_path / "run") in text
    assert f"process {first.pid} on {os.uname().nodename}, since 2" in text
    assert "another output_dir" in text
    assert "another reference_cache" in refusal(FolderLock(tmp_path / "run", key="reference_cache"))
    with FolderLock(tmp_path / "run", name="other.lock").held():
        pass
    first.communicate("")
    assert not (tmp_path / "run").exists(), "a process that ends leaves no lock, nor a folder that it has only locked"
    lock = FolderLock(tmp_path / "run")
    lock.acquire()
    assert lock.is_held
    lock.release()


@pytest.mark.parametrize("children", [(), ("forks",)])
def test_lock_of_a_killed_process_is_free(hold, tmp_path, children):
    """Not even a process that it has forked, such as a worker of a data loader, holds the lock on."""
    first = hold(*children)
    first.send_signal(signal.SIGKILL)
    while Path(f"/proc/{first.pid}/stat").read_text().rpartition(") ")[2][0] != "Z":
        time.sleep(0.001)
    FolderLock(tmp_path / "run").check_unused()
    lock = FolderLock(tmp_path / "run")  # before anybody has waited for the dead: a launcher may never do it
    lock.acquire()
    assert json.loads((tmp_path / "run" / ".run.lock").read_text())["pid"] == os.getpid()
    lock.release()


@pytest.mark.parametrize("content", ["", "{", "[]", '{"pid": "x", "machine": 3, "lives": 4}', "[" * 100_000])
def test_lock_file_without_an_owner_is_refused_only_while_held(tmp_path, content, monkeypatch):
    """It was left by an earlier release or by a kill; in the hands of a process, the refusal has no name."""
    monkeypatch.setattr(PATIENCE, 0.1)
    path = tmp_path / ".run.lock"
    path.write_text(content)
    with path.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert "which does not say who it is" in refusal(FolderLock(tmp_path))
    lock = FolderLock(tmp_path)
    lock.acquire()
    lock.release()
    assert list(tmp_path.iterdir()) == []


def test_a_link_or_a_folder_is_not_opened(tmp_path):
    precious = tmp_path / "precious"
    path = tmp_path / ".run.lock"
    precious.write_text("mine")
    for make in (lambda: path.symlink_to(precious), lambda: path.symlink_to(tmp_path / "new"), path.mkdir):
        path.unlink(missing_ok=True)
        make()
        assert "The lock " in refusal(FolderLock(tmp_path))
    assert precious.read_text() == "mine"
    assert not (tmp_path / "new").exists()


def test_nested_blocks_hold_the_lock_until_the_outer_one_ends(tmp_path):
    lock = FolderLock(tmp_path)
    with lock.held() as is_locked, lock.held():
        assert is_locked
        assert (tmp_path / ".run.lock").exists()
    assert not (tmp_path / ".run.lock").exists()
    assert not lock.is_held


def test_later_lock_of_the_same_process_takes_over(tmp_path):
    first, second = FolderLock(tmp_path), FolderLock(tmp_path)
    first.acquire()
    second.acquire()
    assert (first.is_held, second.is_held) == (False, True)
    first.release()
    assert (tmp_path / ".run.lock").exists()
    second.release()


def test_waiting_threads_hold_the_lock_one_after_another(tmp_path):
    """Also for another thread, one after the other."""
    inside = []
    most = []
    done = []

    def work(number):
        with FolderLock(tmp_path, name="rows.lock").held(waiting="Another process prepares rows: waiting for it."):
            inside.append(number)
            most.append(len(inside))
            time.sleep(0.05)
            inside.remove(number)
        done.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert sorted(done) == [0, 1, 2, 3]
    assert max(most) == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS])
def test_file_system_without_locks_is_logged_and_used(tmp_path, said, monkeypatch, number):
    def refuses(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuses)
    lock = FolderLock(tmp_path)
    with lock.held() as is_locked:
        assert not is_locked
    assert any(f"has no locks ({os.strerror(number)})" in text for text in said), said
    assert list(tmp_path.iterdir()) == []

"""Commands in several processes: the answers of one, and a sentence about a process that is lost; child processes."""

import io
import os
import signal
import subprocess
import sys
import time

import pytest
import torch.distributed as dist

from tests.tiny import write_checkpoint
from torchtune._cli._processes import LostFollowerError, _Followers, several_processes
from torchtune.utils import UserError


@pytest.fixture
def command(monkeypatch):
    """Set the command line that followers run."""
    return lambda *arguments: monkeypatch.setattr(sys, "argv", ["tune", *arguments])


def test_two_processes_chat_as_one(tmp_path, tune, monkeypatch):
    checkpoint = write_checkpoint(tmp_path / "checkpoint")
    placement = ["--device", "cpu", "--dtype", "fp32", "--max-new-tokens", "4", "--seed", "3"]
    results = []
    for processes in ("1", "2"):
        monkeypatch.setattr("sys.stdin", io.StringIO("the cat\n/reset\na dog\n/quit\nred\n"))
        results.append(tune("chat", "--model", checkpoint, *placement, "--nproc-per-node", processes))
    alone, together = results
    assert alone.code == together.code == 0
    assert alone.out == together.out
    assert together.out.count("\n") >= 2
    assert not dist.is_initialized()
    assert "RANK" not in os.environ


def test_error_of_another_process_names_its_rank(command):
    command("cat", "no_such_config")
    with pytest.raises(LostFollowerError, match=r"^rank 1: .*no_such_config"), several_processes("2"):
        pass


def test_broken_collective_names_the_rank_that_ended(command):
    command("ls")
    followers = _Followers(2)

    def lose_follower() -> None:
        with followers:
            os.kill(followers._processes[0].pid, signal.SIGKILL)
            raise RuntimeError("Connection closed by peer")

    with pytest.raises(LostFollowerError, match=r"rank 1 of 2 was ended by SIGKILL.*run the command again"):
        lose_follower()


def test_timeout_of_a_collective_is_told_as_a_process_that_does_not_answer(command, monkeypatch):
    monkeypatch.setattr("torchtune._cli._processes._PATIENCE", 0.1)
    command("ls")
    with (
        pytest.raises(LostFollowerError, match=r"one of the 2 processes runs, but has not answered"),
        _Followers(2),
    ):
        raise RuntimeError("[gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 1800000ms for recv operation")


STOPPED_FOLLOWER = """
import os, signal, sys, time
from torchtune._cli import _processes

_processes._MOST_SILENT_SECONDS = 2.0
sys.argv = ["tune", "serve", "/no/such/folder"]
followers = _processes._Followers(2)
with followers:
    os.kill(followers._processes[0].pid, signal.SIGSTOP)
    time.sleep(300)  # in a collective
"""


def test_process_that_is_stopped_ends_the_command_with_a_sentence():
    command = [sys.executable, "-c", STOPPED_FOLLOWER]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("error: rank 1 of 2 has given no sign of life for 2 s")
    assert "Traceback" not in done.stderr


def test_error_of_this_process_ends_the_others(command):
    command("ls")
    followers = _Followers(2)
    with pytest.raises(UserError, match=r"^of rank 0$"), followers:
        raise UserError("of rank 0")
    assert all(process.returncode is not None for process in followers._processes)


@pytest.mark.parametrize(
    ("requested", "sentence"),
    [("0", "--nproc-per-node 0: it must be at least 1"), ("two", "--nproc-per-node two: give the number of processes")],
)
def test_number_of_processes_is_checked(requested, sentence):
    with pytest.raises(UserError, match=sentence), several_processes(requested):
        pass


CODE = (
    f"from torchtune._cli._processes import call_in_child_process; from {__name__} import sleep; "
    "call_in_child_process(sleep)"
)


def sleep():
    print("sleeping", flush=True)
    time.sleep(600)


def test_child_process_ends_when_its_parent_is_killed():
    parent = subprocess.Popen([sys.executable, "-c", CODE], stdout=subprocess.PIPE, text=True)
    assert parent.stdout.readline() == "sleeping\n"
    parent.kill()
    parent.communicate(timeout=120)  # no process has the pipe any more

"""Progress bar and stop signal."""

import io
import os
import signal
import subprocess
import sys
import threading

import pytest

from torchtune import training


def test_plain_lines_where_there_is_no_terminal():
    file = io.StringIO()
    with training.ProgressBar(total=10, initial=4, file=file, interval=0.0) as progress:
        for step in range(5, 8):
            progress.update_metrics({"loss": 1 / step, "tokens_per_second_per_gpu": 1234.5, "lr": 1.0})
            progress.advance(step)
        progress.update_metrics({"val_loss": 0.25})
    lines = file.getvalue().splitlines()
    assert len(lines) >= 4
    assert "\r" not in file.getvalue()
    assert lines[0].startswith("step 4/10")
    assert lines[-1].startswith("step 7/10")
    assert "loss=0.1429, tok/s=1,234" in lines[-1]


def test_other_ranks_are_silent(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    file = io.StringIO()
    with training.ProgressBar(total=2, file=file) as progress:
        progress.update_metrics({"loss": 1.0})
        progress.advance(1)
    assert file.getvalue() == ""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_asks(number, caplog):
    before = signal.getsignal(number)
    with caplog.at_level("WARNING", logger="torchtune"), training.StopSignal() as stop:
        assert not stop.requested
        os.kill(os.getpid(), number)
        assert stop.requested
        assert signal.getsignal(number) is before
    assert "saves and stops after this step" in caplog.text
    assert signal.getsignal(number) is before


def test_no_signal_leaves_everything_as_it_was():
    before = signal.getsignal(signal.SIGINT)
    with training.StopSignal() as stop:
        assert signal.getsignal(signal.SIGINT) is not before
    assert not stop.requested
    assert signal.getsignal(signal.SIGINT) is before


def test_outside_the_main_thread_it_does_nothing():
    seen = []

    def work():
        with training.StopSignal() as stop:
            seen.append(stop.requested)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [False]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, -signal.SIGTERM), (signal.SIGINT, 1)])
def test_the_second_signal_ends_at_once(number, code):
    script = (
        "import os, signal, sys, time\n"
        "from torchtune.supervision import StopSignal\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a shell's background jobs ignore it
        "with StopSignal() as stop:\n"
        f"    os.kill(os.getpid(), {int(number)})\n"
        "    assert stop.requested\n"
        "    print('asked', flush=True)\n"
        f"    os.kill(os.getpid(), {int(number)})\n"
        "    time.sleep(60)\n"
        "    print('still here')\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)
    assert "asked" in done.stdout
    assert "still here" not in done.stdout
    assert done.returncode in (code, -int(number))


def test_one_line_is_redrawn_on_a_terminal():
    import pty

    script = (
        "from torchtune.training import ProgressBar\n"
        "with ProgressBar(total=6, initial=2) as progress:\n"
        "    for step in range(3, 7):\n"
        "        progress.update_metrics({'loss': 1.25})\n"
        "        progress.advance(step)\n"
    )
    output = []

    def read(descriptor):
        output.append(os.read(descriptor, 4096))
        return output[-1]

    pid, descriptor = pty.fork()
    if pid == 0:
        os.execv(sys.executable, [sys.executable, "-c", script])
    try:
        while read(descriptor):
            pass
    except OSError:  # the other end is closed
        pass
    assert os.waitpid(pid, 0)[1] == 0
    text = b"".join(output).decode()
    assert text.count("\r") >= 2
    assert "6/6" in text
    assert "loss=1.2500" in text

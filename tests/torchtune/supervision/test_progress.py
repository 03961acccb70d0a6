"""Progress bar and stop signal."""

import io
import os
import signal
import subprocess
import sys
import threading

import pytest

from torchtune import supervision


def test_progress_is_plain_lines_without_a_terminal():
    file = io.StringIO()
    with supervision.ProgressBar(total=10, initial=4, file=file, interval=0.0) as progress:
        for step in range(5, 8):
            progress.update_metrics({"loss": 1 / step, "tokens_per_second_per_gpu": 1234.5, "lr": 1.0})
            progress.advance(step)
        progress.update_metrics({"val_loss": 0.25})
    lines = file.getvalue().splitlines()
    assert len(lines) >= 4
    assert "\r" not in file.getvalue()
    assert lines[0].startswith("step 4/10")
    assert lines[-1].startswith("step 7/10")
    assert "loss=0.1429, val_loss=0.2500, tok/s=1,234" in lines[-1]


def test_other_ranks_print_no_progress(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    file = io.StringIO()
    with supervision.ProgressBar(total=2, file=file) as progress:
        progress.update_metrics({"loss": 1.0})
        progress.advance(1)
    assert file.getvalue() == ""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_first_signal_requests_a_stop(number, caplog):
    before = signal.getsignal(number)
    with caplog.at_level("WARNING", logger="torchtune"), supervision.StopSignal() as stop:
        assert not stop.requested
        os.kill(os.getpid(), number)
        assert stop.requested
        assert signal.getsignal(number) is before
    assert "saves and stops after this step" in caplog.text
    assert signal.getsignal(number) is before


def test_signal_handlers_are_restored_without_a_signal():
    before = signal.getsignal(signal.SIGINT)
    with supervision.StopSignal() as stop:
        assert signal.getsignal(signal.SIGINT) is not before
    assert not stop.requested
    assert signal.getsignal(signal.SIGINT) is before


def test_stop_signal_does_nothing_outside_the_main_thread():
    seen = []

    def work():
        with supervision.StopSignal() as stop:
            seen.append(stop.requested)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [False]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, -signal.SIGTERM), (signal.SIGINT, 1)])
def test_second_signal_ends_the_process_at_once(number, code):
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


def screen_of(script, columns):
    """The lines of a terminal after a script: a carriage return moves the cursor, and long lines are wrapped."""
    import fcntl
    import pty
    import struct
    import termios

    pid, descriptor = pty.fork()
    if pid == 0:
        os.read(0, 1)  # the window has its size
        os.execv(sys.executable, [sys.executable, "-c", script])
    fcntl.ioctl(descriptor, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    attributes = termios.tcgetattr(descriptor)
    attributes[3] &= ~termios.ECHO
    termios.tcsetattr(descriptor, termios.TCSANOW, attributes)
    os.write(descriptor, b"\n")
    output = b""
    try:
        while data := os.read(descriptor, 4096):
            output += data
    except OSError:  # the other end is closed
        pass
    assert os.waitpid(pid, 0)[1] == 0, output.decode()
    lines = [""]
    column = 0
    for char in output.decode():
        if char == "\r":
            column = 0
        elif char == "\n":
            lines.append("")
        else:
            if column == columns:
                lines.append("")
                column = 0
            lines[-1] = lines[-1][:column].ljust(column) + char + lines[-1][column + 1 :]
            column += 1
    return [line.rstrip() for line in lines], output.decode()


RUN = """
import sys
from torchtune.training import ProgressBar
from torchtune.training.metric_logging import StdoutLogger
from torchtune.utils import get_logger

with ProgressBar(total=10_000, initial=2) as progress:
    for step in range(3, 7):
        progress.update_metrics({"loss": 1.25, "tokens_per_second_per_gpu": 12345.0, "mfu": 0.5})
        progress.advance(step)
        if step == 4:
            progress.update_metrics({"val_loss": 2.5})
            get_logger("INFO").info("step_4 was saved.")
            StdoutLogger().log("loss", 1.25, step=4)
"""


def test_terminal_shows_lines_above_one_bar():
    lines, output = screen_of(RUN, 80)
    assert output.count("\r") >= 2
    assert lines[0] == "INFO:torchtune:step_4 was saved."
    assert lines[1] == "Step 4 | loss:1.25"
    assert "6/10000 [" in lines[2]
    assert lines[2].endswith("loss=1.2500, val_loss=2.5000]")
    assert len(lines[2]) <= 80
    assert lines[2].index("| 6/") - lines[2].index("%|") >= 10, "the bar can be seen"
    assert lines[3:] == [""]


@pytest.mark.parametrize(
    ("columns", "end"),
    [
        (120, "loss=1.2500, val_loss=2.5000, tok/s=12,345, MFU=50%]"),
        (84, "loss=1.2500, val_loss=2.5000, tok/s=12,345]"),
        (60, "loss=1.2500]"),
        (40, "]"),
    ],
)
def test_metrics_are_left_out_where_the_line_is_short(columns, end):
    import fcntl
    import struct
    import termios

    reader, terminal = os.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    with os.fdopen(terminal, "w") as file, supervision.ProgressBar(total=10_000, initial=5, file=file) as progress:
        progress.update_metrics({"loss": 1.25, "val_loss": 2.5, "tokens_per_second_per_gpu": 12345.0, "mfu": 0.5})
        progress.advance(6)
        progress.close()
        file.flush()
        output = b""
        while b"\n" not in output:  # the terminal passes it on in pieces
            output += os.read(reader, 4096)
        line = output.decode().rstrip().split("\r")[-1]
    os.close(reader)
    assert "6/10000" in line
    assert line.endswith(end)
    assert len(line) <= columns

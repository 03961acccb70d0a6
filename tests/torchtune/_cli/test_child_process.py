"""A function that is called in another process."""

import subprocess
import sys
import time

CODE = (
    f"from torchtune._cli._child_process import call_in_child_process; from {__name__} import sleep; "
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

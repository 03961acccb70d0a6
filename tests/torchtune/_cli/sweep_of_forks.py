"""``tune sweep`` whose trials are forks of its own process, which has imported everything, instead of new interpreters.

A new interpreter takes seconds to import what a run needs, and a sweep starts one for every stage of every trial.
"""

import os
import subprocess
import sys
from types import SimpleNamespace
from typing import BinaryIO

from tests.recipes import forker
from torchtune._cli import sweep, tune

COMMAND = [sys.executable, "-m", "torchtune._cli.tune"]


class Fork:
    """What a sweep uses of ``subprocess.Popen``, for commands of ``tune``."""

    def __init__(self, arguments: list[str], *, stdout: BinaryIO, stderr: int, cwd: str) -> None:
        assert arguments[: len(COMMAND)] == COMMAND
        assert stderr == subprocess.STDOUT
        self.returncode: int | None = None
        job = {"recipe": tune.__file__, "argv": arguments[len(COMMAND) :], "environment": {}}
        self.pid = forker.start({**job, "output": str(stdout.name), "cwd": cwd}, {})

    def poll(self) -> int | None:
        self._wait(os.WNOHANG)
        return self.returncode

    def wait(self) -> int | None:
        self._wait(0)
        return self.returncode

    def _wait(self, options: int) -> None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, options)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)


if __name__ == "__main__":
    # In this module only: what else starts a process, for example to ask git, starts a real one.
    sweep.subprocess = SimpleNamespace(Popen=Fork, STDOUT=subprocess.STDOUT)
    tune.main()

"""Runs ``main(folder)`` of modules in several ranks, forked from one process that has imported them.

python -m tests.torchtune.training.parallel.fork_ranks FOLDER MODULE PROCESSES [MODULE PROCESSES ...]
"""

import importlib
import os
import signal
import sys
import traceback
from pathlib import Path

from tests.recipes.forker import environments, fork, import_rooms


def main(module: str, processes: int, folder: Path) -> int:
    """Exit status: 0 if all ranks ended well; the first that does not ends the others."""
    program = importlib.import_module(module)
    alive = set()
    for environment in environments(processes):
        pid = fork()
        if pid == 0:
            os.environ.update(environment)
            status = 1
            try:
                program.main(folder)
                status = 0
            except BaseException:  # noqa: BLE001 - whatever it is, the child must end here and say so
                traceback.print_exc()
            sys.stderr.flush()
            os._exit(status)
        alive.add(pid)
    failed = 0
    while alive:
        pid, status = os.wait()
        alive.discard(pid)
        if status and not failed:
            failed = 1
            for other in alive:
                os.kill(other, signal.SIGKILL)
    return failed


if __name__ == "__main__":
    import_rooms()
    folder, *runs = sys.argv[1:]
    for name, size in zip(runs[::2], runs[1::2], strict=True):
        if main(name, int(size), Path(folder)):
            sys.exit(1)

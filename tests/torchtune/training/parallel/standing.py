"""Runs that are made to stand still: starts their ranks, all runs at once, and tells how they ended.

A time limit that is short enough for a test is too short for a machine that is busy with something else. Every rank
notes when it was kept waiting for the processor and when it was made to stand still; a run that ended otherwise than
it should, and was slow, is started again with the next longer limit. Ranks are forks; on a CUDA device, which forks
cannot use, they are new processes.
"""

import importlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.devices import DEVICE
from tests.recipes.forker import environments, fork, import_rooms

# The program of a rank that is no fork; its argument is the job.
_NEW = f"import json, sys; from {__name__} import do_job; do_job(json.loads(sys.argv[1]))"


def note_fault() -> None:
    """A rank is about to go wrong: what ends its run from now on is that, not the machine."""
    Path(os.environ["STANDING_FOLDER"], "fault").touch()


def _feel_pulse(folder: Path, rank: int, limit: float) -> None:
    """Note a wait of an eighth of the limit; the watchdog takes a quarter for silence."""
    while True:
        before = time.monotonic()
        time.sleep(0.02)
        late = time.monotonic() - before
        if late > limit / 8:
            (folder / f"late_{rank}").write_text(f"rank {rank} was late by {late:.1f} s")


def _child(rank: int, limit: float, folder: Path, body: Callable[[], int]) -> None:
    signal.alarm(int(60 + 12 * limit))  # should nobody be left to end it
    descriptor = os.open(folder / f"screen_{rank}", os.O_WRONLY | os.O_CREAT)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    threading.Thread(target=_feel_pulse, args=(folder, rank, limit), daemon=True).start()
    status = 1
    try:
        status = body()
    finally:
        os._exit(status)


def do_job(job: dict[str, Any]) -> None:
    """Be a rank that is no fork."""
    import_rooms()
    body = getattr(importlib.import_module(job["module"]), job["body"])
    folder = Path(job["folder"])
    _child(job["rank"], job["limit"], folder, lambda: body(job["name"], job["rank"], job["limit"], folder))


def _start(
    name: str,
    rank: int,
    limit: float,
    folder: Path,
    body: Callable[[str, int, float, Path], int],
    environment: dict[str, str],
) -> int:
    """Start a rank of a run; return its pid."""
    if DEVICE != "cpu":
        job = {"module": body.__module__, "body": body.__name__, "name": name, "rank": rank, "limit": limit}
        argv = [sys.executable, "-c", _NEW, json.dumps({**job, "folder": str(folder)})]
        paths = {"PYTHONPATH": os.pathsep.join([os.getcwd(), *sys.path])}
        return os.posix_spawn(sys.executable, argv, os.environ | paths | environment)
    pid = fork()
    if pid == 0:
        os.environ.update(environment)
        _child(rank, limit, folder, lambda: body(name, rank, limit, folder))
    return pid


def _attempt(
    runs: Mapping[str, int],
    limit: float,
    folder: Path,
    body: Callable[[str, int, float, Path], int],
    look: Callable[[str, Path, dict[int, int], float], str],
    lasting: Collection[tuple[str, int]],
) -> dict[str, dict]:
    codes: dict[str, dict[int, int]] = {name: {} for name in runs}
    first: dict[str, float] = {}  # when a rank of the run ended
    waiting: dict[int, tuple[str, int]] = {}
    mistakes = dict.fromkeys(runs, "has not ended")
    try:
        for name, size in runs.items():
            (folder / name / "errors" / "0").mkdir(parents=True)
            errors = {"TORCHELASTIC_ERROR_FILE": str(folder / name / "errors" / "0" / "0" / "error.json")}
            for rank, environment in enumerate(environments(size)):
                environment |= {**errors, "STANDING_FOLDER": str(folder / name)}
                waiting[_start(name, rank, limit, folder / name, body, environment)] = (name, rank)
        deadline = time.monotonic() + 60 + 10 * limit
        grace = 10 + 3 * limit
        while any(mistakes.values()) and time.monotonic() < deadline:
            time.sleep(0.05)
            for pid in list(waiting):
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    name, rank = waiting.pop(pid)
                    codes[name][rank] = os.waitstatus_to_exitcode(status)
                    first.setdefault(name, time.time())
            if set(waiting.values()) <= set(lasting):
                deadline = min(deadline, time.monotonic() + grace)  # the last words of those that last
                mistakes = {name: look(name, folder / name, codes[name], limit) for name in runs}
                if not waiting:
                    break
    finally:
        for pid in waiting:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    for name in runs:
        mistakes[name] = look(name, folder / name, codes[name], limit)
        if late := sorted({key[1] for key in waiting.values() if key[0] == name and key not in lasting}):
            mistakes[name] = f"ranks {late} had not ended after {60 + 10 * limit} s; {mistakes[name]}"
    return {name: {"wrong": mistakes[name], "slow": _slow(folder / name, first.get(name), limit)} for name in runs}


def _slow(folder: Path, ended: float | None, limit: float) -> str:
    """What shows that the machine, not the fault, may have ended a run; empty if nothing does."""
    notes = [path.read_text() for path in sorted(folder.glob("late_*"))]
    fault = folder / "fault"
    if ended is not None and not (fault.exists() and ended > fault.stat().st_mtime + limit - 0.1):
        notes.append("a rank ended before the fault had lasted long enough")
    return ", ".join(notes)


def run_all(
    runs: Mapping[str, int],
    limits: Sequence[float],
    folder: Path,
    body: Callable[[str, int, float, Path], int],
    look: Callable[[str, Path, dict[int, int], float], str],
    lasting: Collection[tuple[str, int]] = (),
) -> None:
    """Run all, and write into ``ended.json`` of every run what did not happen that should have.

    Args:
        runs: name: number of ranks.
        limits: time limits to try, in seconds.
        folder: of the attempts, each with a folder for every run.
        body: of a rank, given (run, rank, limit, folder); returns the exit status.
        look: says in words what is not as it should be, given (run, folder, exit codes by rank, limit).
        lasting: (run, rank) of those that do not end by themselves.
    """
    import_rooms()
    ended: dict[str, dict] = {}
    for limit in limits:
        again = {
            name: runs[name] for name in runs if name not in ended or (ended[name]["wrong"] and ended[name]["slow"])
        }
        if again:
            ended |= _attempt(again, limit, folder / f"{limit:g}", body, look, lasting)
    (folder / "ended.json").write_text(json.dumps(ended))

"""Run recipes and modules of the tests in forked children of a process that has imported everything.

Each starts at once. A job is ``{"environment": {...}, "output": file, "ranks": number}`` with either
``"recipe": path, "argv": [...]`` or ``"module": name, "folder": path``, whose ``main(folder)`` is called; the answers
are the children's pids, then, when they have ended, their exit codes. Several ranks find each other as those that
torchrun starts do; of a module's ranks, the first that fails ends the others. The parent runs no tensor operation, so
that a fork is safe, unless there is CUDA: torchao asks about the device when it is imported, and a fork of a
process that has used CUDA cannot. The children are then new processes.
"""

import contextlib
import gc
import importlib
import json
import multiprocessing
import os
import runpy
import signal
import socket
import sys
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

MODULES = (
    "datasets omegaconf torch._dynamo torch.distributed.checkpoint torch.distributed.elastic.agent.server "
    "torch.distributed.fsdp torchtune._recipe_registry"
)
# Seconds after which a module of the tests is killed.
PATIENCE = 900
ROOMS = (
    "config data datasets generation models modules modules.loss modules.peft modules.transforms reports rlhf "
    "rlhf.loss tokenizers training utils"
)

# The program of a child that is no fork; its argument is the job.
NEW = """
import json, sys
from tests.recipes import forker
forker.shorten_reports()
forker.child(json.loads(sys.argv[1]))
"""

_held: list[socket.socket] = []


def fork() -> int:
    """``os.fork``; the child collects garbage, but none that it shares with its parent."""
    import torch

    gc.freeze()
    pid = os.fork()
    if pid == 0:
        gc.enable()
        # A child replaces its parent's thread pool at the first use: torch aborts if two threads do so at once.
        torch.set_num_threads(torch.get_num_threads())
    return pid


def start(job: dict[str, Any], environment: dict[str, str]) -> int:
    """Start a child that does a job in an environment; return its pid."""
    import torch

    if torch.cuda.is_available():
        here = {"PYTHONPATH": os.pathsep.join([os.getcwd(), *sys.path])}
        return os.posix_spawn(
            sys.executable, [sys.executable, "-c", NEW, json.dumps(job)], os.environ | here | environment
        )
    pid = fork()
    if pid == 0:
        os.environ.update(environment)
        child(job)
    return pid


def run(job: dict[str, Any]) -> None:
    """Become ``python recipe argv``, or call ``main`` of a module."""
    os.environ.update(job["environment"])
    os.chdir(job.get("cwd", "."))
    if "module" in job:
        signal.alarm(PATIENCE)
        importlib.import_module(job["module"]).main(Path(job["folder"]))
    else:
        sys.argv = [job["recipe"], *job["argv"]]
        runpy.run_path(job["recipe"], run_name="__main__")


def child(job: dict[str, Any]) -> None:
    """Do a job with standard output and error in its file; never returns."""
    descriptor = os.open(job["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    status = 1
    try:
        run(job)
        status = 0
    except SystemExit as stop:
        status = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:  # noqa: BLE001  (whatever it is, the child must end here and say so)
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def wait(pids: list[int], together: bool) -> list[int]:
    """Return the exit codes; if ``together``, the first child that fails ends the others."""
    codes: dict[int, int] = {}
    while len(codes) < len(pids):
        pid, status = os.wait()
        codes[pid] = os.waitstatus_to_exitcode(status)
        for running in pids if together and status else ():
            with contextlib.suppress(ProcessLookupError):
                os.kill(running, signal.SIGKILL)
    return [codes[pid] for pid in pids]


def environments(ranks: int) -> list[dict[str, str]]:
    """What torchrun would tell each of them; nothing if there is one."""
    if ranks == 1:
        return [{}]
    # Bound for as long as this process lives, so that nobody else is given the port; rank 0 can still listen there.
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", 0))
    _held.append(held)
    port = held.getsockname()[1]
    shared = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1"}
    shared |= {"MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": "test"}
    return [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]


def import_rooms() -> None:
    """Import what recipes do, every public name included: once here, not once in every child."""
    gc.disable()  # what is imported stays
    for module in MODULES.split():
        importlib.import_module(module)
    for room in ROOMS.split():
        face = importlib.import_module(f"torchtune.{room}")
        for name in face.__all__:
            getattr(face, name)
    importlib.import_module("torchtune.models").list_specs()  # imports all families
    reports = importlib.import_module("torchtune.reports._page")
    for template in ("report.html", "card.md", "parts.html"):
        reports.environment(autoescape=template != "card.md").get_template(template)
    shorten_reports()


def shorten_reports() -> None:
    """Measure fewer rows and shorter answers for a run's report, which takes a third of a run of few steps."""
    probe = importlib.import_module("torchtune.reports._before_and_after")
    probe._FEWEST_ROWS = 2
    probe._MOST_ROWS = 2
    probe._MOST_PROMPTS = 1
    probe._MOST_NEW_TOKENS = 2


def serve(jobs: Connection) -> None:
    """Do jobs until the other end is closed."""
    multiprocessing.set_start_method(None, force=True)  # what it is in a process of its own
    while True:
        try:
            job = jobs.recv()
        except EOFError:
            return
        if "module" in job:
            importlib.import_module(job["module"])  # here, once
        pids = [start(job, environment) for environment in environments(job["ranks"])]
        jobs.send(pids)
        jobs.send(wait(pids, together="module" in job))

"""Run recipes in forked children of a process that has imported everything, so that each starts at once.

Reads one job a line from standard input, ``{"recipe": path, "argv": [...], "output": file, "ranks": number}``; prints
the children's pids, then, when they have ended, their exit codes. Several ranks find each other as those that torchrun
starts do. The parent runs no tensor operation, so that a fork is safe.
"""

import gc
import importlib
import json
import os
import runpy
import socket
import sys
import traceback

MODULES = "datasets omegaconf torch._dynamo torch.distributed.fsdp torchtune._recipe_registry"
ROOMS = "config data datasets models modules modules.loss modules.peft modules.transforms.tokenizers training utils"

_held: list[socket.socket] = []


def fork() -> int:
    """``os.fork``; the child looks for garbage, but not in what it shares with its parent."""
    gc.freeze()
    pid = os.fork()
    if pid == 0:
        gc.enable()
    return pid


def child(recipe: str, argv: list[str], output: str) -> None:
    """Become ``python recipe argv`` with standard output and error in ``output``; never returns."""
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.argv = [recipe, *argv]
    status = 1
    try:
        runpy.run_path(recipe, run_name="__main__")
        status = 0
    except SystemExit as stop:
        status = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:  # noqa: BLE001  (whatever it is, the child must end here and say so)
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


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


def main() -> None:
    """Serve jobs until standard input closes."""
    import_rooms()
    print("ready", flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        pids = []
        for environment in environments(job.pop("ranks")):
            pid = fork()
            if pid == 0:
                os.environ.update(environment)
                child(**job)
            pids.append(pid)
        print(json.dumps(pids), flush=True)
        print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]), flush=True)


if __name__ == "__main__":
    main()

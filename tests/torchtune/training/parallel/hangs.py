"""Runs that stand still, each in a way of its own: forks their ranks, all runs at once, and writes how they ended."""

import ctypes
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import TCPStore

from torchtune.training import ParallelDims, Throughput, Watchdog
from torchtune.utils import get_logger, get_run_logger

CPU = torch.device("cpu")
TIMEOUT = 4.0
STEPS = 5
_watchdogs: list[Watchdog] = []


def sleep_forever() -> None:
    while True:
        time.sleep(1000)


def until_others_know() -> None:
    """Wait until this rank has shown that it is in step 3; it cannot any more when it is stopped."""
    store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), None, False)
    while json.loads(store.get(_watchdogs[0]._beats._key(int(os.environ["RANK"]))))["step"] < 2:
        time.sleep(0.05)


def fall_asleep() -> None:
    sleep_forever()


def be_stopped() -> None:
    until_others_know()
    os.kill(os.getpid(), signal.SIGSTOP)


def fail() -> None:
    raise ValueError("a bad row")


def be_deaf() -> None:
    until_others_know()
    ctypes.PyDLL(None).sleep(1000)  # lets no other thread of Python run


# name: (ranks, the one that goes wrong, what it does in step 3, where)
RUNS: dict[str, tuple[int, int, Callable[[], None] | None, str]] = {
    "asleep": (4, 2, fall_asleep, "loading"),
    "asleep in the step": (2, 1, fall_asleep, "step"),
    "stopped": (2, 1, be_stopped, "loading"),
    "rank 0 stopped": (2, 0, be_stopped, "loading"),
    "deaf": (2, 1, be_deaf, "step"),
    "failed": (2, 1, fail, "step"),
    "alone": (1, 0, fall_asleep, "loading"),
    "slow save": (2, 0, None, "save"),
}


def all_groups() -> list[dist.ProcessGroup]:
    return list(dist.distributed_c10d._world.pg_map)


def save_slowly(seconds: float) -> None:
    """Longer than the time limit, by many short pieces of work."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for _ in range(3):
            time.sleep(0.021)
        time.sleep(0.073)


def run(rank: int, name: str) -> None:
    """One rank's loop."""
    _, culprit, go_wrong, where = RUNS[name]
    dims = ParallelDims.start(CPU, dp_shard=-1)
    throughput = Throughput(dims=dims)

    def loader() -> Iterator[list[int]]:
        for step in range(1, STEPS + 1):
            if go_wrong and (step, rank, where) == (3, culprit, "loading"):
                go_wrong()
            yield [step]

    try:
        with Watchdog(throughput.activity, dims, TIMEOUT) as watchdog:
            _watchdogs.append(watchdog)
            if dims.mesh is not None:
                limits = {group._get_backend(CPU).options._timeout.total_seconds() for group in all_groups()}
                get_logger().info(f"Collectives wait {sorted(limits)} s.")
            for (step,) in throughput.loading(loader()):
                if go_wrong and (step, rank, where) == (3, culprit, "step"):
                    go_wrong()
                dims.sum(1)
                throughput.step(processed=1, trained=1)
                with throughput.paused("saving"):
                    if (step, rank, where) == (3, culprit, "save"):
                        save_slowly(2.5 * TIMEOUT)
                    dims.any(False)
    except ValueError:
        sleep_forever()  # as a cleanup can that waits for the others


def fork(name: str, rank: int, port: int, folder: Path) -> int:
    """Start one rank; returns its process."""
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        descriptor = os.open(folder / f"screen_{rank}", os.O_WRONLY | os.O_CREAT)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(RUNS[name][0]), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        get_run_logger(folder).info(name)
        run(rank, name)
        status = 0
    finally:
        sys.stderr.flush()
        os._exit(status)


def main(folder: Path) -> None:
    """Start all, and wait for those that can end."""
    torch.set_num_threads(1)
    waiting: dict[int, tuple[str, int]] = {}
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in RUNS]  # all at once, so that no two are the same
    ports = [own.getsockname()[1] for own in sockets]
    for own in sockets:
        own.close()
    for (name, (size, *_)), port in zip(RUNS.items(), ports, strict=True):
        (folder / name).mkdir()
        waiting.update({fork(name, rank, port, folder / name): (name, rank) for rank in range(size)})
    codes: dict[str, dict[int, int]] = {name: {} for name in RUNS}
    lasting = [(name, culprit) for name, (_, culprit, what, _) in RUNS.items() if what in (be_stopped, be_deaf, fail)]
    stuck = [pid for pid, key in waiting.items() if key in lasting]
    while waiting.keys() - stuck:
        pid, status = os.wait()
        name, rank = waiting.pop(pid)
        codes[name][rank] = os.waitstatus_to_exitcode(status)
    while "Timeout" not in (folder / "deaf" / "logs" / "rank_1.log").read_text():
        time.sleep(0.1)
    for pid in stuck:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    (folder / "codes.json").write_text(json.dumps(codes))


if __name__ == "__main__":
    main(Path(sys.argv[1]))

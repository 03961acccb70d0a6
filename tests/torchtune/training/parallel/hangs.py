"""Runs that stand still, each in a way of its own: and what went otherwise than it should."""

import ctypes
import hashlib
import json
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import TCPStore

from tests.torchtune.training.parallel.standing import note_fault, run_all
from torchtune.supervision import HANG_EXIT_CODE, Throughput, Watchdog
from torchtune.training import ParallelDims
from torchtune.utils import LostRankError, get_logger, get_run_logger

CPU = torch.device("cpu")
LIMITS = (4.0, 20.0)  # the longer one for runs that the machine was too slow for
STEPS = 5
_watchdogs: list[Watchdog] = []


def sleep_forever() -> None:
    while True:
        time.sleep(1000)


def until_others_know() -> None:
    """Wait until this rank has shown that it is in step 3; it cannot any more when it is stopped."""
    store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), None, False)
    key = _watchdogs[0]._heartbeats._key(int(os.environ["RANK"]))
    while not store.check([key]) or json.loads(store.get(key))["step"] < 2:
        time.sleep(0.05)
    note_fault()


def fall_asleep() -> None:
    note_fault()
    sleep_forever()


def be_stopped() -> None:
    until_others_know()
    os.kill(os.getpid(), signal.SIGSTOP)


def fail() -> None:
    note_fault()
    raise ValueError("a bad row")


def be_killed() -> None:
    until_others_know()
    while len(_watchdogs[0]._heartbeats._lifelines._lines) < 2:  # to the ranks before and after this one
        time.sleep(0.05)
    os.kill(os.getpid(), signal.SIGKILL)


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
    "killed": (2, 1, be_killed, "step"),
    "killed unnoticed": (4, 2, be_killed, "step"),
    "rank 0 killed unnoticed": (4, 0, be_killed, "step"),
    "alone": (1, 0, fall_asleep, "loading"),
    "slow save": (2, 0, None, "save"),
}


def all_groups() -> list[dist.ProcessGroup]:
    return list(dist.distributed_c10d._world.pg_map)


def save_slowly(limit: float) -> None:
    """Longer than the time limit by many short pieces of work, and longer than that by one call."""
    note_fault()
    end = time.monotonic() + 1.25 * limit
    while time.monotonic() < end:
        hashlib.sha256(bytes(2**22)).hexdigest()
        time.sleep(0.08)
    start = time.monotonic()
    hashlib.pbkdf2_hmac("sha256", b"x", b"y", 100_000)
    hashlib.pbkdf2_hmac("sha256", b"x", b"y", int(1.25 * limit / (time.monotonic() - start) * 100_000))


def run(name: str, rank: int, limit: float, folder: Path) -> int:
    """One rank's loop."""
    get_run_logger(folder).info(name)
    _, culprit, go_wrong, line = RUNS[name]
    dims = ParallelDims.start(CPU, dp_shard=-1)
    throughput = Throughput(dims=dims)

    def loader() -> Iterator[list[int]]:
        for step in range(1, STEPS + 1):
            if go_wrong and (step, rank, line) == (3, culprit, "loading"):
                go_wrong()
            yield [step]

    try:
        with Watchdog(throughput.activity, dims, limit) as watchdog:
            _watchdogs.append(watchdog)
            if dims.mesh is not None:
                limits = {group._get_backend(CPU).options._timeout.total_seconds() for group in all_groups()}
                get_logger().info(f"Collectives wait {sorted(limits)} s.")
            for (step,) in throughput.loading(loader()):
                if go_wrong and (step, rank, line) == (3, culprit, "step"):
                    go_wrong()
                if name.endswith("unnoticed") and step == 3:
                    sleep_forever()  # as in a collective of NCCL, which does not fail when a rank is killed
                dims.sum(1)
                throughput.step(processed=1, trained=1)
                with throughput.paused("saving"):
                    if (step, rank, line) == (3, culprit, "save"):
                        save_slowly(limit)
                    dims.any(False)
    except ValueError:
        sleep_forever()  # as a cleanup can that waits for the others
    except LostRankError as error:
        get_logger().error(str(error))
        return error.exit_code
    return 0


SENTENCES = {
    "asleep": r"Rank 2 has not moved for \d+ s, loading data for step 3, at hangs\.py:\d+ in sleep_forever, while "
    r"ranks 0, 1 and 3 wait in step 3: its stack is in \S*asleep/logs/rank_2\.log\.",
    "asleep in the step": r"Rank 1 has not moved for \d+ s, in step 3, at hangs\.py:\d+ in sleep_forever, while rank 0 "
    r"waits in step 3: its stack is in .*rank_1\.log\.",
    "stopped": r"Rank 1 has given no sign of life for \d+ s, last seen .*step 3, while rank 0 waits in step 3: the "
    r"process is stopped or its machine is gone; see .*rank_1\.log for its last words\.",
    "rank 0 stopped": r"Rank 1 has not moved for \d+ s, in step 3, .*; the process at 127\.0\.0\.1:\d+ through which "
    r"ranks know of each other does not answer: .*",
    "deaf": r"Rank 1 has given no sign of life for \d+ s, last seen in step 3, while rank 0 waits in step 3: .*",
    "failed": r"Rank 1 on machine 0 \(.*\) ended with ValueError, in step 3: see \S*failed/logs/rank_1\.log\.",
    "killed": r"Rank 1 on machine 0 \(.*\) is gone, last seen .*step 3: the process or its torchrun agent .*",
    "killed unnoticed": r"Rank 2 on machine 0 \(.*\) is gone, last seen .*step 3: the process or its torchrun agent .*",
    "rank 0 killed unnoticed": r"Machine 0, which serves the store of all ranks at 127\.0\.0\.1:\d+, does not answer: "
    r"rank 0 or its torchrun agent was killed, .*",
    "alone": r"Rank 0 has not moved for \d+ s, loading data for step 3, at hangs\.py:\d+ in sleep_forever: its .*",
}
# Lines of the logs: stacks, and that torch gives collectives up later than the watchdog does.
LINES = [
    *(("asleep", rank, r"Collectives wait \[{}\] s\.") for rank in range(4)),
    ("asleep", 0, r'File ".*", line \d+ in all_reduce\n'),
    ("asleep", 2, r'File ".*", line \d+ in fall_asleep\n'),
    ("asleep in the step", 1, r'File ".*", line \d+ in fall_asleep\n'),
    ("deaf", 1, r'File ".*", line \d+ in be_deaf\n'),
    ("alone", 0, r'File ".*", line \d+ in fall_asleep\n'),
]
# They would last for ever.
LASTING = {(name, culprit) for name, (_, culprit, what, _) in RUNS.items() if what in (be_stopped, be_deaf, fail)}


def look(name: str, folder: Path, codes: dict[int, int], limit: float) -> str:
    """What is not as it should be: every process that can ends, one sentence says why, logs hold the stacks."""
    screens = [path.read_text() for path in sorted(folder.glob("screen_*"))]
    # A slow save takes longer than the limit, but it moves; a rank that has failed is not waited for.
    ranks, culprit, what, _ = RUNS[name]
    ends = {fail: 1, be_killed: 75, None: 0}.get(what, HANG_EXIT_CODE)
    wanted = {rank: ends for rank in range(ranks) if (name, rank) not in LASTING}
    if what is be_killed:
        wanted[culprit] = -signal.SIGKILL
    if codes != wanted:
        return f"exit codes are {codes}, not {wanted}; screens:\n" + "\n".join(screens)
    errors = []
    for screen in screens:
        errors += [line for line in screen.splitlines() if line.startswith("ERROR")]
    sentences = [SENTENCES[name]] if name in SENTENCES else []
    if len(errors) != len(sentences):
        return f"{len(errors)} errors are shown: {errors}"
    for error, sentence in zip(errors, sentences, strict=True):
        if not re.fullmatch(sentence, error.removeprefix("ERROR:torchtune:")):
            return f"{error!r} does not match {sentence!r}"
    for location, rank, line in LINES:
        log = folder / "logs" / f"rank_{rank}.log"
        if location == name and not re.search(line.format(2 * limit + 60), log.read_text()):
            return f"{log} lacks {line!r}:\n{log.read_text()}"
    return ""


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    run_all({name: size for name, (size, *_) in RUNS.items()}, LIMITS, folder, run, look, LASTING)

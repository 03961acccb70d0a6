"""Run a command in several processes that share a model, and functions in child processes that may crash.

Of the processes that share a model, one per device, this one is rank 0: it reads the terminal, prints, writes files and
listens. The others, its followers, run the same command line without input and output. They end with it, and it ends
with a sentence if one of them is lost, or shows no sign of life: each writes a byte to its standard output every
second, which rank 0 reads.
"""

import multiprocessing
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from types import TracebackType
from typing import IO, Any

from torchtune.utils import UserError

# In the environment of a follower.
_FOLLOWER = "TUNE_FOLLOWER"
# Seconds in which rank 0 may find the same error as the follower that has ended, to report it itself.
_PATIENCE = 5.0
# Seconds between two signs of life of a follower, and without one after which it is taken for stopped. A call into C++
# may hold Python's lock for minutes.
_SECONDS_BETWEEN_SIGNS = 1.0
_MOST_SILENT_SECONDS = 300.0
# Seconds between two looks of rank 0 that show that it was stopped itself, with its machine or by Ctrl-Z.
_SECONDS_OF_A_STOP = 10.0
# Seconds that followers may take to end after rank 0 has finished.
_MOST_SECONDS_TO_END = 60.0


class LostFollowerError(UserError):
    """Raised if a follower ends before rank 0, or does not answer."""

    exit_code = 1


@contextmanager
def several_processes(requested: str | None) -> Iterator[None]:
    """Context manager that runs its block in several processes, if the command line asks for them.

    Args:
        requested: value of ``--nproc-per-node``: a number, gpu, cpu or auto; None: this process alone.

    Raises:
        UserError: the value is none of these.
        LostFollowerError: another process has ended or does not answer.
    """
    if _FOLLOWER in os.environ:
        threading.Thread(target=_end_with_leader, daemon=True).start()
        threading.Thread(target=_give_signs_of_life, daemon=True).start()
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - until the process ends
        yield
        _leave_group()
        return
    size = _count_processes(requested)
    if size == 1:
        yield
        return
    with _Followers(size):
        yield


def _leave_group() -> None:
    """Leave the process group of the ranks, if the command has joined one."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


def _end_with_leader() -> None:
    """Wait for the end of rank 0, which holds the other end of standard input, and end at once."""
    os.read(0, 1)  # not sys.stdin, whose lock this thread would hold when the interpreter ends
    os._exit(1)


def _give_signs_of_life() -> None:
    """Tell rank 0 once a second that this process runs."""
    while True:
        try:
            os.write(1, b".")  # not sys.stdout, which writes nothing
        except OSError:  # rank 0 has ended
            return
        time.sleep(_SECONDS_BETWEEN_SIGNS)


def _count_processes(requested: str | None) -> int:
    """Return the number of processes that ``--nproc-per-node`` asks for."""
    if requested is None:
        return 1
    if requested.isdigit():
        size = int(requested)
    else:
        from torch.distributed.run import determine_local_world_size

        try:
            size = determine_local_world_size(requested)
        except ValueError as error:
            raise UserError(
                f"--nproc-per-node {requested}: give the number of processes, or gpu for one per device "
                f"({str(error).rstrip('.')})."
            ) from error
    if size < 1:
        raise UserError(f"--nproc-per-node {requested}: it must be at least 1.")
    return size


class _Followers:
    """The processes of ranks 1 and above, and the environment of rank 0 for as long as they run."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._processes: list[subprocess.Popen] = []
        self._errors: list[IO[bytes]] = []  # what each of them prints to standard error
        self._last_signs: list[float] = []  # time of the last sign of life of each
        self._is_over = threading.Event()

    def __enter__(self) -> None:
        import torch
        import torch.distributed as dist

        # Rank 0 serves the store on a free port; all ranks connect as clients, as to the store of torchrun's agent.
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        shared = {
            "WORLD_SIZE": str(self._size),
            "LOCAL_WORLD_SIZE": str(self._size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self._store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
        # The processes share the cores of the machine.
        self._threads_before = torch.get_num_threads()
        threads = max(1, self._threads_before // self._size)
        torch.set_num_threads(threads)
        for rank in range(1, self._size):
            errors = tempfile.TemporaryFile()  # a full pipe would block the follower until rank 0 reads it
            ranks = {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank), _FOLLOWER: "1"}
            process = subprocess.Popen(
                [sys.executable, "-m", "torchtune._cli.tune", *sys.argv[1:]],
                env={**os.environ, "OMP_NUM_THREADS": str(threads), **ranks},
                stdin=subprocess.PIPE,  # closes when rank 0 ends, however: the follower then ends, too
                stdout=subprocess.PIPE,  # for signs of life
                stderr=errors,
                start_new_session=True,  # Ctrl-C is for rank 0, which ends the others
            )
            os.set_blocking(process.stdout.fileno(), False)  # the watcher reads signs of life in turn
            self._last_signs.append(time.monotonic())
            self._processes.append(process)
            self._errors.append(errors)
        rank_0 = {**shared, "RANK": "0", "LOCAL_RANK": "0"}
        self._environment_before = {name: os.environ.get(name) for name in rank_0}
        os.environ.update(rank_0)
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        self._watcher.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        import torch

        self._is_over.set()
        self._watcher.join()  # it reads from the processes
        failed_rank = None
        text = None
        if error is None:
            for process in self._processes:  # which finish with rank 0
                try:
                    process.wait(_MOST_SECONDS_TO_END)
                except subprocess.TimeoutExpired:
                    break  # rank 0 has all results: the followers are killed below
            failed_rank = self._failed_rank()
        else:
            cause = error if isinstance(error, RuntimeError) else error.__cause__
            if isinstance(cause, RuntimeError):  # of a collective, if a follower has failed or hangs
                # The collective may fail some time before the process of the follower has ended.
                end = time.monotonic() + _PATIENCE
                while self._failed_rank() is None and time.monotonic() < end:
                    time.sleep(0.1)
                failed_rank = self._failed_rank()
                if "timed out" in str(cause).lower():
                    text = (
                        f"one of the {self._size} processes runs, but has not answered the others until the timeout of "
                        "their collectives: run the command again, and with fewer processes if it happens again."
                    )
        if failed_rank is not None:
            text = self._explain(failed_rank)
        self._kill()
        _leave_group()
        torch.set_num_threads(self._threads_before)
        for name, value in self._environment_before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
        for errors in self._errors:
            errors.close()
        if text is not None:
            raise LostFollowerError(text) from error

    def _watch(self) -> None:
        """End this process if a follower fails or is stopped while rank 0 waits: for input, or a collective.

        Such a wait cannot be interrupted from this thread, so the whole process ends.
        """
        last_check = time.monotonic()
        while not self._is_over.wait(0.2):
            now = time.monotonic()
            if now - last_check > _SECONDS_OF_A_STOP:  # this process has read no signs for so long
                self._last_signs = [now] * len(self._last_signs)
            last_check = now
            silent_rank = self._silent_rank(now)
            if silent_rank is not None:
                self._end(
                    f"rank {silent_rank} of {self._size} has given no sign of life for {_MOST_SILENT_SECONDS:.0f} s, "
                    "so that the others ended, too: its process was stopped, or its device hangs; run the command "
                    "again."
                )
            failed_rank = self._failed_rank()
            if failed_rank is None or self._is_over.wait(_PATIENCE):
                continue  # no failure, or rank 0 has raised the same error meanwhile
            self._end(self._explain(failed_rank))

    def _end(self, sentence: str) -> None:
        """End all processes with an error, whatever the main thread waits for."""
        print(f"error: {sentence}", file=sys.stderr, flush=True)
        self._kill()
        os._exit(LostFollowerError.exit_code)

    def _silent_rank(self, now: float) -> int | None:
        """Read the signs of life; return the rank of a follower that runs without one, or None."""
        for index, process in enumerate(self._processes):
            if process.stdout.read(1 << 16):  # None if there is nothing to read
                self._last_signs[index] = now
            if process.poll() is None and now - self._last_signs[index] > _MOST_SILENT_SECONDS:
                return index + 1
        return None

    def _failed_rank(self) -> int | None:
        """Return the rank of a follower that has failed; None if there is none."""
        for rank, process in enumerate(self._processes, start=1):
            if process.poll():  # an exit code other than 0
                return rank
        return None

    def _explain(self, rank: int) -> str:
        """Return a sentence on the end of a follower, with its error if it has printed one."""
        errors = self._errors[rank - 1]
        errors.seek(0)
        output = errors.read().decode(errors="replace")
        lines = [line.strip() for line in output.splitlines() if line.strip()]
        code = self._processes[rank - 1].returncode
        for line in reversed(lines):  # the last error is the one that ended it
            message = re.match(r"(?:tune [\w ]+: )?error: (.*)", line)  # of main, or of argparse
            if message:
                return f"rank {rank}: {message[1]}"
        if code < 0:
            event = f"rank {rank} of {self._size} was ended by {signal.Signals(-code).name}"
        elif lines:
            event = f"rank {rank} of {self._size} has failed ({lines[-1]})"
        else:
            event = f"rank {rank} of {self._size} has failed (exit code {code})"
        return (
            f"{event}, so that the others ended, too: run the command again, and with more "
            "processes or --dtype bf16 if memory was short."
        )

    def _kill(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()
            process.stdin.close()
            process.stdout.close()


class CrashedError(UserError):
    """Error of a process that ended without a result."""


def call_in_child_process(function: Callable[..., Any], *args: Any) -> Any:
    """Call a function of a module in another process; its user errors are raised here.

    Raises:
        CrashedError: the process crashes, is killed because memory is short, or raises another error.
    """
    # Fork a small process that has imported the module: this takes no time, and there are no threads to lose.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([function.__module__])
    try:
        with ProcessPoolExecutor(1, context, _end_with_parent) as pool:
            return pool.submit(function, *args).result()
    except BrokenProcessPool as error:
        raise CrashedError("its process crashed, or the machine has not enough memory") from error
    except UserError:
        raise
    except Exception as error:  # for example, of a library that cannot be imported
        raise CrashedError(f"{type(error).__name__}: {str(error).partition(chr(10))[0]}") from error


def _end_with_parent() -> None:
    """Make this process exit when its parent exits, even if the parent is killed."""

    def wait() -> None:
        multiprocessing.parent_process().join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()

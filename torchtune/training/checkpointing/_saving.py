"""Checkpoints written by all ranks at once, at once or behind the back of training."""

import logging
import os
import time
import zlib
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from torchtune.training.checkpointing._directories import new_directory, prune
from torchtune.training.checkpointing._errors import CheckpointError
from torchtune.training.checkpointing._ranks import Ranks
from torchtune.training.checkpointing._safetensors_file import Block, TensorFile, write_at
from torchtune.utils import FolderLock, UserError, explain_os_error, get_logger


@dataclass(frozen=True)
class Job:
    """A checkpoint to be written.

    Attributes:
        output_dir: where.
        name: of its directory.
        files: of tensors, the same on every rank.
        small: writes everything else into the directory, on rank 0.
        keep: how many checkpoints are kept; None for all.
        optional: that it fails is a warning, and the run goes on.
    """

    output_dir: Path
    name: str
    files: list[TensorFile]
    small: Callable[[Path], None]
    keep: int | None
    optional: bool


class Saver:
    """Writes checkpoints, one after another.

    Args:
        ranks: all of them; every method is called by all.
        lock: of the folder of checkpoints; rank 0's counts.
    """

    def __init__(self, ranks: Ranks, lock: FolderLock) -> None:
        self._ranks, self._lock = ranks, lock
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: Future[None] | None = None
        # The copy in the making, of which checkpoint it is, and the seconds that it has cost.
        self._copying: tuple[Future[list[tuple[TensorFile, Block]]], str, float] | None = None
        self._hooks: list[RemovableHandle] = []
        self._copies: list[torch.Tensor] = []

    def wait(self) -> None:
        """Wait until everything is written.

        Raises:
            UserError: that failed.
        """
        self._hold()
        while self._hooks:
            self._hooks.pop().remove()
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def save(self, job: Job, *, behind: bool, optimizers: Sequence[Optimizer] = ()) -> None:
        """Write a checkpoint, when the one before is written.

        Args:
            job: what to write.
            behind: copy it in memory, and write while training goes on; what goes wrong is raised by the next call.
            optimizers: if there are any, nothing of it changes before one of them takes its next step: the copy may
                take until then.

        Raises:
            UserError: the disk is full or may not be written to; what was saved before is untouched.
        """
        self.wait()
        start = time.monotonic()
        headers = zlib.crc32(b"".join(file.header for file in job.files))
        if len(set(self._ranks.gather(headers))) > 1:
            raise CheckpointError(f"{job.name}: the ranks hold other tensors, so they cannot write one checkpoint.")
        blocks = ((file, block) for file in job.files for block in file.blocks())
        if not behind:
            self._write(job, lambda: blocks)
            self._log(f"{job.name} was saved in {time.monotonic() - start:.1f} s.")
            return
        copied: Future[list[tuple[TensorFile, Block]]] = Future()
        stream = None
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
            stream = torch.cuda.Stream()  # so that the copy does not wait for what training does next
        if optimizers:
            copied = self._thread.submit(self._copy, blocks, stream)
        else:
            copied.set_result(self._copy(blocks, stream))
        self._pending = self._thread.submit(self._write, job, copied.result)
        self._copying = copied, job.name, time.monotonic() - start
        # Their removal must wait: they are called from a loop over all of them.
        self._hooks = [optimizer.register_step_pre_hook(self._hold) for optimizer in optimizers]
        if not optimizers:
            self._hold()

    def _hold(self, *_: object) -> None:
        """Hold up what would change the weights until they are copied."""
        if self._copying is None:
            return
        (copied, name, seconds), self._copying = self._copying, None
        start = time.monotonic()
        wait([copied])
        seconds += time.monotonic() - start
        self._log(f"{name} held training up for {seconds:.3f} s and is being written.")

    def _log(self, text: str, level: int = logging.INFO) -> None:
        if self._ranks.rank == 0:
            get_logger().log(level, text)

    def _copy(
        self, blocks: Iterable[tuple[TensorFile, Block]], stream: torch.cuda.Stream | None
    ) -> list[tuple[TensorFile, Block]]:
        """Copies on the host, in memory that is used again by the next save."""
        copied: list[tuple[TensorFile, Block]] = []
        with torch.cuda.stream(stream):
            for number, (file, block) in enumerate(blocks):
                data = block.data
                if number == len(self._copies):
                    self._copies.append(torch.empty(0))
                room = self._copies[number]
                if room.shape != data.shape or room.dtype != data.dtype:
                    room = self._copies[number] = torch.empty(data.shape, dtype=data.dtype, pin_memory=data.is_cuda)
                room.copy_(data, non_blocking=data.is_cuda)
                copied.append((file, replace(block, data=room)))
        if stream is not None:
            stream.synchronize()
        return copied

    def _write(self, job: Job, blocks: Callable[[], Iterable[tuple[TensorFile, Block]]]) -> None:
        self._ranks.first(self._lock.check)  # a run that has lost its folder to another must not go on
        try:
            self._write_or_fail(job, blocks)
        except (UserError, OSError) as error:
            if not job.optional:
                raise
            self._log(f"{job.name} was not saved, training goes on: {error}", logging.WARNING)

    def _write_or_fail(self, job: Job, blocks: Callable[[], Iterable[tuple[TensorFile, Block]]]) -> None:
        ranks, path = self._ranks, job.output_dir / job.name
        with ExitStack() as stack:


            def begin() -> Path:
                stack.enter_context(self._lock.held())
                return stack.enter_context(new_directory(job.output_dir, job.name))

            folder = ranks.first(begin)
            files = _OpenFiles(folder)
            stack.callback(files.close)
            with ranks.together():
                if not folder.is_dir():
                    raise CheckpointError(
                        f"output_dir: {job.output_dir} is not the same folder on all machines: choose one that is."
                    )
            with ranks.together():
                written = self._write_files(job, blocks(), files, path)
            total = sum(file.size for file in job.files)
            if (found := sum(ranks.gather(written))) != total:
                raise CheckpointError(
                    f"{path}: the ranks wrote {found:,} bytes of tensors where there are {total:,}: this is a mistake "
                    "of the library."
                )
            ranks.first(stack.close)  # marked and renamed
        ranks.first(lambda: prune(job.output_dir, job.keep))

    def _write_files(
        self, job: Job, blocks: Iterable[tuple[TensorFile, Block]], files: "_OpenFiles", path: Path
    ) -> int:
        """Write what is this rank's to write, down to the disk; returns the bytes of tensors."""
        written, full = 0, None
        try:
            for file, block in blocks:
                # A rank that cannot write goes on making blocks: the others may need it for theirs.
                if full is None:
                    try:
                        written += file.write(files.descriptor(file), block)
                    except OSError as error:
                        full = explain_os_error(error, path).with_traceback(None)
            if full is not None:
                raise full
            if self._ranks.rank == 0:
                for file in job.files:
                    write_at(files.descriptor(file), file.header, 0)
                job.small(files.folder)
            files.sync()
        except OSError as error:
            raise explain_os_error(error, path) from error
        finally:
            del full
        return written


class _OpenFiles:
    """Files of a directory that this rank writes to."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._open: dict[str, int] = {}

    def descriptor(self, file: TensorFile) -> int:
        if file.path not in self._open:
            path = self.folder / file.path
            path.parent.mkdir(exist_ok=True)
            self._open[file.path] = os.open(path, os.O_WRONLY | os.O_CREAT, 0o666)
        return self._open[file.path]

    def sync(self) -> None:
        for descriptor in self._open.values():
            os.fsync(descriptor)

    def close(self) -> None:
        while self._open:
            os.close(self._open.popitem()[1])

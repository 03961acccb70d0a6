"""Checkpoints written by all ranks at once, at once or behind the back of training."""

import os
import time
import zlib
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from torchtune.training.checkpointing._directories import new_directory, prune
from torchtune.training.checkpointing._errors import CheckpointError
from torchtune.training.checkpointing._ranks import Ranks
from torchtune.training.checkpointing._safetensors_file import Block, TensorFile, write_at
from torchtune.utils import UserError, explain_os_error, get_logger


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
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: Future[None] | None = None
        self._staged: list[torch.Tensor] = []

    def wait(self) -> None:
        """Wait until everything is written.

        Raises:
            UserError: that failed.
        """
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def save(self, job: Job, *, behind: bool) -> None:
        """Write a checkpoint, when the one before is written.

        Args:
            job: what to write.
            behind: copy it in memory, and write while training goes on; what goes wrong is raised by the next call.

        Raises:
            UserError: the disk is full or may not be written to; what was saved before is untouched.
        """
        start = time.monotonic()
        headers = zlib.crc32(b"".join(file.header for file in job.files))
        if len(set(self._ranks.gather(headers))) > 1:
            raise CheckpointError(f"{job.name}: the ranks hold other tensors, so they cannot write one checkpoint.")
        blocks = ((file, block) for file in job.files for block in file.blocks())
        if not behind:
            self._write(job, blocks)
            self._log(f"{job.name} was saved in {time.monotonic() - start:.1f} s.")
            return
        staged = self._stage(blocks)
        held = time.monotonic() - start
        self._log(f"{job.name} held training up for {held:.2f} s and is being written.")
        self._pending = self._thread.submit(self._write, job, staged)

    def _log(self, text: str) -> None:
        if self._ranks.rank == 0:
            get_logger().info(text)

    def _stage(self, blocks: Iterable[tuple[TensorFile, Block]]) -> list[tuple[TensorFile, Block]]:
        """Copies on the host, in memory that is used again by the next save."""
        staged: list[tuple[TensorFile, Block]] = []
        kinds = set()
        for number, (file, block) in enumerate(blocks):
            data = block.data
            if number == len(self._staged):
                self._staged.append(torch.empty(0))
            room = self._staged[number]
            if room.shape != data.shape or room.dtype != data.dtype:
                room = torch.empty(data.shape, dtype=data.dtype, pin_memory=data.is_cuda)
                self._staged[number] = room
            room.copy_(data, non_blocking=True)
            kinds.add(data.device.type)
            staged.append((file, replace(block, data=room)))
        for kind in kinds - {"cpu"}:
            getattr(torch, kind).synchronize()
        return staged

    def _write(self, job: Job, blocks: Iterable[tuple[TensorFile, Block]]) -> None:
        try:
            self._write_or_fail(job, blocks)
        except UserError as error:
            if not job.optional:
                raise
            if self._ranks.rank == 0:
                get_logger().warning(f"{job.name} was not saved, training goes on: {error}")

    def _write_or_fail(self, job: Job, blocks: Iterable[tuple[TensorFile, Block]]) -> None:
        ranks, path = self._ranks, job.output_dir / job.name
        with ExitStack() as stack:
            folder = ranks.first(lambda: stack.enter_context(new_directory(job.output_dir, job.name)))
            files = _OpenFiles(folder)
            stack.callback(files.close)
            failure = None
            written = 0
            # A rank that cannot write goes on making blocks: the others may need it for theirs.
            for file, block in blocks:
                try:
                    written += 0 if failure else file.write(files.descriptor(file), block)
                except OSError as error:
                    failure = explain_os_error(error, path)
            with ranks.together():
                if failure is not None:
                    raise failure
                try:
                    if ranks.rank == 0:
                        for file in job.files:
                            write_at(files.descriptor(file), file.header, 0)
                        job.small(folder)
                    files.sync()
                except OSError as error:
                    raise explain_os_error(error, path) from error
            total = sum(file.size for file in job.files)
            if (found := sum(ranks.gather(written))) != total:
                raise CheckpointError(
                    f"{path}: the ranks wrote {found:,} bytes of tensors where there are {total:,}: is it the same "
                    "folder on all machines?"
                )
            ranks.first(stack.close)  # marked and renamed
        ranks.first(lambda: prune(job.output_dir, job.keep))


class _OpenFiles:
    """Files of a directory that this rank writes to."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open: dict[str, int] = {}

    def descriptor(self, file: TensorFile) -> int:
        if file.path not in self._open:
            path = self._folder / file.path
            path.parent.mkdir(exist_ok=True)
            self._open[file.path] = os.open(path, os.O_WRONLY | os.O_CREAT, 0o666)
        return self._open[file.path]

    def sync(self) -> None:
        for descriptor in self._open.values():
            os.fsync(descriptor)

    def close(self) -> None:
        while self._open:
            os.close(self._open.popitem()[1])

"""Checkpoints written by all ranks at once, at once or behind the back of training."""

import json
import logging
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from torchtune.training.checkpointing._directories import Sums, new_directory, prune
from torchtune.training.checkpointing._errors import CheckpointError
from torchtune.training.checkpointing._ranks import Ranks
from torchtune.training.checkpointing._safetensors_file import Block, FileWriter, Part, Piece, TensorFile
from torchtune.utils import FolderLock, UserError, explain_os_error, get_logger


@dataclass(frozen=True)
class Job:
    """A checkpoint to be written.

    Attributes:
        output_dir: where.
        name: of its directory.
        files: of tensors, the same on every rank, each of which holds parts of them. One rank writes a file.
        own: file of this rank alone.
        agreed: what besides the files all ranks must have the same.
        small: writes everything else into the directory, on rank 0.
        keep: how many checkpoints are kept; None for the default.
        optional: that it fails is a warning, and the run goes on.
    """

    output_dir: Path
    name: str
    files: list[TensorFile]
    own: TensorFile | None
    agreed: bytes
    small: Callable[[Path], None]
    keep: int | None
    optional: bool


@dataclass
class _Item:
    """A part of a file.

    Attributes:
        file: which.
        writer: rank that writes it.
        blocks: what this rank has of it; ``None`` if that could not be made.
        shared: whether others have something of it.
    """

    file: TensorFile
    writer: int
    blocks: list[Block] | None
    shared: bool = True


# What all ranks do together: of several files, each with another writer, one part.
_Step = list[_Item]


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
        # Old checkpoints are deleted while training goes on.
        self._cleaner = ThreadPoolExecutor(1, thread_name_prefix="old checkpoints")
        self._cleaning: Future[None] | None = None
        # The copy in the making, of which checkpoint it is, and the seconds that it has cost.
        self._copying: tuple[Future[list[_Step]], str, float] | None = None
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

    def close(self) -> None:
        """Wait until everything is written, and what is to go is gone.

        Raises:
            UserError: the writing failed.
        """
        try:
            self.wait()
        finally:
            self._wait_for_cleaning()

    def _wait_for_cleaning(self) -> None:
        cleaning, self._cleaning = self._cleaning, None
        if cleaning is not None:
            cleaning.result()

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
        agreed = zlib.crc32(b"".join([*(file.header for file in job.files), job.agreed]))
        if len(set(self._ranks.gather(agreed))) > 1:
            raise CheckpointError(f"{job.name}: the ranks hold other tensors, so they cannot write one checkpoint.")
        failure: list[Exception] = []
        steps = self._steps(job, failure)
        if not behind:
            self._write(job, lambda: steps, failure)
            self._log(f"{job.name} was saved in {time.monotonic() - start:.1f} s.")
            return
        copied: Future[list[_Step]] = Future()
        stream = None
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
            stream = torch.cuda.Stream()  # so that the copy does not wait for what training does next
        if optimizers:
            copied = self._thread.submit(self._copy, steps, stream)
        else:
            copied.set_result(self._copy(steps, stream))
        self._pending = self._thread.submit(self._write, job, copied.result, failure)
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

    def _steps(self, job: Job, failure: list[Exception]) -> Iterator[_Step]:
        """The whole checkpoint, in an order that is the same on all ranks; each step is made when it is asked for.

        The files are dealt out to the ranks, so that as many are written at a time. What goes wrong is put into
        ``failure``: the others count on this rank until the end.
        """

        def make(part: Part) -> list[Block] | None:
            if failure:
                return None
            try:
                return list(part[1]())
            except Exception as error:  # noqa: BLE001 - raised when nobody waits for this rank any more
                failure.append(error)
                return None

        for first in range(0, len(job.files), self._ranks.size):
            group = job.files[first : first + self._ranks.size]
            for number in range(max(len(file.parts) for file in group)):
                yield [
                    _Item(file, writer, make(file.parts[number]))
                    for writer, file in enumerate(group)
                    if number < len(file.parts)
                ]
        for part in job.own.parts if job.own is not None else ():
            yield [_Item(job.own, self._ranks.rank, make(part), shared=False)]

    def _copy(self, steps: Iterable[_Step], stream: torch.cuda.Stream | None) -> list[_Step]:
        """Copies on the host, in memory that is used again by the next save."""
        copied: list[_Step] = []
        number = 0
        with torch.cuda.stream(stream):
            for step in steps:
                copied.append([])
                for item in step:
                    blocks = None if item.blocks is None else []
                    for block in item.blocks or ():
                        blocks.append(replace(block, data=self._copy_of(number, block.data)))
                        number += 1
                    copied[-1].append(replace(item, blocks=blocks))
        if stream is not None:
            stream.synchronize()
        return copied

    def _copy_of(self, number: int, data: torch.Tensor) -> torch.Tensor:
        if number == len(self._copies):
            self._copies.append(torch.empty(0))
        room = self._copies[number]
        if room.shape != data.shape or room.dtype != data.dtype:
            room = self._copies[number] = torch.empty(data.shape, dtype=data.dtype, pin_memory=data.is_cuda)
        return room.copy_(data, non_blocking=data.is_cuda)

    def _write(self, job: Job, steps: Callable[[], Iterable[_Step]], failure: list[Exception]) -> None:
        self._ranks.first(self._lock.check)  # a run that has lost its folder to another must not go on
        try:
            self._write_or_fail(job, steps, failure)
        except (UserError, OSError) as error:
            if not job.optional:
                raise
            self._log(f"{job.name} was not saved, training goes on: {error}", logging.WARNING)

    def _write_or_fail(self, job: Job, steps: Callable[[], Iterable[_Step]], failure: list[Exception]) -> None:
        ranks, path = self._ranks, job.output_dir / job.name
        sums: Sums = {}
        with ExitStack() as stack:

            def begin() -> Path:
                self._wait_for_cleaning()  # there may be no room before
                stack.enter_context(self._lock.held())
                return stack.enter_context(new_directory(job.output_dir, job.name, sums))

            folder = ranks.first(begin)
            with ranks.together():
                if not folder.is_dir():
                    raise CheckpointError(
                        f"output_dir: {job.output_dir} is not the same folder on all machines: choose one that is."
                    )
            written: Sums = {}
            with ranks.together():
                try:
                    written = self._write_files(job, steps(), folder)
                    if failure:
                        raise failure[0]
                except OSError as error:
                    raise explain_os_error(error, path) from error
            for theirs in ranks.gather(written):
                sums.update(theirs)
            ranks.first(stack.close)  # marked and renamed
        if ranks.rank == 0:
            self._cleaning = self._cleaner.submit(prune, job.output_dir, job.keep)

    def _write_files(self, job: Job, steps: Iterable[_Step], folder: Path) -> Sums:
        """Write what is this rank's to write, down to the disk; returns the size and the checksum of each file."""
        writers: dict[str, FileWriter] = {}
        found: Sums = {}
        broken: OSError | ValueError | None = None
        torn = False
        try:
            for step in steps:
                file, pieces = self._exchange(step)
                torn = torn or pieces is None
                if broken is not None or torn or file is None:
                    continue  # the others may still need what this rank has
                try:
                    if file.path not in writers:
                        for writer in writers.values():
                            writer.finish()
                        writers[file.path] = FileWriter(file, folder)
                    writers[file.path].write(pieces)
                except (OSError, ValueError) as error:
                    broken = error.with_traceback(None)
            if broken is not None:
                raise broken
            if torn:
                return {}  # the rank where that happened says why
            if job.own is not None and not job.own.parts:
                writers[job.own.path] = FileWriter(job.own, folder)
            if self._ranks.rank == 0:
                job.small(folder)
            for writer in writers.values():
                writer.finish()
                found[writer.file.path] = writer.size, writer.crc
        finally:
            for writer in writers.values():
                writer.close()
            del broken
        return found

    def _exchange(self, step: _Step) -> tuple[TensorFile | None, list[Piece] | None]:
        """Give the other writers what this rank has of their parts; returns the part that is its own to write.

        The file is ``None`` if there is none; the part, if a rank could not make what it has of it.
        """
        rank, packets, mine, pieces = self._ranks.rank, {}, None, []
        whole = True
        for item in step:
            made = None if item.blocks is None else [item.file.piece(block) for block in item.blocks]
            if item.writer == rank:
                mine, pieces, whole = item.file, made or [], made is not None
            else:
                packets[item.writer] = _pack(made)
            item.blocks = None
        if self._ranks.size > 1 and step[0].shared:
            for packet in self._ranks.deliver(packets, expects=mine is not None):
                theirs = _unpack(packet)
                whole = whole and theirs is not None
                pieces += theirs or []
        return mine, pieces if whole else None


def _pack(pieces: list[Piece] | None) -> bytearray:
    """Pieces as bytes: length of the description, description, values. Nothing at all if they could not be made."""
    if pieces is None:
        return bytearray()
    described = [[piece.name, piece.start, piece.shape, len(piece.values)] for piece in pieces]
    head = json.dumps(described).encode()
    return bytearray(b"").join([len(head).to_bytes(8, "little"), head, *(piece.values for piece in pieces)])


def _unpack(packet: memoryview) -> list[Piece] | None:
    if not packet:
        return None
    at = 8 + int.from_bytes(packet[:8], "little")
    pieces = []
    for name, start, shape, size in json.loads(bytes(packet[8:at])):
        pieces.append(Piece(name, tuple(start), tuple(shape), packet[at : at + size]))
        at += size
    return pieces

"""Stream safetensors files to disk, one tensor at a time.

``safetensors.torch.save_file`` needs all tensors of a file in host memory. The format can be streamed: eight bytes
with the length of the header, the header (JSON: dtype, shape and offsets of every tensor), then the bytes of the
tensors in order of offset, without gaps. The header alone determines all offsets. One rank writes a file sequentially
and inserts the shards of other ranks in memory, because network file systems and object stores do not support
concurrent writes to one file.
"""

import json
import logging
import os
import time
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path

import torch
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from torchtune.checkpoints._directories import Sums, new_directory, prune
from torchtune.checkpoints._weight_files import CheckpointError
from torchtune.training.parallel import Ranks, spec_of
from torchtune.utils import Activity, FolderLock, UserError, explain_os_error, get_logger, watched_activity

# Names of dtypes in the header: https://github.com/huggingface/safetensors (README, "Format")
_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


@dataclass(frozen=True)
class TensorSlice:
    """A slice of a tensor to write.

    Attributes:
        name: name of the tensor.
        start: first index of the slice in each dimension.
        shape: shape of the slice.
        data: its values in order, or their bytes (uint8) if another rank sent them.
    """

    name: str
    start: tuple[int, ...]
    shape: tuple[int, ...]
    data: torch.Tensor

    @staticmethod
    def of(name: str, tensor: torch.Tensor, start: Sequence[int] | None = None) -> "TensorSlice":
        """Return a slice with the values ``tensor``; by default the full tensor."""
        return TensorSlice(name, tuple(start or (0,) * tensor.dim()), tuple(tensor.shape), tensor)

    def to_bytes(self) -> memoryview | bytes:
        """Return the values as bytes on the host."""
        data = self.data.detach().cpu().contiguous()
        if not data.numel():  # memoryview cannot cast an empty array
            return b""
        return memoryview(data.reshape(-1).view(torch.uint8).numpy())


@dataclass(frozen=True)
class Entry:
    """Tensors of a file that are computed and written together.

    Attributes:
        specs: full tensors on the meta device, by name.
        make: computes the slices that this rank writes.
        itemsize: bytes of an element.
    """

    specs: Mapping[str, torch.Tensor]
    make: Callable[[], Iterable[TensorSlice]]
    itemsize: int

    @staticmethod
    def of(name: str, tensor: torch.Tensor) -> "Entry":
        """Return the entry of an existing full tensor."""
        return Entry({name: spec_of(tensor)}, lambda: [TensorSlice.of(name, tensor)], tensor.itemsize)


def aligned(entries: Iterable[Entry]) -> list[Entry]:
    """Sort entries by decreasing size of their dtypes, so that all tensors of a file are aligned."""
    return sorted(entries, key=attrgetter("itemsize"), reverse=True)


class TensorFile:
    """A safetensors file to write.

    Args:
        path: relative to the checkpoint folder.
        entries: its tensors.
        metadata: text for the header, by name.

    Attributes:
        entries: the tensors, in file order.
        specs: full tensors on the meta device, by name.
        header: first bytes of the file.
        size: bytes of all tensors.

    Raises:
        ValueError: safetensors does not support a dtype.
    """

    def __init__(self, path: str, entries: Iterable[Entry], metadata: Mapping[str, str] | None = None) -> None:
        self.path, self.entries = path, aligned(entries)
        self.specs = {name: spec for entry in self.entries for name, spec in entry.specs.items()}
        header: dict[str, object] = {"__metadata__": {"format": "pt", **(metadata or {})}}
        self.size = 0
        for name, spec in self.specs.items():
            if spec.dtype not in _DTYPES:
                raise ValueError(f"{path}: the tensor '{name}' is {spec.dtype}, which safetensors cannot hold.")
            offsets = [self.size, self.size + spec.nbytes]
            header[name] = {"dtype": _DTYPES[spec.dtype], "shape": list(spec.shape), "data_offsets": offsets}
            self.size += spec.nbytes
        encoded = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        encoded += b" " * (-len(encoded) % 8)
        self.header = len(encoded).to_bytes(8, "little") + encoded


class FileWriter:
    """Writer of one file, sequential, with a checksum.

    Args:
        file: file to write.
        folder: folder of the checkpoint.

    Attributes:
        size: number of bytes written.
        crc: CRC-32 of the bytes written.

    Raises:
        OSError: the disk is full or not writable.
    """

    def __init__(self, file: TensorFile, folder: Path) -> None:
        self.file = file
        self.size = self.crc = self._next = 0
        path = folder / file.path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._stream = path.open("wb", buffering=0)
        try:
            self._append(file.header)
        except OSError:
            self.close()
            raise

    def _append(self, values: memoryview | bytes) -> None:
        values = memoryview(values)
        self.crc, self.size = zlib.crc32(values, self.crc), self.size + len(values)
        while values:  # a write may be partial
            values = values[self._stream.write(values) :]

    def write(self, parts: Sequence[TensorSlice]) -> None:
        """Write the next entry of the file.

        Args:
            parts: slices that cover the entry's tensors, in any order.

        Raises:
            OSError: the disk is full.
            ValueError: slices are missing.
        """
        entry, slices = self.file.entries[self._next], defaultdict(list)
        self._next += 1
        for part in sorted(parts, key=attrgetter("start")):
            slices[part.name].append(part)
        for name, spec in entry.specs.items():
            found = [part.to_bytes() for part in slices[name]]
            if (size := sum(map(len, found))) != spec.nbytes:
                raise ValueError(f"{self.file.path}: got {size:,} bytes of '{name}', expected {spec.nbytes:,}.")
            if any(part.shape[1:] != spec.shape[1:] for part in slices[name]):
                found = [_joined(spec, zip(slices[name], found, strict=True))]
            for values in found:
                self._append(values)

    def finish(self) -> None:
        """Flush the file to disk and close it. Raises ``ValueError`` if entries are missing."""
        if self._stream.closed:
            return
        if self._next != len(self.file.entries):
            raise ValueError(f"{self.file.path}: {self._next} of {len(self.file.entries)} entries were written.")
        os.fsync(self._stream)
        self._stream.close()

    def close(self) -> None:
        """Close the file."""
        self._stream.close()


def _joined(spec: torch.Tensor, slices: Iterable[tuple[TensorSlice, memoryview | bytes]]) -> memoryview:
    """Return the bytes of a full tensor from slices along other dimensions than the first."""
    whole = torch.empty(*spec.shape, spec.itemsize, dtype=torch.uint8)
    for part, values in slices:
        place = tuple(slice(start, start + size) for start, size in zip(part.start, part.shape, strict=True))
        if values:
            whole[place] = torch.frombuffer(values, dtype=torch.uint8).view(*part.shape, spec.itemsize)
    return memoryview(whole.view(-1).numpy())


def write_file(file: TensorFile, folder: Path) -> None:
    """Write a file on this rank alone; the caller makes it atomic."""
    writer = FileWriter(file, folder)
    try:
        for entry in file.entries:
            writer.write(entry.make())
        writer.finish()
    finally:
        writer.close()


def save_tensors(tensors: Mapping[str, torch.Tensor], path: Path) -> None:
    """Write existing tensors to a file."""
    write_file(TensorFile(path.name, [Entry.of(*item) for item in tensors.items()]), path.parent)


@dataclass(frozen=True)
class Job:
    """A checkpoint to write.

    Attributes:
        output_dir: folder of the checkpoints.
        name: name of this checkpoint.
        files: tensor files, equal on every rank. One rank writes a file; all ranks contribute their shards.
        own: file of this rank's state.
        agreed: bytes that must be equal on all ranks, besides the headers of the files.
        write_small_files: writes all other files into the folder, on rank 0.
        keep: number of checkpoints to keep; None for the default.
        optional: on failure, log a warning and continue.
    """

    output_dir: Path
    name: str
    files: list[TensorFile]
    own: TensorFile | None
    agreed: bytes
    write_small_files: Callable[[Path], None]
    keep: int | None
    optional: bool


@dataclass
class _Item:
    """An entry of a file, on this rank.

    Attributes:
        file: file of the entry.
        writer: rank that writes the file.
        slices: this rank's slices of the entry; None if computing them failed.
        shared: whether other ranks contribute slices.
    """

    file: TensorFile
    writer: int
    slices: list[TensorSlice] | None
    shared: bool = True


# One collective step: one entry from each of several files, which have different writers.
_Round = list[_Item]


class Saver:
    """Writer of checkpoints, one after another. All ranks call every method.

    Args:
        ranks: all ranks.
        lock: lock of the output folder; rank 0 holds it.
    """

    def __init__(self, ranks: Ranks, lock: FolderLock) -> None:
        self._ranks, self._lock = ranks, lock
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: Future[None] | None = None
        # The copy in progress, the name of its checkpoint, and the seconds by which it has delayed training.
        self._copying: tuple[Future[list[_Round]], str, float] | None = None
        self._hooks: list[RemovableHandle] = []

    def wait(self) -> None:
        """Wait until the pending checkpoint is written.

        Raises:
            UserError: writing failed.
        """
        self._hold()
        while self._hooks:
            self._hooks.pop().remove()
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def save(self, job: Job, *, in_background: bool, optimizers: Sequence[Optimizer] = ()) -> None:
        """Write a checkpoint after the previous one is written.

        Args:
            job: the checkpoint.
            in_background: copy the tensors to host memory and write them in the background; the next call raises any
                error.
            optimizers: if not empty, the copy may last until the next step of any of them; the tensors must not change
                before then.

        Raises:
            UserError: the disk is full or not writable; earlier checkpoints are unchanged.
        """
        self.wait()
        start = time.monotonic()
        agreed = zlib.crc32(b"".join([*(file.header for file in job.files), job.agreed]))
        if len(set(self._ranks.gather(agreed))) > 1:
            raise CheckpointError(
                f"{job.name}: the tensors differ between ranks in name, shape or dtype: build the same model on all."
            )
        failure: list[Exception] = []
        rounds = self._rounds(job, failure)
        if not in_background:
            self._write(job, lambda: rounds, failure)
            self._log(f"{job.name} was saved in {time.monotonic() - start:.1f} s.")
            return
        copied: Future[list[_Round]] = Future()
        stream = None
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
            stream = torch.cuda.Stream()  # the copy does not wait for training kernels
        if optimizers:
            copied = self._thread.submit(_copy, rounds, stream)
        else:
            copied.set_result(_copy(rounds, stream))
        self._pending = self._thread.submit(self._write, job, copied.result, failure)
        self._copying = copied, job.name, time.monotonic() - start
        # Hooks are removed later: the optimizer iterates over them when it calls them.
        self._hooks = [optimizer.register_step_pre_hook(self._hold) for optimizer in optimizers]
        if not optimizers:
            self._hold()

    def _hold(self, *_: object) -> None:
        """Block the step of an optimizer until the tensors are copied."""
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

    def _rounds(self, job: Job, failure: list[Exception]) -> Iterator[_Round]:
        """Yield the rounds that write the checkpoint, lazily and in the same order on all ranks.

        The ranks write as many files at a time as there are ranks. After an exception, which is stored in ``failure``,
        the rounds continue, because the other ranks wait for this one.
        """

        def make(entry: Entry) -> list[TensorSlice] | None:
            if failure:
                return None
            try:
                return list(entry.make())
            except Exception as error:  # noqa: BLE001 - raised when no rank waits for this one any more
                failure.append(error)
                return None

        for first in range(0, len(job.files), self._ranks.size):
            files = job.files[first : first + self._ranks.size]
            for number in range(max(len(file.entries) for file in files)):
                yield [
                    _Item(file, writer, make(file.entries[number]))
                    for writer, file in enumerate(files)
                    if number < len(file.entries)
                ]
        for entry in job.own.entries if job.own is not None else ():
            yield [_Item(job.own, self._ranks.rank, make(entry), shared=False)]

    def _write(self, job: Job, rounds: Callable[[], Iterable[_Round]], failure: list[Exception]) -> None:
        try:
            self._write_or_fail(job, rounds, failure)
        except (UserError, OSError) as error:
            if not job.optional:
                raise
            self._log(f"{job.name} was not saved, training goes on: {error}", logging.WARNING)

    def _write_or_fail(self, job: Job, rounds: Callable[[], Iterable[_Round]], failure: list[Exception]) -> None:
        ranks, path = self._ranks, job.output_dir / job.name
        sums: Sums = {}
        with ExitStack() as stack:

            def begin() -> Path:
                stack.enter_context(self._lock.held())
                return stack.enter_context(new_directory(job.output_dir, job.name, sums))

            folder = ranks.run_on_rank_0(begin)
            with ranks.raise_on_all():
                if not folder.is_dir():
                    raise CheckpointError(
                        f"output_dir: {job.output_dir} is not the same folder on all machines: choose one that is."
                    )
            written: Sums = {}
            with ranks.raise_on_all():
                try:
                    written = self._write_files(job, rounds(), folder)
                    if failure:
                        raise failure[0]
                except OSError as error:
                    raise explain_os_error(error, path) from error
            for theirs in ranks.gather(written):
                sums.update(theirs)
            ranks.run_on_rank_0(stack.close)  # writes the marker and renames the folder
        if ranks.rank == 0:
            prune(job.output_dir, job.keep)

    def _write_files(self, job: Job, rounds: Iterable[_Round], folder: Path) -> Sums:
        """Write and flush the files of this rank; return size and checksum of each."""
        writers: dict[str, FileWriter] = {}
        activity = watched_activity() or Activity()
        found: Sums = {}
        write_error: OSError | ValueError | None = None
        is_incomplete = False
        try:
            for items in rounds:
                file, slices = self._exchange(items)
                is_incomplete = is_incomplete or slices is None
                if write_error is not None or is_incomplete or file is None:
                    continue  # other ranks may still need this rank's slices
                try:
                    if file.path not in writers:
                        for writer in writers.values():
                            writer.finish()
                        writers[file.path] = FileWriter(file, folder)
                    writers[file.path].write(slices)
                    activity.written += 1
                except (OSError, ValueError) as error:
                    write_error = error.with_traceback(None)
            if write_error is not None:
                raise write_error
            if is_incomplete:
                return {}  # the rank that failed raises
            if job.own is not None and not job.own.entries:
                writers[job.own.path] = FileWriter(job.own, folder)
            if self._ranks.rank == 0:
                job.write_small_files(folder)
            for writer in writers.values():
                writer.finish()
                found[writer.file.path] = writer.size, writer.crc
        finally:
            for writer in writers.values():
                writer.close()
            del write_error
        return found

    def _exchange(self, items: _Round) -> tuple[TensorFile | None, list[TensorSlice] | None]:
        """Send this rank's slices to the writers; return the file that this rank writes and all slices of its entry.

        The file is None if this rank writes none; the slices are None if a rank failed to compute them.
        """
        rank, packets, mine, slices = self._ranks.rank, {}, None, []
        is_complete = True
        for item in items:
            if item.writer == rank:
                mine, slices, is_complete = item.file, item.slices or [], item.slices is not None
            else:
                packets[item.writer] = _pack(item.slices)
            item.slices = None
        if self._ranks.size > 1 and items[0].shared:
            for packet in self._ranks.exchange_packets(packets, receives=mine is not None):
                received = _unpack(packet)
                is_complete = is_complete and received is not None
                slices += received or []
        return mine, slices if is_complete else None


def _copy(rounds: Iterable[_Round], stream: torch.cuda.Stream | None) -> list[_Round]:
    """Copy the slices to host memory, from CUDA on a stream of its own."""
    if stream is None:  # CUDA is not asked for anything: it may not have been used, or not be usable in a fork
        return [[replace(item, slices=_on_host(item.slices)) for item in items] for items in rounds]
    with torch.cuda.stream(stream):
        copied = [[replace(item, slices=_on_host(item.slices)) for item in items] for items in rounds]
    stream.synchronize()
    return copied


def _on_host(slices: list[TensorSlice] | None) -> list[TensorSlice] | None:
    if slices is None:
        return None
    copied = []
    for part in slices:
        is_cuda = part.data.is_cuda
        buffer = torch.empty(part.data.shape, dtype=part.data.dtype, pin_memory=is_cuda)
        copied.append(replace(part, data=buffer.copy_(part.data, non_blocking=is_cuda)))
    return copied


def _pack(slices: list[TensorSlice] | None) -> bytearray:
    """Serialize slices: length of the header, header (JSON), values. Empty if computing them failed."""
    if slices is None:
        return bytearray()
    values = [part.to_bytes() for part in slices]
    described = [[p.name, p.start, p.shape, len(v)] for p, v in zip(slices, values, strict=True)]
    header = json.dumps(described).encode()
    return bytearray(b"").join([len(header).to_bytes(8, "little"), header, *values])


def _unpack(packet: memoryview) -> list[TensorSlice] | None:
    if not packet:
        return None
    at = 8 + int.from_bytes(packet[:8], "little")
    slices = []
    for name, start, shape, size in json.loads(bytes(packet[8:at])):
        values = torch.frombuffer(packet, dtype=torch.uint8, count=size, offset=at) if size else torch.empty(0)
        slices.append(TensorSlice(name, tuple(start), tuple(shape), values))
        at += size
    return slices

"""Write checkpoints on all ranks: safetensors files, one group of tensors at a time, and the steps of a save.

``safetensors.torch.save_file`` needs all tensors of a file in host memory. The format can be streamed: eight bytes
with the length of the header, the header (JSON: dtype, shape and offsets of every tensor), then the bytes of the
tensors in order of offset, without gaps. The header alone determines all offsets. One rank writes a file sequentially
and inserts the slices of other ranks in memory, because network file systems and object stores do not support
concurrent writes to one file.
"""

import itertools
import json
import logging
import os
import time
import zlib
from abc import ABC, abstractmethod
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

from torchtune.checkpoints._directories import Checksums, new_directory
from torchtune.checkpoints._weight_files import CheckpointError
from torchtune.training.parallel import Ranks
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
# Dtypes of weights that an optimizer may make NaN or infinite.
_CHECKED_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def spec_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor on the meta device with the shape and dtype of a full tensor."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


@dataclass(frozen=True)
class TensorSlice:
    """A slice of a tensor to write, with its values.

    Attributes:
        name: name of the tensor in the file.
        start: first index of the slice in each dimension.
        shape: shape of the slice.
        data: its values in order, or their bytes (uint8) if another rank sent them.
    """

    name: str
    start: tuple[int, ...]
    shape: tuple[int, ...]
    data: torch.Tensor

    @staticmethod
    def of(name: str, tensor: torch.Tensor) -> "TensorSlice":
        """Return the slice that is a full tensor."""
        return TensorSlice(name, (0,) * tensor.dim(), tuple(tensor.shape), tensor)

    def to_bytes(self) -> memoryview | bytes:
        """Return the values as bytes on the host."""
        data = self.data.detach().cpu().contiguous()
        if not data.numel():  # memoryview cannot cast an empty array
            return b""
        return memoryview(data.reshape(-1).view(torch.uint8).numpy())


class TensorGroup(ABC):
    """Tensors of a file that are computed and written together, when the file is written.

    Attributes:
        specs: full tensors on the meta device, by name in the file.
        itemsize: bytes of an element.
    """

    specs: Mapping[str, torch.Tensor]
    itemsize: int

    @abstractmethod
    def compute_slices(self) -> list[TensorSlice]:
        """Compute the slices that this rank contributes."""


class ExistingTensor(TensorGroup):
    """An existing full tensor to write.

    Args:
        name: name of the tensor in the file.
        tensor: the tensor.
    """

    def __init__(self, name: str, tensor: torch.Tensor) -> None:
        self.specs = {name: spec_of(tensor)}
        self.itemsize = tensor.itemsize
        self.name = name
        self.tensor = tensor

    def compute_slices(self) -> list[TensorSlice]:
        """Return the slice that is the full tensor."""
        return [TensorSlice.of(self.name, self.tensor)]


def aligned(groups: Iterable[TensorGroup]) -> list[TensorGroup]:
    """Sort groups by decreasing size of their dtypes, so that all tensors of a file are aligned."""
    return sorted(groups, key=attrgetter("itemsize"), reverse=True)


class TensorFile:
    """A safetensors file to write.

    Args:
        path: relative to the checkpoint folder.
        groups: its tensors.
        metadata: text for the header, by name.

    Attributes:
        groups: the tensors, in file order.
        specs: full tensors on the meta device, by name.
        header: first bytes of the file.
        size: bytes of all tensors.

    Raises:
        ValueError: safetensors does not support a dtype.
    """

    def __init__(self, path: str, groups: Iterable[TensorGroup], metadata: Mapping[str, str] | None = None) -> None:
        self.path = path
        self.groups = aligned(groups)
        self.specs: dict[str, torch.Tensor] = {}
        for group in self.groups:
            self.specs.update(group.specs)
        # transformers refuses a file without the format.
        header: dict[str, object] = {"__metadata__": {"format": "pt", **(metadata or {})}}
        self.size = 0
        for name, spec in self.specs.items():
            if spec.dtype not in _DTYPES:
                raise ValueError(f"{path}: the tensor '{name}' is {spec.dtype}, which safetensors cannot hold.")
            offsets = [self.size, self.size + spec.nbytes]
            header[name] = {"dtype": _DTYPES[spec.dtype], "shape": list(spec.shape), "data_offsets": offsets}
            self.size += spec.nbytes
        encoded = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        encoded += b" " * (-len(encoded) % 8)  # the tensors after it are aligned to 8 bytes
        self.header = len(encoded).to_bytes(8, "little") + encoded  # safetensors: length, JSON, values


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
        self.size = 0
        self.crc = 0
        self._groups_written = 0
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
        self.crc = zlib.crc32(values, self.crc)
        self.size += len(values)
        while values:  # a write may be partial
            written = self._stream.write(values)
            values = values[written:]

    def write(self, slices: Sequence[TensorSlice]) -> None:
        """Write the next group of the file.

        Args:
            slices: slices that cover the group's tensors, in any order.

        Raises:
            OSError: the disk is full.
            ValueError: slices are missing.
        """
        group = self.file.groups[self._groups_written]
        self._groups_written += 1
        slices_of: dict[str, list[TensorSlice]] = defaultdict(list)
        for tensor_slice in sorted(slices, key=attrgetter("start")):
            slices_of[tensor_slice.name].append(tensor_slice)
        for name, spec in group.specs.items():
            values = [tensor_slice.to_bytes() for tensor_slice in slices_of[name]]
            size = sum(len(slice_values) for slice_values in values)
            if size != spec.nbytes:
                raise ValueError(f"{self.file.path}: got {size:,} bytes of '{name}', expected {spec.nbytes:,}.")
            # Slices of complete rows follow each other in the file; others are interleaved.
            if any(tensor_slice.shape[1:] != spec.shape[1:] for tensor_slice in slices_of[name]):
                values = [_assemble(spec, slices_of[name], values)]
            for slice_values in values:
                self._append(slice_values)

    def finish(self) -> None:
        """Flush the file to disk and close it. Raises ``ValueError`` if groups are missing."""
        if self._stream.closed:
            return
        if self._groups_written != len(self.file.groups):
            raise ValueError(
                f"{self.file.path}: {self._groups_written} of {len(self.file.groups)} groups of tensors were written."
            )
        os.fsync(self._stream)
        self._stream.close()

    def close(self) -> None:
        """Close the file."""
        self._stream.close()


def _assemble(spec: torch.Tensor, slices: Sequence[TensorSlice], values: Sequence[memoryview | bytes]) -> memoryview:
    """Return the bytes of a full tensor from slices along other dimensions than the first."""
    full = torch.empty(*spec.shape, spec.itemsize, dtype=torch.uint8)  # the last dimension: bytes of an element
    for tensor_slice, data in zip(slices, values, strict=True):
        if not data:
            continue
        dims = zip(tensor_slice.start, tensor_slice.shape, strict=True)
        index = tuple(slice(start, start + size) for start, size in dims)
        full[index] = torch.frombuffer(data, dtype=torch.uint8).view(*tensor_slice.shape, spec.itemsize)
    return memoryview(full.view(-1).numpy())


def write_file(file: TensorFile, folder: Path) -> None:
    """Write a file on this rank alone; the caller makes it atomic."""
    writer = FileWriter(file, folder)
    try:
        for group in file.groups:
            writer.write(group.compute_slices())
        writer.finish()
    finally:
        writer.close()


def save_tensors(tensors: Mapping[str, torch.Tensor], path: Path) -> None:
    """Write existing tensors to a file."""
    groups = [ExistingTensor(name, tensor) for name, tensor in tensors.items()]
    write_file(TensorFile(path.name, groups), path.parent)


def check_trained_finite(name: str, parameters: Mapping[str, torch.Tensor], ranks: Ranks) -> None:
    """Check before a save that no trained weight is NaN or infinite. A collective.

    Steps with such a loss or gradient are skipped, but an optimizer may compute such weights from finite gradients, for
    example with a learning rate of 1e30, and the loss of infinite weights may be finite.

    Args:
        name: name of the checkpoint.
        parameters: the trained parameters, by name.
        ranks: all ranks.

    Raises:
        CheckpointError: on all ranks, if a weight of any of them is not finite.
    """
    checked_names = []
    are_finite = []  # a bool on the device each
    for parameter_name, parameter in parameters.items():
        values = parameter.detach()
        if hasattr(values, "device_mesh"):
            values = values.to_local()  # each rank checks its shard
        is_plain = type(values) is torch.Tensor  # other classes of tensors may lack the operation
        is_unread = values.is_meta  # in its file until it is written, as nothing has trained it
        if is_plain and not is_unread and values.dtype in _CHECKED_DTYPES and values.numel():
            # The extremes need no memory, unlike a mask of all values. Both are NaN if any value is.
            extremes = torch.stack(torch.aminmax(values))
            checked_names.append(parameter_name)
            are_finite.append(torch.isfinite(extremes).all())
    broken = []
    if are_finite:
        # All at once, so that the host waits for the device once. Parts of a model may be on several devices.
        flags = torch.stack([is_finite.to(are_finite[0].device) for is_finite in are_finite]).tolist()
        broken = [checked_name for checked_name, is_finite in zip(checked_names, flags, strict=True) if not is_finite]
    broken_on_any = sorted(set(itertools.chain.from_iterable(ranks.gather(broken))))
    if broken_on_any:
        raise CheckpointError(
            f"{name}: {len(broken_on_any)} of {len(parameters)} trained parameters have values that are NaN or "
            f"infinite, such as '{broken_on_any[0]}', so that nothing is saved: go on from an earlier checkpoint, or "
            "start anew, with a lower learning rate."
        )


@dataclass(frozen=True)
class Job:
    """A checkpoint to write.

    Attributes:
        output_dir: folder of the checkpoints.
        name: name of this checkpoint.
        files: tensor files, equal on every rank. One rank writes a file; all ranks contribute their slices.
        state_file: file of this rank's training state; None without training state.
        state_signature: bytes that must be equal on all ranks, besides the headers of the files.
        write_small_files: writes all other files into the folder, on rank 0.
        last_save: number of the last save of the run that is known from elsewhere, such as a bucket.
        finish: called with the complete folder on rank 0; removes old checkpoints, and begins an upload.
        optional: on failure, log a warning and continue.
    """

    output_dir: Path
    name: str
    files: list[TensorFile]
    state_file: TensorFile | None
    state_signature: bytes
    write_small_files: Callable[[Path], None]
    last_save: int
    finish: Callable[[Path], None]
    optional: bool


@dataclass
class _GroupSlices:
    """This rank's slices of one group of a file, on their way to the rank that writes the file.

    Attributes:
        file: file of the group.
        writer: rank that writes the file.
        slices: this rank's slices of the group; None if computing them failed.
        is_shared: whether other ranks contribute slices.
    """

    file: TensorFile
    writer: int
    slices: list[TensorSlice] | None
    is_shared: bool = True


# One collective step: one group from each of several files, which have different writers.
_Round = list[_GroupSlices]


class Saver:
    """Writer of checkpoints, one after another. All ranks call every method.

    Args:
        ranks: all ranks.
        lock: lock of the output folder; rank 0 holds it.
    """

    def __init__(self, ranks: Ranks, lock: FolderLock) -> None:
        self._ranks = ranks
        self._lock = lock
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
        self._wait_for_copy()
        while self._hooks:
            self._hooks.pop().remove()
        pending = self._pending
        self._pending = None
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
            CheckpointError: the ranks would write different tensors.
            UserError: the disk is full or not writable; earlier checkpoints are unchanged.
        """
        self.wait()
        start = time.monotonic()
        # The headers determine the rounds and the bytes of every slice: with others, ranks would wait forever.
        headers = [file.header for file in job.files]
        signature = zlib.crc32(b"".join([*headers, job.state_signature]))
        if len(set(self._ranks.gather(signature))) > 1:
            raise CheckpointError(
                f"{job.name}: the tensors differ between ranks in name, shape or dtype: build the same model on all."
            )
        # The first error of computing this rank's slices, if there is one. It is raised after the last round: the other
        # ranks wait for this one in every round.
        failure: list[Exception] = []
        rounds = self._rounds(job, failure)
        if not in_background:
            is_saved = self._write(job, rounds, failure)
            if is_saved:  # an optional checkpoint may be missing, after a warning
                self._log(f"{job.name} was saved in {time.monotonic() - start:.1f} s.")
            return
        stream = None
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()  # the other stream then sees the values of this step
            stream = torch.cuda.Stream()  # the copy does not wait for training kernels
        copied: Future[list[_Round]]
        if optimizers:
            copied = self._thread.submit(_copy, rounds, stream)
        else:
            copied = Future()
            copied.set_result(_copy(rounds, stream))
        # The thread takes one task at a time: writing begins after the copy.
        self._pending = self._thread.submit(self._write, job, _copied_rounds(copied), failure)
        self._copying = copied, job.name, time.monotonic() - start
        # Hooks are removed later: the optimizer iterates over them when it calls them.
        self._hooks = [optimizer.register_step_pre_hook(self._wait_for_copy) for optimizer in optimizers]
        if not optimizers:  # the copy is complete: this logs how long it took
            self._wait_for_copy()

    def _wait_for_copy(self, *_: object) -> None:
        """Wait until the tensors are copied; a hook that blocks the step of an optimizer."""
        if self._copying is None:
            return
        copied, name, seconds = self._copying
        self._copying = None
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
        # File i of a batch is written by rank i: in each round, every rank receives one group. No variable here has its
        # slices, so that _exchange can free them while this generator is suspended.
        for first in range(0, len(job.files), self._ranks.size):
            files = job.files[first : first + self._ranks.size]
            num_rounds = max(len(file.groups) for file in files)
            for number in range(num_rounds):
                groups = []
                for writer, file in enumerate(files):
                    if number < len(file.groups):  # files have different numbers of groups
                        groups.append(_GroupSlices(file, writer, _compute_slices(file.groups[number], failure)))
                yield groups
        if job.state_file is not None:
            for group in job.state_file.groups:
                yield [_GroupSlices(job.state_file, self._ranks.rank, _compute_slices(group, failure), is_shared=False)]

    def _write(self, job: Job, rounds: Iterable[_Round], failure: list[Exception]) -> bool:
        """Write a checkpoint, and return whether it was saved; only one that the run needs raises an error."""
        try:
            self._write_or_raise(job, rounds, failure)
            return True
        except (UserError, OSError) as error:
            if not job.optional:
                raise
            self._log(f"{job.name} was not saved, training goes on: {error}", logging.WARNING)
            return False

    def _write_or_raise(self, job: Job, rounds: Iterable[_Round], failure: list[Exception]) -> None:
        """Write a checkpoint; an error of any rank is raised on all, and leaves no folder."""
        ranks = self._ranks
        path = job.output_dir / job.name
        checksums: Checksums = {}
        with ExitStack() as stack:
            # Rank 0 alone enters the contexts, so that the stack of any other rank is empty.
            def begin() -> Path:
                stack.enter_context(self._lock.held())
                directory = new_directory(job.output_dir, job.name, checksums, last_save=job.last_save)
                return stack.enter_context(directory)

            folder = ranks.run_on_rank_0(begin)
            with ranks.raise_on_all():
                if not folder.is_dir():
                    raise CheckpointError(
                        f"output_dir: {job.output_dir} is not the same folder on all machines: choose one that is."
                    )
            written: Checksums = {}
            with ranks.raise_on_all():
                try:
                    written = self._write_files(job, rounds, folder)
                    if failure:
                        raise failure[0]
                except OSError as error:
                    raise explain_os_error(error, path) from error
            for written_by_rank in ranks.gather(written):
                checksums.update(written_by_rank)  # new_directory reads this dict when the stack closes
            ranks.run_on_rank_0(stack.close)  # writes the marker and renames the folder
        if ranks.rank == 0:
            job.finish(path)

    def _write_files(self, job: Job, rounds: Iterable[_Round], folder: Path) -> Checksums:
        """Write and flush the files of this rank; return size and checksum of each."""
        writers: dict[str, FileWriter] = {}
        activity = watched_activity() or Activity()  # a new one, which nothing reads, without a watchdog
        checksums: Checksums = {}
        write_error: OSError | ValueError | None = None
        is_incomplete = False
        try:
            for groups in rounds:
                file, slices = self._exchange(groups)
                is_incomplete = is_incomplete or slices is None
                if write_error is not None or is_incomplete or file is None:
                    continue  # other ranks may still need this rank's slices
                try:
                    if file.path not in writers:
                        # A rank writes its files one after another: the previous one is complete.
                        for writer in writers.values():
                            writer.finish()
                        writers[file.path] = FileWriter(file, folder)
                    writers[file.path].write(slices)
                    activity.written += 1
                except (OSError, ValueError) as error:
                    write_error = error.with_traceback(None)  # its frames would keep the slices in memory
            if write_error is not None:
                raise write_error
            if is_incomplete:
                return {}  # the rank that failed raises
            if job.state_file is not None and not job.state_file.groups:  # no round creates it
                writers[job.state_file.path] = FileWriter(job.state_file, folder)
            if self._ranks.rank == 0:
                job.write_small_files(folder)
            for writer in writers.values():
                writer.finish()
                checksums[writer.file.path] = writer.size, writer.crc
        finally:
            for writer in writers.values():
                writer.close()
            del write_error  # an error refers to this frame, and the frame to the error: both would outlive the call
        return checksums

    def _exchange(self, groups: _Round) -> tuple[TensorFile | None, list[TensorSlice] | None]:
        """Send this rank's slices to the writers; return the file that this rank writes and all slices of its group.

        The file is None if this rank writes none; the slices are None if a rank failed to compute them.
        """
        packets: dict[int, bytearray] = {}
        file: TensorFile | None = None
        slices: list[TensorSlice] = []
        is_complete = True
        for group in groups:
            if group.writer == self._ranks.rank:
                file = group.file
                slices = group.slices or []
                is_complete = group.slices is not None
            else:
                packets[group.writer] = _pack(group.slices)
            group.slices = None  # frees them before the packets of other ranks arrive
        # Every rank writes its state file alone. A round has groups of shared files only, or of that file.
        if self._ranks.size > 1 and groups[0].is_shared:
            for packet in self._ranks.exchange_packets(packets, receives=file is not None):
                received = _unpack(packet)
                if received is None:
                    is_complete = False
                else:
                    slices += received
        if not is_complete:
            return file, None
        return file, slices


def _compute_slices(group: TensorGroup, failure: list[Exception]) -> list[TensorSlice] | None:
    """Compute this rank's slices of a group; after an error, which is appended to ``failure``, return None."""
    if failure:
        return None
    try:
        return group.compute_slices()
    except Exception as error:  # noqa: BLE001 - raised when no rank waits for this one any more
        failure.append(error)
        return None


def _copied_rounds(copied: Future[list[_Round]]) -> Iterator[_Round]:
    """Yield the rounds of a finished copy; an error of the copy is raised while files are written, on all ranks."""
    yield from copied.result()


def _copy(rounds: Iterable[_Round], stream: torch.cuda.Stream | None) -> list[_Round]:
    """Copy the slices to host memory, from CUDA on a stream of its own."""
    if stream is None:  # CUDA is not asked for anything: it may not have been used, or not be usable in a fork
        return [_copy_round(groups) for groups in rounds]
    with torch.cuda.stream(stream):
        copied = [_copy_round(groups) for groups in rounds]
    stream.synchronize()
    return copied


def _copy_round(groups: _Round) -> _Round:
    """Copy the slices of a round to host memory, into pinned memory from CUDA, so that the host need not wait."""
    copied_groups = []
    for group in groups:
        copied_slices = None  # of a group that could not be computed
        if group.slices is not None:
            copied_slices = []
            for tensor_slice in group.slices:
                data = tensor_slice.data
                buffer = torch.empty(data.shape, dtype=data.dtype, pin_memory=data.is_cuda)
                buffer.copy_(data, non_blocking=data.is_cuda)
                copied_slices.append(replace(tensor_slice, data=buffer))
        copied_groups.append(replace(group, slices=copied_slices))
    return copied_groups


def _pack(slices: list[TensorSlice] | None) -> bytearray:
    """Serialize slices: length of the header, header (JSON), values. Empty if computing them failed."""
    if slices is None:
        return bytearray()
    values = []
    descriptions = []
    for tensor_slice in slices:
        data = tensor_slice.to_bytes()
        values.append(data)
        descriptions.append([tensor_slice.name, tensor_slice.start, tensor_slice.shape, len(data)])
    header = json.dumps(descriptions).encode()
    return bytearray(b"").join([len(header).to_bytes(8, "little"), header, *values])


def _unpack(packet: memoryview) -> list[TensorSlice] | None:
    """Deserialize the slices of :func:`_pack`; their values share the packet's memory."""
    if not packet:
        return None
    offset = 8 + int.from_bytes(packet[:8], "little")
    slices = []
    for name, start, shape, size in json.loads(bytes(packet[8:offset])):
        if size:
            data = torch.frombuffer(packet, dtype=torch.uint8, count=size, offset=offset)
        else:
            data = torch.empty(0)  # frombuffer refuses a count of 0
        slices.append(TensorSlice(name, tuple(start), tuple(shape), data))
        offset += size
    return slices

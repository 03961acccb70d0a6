"""Writing safetensors files as a stream, one tensor at a time.

``safetensors.torch.save_file`` needs every tensor of a file in host memory. The format can be streamed: eight bytes
with the length of the header, the header (JSON: dtype, shape and offsets of every tensor), then the bytes of the
tensors in the order of their offsets, without gaps. The header alone determines all offsets. One rank writes a file
from start to end, and places the shards of other ranks in memory: network file systems and object stores do not
guarantee anything about two processes that write to one file.
"""

import json
import os
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import torch

from torchtune.training.parallel._shards import spec_of

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


def num_bytes(tensor: torch.Tensor) -> int:
    """Bytes of the elements of a tensor; it may lie on the meta device."""
    return tensor.numel() * tensor.element_size()


@dataclass(frozen=True)
class TensorSlice:
    """A slice of a tensor, to be written.

    Attributes:
        name: of the tensor.
        start: first index of the slice in each dimension.
        shape: of the slice.
        data: its values in order; their bytes (uint8) if another rank has sent them.
    """

    name: str
    start: tuple[int, ...]
    shape: tuple[int, ...]
    data: torch.Tensor

    @staticmethod
    def of(name: str, tensor: torch.Tensor, start: Sequence[int] | None = None) -> "TensorSlice":
        """A slice with the values ``tensor``; by default it is the full tensor."""
        return TensorSlice(name, tuple(start or (0,) * tensor.dim()), tuple(tensor.shape), tensor)

    def to_bytes(self) -> memoryview | bytes:
        """The values as bytes on the host."""
        data = self.data.detach().cpu().contiguous()
        if not data.numel():  # memoryview cannot cast an empty array
            return b""
        return memoryview(data.reshape(-1).view(torch.uint8).numpy())


@dataclass(frozen=True)
class Entry:
    """Tensors of a file that are made and written together.

    Attributes:
        specs: full tensors on the meta device, by name.
        make: makes the slices of them that this rank writes.
    """

    specs: Mapping[str, torch.Tensor]
    make: Callable[[], Iterable[TensorSlice]]

    @staticmethod
    def of(name: str, tensor: torch.Tensor) -> "Entry":
        """A full tensor that exists already."""
        return Entry({name: spec_of(tensor)}, lambda: [TensorSlice.of(name, tensor)])

    @property
    def element_size(self) -> int:
        """Bytes of an element, the largest of all tensors."""
        return max(spec.element_size() for spec in self.specs.values())


class TensorFile:
    """A safetensors file to be written.

    Args:
        path: relative to the checkpoint folder.
        entries: its tensors. Those with larger dtypes should come first, so that all are aligned.
        metadata: text for the header, by name.

    Attributes:
        header: its first bytes.
        size: bytes of all tensors.
        ranges: start and end of each entry, counted from the end of the header.

    Raises:
        ValueError: safetensors has no such dtype.
    """

    def __init__(self, path: str, entries: Iterable[Entry], metadata: Mapping[str, str] | None = None) -> None:
        self.path, self.entries = path, list(entries)
        self.specs = {name: spec for entry in self.entries for name, spec in entry.specs.items()}
        header: dict[str, object] = {"__metadata__": {"format": "pt", **(metadata or {})}}
        self._starts: dict[str, int] = {}
        self.size = 0
        self.ranges: list[tuple[int, int]] = []
        for entry in self.entries:
            first = self.size
            for name, spec in entry.specs.items():
                if spec.dtype not in _DTYPES:
                    raise ValueError(f"{path}: the tensor '{name}' is {spec.dtype}, which safetensors cannot hold.")
                self._starts[name], end = self.size, self.size + num_bytes(spec)
                offsets = [self.size, end]
                header[name] = {"dtype": _DTYPES[spec.dtype], "shape": list(spec.shape), "data_offsets": offsets}
                self.size = end
            self.ranges.append((first, self.size))
        encoded = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        encoded += b" " * (-len(encoded) % 8)
        self.header = len(encoded).to_bytes(8, "little") + encoded

    def check(self, part: TensorSlice) -> TensorSlice:
        """Return a slice. Raises ``ValueError`` if dtype or shape do not fit the tensor."""
        spec = self.specs[part.name]
        fits = all(a + n <= size for a, n, size in zip(part.start, part.shape, spec.shape, strict=True))
        if part.data.dtype != spec.dtype or not fits:
            got = f"{part.data.dtype} {list(part.shape)}"
            raise ValueError(f"{self.path}: got {got} at {part.start} of '{part.name}'.")
        return part

    def runs(self, part: TensorSlice) -> list[tuple[int, memoryview | bytes]]:
        """The contiguous bytes of a slice, each with its offset, counted from the end of the header."""
        spec, shape, values = self.specs[part.name], part.shape, part.to_bytes()
        # Dimensions from `last` on are contiguous in the file; those before are iterated over.
        last = len(shape)
        while last > 0 and shape[last - 1] == spec.shape[last - 1]:
            last -= 1
        last = max(last - 1, 0)
        ranges = [range(a, a + n) for a, n in zip(part.start[:last], shape[:last], strict=True)]
        step = len(values) // max(torch.Size(shape[:last]).numel(), 1)
        found = []
        for number, index in enumerate(product(*ranges)):
            place = sum(i * stride for i, stride in zip((*index, *part.start[last:]), spec.stride(), strict=True))
            at = self._starts[part.name] + place * spec.element_size()
            found.append((at, values[number * step : (number + 1) * step]))
        return found


class FileWriter:
    """Writes a file from start to end and computes its checksum.

    Args:
        file: the file.
        folder: of the checkpoint.

    Attributes:
        size: bytes written.
        crc: their CRC-32.

    Raises:
        OSError: the disk is full or not writable.
    """

    def __init__(self, file: TensorFile, folder: Path) -> None:
        self.file = file
        self.size = self.crc = self._next = 0
        path = folder / file.path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        try:
            self._append(file.header)
        except OSError:
            self.close()
            raise

    def _append(self, values: memoryview | bytes | bytearray) -> None:
        values = memoryview(values)
        self.crc, self.size = zlib.crc32(values, self.crc), self.size + len(values)
        while values:  # the system may take less at a time
            values = values[os.write(self._descriptor, values) :]

    def write(self, parts: Sequence[TensorSlice]) -> None:
        """Write the next entry of the file.

        Args:
            parts: slices that cover its tensors, in any order.

        Raises:
            OSError: the disk is full.
            ValueError: slices are missing.
        """
        start, end = self.file.ranges[self._next]
        self._next += 1
        runs = [run for part in parts for run in self.file.runs(part)]
        found = sum(len(values) for _, values in runs)
        if found != end - start:
            raise ValueError(f"{self.file.path}: got {found:,} bytes of tensors, expected {end - start:,}.")
        if len(runs) == len(parts):
            for _, values in sorted(runs, key=lambda run: run[0]):
                self._append(values)
            return
        buffer = memoryview(bytearray(end - start))
        for at, values in runs:
            buffer[at - start : at - start + len(values)] = values
        self._append(buffer)

    def finish(self) -> None:
        """Flush the file to disk; further calls do nothing. Raises ``ValueError`` if entries are missing."""
        if self._descriptor < 0:
            return
        if self._next != len(self.file.entries):
            raise ValueError(f"{self.file.path}: {self._next} of {len(self.file.entries)} entries were written.")
        os.fsync(self._descriptor)
        self.close()

    def close(self) -> None:
        """Close the file."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1


def tensor_file(path: str, entries: Iterable[Entry], metadata: Mapping[str, str] | None = None) -> TensorFile:
    """A file of entries, those with larger dtypes first, so that all tensors are aligned."""
    return TensorFile(path, sorted(entries, key=lambda entry: -entry.element_size), metadata)


def write_file(file: TensorFile, folder: Path) -> None:
    """Write a file whose slices are all made on this rank. The caller makes it atomic."""
    writer = FileWriter(file, folder)
    try:
        for entry in file.entries:
            writer.write([file.check(part) for part in entry.make()])
        writer.finish()
    finally:
        writer.close()


def save_tensors(tensors: Mapping[str, torch.Tensor], path: Path) -> None:
    """Write tensors that exist already."""
    write_file(tensor_file(path.name, [Entry.of(*item) for item in tensors.items()]), path.parent)

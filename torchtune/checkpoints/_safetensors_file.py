"""Stream safetensors files to disk, one tensor at a time.

``safetensors.torch.save_file`` needs all tensors of a file in host memory. The format can be streamed: eight bytes
with the length of the header, the header (JSON: dtype, shape and offsets of every tensor), then the bytes of the
tensors in order of offset, without gaps. The header alone determines all offsets. One rank writes a file sequentially
and inserts the shards of other ranks in memory, because network file systems and object stores do not support
concurrent writes to one file.
"""

import json
import os
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path

import torch

from torchtune.training.parallel import spec_of

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

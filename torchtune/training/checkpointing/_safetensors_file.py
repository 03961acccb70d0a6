"""Writing a safetensors file from its first byte to its last, one tensor at a time.

``safetensors.torch.save_file`` wants every tensor of a file in host memory at once. The layout is simple enough to
stream: eight bytes with the length of the header, the header (JSON: dtype, shape and offsets of every tensor), then
the tensors' bytes in the order of the offsets, without holes. Where every byte goes follows from the header alone, so
parts that other processes hold are put into their place in memory, and the file is written in order by one process:
file systems over networks and object stores keep no promise about two that write to one file.
"""

import json
import os
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import torch

# Spelling of the types in the header: https://github.com/huggingface/safetensors (README, "Format")
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
class Block:
    """Values of a part of a tensor.

    Attributes:
        name: of the tensor.
        start: where the part begins, one index for each dimension.
        data: the values.
    """

    name: str
    start: tuple[int, ...]
    data: torch.Tensor


# Name -> tensor on the meta device, and what makes the blocks of these that are to be written here.
Part = tuple[Mapping[str, torch.Tensor], Callable[[], Iterable[Block]]]


@dataclass(frozen=True)
class Piece:
    """The bytes of a :class:`Block`, on the host.

    Attributes:
        name: of the tensor.
        start: where the part begins, one index for each dimension.
        shape: of the part.
        values: its elements in order.
    """

    name: str
    start: tuple[int, ...]
    shape: tuple[int, ...]
    values: memoryview


class TensorFile:
    """A safetensors file to be written.

    Args:
        path: relative to the folder of the checkpoint.
        parts: its tensors. Larger types should come first: what follows is then aligned.
        metadata: text to be kept in the header, by name.

    Attributes:
        header: its first bytes.
        size: bytes of all tensors.
        ranges: where each part begins and ends, counted from the end of the header.

    Raises:
        ValueError: a tensor is of a dtype that the format lacks.
    """

    def __init__(self, path: str, parts: Iterable[Part], metadata: Mapping[str, str] | None = None) -> None:
        self.path, self.parts = path, list(parts)
        self.outline = {name: tensor for outline, _ in self.parts for name, tensor in outline.items()}
        header: dict[str, object] = {"__metadata__": {"format": "pt", **(metadata or {})}}
        self._starts: dict[str, int] = {}
        self.size = 0
        self.ranges: list[tuple[int, int]] = []
        for outline, _ in self.parts:
            first = self.size
            for name, tensor in outline.items():
                if tensor.dtype not in _DTYPES:
                    raise ValueError(f"{path}: the tensor '{name}' is {tensor.dtype}, which safetensors cannot hold.")
                self._starts[name], end = self.size, self.size + num_bytes(tensor)
                offsets = [self.size, end]
                header[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": offsets}
                self.size = end
            self.ranges.append((first, self.size))
        encoded = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        encoded += b" " * (-len(encoded) % 8)
        self.header = len(encoded).to_bytes(8, "little") + encoded

    def piece(self, block: Block) -> Piece:
        """The bytes of a block. Raises ``ValueError`` where it does not fit."""
        whole, data = self.outline[block.name], block.data
        fits = all(a + n <= size for a, n, size in zip(block.start, data.shape, whole.shape, strict=True))
        if data.dtype != whole.dtype or not fits:
            raise ValueError(f"{self.path}: got {data.dtype} {list(data.shape)} at {block.start} of '{block.name}'.")
        return Piece(block.name, tuple(block.start), tuple(data.shape), memoryview(_bytes(data)))

    def places(self, piece: Piece) -> list[tuple[int, memoryview]]:
        """The runs of bytes that a piece is made of, and where each begins, counted from the end of the header."""
        whole, shape = self.outline[piece.name], piece.shape
        # Dimensions from `last` on lie together in the file; those before are walked through.
        last = len(shape)
        while last > 0 and shape[last - 1] == whole.shape[last - 1]:
            last -= 1
        last = max(last - 1, 0)
        ranges = [range(a, a + n) for a, n in zip(piece.start[:last], shape[:last], strict=True)]
        step = len(piece.values) // max(torch.Size(shape[:last]).numel(), 1)
        found = []
        for number, index in enumerate(product(*ranges)):
            place = sum(i * stride for i, stride in zip((*index, *piece.start[last:]), whole.stride(), strict=True))
            at = self._starts[piece.name] + place * whole.element_size()
            found.append((at, piece.values[number * step : (number + 1) * step]))
        return found


class FileWriter:
    """Writes a file in order, and sums it up meanwhile.

    Args:
        file: what to write.
        folder: of the checkpoint.

    Attributes:
        size: bytes that were written.
        crc: CRC-32 of these.

    Raises:
        OSError: the disk is full, or may not be written to.
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

    def write(self, pieces: Sequence[Piece]) -> None:
        """Write the next part of the file.

        Args:
            pieces: all of it, in any order.

        Raises:
            OSError: the disk is full.
            ValueError: something is missing.
        """
        start, end = self.file.ranges[self._next]
        self._next += 1
        found = sum(len(piece.values) for piece in pieces)
        if found != end - start:
            raise ValueError(f"{self.file.path}: {found:,} bytes of tensors came where {end - start:,} were announced.")
        runs = [run for piece in pieces for run in self.file.places(piece)]
        if len(runs) == len(pieces):
            for _, values in sorted(runs, key=lambda run: run[0]):
                self._append(values)
            return
        room = memoryview(bytearray(end - start))
        for at, values in runs:
            room[at - start : at - start + len(values)] = values
        self._append(room)

    def finish(self) -> None:
        """Bring it to the disk; once is enough. Raises ``ValueError`` if parts are missing."""
        if self._descriptor < 0:
            return
        if self._next != len(self.file.parts):
            raise ValueError(f"{self.file.path}: {self._next} of {len(self.file.parts)} parts were written.")
        os.fsync(self._descriptor)
        self.close()

    def close(self) -> None:
        """Let go of the file."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1


def _bytes(tensor: torch.Tensor) -> memoryview | bytes:
    data = tensor.detach().cpu().contiguous()
    if not data.numel():  # memoryview cannot cast an empty array
        return b""
    return memoryview(data.reshape(-1).view(torch.uint8).numpy())


def whole_blocks(tensors: Iterable[tuple[str, torch.Tensor]]) -> list[Block]:
    """Tensors that are all here."""
    return [Block(name, (0,) * tensor.dim(), tensor) for name, tensor in tensors]


def whole_part(name: str, tensor: torch.Tensor) -> Part:
    """A tensor that is all here."""
    outline = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    return {name: outline}, lambda: whole_blocks([(name, tensor)])


def tensor_file(path: str, parts: Iterable[Part], metadata: Mapping[str, str] | None = None) -> TensorFile:
    """One file of all tensors; those of larger types come first, so that everything is aligned."""
    ordered = sorted(parts, key=lambda part: -max(tensor.element_size() for tensor in part[0].values()))
    return TensorFile(path, ordered, metadata)


def write_file(file: TensorFile, folder: Path) -> None:
    """Write a file of which everything is made here. That it appears whole or not at all is seen to by the caller."""
    writer = FileWriter(file, folder)
    try:
        for _, make in file.parts:
            writer.write([file.piece(block) for block in make()])
        writer.finish()
    finally:
        writer.close()


def save_tensors(tensors: Mapping[str, torch.Tensor], path: Path) -> None:
    """Write tensors that exist already."""
    write_file(tensor_file(path.name, [whole_part(*item) for item in tensors.items()]), path.parent)

"""Writing a safetensors file in parts: one tensor at a time, and by many processes at once.

``safetensors.torch.save_file`` wants every tensor of a file in host memory at once. The layout is simple enough to
stream: eight bytes with the length of the header, the header (JSON: dtype, shape and offsets of every tensor), then
the tensors' bytes in the order of the offsets, without holes. Where every byte goes follows from the header alone, so
each process that holds a shard of a tensor writes it into its place.
"""

import json
import os
from collections.abc import Callable, Iterable, Mapping
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


class TensorFile:
    """A safetensors file to be written.

    Args:
        path: relative to the folder of the checkpoint.
        parts: its tensors. Larger types should come first: what follows is then aligned.

    Attributes:
        header: its first bytes.
        size: bytes of all tensors.

    Raises:
        ValueError: a tensor is of a dtype that the format lacks.
    """

    def __init__(self, path: str, parts: Iterable[Part]) -> None:
        self.path, self.parts = path, list(parts)
        self.outline = {name: tensor for outline, _ in self.parts for name, tensor in outline.items()}
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        self._starts: dict[str, int] = {}
        self.size = 0
        for name, tensor in self.outline.items():
            if tensor.dtype not in _DTYPES:
                raise ValueError(f"{path}: the tensor '{name}' is {tensor.dtype}, which safetensors cannot hold.")
            self._starts[name], end = self.size, self.size + num_bytes(tensor)
            offsets = [self.size, end]
            header[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": offsets}
            self.size = end
        encoded = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        encoded += b" " * (-len(encoded) % 8)
        self.header = len(encoded).to_bytes(8, "little") + encoded

    def blocks(self) -> Iterable[Block]:
        """What is to be written here, made one after another."""
        for _, make in self.parts:
            yield from make()

    def write(self, descriptor: int, block: Block) -> int:
        """Write a block into its place in the file; returns how many bytes that were.

        Raises:
            OSError: the disk is full, or may not be written to.
            ValueError: the block does not fit.
        """
        whole, data = self.outline[block.name], block.data
        fits = all(a + n <= size for a, n, size in zip(block.start, data.shape, whole.shape, strict=True))
        if data.dtype != whole.dtype or not fits:
            raise ValueError(f"{self.path}: got {data.dtype} {list(data.shape)} at {block.start} of '{block.name}'.")
        # Dimensions from `last` on lie together in the file; those before are walked through.
        last = data.dim()
        while last > 0 and data.shape[last - 1] == whole.shape[last - 1]:
            last -= 1
        last = max(last - 1, 0)
        ranges = [range(a, a + n) for a, n in zip(block.start[:last], data.shape[:last], strict=True)]
        values = memoryview(_bytes(data))
        start = len(self.header) + self._starts[block.name]
        step = len(values) // max(data.shape[:last].numel(), 1)
        for number, index in enumerate(product(*ranges)):
            place = sum(i * stride for i, stride in zip((*index, *block.start[last:]), whole.stride(), strict=True))
            at = start + place * whole.element_size()
            write_at(descriptor, values[number * step : (number + 1) * step], at)
        return len(values)


def _bytes(tensor: torch.Tensor) -> memoryview | bytes:
    data = tensor.detach().cpu().contiguous()
    if not data.numel():  # memoryview cannot cast an empty array
        return b""
    return memoryview(data.reshape(-1).view(torch.uint8).numpy())


def write_at(descriptor: int, values: memoryview | bytes, offset: int) -> None:
    """Write all of ``values``: the system may take less at a time."""
    values = memoryview(values)
    while values:
        written = os.pwrite(descriptor, values, offset)
        values, offset = values[written:], offset + written


def whole_blocks(tensors: Iterable[tuple[str, torch.Tensor]]) -> list[Block]:
    """Tensors that are all here."""
    return [Block(name, (0,) * tensor.dim(), tensor) for name, tensor in tensors]


def whole_part(name: str, tensor: torch.Tensor) -> Part:
    """A tensor that is all here."""
    outline = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    return {name: outline}, lambda: whole_blocks([(name, tensor)])


def tensor_file(path: str, parts: Iterable[Part]) -> TensorFile:
    """One file of all tensors; those of larger types come first, so that everything is aligned."""
    return TensorFile(path, sorted(parts, key=lambda part: -max(tensor.element_size() for tensor in part[0].values())))


def write_file(file: TensorFile, folder: Path) -> None:
    """Write a file of which everything is made here. That it appears whole or not at all is seen to by the caller."""
    with (folder / file.path).open("wb") as opened:
        write_at(opened.fileno(), file.header, 0)
        written = sum(file.write(opened.fileno(), block) for block in file.blocks())
    if written != file.size:
        raise ValueError(f"{file.path}: {written:,} bytes of tensors came where {file.size:,} were announced.")


def save_tensors(tensors: Mapping[str, torch.Tensor], path: Path) -> None:
    """Write tensors that exist already."""
    write_file(tensor_file(path.name, [whole_part(*item) for item in tensors.items()]), path.parent)

"""Writing a safetensors file one tensor at a time.

``safetensors.torch.save_file`` wants every tensor of a file in host memory at once. The layout is simple enough to
stream: eight bytes with the length of the header, the header (JSON: dtype, shape and offsets of every tensor), then
the tensors' bytes in the order of the offsets, without holes.
"""

import json
from collections.abc import Iterable, Mapping
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


def write_safetensors(
    path: Path, outline: Mapping[str, torch.Tensor], tensors: Iterable[tuple[str, torch.Tensor]]
) -> None:
    """Write a file of tensors of which no more than one is in host memory at a time.

    The caller sees to it that the file appears whole or not at all (a folder of ``atomic_directory``).

    Args:
        path: the file.
        outline: name -> a tensor of the right shape and dtype, usually on the meta device. Larger types should come
            first: what follows is then aligned.
        tensors: name and tensor, on any device, in the order of ``outline``.

    Raises:
        ValueError: ``tensors`` are not those of ``outline``, or of a dtype that the format lacks.
        OSError: the disk is full, or may not be written to.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in outline.items():
        if tensor.dtype not in _DTYPES:
            raise ValueError(f"{path.name}: the tensor '{name}' is {tensor.dtype}, which safetensors cannot hold.")
        start, end = end, end + num_bytes(tensor)
        header[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    encoded = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    encoded += b" " * (-len(encoded) % 8)
    expected = iter(outline.items())
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little"))
        file.write(encoded)
        for name, tensor in tensors:
            wanted, like = next(expected, (None, None))
            if name != wanted or tensor.shape != like.shape or tensor.dtype != like.dtype:
                raise ValueError(f"{path.name}: got the tensor '{name}' where '{wanted}' was announced.")
            _write_bytes(file, tensor)
            del tensor  # before the next one is made
        if (missing := next(expected, None)) is not None:
            raise ValueError(f"{path.name}: the tensor '{missing[0]}' was announced and did not come.")


def _write_bytes(file: object, tensor: torch.Tensor) -> None:
    data = tensor.detach().cpu().contiguous()
    if data.numel():  # memoryview cannot cast an empty array
        file.write(memoryview(data.reshape(-1).view(torch.uint8).numpy()))


def save_tensors(tensors: Mapping[str, torch.Tensor], path: Path) -> None:
    """Write tensors that exist already; see :func:`write_safetensors`."""
    ordered = dict(sorted(tensors.items(), key=lambda item: -item[1].element_size()))
    write_safetensors(path, ordered, ordered.items())

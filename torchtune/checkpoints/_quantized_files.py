"""Quantized weights in safetensors files, which are dequantized when they are read.

- Block-wise float8 (DeepSeek V3, MiniMax-M2, Mistral Small 4): a weight ``X`` ``[…, out, in]`` in float8 and
  ``X_scale_inv`` ``[…, ceil(out / rows), ceil(in / columns)]``, with the block size ``weight_block_size`` of
  ``config.json`` (128 x 128), or one scale per matrix.
- The package ``compressed-tensors`` (0.20): ``X.weight`` in int8 or float8, or ``X.weight_packed`` int32
  ``[out, ceil(in · bits / 32)]``, elements shifted to be unsigned, the first in the lowest bits, with
  ``X.weight_shape``; and ``X.weight_scale``: one for the weight (``[]`` or ``[1]``), per row (``[out]`` or
  ``[out, 1]``), per group of a row (``[out, groups]``), or per block, with ``block_structure`` in ``config.json``.
- MXFP4, of the Open Compute Project's "Microscaling Formats (MX) Specification" 1.0: ``X_blocks`` uint8
  ``[e, out, in / 32, 16]``, elements E2M1, two per byte, low nibble first; and ``X_scales`` uint8
  ``[e, out, in / 32]``, E8M0, ``2 ** (scale - 127)``. They decode to matrices ``[e, in, out]``.

In the first two, the weight is the product of values and scales. Scales of activations are for quantized kernels and
are not read.
"""

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from torchtune.checkpoints._weight_files import CheckpointError, SafetensorsFiles
from torchtune.models import Slices
from torchtune.training.parallel import full_slices
from torchtune.utils import read_json

_INVERSE, SCALE, PACKED, SHAPE = "_scale_inv", "_scale", "_packed", "_shape"
_BLOCKS, _SCALES = "_blocks", "_scales"
# Unsupported tensors that change the meaning of values and scales: zero points, column orders, second scales.
_UNREAD = ("_zero_point", "_g_idx", "_global_scale")
# Tensors for kernels that multiply quantized activations or read quantized KV caches.
_ACTIVATIONS = (
    "activation_scale",
    "input_scale",
    *(f".{name}{end}" for name in ("output", "q", "k", "v") for end in ("_scale", *_UNREAD, "_scale_ub")),
    *(f".input{end}" for end in (*_UNREAD, "_scale_ub")),
)
_INTEGERS = (torch.int32, torch.int64)
_STORED = (torch.int8, torch.float8_e4m3fn, torch.float8_e5m2)
_BEFORE = "use the checkpoint before it was quantized"
# Fields of quantization_config that the tensors do not determine -> supported values.
_FORMATS = (None, "pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "dense", "mixed-precision")
_FIELDS: dict[str, tuple[Any, ...]] = {
    "quant_method": (None, "compressed-tensors", "fp8", "fbgemm_fp8"),
    "transform_config": (None, {}),
    "sparsity_config.format": (None, "dense"),
    "format": _FORMATS,
}
# Number of elements to dequantize at a time.
_AT_ONCE = 2**22
_GROUP = 32
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)

Blocks = tuple[int, int]


def quantized_files(paths: Sequence[Path]) -> SafetensorsFiles:
    """Open safetensors files, quantized or not.

    Raises:
        CheckpointError: a file is invalid, or a weight is stored in an unsupported way.
    """
    files = SafetensorsFiles(paths)
    if any(".experts." in name and name.endswith(_BLOCKS) for name in files.names()):
        return Mxfp4Files(paths)
    if any(name.endswith((_INVERSE, f".weight{SCALE}")) for name in files.names()):
        return ScaledFiles(paths)
    return files


def unpack(packed: torch.Tensor, bits: int, width: int) -> torch.Tensor:
    """Unpack int32 ``[out, ceil(width · bits / 32)]`` into int8 ``[out, width]``."""
    shifts = torch.arange(0, 32, bits, device=packed.device, dtype=torch.int32)
    values = (packed[:, :, None] >> shifts) & ((1 << bits) - 1)
    return (values - (1 << (bits - 1))).to(torch.int8).flatten(1)[:, :width]


def dequantize_mxfp4(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Dequantize MXFP4 exactly (except for scales beyond bfloat16's range of exponents).

    Args:
        blocks: uint8 ``[…, groups, 16]``.
        scales: uint8 ``[…, groups]``.

    Returns:
        bfloat16 ``[…, groups * 32]``.
    """
    values = torch.tensor([*_E2M1, *(-value for value in _E2M1)], device=blocks.device)
    out = torch.empty(*scales.shape, _GROUP, dtype=torch.bfloat16, device=blocks.device)
    flat = blocks.reshape(-1, _GROUP // 2), scales.flatten(), out.view(-1, _GROUP)
    for bytes_, scale, part in zip(*(tensor.split(_AT_ONCE // _GROUP) for tensor in flat), strict=True):
        pairs = torch.stack([bytes_ & 0xF, bytes_ >> 4], -1).flatten(1)
        part.copy_(torch.ldexp(values[pairs.int()], scale.int().sub_(127)[:, None]))
    return out.flatten(-2)


class _QuantizedFiles(SafetensorsFiles):
    """Base class: several stored tensors count as one weight, named by their common prefix."""

    def _join(self, weights: Iterable[str], ends: tuple[str, ...]) -> None:
        self._ends = ends
        self._parts = {name + end: name for name in weights for end in ends}

    def names(self) -> list[str]:
        """Return all names, file by file; a quantized weight counts once, scales of activations are omitted."""
        stored = (name for name in self._paths if not name.endswith(_ACTIVATIONS))
        return list(dict.fromkeys(self._parts.get(name, name) for name in stored))

    def where(self, name: str) -> Path:
        """Return the file of a tensor, or of a part of it."""
        return super().where(next(name + end for end in ("", *self._ends) if name + end in self._paths))


class ScaledFiles(_QuantizedFiles):
    """Safetensors files with float8 or compressed-tensors weights.

    Block-wise float8 weights are read as bfloat16, all others in the dtype of their scales.

    Raises:
        CheckpointError: a weight is stored in an unsupported way.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        super().__init__(paths)
        self._is_fp8 = any(name.endswith(_INVERSE) for name in self._paths)
        self._scale = _INVERSE if self._is_fp8 else SCALE
        of_weights = _INVERSE if self._is_fp8 else f".weight{SCALE}"
        scaled = [name.removesuffix(self._scale) for name in self._paths if name.endswith(of_weights)]
        self._join(scaled, (self._scale, PACKED, SHAPE))
        self._block = _block_size(paths[0].parent / "config.json") or ((128, 128) if self._is_fp8 else None)
        for name in scaled:
            lacks = [name + end for end in (PACKED, SHAPE) if name + end not in self._paths]
            extra = [name + end for end in _UNREAD if name + end in self._paths]
            if extra or (lacks and name not in self._paths):
                found = f"there is '{extra[0]}'" if extra else f"there is no '{name if lacks[1:] else lacks[0]}'"
                raise CheckpointError(
                    f"{self.where(name)}: '{name}' is quantized in a way that cannot be read ({found}): {_BEFORE}."
                )

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        if name in self._paths:
            return super().shape(name)
        shape = super().read(name + SHAPE)
        if shape.dtype not in _INTEGERS or shape.shape != (2,) or min(shape.tolist()) < 1:
            raise CheckpointError(
                f"{self.where(name)}: '{name}{SHAPE}' is {shape.tolist()} of {shape.dtype}, but the shape of a weight "
                f"is two positive integers: {_BEFORE}."
            )
        return tuple(shape.tolist())

    def read(self, name: str, slices: Slices | None = None) -> torch.Tensor:
        """Read a tensor or a slice of it; of a quantized weight, only the rows of the slice are read."""
        if name + self._scale not in self._parts:
            return super().read(name, slices)
        shape = self.shape(name)
        scale, block = self._scales(name, shape)
        *experts, rows, columns = slices = slices or full_slices(shape)
        sizes = [axis.stop - axis.start for axis in slices]
        out = torch.empty(sizes, dtype=torch.bfloat16 if self._is_fp8 else scale.dtype)
        step = max(_AT_ONCE * sizes[-2] // max(out.numel(), 1), 1)
        for start in range(rows.start, rows.stop, step):
            part = slice(start, min(start + step, rows.stop))
            row, column = (
                torch.arange(axis.start, axis.stop) // size for axis, size in zip((part, columns), block, strict=True)
            )
            spread = scale[tuple(experts)][..., row[:, None], column]
            values = self._values(name, (*experts, part, columns), shape)
            out[..., part.start - rows.start : part.stop - rows.start, :] = values.to(spread.dtype) * spread
        return out

    def _values(self, name: str, slices: Slices, shape: tuple[int, ...]) -> torch.Tensor:
        """Read a slice of the quantized values of a weight with the shape ``shape``."""
        stored = name if name in self._paths else name + PACKED
        if stored == name:
            values = super().read(name, slices)
            if values.dtype in _STORED:
                return values
        else:
            packed, width = super().shape(stored), shape[-1]
            bits = next((bits for bits in (4, 8) if packed == (shape[0], math.ceil(width * bits / 32))), None)
            values = super().read(stored, None if bits is None else (slices[0], slice(0, packed[1])))
            if values.dtype == torch.int32 and bits is not None:
                return unpack(values, bits, width)[:, slices[1]]
        raise CheckpointError(
            f"{self.where(name)}: '{stored}' has scales, but holds {values.dtype} {list(super().shape(stored))} for a "
            f"weight of shape {list(shape)}, which cannot be read: {_BEFORE}."
        )

    def _scales(self, name: str, shape: tuple[int, ...]) -> tuple[torch.Tensor, Blocks]:
        """Read the scales ``[…, blocks of rows, blocks of columns]`` of a weight; return them and the block size."""
        scale, matrices = super().read(name + self._scale), shape[:-2]
        blocks, sizes = scale, []
        if len(shape) > 1 and scale.numel() == math.prod(matrices):
            blocks, sizes = scale.view(*matrices, 1, 1), [shape[-2:]]
        elif len(shape) > 1 and scale.dim() == len(shape) - 1:
            blocks, sizes = scale.unsqueeze(-1), [self._block, (1, shape[-1])]
        elif len(shape) > 1 and scale.dim() == len(shape):
            sizes = [self._block, (1, shape[-1] // max(scale.shape[-1], 1))]
        for size in sizes if scale.dtype.is_floating_point else ():
            if size is None or not all(size):
                continue
            if blocks.shape == (*matrices, *(-(-n // of) for n, of in zip(shape[-2:], size, strict=True))):
                return blocks.float() if self._is_fp8 else blocks, size
        of_blocks = f" in blocks of {self._block[0]} x {self._block[1]}" if self._block else ""
        raise CheckpointError(
            f"{self.where(name)}: '{name}{self._scale}' {list(scale.shape)} of {scale.dtype} does not fit the shape "
            f"{list(shape)} of the weight{of_blocks}: {_BEFORE}."
        )


def _block_size(config: Path) -> Blocks | None:
    """Return rows and columns of the blocks that share a scale, if there are any.

    Raises:
        CheckpointError: ``quantization_config`` in ``config.json`` has an unsupported value.
    """
    said = read_json(config, CheckpointError).get("quantization_config") if config.is_file() else None

    def at(path: str, node: Any = said) -> Any:
        for key in path.split("."):
            node = None if node is None else node.get(key)
        return node

    def check(path: str, value: Any, *, fits: bool) -> None:
        if not fits:
            raise CheckpointError(
                f"{config}: quantization_config.{path} is {value!r}, which cannot be read: {_BEFORE}."
            )

    blocks = set()
    try:
        groups = (at("config_groups") or {}).items()
        for path, known in _FIELDS.items():
            check(path, at(path), fits=at(path) in known)
        sizes = {"weight_block_size": at("weight_block_size")}
        for name, group in groups:
            check(f"config_groups.{name}.format", at("format", group), fits=at("format", group) in _FORMATS)
            sizes[f"config_groups.{name}.weights.block_structure"] = at("weights.block_structure", group)
    except AttributeError as error:
        raise CheckpointError(f"{config}: quantization_config has a value of another type: {_BEFORE}.") from error
    for path, size in sizes.items():
        is_pair = isinstance(size, list) and len(size) == 2 and all(type(n) is int and 0 < n < 2**20 for n in size)
        check(path, size, fits=is_pair or size is None)
        blocks |= {tuple(size)} if size else set()
    if len(blocks) > 1:
        raise CheckpointError(f"{config}: quantization_config has blocks of {len(blocks)} sizes: {_BEFORE}.")
    return next(iter(blocks), None)


class Mxfp4Files(_QuantizedFiles):
    """Safetensors files with MXFP4 weights, which are read as bfloat16.

    Raises:
        CheckpointError: blocks have no scales.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        super().__init__(paths)
        packed = [name for name in self._paths if name.endswith(_BLOCKS) and ".experts." in name]
        weights = [name.removesuffix(_BLOCKS) for name in packed]
        self._join(weights, (_BLOCKS, _SCALES))
        for name in weights:
            if name + _SCALES not in self._paths:
                raise CheckpointError(f"{self.where(name)} holds '{name}{_BLOCKS}', but no file '{name}{_SCALES}'.")

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        if name + _BLOCKS not in self._parts:
            return super().shape(name)
        blocks = super().shape(name + _BLOCKS)
        if len(blocks) != 4 or blocks[-1] != _GROUP // 2:
            raise self._unfit(name)
        experts, out, groups, _ = blocks
        return (experts, groups * _GROUP, out)

    def read(self, name: str, slices: Slices | None = None) -> torch.Tensor:
        """Read a tensor or a slice of it; of MXFP4 weights, only the groups of the slice are read, expert by expert."""
        if name + _BLOCKS not in self._parts:
            return super().read(name, slices)
        shape = self.shape(name)
        if super().shape(name + _BLOCKS)[:-1] != super().shape(name + _SCALES):
            raise self._unfit(name)
        experts, rows, columns = slices = slices or full_slices(shape)
        groups = slice(rows.start // _GROUP, math.ceil(rows.stop / _GROUP))
        inside = slice(rows.start - groups.start * _GROUP, rows.stop - groups.start * _GROUP)
        out = torch.empty([axis.stop - axis.start for axis in slices], dtype=torch.bfloat16)
        for number, expert in enumerate(range(experts.start, experts.stop)):
            one = slice(expert, expert + 1)
            blocks = super().read(name + _BLOCKS, (one, columns, groups, slice(0, _GROUP // 2)))
            scales = super().read(name + _SCALES, (one, columns, groups))
            if (blocks.dtype, scales.dtype) != (torch.uint8, torch.uint8):
                raise self._unfit(name)
            out[number] = dequantize_mxfp4(blocks[0], scales[0])[:, inside].t()
        return out

    def _unfit(self, name: str) -> CheckpointError:
        blocks, scales = (self._file(name + end).get_slice(name + end) for end in (_BLOCKS, _SCALES))
        return CheckpointError(
            f"{self.where(name)}: '{name}{_BLOCKS}' {blocks.get_shape()} of {blocks.get_dtype()} and '{name}{_SCALES}' "
            f"{scales.get_shape()} of {scales.get_dtype()} are not [experts, out, groups, {_GROUP // 2}] and [experts, "
            "out, groups] of U8: download the file again."
        )

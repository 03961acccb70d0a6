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
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from torchtune.checkpoints._weight_files import CheckpointError, SafetensorsFiles, read_json
from torchtune.models import Slices
from torchtune.training.parallel import full_slices

# Suffixes of the stored tensors of a weight X.
_INVERSE = "_scale_inv"
SCALE = "_scale"
PACKED = "_packed"
SHAPE = "_shape"
_BLOCKS = "_blocks"
_SCALES = "_scales"
# Unsupported tensors that change the meaning of values and scales: zero points, column orders, second scales.
_UNSUPPORTED = ("_zero_point", "_g_idx", "_global_scale")
_INTEGERS = (torch.int32, torch.int64)
_VALUE_DTYPES = (torch.int8, torch.float8_e4m3fn, torch.float8_e5m2)
_ADVICE = "use the checkpoint before it was quantized"
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
# Elements of MXFP4 that share a scale, and the values of E2M1.
_GROUP = 32
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def _activation_suffixes() -> tuple[str, ...]:
    """Return the suffixes of tensors for kernels that multiply quantized activations or read quantized KV caches."""
    suffixes = ["activation_scale", "input_scale"]
    for name in ("input", "output", "q", "k", "v"):
        for parameter in (SCALE, *_UNSUPPORTED, "_scale_ub"):
            suffixes.append(f".{name}{parameter}")
    return tuple(suffixes)


_ACTIVATIONS = _activation_suffixes()

# Rows and columns of the blocks that share a scale.
BlockSize = tuple[int, int]


def open_safetensors(paths: Sequence[Path]) -> SafetensorsFiles:
    """Open safetensors files, quantized or not.

    Raises:
        CheckpointError: a file is invalid, or a weight is stored in an unsupported way.
    """
    files = SafetensorsFiles(paths)
    names = files.names()
    if any(".experts." in name and name.endswith(_BLOCKS) for name in names):
        return Mxfp4Files(paths)
    if any(name.endswith((_INVERSE, f".weight{SCALE}")) for name in names):
        return ScaledFiles(paths)
    return files


def unpack(packed: torch.Tensor, bits: int, width: int) -> torch.Tensor:
    """Unpack int32 ``[out, ceil(width · bits / 32)]`` into int8 ``[out, width]``."""
    shifts = torch.arange(0, 32, bits, device=packed.device, dtype=torch.int32)
    values = (packed[:, :, None] >> shifts) & ((1 << bits) - 1)  # [out, words, values of a word], unsigned
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
    weight = torch.empty(*scales.shape, _GROUP, dtype=torch.bfloat16, device=blocks.device)
    groups_at_once = _AT_ONCE // _GROUP
    chunks = zip(
        blocks.reshape(-1, _GROUP // 2).split(groups_at_once),
        scales.flatten().split(groups_at_once),
        weight.view(-1, _GROUP).split(groups_at_once),
        strict=True,
    )
    for bytes_, exponents, target in chunks:
        codes = torch.stack([bytes_ & 0xF, bytes_ >> 4], -1).flatten(1)  # the low nibble is first
        target.copy_(torch.ldexp(values[codes.int()], exponents.int().sub_(127)[:, None]))
    return weight.flatten(-2)


class _QuantizedFiles(SafetensorsFiles):
    """Base class: several stored tensors count as one weight, named by their common prefix."""

    def _join(self, weights: Iterable[str], suffixes: tuple[str, ...]) -> None:
        """Count the tensors ``name + suffix`` as the weight ``name``."""
        self._suffixes = suffixes
        self._weight_of = {}
        for name in weights:
            for suffix in suffixes:
                self._weight_of[name + suffix] = name

    def names(self) -> list[str]:
        """Return all names, file by file; a quantized weight counts once, scales of activations are omitted."""
        names = {}  # in order, once each
        for stored in self._paths:
            if not stored.endswith(_ACTIVATIONS):
                names[self._weight_of.get(stored, stored)] = None
        return list(names)

    def path_of(self, name: str) -> Path:
        """Return the file of a tensor, or of one of the tensors that store a weight."""
        return super().path_of(next(name + suffix for suffix in ("", *self._suffixes) if name + suffix in self._paths))


class ScaledFiles(_QuantizedFiles):
    """Safetensors files with float8 or compressed-tensors weights.

    Block-wise float8 weights are read as bfloat16, all others in the dtype of their scales.

    Raises:
        CheckpointError: a weight is stored in an unsupported way.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        super().__init__(paths)
        self._is_float8 = any(name.endswith(_INVERSE) for name in self._paths)
        self._scale = _INVERSE if self._is_float8 else SCALE
        weight_scale = _INVERSE if self._is_float8 else f".weight{SCALE}"
        weights = [name.removesuffix(self._scale) for name in self._paths if name.endswith(weight_scale)]
        self._join(weights, (self._scale, PACKED, SHAPE))
        self._block = _read_block_size(paths[0].parent / "config.json")
        if self._block is None and self._is_float8:
            self._block = (128, 128)
        for name in weights:
            self._check_stored_tensors(name)

    def _check_stored_tensors(self, name: str) -> None:
        """Raise ``CheckpointError`` if tensors of a weight are missing, or change the meaning of its values."""
        reason = None
        missing = [name + suffix for suffix in (PACKED, SHAPE) if name + suffix not in self._paths]
        if missing and name not in self._paths:
            reason = f"there is no '{name if len(missing) > 1 else missing[0]}'"
        for suffix in reversed(_UNSUPPORTED):
            if name + suffix in self._paths:
                reason = f"there is '{name}{suffix}'"
        if reason is not None:
            raise CheckpointError(
                f"{self.path_of(name)}: '{name}' is quantized in a way that cannot be read ({reason}): {_ADVICE}."
            )

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        if name in self._paths:
            return super().shape(name)
        shape = super().read(name + SHAPE)
        if shape.dtype not in _INTEGERS or shape.shape != (2,) or min(shape.tolist()) < 1:
            raise CheckpointError(
                f"{self.path_of(name)}: '{name}{SHAPE}' is {shape.tolist()} of {shape.dtype}, but the shape of a "
                f"weight is two positive integers: {_ADVICE}."
            )
        return tuple(shape.tolist())

    def read(self, name: str, slices: Slices | None = None) -> torch.Tensor:
        """Read a tensor or a slice of it; of a quantized weight, only the rows of the slice are read."""
        if name + self._scale not in self._weight_of:
            return super().read(name, slices)
        shape = self.shape(name)
        scale, (block_rows, block_columns) = self._read_scale(name, shape)
        if slices is None:
            slices = full_slices(shape)
        *experts, rows, columns = slices
        sizes = [axis.stop - axis.start for axis in slices]
        weight = torch.empty(sizes, dtype=torch.bfloat16 if self._is_float8 else scale.dtype)
        column_blocks = torch.arange(columns.start, columns.stop) // block_columns
        rows_at_once = max(_AT_ONCE * sizes[-2] // max(weight.numel(), 1), 1)
        for start in range(rows.start, rows.stop, rows_at_once):
            chunk = slice(start, min(start + rows_at_once, rows.stop))
            row_blocks = torch.arange(chunk.start, chunk.stop) // block_rows
            element_scales = scale[tuple(experts)][..., row_blocks[:, None], column_blocks]
            values = self._read_values(name, (*experts, chunk, columns), shape)
            target = weight[..., chunk.start - rows.start : chunk.stop - rows.start, :]
            target.copy_(values.to(element_scales.dtype) * element_scales)
        return weight

    def _read_values(self, name: str, slices: Slices, shape: tuple[int, ...]) -> torch.Tensor:
        """Read a slice of the quantized values of a weight with the shape ``shape``."""
        if name in self._paths:
            stored = name
            values = super().read(stored, slices)
            if values.dtype in _VALUE_DTYPES:
                return values
        else:
            stored = name + PACKED
            packed_shape = super().shape(stored)
            width = shape[-1]
            bits = None
            for candidate in (4, 8):
                if bits is None and packed_shape == (shape[0], math.ceil(width * candidate / 32)):
                    bits = candidate
            # Words of a row hold values of several columns: complete rows are read.
            complete_rows = None if bits is None else (slices[0], slice(0, packed_shape[1]))
            values = super().read(stored, complete_rows)
            if values.dtype == torch.int32 and bits is not None:
                return unpack(values, bits, width)[:, slices[1]]
        raise CheckpointError(
            f"{self.path_of(name)}: '{stored}' has scales, but holds {values.dtype} {list(super().shape(stored))} for "
            f"a weight of shape {list(shape)}, which cannot be read: {_ADVICE}."
        )

    def _read_scale(self, name: str, shape: tuple[int, ...]) -> tuple[torch.Tensor, BlockSize]:
        """Read the scales ``[…, blocks of rows, blocks of columns]`` of a weight; return them and the block size."""
        scale = super().read(name + self._scale)
        if scale.dtype.is_floating_point and len(shape) > 1:
            for blocks, size in self._possible_blocks(scale, shape):
                if size is None or not all(size):
                    continue
                counts = [math.ceil(length / block) for length, block in zip(shape[-2:], size, strict=True)]
                if blocks.shape == (*shape[:-2], *counts):
                    return blocks.float() if self._is_float8 else blocks, size
        of_blocks = f" in blocks of {self._block[0]} x {self._block[1]}" if self._block else ""
        raise CheckpointError(
            f"{self.path_of(name)}: '{name}{self._scale}' {list(scale.shape)} of {scale.dtype} does not fit the shape "
            f"{list(shape)} of the weight{of_blocks}: {_ADVICE}."
        )

    def _possible_blocks(
        self, scale: torch.Tensor, shape: tuple[int, ...]
    ) -> Iterator[tuple[torch.Tensor, BlockSize | None]]:
        """Yield the scales ``[…, blocks of rows, blocks of columns]`` with each block size that they may have."""
        matrices = shape[:-2]
        if scale.numel() == math.prod(matrices):  # one scale per matrix
            yield scale.view(*matrices, 1, 1), shape[-2:]
        elif scale.dim() == len(shape) - 1:  # per block without a dimension for columns, or per row
            yield scale.unsqueeze(-1), self._block
            yield scale.unsqueeze(-1), (1, shape[-1])
        elif scale.dim() == len(shape):  # per block, or per group of a row
            yield scale, self._block
            yield scale, (1, shape[-1] // max(scale.shape[-1], 1))


def _read_block_size(config: Path) -> BlockSize | None:
    """Return rows and columns of the blocks that share a scale, if there are any.

    Raises:
        CheckpointError: ``quantization_config`` in ``config.json`` has an unsupported value.
    """
    settings = read_json(config).get("quantization_config") if config.is_file() else None
    sizes: dict[str, Any] = {}
    try:
        for path, supported in _FIELDS.items():
            value = _field(settings, path)
            if value not in supported:
                raise _unsupported_field(config, path, value)
        sizes["weight_block_size"] = _field(settings, "weight_block_size")
        for name, group in (_field(settings, "config_groups") or {}).items():
            group_format = _field(group, "format")
            if group_format not in _FORMATS:
                raise _unsupported_field(config, f"config_groups.{name}.format", group_format)
            path = f"config_groups.{name}.weights.block_structure"
            sizes[path] = _field(group, "weights.block_structure")
    except AttributeError as error:
        raise CheckpointError(f"{config}: quantization_config has a value of another type: {_ADVICE}.") from error
    blocks = set()
    for path, size in sizes.items():
        if size is None:
            continue
        is_pair = isinstance(size, list) and len(size) == 2 and all(type(n) is int and 0 < n < 2**20 for n in size)
        if not is_pair:
            raise _unsupported_field(config, path, size)
        blocks.add(tuple(size))
    if len(blocks) > 1:
        raise CheckpointError(f"{config}: quantization_config has blocks of {len(blocks)} sizes: {_ADVICE}.")
    return next(iter(blocks), None)


def _field(settings: Any, path: str) -> Any:
    """Return the value at a dotted path; None if it or an object on the way is missing."""
    for key in path.split("."):
        settings = None if settings is None else settings.get(key)
    return settings


def _unsupported_field(config: Path, path: str, value: Any) -> CheckpointError:
    return CheckpointError(f"{config}: quantization_config.{path} is {value!r}, which cannot be read: {_ADVICE}.")


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
                raise CheckpointError(f"{self.path_of(name)} holds '{name}{_BLOCKS}', but no file '{name}{_SCALES}'.")

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        if name + _BLOCKS not in self._weight_of:
            return super().shape(name)
        blocks = super().shape(name + _BLOCKS)
        if len(blocks) != 4 or blocks[-1] != _GROUP // 2:
            raise self._wrong_shapes(name)
        experts, out, groups, _ = blocks
        return (experts, groups * _GROUP, out)

    def read(self, name: str, slices: Slices | None = None) -> torch.Tensor:
        """Read a tensor or a slice of it; of MXFP4 weights, only the groups of the slice are read, expert by expert."""
        if name + _BLOCKS not in self._weight_of:
            return super().read(name, slices)
        shape = self.shape(name)
        if super().shape(name + _BLOCKS)[:-1] != super().shape(name + _SCALES):
            raise self._wrong_shapes(name)
        if slices is None:
            slices = full_slices(shape)
        experts, rows, columns = slices  # [e, in, out]
        groups = slice(rows.start // _GROUP, math.ceil(rows.stop / _GROUP))
        rows_of_groups = slice(rows.start - groups.start * _GROUP, rows.stop - groups.start * _GROUP)
        weight = torch.empty([axis.stop - axis.start for axis in slices], dtype=torch.bfloat16)
        for index, expert in enumerate(range(experts.start, experts.stop)):
            expert_slice = slice(expert, expert + 1)
            blocks = super().read(name + _BLOCKS, (expert_slice, columns, groups, slice(0, _GROUP // 2)))
            scales = super().read(name + _SCALES, (expert_slice, columns, groups))
            if blocks.dtype != torch.uint8 or scales.dtype != torch.uint8:
                raise self._wrong_shapes(name)
            weight[index] = dequantize_mxfp4(blocks[0], scales[0])[:, rows_of_groups].t()
        return weight

    def _wrong_shapes(self, name: str) -> CheckpointError:
        blocks = self._file(name + _BLOCKS).get_slice(name + _BLOCKS)
        scales = self._file(name + _SCALES).get_slice(name + _SCALES)
        return CheckpointError(
            f"{self.path_of(name)}: '{name}{_BLOCKS}' {blocks.get_shape()} of {blocks.get_dtype()} and "
            f"'{name}{_SCALES}' {scales.get_shape()} of {scales.get_dtype()} are not [experts, out, groups, "
            f"{_GROUP // 2}] and [experts, out, groups] of U8: download the file again."
        )

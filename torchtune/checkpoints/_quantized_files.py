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

from torchtune.checkpoints._weight_files import (
    FLOAT8_SCALE,
    MXFP4_BLOCKS,
    SCALE,
    CheckpointError,
    SafetensorsFiles,
    read_json,
)
from torchtune.models import Slices
from torchtune.training.parallel import full_slices

# Suffixes of further stored tensors of a weight X.
PACKED = "_packed"
SHAPE = "_shape"
_MXFP4_SCALES = "_scales"
# Unsupported tensors that change the meaning of values and scales: zero points, column orders, second scales.
_UNSUPPORTED = ("_zero_point", "_g_idx", "_global_scale")
_INTEGERS = (torch.int32, torch.int64)
_VALUE_DTYPES = (torch.int8, torch.float8_e4m3fn, torch.float8_e5m2)
_ADVICE = "use the checkpoint before it was quantized"
# Fields of quantization_config that the tensors do not determine -> supported values.
_SUPPORTED_FORMATS = (
    None,
    "pack-quantized",
    "int-quantized",
    "float-quantized",
    "naive-quantized",
    "dense",
    "mixed-precision",
)
_SUPPORTED_FIELDS: dict[str, tuple[Any, ...]] = {
    "quant_method": (None, "compressed-tensors", "fp8", "fbgemm_fp8"),
    "transform_config": (None, {}),
    "sparsity_config.format": (None, "dense"),
    "format": _SUPPORTED_FORMATS,
}
# Number of elements to dequantize at a time: the float32 products of a chunk take 16 MiB.
_ELEMENTS_AT_ONCE = 2**22
# Elements of MXFP4 that share a scale, and the values of E2M1.
_MXFP4_GROUP = 32
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# Suffixes of tensors for kernels that multiply quantized activations or read quantized KV caches.
_ACTIVATIONS: tuple[str, ...] = ("activation_scale", "input_scale")
for _activation in ("input", "output", "q", "k", "v"):
    _ACTIVATIONS += tuple(f".{_activation}{suffix}" for suffix in (SCALE, *_UNSUPPORTED, "_scale_ub"))

# Rows and columns of the blocks that share a scale.
_BlockSize = tuple[int, int]


def unpack(packed: torch.Tensor, bits: int, width: int) -> torch.Tensor:
    """Unpack int32 ``[out, ceil(width · bits / 32)]`` into int8 ``[out, width]``."""
    shifts = torch.arange(0, 32, bits, device=packed.device, dtype=torch.int32)
    values = (packed[:, :, None] >> shifts) & ((1 << bits) - 1)  # [out, words, values of a word], unsigned
    values = (values - (1 << (bits - 1))).to(torch.int8)
    return values.flatten(1)[:, :width]  # the last word of a row may be padded


def dequantize_mxfp4(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Dequantize MXFP4 exactly (except for scales beyond bfloat16's range of exponents).

    Args:
        blocks: uint8 ``[…, groups, 16]``.
        scales: uint8 ``[…, groups]``.

    Returns:
        bfloat16 ``[…, groups * 32]``.
    """
    # The code of an element is its index here: the highest of its four bits is the sign.
    values = torch.tensor([*_E2M1, *(-value for value in _E2M1)], device=blocks.device)
    weight = torch.empty(*scales.shape, _MXFP4_GROUP, dtype=torch.bfloat16, device=blocks.device)
    groups_at_once = _ELEMENTS_AT_ONCE // _MXFP4_GROUP
    chunks = zip(
        blocks.reshape(-1, _MXFP4_GROUP // 2).split(groups_at_once),
        scales.flatten().split(groups_at_once),
        weight.view(-1, _MXFP4_GROUP).split(groups_at_once),
        strict=True,
    )
    for bytes_, scale, target in chunks:  # [groups, 16], [groups], [groups, 32]
        codes = torch.stack([bytes_ & 0xF, bytes_ >> 4], -1).flatten(1)  # the low nibble is first
        exponents = scale.int().sub_(127)
        target.copy_(torch.ldexp(values[codes.int()], exponents[:, None]))
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
        stored_names = [name, *(name + suffix for suffix in self._suffixes)]
        return super().path_of(next(stored for stored in stored_names if stored in self._paths))


class ScaledFiles(_QuantizedFiles):
    """Safetensors files with float8 or compressed-tensors weights.

    Block-wise float8 weights are read as bfloat16, all others in the dtype of their scales.

    Raises:
        CheckpointError: a weight is stored in an unsupported way.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        super().__init__(paths)
        self._is_float8 = any(name.endswith(FLOAT8_SCALE) for name in self._paths)
        self._block = _read_block_size(paths[0].parent / "config.json")
        if self._is_float8:
            self._scale = FLOAT8_SCALE
            weight_scale = FLOAT8_SCALE
            if self._block is None:
                self._block = (128, 128)
        else:
            self._scale = SCALE
            weight_scale = f".weight{SCALE}"  # other scales belong to activations
        weights = [name.removesuffix(self._scale) for name in self._paths if name.endswith(weight_scale)]
        self._join(weights, (self._scale, PACKED, SHAPE))
        for name in weights:
            self._check_stored_tensors(name)

    def _check_stored_tensors(self, name: str) -> None:
        """Raise ``CheckpointError`` if tensors of a weight are missing, or change the meaning of its values."""
        reason = None
        missing = [name + suffix for suffix in (PACKED, SHAPE) if name + suffix not in self._paths]
        if missing and name not in self._paths:
            # Neither plain nor packed values, or packed ones without a shape.
            missing_name = name if len(missing) > 1 else missing[0]
            reason = f"there is no '{missing_name}'"
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
        sizes = [dim.stop - dim.start for dim in slices]
        dtype = torch.bfloat16 if self._is_float8 else scale.dtype
        weight = torch.empty(sizes, dtype=dtype)  # [experts …, rows, columns]
        column_blocks = torch.arange(columns.start, columns.stop) // block_columns
        elements_per_row = max(weight.numel() // max(sizes[-2], 1), 1)
        rows_at_once = max(_ELEMENTS_AT_ONCE // elements_per_row, 1)
        for start in range(rows.start, rows.stop, rows_at_once):
            chunk = slice(start, min(start + rows_at_once, rows.stop))
            row_blocks = torch.arange(chunk.start, chunk.stop) // block_rows
            # [experts …, rows of the chunk, columns]: the scale of each element
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
            for possible_bits in (8, 4):  # a single word may be either, and is taken for the smaller
                if packed_shape == (shape[0], math.ceil(width * possible_bits / 32)):
                    bits = possible_bits
            stored_slices = None
            if bits is not None:
                # Words of a row hold values of several columns: complete rows are read.
                stored_slices = (slices[0], slice(0, packed_shape[1]))
            values = super().read(stored, stored_slices)
            if values.dtype == torch.int32 and bits is not None:
                return unpack(values, bits, width)[:, slices[1]]
        raise CheckpointError(
            f"{self.path_of(name)}: '{stored}' has scales, but holds {values.dtype} {list(super().shape(stored))} for "
            f"a weight of shape {list(shape)}, which cannot be read: {_ADVICE}."
        )

    def _read_scale(self, name: str, shape: tuple[int, ...]) -> tuple[torch.Tensor, _BlockSize]:
        """Read the scales ``[…, blocks of rows, blocks of columns]`` of a weight; return them and the block size."""
        scale = super().read(name + self._scale)
        if scale.dtype.is_floating_point and len(shape) > 1:
            *matrices, rows, columns = shape
            # The scales as [matrices …, blocks of rows, blocks of columns], and the block sizes that they may have.
            blocks = scale
            possible_sizes: list[_BlockSize | None] = []
            if scale.numel() == math.prod(matrices):  # one scale per matrix
                blocks = scale.view(*matrices, 1, 1)
                possible_sizes = [(rows, columns)]
            elif scale.dim() == len(shape) - 1:  # per block without a dimension for columns, or per row
                blocks = scale.unsqueeze(-1)
                possible_sizes = [self._block, (1, columns)]
            elif scale.dim() == len(shape):  # per block, or per group of a row
                possible_sizes = [self._block, (1, columns // max(scale.shape[-1], 1))]
            for size in possible_sizes:
                if size is None or not all(size):
                    continue
                block_rows, block_columns = size
                if blocks.shape != (*matrices, math.ceil(rows / block_rows), math.ceil(columns / block_columns)):
                    continue
                if self._is_float8:
                    blocks = blocks.float()  # products are rounded once, to bfloat16
                return blocks, size
        of_blocks = ""
        if self._block is not None:
            of_blocks = f" in blocks of {self._block[0]} x {self._block[1]}"
        raise CheckpointError(
            f"{self.path_of(name)}: '{name}{self._scale}' {list(scale.shape)} of {scale.dtype} does not fit the shape "
            f"{list(shape)} of the weight{of_blocks}: {_ADVICE}."
        )


def _read_block_size(config: Path) -> _BlockSize | None:
    """Return rows and columns of the blocks that share a scale, if there are any.

    Raises:
        CheckpointError: ``quantization_config`` in ``config.json`` has an unsupported value.
    """
    settings = None
    if config.is_file():
        settings = read_json(config).get("quantization_config")
    sizes: dict[str, Any] = {}
    try:
        for path, supported in _SUPPORTED_FIELDS.items():
            value = _field(settings, path)
            if value not in supported:
                raise _unsupported_field(config, path, value)
        sizes["weight_block_size"] = _field(settings, "weight_block_size")
        for name, group in (_field(settings, "config_groups") or {}).items():
            group_format = _field(group, "format")
            if group_format not in _SUPPORTED_FORMATS:
                raise _unsupported_field(config, f"config_groups.{name}.format", group_format)
            path = f"config_groups.{name}.weights.block_structure"
            sizes[path] = _field(group, "weights.block_structure")
    except AttributeError as error:
        raise CheckpointError(f"{config}: quantization_config has a value of another type: {_ADVICE}.") from error
    blocks = set()
    for path, size in sizes.items():
        if size is None:
            continue
        if not isinstance(size, list) or len(size) != 2:
            raise _unsupported_field(config, path, size)
        for length in size:
            if type(length) is not int or not 0 < length < 2**20:
                raise _unsupported_field(config, path, size)
        blocks.add(tuple(size))
    if len(blocks) > 1:
        raise CheckpointError(f"{config}: quantization_config has blocks of {len(blocks)} sizes: {_ADVICE}.")
    return next(iter(blocks), None)


def _field(settings: Any, path: str) -> Any:
    """Return the value at a dotted path; None if it or an object on the way is missing."""
    for key in path.split("."):
        if settings is None:
            return None
        settings = settings.get(key)
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
        packed = [name for name in self._paths if name.endswith(MXFP4_BLOCKS) and ".experts." in name]
        weights = [name.removesuffix(MXFP4_BLOCKS) for name in packed]
        self._join(weights, (MXFP4_BLOCKS, _MXFP4_SCALES))
        for name in weights:
            if name + _MXFP4_SCALES not in self._paths:
                raise CheckpointError(
                    f"{self.path_of(name)} holds '{name}{MXFP4_BLOCKS}', but no file '{name}{_MXFP4_SCALES}'."
                )

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        if name + MXFP4_BLOCKS not in self._weight_of:
            return super().shape(name)
        blocks = super().shape(name + MXFP4_BLOCKS)
        if len(blocks) != 4 or blocks[-1] != _MXFP4_GROUP // 2:
            raise self._wrong_shapes(name)
        experts, out, groups, _ = blocks
        return (experts, groups * _MXFP4_GROUP, out)

    def read(self, name: str, slices: Slices | None = None) -> torch.Tensor:
        """Read a tensor or a slice of it; of MXFP4 weights, only the groups of the slice are read, expert by expert."""
        if name + MXFP4_BLOCKS not in self._weight_of:
            return super().read(name, slices)
        shape = self.shape(name)
        *groups_of_blocks, _ = super().shape(name + MXFP4_BLOCKS)
        if tuple(groups_of_blocks) != super().shape(name + _MXFP4_SCALES):
            raise self._wrong_shapes(name)
        if slices is None:
            slices = full_slices(shape)
        experts, rows, columns = slices  # [e, in, out]
        groups = slice(rows.start // _MXFP4_GROUP, math.ceil(rows.stop / _MXFP4_GROUP))
        first_row = groups.start * _MXFP4_GROUP  # of the groups, which may begin before the slice
        rows_of_groups = slice(rows.start - first_row, rows.stop - first_row)
        sizes = [dim.stop - dim.start for dim in slices]
        weight = torch.empty(sizes, dtype=torch.bfloat16)
        for index, expert in enumerate(range(experts.start, experts.stop)):
            expert_slice = slice(expert, expert + 1)
            blocks = super().read(name + MXFP4_BLOCKS, (expert_slice, columns, groups, slice(0, _MXFP4_GROUP // 2)))
            scales = super().read(name + _MXFP4_SCALES, (expert_slice, columns, groups))
            if blocks.dtype != torch.uint8 or scales.dtype != torch.uint8:
                raise self._wrong_shapes(name)
            values = dequantize_mxfp4(blocks[0], scales[0])  # [out, elements of the groups]
            weight[index] = values[:, rows_of_groups].t()
        return weight

    def _wrong_shapes(self, name: str) -> CheckpointError:
        blocks = self._file(name + MXFP4_BLOCKS).get_slice(name + MXFP4_BLOCKS)
        scales = self._file(name + _MXFP4_SCALES).get_slice(name + _MXFP4_SCALES)
        return CheckpointError(
            f"{self.path_of(name)}: '{name}{MXFP4_BLOCKS}' {blocks.get_shape()} of {blocks.get_dtype()} and "
            f"'{name}{_MXFP4_SCALES}' {scales.get_shape()} of {scales.get_dtype()} are not [experts, out, groups, "
            f"{_MXFP4_GROUP // 2}] and [experts, out, groups] of U8: download the file again."
        )

"""Weight files of a checkpoint: their names, and files of every format, opened to read one tensor at a time.

Quantized weights in safetensors files are dequantized when they are read:

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
import pickle
import zipfile
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from torchtune import utils
from torchtune.models import Description, Slices, rename_prefix, text_prefixes
from torchtune.training.parallel import full_slices
from torchtune.utils import UserError, first_line

SAFETENSORS_INDEX = "model.safetensors.index.json"
TORCH_INDEX = "pytorch_model.bin.index.json"
TORCH_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")
# Patterns of weight files in a folder without an index, in order of preference.
_WEIGHT_FILES = (
    "model*.safetensors",
    "*.safetensors",
    "*.gguf",
    "pytorch_model*.bin",
    "model*.bin",
    "consolidated*.pth",
    "*.pth",
)
# Bytes that are read from a memory-mapped file before it is reopened.
_REOPEN_BYTES = 16 * 2**20
# Prefixes of a checkpoint that is one decoder, with its names unchanged.
_NO_PREFIX = {"": ""}

# Suffixes of the stored tensors of a weight X.
_FLOAT8_SCALE = "_scale_inv"
SCALE = "_scale"
PACKED = "_packed"
SHAPE = "_shape"
_MXFP4_BLOCKS = "_blocks"
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


class CheckpointError(UserError, ValueError):
    """A checkpoint cannot be read, does not fit the model, or cannot be written."""


class WeightFiles(ABC):
    """Named tensors in files, opened for reading.

    Attributes:
        name_format: format of the names: ``"gguf"``, or None to detect it from the names.
    """

    name_format: str | None = None

    @abstractmethod
    def names(self) -> list[str]:
        """Return the names of all tensors, file by file."""

    @abstractmethod
    def path_of(self, name: str) -> Path:
        """Return the file of a tensor."""

    @abstractmethod
    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""

    @abstractmethod
    def read(self, name: str, slices: Slices | None = None) -> torch.Tensor:
        """Read a tensor or a slice of it, on the CPU, possibly backed by the file: copy it before changing it."""

    def location(self) -> Path | str:
        """Return the folder of the files, for error messages."""
        names = self.names()
        if not names:
            return "checkpoint_files"
        return self.path_of(names[0]).parent

    def described_model(self) -> Description | None:
        """Return the model that the files themselves describe; None if ``config.json`` describes it."""
        return None

    def tokenizer_files(self) -> dict[str, Any]:
        """Return the contents of JSON files of the tokenizer inside the weight files, by name."""
        return {}

    def special_token_ids(self) -> dict[str, int]:
        """Return the ids that ``config.json`` has for the tokenizer inside the weight files, by key."""
        return {}

    def stream(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield name and value of all tensors."""
        for name in self.names():
            yield name, self.read(name)


class ShardFiles(WeightFiles):
    """Shard files, one open at a time; in the order of :meth:`names`, host memory holds at most one shard file.

    Subclasses open a file with ``_load``, and list its tensors with ``_names_in``.

    Raises:
        CheckpointError: a file is missing or corrupt, or two files hold the same tensor.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths: dict[str, Path] = {}
        self._open: tuple[Path, Any] | None = None
        for path in paths:
            for name in self._names_in(path):
                if name in self._paths:
                    raise CheckpointError(
                        f"The tensor '{name}' is in both {self._paths[name]} and {path.name}: name the files of one "
                        "checkpoint in checkpoint_files (parts of tensors, as in Meta's larger models, cannot be read)."
                    )
                self._paths[name] = path

    @abstractmethod
    def _load(self, path: Path) -> Any:
        """Open a file."""

    @abstractmethod
    def _names_in(self, path: Path) -> list[str]:
        """Return the names of a file's tensors."""

    def names(self) -> list[str]:
        """Return the names of all tensors, file by file."""
        return list(self._paths)

    def path_of(self, name: str) -> Path:
        """Return the file of a tensor."""
        return self._paths[name]

    def _file(self, name: str) -> Any:
        path = self._paths[name]
        if self._open is None or self._open[0] != path:
            self._open = None  # close it before opening the next one
            self._open = (path, self._load(path))
        return self._open[1]


class SafetensorsFiles(ShardFiles):
    """Memory-mapped safetensors files.

    Pages that were read count as memory of the process until the file is closed, so it is reopened regularly to bound
    host memory.
    """

    _read_bytes = 0

    def _load(self, path: Path) -> Any:
        check_exists(path)
        try:
            return safe_open(path, framework="pt")
        except (SafetensorError, OSError) as error:
            raise CheckpointError(
                f"{path} ({path.stat().st_size:,} bytes) is not a whole safetensors file ({error}): "
                "download or copy it again."
            ) from error

    def _names_in(self, path: Path) -> list[str]:
        return list(self._load(path).keys())

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        return tuple(self._file(name).get_slice(name).get_shape())

    def read(self, name: str, slices: Slices | None = None) -> torch.Tensor:
        """Read a tensor or a slice of it, backed by the file: copy it before changing it."""
        if self._read_bytes > _REOPEN_BYTES:
            self._open = None
            self._read_bytes = 0
        # get_slice reads only the bytes of the slice.
        stored = self._file(name).get_slice(name)
        tensor = stored[slices or ...]
        elements = tensor.numel()
        if slices is not None and len(slices) > 1:
            # A slice of columns touches the memory pages of all columns of its rows.
            rows = slices[0].stop - slices[0].start
            elements = max(elements, rows * math.prod(stored.get_shape()[1:]))
        self._read_bytes += elements * tensor.element_size()
        return tensor


class TorchFiles(ShardFiles):
    """Memory-mapped files of ``torch.save``, loaded with ``weights_only=True``."""

    def _load(self, path: Path) -> dict[str, torch.Tensor]:
        return safe_torch_load(path)

    def _names_in(self, path: Path) -> list[str]:
        tensors = self._load(path)
        for name, value in tensors.items():
            if not isinstance(value, torch.Tensor):
                raise CheckpointError(
                    f"{path} holds '{name}', a {type(value).__name__}, where a tensor is expected: "
                    "name the files of weights in checkpoint_files."
                )
        return list(tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        return tuple(self._file(name)[name].shape)

    def read(self, name: str, slices: Slices | None = None) -> torch.Tensor:
        """Read a tensor or a slice of it, backed by the file: copy it before changing it."""
        return self._file(name)[name][slices or ...]


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
        self._is_float8 = any(name.endswith(_FLOAT8_SCALE) for name in self._paths)
        self._block = _read_block_size(paths[0].parent / "config.json")
        if self._is_float8:
            self._scale = _FLOAT8_SCALE
            weight_scale = _FLOAT8_SCALE
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
        if name + self._scale not in self._weight_of:  # not quantized
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
        for start in range(rows.start, rows.stop, rows_at_once):  # bounds the memory of the products before rounding
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
                # Words of a row hold values of several columns: complete rows are read, and columns are cut below.
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
                    blocks = blocks.float()  # the caller rounds products once, to bfloat16
                return blocks, size
        of_blocks = ""
        if self._block is not None:
            of_blocks = f" in blocks of {self._block[0]} x {self._block[1]}"
        raise CheckpointError(
            f"{self.path_of(name)}: '{name}{self._scale}' {list(scale.shape)} of {scale.dtype} does not fit the shape "
            f"{list(shape)} of the weight{of_blocks}: {_ADVICE}."
        )


def _read_block_size(config: Path) -> _BlockSize | None:
    """Return rows and columns of the blocks that share a scale; None if the config names no blocks.

    Two settings may name them: ``weight_block_size`` (float8 of DeepSeek) and ``block_structure`` of a group of
    compressed-tensors. Also checks the fields that decide whether the values can be read.

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
    except AttributeError as error:  # of _field, at a value that is not an object
        raise CheckpointError(f"{config}: quantization_config has a value of another type: {_ADVICE}.") from error
    blocks = set()
    for path, size in sizes.items():
        if size is None:
            continue
        if not isinstance(size, list) or len(size) != 2:
            raise _unsupported_field(config, path, size)
        for length in size:
            if type(length) is not int or not 0 < length < 2**20:  # more than any weight has
                raise _unsupported_field(config, path, size)
        blocks.add(tuple(size))
    if len(blocks) > 1:  # the caller uses one size for all weights
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
        packed = [name for name in self._paths if name.endswith(_MXFP4_BLOCKS) and ".experts." in name]
        weights = [name.removesuffix(_MXFP4_BLOCKS) for name in packed]
        self._join(weights, (_MXFP4_BLOCKS, _MXFP4_SCALES))
        for name in weights:
            if name + _MXFP4_SCALES not in self._paths:
                raise CheckpointError(
                    f"{self.path_of(name)} holds '{name}{_MXFP4_BLOCKS}', but no file '{name}{_MXFP4_SCALES}'."
                )

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        if name + _MXFP4_BLOCKS not in self._weight_of:
            return super().shape(name)
        blocks = super().shape(name + _MXFP4_BLOCKS)
        if len(blocks) != 4 or blocks[-1] != _MXFP4_GROUP // 2:
            raise self._wrong_shapes(name)
        experts, out, groups, _ = blocks
        return (experts, groups * _MXFP4_GROUP, out)

    def read(self, name: str, slices: Slices | None = None) -> torch.Tensor:
        """Read a tensor or a slice of it; of MXFP4 weights, only the groups of the slice are read, expert by expert."""
        if name + _MXFP4_BLOCKS not in self._weight_of:
            return super().read(name, slices)
        shape = self.shape(name)
        *groups_of_blocks, _ = super().shape(name + _MXFP4_BLOCKS)
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
            blocks = super().read(name + _MXFP4_BLOCKS, (expert_slice, columns, groups, slice(0, _MXFP4_GROUP // 2)))
            scales = super().read(name + _MXFP4_SCALES, (expert_slice, columns, groups))
            if blocks.dtype != torch.uint8 or scales.dtype != torch.uint8:
                raise self._wrong_shapes(name)
            values = dequantize_mxfp4(blocks[0], scales[0])  # [out, elements of the groups]
            weight[index] = values[:, rows_of_groups].t()
        return weight

    def _wrong_shapes(self, name: str) -> CheckpointError:
        blocks = self._file(name + _MXFP4_BLOCKS).get_slice(name + _MXFP4_BLOCKS)
        scales = self._file(name + _MXFP4_SCALES).get_slice(name + _MXFP4_SCALES)
        return CheckpointError(
            f"{self.path_of(name)}: '{name}{_MXFP4_BLOCKS}' {blocks.get_shape()} of {blocks.get_dtype()} and "
            f"'{name}{_MXFP4_SCALES}' {scales.get_shape()} of {scales.get_dtype()} are not [experts, out, groups, "
            f"{_MXFP4_GROUP // 2}] and [experts, out, groups] of U8: download the file again."
        )


class TextDecoderFiles(WeightFiles):
    """The text decoder of a larger checkpoint, with the names of a text-only checkpoint.

    Args:
        files: checkpoint of a multimodal model, or of a decoder with weights that are not trained.
        prefixes: from :func:`torchtune.models.text_prefixes`: prefix of a text-only checkpoint -> prefix in ``files``;
            ``{"": ""}`` for a decoder with weights that are not trained.
        untrained: names (as in a text-only checkpoint) of tensors to omit.

    Attributes:
        prefixes: see Args.
        is_multimodal: whether there are other towers.
    """

    def __init__(self, files: WeightFiles, prefixes: Mapping[str, str], untrained: Collection[str] = ()) -> None:
        self.prefixes = dict(prefixes)
        self.is_multimodal = self.prefixes != _NO_PREFIX
        self._files = files
        text_prefix_of = {composite: text for text, composite in prefixes.items()}
        self._composite_names: dict[str, str] = {}  # name of a text-only checkpoint -> name in the files
        for composite_name in files.names():
            if composite_name.startswith(tuple(text_prefix_of)):
                name = rename_prefix(composite_name, text_prefix_of)
                if name not in untrained:
                    self._composite_names[name] = composite_name

    def names(self) -> list[str]:
        """Return the names of the text decoder's tensors, file by file."""
        return list(self._composite_names)

    def path_of(self, name: str) -> Path:
        """Return the file of a tensor."""
        return self._files.path_of(self._composite_names[name])

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        return self._files.shape(self._composite_names[name])

    def read(self, name: str, slices: Slices | None = None) -> torch.Tensor:
        """Read a tensor or a slice of it, backed by the file: copy it before changing it."""
        return self._files.read(self._composite_names[name], slices)

    def other_names(self) -> list[str]:
        """Return the names in the files of all other tensors: other towers, and weights that are not trained."""
        decoder_names = set(self._composite_names.values())
        return [name for name in self._files.names() if name not in decoder_names]

    def read_other(self, name: str) -> torch.Tensor:
        """Read one of :meth:`other_names`."""
        return self._files.read(name)


def open_weight_files(paths: Sequence[Path], model: nn.Module | None = None) -> WeightFiles:
    """Open safetensors or torch files; for a multimodal model, only the text decoder unless ``model`` is composite.

    Args:
        paths: the files, of one format.
        model: the model to load; weights that it does not train, such as weights for multi-token prediction, are
            omitted.

    Raises:
        CheckpointError: formats are mixed or unknown, or a file is invalid.
    """
    files = _open_format(paths)
    spec = getattr(model, "spec", None)
    is_composite = spec is not None and spec.builder is not None
    prefixes = {}
    decoder_files = files
    if not is_composite:
        prefixes = text_prefixes(files.names())
        if prefixes:
            decoder_files = TextDecoderFiles(files, prefixes)
    if spec is None:
        return decoder_files
    untrained = spec.untrained_names(decoder_files.names(), model.description)
    if not untrained:
        return decoder_files
    return TextDecoderFiles(files, prefixes or _NO_PREFIX, untrained)


def _open_format(paths: Sequence[Path]) -> WeightFiles:
    """Open weight files by their suffix, and safetensors files by the suffixes of their tensors."""
    suffixes = {path.suffix for path in paths}
    if suffixes == {".safetensors"}:
        files = SafetensorsFiles(paths)
        names = files.names()
        has_blocks = any(".experts." in name and name.endswith(_MXFP4_BLOCKS) for name in names)
        has_scales = any(name.endswith((_FLOAT8_SCALE, f".weight{SCALE}")) for name in names)
        if not has_blocks and not has_scales:
            return files
        return Mxfp4Files(paths) if has_blocks else ScaledFiles(paths)
    if suffixes <= set(TORCH_SUFFIXES):
        return TorchFiles(paths)
    raise CheckpointError(
        f"checkpoint_files: {', '.join(sorted(suffixes))} files cannot be read (together): give safetensors files, one "
        "GGUF file, or torch files."
    )


def safe_torch_load(checkpoint_path: str | Path, weights_only: bool = True, mmap: bool = True) -> dict[str, Any]:
    """Load a file of ``torch.save`` onto the CPU.

    Args:
        checkpoint_path: the file.
        weights_only: only load tensors, containers and numbers; otherwise the pickle can run code.
        mmap: memory-map the file, so that tensors are read on use; not for files older than torch 1.6.

    Raises:
        CheckpointError: the file is missing, corrupt, holds no dict, or needs to run code.
    """
    path = Path(checkpoint_path)
    check_exists(path)
    try:
        contents = torch.load(
            path, map_location="cpu", mmap=mmap and zipfile.is_zipfile(path), weights_only=weights_only
        )
    except Exception as error:  # reading a damaged pickle raises any kind of error
        reason = first_line(error).partition(". ")[0]  # torch goes on with advice for its own callers
        if isinstance(error, pickle.UnpicklingError):  # torch's message advises to run the code
            reason = "it is damaged, or holds more than tensors, which could run code when it is read"
        raise CheckpointError(
            f"{path} cannot be read as a file of tensors ({reason}): download it again, or convert it to safetensors."
        ) from error
    if not isinstance(contents, dict):
        raise CheckpointError(f"{path} holds a {type(contents).__name__} where a dict of tensors is expected.")
    return contents


def read_json(path: Path) -> dict:
    """Read a JSON object from a file.

    Raises:
        CheckpointError: the file cannot be read, or is not a JSON object.
    """
    return utils.read_json(path, CheckpointError)


def check_exists(path: Path) -> None:
    """Raise ``CheckpointError`` if there is no file ``path``; the message lists similar files of its folder."""
    if path.is_file():
        return
    similar = sorted(sibling.name for sibling in path.parent.glob(f"*{path.suffix}"))
    if similar:
        hint = f"the folder holds {', '.join(similar[:4])}"
    elif path.parent.is_dir():
        hint = f"{path.parent} holds no {path.suffix} file"
    else:
        hint = f"the folder {path.parent} does not exist"
    raise CheckpointError(f"There is no file {path} ({hint}): check checkpoint_dir and checkpoint_files.")


class FormattedCheckpointFiles:
    """Names of numbered shard files from a pattern.

    Args:
        filename_format: pattern with two ``{}``, the number of the shard and the number of shards, for example
            ``model-{}-of-{}.safetensors``.
        max_filename: number of shards as written in file names, for example ``"00004"``.

    Raises:
        CheckpointError: the pattern or the number is malformed.

    Example:
        >>> files = torchtune.checkpoints.FormattedCheckpointFiles("model-{}-of-{}.safetensors", "2")
        >>> files.build_checkpoint_filenames()
        ['model-1-of-2.safetensors', 'model-2-of-2.safetensors']
    """

    def __init__(self, filename_format: str, max_filename: str) -> None:
        if filename_format.count("{}") != 2:
            raise CheckpointError(
                f"checkpoint_files: filename_format '{filename_format}' must hold {{}} exactly twice, "
                "as in model-{}-of-{}.safetensors."
            )
        if not isinstance(max_filename, str) or not max_filename.isdecimal() or len(max_filename) > 6:
            raise CheckpointError(
                f"checkpoint_files: max_filename {max_filename!r} must be up to 6 digits in quotes, like '00004'."
            )
        self.filename_format = filename_format
        self.max_filename = max_filename

    @classmethod
    def from_dict(cls, d: Mapping[str, Any]) -> "FormattedCheckpointFiles":
        """Build from ``{"filename_format": …, "max_filename": …}``. Raises ``CheckpointError`` if a key is missing."""
        if set(d) != {"filename_format", "max_filename"}:
            raise CheckpointError("checkpoint_files: needs filename_format and max_filename, or a list of names.")
        return cls(d["filename_format"], d["max_filename"])

    def build_checkpoint_filenames(self) -> list[str]:
        """Return all names, in order."""
        width = len(self.max_filename)
        names = []
        for number in range(1, int(self.max_filename) + 1):
            names.append(self.filename_format.format(str(number).zfill(width), self.max_filename))
        return names


def _shards_in_index(index: Path) -> list[str]:
    """Return the names of the shard files in an index, sorted.

    Raises:
        CheckpointError: the index is damaged, or names a file outside of its folder.
    """
    weight_map = read_json(index).get("weight_map")
    names = list(weight_map.values()) if isinstance(weight_map, dict) else []
    if not names or not all(isinstance(name, str) and name for name in names):
        raise CheckpointError(f"{index} is not a valid index of shards (weight_map): download it again.")
    for name in names:
        # Files may be links to other folders, as in the cache of huggingface_hub, but names must not leave the folder.
        is_outside = Path(name).is_absolute() or ".." in Path(name).parts
        if is_outside or "\0" in name or len(name) > 255:
            raise CheckpointError(
                f"{index} lists {name[:255]!r}, which is not a file of this folder: download it again."
            )
    return sorted(set(names))


def find_files(checkpoint_dir: Path) -> list[Path]:
    """Return the weight files of a folder: the files in its index, or of the first matching pattern.

    Raises:
        CheckpointError: the folder is missing, holds no weights, or lacks a file of the index.
    """
    if not checkpoint_dir.is_dir():
        raise CheckpointError(f"checkpoint_dir: there is no folder {checkpoint_dir}: `tune download` makes one.")
    for index in (SAFETENSORS_INDEX, TORCH_INDEX):
        path = checkpoint_dir / index
        if not path.exists():
            continue
        shards = _shards_in_index(path)
        missing = [shard for shard in shards if not (checkpoint_dir / shard).is_file()]
        if missing:
            raise CheckpointError(
                f"{checkpoint_dir} lacks {', '.join(missing[:3])}{' …' if missing[3:] else ''}, {len(missing)} of the "
                f"{len(shards)} shards that {index} lists: download the checkpoint again."
            )
        return [checkpoint_dir / shard for shard in shards]
    # Without an index, in the order of preference: a folder may have the same weights in several formats.
    for pattern in _WEIGHT_FILES:
        paths = sorted(path for path in checkpoint_dir.glob(pattern) if not path.name.startswith("adapter"))
        if pattern == "*.gguf" and len(paths) > 1:
            raise CheckpointError(
                f"checkpoint_dir: {checkpoint_dir} holds {len(paths)} GGUF files ({paths[0].name}, {paths[1].name} …): "
                "name one in checkpoint_files."
            )
        if paths:
            return paths
    if any(checkpoint_dir.glob("adapter_model.*")):
        raise CheckpointError(
            f"checkpoint_dir: {checkpoint_dir} holds an adapter and no model: give the folder of the base model, and "
            "this one as adapter_checkpoint."
        )
    raise CheckpointError(
        f"checkpoint_dir: {checkpoint_dir} holds no weights (*.safetensors, *.gguf, *.bin, *.pth): "
        "give the folder that does."
    )


def resolve_files(checkpoint_dir: Path, checkpoint_files: Sequence[str] | Mapping[str, str] | None) -> list[Path]:
    """Return the paths of the named weight files, or find them."""
    if checkpoint_files is None:
        return find_files(checkpoint_dir)
    if isinstance(checkpoint_files, Mapping):
        checkpoint_files = FormattedCheckpointFiles.from_dict(checkpoint_files).build_checkpoint_filenames()
    if isinstance(checkpoint_files, str):
        checkpoint_files = [checkpoint_files]
    if len(checkpoint_files) == 0:
        raise CheckpointError("checkpoint_files: the list is empty: name the files, or leave the key out.")
    return [checkpoint_dir / name for name in sorted(checkpoint_files)]

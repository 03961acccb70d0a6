"""compressed-tensors: quantized weights in safetensors, which vLLM and ``transformers`` load.

Layout of the package ``compressed-tensors`` (0.20). A weight ``X.weight`` ``[out, in]`` is stored as

- ``pack-quantized``: ``X.weight_packed`` int32 ``[out, ceil(in · bits / 32)]``, elements shifted to be unsigned, the
  first in the lowest bits, with ``X.weight_shape``;
- ``int-quantized``, ``float-quantized``, ``naive-quantized``: ``X.weight`` in int8 or float8;

and ``X.weight_scale``; the weight is the product of the two. There is one scale for the weight (``[]`` or ``[1]``),
per row (``[out]`` or ``[out, 1]``), per group of a row (``[out, groups]``), or per block
(``[ceil(out / rows), ceil(in / columns)]``, with ``block_structure`` in ``config.json``). ``config.json`` has the rest.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from torchtune.checkpoints._checkpoint_error import CheckpointError
from torchtune.checkpoints._safetensors_file import Entry, TensorSlice
from torchtune.checkpoints._sources import SafetensorsFiles
from torchtune.models import Slices
from torchtune.utils import read_json

_PACKED, _SCALE, _SHAPE = "_packed", "_scale", "_shape"
# Unsupported tensors that change the meaning of values and scales: zero points, column orders, second scales.
_UNREAD = ("_zero_point", "_g_idx", "_global_scale")
# Scales for kernels that multiply quantized activations or read quantized KV caches.
_ACTIVATIONS = tuple(
    f"{name}{end}"
    for name in (".input", ".output", ".q", ".k", ".v")
    for end in ("_scale", "_zero_point", "_global_scale", "_scale_ub")
)
_FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "dense")
_STORED = (torch.int8, torch.float8_e4m3fn)
_SCALES = (torch.float32, torch.bfloat16, torch.float16)
_BEFORE = "use the checkpoint before it was quantized"
# Number of rows to unpack at a time.
_ROWS_AT_ONCE = 1024

Quantized = tuple[torch.Tensor, torch.Tensor]  # values and scales


def storage_format(bits: int, dtype: torch.dtype, activations: str | None) -> str:
    """Return the name of the format for weights of this kind."""
    if dtype.is_floating_point:
        return "naive-quantized" if activations is None else "float-quantized"
    return "pack-quantized" if activations is None else "int-quantized"


def quantization_config(
    bits: int, dtype: torch.dtype, group_size: int | None, activations: str | None, ignore: Iterable[str]
) -> dict[str, Any]:
    """Return the field ``quantization_config`` of a ``config.json``.

    Args:
        bits: bits per weight.
        dtype: dtype of the values, int8 or float8.
        group_size: number of neighbors that share a scale; None: one scale per row.
        activations: dtype of inputs, quantized per token: ``"int8"``, ``"float8"`` or None.
        ignore: Hugging Face names of linear layers that are not quantized.
    """
    floating = dtype.is_floating_point
    weights = {"num_bits": bits, "type": "float" if floating else "int", "symmetric": True, "dynamic": False}
    weights |= {"strategy": "channel"} if group_size is None else {"strategy": "group", "group_size": group_size}
    inputs = None
    if activations is not None:
        inputs = {"num_bits": 8, "type": "float" if activations == "float8" else "int"}
        inputs |= {"symmetric": activations == "float8", "dynamic": True, "strategy": "token"}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": storage_format(bits, dtype, activations),
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": sorted(ignore),
        "kv_cache_scheme": None,
    }


def pack(values: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack int8 ``[out, in]`` of ``bits`` (4 or 8) each into int32 ``[out, ceil(in · bits / 32)]``."""
    per_word = 32 // bits
    unsigned = values.to(torch.int32).add_(1 << (bits - 1))
    unsigned = torch.nn.functional.pad(unsigned, (0, -values.shape[1] % per_word)).view(len(values), -1, per_word)
    packed = torch.zeros(unsigned.shape[:2], dtype=torch.int32, device=values.device)
    for place in range(per_word):
        packed |= unsigned[:, :, place] << (place * bits)
    return packed


def unpack(packed: torch.Tensor, bits: int, width: int) -> torch.Tensor:
    """Unpack the result of :func:`pack` into int8 ``[out, width]``."""
    shifts = torch.arange(0, 32, bits, device=packed.device, dtype=torch.int32)
    values = (packed[:, :, None] >> shifts) & ((1 << bits) - 1)
    return (values - (1 << (bits - 1))).to(torch.int8).flatten(1)[:, :width]


def dequantize(values: torch.Tensor, scale: torch.Tensor, columns: int) -> torch.Tensor:
    """Multiply values ``[out, in]`` by scales ``[out, groups]``, one per ``columns`` columns, in the scales' dtype."""
    group = torch.arange(values.shape[1], device=scale.device) // columns
    return values.to(scale.dtype) * scale[:, group]


def quantized_entry(
    name: str,
    spec: torch.Tensor,
    quantize: Callable[[torch.Tensor], Quantized],
    read: Callable[[], torch.Tensor],
    bits: int,
    storage: str,
) -> Entry:
    """Return the entry of the tensors that store one weight.

    Args:
        name: name of the weight; ends in ``.weight``.
        spec: the weight on the meta device, in its dtype.
        quantize: computes values and scales of a weight.
        read: reads the weight.
        bits: bits per value.
        storage: result of :func:`storage_format`.
    """

    def make(weight: torch.Tensor) -> dict[str, torch.Tensor]:
        values, scale = quantize(weight)
        stored = {name: values, name + _SCALE: scale}
        if storage == "pack-quantized":
            shape = torch.tensor(weight.shape, dtype=torch.int64)
            stored = {name + _SHAPE: shape, name + _PACKED: pack(values, bits), name + _SCALE: scale}
        return stored

    # Quantize one row to find the dtypes and widths of the stored tensors.
    row = make(torch.zeros(1, *spec.shape[1:], dtype=spec.dtype))
    shapes = {key: (2,) if key.endswith(_SHAPE) else (len(spec), tensor.shape[1]) for key, tensor in row.items()}
    specs = {key: torch.empty(shapes[key], dtype=row[key].dtype, device="meta") for key in row}

    def slices() -> list[TensorSlice]:
        return [TensorSlice.of(key, tensor.cpu()) for key, tensor in make(read()).items()]

    return Entry(specs, slices)


class CompressedFiles(SafetensorsFiles):
    """Safetensors files with quantized weights, which are dequantized when they are read.

    Raises:
        CheckpointError: a weight is stored in an unsupported way.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        super().__init__(paths)
        self._block = _block_structure(paths[0].parent / "config.json")
        scales = [name for name in self._paths if name.endswith(".weight" + _SCALE)]
        self._weights = {name.removesuffix(_SCALE): name for name in scales}
        for name, scale in self._weights.items():
            lacks = [name + end for end in (_PACKED, _SHAPE) if name + end not in self._paths]
            extra = [name + end for end in _UNREAD if name + end in self._paths]
            if extra or (lacks and name not in self._paths):
                found = f"there is '{extra[0]}'" if extra else f"there is no '{lacks[0]}'"
                raise CheckpointError(
                    f"{self._paths[scale]}: '{name}' is quantized in a way that cannot be read ({found}): {_BEFORE}."
                )

    def names(self) -> list[str]:
        """Return all names, file by file; a quantized weight counts once, activation scales are omitted."""
        parts = {name + end: name for name in self._weights for end in (_PACKED, _SCALE, _SHAPE)}
        return list(dict.fromkeys(parts.get(name, name) for name in self._paths if not name.endswith(_ACTIVATIONS)))

    def where(self, name: str) -> Path:
        """Return the file of a tensor, or of its scales."""
        return super().where(self._weights.get(name, name))

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        if name in self._weights and name not in self._paths:
            return tuple(super().read(name + _SHAPE).tolist())
        return super().shape(name)

    def read(self, name: str, slices: Slices | None = None) -> torch.Tensor:
        """Read a tensor or a slice of it; of a quantized weight, only the rows of the slice are read."""
        if name not in self._weights:
            return super().read(name, slices)
        shape = self.shape(name)
        scale, (height, width) = self._scales(name, shape)
        rows, columns = slices or tuple(slice(0, size) for size in shape)
        made = [scale.new_empty(0, shape[1])]
        for start in range(rows.start, rows.stop, _ROWS_AT_ONCE):
            stop = min(start + _ROWS_AT_ONCE, rows.stop)
            of_rows = scale[torch.arange(start, stop) // height]
            made.append(dequantize(self._values(name, slice(start, stop), shape[1]), of_rows, width)[:, columns])
        return torch.cat(made[1:] or made)

    def _values(self, name: str, rows: slice, width: int) -> torch.Tensor:
        """Read the quantized values ``[rows, in]`` of a weight with ``width`` columns."""
        stored = name if name in self._paths else name + _PACKED
        columns = super().shape(stored)[1]
        values = super().read(stored, (rows, slice(0, columns)))
        if stored == name and values.dtype in _STORED:
            return values
        bits = next((bits for bits in (4, 8) if math.ceil(width * bits / 32) == columns), None)
        if stored == name or values.dtype != torch.int32 or bits is None:
            raise CheckpointError(
                f"{self.where(name)}: '{stored}' holds {columns} columns of {values.dtype} for the {width} of a "
                f"quantized weight, which cannot be read: {_BEFORE}."
            )
        return unpack(values, bits, width)

    def _scales(self, name: str, shape: tuple[int, ...]) -> tuple[torch.Tensor, tuple[int, int]]:
        """Read the scales ``[blocks of rows, groups of columns]`` of a weight; return them and the size of a block."""
        scale = super().read(name + _SCALE)
        two = scale.view(1, 1) if scale.numel() == 1 else scale.unsqueeze(1) if scale.dim() == 1 else scale
        sizes = [shape] if scale.numel() == 1 else [(1, shape[-1] // max(two.shape[1], 1)), self._block]
        for size in sizes if len(shape) == two.dim() == 2 and scale.dtype in _SCALES else ():
            if (
                size is not None
                and all(size)
                and two.shape == tuple(-(-n // of) for n, of in zip(shape, size, strict=True))
            ):
                return two, size
        blocks = f", block_structure {list(self._block)}" if self._block else ""
        raise CheckpointError(
            f"{self.where(name)}: '{name}{_SCALE}' {list(scale.shape)} of {scale.dtype} does not fit the shape "
            f"{list(shape)} of the weight{blocks}: {_BEFORE}."
        )


def _block_structure(config: Path) -> tuple[int, int] | None:
    """Return rows and columns of the blocks that share a scale, if there are any.

    Raises:
        CheckpointError: ``quantization_config`` in ``config.json`` has an unsupported value.
    """
    found = read_json(config, CheckpointError).get("quantization_config") if config.is_file() else None
    said, blocks = {} if found is None else found, set()

    def check(path: str, value: Any, known: Sequence[Any]) -> None:
        if value not in known:
            raise CheckpointError(f"{config}: quantization_config{path} is {value!r}, which cannot be read: {_BEFORE}.")

    def fields(path: str, value: Any) -> dict[str, Any]:
        check(path, value, [value] if isinstance(value, dict) else [])
        return value

    fields("", said)
    check(".quant_method", said.get("quant_method"), (None, "compressed-tensors", "fp8", "fbgemm_fp8"))
    check(".format", said.get("format"), (None, *_FORMATS, "mixed-precision"))
    check(".transform_config", said.get("transform_config"), (None, {}))
    sparsity = fields(".sparsity_config", said.get("sparsity_config") or {})
    check(".sparsity_config.format", sparsity.get("format"), (None, "dense"))
    for name, group in fields(".config_groups", said.get("config_groups") or {}).items():
        start = f".config_groups.{name}"
        check(f"{start}.format", fields(start, group).get("format"), (None, *_FORMATS))
        weights = fields(f"{start}.weights", group.get("weights") or {})
        kind, storage = weights.get("type", "int"), group.get("format") or said.get("format")
        check(f"{start}.weights.type", kind, ("int",) if storage == "pack-quantized" else ("int", "float"))
        check(f"{start}.weights.num_bits", weights.get("num_bits", 8), (4, 8) if kind == "int" else (8,))
        check(f"{start}.weights.symmetric", weights.get("symmetric", True), (True,))
        check(f"{start}.weights.actorder", weights.get("actorder"), (None, False, "weight", "static"))
        check(f"{start}.weights.strategy", weights.get("strategy"), (None, "tensor", "channel", "group", "block"))
        if (block := weights.get("block_structure")) is not None:
            is_pair = (
                isinstance(block, list) and len(block) == 2 and all(type(n) is int and 0 < n < 2**20 for n in block)
            )
            check(f"{start}.weights.block_structure", block, [block] if is_pair else [])
            blocks.add(tuple(block))
    if len(blocks) > 1:
        raise CheckpointError(f"{config}: quantization_config has blocks of {len(blocks)} sizes: {_BEFORE}.")
    return next(iter(blocks), None)


def is_compressed(names: Iterable[str]) -> bool:
    """Return whether tensors with these names store quantized weights."""
    return any(name.endswith(".weight" + _SCALE) for name in names)

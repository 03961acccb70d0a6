"""compressed-tensors: quantised weights in safetensors, which vLLM and ``transformers`` load.

Layout, by the package ``compressed-tensors`` (0.20): a weight ``X.weight`` ``[out, in]`` is stored

- ``pack-quantized``: as ``X.weight_packed`` int32 ``[out, ceil(in · bits / 32)]``, elements shifted to be unsigned, the
  first in the lowest bits, with ``X.weight_shape``;
- ``int-quantized``, ``float-quantized``, ``naive-quantized``: as ``X.weight`` in int8 or float8;

and ``X.weight_scale`` ``[out, groups]``: the weight is the product of the two. ``config.json`` says the rest.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from torchtune.models import Slices
from torchtune.training.checkpointing._errors import CheckpointError
from torchtune.training.checkpointing._safetensors_file import Entry, TensorSlice
from torchtune.training.checkpointing._sources import SafetensorsFiles

_PACKED, _SCALE, _SHAPE, _ZERO = "_packed", "_scale", "_shape", "_zero_point"
# Rows that are unpacked at a time.
_ROWS_AT_ONCE = 1024

Quantized = tuple[torch.Tensor, torch.Tensor]  # values and scales


def storage_format(bits: int, dtype: torch.dtype, activations: str | None) -> str:
    """The name of the format that stores weights of this kind."""
    if dtype.is_floating_point:
        return "naive-quantized" if activations is None else "float-quantized"
    return "pack-quantized" if activations is None else "int-quantized"


def quantization_config(
    bits: int, dtype: torch.dtype, group_size: int | None, activations: str | None, ignore: Iterable[str]
) -> dict[str, Any]:
    """The field ``quantization_config`` of a ``config.json``.

    Args:
        bits: of a weight.
        dtype: of its values, int8 or float8.
        group_size: neighbours that share a scale; None for all of a row.
        activations: how inputs are quantised, each token with a range of its own: ``"int8"``, ``"float8"`` or None.
        ignore: Hugging Face's names of linear layers that are not quantised.
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
    """int8 ``[out, in]`` of ``bits`` (4 or 8) each -> int32 ``[out, ceil(in · bits / 32)]``."""
    per_word = 32 // bits
    unsigned = values.to(torch.int32).add_(1 << (bits - 1))
    unsigned = torch.nn.functional.pad(unsigned, (0, -values.shape[1] % per_word)).view(len(values), -1, per_word)
    packed = torch.zeros(unsigned.shape[:2], dtype=torch.int32, device=values.device)
    for place in range(per_word):
        packed |= unsigned[:, :, place] << (place * bits)
    return packed


def unpack(packed: torch.Tensor, bits: int, width: int) -> torch.Tensor:
    """The inverse of :func:`pack`: int8 ``[out, width]``."""
    shifts = torch.arange(0, 32, bits, device=packed.device, dtype=torch.int32)
    values = (packed[:, :, None] >> shifts) & ((1 << bits) - 1)
    return (values - (1 << (bits - 1))).to(torch.int8).flatten(1)[:, :width]


def dequantize(values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Values ``[out, in]`` times scales ``[out, groups]``, in the dtype of the scales."""
    groups = values.to(scale.dtype).unflatten(1, (scale.shape[1], -1))
    return (groups * scale[:, :, None]).flatten(1)


def quantized_entry(
    name: str,
    spec: torch.Tensor,
    quantize: Callable[[torch.Tensor], Quantized],
    read: Callable[[], torch.Tensor],
    bits: int,
    storage: str,
) -> Entry:
    """The tensors that store one weight.

    Args:
        name: of the weight, ends in ``.weight``.
        spec: the weight on the meta device, in its dtype.
        quantize: makes values and scales of it.
        read: reads it.
        bits: of a value.
        storage: from :func:`storage_format`.
    """

    def make(weight: torch.Tensor) -> dict[str, torch.Tensor]:
        values, scale = quantize(weight)
        stored = {name: values, name + _SCALE: scale}
        if storage == "pack-quantized":
            shape = torch.tensor(weight.shape, dtype=torch.int64)
            stored = {name + _SHAPE: shape, name + _PACKED: pack(values, bits), name + _SCALE: scale}
        return stored

    # One row tells the dtypes and widths of what is stored.
    row = make(torch.zeros(1, *spec.shape[1:], dtype=spec.dtype))
    shapes = {key: (2,) if key.endswith(_SHAPE) else (len(spec), tensor.shape[1]) for key, tensor in row.items()}
    specs = {key: torch.empty(shapes[key], dtype=row[key].dtype, device="meta") for key in row}

    def slices() -> list[TensorSlice]:
        return [TensorSlice.of(key, tensor.cpu()) for key, tensor in make(read()).items()]

    return Entry(specs, slices)


class CompressedFiles(SafetensorsFiles):
    """Safetensors files of which some weights are quantised: these read as the values that they stand for.

    Raises:
        CheckpointError: a weight is stored in a way that cannot be read.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        super().__init__(paths)
        scales = [name for name in self._paths if name.endswith(".weight" + _SCALE)]
        self._weights = {name.removesuffix(_SCALE): name for name in scales}
        for name, scale in self._weights.items():
            if name + _ZERO in self._paths or (name not in self._paths and name + _PACKED not in self._paths):
                raise CheckpointError(
                    f"{self._paths[scale]}: '{name}' is quantised with zero points, or in a format that cannot be "
                    "read: use the checkpoint before it was quantised."
                )

    def names(self) -> list[str]:
        """Names of all tensors, file by file; what stores a weight is one."""
        parts = {name + end: name for name in self._weights for end in (_PACKED, _SCALE, _SHAPE)}
        return list(dict.fromkeys(parts.get(name, name) for name in self._paths))

    def where(self, name: str) -> Path:
        """File that holds a tensor, or its scales."""
        return super().where(self._weights.get(name, name))

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor."""
        if name in self._weights and name not in self._paths:
            return tuple(super().read(name + _SHAPE).tolist())
        return super().shape(name)

    def read(self, name: str, slices: Slices | None = None) -> torch.Tensor:
        """A tensor or a part of it; of a quantised one the rows that the part needs are read."""
        if name not in self._weights:
            return super().read(name, slices)
        shape = self.shape(name)
        rows, columns = slices or tuple(slice(0, size) for size in shape)
        scale_width = super().shape(name + _SCALE)[1]
        scale = super().read(name + _SCALE, (rows, slice(0, scale_width)))
        if name in self._paths:
            return dequantize(super().read(name, (rows, slice(0, shape[1]))), scale)[:, columns]
        width = super().shape(name + _PACKED)[1]
        bits = next((bits for bits in (4, 8) if math.ceil(shape[1] * bits / 32) == width), None)
        if bits is None:
            raise CheckpointError(f"{self.where(name)}: '{name}' is packed in {width} words a row, not in 4 or 8 bits.")
        packed = super().read(name + _PACKED, (rows, slice(0, width)))
        made = [
            dequantize(unpack(part, bits, shape[1]), of)[:, columns]
            for part, of in zip(packed.split(_ROWS_AT_ONCE), scale.split(_ROWS_AT_ONCE), strict=True)
        ]
        return torch.cat(made)


def is_compressed(names: Iterable[str]) -> bool:
    """Whether tensors of these names store quantised weights."""
    return any(name.endswith(".weight" + _SCALE) for name in names)

"""Block-scaled float8 weights, the published format of DeepSeek V3, MiniMax-M2 and Mistral Small 4.

Files hold a weight ``X`` ``[…, out, in]`` in float8 and ``X_scale_inv`` ``[…, ceil(out / rows), ceil(in / columns)]``,
with the block size ``weight_block_size`` of ``config.json`` (128 x 128), or one scale per matrix. The weight is the
product of the two. Scales of activations are for float8 kernels and are not read.
"""

import math
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from torchtune.checkpoints._checkpoint_error import CheckpointError
from torchtune.checkpoints._sources import SafetensorsFiles
from torchtune.models import Slices
from torchtune.utils import read_json

_SCALE, _ACTIVATIONS = "_scale_inv", ("activation_scale", "input_scale")
_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
# Number of elements converted to float32 at a time.
_AT_ONCE = 2**22

Blocks = tuple[int, int]


def dequantize_fp8(values: torch.Tensor, scales: torch.Tensor, blocks: Blocks, first: Blocks = (0, 0)) -> torch.Tensor:
    """Multiply values by the scales of their blocks, in float32.

    Args:
        values: float8 ``[rows, columns]``, a slice of a matrix.
        scales: scales of the blocks that overlap the slice, in any floating-point dtype.
        blocks: rows and columns of a block.
        first: row and column of the slice's first element in its block.

    Returns:
        bfloat16 ``[rows, columns]``.
    """
    row, column = (
        torch.arange(begin, begin + size, device=values.device) // block
        for begin, size, block in zip(first, values.shape, blocks, strict=True)
    )
    out = torch.empty(values.shape, dtype=torch.bfloat16, device=values.device)
    scales, rows = scales.float(), max(_AT_ONCE // max(values.shape[1], 1), 1)
    for part, target, of in zip(values.split(rows), out.split(rows), row.split(rows), strict=True):
        target.copy_(part.float() * scales[of][:, column])
    return out


class Fp8Files(SafetensorsFiles):
    """Safetensors files with float8 weights, which are read as bfloat16.

    Raises:
        CheckpointError: a weight is stored in an unsupported way.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        super().__init__(paths)
        self._scaled = {name.removesuffix(_SCALE) for name in self._paths if name.endswith(_SCALE)}
        for name in self._scaled - self._paths.keys():
            raise CheckpointError(
                f"{self._paths[name + _SCALE]} holds '{name}{_SCALE}', but no file holds '{name}': download it again."
            )
        self._block = _block_size(paths[0].parent / "config.json")

    def names(self) -> list[str]:
        """Return the names of all tensors, file by file, without scales."""
        scales = {name + _SCALE for name in self._scaled}
        return [name for name in self._paths if name not in scales and not name.endswith(_ACTIVATIONS)]

    def read(self, name: str, slices: Slices | None = None) -> torch.Tensor:
        """Read a tensor or a slice of it; a float8 weight is dequantized."""
        if name not in self._scaled:
            return super().read(name, slices)
        shape = self.shape(name)
        blocks = self._blocks_of(name, shape)
        *experts, rows, columns = slices or tuple(slice(0, size) for size in shape)
        ends = zip((rows, columns), blocks, strict=True)
        meets = [slice(part.start // size, -(-part.stop // size)) for part, size in ends]
        first = (rows.start % blocks[0], columns.start % blocks[1])
        values, scales = super().read(name, slices), super().read(name + _SCALE)
        if values.dtype not in _FLOAT8:
            raise CheckpointError(
                f"{self.where(name)}: '{name}' has scales, but its dtype is {values.dtype}, not a float8: use the "
                "checkpoint before it was quantized."
            )
        whole = scales.view(scales.shape if scales.dim() == len(shape) else (*shape[:-2], 1, 1))
        scales = whole[(*experts, *meets)]
        if not experts:
            return dequantize_fp8(values, scales, blocks, first)
        pairs = zip(values, scales, strict=True)
        return torch.stack([dequantize_fp8(*pair, blocks, first) for pair in pairs])

    def _blocks_of(self, name: str, shape: tuple[int, ...]) -> Blocks:
        """Return the block size of a weight, which must match the shape of its scales."""
        found = super().shape(name + _SCALE)
        expected = (*shape[:-2], *(-(-size // block) for size, block in zip(shape[-2:], self._block, strict=False)))
        if len(shape) > 1 and math.prod(found) == math.prod(shape[:-2]):  # one scale per matrix
            return shape[-2], shape[-1]
        if len(shape) > 1 and found == expected:
            return self._block
        raise CheckpointError(
            f"{self.where(name)}: '{name}{_SCALE}' has the shape {list(found)}, where blocks of {self._block[0]} x "
            f"{self._block[1]} of {list(shape)} need {list(expected)}: use the checkpoint before it was quantized."
        )


def _block_size(config: Path) -> Blocks:
    """Return ``weight_block_size`` of a ``config.json``; 128 × 128 by default."""
    said = (read_json(config, CheckpointError) if config.is_file() else {}).get("quantization_config") or {}
    size = (said.get("weight_block_size") if isinstance(said, dict) else None) or [128, 128]
    if not isinstance(size, list) or len(size) != 2 or not all(isinstance(n, int) and 0 < n < 2**20 for n in size):
        raise CheckpointError(f"{config} has weight_block_size = {size!r}, where two sizes are expected: correct it.")
    return size[0], size[1]


def has_fp8(names: Iterable[str]) -> bool:
    """Return whether tensors with these names are scales of float8 weights."""
    return any(name.endswith(_SCALE) for name in names)

"""MXFP4 weights: four bits per weight, with one power-of-two scale per 32 weights of a row.

The format is that of the Open Compute Project's "Microscaling Formats (MX) Specification" 1.0: elements E2M1, two per
byte, low nibble first; scales E8M0, ``2 ** (scale - 127)``. Files hold a weight ``X`` as ``X_blocks`` uint8
``[e, out, in / 32, 16]`` and ``X_scales`` uint8 ``[e, out, in / 32]``, which decode to matrices ``[e, in, out]``.
"""

import math
from collections.abc import Sequence
from pathlib import Path

import torch

from torchtune.checkpoints._checkpoint_error import CheckpointError
from torchtune.checkpoints._sources import SafetensorsFiles
from torchtune.models import Slices

_BLOCKS, _SCALES = "_blocks", "_scales"
_GROUP = 32
_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# Number of elements converted to float32 at a time.
_AT_ONCE = 2**22


def dequantize_mxfp4(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Dequantize MXFP4 exactly (except for scales beyond bfloat16's range of exponents).

    Args:
        blocks: uint8 ``[…, groups, 16]``.
        scales: uint8 ``[…, groups]``.

    Returns:
        bfloat16 ``[…, groups * 32]``.
    """
    values = torch.tensor([*_VALUES, *(-value for value in _VALUES)], device=blocks.device)
    out = torch.empty(*scales.shape, _GROUP, dtype=torch.bfloat16, device=blocks.device)
    flat = blocks.reshape(-1, _GROUP // 2), scales.flatten(), out.view(-1, _GROUP)
    for bytes_, scale, part in zip(*(tensor.split(_AT_ONCE // _GROUP) for tensor in flat), strict=True):
        pairs = torch.stack([bytes_ & 0xF, bytes_ >> 4], -1).flatten(1)
        part.copy_(torch.ldexp(values[pairs.int()], scale.int().sub_(127)[:, None]))
    return out.flatten(-2)


class Mxfp4Files(SafetensorsFiles):
    """Safetensors files with MXFP4 weights, which are read as bfloat16.

    Raises:
        CheckpointError: blocks have no scales.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        super().__init__(paths)
        self._packed = {
            name.removesuffix(_BLOCKS): name for name in self._paths if name.endswith(_BLOCKS) and ".experts." in name
        }
        for name, blocks in self._packed.items():
            if name + _SCALES not in self._paths:
                raise CheckpointError(f"{self._paths[blocks]} holds '{blocks}', but no file '{name}{_SCALES}'.")

    def names(self) -> list[str]:
        """Return the names of all tensors, file by file; blocks and scales count as one."""
        parts = {name + end: name for name in self._packed for end in (_BLOCKS, _SCALES)}
        return list(dict.fromkeys(parts.get(name, name) for name in self._paths))

    def where(self, name: str) -> Path:
        """Return the file of a tensor, or of its blocks."""
        return super().where(self._packed.get(name, name))

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        if name not in self._packed:
            return super().shape(name)
        *experts, out, groups, _ = super().shape(name + _BLOCKS)
        return (*experts, groups * _GROUP, out)

    def read(self, name: str, slices: Slices | None = None) -> torch.Tensor:
        """Read a tensor or a slice of it; of MXFP4 weights, only the groups of the slice are read, expert by expert."""
        if name not in self._packed:
            return super().read(name, slices)
        experts, rows, columns = slices or tuple(slice(0, size) for size in self.shape(name))
        groups = slice(rows.start // _GROUP, math.ceil(rows.stop / _GROUP))
        inside = slice(rows.start - groups.start * _GROUP, rows.stop - groups.start * _GROUP)
        sizes = (part.stop - part.start for part in (experts, rows, columns))
        result = torch.empty(*sizes, dtype=torch.bfloat16)
        for number, expert in enumerate(range(experts.start, experts.stop)):
            one = slice(expert, expert + 1)
            blocks = super().read(name + _BLOCKS, (one, columns, groups, slice(0, _GROUP // 2)))
            scales = super().read(name + _SCALES, (one, columns, groups))
            result[number] = dequantize_mxfp4(blocks[0], scales[0])[:, inside].t()
        return result


def has_mxfp4(names: Sequence[str]) -> bool:
    """Return whether tensors with these names include MXFP4 blocks."""
    return any(".experts." in name and name.endswith(_BLOCKS) for name in names)

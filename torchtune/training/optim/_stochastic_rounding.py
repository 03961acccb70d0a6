"""Stochastic rounding from float32 to bfloat16, with an exact mean.

bfloat16 is the upper half of a float32. Between two neighbors ``a < x < b`` the result is ``b`` with probability
``(x - a) / (b - a)``: its expectation is ``x``, so updates far below the spacing of bfloat16 take effect with the right
frequency instead of never. In bits: add a uniform 16-bit number and drop the lower half.

The 16 bits come from a counter-based generator: a hash of (seed, step, parameter name, position of the element in the
full tensor), from which the weight and each optimizer state take other bits. It has no state, so a resumed run
continues bit for bit, and it does not depend on the mesh: one process, replicas and shards round the same element
alike. All operations are elementwise on int32, so that a compiler can fuse them with the optimizer's arithmetic.
"""

import hashlib
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from torchtune.training.parallel._shards import my_shard
from torchtune.utils import computes_on_cpu

_UPPER_HALF = -65536  # 0xFFFF0000 as int32
# Fractional part of the golden ratio: consecutive positions get distant numbers.
_GOLDEN = -1640531527  # 0x9E3779B1 as int32


def hash_text(text: str) -> int:
    """Hash a text into a signed 32-bit integer."""
    digest = hashlib.blake2b(text.encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little", signed=True)


def rounding_key(seed: int, step: int) -> int:
    """Return the part of the counter that all elements of a step share, a signed 32-bit integer."""
    return hash_text(f"{seed}/{step}")


def element_ids(positions: Tensor, name_hash: int | Tensor) -> Tensor:
    """Return the part of the counter that distinguishes elements, int32 in the shape of ``positions``.

    Args:
        positions: int32, of the elements in the full tensor.
        name_hash: hash of the parameter's name.
    """
    return positions * _GOLDEN + name_hash


def random_bits(ids: Tensor, key: int | Tensor) -> Tensor:
    """Return uniform 32-bit numbers, int32 in the shape of ``ids``.

    The mixing function is ``lowbias32`` (C. Wellons, "Prospecting for Hash Functions"). Multiplications wrap around.
    Shifts of int32 copy the sign, so they are masked.
    """
    bits = ids ^ key
    # Each line makes the lower bits depend on the upper ones (shift) or the upper on the lower (product).
    bits = bits ^ ((bits >> 16) & 0xFFFF)
    bits = bits * 0x7FEB352D
    bits = bits ^ ((bits >> 15) & 0x1FFFF)
    bits = bits * -2073254261  # 0x846CA68B as int32
    return bits ^ ((bits >> 16) & 0xFFFF)


def rounding_noise(bits: Tensor, draw: int) -> Tensor:
    """Return uniform integers from 0 to 65535, int32 in the shape of ``bits``.

    Args:
        bits: from :func:`random_bits`.
        draw: number of the tensor among those of a parameter: 0 for the weights, from 1 on for the states. The first
            two are halves of ``bits``, the others are mixed from all of them.
    """
    if draw == 0:
        return (bits >> 16) & 0xFFFF
    if draw == 1:
        return bits & 0xFFFF
    mixed = bits * (_GOLDEN + 2 * draw)  # by an odd number, so that no information is lost
    return (mixed >> 16) & 0xFFFF


def round_to_bfloat16(values: Tensor, noise: Tensor) -> Tensor:
    """Round stochastically to numbers that bfloat16 represents; zeros, infinities and NaN do not change.

    Args:
        values: float32, contiguous.
        noise: from :func:`rounding_noise`, in the shape of ``values``.

    Returns:
        float32, in the shape of ``values``. Inductor has no vectorized cast of int16 to bfloat16.
    """
    if not computes_on_cpu(values.device):
        # NaN of other devices has all bits set and would wrap around to -0.
        noise = torch.where(values != values, 0, noise)
    # The noise carries into the upper half with the probability that the value rounds up.
    bits = (values.view(torch.int32) + noise) & _UPPER_HALF
    return bits.view(torch.float32)


def spread_within_rounding(values: Tensor, noise: Tensor) -> Tensor:
    """Move each value, which bfloat16 represents, to a random float32 number that rounds to it.

    Args:
        values: float32, contiguous; zeros and non-finite values do not change.
        noise: from :func:`rounding_noise`, in the shape of ``values``.

    Returns:
        float32, in the shape of ``values``.
    """
    offset = noise.clamp(min=1) - 2**15  # from 1 - 2**15 to 2**15 - 1: never a tie
    is_kept = (values == 0) | ~values.isfinite()
    offset = torch.where(is_kept, 0, offset)
    bits = values.view(torch.int32) + offset
    return bits.view(torch.float32)


class ElementIds:
    """Ids of the elements of a parameter's shard: from its name, and from their positions in the full tensor.

    Positions count elements in row-major order. They are int32 and wrap around: elements that are 2**32 apart in a
    tensor share their noise, which biases neither of them.

    Attributes:
        name_hash: hash of the parameter's name.
        is_run: whether the positions are consecutive, as in a whole tensor or in FSDP's shards of rows.

    Args:
        parameter: parameter of this rank, possibly sharded.
        name: name of the parameter.
    """

    def __init__(self, parameter: Tensor, name: str) -> None:
        self.name_hash = hash_text(name)
        self._shape = list(parameter.shape)  # of the shard
        offsets = [0] * parameter.dim()
        if isinstance(parameter, DTensor):
            slices, shard = my_shard(parameter)
            self._shape = list(shard.shape)
            offsets = [dim_slice.start for dim_slice in slices]
        self._strides = [1] * parameter.dim()  # of the full tensor
        for dim in reversed(range(parameter.dim() - 1)):
            self._strides[dim] = self._strides[dim + 1] * parameter.shape[dim + 1]
        self._start = 0  # position of the first element
        for offset, stride in zip(offsets, self._strides, strict=True):
            self._start += offset * stride
        # Only the first dimension is sharded, if any.
        self.is_run = self._shape[1:] == list(parameter.shape[1:])

    def origin(self, first: int) -> tuple[int, int]:
        """Return the position of element ``first`` of a run, and the hash of the name: what :meth:`of` depends on."""
        return _wrap_to_int32(self._start + first), self.name_hash

    def of(self, first: int, count: int, device: torch.device) -> Tensor:
        """Return the ids of ``count`` elements of the shard, counted from ``first``, int32 ``[count]``."""
        local = torch.arange(first, first + count, device=device)  # positions in the shard
        positions = torch.full_like(local, self._start)
        if self.is_run:
            positions += local
        else:
            # From the innermost dimension outward: the index in each dimension, times the full tensor's stride.
            for size, stride in zip(reversed(self._shape), reversed(self._strides), strict=True):
                index = local % size
                positions += index * stride
                local = local // size
        return element_ids(_wrap_to_int32(positions).to(torch.int32), self.name_hash)


def _wrap_to_int32(positions: Any) -> Any:
    """Wrap an integer, or a tensor of them, into the range of int32."""
    return (positions + 2**31) % 2**32 - 2**31

"""Stochastic rounding from float32 to bfloat16, with an exact mean.

bfloat16 is the upper half of a float32. Between two neighbors ``a < x < b`` the result is ``b`` with probability
``(x - a) / (b - a)``: its expectation is ``x``, so updates far below the spacing of bfloat16 take effect with the right
frequency instead of never. In bits: add a uniform 16-bit number and drop the lower half.
"""

import random

import torch

from torchtune.utils import computes_on_cpu

_UPPER_HALF = -65536  # 0xFFFF0000 as int32


def make_generator(seed: int, stream: str, step: int, device: torch.device) -> torch.Generator:
    """Return a random number generator that depends only on the arguments.

    Args:
        seed: seed of the run.
        stream: distinguishes parameters and shards within a step.
        step: number of the optimizer step.
        device: device of the numbers.
    """
    return torch.Generator(device).manual_seed(random.Random(f"{seed}/{stream}/{step}").getrandbits(62))


def _draw(like: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Return int32 numbers, uniform from 0 to 65535, in the shape of a tensor."""
    if not computes_on_cpu(generator.device):
        return torch.empty_like(like, dtype=torch.int32).random_(0, 2**16, generator=generator)
    # On a CPU a draw takes longer than the optimizer's arithmetic of an element: use all of its 64 bits.
    draws = torch.empty(-(-like.numel() // 4), dtype=torch.int64).random_(-(2**63), None, generator=generator)
    return draws.view(torch.uint16)[: like.numel()].to(torch.int32).view(like.shape)


def round_stochastically_(values: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Round ``values`` in place to numbers that bfloat16 represents; zeros, infinities and NaN do not change.

    Args:
        values: float32, contiguous.
        generator: source of randomness, on the same device.

    Returns:
        ``values``.
    """
    noise = _draw(values, generator)
    if not computes_on_cpu(values.device):  # NaN of other devices has all bits set and would wrap around to -0
        noise.masked_fill_(values.isnan(), 0)
    values.view(torch.int32).add_(noise).bitwise_and_(_UPPER_HALF)
    return values


def spread_within_rounding_(values: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Move each of ``values``, numbers that bfloat16 represents, to a random number that rounds to it.

    Args:
        values: float32, contiguous; zeros and non-finite values do not change.
        generator: source of randomness, on the same device.

    Returns:
        ``values``.
    """
    noise = _draw(values, generator)
    noise.clamp_(min=1).sub_(2**15)  # from 1 - 2**15 to 2**15 - 1: never a tie
    noise.masked_fill_((values == 0) | ~values.isfinite(), 0)
    values.view(torch.int32).add_(noise)
    return values

"""Optimizer states with 8 or 4 bits per element: torchao's tensors, which are read and written in pieces.

torchao finds the nearest code by a binary search, which needs compilation to be fast; here, a table does it.
"""

import functools

import torch

from torchtune.utils import computes_on_cpu

# Smaller states are not quantized: norms and biases gain nothing.
SMALLEST = 4096


def is_low_bit(state: object) -> bool:
    """Return whether a state is a low-bit tensor of torchao."""
    return hasattr(state, "codes")


def write_low_bit(state: torch.Tensor, values: torch.Tensor) -> None:
    """Store float32 ``values`` in ``state``, which may be longer: its last block is padded with zeros."""
    values = torch.nn.functional.pad(values.reshape(-1), (0, state.numel() - values.numel()))
    if not hasattr(state, "qmap"):  # fp8: a cast
        state.copy_(values)
        return
    blocks = values.view(len(state.scale), -1)
    scale = blocks.abs().amax(-1).clamp_(min=1e-12)
    codes = _nearest((blocks / scale[:, None]).view(-1), state)
    state.codes.copy_(codes if len(state.codes) == len(codes) else codes[::2] << 4 | codes[1::2])
    state.scale.copy_(scale)


def _nearest(scaled: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    """Return the codes (uint8) of the values nearest to numbers from -1 to 1; ties go to the greater value.

    A table over the upper 16 bits gives the right code or one too low, because no two midpoints share these bits. On a
    CPU this takes a twentieth of the time of a binary search.
    """
    # In a simulation, tables are fake tensors, which must not outlive it.
    tables = _tables if computes_on_cpu(torch.device("cpu")) else _tables.__wrapped__
    middles, codes = tables(type(state), state.signed, scaled.device)
    low = codes.index_select(0, (scaled.view(torch.int32) >> 16).bitwise_and_(0xFFFF))
    low += scaled >= middles.index_select(0, low.int())
    return low


@functools.lru_cache(maxsize=8)
def _tables(kind: type, signed: bool, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return midpoints between the values of codes, and the code of the lowest number per upper 16 bits."""
    values = kind.zeros((256,), signed, 256).qmap
    middles = torch.cat([(values[1:] - values[:-1]) * 0.5 + values[:-1], torch.tensor([torch.inf])])
    bits = torch.arange(2**16, dtype=torch.int32) << 16
    bits[2**15 :] |= 0xFFFF  # of negative numbers, the lowest has the greatest bits
    lowest = bits.view(torch.float32).nan_to_num(0.0)
    codes = torch.bucketize(lowest, middles[:-1], right=True).to(torch.uint8)
    return middles.to(device), codes.to(device)

"""Optimizer states with 8 or 4 bits per element: torchao's tensors, read and written in pieces.

torchao finds the nearest code by a search that needs compilation to be fast; ``bucketize`` is one fused kernel.
"""

import torch

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
    middles = (state.qmap[1:] - state.qmap[:-1]) * 0.5 + state.qmap[:-1]
    codes = torch.bucketize((blocks / scale[:, None]).view(-1), middles, right=True, out_int32=True).to(torch.uint8)
    state.codes.copy_(codes if len(state.codes) == len(codes) else codes[::2] << 4 | codes[1::2])
    state.scale.copy_(scale)

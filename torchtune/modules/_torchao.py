"""All that the library uses of torchao, whose paths move between releases; nothing else imports it."""

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class StateFormat:
    """How an optimizer of torchao keeps its states: ``8bit``, ``4bit`` or ``fp8``."""

    name: str
    bits: int
    block_size: int


def low_bit_format(optimizer: Any) -> tuple[StateFormat, type[torch.optim.Optimizer]] | None:
    """Format of the states of an optimizer of torchao, and torch's optimizer with its arithmetic; None for others."""
    if not type(optimizer).__module__.startswith("torchao."):
        return None  # what is not there yet has made no optimizer
    import torchao.optim

    for base, same in (("AdamW", torch.optim.AdamW), ("Adam", torch.optim.Adam)):
        for name, bits in (("8bit", 8), ("4bit", 4), ("Fp8", 8)):
            if type(optimizer) is getattr(torchao.optim, base + name, None):
                return StateFormat(name.lower(), bits, optimizer.block_size), same
    return None


@functools.cache
def state_map(name: str, signed: bool) -> Tensor:
    """float32 [256 or 16]: the value of every code of a state in ``8bit`` or ``4bit``, ascending, from -1 to 1."""
    if name == "8bit":
        from torchao.optim.subclass_8bit import OptimState8bit as Kind
    else:
        from torchao.optim.subclass_4bit import OptimState4bit as Kind
    return Kind.zeros((256,), signed, 256, torch.device("cpu")).qmap.clone()

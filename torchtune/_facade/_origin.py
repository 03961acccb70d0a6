"""What is known of a loaded model: its checkpoint and its tokenizer."""

from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from torchtune.training import ModelSource


@dataclass(frozen=True)
class Origin:
    """Where a model came from: the source of its weights, and the tokenizer of the checkpoint."""

    source: ModelSource
    tokenizer: Any


# Beside the models, not in them: a copy or a pickle of a model takes no files along.
ORIGINS: WeakKeyDictionary[nn.Module, Origin] = WeakKeyDictionary()


def plain(model: nn.Module) -> nn.Module:
    """The model inside a compiled one, or inside torch's wrappers for replicas."""
    if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
        return plain(model.module)
    return plain(model._orig_mod) if hasattr(model, "_orig_mod") else model

"""Registry of loaded models: the checkpoint and tokenizer of each."""

from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from torchtune.checkpoints import ModelSource


@dataclass(frozen=True)
class Origin:
    """Source of a model's weights, and the checkpoint's tokenizer."""

    source: ModelSource
    tokenizer: Any


# A registry and not attributes, so that a copy or pickle of a model does not contain file paths.
ORIGINS: WeakKeyDictionary[nn.Module, Origin] = WeakKeyDictionary()


def unwrap(model: nn.Module) -> nn.Module:
    """Return the module inside ``torch.compile``, DataParallel and DistributedDataParallel wrappers."""
    if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
        return unwrap(model.module)
    # The class of compiled modules is not asked for, because its package takes a second to import.
    if hasattr(model, "_orig_mod"):
        return unwrap(model._orig_mod)
    return model

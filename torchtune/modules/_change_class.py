"""Change the class of a module."""

import copy
from typing import TypeVar

from torch import nn

_Module = TypeVar("_Module", bound=nn.Module)


def change_class(module: nn.Module, kind: type[_Module]) -> _Module:
    """Return a module of another class with the same parameters and attributes."""
    new = kind.__new__(kind)
    new.__dict__.update(
        (key, copy.copy(item) if isinstance(item, dict) else item) for key, item in vars(module).items()
    )
    return new

"""Lazy package faces: a name is imported when it is first used."""

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any


def attach(
    package: str, exports: Mapping[str, str], submodules: tuple[str, ...] = ()
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Build ``__getattr__``, ``__dir__`` and ``__all__`` (PEP 562) of a package whose names load on first use.

    Args:
        package: ``__name__`` of the package.
        exports: exported name -> module, relative to the package, that defines it.
        submodules: subpackages that are reachable as attributes.
    """

    def __getattr__(name: str) -> Any:
        if name in exports:
            value = getattr(importlib.import_module(f"{package}.{exports[name]}"), name)
        elif name in submodules:
            value = importlib.import_module(f"{package}.{name}")
        else:
            raise AttributeError(f"module '{package}' has no attribute '{name}'")
        setattr(sys.modules[package], name, value)
        return value

    names = sorted({*exports, *submodules})
    return __getattr__, lambda: names, names

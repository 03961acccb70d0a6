"""Lazy package faces: a name is imported when it is first used."""

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from pkgutil import iter_modules
from typing import Any


def attach(
    package: str, exports: Mapping[str, str], submodules: tuple[str, ...] = ()
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Build ``__getattr__``, ``__dir__`` and ``__all__`` (PEP 562) of a package with lazily imported names.

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


def packages_in(path: Sequence[str]) -> tuple[str, ...]:
    """Names of the packages in the folders of a package, in alphabetical order.

    Args:
        path: ``__path__`` of the package.
    """
    return tuple(sorted(module.name for module in iter_modules(path) if module.ispkg))

"""Lazy imports for package ``__init__`` files: a name is imported at its first use."""

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from pkgutil import iter_modules
from typing import Any


def attach(
    package: str,
    exports: Mapping[str, str],
    submodules: tuple[str, ...] = (),
    between_rooms: Mapping[str, str] | None = None,
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Build ``__getattr__``, ``__dir__`` and ``__all__`` (PEP 562) of a package with lazily imported names.

    Args:
        package: ``__name__`` of the package.
        exports: exported name -> module that defines it, relative to the package unless it starts with "torchtune.".
        submodules: subpackages that are reachable as attributes.
        between_rooms: names that other packages of the library import from here and users don't; not in ``__all__``.
    """
    modules = {**exports, **(between_rooms or {})}

    def __getattr__(name: str) -> Any:
        if name in modules:
            module = modules[name] if modules[name].startswith("torchtune.") else f"{package}.{modules[name]}"
            value = getattr(importlib.import_module(module), name)
        elif name in submodules:
            value = importlib.import_module(f"{package}.{name}")
        else:
            raise AttributeError(f"module '{package}' has no attribute '{name}'")
        setattr(sys.modules[package], name, value)
        return value

    names = sorted({*exports, *submodules})
    return __getattr__, lambda: names, names


def redirect(package: str, target: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Build ``__getattr__``, ``__dir__`` and ``__all__`` of a package that is the former address of another one.

    Args:
        package: ``__name__`` of the former address.
        target: dotted name of the package that has the names.
    """
    return attach(package, dict.fromkeys(importlib.import_module(target).__all__, target))


def packages_in(path: Sequence[str]) -> tuple[str, ...]:
    """Return the names of a package's subpackages in alphabetical order.

    Args:
        path: ``__path__`` of the package.
    """
    return tuple(sorted(module.name for module in iter_modules(path) if module.ispkg))

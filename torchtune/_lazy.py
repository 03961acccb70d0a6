"""Lazy imports for package ``__init__`` files: a name is imported at its first use."""

import ast
import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from pkgutil import iter_modules
from typing import Any


def attach_stub(
    package: str, file: str, submodules: tuple[str, ...] = ()
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Build ``__getattr__``, ``__dir__`` and ``__all__`` (PEP 562) of a package from the stub beside its ``__init__``.

    The stub ``__init__.pyi`` holds one import for each name that the package exports. Editors and type checkers read
    it; at run time, the same lines say which module to import when a name is first used. As in every stub (PEP 484),
    ``from ._device import get_device as get_device`` exports a public name. An import without ``as`` is for other
    packages of the library: it is an attribute of the package, but not in ``__all__``.

    Args:
        package: ``__name__`` of the package.
        file: ``__file__`` of the package.
        submodules: further modules of the package that are public names, without a line in the stub: editors find
            modules by their files.
    """
    modules, public = _read_stub(package, Path(file).with_suffix(".pyi"))
    modules |= {name: f"{package}.{name}" for name in submodules}
    return _export(package, modules, sorted([*public, *submodules]))


def _export(
    package: str, modules: Mapping[str, str], public: list[str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Build ``__getattr__``, ``__dir__`` and ``__all__`` of a package from the module of each name."""

    def __getattr__(name: str) -> Any:
        if name not in modules:
            return former_attribute(package, name)
        module = importlib.import_module(modules[name])
        is_submodule = modules[name] == f"{package}.{name}"  # exported by ``from . import name``
        value = module if is_submodule else getattr(module, name)
        # As an attribute of the module, the name no longer needs a call of __getattr__.
        setattr(sys.modules[package], name, value)
        return value

    return __getattr__, lambda: public, public


def _read_stub(package: str, stub: Path) -> tuple[dict[str, str], list[str]]:
    """Return the module of each name in a stub, and its public names in alphabetical order."""
    modules = {}
    public = []
    for statement in ast.parse(stub.read_text(encoding="utf-8")).body:
        if not isinstance(statement, ast.ImportFrom):
            continue  # the type of a name that ``__init__.py`` itself defines
        for alias in statement.names:
            if statement.level == 0:
                modules[alias.name] = statement.module
            elif statement.module is None:
                modules[alias.name] = f"{package}.{alias.name}"
            else:
                modules[alias.name] = f"{package}.{statement.module}"
            if alias.asname is not None:
                public.append(alias.name)
    return modules, sorted(public)


# Module with the table of names from earlier releases. It is imported for the first missing name, not at start-up.
_FORMER_NAMES = "torchtune.compat._former_names"


def former_attribute(module: str, name: str) -> Any:
    """Return the object that replaces a name of ``module`` from an earlier release.

    Raises:
        AttributeError: no earlier release had the name, or it was removed; the message then names the replacement.
    """
    if name.startswith("__"):
        raise AttributeError(f"module '{module}' has no attribute '{name}'")
    return importlib.import_module(_FORMER_NAMES).attribute(module, name)


def former_names(module: str) -> Callable[[str], Any]:
    """Build a module's ``__getattr__`` for its names from earlier releases."""
    return partial(former_attribute, module)


def former_package(module: str) -> tuple[Callable[[str], Any], list[str]]:
    """Build ``__getattr__`` and ``__path__`` of a module that was a package in earlier releases.

    Import looks for ``module.submodule`` only in modules with a ``__path__``. With an empty one, it finds nothing
    there and asks :class:`FormerModuleFinder`.
    """
    return former_names(module), []


def present_path(path: str) -> str:
    """Return the current path of a component that another package has moved.

    Raises:
        ImportError: this library has removed the component; the message names the replacement.
    """
    table = importlib.import_module(_FORMER_NAMES)
    explanation = table.explain_gone(path)
    if explanation:
        raise ImportError(explanation)
    return table.present_path(path)


def former_argument(path: str, argument: str) -> tuple[bool, str | None]:
    """Return whether the function at ``path`` accepted ``argument`` in earlier releases, and its replacement."""
    return importlib.import_module(_FORMER_NAMES).former_argument(path, argument)


class FormerModuleFinder:
    """Finder of modules of earlier releases, for ``sys.meta_path``; it comes last."""

    @classmethod
    def find_spec(cls, name: str, path: Any = None, target: Any = None) -> Any:
        """Return the spec of a former module of this library, or ``None``."""
        if not name.startswith("torchtune."):
            return None
        return importlib.import_module(_FORMER_NAMES).find_spec(name)


def redirect(package: str, target: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Build ``__getattr__``, ``__dir__`` and ``__all__`` of a package that is the former address of another one.

    Args:
        package: ``__name__`` of the former address.
        target: dotted name of the package that has the names.
    """
    names = sorted(importlib.import_module(target).__all__)
    return _export(package, dict.fromkeys(names, target), names)


def modules_in(path: Sequence[str]) -> tuple[str, ...]:
    """Return the names of a package's public modules and subpackages in alphabetical order.

    Args:
        path: ``__path__`` of the package.
    """
    names = [module.name for module in iter_modules(path) if not module.name.startswith("_")]
    return tuple(sorted(names))

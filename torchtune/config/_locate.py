"""Find the class or function of a dotted path."""

import builtins
import importlib
import importlib.util
import os
import pkgutil
import sys
from collections.abc import Iterable
from types import ModuleType
from typing import Any

from torchtune._lazy import present_path
from torchtune.config._errors import InstantiationError, did_you_mean
from torchtune.utils import hide_import_warnings


def _import(name: str, path: str) -> ModuleType:
    try:
        with hide_import_warnings(name):
            return importlib.import_module(name)
    except Exception as error:  # a user's module may raise anything
        raise _import_error(name, path, error) from error


def _import_error(name: str, path: str, error: Exception) -> InstantiationError:
    missing = (getattr(error, "name", None) or name) if isinstance(error, ModuleNotFoundError) else name
    if missing.partition(".")[0] != name.partition(".")[0]:
        reason = f"because '{missing}' is not installed"
    else:
        where = f" ({error.filename}, line {error.lineno})" if isinstance(error, SyntaxError) else ""
        reason = f"with {type(error).__name__}: {str(error).partition(chr(10))[0]}{where}"
    return InstantiationError(f"'{path}': module '{name}' failed to import {reason}")


def _module_exists(name: str) -> bool:
    if name in sys.modules:
        return True
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


def _public_names(module: Any) -> Iterable[str]:
    submodules = [info.name for info in pkgutil.iter_modules(getattr(module, "__path__", []))]
    return [name for name in {*dir(module), *submodules} if not name.startswith("_")]


def _get_member(owner: Any, parts: list[str], index: int, path: str) -> Any:
    """Return member ``parts[index]`` of ``owner``: preferably a module inside the path, an attribute at its end."""
    name, so_far = parts[index], ".".join(parts[: index + 1])
    is_package = isinstance(owner, ModuleType) and hasattr(owner, "__path__")
    last = index == len(parts) - 1
    if is_package and not last and _module_exists(so_far):
        return _import(so_far, path)
    try:
        return getattr(owner, name)
    except AttributeError:
        if is_package and _module_exists(so_far):
            return _import(so_far, path)
    except Exception as error:  # a lazy package imports on first access
        raise _import_error(".".join(parts[:index]), path, error) from error
    before = ".".join(parts[:index])
    hint = did_you_mean(name, _public_names(owner))
    if is_package and not last:
        raise InstantiationError(f"'{path}': there is no module '{so_far}'{hint}")
    kind = "module" if isinstance(owner, ModuleType) else "class"
    raise InstantiationError(f"'{path}': {kind} '{before}' has no attribute '{name}'{hint}")


# Globals of the recipe with the config that was read last: the library instantiates parts of this config, too.
recipe_globals: dict[str, Any] = {}


def locate(path: object, caller_globals: dict[str, Any] | None = None) -> Any:
    """Return the object at ``path``: ``package.module.Class``, ``….Class.method``, or a name in the recipe's file.

    Raises:
        InstantiationError: the object does not exist, or its module cannot be imported.
        ValueError: the path has an empty part (``a..b``).
    """
    if not isinstance(path, str) or not path:
        raise InstantiationError(f"_component_ must be the dotted path of a class or function, not {path!r}")
    try:
        parts = present_path(path).split(".")
    except ImportError as error:
        raise InstantiationError(str(error)) from error
    if not all(parts):
        raise ValueError(f"'{path}' is not a dotted path: a part between the dots is empty")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    scope = caller_globals or {}
    if parts[0] in scope and (len(parts) == 1 or not _module_exists(parts[0])):
        found = scope[parts[0]]
    elif _module_exists(parts[0]):
        found = _import(parts[0], path)
    else:
        names = {"torch", "torchtune", *scope, *(name for name in sys.modules if "." not in name and name[0] != "_")}
        known = names - set(dir(builtins)) - set(sys.stdlib_module_names)
        hint = did_you_mean(parts[0], known)
        if len(parts) == 1:
            raise InstantiationError(f"there is no '{path}' in the recipe's file, nor a module of that name{hint}")
        advice = hint or ": install it, or correct the name"
        raise InstantiationError(f"'{path}': there is no module '{parts[0]}' here{advice}")
    for index in range(1, len(parts)):
        found = _get_member(found, parts, index, path)
    return found


def locate_from_recipe(path: str) -> Any:
    """Return the object that ``path`` names; a name without dots is defined in the running recipe's file."""
    return locate(path, recipe_globals)

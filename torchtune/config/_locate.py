"""Find the class or function of a dotted path."""

import builtins
import importlib
import importlib.util
import os
import pkgutil
import sys
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

from torchtune._lazy import present_path
from torchtune.config._errors import InstantiationError, did_you_mean
from torchtune.utils import hide_import_warnings


def _import(name: str, path: str) -> ModuleType:
    """Import the module ``name``, a part of ``path``. Raises ``InstantiationError`` if it fails."""
    try:
        with hide_import_warnings(name):
            return importlib.import_module(name)
    except Exception as error:  # a user's module may raise anything
        raise _import_error(name, path, error) from error


def _import_error(name: str, path: str, error: Exception) -> InstantiationError:
    """Return the error that importing ``name``, a part of ``path``, raises for ``error``."""
    missing = name
    if isinstance(error, ModuleNotFoundError) and error.name:
        missing = error.name
    if missing.partition(".")[0] != name.partition(".")[0]:
        # The module of the path is there, and imports one that is not.
        return InstantiationError(f"'{path}': module '{name}' failed to import because '{missing}' is not installed")
    first_line = str(error).partition("\n")[0]
    message = f"'{path}': module '{name}' failed to import with {type(error).__name__}: {first_line}"
    if isinstance(error, SyntaxError):
        message += f" ({error.filename}, line {error.lineno})"
    return InstantiationError(message)


def _module_exists(name: str) -> bool:
    """Return whether a module can be found, without importing it; its packages are imported."""
    if name in sys.modules:
        return True
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


def _get_member(owner: Any, parts: list[str], index: int, path: str) -> Any:
    """Return member ``parts[index]`` of ``owner``: preferably a module inside the path, an attribute at its end."""
    name = parts[index]
    owner_path = ".".join(parts[:index])
    member_path = ".".join(parts[: index + 1])
    is_package = isinstance(owner, ModuleType) and hasattr(owner, "__path__")
    is_last = index == len(parts) - 1
    # A function may have the name of its module (`alpaca.alpaca`): inside the path the module is meant.
    if is_package and not is_last and _module_exists(member_path):
        return _import(member_path, path)
    try:
        return getattr(owner, name)
    except AttributeError:
        if is_package and _module_exists(member_path):
            return _import(member_path, path)
    except Exception as error:  # a lazy package imports on first access
        raise _import_error(owner_path, path, error) from error
    submodules = [info.name for info in pkgutil.iter_modules(getattr(owner, "__path__", []))]
    public_names = [member for member in {*dir(owner), *submodules} if not member.startswith("_")]
    hint = did_you_mean(name, public_names)
    if is_package and not is_last:
        raise InstantiationError(f"'{path}': there is no module '{member_path}'{hint}")
    kind = "module" if isinstance(owner, ModuleType) else "class"
    raise InstantiationError(f"'{path}': {kind} '{owner_path}' has no attribute '{name}'{hint}")


def locate(path: object, namespace: Mapping[str, Any] | None = None) -> Any:
    """Return the object that a dotted path names, and import its module.

    Args:
        path: ``package.module.Class``, ``package.module.Class.method``, a name in ``namespace``, or
            ``module:name``, as checked settings have it for a name in the recipe's file.
        namespace: globals of the recipe's file, whose names need no module.

    Raises:
        InstantiationError: the object does not exist, or its module cannot be imported.
        ValueError: the path has an empty part (``a..b``).

    Example:
        >>> torchtune.config.locate("torch.nn.Linear")
        <class 'torch.nn.modules.linear.Linear'>
        >>> torchtune.config.locate("MyLoss", {"MyLoss": torch.nn.MSELoss})
        <class 'torch.nn.modules.loss.MSELoss'>
    """
    if not isinstance(path, str) or not path:
        raise InstantiationError(f"_component_ must be the dotted path of a class or function, not {path!r}")
    # The command `tune` does not put the working directory, with the user's modules, on the path as `python` does.
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    module_name, _, path = path.rpartition(":")
    if module_name:
        namespace = vars(_import(module_name, path))
    elif namespace is None:
        namespace = {}
    try:
        parts = present_path(path).split(".")
    except ImportError as error:
        raise InstantiationError(str(error)) from error
    if not all(parts):
        raise ValueError(f"'{path}' is not a dotted path: a part between the dots is empty")
    first = parts[0]
    if _is_in_namespace(parts, namespace):
        target = namespace[first]
    elif _module_exists(first):
        target = _import(first, path)
    else:
        raise _nothing_named(parts, path, namespace)
    for index in range(1, len(parts)):
        target = _get_member(target, parts, index, path)
    return target


def _is_in_namespace(parts: Sequence[str], namespace: Mapping[str, Any]) -> bool:
    """Return whether a path starts in the namespace; in a dotted path, a module of the same name comes first."""
    return parts[0] in namespace and (len(parts) == 1 or not _module_exists(parts[0]))


def _nothing_named(parts: Sequence[str], path: str, namespace: Mapping[str, Any]) -> InstantiationError:
    """Return the error for a path whose first part is neither in the namespace nor a module."""
    modules = {name for name in sys.modules if "." not in name and not name.startswith("_")}
    candidates = {"torch", "torchtune", *namespace, *modules} - set(dir(builtins)) - set(sys.stdlib_module_names)
    hint = did_you_mean(parts[0], candidates)
    if len(parts) == 1:
        return InstantiationError(f"there is no '{path}' in the recipe's file, nor a module of that name{hint}")
    advice = hint or ": install it, or correct the name"
    return InstantiationError(f"'{path}': there is no module '{parts[0]}' here{advice}")


def qualify(path: str, namespace: Mapping[str, Any]) -> str:
    """Return ``module:path`` for a name in the recipe's file, so that any part of the library can locate it.

    Other paths are returned unchanged, and so is a name in a namespace that is not that of an imported module.

    Args:
        path: an existing path, as written in a config.
        namespace: globals of the recipe's file.
    """
    module_name = namespace.get("__name__")
    is_module = module_name in sys.modules and vars(sys.modules[module_name]) is namespace
    if is_module and ":" not in path and _is_in_namespace(path.split("."), namespace):
        return f"{module_name}:{path}"
    return path


def as_written(path: str) -> str:
    """Return the path of a component as its config has it, for messages and saved configs.

    Names in a recipe's file are qualified by its module in checked settings.

    Example:
        >>> torchtune.config.as_written("math:sqrt"), torchtune.config.as_written("torch.nn.Linear")
        ('sqrt', 'torch.nn.Linear')
    """
    module_name, _, name = path.rpartition(":")
    module = sys.modules.get(module_name)
    # Other texts with a colon, such as cuda:0, name no object of a module.
    if module is not None and name.partition(".")[0] in vars(module):
        return name
    return path

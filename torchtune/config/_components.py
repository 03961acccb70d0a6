"""Find the class or function of a dotted path, and the arguments that it accepts.

``**kwargs`` are followed into the calls that receive them.
"""

import ast
import builtins
import functools
import importlib
import importlib.util
import inspect
import os
import pkgutil
import sys
import textwrap
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, fields
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


@dataclass(frozen=True)
class Argument:
    """One argument that can be passed by name."""

    annotation: Any = Any
    required: bool = False


@dataclass
class Accepts:
    """Arguments of a callable: ``order`` lists positional arguments; with ``open``, any name is accepted.

    ``ignores_unknown``: the callable has ``**kwargs``, which it may ignore. Names in the YAML must have an effect, but
    runtime arguments of the recipe may be ignored. ``partial``: a package that is slow to import was not inspected.
    """

    named: dict[str, Argument] = field(default_factory=dict)
    order: list[str] = field(default_factory=list)
    variadic: bool = False
    open: bool = False
    ignores_unknown: bool = False
    partial: bool = False


_MAX_DEPTH = 8  # maximum number of nested calls through which **kwargs are followed
# Common arguments of ``datasets.load_dataset``; the package takes a second to import.
_FILES = str | Sequence[str] | Mapping[str, str | Sequence[str]] | None
_LOAD_DATASET = {name: Argument(str | None) for name in ("data_dir", "name")}
_LOAD_DATASET |= {
    "data_files": Argument(_FILES),
    "split": Argument(str | list[str] | None),
    "streaming": Argument(bool),
}


def accepts(target: Callable[..., Any], given: Iterable[str] | None = None) -> Accepts:
    """Read the signature of a class, function, method or partial.

    Slow packages are inspected only if a name in ``given`` is not found without them.
    """
    found = _accepts(target, is_partial=given is not None)
    return found if not found.partial or found.named.keys() >= set(given or ()) else _accepts(target)


def _accepts(target: Callable[..., Any], depth: int = 0, is_partial: bool = False) -> Accepts:
    if isinstance(target, functools.partial):
        inner = _accepts(target.func, depth, is_partial)
        return remaining(inner, len(target.args), optional=set(target.keywords))
    try:
        signature = inspect.signature(target)
    except (TypeError, ValueError):
        return Accepts(open=True, variadic=True)
    found, catch_all = Accepts(), None
    source = inspect.unwrap(_implementation(target)[0])
    if getattr(source, "__name__", "") == "_no_init_or_replace_init":
        return found  # subclasses of a Protocol without __init__ take no arguments
    for name, parameter in signature.parameters.items():
        if parameter.kind is parameter.VAR_POSITIONAL:
            found.variadic = True
        elif parameter.kind is parameter.VAR_KEYWORD:
            catch_all, found.ignores_unknown = name, True
        else:
            if parameter.kind is not parameter.POSITIONAL_ONLY:
                found.named[name] = Argument(_annotation(parameter, source), parameter.default is parameter.empty)
            if parameter.kind is not parameter.KEYWORD_ONLY:
                found.order.append(name)
    if catch_all is not None:
        _follow_kwargs(target, catch_all, found, depth, is_partial)
    return found


def _annotation(parameter: inspect.Parameter, source: Any) -> Any:
    annotation = parameter.annotation
    if annotation is parameter.empty:
        return Any
    if isinstance(annotation, str):
        try:
            annotation = eval(annotation, getattr(source, "__globals__", {}))
        except (NameError, TypeError, AttributeError, SyntaxError):
            return Any  # names that exist for type checkers only
    if parameter.default is None and annotation is not Any:
        try:
            return typing.Optional[annotation]  # noqa: UP045 (works for any form, a quoted one too)
        except TypeError:
            return Any
    return annotation


def _implementation(target: Any) -> tuple[Any, type | None]:
    """Return the function that takes the arguments, and the class that defines it."""
    if inspect.isclass(target):
        for owner in target.__mro__:
            for name in ("__init__", "__new__"):
                if name in vars(owner) and owner is not object:
                    return getattr(owner, name), owner
        return target, None
    if inspect.ismethod(target):
        cls = target.__self__ if inspect.isclass(target.__self__) else type(target.__self__)
        owner = next((c for c in cls.__mro__ if target.__name__ in vars(c)), None)
        return target.__func__, owner
    if not inspect.isroutine(target):
        return type(target).__call__, type(target)
    return target, None


def remaining(
    inner: Accepts, positional: int, given: Set[str] = frozenset(), optional: Set[str] = frozenset()
) -> Accepts:
    """Return ``inner`` without the arguments already passed; ``optional`` names stop being required."""
    taken = {*inner.order[:positional], *given}
    named = {name: argument for name, argument in inner.named.items() if name not in taken}
    for name in set(named) & optional:
        named[name] = Argument(named[name].annotation)
    order = [name for name in inner.order[positional:] if name not in taken]
    return Accepts(named, order, inner.variadic, inner.open, inner.ignores_unknown, inner.partial)


def _follow_kwargs(target: Any, catch_all: str, found: Accepts, depth: int, is_partial: bool) -> None:
    """Add to ``found`` the names that ``**catch_all`` of ``target`` may contain."""
    if depth >= _MAX_DEPTH:
        found.open = True
        return
    if getattr(target, "__name__", "") == "load_dataset" and target.__module__.partition(".")[0] == "datasets":
        found.named |= dict.fromkeys(_dataset_reader_arguments() - set(found.named), Argument())
        return
    function, owner = _implementation(target)
    function = inspect.unwrap(function)
    try:
        uses, imports = _read_source(function, catch_all)
        found.open |= uses.unknown
    except (OSError, TypeError, SyntaxError, IndexError):
        found.open = True
    if found.open:
        return
    subject = target if inspect.isclass(target) else getattr(target, "__self__", None)
    scope = _Scope(function, owner, subject, imports)
    for call in uses.calls:
        if is_partial and ast.unparse(call.func) == "datasets.load_dataset":
            found.named, found.partial = _LOAD_DATASET | found.named, True
            continue
        try:
            callee, skipped = scope.callee(call)
        except (LookupError, AttributeError, InstantiationError, ValueError):
            found.open = True
            continue
        passed = [a for a in call.args[skipped:] if not isinstance(a, ast.Starred)]
        inner = _accepts(callee, depth + 1, is_partial)
        inner = remaining(inner, len(passed), {keyword.arg for keyword in call.keywords if keyword.arg})
        found.open |= inner.open
        found.partial |= inner.partial
        if any(isinstance(a, ast.Starred) for a in call.args):
            found.order += [name for name in inner.order if name not in found.order]
        alone = len(uses.calls) == 1 and not uses.names
        for name, argument in inner.named.items():
            found.named.setdefault(name, Argument(argument.annotation, argument.required and alone))
    found.named |= dict.fromkeys(uses.names - set(found.named), Argument())


@functools.lru_cache(maxsize=1024)
def _read_source(function: Any, catch_all: str) -> tuple["_Uses", dict[str, str]]:
    """Return the uses of ``**catch_all`` in ``function``, and the imports of its body; cached."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    if not isinstance(tree, (ast.FunctionDef, ast.AsyncFunctionDef)):
        raise TypeError(f"the source of {function} is no function")
    return _Uses(tree, catch_all), _imports(tree)


def _imports(tree: ast.AST) -> dict[str, str]:
    """Return imported name -> dotted path, for the imports below ``tree``."""
    found: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and not node.level:
            found |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
        elif isinstance(node, ast.Import):
            found |= {a.asname or a.name.partition(".")[0]: a.name if a.asname else a.name.partition(".")[0]
                      for a in node.names}  # fmt: skip
    return found


class _Uses:
    """Uses of ``**kwargs`` in a function: the calls that receive it, and the names that are read from it."""

    def __init__(self, tree: ast.AST, name: str) -> None:
        self.calls: list[ast.Call] = []
        self.names: set[str] = set()
        self.unknown = False
        parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
        names = [node for node in ast.walk(tree) if isinstance(node, ast.Name)]
        changed: set[str] = set()
        for node in (node for node in names if node.id == name):
            made = self._assigned_variables(node, parents)
            changed |= made - {name}
            if not made:
                self._record_use(parents[node], parents.get(parents[node]))
        unknown, fed = self.unknown, len(self.calls)
        for node in (node for node in names if node.id in changed):
            self._record_use(parents[node], parents.get(parents[node]))
        # In "prepared = prepare(kwargs)", any other use of "prepared" is fine, but a call must receive it in the end.
        self.unknown = unknown or (bool(changed) and len(self.calls) == fed)

    @staticmethod
    def _assigned_variables(node: ast.Name, parents: dict[ast.AST, ast.AST]) -> set[str]:
        """Return the variables assigned from a call on ``node``, as in ``prepared = prepare(kwargs)``."""
        call = parents[node]
        assignment = parents.get(call)
        if not (isinstance(call, ast.Call) and node in call.args and isinstance(assignment, ast.Assign)):
            return set()
        return {each.id for target in assignment.targets for each in ast.walk(target) if isinstance(each, ast.Name)}

    def _record_use(self, parent: ast.AST, above: ast.AST | None) -> None:
        match parent, above:
            case ast.keyword(arg=None), ast.Call():
                self.calls.append(above)
            case ast.Attribute(attr="pop" | "get" | "setdefault"), ast.Call(args=[ast.Constant(value=name), *_]):
                self.names.add(name)
            case ast.Subscript(slice=ast.Constant(value=name)), _:
                self.names.add(name)
            case ast.Compare(left=ast.Constant(value=name)), _:
                self.names.add(name)
            case ((ast.Attribute(attr="update" | "copy" | "keys") | ast.If()), _):
                pass
            case _:
                self.unknown = True  # passed on as a whole, or replaced


class _Scope:
    """Resolver of names in a function's body."""

    def __init__(self, function: Any, owner: type | None, subject: Any, imports: dict[str, str]) -> None:
        self.function, self.owner, self.subject, self.imports = function, owner, subject, imports

    def callee(self, call: ast.Call) -> tuple[Any, int]:
        """Return the object that ``call`` calls, and the number of leading positional arguments to skip.

        ``functools.partial(f, ...)`` counts as a call of ``f``, so 1 is skipped.
        """
        found = self.resolve(call.func)
        if found is functools.partial and call.args:
            return self.resolve(call.args[0]), 1
        return found, 0

    def resolve(self, node: ast.AST) -> Any:
        """Evaluate a name or a chain of attributes. Raises ``LookupError`` if it cannot."""
        if isinstance(node, ast.Attribute):
            if isinstance(node.value, ast.Call) and getattr(node.value.func, "id", "") == "super":
                return self._parent(node.attr)
            return getattr(self.resolve(node.value), node.attr)
        if not isinstance(node, ast.Name):
            raise LookupError(ast.dump(node))
        if node.id in ("self", "cls") and self.owner is not None:
            return self.subject or self.owner
        if node.id in self.imports:
            return locate(self.imports[node.id])
        seen = inspect.getclosurevars(self.function)  # without local variables, which are known at run time only
        return {**seen.builtins, **seen.globals, **seen.nonlocals}[node.id]

    def _parent(self, name: str) -> Any:
        order = self.subject.__mro__ if inspect.isclass(self.subject) else (self.owner or object).__mro__
        start = order.index(self.owner) + 1 if self.owner in order else 0
        for cls in order[start:]:
            if name in vars(cls):
                if cls is object:
                    return lambda: None
                return cls if name == "__init__" else functools.partial(getattr(cls, name), None)
        raise LookupError(name)


def _dataset_reader_arguments() -> set[str]:
    """Return the names of the arguments that ``load_dataset`` passes to its JSON, CSV, Parquet and text readers."""
    kinds = ("json", "csv", "parquet", "text")
    modules = [importlib.import_module(f"datasets.packaged_modules.{kind}.{kind}") for kind in kinds]
    configs = [getattr(module, f"{kind.capitalize()}Config") for kind, module in zip(kinds, modules, strict=True)]
    return {item.name for config in configs for item in fields(config)}

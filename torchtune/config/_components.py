"""Find the class or function that ``_component_`` names, and read the arguments that it accepts.

``**kwargs`` are followed into the calls that receive them, by the source of the component.
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
        parts = present_path(path).split(".")  # raises ImportError for a component that a release has removed
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
        # A suggestion among what a config may mean: neither built-ins nor modules of the standard library.
        modules = {name for name in sys.modules if "." not in name and not name.startswith("_")}
        candidates = {"torch", "torchtune", *namespace, *modules} - set(dir(builtins)) - set(sys.stdlib_module_names)
        hint = did_you_mean(first, candidates)
        if len(parts) == 1:
            raise InstantiationError(f"there is no '{path}' in the recipe's file, nor a module of that name{hint}")
        advice = hint or ": install it, or correct the name"
        raise InstantiationError(f"'{path}': there is no module '{first}' here{advice}")
    for index in range(1, len(parts)):
        target = _get_member(target, parts, index, path)
    return target


def _is_in_namespace(parts: Sequence[str], namespace: Mapping[str, Any]) -> bool:
    """Return whether a path starts in the namespace; in a dotted path, a module of the same name comes first."""
    return parts[0] in namespace and (len(parts) == 1 or not _module_exists(parts[0]))


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


@dataclass(frozen=True)
class Argument:
    """One argument that can be passed by name."""

    annotation: Any = Any
    required: bool = False


@dataclass
class Accepts:
    """Arguments of a callable.

    Attributes:
        named: arguments that can be passed by name.
        order: names of the arguments that can be passed by position.
        variadic: whether it has ``*args``.
        takes_any_name: whether any other name may have an effect, because its ``**kwargs`` cannot be followed to their
            end, or its signature cannot be read.
        has_kwargs: whether it has ``**kwargs``, so that a call with any name succeeds. Names in the YAML must have an
            effect, but runtime arguments of the recipe may be ignored.
        is_incomplete: whether a package that is slow to import was left out.
    """

    named: dict[str, Argument] = field(default_factory=dict)
    order: list[str] = field(default_factory=list)
    variadic: bool = False
    takes_any_name: bool = False
    has_kwargs: bool = False
    is_incomplete: bool = False


_MAX_DEPTH = 8  # maximum number of nested calls through which **kwargs are followed
# Common arguments of ``datasets.load_dataset``; the package takes a second to import.
_FILES = str | Sequence[str] | Mapping[str, str | Sequence[str]] | None
_LOAD_DATASET = {
    "data_dir": Argument(str | None),
    "name": Argument(str | None),
    "data_files": Argument(_FILES),
    "split": Argument(str | list[str] | None),
    "streaming": Argument(bool),
}


def accepts(target: Callable[..., Any], keywords: Iterable[str] | None = None) -> Accepts:
    """Read the signature of a class, function, method or partial.

    Packages that are slow to import are inspected only if one of ``keywords`` is not found without them.
    """
    if keywords is None:
        return _accepts(target)
    signature = _accepts(target, skips_slow=True)
    if signature.is_incomplete and not signature.named.keys() >= set(keywords):
        return _accepts(target)
    return signature


def _accepts(target: Callable[..., Any], depth: int = 0, skips_slow: bool = False) -> Accepts:
    """Read a signature; ``skips_slow`` leaves slow packages out, ``depth`` counts the calls that were followed."""
    if isinstance(target, functools.partial):
        inner = _accepts(target.func, depth, skips_slow)
        return remaining(inner, len(target.args), optional=set(target.keywords))
    try:
        signature = inspect.signature(target)
    except (TypeError, ValueError):  # as of some classes written in C
        return Accepts(takes_any_name=True, variadic=True)
    accepted = Accepts()
    catch_all = None
    source = inspect.unwrap(_implementation(target)[0])  # its globals have the names in the annotations
    if getattr(source, "__name__", "") == "_no_init_or_replace_init":
        return accepted  # subclasses of a Protocol without __init__ take no arguments
    for name, parameter in signature.parameters.items():
        if parameter.kind is parameter.VAR_POSITIONAL:
            accepted.variadic = True
        elif parameter.kind is parameter.VAR_KEYWORD:
            catch_all = name
            accepted.has_kwargs = True
        else:
            if parameter.kind is not parameter.POSITIONAL_ONLY:
                annotation = _evaluate_annotation(parameter, source)
                accepted.named[name] = Argument(annotation, required=parameter.default is parameter.empty)
            if parameter.kind is not parameter.KEYWORD_ONLY:
                accepted.order.append(name)
    if catch_all is not None:
        _follow_kwargs(target, catch_all, accepted, depth, skips_slow)
    return accepted


def _evaluate_annotation(parameter: inspect.Parameter, source: Any) -> Any:
    """Return the type of a parameter of the function ``source``; a default of ``None`` makes it optional."""
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
    """Return the function that takes the arguments, and the class that defines it; None for a plain function."""
    if inspect.isclass(target):
        for owner in target.__mro__:
            for name in ("__init__", "__new__"):
                if name in vars(owner) and owner is not object:  # whose __init__ takes no arguments
                    return getattr(owner, name), owner
        return target, None
    if inspect.ismethod(target):
        cls = target.__self__
        if not inspect.isclass(cls):
            cls = type(cls)
        for owner in cls.__mro__:
            if target.__name__ in vars(owner):
                return target.__func__, owner
        return target.__func__, None
    if not inspect.isroutine(target):
        return type(target).__call__, type(target)
    return target, None


def remaining(
    inner: Accepts, num_positional: int, keywords: Set[str] = frozenset(), optional: Set[str] = frozenset()
) -> Accepts:
    """Return what ``inner`` accepts besides arguments that a call passes; ``optional`` names stop being required."""
    passed = {*inner.order[:num_positional], *keywords}
    named = {}
    for name, argument in inner.named.items():
        if name in optional:
            argument = Argument(argument.annotation)
        if name not in passed:
            named[name] = argument
    order = [name for name in inner.order[num_positional:] if name not in passed]
    return Accepts(named, order, inner.variadic, inner.takes_any_name, inner.has_kwargs, inner.is_incomplete)


def _follow_kwargs(target: Any, catch_all: str, accepted: Accepts, depth: int, skips_slow: bool) -> None:
    """Add to ``accepted`` the names that ``**catch_all`` of ``target`` may contain.

    Parameters that ``accepted`` has already are those of ``target`` itself, and stay as they are.
    """
    if depth >= _MAX_DEPTH:  # functions may call each other in a circle
        accepted.takes_any_name = True
        return
    # load_dataset passes **kwargs to the reader of the files' format, which only the files tell.
    if getattr(target, "__name__", "") == "load_dataset" and target.__module__.partition(".")[0] == "datasets":
        for name in _dataset_reader_arguments():
            accepted.named.setdefault(name, Argument())
        return
    function, owner = _implementation(target)
    function = inspect.unwrap(function)
    try:
        uses, imports = _read_source(function, catch_all)
    except (OSError, TypeError, SyntaxError, IndexError):  # no source, as of functions written in C
        accepted.takes_any_name = True
        return
    if uses.unknown:
        accepted.takes_any_name = True
        return
    if inspect.isclass(target):
        subject = target
    else:
        subject = getattr(target, "__self__", None)
    scope = _Scope(function, owner, subject, imports)
    # With several calls, such as one in each branch, no call needs its arguments in every case.
    is_only_use = len(uses.calls) == 1 and not uses.names
    for call in uses.calls:
        # The common arguments are known without the import; accepts() follows the call if a config has others.
        if skips_slow and ast.unparse(call.func) == "datasets.load_dataset":
            accepted.named = {**_LOAD_DATASET, **accepted.named}
            accepted.is_incomplete = True
            continue
        try:
            callee, skipped = scope.callee(call)  # of functools.partial(f, ...), the callee is f, and f is skipped
        except (LookupError, AttributeError, InstantiationError, ValueError):  # a callee known at run time only
            accepted.takes_any_name = True
            continue
        positional = [argument for argument in call.args[skipped:] if not isinstance(argument, ast.Starred)]
        keywords = {keyword.arg for keyword in call.keywords if keyword.arg}
        inner = remaining(_accepts(callee, depth + 1, skips_slow), len(positional), keywords)
        accepted.takes_any_name |= inner.takes_any_name
        accepted.is_incomplete |= inner.is_incomplete
        if any(isinstance(argument, ast.Starred) for argument in call.args):  # *args are passed on
            accepted.order += [name for name in inner.order if name not in accepted.order]
        for name, argument in inner.named.items():
            accepted.named.setdefault(name, Argument(argument.annotation, argument.required and is_only_use))
    for name in uses.names:
        accepted.named.setdefault(name, Argument())


@functools.lru_cache(maxsize=1024)
def _read_source(function: Any, catch_all: str) -> tuple["_Uses", dict[str, str]]:
    """Return the uses of ``**catch_all`` in ``function``, and the imports of its body; cached."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    if not isinstance(tree, (ast.FunctionDef, ast.AsyncFunctionDef)):
        raise TypeError(f"the source of {function} is no function")
    return _Uses(tree, catch_all), _imports(tree)


def _imports(tree: ast.AST) -> dict[str, str]:
    """Return imported name -> dotted path, for the imports below ``tree``."""
    paths: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and not node.level:
            for alias in node.names:
                paths[alias.asname or alias.name] = f"{node.module}.{alias.name}"
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.asname:
                    paths[alias.asname] = alias.name
                else:  # `import a.b` binds `a`
                    package = alias.name.partition(".")[0]
                    paths[package] = package
    return paths


class _Uses:
    """Uses of ``**kwargs`` in a function.

    Args:
        tree: the function.
        name: name of its ``**kwargs``.

    Attributes:
        calls: the calls that receive them, as ``function(**kwargs)``.
        names: names that are read from them, as ``kwargs.pop("name")``.
        unknown: whether they are used in another way, which does not tell the names.
    """

    def __init__(self, tree: ast.AST, name: str) -> None:
        self.calls: list[ast.Call] = []
        self.names: set[str] = set()
        self.unknown = False
        parents: dict[ast.AST, ast.AST] = {}  # nodes know their children only
        for node in ast.walk(tree):
            for child in ast.iter_child_nodes(node):
                parents[child] = node
        names = [node for node in ast.walk(tree) if isinstance(node, ast.Name)]

        prepared: set[str] = set()  # variables that a call makes from kwargs, as in "prepared = prepare(kwargs)"
        for node in names:
            if node.id != name:
                continue
            variables = self._assigned_variables(node, parents)
            prepared |= variables - {name}  # after "kwargs = prepare(kwargs)", uses are still those of kwargs
            if not variables:
                self._record_use(parents[node], parents.get(parents[node]))

        # Any other use of "prepared" is fine, but a call must receive it in the end.
        is_used_otherwise = self.unknown
        num_calls = len(self.calls)
        for node in names:
            if node.id in prepared:
                self._record_use(parents[node], parents.get(parents[node]))
        is_lost = bool(prepared) and len(self.calls) == num_calls
        self.unknown = is_used_otherwise or is_lost

    @staticmethod
    def _assigned_variables(node: ast.Name, parents: dict[ast.AST, ast.AST]) -> set[str]:
        """Return the variables assigned from a call on ``node``, as in ``prepared = prepare(kwargs)``."""
        call = parents[node]
        assignment = parents.get(call)
        if not (isinstance(call, ast.Call) and node in call.args and isinstance(assignment, ast.Assign)):
            return set()
        variables = set()
        for target in assignment.targets:  # nested, for a tuple of variables
            for name in ast.walk(target):
                if isinstance(name, ast.Name):
                    variables.add(name.id)
        return variables

    def _record_use(self, parent: ast.AST, grandparent: ast.AST | None) -> None:
        """Record one use of the variable, whose node has these parents."""
        match parent, grandparent:
            case ast.keyword(arg=None), ast.Call():  # function(**kwargs)
                self.calls.append(grandparent)
            case ast.Attribute(attr="pop" | "get" | "setdefault"), ast.Call(args=[ast.Constant(value=name), *_]):
                self.names.add(name)
            case ast.Subscript(slice=ast.Constant(value=name)), _:
                self.names.add(name)
            case ast.Compare(left=ast.Constant(value=name)), _:  # "name" in kwargs
                self.names.add(name)
            case ((ast.Attribute(attr="update" | "copy" | "keys") | ast.If()), _):
                pass
            case _:
                self.unknown = True  # passed on as a whole, or replaced


class _Scope:
    """Resolver of names in a function's body."""

    def __init__(self, function: Any, owner: type | None, subject: Any, imports: dict[str, str]) -> None:
        self.function = function
        self.owner = owner  # the class that defines the function
        self.subject = subject  # the class or object whose arguments are asked for
        self.imports = imports

    def callee(self, call: ast.Call) -> tuple[Any, int]:
        """Return the object that ``call`` calls, and the number of leading positional arguments to skip.

        ``functools.partial(f, ...)`` counts as a call of ``f``, so 1 is skipped.
        """
        callee = self.resolve(call.func)
        if callee is functools.partial and call.args:
            return self.resolve(call.args[0]), 1
        return callee, 0

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
        # Local variables have values at run time only.
        variables = inspect.getclosurevars(self.function)
        return {**variables.builtins, **variables.globals, **variables.nonlocals}[node.id]

    def _parent(self, name: str) -> Any:
        """Return the method that ``super().name`` calls."""
        if inspect.isclass(self.subject):
            order = self.subject.__mro__
        else:
            order = (self.owner or object).__mro__
        start = 0
        if self.owner in order:  # after the class that defines the function
            start = order.index(self.owner) + 1
        for cls in order[start:]:
            if name in vars(cls):
                if cls is object:
                    return lambda: None  # object takes no arguments
                if name == "__init__":
                    return cls
                return functools.partial(getattr(cls, name), None)  # `self` is passed
        raise LookupError(name)


def _dataset_reader_arguments() -> set[str]:
    """Return the names of the arguments that ``load_dataset`` passes to its JSON, CSV, Parquet and text readers."""
    names = set()
    for kind in ("json", "csv", "parquet", "text"):
        module = importlib.import_module(f"datasets.packaged_modules.{kind}.{kind}")
        config = getattr(module, f"{kind.capitalize()}Config")
        names.update(item.name for item in fields(config))
    return names

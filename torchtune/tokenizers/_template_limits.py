"""Jinja's immutable sandbox with a limit on the amount of text and lists that a template creates.

Chat templates are untrusted code from checkpoints, and one expression may double a string sixty times. Every rendering
therefore has a budget, and pays for texts, lists and loop iterations before or when it creates them. Jinja filters and
string methods are allowed if their output is not larger than their input, or if :data:`_COSTS` estimates its size.
"""

import re
import threading
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, ClassVar

from jinja2 import Environment, nodes, pass_context
from jinja2.nodes import EvalContext
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from torchtune.data import DataError

BUDGET = 1 << 27  # characters per rendering
SOURCE = 1 << 20  # characters of a template
_ELEMENT, _ITERATION, _TEXT = 8, 16, 64  # prices of a list element, a loop iteration and a small string
_BITS = 256  # maximum size of an integer
_NUMBER = 80  # characters of a written number
_METHODS = frozenset(
    "capitalize count endswith find format index isdigit isnumeric join lower lstrip partition removeprefix "
    "removesuffix replace rfind rpartition rsplit rstrip split splitlines startswith strip title upper".split()
)
_FILTERS = frozenset(
    "abs attr capitalize count d default dictsort e escape first float format groupby indent int items join last "
    "length list lower map max min reject rejectattr replace reverse round safe select selectattr sort string title "
    "trim unique upper wordcount".split()
)
_CREATED, _ITERATED = " created", " iterated"  # names that a template cannot spell
# A width from a value: '%*d', '{:{}}'
_OPEN_WIDTH = re.compile(r"%[^a-zA-Z%]*\*|\{[^{}]*:[^{}]*\{")


def _excess() -> DataError:
    return DataError(
        "The chat template makes a text, a list, a loop or a number without an end: it is broken or hostile; take the "
        "checkpoint's original, or set the tokenizer's chat_template to another."
    )


def _size(value: Any) -> int:
    if isinstance(value, str | bytes):
        return len(value)
    return _ELEMENT * len(value) if isinstance(value, list | tuple | dict) else 0


def _written(value: Any, indent: int = 0, depth: int = 1) -> int:
    """Return the number of characters of nested plain data as text; beyond the budget, only a lower bound."""
    if isinstance(value, str | bytes):
        return len(value)
    if isinstance(value, Mapping):
        parts = [*value.keys(), *value.values()]
    elif isinstance(value, list | tuple | set | frozenset):
        parts = value
    else:
        return _NUMBER
    total = 0
    for part in parts:
        total += _TEXT + indent * depth + _written(part, indent, depth + 1)
        if total > BUDGET:
            break
    return total


def _cost_of_format(layout: str, *args: Any, **kwargs: Any) -> int:
    if _OPEN_WIDTH.search(layout):
        raise _excess()
    widths = sum(map(int, re.findall(r"\d+", layout)))
    return widths + (layout.count("{") + layout.count("%")) * _written([args, kwargs])


def _cost_of_letters(value: Any, *args: Any, **kwargs: Any) -> int:
    return _TEXT * len(value) if isinstance(value, str) else 0


def _cost_of_pieces(text: str, sep: str | None = None, maxsplit: int = -1) -> int:
    return _TEXT * (text.count(sep) if sep else len(text) // 2)


def _cost_of_indent(text: str, width: int | str = 4, first: bool = False, blank: bool = False) -> int:
    return (str(text).count("\n") + 1) * (len(width) if isinstance(width, str) else width)


# Filter or method -> estimated number of characters of a result that may be larger than the input.
_COSTS: dict[str, Callable[..., int]] = {
    **dict.fromkeys(
        "groupby list map reject rejectattr select selectattr sort splitlines unique".split(), _cost_of_letters
    ),
    **dict.fromkeys(("split", "rsplit"), _cost_of_pieces),
    **dict.fromkeys(("format", "format_map"), _cost_of_format),
    "indent": _cost_of_indent,
    "join": lambda value, d="", attribute=None: _cost_of_letters(value) + _written(value) + len(value) * len(d),
    "replace": lambda text, old, new, count=None: str(text).count(old) * len(new),
    "round": lambda value, precision=0, method="common": precision**2,
    "string": _written,
    "tojson": lambda value, indent=None, separators=(), **options: _written(
        value, (indent or 0) + sum(map(len, separators or ()))
    ),
}


class LimitedEnvironment(ImmutableSandboxedEnvironment):
    """Jinja's immutable sandbox with a budget of characters per rendering."""

    intercepted_binops: ClassVar = frozenset({"+", "*", "**", "%"})

    def __init__(self, filters: Mapping[str, Callable[..., Any]], **options: Any) -> None:
        self._thread = threading.local()
        super().__init__(finalize=self._output, **options)
        known = {name: function for name, function in self.filters.items() if name in _FILTERS} | filters
        self.filters = {name: self._paid(name, function) for name, function in known.items()}
        self.filters |= {_CREATED: self._created, _ITERATED: self._iterated}
        del self.globals["lipsum"]

    def begin(self) -> None:
        """Set this thread's budget for a new rendering."""
        self._thread.left = BUDGET

    def _pay(self, size: int) -> None:
        self._thread.left = left = getattr(self._thread, "left", BUDGET) - size
        if left < 0:
            raise _excess()

    def _created(self, value: Any) -> Any:
        self._pay(_size(value))
        return value

    @pass_context  # not evaluated at compile time
    def _iterated(self, context: Context, size: int) -> None:
        self._pay(size)

    def _output(self, value: Any) -> str:
        if not isinstance(value, str):
            self._pay(_written(value))
        return self._created(str(value))

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        return _Payments().visit(super()._parse(source, name, filename))

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Return whether a template may use an attribute: ``_METHODS`` of strings, none of bytes and numbers."""
        if isinstance(obj, str):
            return attr in _METHODS
        return not isinstance(obj, bytes | int | float) and super().is_safe_attribute(obj, attr, value)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Evaluate ``left operator right`` and pay for the result."""
        if isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * max(right, 1) if operator == "**" else left.bit_length() + right.bit_length()
            if bits > _BITS and operator in ("**", "*"):
                raise _excess()
        elif operator == "*":
            self._pay(_size(left) * right if isinstance(right, int) else _size(right) * left)
        elif operator == "%" and isinstance(left, str):
            self._pay(_cost_of_format(left, right))
        return self._created(super().call_binop(context, operator, left, right))

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Call a function or method and pay for the result."""
        method = getattr(__obj, "__wrapped__", __obj)  # Jinja wraps str.format
        owner = getattr(method, "__self__", None)
        if not isinstance(owner, str):
            return __self._created(super().call(__context, __obj, *args, **kwargs))
        subject = (*args, owner) if method.__name__ == "join" else (owner, *args)
        if method.__name__ in _COSTS:
            named = {name: value for name, value in kwargs.items() if not name.startswith("_")}  # Jinja adds _loop_vars
            __self._pay(_COSTS[method.__name__](*subject, **named))
        return __self._created(super().call(__context, __obj, *args, **kwargs))

    def _paid(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a filter, so that the rendering pays for its result."""

        @wraps(function)  # keeps the attributes that make Jinja pass a context
        def paid(*args: Any, **kwargs: Any) -> Any:
            first = 1 if isinstance(args[0], Environment | Context | EvalContext) else 0
            subject = [list(value) if hasattr(value, "__next__") else value for value in args[first:]]
            if name in _COSTS:
                self._pay(_COSTS[name](*subject, **kwargs))
            return self._created(function(*args[:first], *subject, **kwargs))

        return paid


class _Payments(NodeTransformer):
    """Adds payments where Jinja has no hook: loops, slices and ``~``."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        size = _ITERATION + sum(len(data.data) for data in node.find_all(nodes.TemplateData))
        node.body.insert(0, nodes.ExprStmt(_filtered(nodes.Const(size), _ITERATED)))
        return self.generic_visit(node)

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        node = self.generic_visit(node)
        return _filtered(node, _CREATED) if isinstance(node.arg, nodes.Slice) else node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        return self.generic_visit(_filtered(nodes.List(node.nodes), "join"))


def _filtered(value: nodes.Expr, name: str) -> nodes.Filter:
    return nodes.Filter(value, name, [], [], None, None)

"""Limits of what a chat template may do: templates come from strangers, and every checkpoint brings one.

A template may be a loop without an end, or double a text sixty times. Signals that interrupt it exist in the main
thread alone, so the template is limited from inside: loops and macros count their rounds, and every text or list is
charged. Of Jinja's filters and Python's methods of texts, a template has those that make no more than they are given,
and a few others, such as ``join`` and ``format``, that are charged before they run.
"""

import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import reduce, wraps
from string import Formatter
from typing import Any, ClassVar

from jinja2 import Environment, nodes, pass_context
from jinja2.nodes import EvalContext
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from torchtune.data import DataError

SECONDS = 10.0
ROUNDS = 1 << 18
CHARACTERS = 1 << 24  # total of one rendering, plus this multiple of its input:
PER_CHARACTER = 64
SOURCE = 1 << 20
_RANGE = 10_000
_ELEMENT = 16  # what an element of a list or mapping is charged, beside its text
_NESTED = 1 << 26  # most that nested data may be charged where it is written
_BITS = 1 << 14  # of a number
_WIDTH = re.compile(r"\d{1,9}|\*")
_ENDLESS = "makes a text or a list without an end"
_METHODS = frozenset(
    "capitalize count endswith find format index isdigit isnumeric join lower lstrip partition removeprefix "
    "removesuffix replace rfind rpartition rsplit rstrip split splitlines startswith strip title upper".split()
)
_FILTERS = frozenset(
    "abs attr capitalize count d default dictsort e escape first float format groupby indent int items join last "
    "length list lower map max min reject rejectattr replace reverse round safe select selectattr sort string title "
    "tojson trim unique upper wordcount".split()
)
_COUNT, _JOIN, _ADD = " count", " join", " add"  # no template can write these names
_TEXT = {str}
_OF_LOOPS = frozenset({"first", "index", "index0", "last", "length", "nextitem", "previtem", "revindex", "revindex0"})
_OF_DICTS = frozenset(dir(dict))


class TemplateLimit(DataError):
    """A chat template takes too long or makes too much."""

    def __init__(self, what: str) -> None:
        super().__init__(
            f"The chat template {what}: it is broken or hostile; take the checkpoint's original, or set the "
            "tokenizer's chat_template to another."
        )


class Budget:
    """What one rendering may use.

    Args:
        given: what goes into the template; more of it allows more.
    """

    def __init__(self, given: Any = None) -> None:
        self._given = given
        self._deadline = time.thread_time() + SECONDS  # a busy machine is no fault of the template
        self._rounds, self._characters = ROUNDS, CHARACTERS
        self._is_extended = False

    def round(self, characters: int) -> None:
        """Count the constant characters of one loop iteration or macro call."""
        self._rounds -= 1
        if self._rounds < 0:
            self._extend()
            if self._rounds < 0:
                raise TemplateLimit("loops without an end")
        if characters:
            self.charge(characters)
        if self._rounds % 64 == 0 and time.thread_time() > self._deadline:  # asking takes microseconds
            raise TemplateLimit(f"takes more than {SECONDS:.0f} seconds of one core for one conversation")

    def charge(self, characters: int) -> None:
        """Count characters, or elements of lists, that are made."""
        self._characters -= characters
        if self._characters < 0:
            self._extend()
            if self._characters < 0:
                raise TemplateLimit(_ENDLESS)

    def _extend(self) -> None:
        """Allow what is given, which is measured by those who need it alone."""
        if not self._is_extended:
            self._is_extended = True
            size, turns = measure(self._given, 1 << 40)
            self._characters += PER_CHARACTER * size
            self._rounds += turns * turns  # for every turn a look at all the others


def measure(value: Any, limit: int) -> tuple[int, int]:
    """Characters that nested plain data has when it is written, and its largest list. Gives up above ``limit``.

    Raises:
        TemplateLimit: it has more than ``limit`` characters or elements.
    """
    size, longest, left = 0, 0, [value]
    while left:
        item = left.pop()
        if isinstance(item, str | bytes):
            size += len(item) + 2
        elif isinstance(item, Mapping):
            left += [*item.keys(), *item.values()]
            size += _ELEMENT * len(item)
        elif isinstance(item, list | tuple | set | frozenset):
            left += item
            longest = max(longest, len(item))
            size += _ELEMENT * len(item)
        if size > limit:
            raise TemplateLimit(_ENDLESS)
    return size, longest


def _size(value: Any) -> int:
    return len(value) if isinstance(value, str | bytes | list | tuple) else 0


class LimitedEnvironment(ImmutableSandboxedEnvironment):
    """Jinja's immutable sandbox with limits of time and size."""

    intercepted_binops: ClassVar = frozenset({"+", "*", "**", "%"})

    def __init__(self, filters: Mapping[str, Callable[..., Any]], **options: Any) -> None:
        self._running = threading.local()
        super().__init__(finalize=self._written, **options)
        known = {name: function for name, function in self.filters.items() if name in _FILTERS} | filters
        self.filters = {name: self._charged(name, function) for name, function in known.items()}
        # Handing over the context keeps Jinja from calling them while it compiles.
        self.filters |= {_COUNT: self._counted, _JOIN: self._joined, _ADD: self._added}
        self.globals["range"] = self._range
        del self.globals["lipsum"]

    @property
    def budget(self) -> Budget:
        """That of the rendering of this thread; one for constants while a template is compiled."""
        return getattr(self._running, "budget", None) or Budget()

    @budget.setter
    def budget(self, budget: Budget | None) -> None:
        self._running.budget = budget

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        """The syntax tree of a template, with counted loops and macros, ``~`` and ``+`` through methods of ours."""
        tree = super()._parse(source, name, filename)
        for node in list(tree.find_all((nodes.For, nodes.Macro, nodes.CallBlock))):
            written = sum(len(data.data) for data in node.find_all(nodes.TemplateData))
            node.body.insert(0, nodes.ExprStmt(_inner(_COUNT, nodes.Const(written))).set_lineno(node.lineno))
            if isinstance(node, nodes.For) and node.test is not None:
                node.test = nodes.And(_inner(_COUNT, nodes.Const(0)), node.test)
        return _Joins().visit(tree)

    @pass_context
    def _counted(self, context: Any, characters: int) -> bool:
        """A round of a loop."""
        self._running.budget.round(characters)
        return True

    @pass_context
    def _joined(self, context: Any, *values: Any) -> str:
        """The ``~`` of templates."""
        texts = [value if type(value) is str else self._text(value) for value in values]
        self.budget.charge(sum(map(len, texts)))
        return "".join(texts)

    @pass_context
    def _added(self, context: Any, *values: Any) -> Any:
        """Three or more values with ``+`` between them."""
        if {*map(type, values)} == _TEXT:  # most are
            self.budget.charge(sum(map(len, values)))
            return "".join(values)
        return reduce(lambda left, right: self.call_binop(context, "+", left, right), values)

    def getattr(self, obj: Any, attribute: str) -> Any:
        """An attribute; at once where the sandbox's checks have nothing to find."""
        if type(obj) is dict and attribute in obj and attribute not in _OF_DICTS:
            return obj[attribute]
        if type(obj) is LoopContext and attribute in _OF_LOOPS:
            return getattr(obj, attribute)
        return super().getattr(obj, attribute)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Whether a template may use an attribute; of texts and numbers, methods that make little."""
        if isinstance(obj, str):
            return attr in _METHODS
        return not isinstance(obj, bytes | int | float) and super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """``str.format`` in the sandbox, with its size charged before."""
        formatted = super().wrap_str_format(value)
        if formatted is None:
            return None
        layout = value.__self__

        def checked(*args: Any, **kwargs: Any) -> str:
            specs = [spec or "" for *_, spec, _ in Formatter().parse(layout)]
            if any("{" in spec for spec in specs):
                raise TemplateLimit(_ENDLESS)  # a width that a value gives
            self._check_format(layout, [*args, *kwargs.values()], "".join(specs).replace("*", ""))
            return formatted(*args, **kwargs)

        return checked

    def _text(self, value: Any) -> str:
        if not isinstance(value, str):
            self.budget.charge(measure(value, _NESTED)[0])
        return str(value)

    def _written(self, value: Any) -> Any:
        """Whatever a template writes passes here."""
        text = value if type(value) is str else self._text(value)
        self.budget.charge(len(text))
        return text

    def _range(self, *numbers: int) -> range:
        found = range(*numbers)
        if len(found) > _RANGE:
            raise TemplateLimit(f"asks for a range of {len(found):.0e} numbers")
        return found

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """``left operator right``, with its size charged before."""
        if operator == "+" and type(left) is type(right) is str:  # most are
            self.budget.charge(len(left) + len(right))
            return left + right
        if isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * max(right, 0) if operator == "**" else left.bit_length() + right.bit_length()
            if bits > _BITS and operator in ("**", "*"):
                raise TemplateLimit("makes a number without an end")
        elif operator == "+":
            self.budget.charge(_size(left) + _size(right))
        elif operator == "*":
            times = left if isinstance(left, int) else right
            self.budget.charge((_size(left) + _size(right)) * max(times, 0) if isinstance(times, int) else 0)
        elif operator == "%" and isinstance(left, str):
            self._check_format(left, right, left)
        elif operator == "**" and not (isinstance(left, int | float) and isinstance(right, int | float)):
            raise TemplateLimit("raises what is no number to a power")
        return super().call_binop(context, operator, left, right)

    def _check_format(self, layout: str, values: Any, widths: str) -> None:
        numbers = _WIDTH.findall(widths)
        if "*" in numbers:
            raise TemplateLimit(_ENDLESS)
        places = layout.count("{") + layout.count("%")
        self.budget.charge(len(layout) + sum(map(int, numbers)) + places * measure(values, _NESTED)[0])

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Call a function or method from inside a template, with what it makes charged."""
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, str):
            args = __self._check(__obj.__name__, [owner, *args], kwargs)[1:]
        result = super().call(__context, __obj, *args, **kwargs)
        __self.budget.charge(_size(result))
        return result

    def _check(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        """Charge a method or filter with the size of its result. Returns its arguments, with lists for generators."""
        args = [list(value) if hasattr(value, "__next__") else value for value in args]
        named = {key: value for key, value in kwargs.items() if isinstance(value, str | int)}
        texts = [str(value) for value in [*args[1:], *named.values()]]
        if name == "replace" and len(texts) >= 2:
            self.budget.charge(str(args[0]).count(texts[0]) * len(texts[1]))
        elif name == "join":
            values, between = (args[0], texts) if not isinstance(args[0], str) else (args[1], [args[0]])
            values = values if isinstance(values, str | list | tuple | Mapping) else []
            self.budget.charge(len(values) * max(map(len, between), default=0) + measure(values, _NESTED)[0])
        elif name == "indent":
            widths = [value if isinstance(value, int) else len(str(value)) for value in [*args[1:], *named.values()]]
            self.budget.charge((str(args[0]).count("\n") + 1) * max(widths, default=4))
        elif name == "format":
            self._check_format(str(args[0]), [*args[1:], *kwargs.values()], str(args[0]))
        elif name in ("string", "tojson"):
            self.budget.charge(measure(args[0], _NESTED)[0])
        return args

    def _charged(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """A filter with the size of its result charged."""

        @wraps(function)  # keeps the marks by which Jinja knows the context that a filter takes
        def charged(*args: Any, **kwargs: Any) -> Any:
            given = 1 if isinstance(args[0], Environment | Context | EvalContext) else 0
            result = function(*args[:given], *self._check(name, args[given:], kwargs), **kwargs)
            self.budget.charge(_size(result))
            return result

        return charged


def _inner(name: str, value: nodes.Expr, more: list[nodes.Expr] | None = None) -> nodes.Expr:
    """A call of a function of the environment, as a filter: those are called directly, past the sandbox's checks."""
    return nodes.Filter(value, name, more or [], [], None, None)


class _Joins(NodeTransformer):
    """Puts :meth:`LimitedEnvironment._joined` in the place of ``~``, and ``_added`` in that of several ``+``."""

    def visit_Add(self, node: nodes.Add) -> nodes.Node:
        values: list[nodes.Expr] = [node.right]
        left = node.left
        while isinstance(left, nodes.Add):
            values.insert(0, left.right)
            left = left.left
        if len(values) == 1:
            return self.generic_visit(node)
        return self.generic_visit(_inner(_ADD, left, values).set_lineno(node.lineno))

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        return self.generic_visit(_inner(_JOIN, node.nodes[0], node.nodes[1:]).set_lineno(node.lineno))

"""Sandboxed rendering of Jinja chat templates."""

import json
import re
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import wraps
from typing import Any, ClassVar, NoReturn

from jinja2 import Environment, TemplateError, nodes, pass_context
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import EvalContext
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from torchtune.data import DataError
from torchtune.tokenizers._reasoning import REASONING_FIELDS

# Delimiters around the text of a {% generation %} block; random, so no text contains them.
_OPEN, _CLOSE = (f"\ue000{uuid.uuid4().hex}\ue001" for _ in range(2))
# Errors of template expressions on unexpected data.
_TEMPLATE_FAILURES = (TemplateError, TypeError, ValueError, LookupError, AttributeError)

_CLOCK_CALL = re.compile(r"strftime_now\(\s*(['\"])(.*?)\1\s*\)")
_DIRECTIVE = re.compile(r"%-?(.)")
_DATE = frozenset("aAwdbBmyYjUWGVux%")  # strftime directives that change at most once a day

_PROBE_TEXT = f"probe{uuid.uuid4().hex}"  # letters and digits only, like all marks
_PROBE_CALL = {"type": "function", "id": "call00000", "function": {"name": "look", "arguments": {"at": "it"}}}
# Role -> turns before the probed turn, and turns after it; templates refuse such turns elsewhere.
_PROBE_CONTEXTS: dict[str, tuple[list[dict[str, Any]], list[dict[str, Any]]]] = {
    "system": ([], [{"role": "user", "content": "Question"}]),
    "developer": ([], [{"role": "user", "content": "Question"}]),
    "user": ([], []),
    "assistant": ([{"role": "user", "content": "Question"}], []),
    "tool": (
        [
            {"role": "user", "content": "Question"},
            {"role": "assistant", "content": "", "tool_calls": [_PROBE_CALL]},
        ],
        [],
    ),
}


class _Generation(Extension):
    """``{% generation %}…{% endgeneration %}``, which marks the assistant's text."""

    tags = {"generation"}  # noqa: RUF012  (the base class declares it so)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    def _mark(self, caller: Any) -> str:
        return f"{_OPEN}{caller()}{_CLOSE}"


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


class ChatTemplate:
    """A compiled chat template.

    Templates are untrusted code: they run in Jinja's immutable sandbox with a size limit, and see plain data only. The
    environment is the same as in ``transformers``: trimmed blocks, ``break`` and ``continue``, ``tojson``,
    ``strftime_now``, ``raise_exception``, ``{% generation %}``.

    Some templates, such as SmolVLM's, iterate over the parts of a turn and write nothing for a text; others fail at a
    list of parts. Each text is therefore passed in the form in which the template writes turns of this role.

    Args:
        source: source of the template.
        variables: further template variables, for example ``bos_token`` or ``enable_thinking``.

    Raises:
        DataError: the template has a syntax error, or is too large.
    """

    def __init__(self, source: str, variables: Mapping[str, Any]) -> None:
        self.source = source
        self.variables = dict(variables)
        self.now: datetime | None = None
        self._is_part_role: dict[str, bool] = {}
        self._is_reasoning_written: dict[bool, bool] = {}  # by whether the reasoning has a field of its own
        self._environment = environment = LimitedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols], filters={"tojson": _to_json}
        )
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = self._strftime_now
        if len(source) > SOURCE:
            raise DataError(f"The chat template has {len(source)} characters: {SOURCE} are the most that is read.")
        try:
            self._template = environment.from_string(source)
            self._template.globals = dict(self._template.globals)  # a plain dict is faster than Jinja's ChainMap
        except DataError:
            raise
        except (RecursionError, MemoryError, SyntaxError, OverflowError) as error:
            raise DataError("The chat template is nested too deeply, or its constants are too large.") from error
        except TemplateError as error:
            line = getattr(error, "lineno", None)
            said = str(error).rstrip(".")
            raise DataError(f"The chat template has an error in line {line}: {said}.") from error
        self.marks_generation = "generation" in source and "endgeneration" in source

    def __reduce__(self) -> Any:
        return type(self), (self.source, self.variables)  # recompiled when unpickled

    def fingerprint_parts(self) -> list[Any] | None:
        """Return the values that renderings depend on; None if they depend on the time of day."""
        layouts = _CLOCK_CALL.findall(self.source)
        mentions = len(re.findall(r"strftime_now(?!\s+is\s+(?:not\s+)?defined)", self.source))
        if len(layouts) != mentions or any(set(_DIRECTIVE.findall(layout)) - _DATE for _, layout in layouts):
            return None
        return [self.source, self.variables, [self._strftime_now(layout) for _, layout in layouts]]

    def _strftime_now(self, layout: str) -> str:
        return (self.now or datetime.now()).strftime(layout)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = False,
        tools: Sequence[Any] | None = None,
    ) -> tuple[str, list[tuple[int, int]]]:
        """Render a conversation.

        Returns:
            the text, and (start, end) in characters of each generation block.

        Raises:
            DataError: the template raises an error or exceeds its limits.
        """
        return self._rendered([self._readable(turn) for turn in messages], add_generation_prompt, tools)

    def _readable(self, turn: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a turn with its text in the form that the template reads: a string, or a list of one part."""
        content = turn.get("content")
        if not isinstance(content, str) or not self._reads_parts(turn.get("role")):
            return turn
        return {**turn, "content": [{"type": "text", "text": content}]}

    def _reads_parts(self, role: Any) -> bool:
        """Return whether the template writes the texts of a role only if they come as lists of parts."""
        if role not in _PROBE_CONTEXTS or "text" not in self.source:  # the key of a part's text
            return False
        if role not in self._is_part_role:
            turn = {"role": role, "content": _PROBE_TEXT}
            parts = {"role": role, "content": [{"type": "text", "text": _PROBE_TEXT}]}
            self._is_part_role[role] = not self._writes_probe(turn) and self._writes_probe(parts)
        return self._is_part_role[role]

    def writes_reasoning(self, turn: Mapping[str, Any]) -> bool:
        """Return whether the template writes reasoning in the last turn, if it is given as in ``turn``."""
        is_field = any(turn.get(name) for name in REASONING_FIELDS)
        if is_field not in self._is_reasoning_written:
            probe = {"role": "assistant", "content": f"<think>\n{_PROBE_TEXT}\n</think>\n\nAnswer"}
            if is_field:
                probe = {**dict.fromkeys(REASONING_FIELDS, _PROBE_TEXT), "role": "assistant", "content": "Answer"}
            self._is_reasoning_written[is_field] = self._writes_probe(self._readable(probe))
        return self._is_reasoning_written[is_field]

    def _writes_probe(self, turn: Mapping[str, Any]) -> bool:
        """Return whether the probe's text is in the rendered conversation."""
        before, after = _PROBE_CONTEXTS[turn["role"]]
        turns = [*map(self._readable, before), turn, *map(self._readable, after)]
        try:
            return _PROBE_TEXT in self._rendered(turns, False, None)[0]
        except DataError:  # the template refuses the turn, or its content in this form
            return False

    def _rendered(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool, tools: Sequence[Any] | None
    ) -> tuple[str, list[tuple[int, int]]]:
        """Render turns as they are; see :meth:`render`."""
        self._environment.begin()
        try:
            text = self._template.render(
                messages=list(messages),
                tools=None if tools is None else list(tools),
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self.variables,
            )
        except DataError:
            raise
        except (RecursionError, MemoryError, OverflowError) as error:
            raise DataError("The chat template calls itself without an end, or asks for too much memory.") from error
        except _TEMPLATE_FAILURES as error:
            raise DataError(f"the chat template refuses the conversation: {error}") from error
        if _OPEN not in text:
            return text, []
        spans: list[tuple[int, int]] = []
        pieces: list[str] = []
        length = 0
        for piece in text.split(_OPEN):
            inside, mark, outside = piece.partition(_CLOSE)
            if mark:
                spans.append((length, length + len(inside)))
            pieces += [inside, outside]
            length += len(inside) + len(outside)
        return "".join(pieces), spans


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


_TURNS = re.compile("(Text\ue010\\w\ue011)")
_LAST = "{{ $end := 0 }}{{ range $i, $_ := .Messages }}{{ $end = $i }}{{ end }}"
_REFUSAL = "its chat template writes turns that a Modelfile's TEMPLATE cannot express"


def go_template(tokenizer: Any, *, adds_bos: bool) -> str:
    """Return a chat template for Ollama with the layout of a tokenizer's chat template.

    The texts around turns are learned from renderings of conversations with and without a system turn, which may come
    first or inside the last turn of the user. Tool turns are omitted.

    Args:
        tokenizer: a :class:`HuggingFaceModelTokenizer`.
        adds_bos: whether the program that renders the template adds the BOS token itself.

    Returns:
        A template for the fields ``System`` and ``Messages``, each with ``Role`` and ``Content``.

    Raises:
        DataError: there is no chat template, or the texts around a turn depend on more than its role.

    Example:
        >>> torchtune.tokenizers.go_template(tokenizer, adds_bos=False)[-9:]
        '{{ end }}'
    """
    bos = "" if tokenizer.bos_id is None else tokenizer.decode([tokenizer.bos_id], skip_special_tokens=False)

    def around(roles: str) -> tuple[str, list[str]]:
        names = {"s": "system", "u": "user", "a": "assistant"}
        turns = [{"role": names[role], "content": f"Text\ue010{role}\ue011"} for role in roles]
        pieces = _TURNS.split(tokenizer.render_template(turns, add_generation_prompt=True))
        texts = [pieces[0].removeprefix(bos) if adds_bos and bos else pieces[0], *pieces[2::2]]
        if any("{{" in text or '"""' in text for text in texts):
            raise DataError(f"{_REFUSAL}: they hold {{{{ or quotes.")
        return "".join(piece[5] for piece in pieces[1::2]), texts

    order, (before, answer, after, end) = around("uau")
    if around("u") != ("u", [before, end]) or around("uauau")[1] != [before, answer, after, answer, after, end]:
        raise DataError(f"{_REFUSAL}: earlier turns are written otherwise than the last.")
    start, inside = before, ""
    try:
        order, (first, *rest) = around("suau")
    except DataError:  # the template does not accept a system turn
        order = "none"
    if order == "suau" and rest[1:] == [answer, after, end]:
        start = f"{{{{ if .System }}}}{first}{{{{ .System }}}}{rest[0]}{{{{ else }}}}{before}{{{{ end }}}}"
    elif order == "uasu" and [first, rest[0], rest[1], rest[3]] == [before, answer, after, end]:
        inside = f"{{{{ if and $.System (eq $i $end) }}}}{{{{ $.System }}}}{rest[2]}{{{{ end }}}}"
    elif order != "none":
        raise DataError(f"{_REFUSAL}: the system turn changes others.")
    ends = answer if answer == end else f"{{{{ if eq $i $end }}}}{end}{{{{ else }}}}{answer}{{{{ end }}}}"
    user = f'{{{{ if eq .Role "user" }}}}{inside}{{{{ .Content }}}}{ends}'
    assistant = f'{{{{ else if eq .Role "assistant" }}}}{{{{ .Content }}}}{{{{ if ne $i $end }}}}{after}{{{{ end }}}}'
    return f"{_LAST}{start}{{{{ range $i, $_ := .Messages }}}}{user}{assistant}{{{{ end }}}}{{{{ end }}}}"

"""Chat templates: rendering of Jinja templates in a sandbox with limits, and conversion to Go's template language."""

import json
import re
import threading
import time
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

from torchtune.data import REASONING_FIELDS, DataError

# Delimiters around the text of a {% generation %} block; random, so no text contains them.
_GENERATION_START = f"\ue000{uuid.uuid4().hex}\ue001"
_GENERATION_END = f"\ue000{uuid.uuid4().hex}\ue001"
# Errors of template expressions on unexpected data.
_TEMPLATE_FAILURES = (TemplateError, TypeError, ValueError, LookupError, AttributeError)

_CLOCK_CALL = re.compile(r"strftime_now\(\s*(['\"])(.*?)\1\s*\)")
# A use of the clock, but not the test whether there is one.
_CLOCK_MENTION = re.compile(r"strftime_now(?!\s+is\s+(?:not\s+)?defined)")
_DIRECTIVE = re.compile(r"%-?(.)")
_DATE_DIRECTIVES = frozenset("aAwdbBmyYjUWGVux%")  # strftime directives that change at most once a day

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
        return f"{_GENERATION_START}{caller()}{_GENERATION_END}"


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return a value as JSON; templates expect no escapes, unlike Jinja's own filter ``tojson``."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


class ChatTemplate:
    """A compiled chat template.

    Templates are untrusted code: they run in :class:`TemplateSandbox`, and see plain data only. The environment is the
    same as in ``transformers``: trimmed blocks, ``break`` and ``continue``, ``tojson``, ``strftime_now``,
    ``raise_exception``, ``{% generation %}``.

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
        self.now: datetime | None = None  # what `strftime_now` reads; None for the clock
        self.marks_generation = "generation" in source and "endgeneration" in source
        self._is_part_role: dict[str, bool] = {}  # by role, whether the template reads a list of parts
        self._is_reasoning_written: dict[bool, bool] = {}  # by whether the reasoning has a field of its own
        if len(source) > MAX_SOURCE:
            raise DataError(f"The chat template has {len(source)} characters: {MAX_SOURCE} are the most that is read.")
        self._environment = TemplateSandbox(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols], filters={"tojson": _to_json}
        )
        self._environment.globals["raise_exception"] = _raise_exception
        self._environment.globals["strftime_now"] = self._strftime_now
        self._environment.start_rendering()  # compilation evaluates constant expressions
        try:
            self._template = self._environment.from_string(source)
        except DataError:  # a limit of the sandbox, whose message says all
            raise
        except (RecursionError, MemoryError, SyntaxError, OverflowError) as error:
            raise DataError("The chat template is nested too deeply, or its constants are too large.") from error
        except TemplateError as error:
            line = getattr(error, "lineno", None)
            problem = str(error).rstrip(".")
            raise DataError(f"The chat template has an error in line {line}: {problem}.") from error
        self._template.globals = dict(self._template.globals)  # a plain dict is faster than Jinja's ChainMap

    def __reduce__(self) -> Any:
        return type(self), (self.source, self.variables)  # recompiled when unpickled

    def fingerprint_parts(self) -> list[Any] | None:
        """Return the values that renderings depend on; None if they depend on the time of day."""
        layouts = [layout for _, layout in _CLOCK_CALL.findall(self.source)]
        num_mentions = len(_CLOCK_MENTION.findall(self.source))
        if len(layouts) != num_mentions:  # a layout that is not a constant
            return None
        dates = []
        for layout in layouts:
            directives = set(_DIRECTIVE.findall(layout))
            if directives - _DATE_DIRECTIVES:
                return None
            dates.append(self._strftime_now(layout))
        return [self.source, self.variables, dates]

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
        role = turn.get("role")
        content = turn.get("content")
        # Every template that reads parts has "text", the key of a part's text.
        if not isinstance(content, str) or role not in _PROBE_CONTEXTS or "text" not in self.source:
            return turn
        if role not in self._is_part_role:
            probe = {"role": role, "content": _PROBE_TEXT}
            part_probe = {"role": role, "content": [{"type": "text", "text": _PROBE_TEXT}]}
            self._is_part_role[role] = not self._writes_probe(probe) and self._writes_probe(part_probe)
        if not self._is_part_role[role]:
            return turn
        return {**turn, "content": [{"type": "text", "text": content}]}

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
        if tools is not None:
            tools = list(tools)
        self._environment.start_rendering()
        try:
            text = self._template.render(
                messages=list(messages),
                tools=tools,
                documents=None,  # a variable of `transformers`, for retrieval
                add_generation_prompt=add_generation_prompt,
                **self.variables,
            )
        except DataError:  # a limit of the sandbox, whose message says all
            raise
        except (RecursionError, MemoryError, OverflowError) as error:
            raise DataError("The chat template calls itself without an end, or asks for too much memory.") from error
        except _TEMPLATE_FAILURES as error:
            raise DataError(f"the chat template refuses the conversation: {error}") from error
        if _GENERATION_START not in text:
            return text, []
        # Remove the delimiters of the generation blocks; where each block lies is known only now.
        spans: list[tuple[int, int]] = []
        pieces: list[str] = []
        length = 0
        for piece in text.split(_GENERATION_START):
            inside, delimiter, outside = piece.partition(_GENERATION_END)
            if delimiter:
                spans.append((length, length + len(inside)))
            pieces += [inside, outside]
            length += len(inside) + len(outside)
        return "".join(pieces), spans


# Limits of one rendering. The largest conversations have some ten million characters and render in about a second.
MAX_SOURCE = 1 << 20  # characters of a template
MAX_CHARACTERS = 1 << 27  # created while rendering, in texts and, converted to characters, in lists and iterations
MAX_CPU_SECONDS = 30.0
_CHARACTERS_PER_CLOCK_READING = 4096  # reading the CPU time is a system call

# Memory that is charged for what is not text, in characters.
_LIST_ELEMENT = 8
_ITERATION = 16
_SMALL_STRING = 64
_WRITTEN_NUMBER = 80
_MAX_INTEGER_BITS = 256

# Everything else is refused: an unlisted filter or method might create more than it is charged for.
_STRING_METHODS = frozenset(
    "capitalize count endswith find format index isdigit isnumeric join lower lstrip partition removeprefix "
    "removesuffix replace rfind rpartition rsplit rstrip split splitlines startswith strip title upper".split()
)
_FILTERS = frozenset(
    "abs attr capitalize count d default dictsort e escape first float format groupby indent int items join last "
    "length list lower map max min reject rejectattr replace reverse round safe select selectattr sort string title "
    "trim unique upper wordcount".split()
)
# Filters that the sandbox adds; a template cannot spell their names.
_CHARGE_VALUE = " charge value"
_CHARGE_ITERATION = " charge iteration"
# A width that is taken from an argument: '%*d', '{:{}}'.
_WIDTH_FROM_ARGUMENT = re.compile(r"%[^a-zA-Z%]*\*|\{[^{}]*:[^{}]*\{")


def _too_large() -> DataError:
    return DataError(
        "The chat template makes a text, a list, a loop or a number without an end: it is broken or hostile; take the "
        "checkpoint's original, or set the tokenizer's chat_template to another."
    )


def _memory_of(value: Any) -> int:
    """Return the size of a text or list in characters, without that of the list's elements."""
    if type(value) is str:  # fast path
        return len(value)
    if isinstance(value, str | bytes):
        return len(value)
    if isinstance(value, list | tuple | dict):
        return _LIST_ELEMENT * len(value)
    return 0


def _written_length(value: Any, indent: int = 0, depth: int = 1) -> int:
    """Return the number of characters of nested plain data as text; above the limit, only a lower bound.

    A list may contain the same list many times, so that its text is exponentially larger than the data.
    """
    if isinstance(value, str | bytes):
        return len(value)
    if isinstance(value, Mapping):
        elements = [*value.keys(), *value.values()]
    elif isinstance(value, list | tuple | set | frozenset):
        elements = value
    else:
        return _WRITTEN_NUMBER
    length = 0
    for element in elements:
        length += _SMALL_STRING + indent * depth  # brackets, separators and the indentation of a line
        length += _written_length(element, indent, depth + 1)
        if length > MAX_CHARACTERS:
            break
    return length


def _cost_of_format(layout: str, *args: Any, **kwargs: Any) -> int:
    if _WIDTH_FROM_ARGUMENT.search(layout):
        raise _too_large()
    # Every number may be a width, and every field may be the longest argument: an upper bound.
    widths = sum(int(digits) for digits in re.findall(r"\d+", layout))
    num_fields = layout.count("{") + layout.count("%")
    return widths + num_fields * _written_length([args, kwargs])


def _cost_of_letters(value: Any, *args: Any, **kwargs: Any) -> int:
    """Return the cost of iterating over a value: a text becomes one small string per letter."""
    if not isinstance(value, str):
        return 0
    return _SMALL_STRING * len(value)


def _cost_of_split(text: str, sep: str | None = None, maxsplit: int = -1) -> int:
    if sep:
        num_pieces = text.count(sep)
    else:  # at white space: at most every second character
        num_pieces = len(text) // 2
    return _SMALL_STRING * num_pieces


def _cost_of_indent(text: str, width: int | str = 4, first: bool = False, blank: bool = False) -> int:
    num_lines = str(text).count("\n") + 1
    if isinstance(width, str):
        width = len(width)
    return num_lines * width


def _cost_of_join(value: Any, d: str = "", attribute: Any = None) -> int:
    return _cost_of_letters(value) + _written_length(value) + len(value) * len(d)


def _cost_of_replace(text: Any, old: str, new: str, count: int | None = None) -> int:
    return str(text).count(old) * len(new)


def _cost_of_round(value: Any, precision: int = 0, method: str = "common") -> int:
    return precision**2  # the time for 10**precision


def _cost_of_json(
    value: Any, indent: int | None = None, separators: Sequence[str] | None = None, **options: Any
) -> int:
    per_element = (indent or 0) + sum(len(separator) for separator in separators or ())
    return _written_length(value, per_element)


# Filter or string method -> number of characters to charge before the call, because the result may be much larger than
# the arguments. The results of all other calls are charged afterwards.
_COSTS: dict[str, Callable[..., int]] = {
    "format": _cost_of_format,
    "format_map": _cost_of_format,
    "groupby": _cost_of_letters,
    "indent": _cost_of_indent,
    "join": _cost_of_join,
    "list": _cost_of_letters,
    "map": _cost_of_letters,
    "reject": _cost_of_letters,
    "rejectattr": _cost_of_letters,
    "replace": _cost_of_replace,
    "round": _cost_of_round,
    "rsplit": _cost_of_split,
    "select": _cost_of_letters,
    "selectattr": _cost_of_letters,
    "sort": _cost_of_letters,
    "split": _cost_of_split,
    "splitlines": _cost_of_letters,
    "string": _written_length,
    "tojson": _cost_of_json,
    "unique": _cost_of_letters,
}


class _Allowance(threading.local):
    """Characters and CPU time that the rendering in this thread may still use."""

    characters = 0
    next_check = 0  # number of characters below which the limits are compared
    end = 0.0


class TemplateSandbox(ImmutableSandboxedEnvironment):
    """Jinja's immutable sandbox with limits on memory and CPU time.

    Chat templates are untrusted code from checkpoints. Jinja's sandbox keeps them from files and from Python objects,
    but one expression such as ``'x' * 10**11`` fills the memory inside a single call of the interpreter, where no timer
    can interrupt it, least of all outside the main thread. Therefore every operation is charged for what it creates:
    before it runs if its result may be much larger than its arguments, otherwise afterwards. The charge also compares
    the CPU time of the thread, which other processes on a busy machine do not change.
    """

    intercepted_binops: ClassVar = frozenset({"+", "*", "**", "%"})

    def __init__(self, filters: Mapping[str, Callable[..., Any]], **options: Any) -> None:
        self._allowance = _Allowance()
        super().__init__(finalize=self._finalize, **options)
        allowed = {name: function for name, function in self.filters.items() if name in _FILTERS}
        allowed.update(filters)
        self.filters = {name: self._charged(name, function) for name, function in allowed.items()}
        self.filters[_CHARGE_VALUE] = self._charge_value
        self.filters[_CHARGE_ITERATION] = self._charge_iteration
        del self.globals["lipsum"]

    def start_rendering(self) -> None:
        """Reset the limits of this thread for a new rendering."""
        self._allowance.characters = MAX_CHARACTERS
        self._allowance.next_check = MAX_CHARACTERS - _CHARACTERS_PER_CLOCK_READING
        self._allowance.end = time.thread_time() + MAX_CPU_SECONDS

    def _charge(self, num_characters: int) -> None:
        """Take characters from the allowance; compare the limits now and then."""
        allowance = self._allowance
        # An operation that creates nothing costs a character, too: without it, the clock would never be read.
        characters = allowance.characters - num_characters - 1
        allowance.characters = characters
        if characters >= allowance.next_check:
            return
        if characters < 0:
            raise _too_large()
        if time.thread_time() > allowance.end:
            raise DataError(
                f"The chat template takes more than {MAX_CPU_SECONDS:g} seconds for one conversation: it is broken or "
                "hostile; take the checkpoint's original, or set the tokenizer's chat_template to another."
            )
        allowance.next_check = max(characters - _CHARACTERS_PER_CLOCK_READING, 0)

    def _charge_value(self, value: Any) -> Any:
        self._charge(_memory_of(value))
        return value

    @pass_context  # not evaluated at compile time
    def _charge_iteration(self, context: Context, num_characters: int) -> None:
        self._charge(num_characters)

    def _finalize(self, value: Any) -> str:
        """Convert the value of ``{{ … }}`` to text."""
        if not isinstance(value, str):
            self._charge(_written_length(value))
        return self._charge_value(str(value))

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        return _ChargeInserter().visit(super()._parse(source, name, filename))

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Return whether a template may use an attribute: listed methods of strings, none of bytes and numbers."""
        if isinstance(obj, str):
            return attr in _STRING_METHODS
        return not isinstance(obj, bytes | int | float) and super().is_safe_attribute(obj, attr, value)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Evaluate ``left operator right`` and charge for the result."""
        if operator != "+":  # a sum is as large as its parts
            self._charge_before(operator, left, right)
        return self._charge_value(super().call_binop(context, operator, left, right))

    def _charge_before(self, operator: str, left: Any, right: Any) -> None:
        """Charge for the result of an operation that may be much larger than its operands."""
        if isinstance(left, int) and isinstance(right, int):
            num_bits = 0
            if operator == "*":
                num_bits = left.bit_length() + right.bit_length()
            elif operator == "**":
                num_bits = left.bit_length() * max(right, 1)
            if num_bits > _MAX_INTEGER_BITS:
                raise _too_large()
        elif operator == "*" and isinstance(right, int):
            self._charge(_memory_of(left) * right)
        elif operator == "*":
            self._charge(_memory_of(right) * left)
        elif operator == "%" and isinstance(left, str):
            self._charge(_cost_of_format(left, right))

    # Jinja passes the keyword arguments of the template, so that plain names of parameters could collide with them.
    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Call a function or method and charge for the result."""
        method = getattr(__obj, "__wrapped__", __obj)  # Jinja wraps str.format
        owner = getattr(method, "__self__", None)
        if isinstance(owner, str) and method.__name__ in _COSTS:
            arguments = (owner, *args)
            if method.__name__ == "join":  # the filter takes the list first, the method takes the separator first
                arguments = (*args, owner)
            named = {name: value for name, value in kwargs.items() if not name.startswith("_")}  # Jinja adds _loop_vars
            __self._charge(_COSTS[method.__name__](*arguments, **named))
        return __self._charge_value(super().call(__context, __obj, *args, **kwargs))

    def _charged(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a filter, so that it charges for its result."""

        @wraps(function)  # keeps the attributes that make Jinja pass a context
        def charged(*args: Any, **kwargs: Any) -> Any:
            num_contexts = 0
            if isinstance(args[0], Environment | Context | EvalContext):
                num_contexts = 1
            values = []
            for value in args[num_contexts:]:
                is_iterator = hasattr(value, "__next__")
                if is_iterator:  # of a filter such as map, which has no length
                    value = list(value)
                values.append(value)
            if name in _COSTS:
                self._charge(_COSTS[name](*values, **kwargs))
            return self._charge_value(function(*args[:num_contexts], *values, **kwargs))

        return charged


class _ChargeInserter(NodeTransformer):
    """Adds charges where Jinja has no hook: loops, slices and ``~``."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        # Each iteration is charged for the layout inside the loop, which no expression writes.
        size = _ITERATION + sum(len(data.data) for data in node.find_all(nodes.TemplateData))
        node.body.insert(0, nodes.ExprStmt(_filtered(nodes.Const(size), _CHARGE_ITERATION)))
        return self.generic_visit(node)

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        node = self.generic_visit(node)
        if isinstance(node.arg, nodes.Slice):  # a copy; an element is there already
            return _filtered(node, _CHARGE_VALUE)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        # `a ~ b` is `[a, b] | join`, which is charged before it runs.
        return self.generic_visit(_filtered(nodes.List(node.nodes), "join"))


def _filtered(value: nodes.Expr, name: str) -> nodes.Filter:
    """Return the expression ``value | name``."""
    return nodes.Filter(value, name, [], [], None, None)


# Stand-in text of a turn in a learned layout, with the first letter of its role.
_STAND_IN = re.compile("Text\ue010(\\w)\ue011")
_ROLE_OF_LETTER = {"s": "system", "u": "user", "a": "assistant"}
_FIND_LAST_INDEX = "{{ $end := 0 }}{{ range $i, $_ := .Messages }}{{ $end = $i }}{{ end }}"
_NOT_EXPRESSIBLE = "its chat template writes turns that a Modelfile's TEMPLATE cannot express"


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
    omitted_bos = ""
    if adds_bos and tokenizer.bos_id is not None:
        omitted_bos = tokenizer.decode([tokenizer.bos_id], skip_special_tokens=False)

    # The texts before the first question, between a question and its answer, between this answer and the next question,
    # and behind the last question: the generation prompt, which may differ from `answer`.
    _, (before, answer, after, end) = _texts_around_turns(tokenizer, "uau", omitted_bos)
    # The texts must not depend on the number of turns, because a TEMPLATE writes each turn by its role alone.
    first_question = _texts_around_turns(tokenizer, "u", omitted_bos)
    two_answers = _texts_around_turns(tokenizer, "uauau", omitted_bos)
    if first_question != ("u", [before, end]) or two_answers[1] != [before, answer, after, answer, after, end]:
        raise DataError(f"{_NOT_EXPRESSIBLE}: earlier turns are written otherwise than the last.")

    start = before
    system_in_question = ""
    try:
        order, texts = _texts_around_turns(tokenizer, "suau", omitted_bos)
    except DataError:  # the template does not accept a system turn
        order = ""
        texts = []
    if order == "suau" and texts[2:] == [answer, after, end]:  # before the first turn
        start = "{{ if .System }}" + texts[0] + "{{ .System }}" + texts[1] + "{{ else }}" + before + "{{ end }}"
    elif order == "uasu" and texts[:3] == [before, answer, after] and texts[4] == end:  # inside the last question
        system_in_question = "{{ if and $.System (eq $i $end) }}{{ $.System }}" + texts[3] + "{{ end }}"
    elif order:
        raise DataError(f"{_NOT_EXPRESSIBLE}: the system turn changes others.")

    question_end = answer
    if answer != end:
        question_end = "{{ if eq $i $end }}" + end + "{{ else }}" + answer + "{{ end }}"
    user_turn = '{{ if eq .Role "user" }}' + system_in_question + "{{ .Content }}" + question_end
    assistant_turn = '{{ else if eq .Role "assistant" }}{{ .Content }}{{ if ne $i $end }}' + after + "{{ end }}"
    turns = "{{ range $i, $_ := .Messages }}" + user_turn + assistant_turn + "{{ end }}{{ end }}"
    return _FIND_LAST_INDEX + start + turns


def _texts_around_turns(tokenizer: Any, roles: str, omitted_bos: str) -> tuple[str, list[str]]:
    """Render turns with stand-in texts.

    Args:
        tokenizer: see :func:`go_template`.
        roles: first letters of the roles of the turns.
        omitted_bos: text that is removed from the beginning.

    Returns:
        first letters of the roles in the order in which the turns are written, and the texts before, between and after
        the turns.
    """
    turns = [{"role": _ROLE_OF_LETTER[letter], "content": f"Text\ue010{letter}\ue011"} for letter in roles]
    pieces = _STAND_IN.split(tokenizer.render_template(turns, add_generation_prompt=True))
    pieces[0] = pieces[0].removeprefix(omitted_bos)
    texts = pieces[::2]
    if any("{{" in text or '"""' in text for text in texts):
        raise DataError(f"{_NOT_EXPRESSIBLE}: they hold {{{{ or quotes.")
    return "".join(pieces[1::2]), texts

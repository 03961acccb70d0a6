"""Sandboxed rendering of Jinja chat templates."""

import json
import re
import uuid
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser

from torchtune.data import DataError
from torchtune.tokenizers._reasoning import REASONING_FIELDS
from torchtune.tokenizers._template_limits import SOURCE, LimitedEnvironment

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

"""Parsers of tool calls in the text of an assistant turn, one per format."""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

# Tool name -> JSON schema of its parameters.
Schemas = Mapping[str, Mapping[str, Any]]


class CallError(ValueError):
    """Raised for a tool call that cannot be parsed; the message is the reply to the model."""


@dataclass(frozen=True)
class ToolCall:
    """Tool call of a model.

    Attributes:
        name: name of the tool.
        arguments: values by argument name.

    Example:
        >>> from torchtune.rlhf.environments import parse_calls
        >>> text = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
        >>> parse_calls(text, "hermes", {})
        [ToolCall(name='add', arguments={'a': 1})]
    """

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)


def parse_calls(text: str, tool_format: str, schemas: Schemas) -> list[ToolCall]:
    """Parse the tool calls in a turn; calls inside the reasoning are ignored.

    Args:
        text: text of the turn, including special tokens.
        tool_format: one of :data:`FORMATS`.
        schemas: JSON schema of each tool's parameters, by tool name; determines the types of plain-text arguments.

    Returns:
        The calls; empty if the turn is an answer.

    Raises:
        CallError: a call is incomplete, or invalid in the format.

    Example:
        >>> text = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
        >>> torchtune.rlhf.environments.parse_calls(text, "hermes", {})[0].arguments
        {'a': 1}
    """
    calls = list(FORMATS[tool_format](after_reasoning(text), schemas))
    for call in calls:
        try:
            json.dumps(call.arguments, allow_nan=False)  # Python parses NaN and infinities, which rows cannot have
        except (ValueError, RecursionError) as error:
            raise CallError("the tool call is not valid JSON: it has NaN, an infinity, or too many levels") from error
    return calls


def after_reasoning(text: str) -> str:
    """Return the text of a turn after its reasoning."""
    for end in ("</think>", "<channel|>", "<|end|><|start|>assistant"):
        if end in text:
            text = text.rpartition(end)[2].lstrip("\n")
    return text


def _call_of_json(value: Any, arguments_key: str = "arguments") -> ToolCall:
    """Build a call from a JSON object with ``name`` and arguments; the arguments may be a string of JSON."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        raise CallError("a tool call must be a JSON object with 'name' and 'arguments'")
    arguments = value.get(arguments_key, {})
    if isinstance(arguments, str):
        arguments = _parse_json(arguments)
    if not isinstance(arguments, dict):
        raise CallError(f"'{arguments_key}' of the tool call must be a JSON object")
    return ToolCall(value["name"], arguments)


def _parse_json(text: str, decode: Callable[[str], Any] = json.loads) -> Any:
    try:
        return decode(text)
    except (ValueError, RecursionError) as error:
        raise CallError(f"the tool call is not valid JSON: {error}") from error


def _blocks(text: str, begin: str, end: str) -> Iterator[str]:
    """Yield the texts between the marks ``begin`` and ``end``."""
    for block in text.split(begin)[1:]:
        if end not in block:
            raise CallError(f"the tool call has no {end}")
        yield block.partition(end)[0]


def _hermes(text: str, schemas: Schemas) -> Iterator[ToolCall]:
    """``<tool_call>{"name": …, "arguments": {…}}</tool_call>``"""
    for block in _blocks(text, "<tool_call>", "</tool_call>"):
        yield _call_of_json(_parse_json(block))


_PARAMETER = re.compile(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL)


def _qwen_xml(text: str, schemas: Schemas) -> Iterator[ToolCall]:
    """``<tool_call><function=NAME><parameter=NAME>value</parameter></function></tool_call>``"""
    for block in _blocks(text, "<tool_call>", "</tool_call>"):
        function = re.fullmatch(r"\s*<function=([^>\n]+)>(.*)</function>\s*", block, re.DOTALL)
        if function is None:
            raise CallError("the tool call must be <function=NAME>…</function>")
        name = function[1].strip()
        body = function[2]
        if _PARAMETER.sub("", body).strip():
            raise CallError("the parameters of the tool call must be <parameter=NAME>…</parameter>")
        properties = schemas.get(name, {}).get("properties", {})
        arguments = {}
        for parameter, value in _PARAMETER.findall(body):
            parameter = parameter.strip()
            arguments[parameter] = _typed_argument(value, properties.get(parameter, {}))
        yield ToolCall(name, arguments)


def _typed_argument(value: str, schema: Mapping[str, Any]) -> Any:
    """Convert a plain-text argument to the type in its schema; types other than strings are parsed as JSON."""
    if schema.get("type", "string") == "string":
        return value
    try:
        return json.loads(value)
    except ValueError:  # models also write Python's constants
        return {"True": True, "False": False, "None": None}.get(value, value)


def _llama3(text: str, schemas: Schemas) -> Iterator[ToolCall]:
    """``<|python_tag|>{"name": …, "parameters": {…}}``, several separated by ``;``; the mark may be missing."""
    text = re.sub(r"<\|(python_tag|eot_id|eom_id)\|>", "", text).strip()
    while text.startswith("{"):
        value, end = _parse_json(text, json.JSONDecoder().raw_decode)
        if not isinstance(value.get("name"), str):
            return  # an answer in JSON
        yield _call_of_json(value, "parameters" if "parameters" in value else "arguments")
        text = text[end:].lstrip(" \n;")


def _mistral(text: str, schemas: Schemas) -> Iterator[ToolCall]:
    """``[TOOL_CALLS]NAME[CALL_ID]ID[ARGS]{…}``; earlier ``[TOOL_CALLS][{"name": …, "arguments": {…}}]``"""
    for block in text.replace("</s>", "").split("[TOOL_CALLS]")[1:]:
        if "[ARGS]" in block:
            header, _, arguments = block.partition("[ARGS]")
            name = header.partition("[CALL_ID]")[0].strip()
            yield _call_of_json({"name": name, "arguments": arguments})
            continue
        value = _parse_json(block)
        calls = value if isinstance(value, list) else [value]
        for call in calls:
            yield _call_of_json(call)


# The header of a message names the recipient, before or after the channel.
_RECIPIENT = re.compile(
    r"to=(?:functions\.)?([\w.\-]+)(?:(?!<\|message\|>|<\|end\|>).)*<\|message\|>(.*?)(?:<\|call\|>|\Z)", re.DOTALL
)


def _harmony(text: str, schemas: Schemas) -> Iterator[ToolCall]:
    """``<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{…}<|call|>``"""
    for name, arguments in _RECIPIENT.findall(text):
        yield _call_of_json({"name": name, "arguments": arguments})


# Gemma 4 quotes texts by this mark instead of quotation marks, and does not quote keys.
_QUOTE = '<|"|>'


_UNQUOTED_KEY = re.compile(r"([{,]\s*)([^\s{},:\"\[\]]+)\s*:")


def _gemma4(text: str, schemas: Schemas) -> Iterator[ToolCall]:
    """``<|tool_call>call:NAME{key:<|"|>text<|"|>,…}<tool_call|>``"""
    for block in _blocks(text, "<|tool_call>", "<tool_call|>"):
        function = re.fullmatch(r"\s*call:([\w.\-]+)(\{.*\})\s*", block, re.DOTALL)
        if function is None:
            raise CallError("the tool call must be call:NAME{…}")
        arguments = ""
        for position, segment in enumerate(function[2].split(_QUOTE)):
            is_quoted = position % 2 == 1  # the segments between marks are outside and inside of quotes in turn
            if is_quoted:
                arguments += json.dumps(segment)
            else:
                arguments += _UNQUOTED_KEY.sub(r'\1"\2":', segment)
        yield _call_of_json({"name": function[1], "arguments": arguments})


# Format -> parser of the text of a turn.
FORMATS: dict[str, Callable[[str, Schemas], Iterator[ToolCall]]] = {
    "hermes": _hermes,
    "qwen_xml": _qwen_xml,
    "llama3": _llama3,
    "mistral": _mistral,
    "harmony": _harmony,
    "gemma4": _gemma4,
}
# Text in a chat template -> format that the template writes; the first text that occurs decides.
_MARKS = {
    "<|tool_call>": "gemma4",
    "<|call|>": "harmony",
    "[TOOL_CALLS]": "mistral",
    "<function=": "qwen_xml",
    "<tool_call>": "hermes",
    "<|python_tag|>": "llama3",
    '"parameters": ': "llama3",
}


def detect_format(template: str) -> str | None:
    """Return the format of the tool calls that a chat template writes, or None if the format is unknown.

    Example:
        >>> torchtune.rlhf.environments.detect_format("<tool_call>{{ call | tojson }}</tool_call>")
        'hermes'
    """
    for mark, tool_format in _MARKS.items():
        if mark in template:
            return tool_format
    return None

"""Tools of an environment: their definitions, and the calls in an assistant turn, one parser per format."""

import inspect
import json
import re
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from torchtune.rlhf._rollouts import RolloutError

# Methods of an environment that are not tools.
_PROTOCOL = {"reset", "get_reward", "close", "tools", "done"}
# Type hint -> JSON type of an argument.
_JSON_TYPES = {
    str: "string",
    int: "integer",
    float: "number",
    bool: "boolean",
    dict: "object",
    tuple: "array",
    list: "array",
}
# JSON type -> type of the parsed values.
_VALUE_TYPES = {
    "string": str,
    "integer": int,
    "number": int | float,
    "boolean": bool,
    "object": dict,
    "array": list,
    "null": type(None),
}
# A line ``name: description`` or ``name (type): description`` with its continuation lines.
_ARGUMENT_LINE = re.compile(r"^\s+(\w+)(?: \(.*?\))?:\s*(.*(?:\n\s{8,}.*)*)", re.MULTILINE)
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


def tools_of(environment: Any) -> list[dict[str, Any]]:
    """Return the tool definitions of an environment, in the format of chat templates.

    Args:
        environment: the environment. If it has a method ``tools()``, this method returns the definitions. Otherwise
            every public method is a tool and needs type hints and a docstring: a description, then ``Args:`` with a
            line ``name: description`` per argument.

    Raises:
        RolloutError: a method has no docstring, or an argument has no type hint.

    Example:
        >>> from torchtune.rlhf.environments import tools_of
        >>> class Calculator:
        ...     def reset(self): ...
        ...     def add(self, a: int, b: int) -> str:
        ...         \"\"\"Add two numbers.\"\"\"
        >>> tools_of(Calculator())[0]["function"]["parameters"]["required"]
        ['a', 'b']
    """
    if callable(getattr(environment, "tools", None)):
        return list(environment.tools())
    definitions = []
    for name, method in inspect.getmembers(type(environment), inspect.isfunction):
        if not name.startswith("_") and name not in _PROTOCOL:
            definitions.append(_definition(method, name))
    return definitions


def _definition(method: Callable[..., Any], name: str) -> dict[str, Any]:
    """Return the definition of a method as a tool, from its docstring, signature and type hints."""
    tool = f"environment: the tool {method.__qualname__}"
    docstring = inspect.getdoc(method)
    if not docstring:
        raise RolloutError(f"{tool} has no docstring: describe it to the model, or begin its name with '_'.")
    # The model reads the description and the arguments; what a tool returns, it sees in the reply.
    docstring = re.sub(r"\n\s*Returns?:.*", "", docstring, flags=re.DOTALL)
    description, _, arguments_section = docstring.partition("Args:")
    argument_descriptions = {}
    for argument, text in _ARGUMENT_LINE.findall(arguments_section):
        argument_descriptions[argument] = " ".join(text.split())
    try:
        hints = get_type_hints(method)
    except NameError as error:
        raise RolloutError(f"{tool} has a type hint that is not defined ({error}): import it.") from error
    properties = {}
    required = []
    _, *arguments = inspect.signature(method).parameters.values()  # without self, as `method` is of the class
    for argument in arguments:
        if argument.name not in hints:
            raise RolloutError(f"{tool} has no type hint for '{argument.name}': add one, such as {argument.name}: str.")
        schema = _schema(hints[argument.name])
        if argument.name in argument_descriptions:
            schema["description"] = argument_descriptions[argument.name]
        properties[argument.name] = schema
        if argument.default is argument.empty:
            required.append(argument.name)
    parameters = {"type": "object", "properties": properties, "required": required}
    function = {"name": name, "description": " ".join(description.split()), "parameters": parameters}
    return {"type": "function", "function": function}


def _schema(hint: Any) -> dict[str, Any]:
    """Return the JSON schema of a type hint; for a type that JSON lacks, a schema that accepts any value."""
    origin = get_origin(hint)
    arguments = get_args(hint)
    if origin in (Union, types.UnionType):
        value_types = [argument for argument in arguments if argument is not type(None)]
        is_optional = len(value_types) == 1 and len(arguments) == 2
        if not is_optional:
            return {}
        return {**_schema(value_types[0]), "nullable": True}  # `_fits` then accepts null
    if origin is Literal:
        return {**_schema(type(arguments[0])), "enum": list(arguments)}  # values of a Literal are of one type
    json_type = _JSON_TYPES.get(origin or hint)
    if json_type is None:
        return {}
    schema = {"type": json_type}
    if json_type == "array" and arguments:
        schema["items"] = _schema(arguments[0])
    return schema


def parameters_of(tools: list[dict[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Return the JSON schema of each tool's parameters, by tool name.

    Example:
        >>> schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
        >>> tools = [{"type": "function", "function": {"name": "double", "parameters": schema}}]
        >>> torchtune.rlhf.environments.parameters_of(tools)["double"]["properties"]
        {'a': {'type': 'integer'}}
    """
    schemas = {}
    for tool in tools:
        function = tool.get("function", tool)  # some rows have the function alone
        schemas[function["name"]] = function.get("parameters") or {}
    return schemas


def check_call(call: ToolCall, schemas: Schemas) -> str | None:
    """Check a tool call; return the mistake as a sentence for the model, or None for a valid call.

    Example:
        >>> from torchtune.rlhf.environments import ToolCall, check_call
        >>> check_call(ToolCall("double", {"b": 1}), {"double": {"properties": {"a": {"type": "integer"}}}})
        "the tool 'double' has no argument 'b', its arguments are a"
    """
    if call.name not in schemas:
        return f"there is no tool '{call.name}', the tools are {', '.join(schemas)}"
    schema = schemas[call.name]
    properties = schema.get("properties", {})
    for name in schema.get("required", ()):
        if name not in call.arguments:
            return f"the tool '{call.name}' needs the argument '{name}'"
    for name in call.arguments:
        if name not in properties:
            argument_names = ", ".join(properties) or "none"  # so that the model can correct its call
            return f"the tool '{call.name}' has no argument '{name}', its arguments are {argument_names}"
    for name, value in call.arguments.items():
        if not _fits(value, properties[name]):
            expected = properties[name].get("enum") or properties[name]["type"]
            return f"the argument '{name}' of the tool '{call.name}' must be {expected}, not {json.dumps(value)[:80]}"
    return None


def _fits(value: Any, schema: Mapping[str, Any]) -> bool:
    """Return whether a value fits the parts of a JSON schema that tools use; other parts are not checked."""
    if value is None and schema.get("nullable"):
        return True
    if "enum" in schema and value not in schema["enum"]:
        return False
    if not isinstance(schema.get("type"), str):
        return True
    if isinstance(value, bool):  # before numbers: a bool is an int in Python
        return schema["type"] == "boolean"
    return isinstance(value, _VALUE_TYPES.get(schema["type"], object))


def reply_text(value: Any) -> str:
    """Convert the result of a tool to a text: a string is returned unchanged, other values become JSON.

    Raises:
        TypeError: the value is not representable in JSON.
        UnicodeEncodeError: the text contains lone surrogates.
    """
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    text.encode()  # raises for lone surrogates, which no tokenizer encodes
    return text


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
    parse = FORMATS[tool_format]
    calls = list(parse(after_reasoning(text), schemas))
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

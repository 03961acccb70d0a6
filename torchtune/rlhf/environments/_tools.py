"""Tools of an environment: public methods, described by type hints and docstrings."""

import inspect
import json
import re
import types
from collections.abc import Callable, Mapping
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from torchtune.rlhf._rollouts import RolloutError
from torchtune.rlhf.environments._tool_call_parsers import ToolCall

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
    _, *arguments = inspect.signature(method).parameters.values()  # without self
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
        return {**_schema(value_types[0]), "nullable": True}
    if origin is Literal:
        return {**_schema(type(arguments[0])), "enum": list(arguments)}
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
    functions = (tool.get("function", tool) for tool in tools)
    return {function["name"]: function.get("parameters") or {} for function in functions}


def check_call(call: ToolCall, schemas: Mapping[str, Mapping[str, Any]]) -> str | None:
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
            return (
                f"the tool '{call.name}' has no argument '{name}', its arguments are {', '.join(properties) or 'none'}"
            )
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
    text.encode()
    return text

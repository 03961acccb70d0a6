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
_OTHERS = {"reset", "get_reward", "close", "tools", "done"}
_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", dict: "object"}
_TYPES |= {tuple: "array", list: "array"}
_VALUES = {name: kind for kind, name in _TYPES.items()} | {"number": int | float, "null": type(None)}


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
    methods = inspect.getmembers(type(environment), inspect.isfunction)
    return [_definition(method, name) for name, method in methods if not name.startswith("_") and name not in _OTHERS]


def _definition(method: Callable[..., Any], name: str) -> dict[str, Any]:
    where = f"environment: the tool {method.__qualname__}"
    text = inspect.getdoc(method)
    if not text:
        raise RolloutError(f"{where} has no docstring: describe it to the model, or begin its name with '_'.")
    description, _, rest = re.sub(r"\n\s*Returns?:.*", "", text, flags=re.DOTALL).partition("Args:")
    described = {
        key: " ".join(value.split())
        for key, value in re.findall(r"^\s+(\w+)(?: \(.*?\))?:\s*(.*(?:\n\s{8,}.*)*)", rest, re.MULTILINE)
    }
    try:
        hints = get_type_hints(method)
    except NameError as error:
        raise RolloutError(f"{where} has a type hint that is not defined ({error}): import it.") from error
    properties, required = {}, []
    for key, parameter in list(inspect.signature(method).parameters.items())[1:]:
        if key not in hints:
            raise RolloutError(f"{where} has no type hint for '{key}': add one, such as {key}: str.")
        properties[key] = _schema(hints[key]) | ({"description": described[key]} if key in described else {})
        if parameter.default is parameter.empty:
            required.append(key)
    parameters = {"type": "object", "properties": properties, "required": required}
    function = {"name": name, "description": " ".join(description.split()), "parameters": parameters}
    return {"type": "function", "function": function}


def _schema(hint: Any) -> dict[str, Any]:
    """Return the JSON schema of a type hint; for a type that JSON lacks, a schema that accepts any value."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        kept = [one for one in arguments if one is not type(None)]
        return {**_schema(kept[0]), "nullable": True} if len(kept) == 1 and len(arguments) == 2 else {}
    if origin is Literal:
        return {**_schema(type(arguments[0])), "enum": list(arguments)}
    found = {"type": _TYPES[origin or hint]} if (origin or hint) in _TYPES else {}
    if found.get("type") == "array" and arguments:
        found["items"] = _schema(arguments[0])
    return found


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
    known = schema.get("properties", {})
    if missing := [name for name in schema.get("required", ()) if name not in call.arguments]:
        return f"the tool '{call.name}' needs the argument '{missing[0]}'"
    if unknown := [name for name in call.arguments if name not in known]:
        return f"the tool '{call.name}' has no argument '{unknown[0]}', its arguments are {', '.join(known) or 'none'}"
    for name, value in call.arguments.items():
        if not _fits(value, known[name]):
            wanted = known[name].get("enum") or known[name]["type"]
            return f"the argument '{name}' of the tool '{call.name}' must be {wanted}, not {json.dumps(value)[:80]}"
    return None


def _fits(value: Any, schema: Mapping[str, Any]) -> bool:
    if value is None and schema.get("nullable"):
        return True
    if "enum" in schema and value not in schema["enum"]:
        return False
    if not isinstance(schema.get("type"), str):
        return True
    is_right = isinstance(value, _VALUES.get(schema["type"], object))
    return is_right and (schema["type"] == "boolean" or not isinstance(value, bool))


def reply_text(value: Any) -> str:
    """Convert the result of a tool to a text: a string is returned unchanged, other values become JSON.

    Raises:
        TypeError: the value is not representable in JSON.
        UnicodeEncodeError: the text contains lone surrogates.
    """
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    text.encode()
    return text

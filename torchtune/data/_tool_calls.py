"""Tools and tool calls of a conversation, in the form of chat APIs or as JSON text."""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from torchtune.data._rows import DataError, kind_of
from torchtune.utils import UserError, check_surrogates


def read_tools(value: Any) -> list[Any] | None:
    """Return the tool definitions of a row; None if it has none.

    Args:
        value: a list of definitions, one definition, or either as JSON text; elements of a list may be texts, too. A
            definition that is only the function, ``{"name", "parameters", …}``, becomes
            ``{"type": "function", "function": {…}}``, the form that chat APIs and chat templates use.

    Raises:
        DataError: the text is not JSON, or the value is something else.
    """
    if isinstance(value, str):
        if not value.strip():
            return None
        value = parse_json_text(value, "tools")
    if value is None:
        return None
    if isinstance(value, Mapping):
        value = [value]
    if not isinstance(value, list | tuple):
        raise DataError(f"tools must be a list of tool definitions, not {type(value).__name__}")
    return [_read_tool(tool) for tool in value] or None


def _read_tool(tool: Any) -> Any:
    """Return the definition of a tool in the form of chat APIs; a Python function is returned unchanged."""
    if isinstance(tool, str):
        tool = parse_json_text(tool, "a tool")
    if callable(tool):
        return tool  # chat templates may describe a Python function themselves
    if not isinstance(tool, Mapping):
        raise DataError(f"a tool must be a mapping with its definition, not {type(tool).__name__}")
    is_bare = "function" not in tool and "name" in tool and "parameters" in tool
    if is_bare:
        return function_tool(tool)
    return dict(tool)


def function_tool(function: Any) -> dict[str, Any]:
    """Return the tool definition of a function; raise :class:`DataError` unless it is a mapping with a name."""
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise DataError(f"a function must be a mapping with its 'name', not {_describe(function)}")
    return {"type": "function", "function": {name: value for name, value in function.items() if name != "type"}}


def read_tool_calls(value: Any) -> list[dict[str, Any]]:
    """Return the tool calls of a turn, with their arguments as mappings.

    Args:
        value: a list of calls ``{"type": "function", "function": {"name", "arguments"}}`` or ``{"name", "arguments"}``,
            or its JSON text. ``arguments`` may be JSON text; no arguments are written ``{}``, ``""`` or null.

    Raises:
        DataError: a call has no name, or its arguments are neither a mapping nor the JSON text of one, or have a
            number that JSON does not have, such as NaN.
    """
    if isinstance(value, str):
        if not value.strip():
            return []
        value = parse_json_text(value, "tool_calls")
    if not isinstance(value, list | tuple):
        raise DataError(f"tool_calls must be a list of calls, not {type(value).__name__}")
    return [_read_call(call) for call in value]


def _read_call(call: Any) -> dict[str, Any]:
    """Return a tool call in the form of chat APIs, with its arguments as a mapping."""
    if isinstance(call, str):
        call = parse_json_text(call, "a tool call")
    if not isinstance(call, Mapping):
        raise DataError(f"a tool call must be a mapping with 'function', not {type(call).__name__}")
    call = {name: value for name, value in call.items() if value is not None}  # tables store missing fields as nulls
    function = call.get("function")
    if function is None and "name" in call:
        # Only the function: the type and the id are fields of the call around it.
        function = {name: value for name, value in call.items() if name not in ("type", "id")}
        call_id = call.get("id")
        call = {"type": "function"}
        if call_id is not None:
            call["id"] = call_id
    if not isinstance(function, Mapping):
        raise DataError(f"a tool call must have a 'function' with 'name' and 'arguments', not {_describe(function)}")
    if not isinstance(function.get("name"), str) or not function["name"]:
        raise DataError(f"the function of a tool call must have a 'name', not {_describe(function.get('name'))}")
    call["function"] = {**function, "arguments": _read_arguments(function["name"], function.get("arguments"))}
    return call


def _read_arguments(name: str, arguments: Any) -> dict[str, Any]:
    """Return the arguments of a call of the function ``name``, which may be JSON text."""
    if arguments is None or (isinstance(arguments, str) and not arguments.strip()):
        return {}
    if isinstance(arguments, str):
        arguments = parse_json_text(arguments, f"the arguments of the call of '{name}'")
    if not isinstance(arguments, Mapping):
        raise DataError(
            f"the arguments of the call of '{name}' must be a mapping, or the JSON text of one, not "
            f"{type(arguments).__name__}"
        )
    _check_finite(arguments, name)
    return dict(arguments)


def _check_finite(arguments: Mapping[str, Any], name: str) -> None:
    """Raise :class:`DataError` for a number that JSON does not have, such as NaN, in the arguments of a call."""
    values = list(arguments.values())
    while values:
        value = values.pop()
        if isinstance(value, Mapping):
            values += value.values()
        elif isinstance(value, list | tuple):
            values += value
        elif isinstance(value, float) and not math.isfinite(value):
            raise DataError(
                f"the arguments of the call of '{name}' have the number {value}, which is not JSON: use null"
            )


def call_of_text(text: Any) -> list[dict[str, Any]]:
    """Return the tool calls of a turn whose content is the JSON of a call, or of a list of calls."""
    calls = text
    if isinstance(text, str):
        calls = parse_json_text(text, "a turn that is a function call")
    if not isinstance(calls, Sequence):
        calls = [calls]
    return read_tool_calls(calls)


def canonical_calls(calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    """Return calls, each a name with its arguments, as JSON that is the same for equal calls.

    One call is ``{"arguments": {…}, "name": …}``, several are a list of these.
    """
    canonical: Any = [{"name": name, "arguments": arguments} for name, arguments in calls]
    if len(canonical) == 1:
        canonical = canonical[0]
    return json.dumps(canonical, sort_keys=True, ensure_ascii=False)


def parse_json_text(text: str, name: str) -> Any:
    """Parse JSON text of a column or a field; raise :class:`DataError` that begins with its ``name``."""
    try:
        value = json.loads(text)
        check_surrogates(value)  # JSON can escape half of a character, which no tokenizer can encode
        return value
    except json.JSONDecodeError as error:
        verb = "are"
        if name.startswith("a "):  # "a tool call is", but "the arguments are"
            verb = "is"
        excerpt = text
        if len(text) > 60:
            excerpt = f"{text[:60]}…"
        raise DataError(f"{name} {verb} not JSON ({error.msg} at column {error.colno}): {excerpt!r}") from error
    except UserError as error:
        raise DataError(f"{name}: {error}") from error
    except ValueError as error:  # an integer with more digits than Python parses
        raise DataError(f"{name}: no JSON, {str(error).partition(';')[0]}") from error


def _describe(value: Any) -> str:
    """Return a text itself, or what :func:`kind_of` says of another value."""
    if isinstance(value, str):
        return repr(value)
    return kind_of(value)

"""The one reader of conversations: the turns, tools and system prompt of a row of any format."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torchtune.data._messages import MaskingStrategy, Message, MessageLike, as_messages, mask_messages
from torchtune.data._rows import DataError
from torchtune.data._tool_calls import canonical_calls, function_tool, read_tools

# Columns with the system prompt of a row.
_SYSTEM_COLUMNS = ("system", "system_prompt")
_TOOL_COLUMNS = ("tools", "functions")
_COLUMNS = (*_SYSTEM_COLUMNS, *_TOOL_COLUMNS)


@dataclass
class Conversation:
    """A conversation with everything that its row says about it.

    Attributes:
        messages: the turns, with the system prompt first if there is one.
        tools: definitions of the tools that can be called, or ``None``.
    """

    messages: list[Message]
    tools: list[Any] | None = None

    def as_sample(self) -> dict[str, Any]:
        """Return ``{"messages": …}``, with ``tools`` if there are any: the input of a tokenizer."""
        return {"messages": self.messages} | tools_entry(self.tools)


def tools_entry(tools: list[Any] | None) -> dict[str, Any]:
    """Return ``{"tools": tools}``, or an empty mapping without tools."""
    if tools is None:
        return {}
    return {"tools": tools}


def read_conversation(
    row: Mapping[str, Any],
    turns: Sequence[MessageLike],
    *,
    new_system_prompt: str | None = None,
    masking_strategy: MaskingStrategy | str | None = None,
    columns: Collection[str] = (),
) -> Conversation:
    """Return the conversation of a row.

    Every consumer of rows reads its turns, tools and system prompt here.

    Args:
        row: the row; its columns ``tools`` (or OpenAI's older ``functions``) and ``system`` or ``system_prompt`` are
            read.
        turns: turns that were found in the row, in any format that :func:`torchtune.data.as_messages` reads.
        new_system_prompt: replaces the system prompt of the row and of the turns.
        masking_strategy: see :func:`torchtune.data.mask_messages`; None for conversations that are not trained on.
        columns: columns of the turns, which hold no system prompt even if they have the name of such a column.

    Raises:
        DataError: a turn or a tool is invalid, the row has two different system prompts, or variables of the chat
            template.
    """
    if row.get("chat_template_kwargs") and "chat_template_kwargs" not in columns:
        raise DataError(
            "column 'chat_template_kwargs' is of no effect, because all rows have the same variables: remove it, and "
            "set the tokenizer's chat_template_kwargs"
        )
    messages = as_messages(turns)
    if new_system_prompt is not None:
        messages = [message for message in messages if message.role != "system"]
        system = new_system_prompt
    else:
        system = _missing_system_prompt(row, messages, columns)
    if system is not None:
        messages = [Message(role="system", content=system), *messages]
    if masking_strategy is not None:
        mask_messages(messages, masking_strategy)
    return Conversation(messages, tools_of_row(row, columns))


def unfold_prompt(row: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return a row whose prompt is a request, ``{"messages", "tools", …}``, with the request's fields as columns.

    OpenAI's preference format has such prompts; other rows are returned unchanged.

    Args:
        row: the row.
        name: column of the prompt.
    """
    request = row.get(name)
    if not isinstance(request, Mapping) or "messages" not in request:
        return row
    fields = {field: request[field] for field in _COLUMNS if request.get(field) is not None}
    return {**row, **fields, name: request["messages"]}


def tools_of_row(row: Mapping[str, Any], columns: Collection[str] = ()) -> list[Any] | None:
    """Return the tools in the column ``tools`` or ``functions`` of a row; None if there are none.

    Args:
        row: the row.
        columns: columns that hold something else.

    Raises:
        DataError: the column holds no tools, or both columns have some.
    """
    tools = _tools_of_column(row, "tools", columns)
    functions = _tools_of_column(row, "functions", columns)
    if not functions:
        return tools
    if tools:
        raise DataError("the row has both tools and functions: leave out functions, the older form")
    definitions = []
    for function in functions:
        if "function" not in function:
            function = function_tool(function)
        definitions.append(function)
    return definitions


def _tools_of_column(row: Mapping[str, Any], name: str, columns: Collection[str]) -> list[Any] | None:
    """Return the tools in a column; None if there are none, or if the column is one of ``columns``."""
    if name in columns or row.get(name) is None:
        return None
    try:
        return read_tools(row[name])
    except DataError as error:
        raise DataError(f"column '{name}': {error} (rename the column if it holds something else)") from error


def _missing_system_prompt(
    row: Mapping[str, Any], messages: Sequence[Message], turn_columns: Collection[str]
) -> str | None:
    """Return the system prompt in a column of the row, unless the turns already begin with it."""
    prompts: dict[str, str] = {}  # by the name of their column or turn
    for name in _SYSTEM_COLUMNS:
        value = row.get(name)
        if name in turn_columns or value is None or value == "":
            continue
        if not isinstance(value, str):
            raise DataError(
                f"column '{name}' holds {type(value).__name__}, not the text of a system prompt: correct or rename it"
            )
        prompts[f"column '{name}'"] = value
    if not prompts:
        return None
    name, prompt = next(iter(prompts.items()))  # of the first column, with which the others are compared
    has_system_turn = bool(messages) and messages[0].role == "system"
    if has_system_turn:
        prompts = {"the system turn": messages[0].text_content, **prompts}
    for other_name, other_prompt in prompts.items():
        if other_prompt != prompt:
            raise DataError(
                f"{name} and {other_name} are different system prompts: leave one out, or set new_system_prompt, which "
                "replaces both"
            )
    if has_system_turn:
        return None
    return prompt


def reference_answer(message: Message) -> str:
    """Return a turn as the text of a right answer: its tool calls as :func:`canonical_calls`, otherwise its text."""
    calls = [call["function"] for call in message.extra.get("tool_calls") or ()]
    if not calls:
        return message.text_content
    return canonical_calls([(function["name"], function["arguments"]) for function in calls])


def check_same_prompt(chosen: Sequence[Message], rejected: Sequence[Message]) -> None:
    """Raise :class:`DataError` unless two conversations differ first in a turn of the assistant: in their answers.

    Turns after that may differ, too: other tool calls have other results.
    """
    num_common = 0
    for chosen_turn, rejected_turn in zip(chosen, rejected, strict=False):
        if _turn_data(chosen_turn) != _turn_data(rejected_turn):
            break
        num_common += 1
    if num_common == len(chosen) == len(rejected):
        return  # equal answers are refused where they are tokenized
    for side, messages in (("chosen", chosen), ("rejected", rejected)):
        if messages and messages[-1].role != "assistant":
            return  # a missing answer is refused where it is tokenized
        if num_common == len(messages):
            difference = "has ended"
        elif messages[num_common].role != "assistant":
            difference = f"has a turn of '{messages[num_common].role}'"
        else:
            continue  # this side differs in an answer, as it should
        raise DataError(
            f"chosen and rejected have different prompts: they first differ in turn {num_common}, where {side} "
            f"{difference}; a pair is two answers to one prompt"
        )


def _turn_data(message: Message) -> tuple[Any, ...]:
    """Return what a model reads of a turn; whether it is trained on is not part of it."""
    return message.role, message.content, message.extra

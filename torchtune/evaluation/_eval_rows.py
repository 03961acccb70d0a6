"""Read evaluation rows: a conversation without the answer, and the reference answer."""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchtune.data import (
    AlpacaToMessages,
    Conversation,
    DataError,
    Message,
    ShareGPTToMessages,
    answer_turns,
    as_messages,
    images_of_columns,
    read_conversation,
    reference_answer,
    turns_of_column,
    unfold_prompt,
    with_images,
)
from torchtune.datasets import format_of, read_rows
from torchtune.generation import Prompt, prompt_turns
from torchtune.utils import UserError

# Names of question and answer columns, in rows without a conversation.
_QUESTIONS = ("prompt", "question", "input", "instruction")
_ANSWERS = ("answer", "output", "completion", "response")


class EvaluationError(UserError):
    """Invalid arguments or data of an evaluation."""


@dataclass(frozen=True)
class EvalRow(Prompt):
    """An evaluation row.

    Attributes:
        line: line in the file, from 1.
        given: the conversation, as in prompt files.
        messages: the conversation without the answer.
        row: the columns; ``answer`` is the reference answer, if any. A tool call is the text
            ``{"arguments": {…}, "name": …}``.
        tools: tools of the row.
        expects_call: whether the reference answer is a tool call.

    Example:
        >>> path = folder / "rows.jsonl"
        >>> _ = path.write_text('{"prompt": "2 + 2", "answer": "4"}')
        >>> torchtune.evaluation.read_eval_rows(path)[0].row["answer"]
        '4'
    """

    row: Mapping[str, Any]


def read_eval_rows(
    path: str | Path,
    *,
    prompt: str | None = None,
    answer: str | None = None,
    system: str | None = None,
    limit: int | None = None,
) -> list[EvalRow]:
    """Read evaluation rows.

    In a conversation (OpenAI messages or ShareGPT), a final assistant turn is the reference answer, and the turns
    before it are the prompt. Rows of questions and answers, instructions (Alpaca) and prompts are recognized by their
    columns. Tools and the column ``system`` of a row are part of the prompt. Images are in the turns, or in the column
    ``image`` or ``images``, see :func:`torchtune.generation.read_prompts`.

    Args:
        path: path of a .jsonl, .json, .csv, .tsv, .parquet or .txt file.
        prompt: column of the text or conversation; by default found by name.
        answer: column of the reference answer; by default found by name.
        system: system prompt for conversations without one.
        limit: maximum number of rows; by default all.

    Raises:
        EvaluationError: the file does not exist or has no rows, a row has no prompt, or an image is not part of a turn.
        UserError: a line is invalid.

    Example:
        >>> path = folder / "rows.jsonl"
        >>> _ = path.write_text('{"prompt": "2 + 2", "answer": "4"}')
        >>> [(row.line, row.messages[0].text_content) for row in torchtune.evaluation.read_eval_rows(path)]
        [(1, '2 + 2')]
    """
    path = Path(path).expanduser()
    if not path.is_file():
        raise EvaluationError(f"there is no file {path}: correct the path.")
    file_rows: Iterable[tuple[int, Any]] = ()
    if path.stat().st_size:  # an empty file has no rows, as the error below says
        file_rows = read_rows(path)
    rows: list[EvalRow] = []
    for line, row in file_rows:
        location = f"{path}, line {line}"
        if not isinstance(row, Mapping):  # a text, or a list of turns
            row = {"prompt": row}
        try:
            conversation, reference, columns = _split_answer(row, prompt, answer)
        except DataError as error:
            raise EvaluationError(
                f"{location}: {str(error).rstrip('.')}: correct the row, or name --prompt."
            ) from error
        messages = prompt_turns(conversation.messages, system, location)
        rows.append(_make_row(line, messages, conversation.tools, reference, columns))
        if len(rows) == limit:
            break
    if not rows:
        raise EvaluationError(f"{path}: there are no rows in it: write one per line.")
    return rows


def row_of_conversation(number: int, columns: Mapping[str, Any], conversation: Conversation, location: str) -> EvalRow:
    """Return the evaluation row of a conversation, as :func:`read_eval_rows` returns it for a file with it.

    Args:
        number: number of the row in its source, from 0.
        columns: the columns of the row.
        conversation: the conversation, up to the right answer if there is one.
        location: the row, for messages.

    Raises:
        GenerationError: there is no turn to answer.
    """
    columns = dict(columns)
    messages = list(conversation.messages)
    reference = None
    if messages and messages[-1].role == "assistant":
        reference = messages.pop()
    answer = columns.get("answer")
    if answer is not None and not _is_turn(answer):
        reference = None  # a column of the right answer is preferred
    if reference is not None:
        columns["answer"] = reference_answer(reference)
    messages = prompt_turns(messages, None, location)
    return _make_row(number + 1, messages, conversation.tools, reference, columns)


def _make_row(
    line: int, messages: list[Message], tools: list[Any] | None, reference: Message | None, columns: Mapping[str, Any]
) -> EvalRow:
    """Build a row; ``given`` is as in a file of prompts, so that the file of answers can be compared with it."""
    prompt_value: Any = []
    for turn in messages:
        prompt_value.append({"role": turn.role, "content": _content_of(turn), **turn.extra})
    if tools is not None:
        prompt_value = {"messages": prompt_value, "tools": tools}
    expects_call = reference is not None and bool(reference.extra.get("tool_calls"))
    return EvalRow(line, prompt_value, messages, columns, tools=tools, expects_call=expects_call)


def _content_of(message: Message) -> Any:
    """Return the text of a turn, or its parts if it contains media, for JSON."""
    if not message.contains_media:
        return message.text_content
    parts = []
    for part in message.content:
        content = part["content"]
        if isinstance(content, Mapping):  # an image of a data set: its bytes or its path
            content = content.get("bytes") or str(content.get("path"))
        if isinstance(content, bytes):
            content = hashlib.sha256(content).hexdigest()
        parts.append({**part, "content": str(content)})
    return parts


def _split_answer(
    row: Mapping[str, Any], prompt: str | None, answer: str | None
) -> tuple[Conversation, Message | None, dict[str, Any]]:
    """Return the turns before the answer, the turn of the answer if it is one, and the columns."""
    columns = dict(row)
    for name in (prompt, answer):
        if name is not None and row.get(name) is None:
            raise DataError(f"there is no column '{name}' among {', '.join(map(str, row)) or 'none'}")
    conversation = _read_conversation(row, prompt)
    messages = conversation.messages
    reference = None
    if messages and messages[-1].role == "assistant":
        reference = messages.pop()
    if answer is None:
        # A column of the right answer is preferred to the last turn; other names may mean something else beside it.
        names = _ANSWERS if reference is None else ("answer",)
        answer = _first_column(row, [name for name in names if name != prompt])
    if answer is not None and _is_turn(row[answer]):
        # Several turns, such as calls of tools and their results: the last one is the answer.
        *earlier_turns, reference = as_messages(answer_turns(row, answer))
        messages += earlier_turns
    elif answer is not None:
        reference = None
        columns["answer"] = row[answer]
    if reference is not None:
        columns["answer"] = reference_answer(reference)
    return conversation, reference, columns


def _is_turn(value: Any) -> bool:
    """Return whether a value is a turn or begins with one."""
    turn = value
    if isinstance(value, list) and value:
        turn = value[0]
    return isinstance(turn, Mapping) and ("role" in turn or "from" in turn)


def _first_column(row: Mapping[str, Any], names: Sequence[str]) -> str | None:
    """Return the first of the names that a row has a value for; None if it has none of them."""
    for name in names:
        if row.get(name) is not None:
            return name
    return None


def _read_conversation(row: Mapping[str, Any], prompt: str | None) -> Conversation:
    """Return the conversation of a row, in the column ``prompt`` or as the format of the row says."""
    row_format = format_of(row)
    images = images_of_columns(row)
    # The transform writes instruction and input in Alpaca's template, as in training; it takes no images.
    if prompt is None and row_format.kind == "Alpaca" and not images:
        return Conversation(**AlpacaToMessages()(row))
    settings = dict(row_format.settings)
    conversation_column = None
    if row_format.builder == "chat_dataset":
        conversation_column = settings["conversation_column"]
    elif row_format.builder == "classification_dataset":
        conversation_column = settings.get("column")  # a conversation beside the label
    if prompt is None and conversation_column is not None:
        prompt = conversation_column
        row = {**row, prompt: turns_of_column(row[prompt], prompt)}  # which may be JSON text
    if prompt is None:
        prompt = _first_column(row, _QUESTIONS)
    if prompt is None:
        raise DataError(f"none of the columns {', '.join(map(str, row)) or '(there are none)'} is a prompt")
    row = unfold_prompt(row, prompt)
    value = row[prompt]
    is_list = isinstance(value, list) and len(value) > 0
    is_sharegpt = is_list and isinstance(value[0], Mapping) and "from" in value[0]
    if is_sharegpt:
        image_column = "images" if row.get("images") else "image"
        transform = ShareGPTToMessages(column_map={"conversations": prompt, "image": image_column})
        return Conversation(**transform({"image": None, **row}))  # the transform needs the column, a row may lack it
    return read_conversation(row, with_images(value, images), columns=(prompt,))

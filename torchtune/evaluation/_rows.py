"""Rows to evaluate on: a conversation up to the answer, and the right answer."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchtune.data import AlpacaToMessages, DataError, Message, ShareGPTToMessages, as_messages
from torchtune.datasets._facts import format_of, read_rows
from torchtune.evaluation._errors import EvaluationError
from torchtune.generation import Prompt
from torchtune.generation._prompt_file import to_be_answered

# Columns of questions in rows without a conversation; those of their answers.
_QUESTIONS = ("prompt", "question", "input", "instruction")
_ANSWERS = ("answer", "output", "completion", "response")


@dataclass(frozen=True)
class EvalRow(Prompt):
    """A row of a file.

    Attributes:
        line: of the file, from 1.
        given: the conversation, as in files of prompts.
        messages: the conversation up to the answer.
        row: the columns; ``answer`` is the right answer, where there is one.

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
    """Read rows to evaluate on.

    A conversation (OpenAI messages or ShareGPT) is answered where its last turn is the assistant's, which is the right
    answer; the turns before are given. Rows of questions and answers, of instructions (Alpaca) and of prompts with
    other columns are told by their columns.

    Args:
        path: of a .jsonl, .json, .csv, .tsv, .parquet or .txt file.
        prompt: column of the text or the conversation; by default found by its name.
        answer: column of the right answer; by default found by its name.
        system: system prompt of conversations without one.
        limit: rows to read; by default all.

    Raises:
        EvaluationError: there is no such file, or it has no rows, or a row has no prompt, or an image that
            is in no turn.
        UserError: a line is broken.

    Example:
        >>> path = folder / "rows.jsonl"
        >>> _ = path.write_text('{"prompt": "2 + 2", "answer": "4"}')
        >>> [(row.line, row.messages[0].text_content) for row in torchtune.evaluation.read_eval_rows(path)]
        [(1, '2 + 2')]
    """
    path = Path(path).expanduser()
    if not path.is_file():
        raise EvaluationError(f"there is no file {path}: correct the path.")
    found = []
    for line, row in read_rows(path) if path.stat().st_size else ():
        where = f"{path}, line {line}"
        if not isinstance(row, Mapping):
            row = {"prompt": row}
        try:
            messages, columns = _split(row, prompt, answer)
        except DataError as error:
            raise EvaluationError(f"{where}: {str(error).rstrip('.')}: correct the row, or name --prompt.") from error
        column = next((name for name in ("image", "images") if row.get(name)), None)
        if column and not any(message.contains_media for message in messages):
            raise EvaluationError(
                f"{where}: the image in the column '{column}' would not be seen: write it as a part of a turn, "
                '{"type": "image", "image": …}, or take the column out.'
            )
        messages = to_be_answered(messages, system, where)
        given = [{"role": message.role, "content": _shown(message)} for message in messages]
        found.append(EvalRow(line, given, messages, columns))
        if len(found) == limit:
            break
    if not found:
        raise EvaluationError(f"{path}: there are no rows in it: write one per line.")
    return found


def _shown(message: Message) -> Any:
    """The text of a turn, or its parts where some are no text."""
    return message.content if message.contains_media else message.text_content


def _split(row: Mapping[str, Any], prompt: str | None, answer: str | None) -> tuple[list[Message], dict[str, Any]]:
    """The turns before the answer, and the columns."""
    columns = dict(row)
    for name in (prompt, answer):
        if name is not None and row.get(name) is None:
            raise DataError(f"there is no column '{name}' among {', '.join(map(str, row)) or 'none'}")
    messages = _turns(row, prompt)
    if messages and messages[-1].role == "assistant":
        right = messages.pop().text_content
    else:
        right = next((row[name] for name in _ANSWERS if row.get(name) is not None and name != prompt), None)
    right = right if answer is None else row[answer]
    if right is not None and (answer is not None or columns.get("answer") is None):
        columns["answer"] = right
    return messages, columns


def _turns(row: Mapping[str, Any], prompt: str | None) -> list[Message]:
    kind, reader = format_of(row)
    if prompt is None and kind == "Alpaca":
        return AlpacaToMessages()(row)["messages"]
    if prompt is None and kind in ("OpenAI messages", "ShareGPT"):
        prompt = reader.split()[1].partition("=")[2]
    if prompt is None:
        prompt = next((name for name in _QUESTIONS if row.get(name) is not None), None)
    if prompt is None:
        raise DataError(f"none of the columns {', '.join(map(str, row)) or '(there are none)'} is a prompt")
    value = row[prompt]
    if isinstance(value, str):
        return [Message(role="user", content=value)]
    if isinstance(value, list) and value and isinstance(value[0], Mapping) and "from" in value[0]:
        return ShareGPTToMessages(column_map={"conversations": prompt})(row)["messages"]
    return as_messages(value)

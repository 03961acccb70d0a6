"""Inspection of a data file without tokenizer: format, sizes, duplicates and broken lines."""

import csv
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torchtune.data import (
    AlpacaToMessages,
    ChosenRejectedToMessages,
    DataError,
    InputOutputToMessages,
    OpenAIToMessages,
    ShareGPTToMessages,
    answer_turns,
    as_messages,
    is_empty,
    validate_messages,
)
from torchtune.utils import UserError, decode_line, has_json_lines, numbered_lines, open_lines, parse_json_line

SAMPLE = 2000  # rows that are inspected by default
_BAR = 32
_CALLS = re.compile(r'"(tool_calls|function_call|tools|functions)": (?!null|\[\]|"")')
# Name of a conversation format -> turn field that only this format has, its transform, and its column's name.
_STYLES: dict[str, tuple[str, Callable[..., Any], str]] = {
    "openai": ("role", OpenAIToMessages, "messages"),
    "sharegpt": ("from", ShareGPTToMessages, "conversations"),
}


@dataclass
class FileFacts:
    """Facts about a data file.

    Attributes:
        rows: number of rows.
        read: number of inspected rows.
        formats: (format, builder with columns) -> number of rows.
        firsts: (format, builder with columns) -> number of the first such row.
        columns: names of all columns of a row -> number of rows.
        calls: number of rows with tools or tool calls.
        empty: numbers of the rows with an answer that says nothing.
        problems: (line or row, reason) of rows that cannot be used.
        copies: (row, earlier equal row) for every duplicate in the file, counted from 1.
        characters: number of characters of each inspected row.
        hashes: hash of a row -> number of the first row with it.
    """

    path: str
    rows: int = 0
    read: int = 0
    formats: Counter[tuple[str, str]] = field(default_factory=Counter)
    firsts: dict[tuple[str, str], int] = field(default_factory=dict)
    columns: Counter[str] = field(default_factory=Counter)
    calls: int = 0
    empty: list[int] = field(default_factory=list)
    problems: list[tuple[int, str]] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    characters: list[int] = field(default_factory=list)
    hashes: dict[int, int] = field(default_factory=dict)
    example: Any = None


def _conversation(value: Any) -> str | None:
    """Return ``openai`` or ``sharegpt`` if ``value`` is a list of messages, otherwise None."""
    if not isinstance(value, list) or not value or not isinstance(value[0], Mapping):
        return None
    return next((style for style, (field, _, _) in _STYLES.items() if field in value[0]), None)


def format_of(row: Mapping[str, Any]) -> tuple[str, str]:
    """Return (format, dataset builder with its columns) of a row; ("unknown", "") if no builder reads it."""
    image = next((name for name in ("image", "images") if name in row), None)
    turns = {name: style for name, value in row.items() if (style := _conversation(value))}
    if {"chosen", "rejected"} <= row.keys():
        prompts = [name for name in turns if name not in ("chosen", "rejected")]
        if "prompt" not in row and prompts:
            columns = f"column_map.chosen=chosen column_map.rejected=rejected column_map.prompt={prompts[0]}"
            return "preference pairs", f"preference_dataset {columns}"
        return "preference pairs", "preference_dataset"
    if {"input", "preferred_output", "non_preferred_output"} <= row.keys():  # OpenAI's format
        columns = "column_map.chosen=preferred_output column_map.rejected=non_preferred_output column_map.prompt=input"
        return "preference pairs", f"preference_dataset {columns}"
    if "completion" in row and isinstance(row.get("label"), bool | int):
        return "labeled answers (KTO)", "kto_dataset"
    if "instruction" in row and "output" in row:
        return "Alpaca", "alpaca_dataset"
    if {"prompt", "completion"} <= row.keys() and {"prompt", "completion"} & turns.keys():
        columns = "column_map.input=prompt column_map.output=completion"
        return "conversational prompts with completions", f"instruct_dataset {columns}"
    if turns and not ("prompt" in turns and len(row) > 1):
        name, style = next(iter(turns.items()))
        if image is not None and style == "sharegpt":
            tag = " image_tag=<image>" if row[image] is None or "<image>" in str(row[name]) else ""
            columns = f"column_map.conversations={name} column_map.image={image}{tag}"
            return "ShareGPT with images", f"multimodal.multimodal_chat_dataset {columns}"
        kind = {"openai": "OpenAI messages", "sharegpt": "ShareGPT"}[style]
        return kind, f"chat_dataset conversation_column={name} conversation_style={style}"
    for question, answer in (
        ("input", "output"),
        ("question", "answer"),
        ("prompt", "completion"),
        ("prompt", "response"),
    ):
        if isinstance(row.get(question), str) and isinstance(row.get(answer), str):
            if question == "question" and "####" in row[answer]:
                return "prompts with answers", f"prompt_dataset column={question}"
            if image is not None:
                columns = f"column_map.input={question} column_map.output={answer} column_map.image={image}"
                return "questions about images", f"multimodal.vqa_dataset {columns}"
            return "instructions", f"instruct_dataset column_map.input={question} column_map.output={answer}"
    if "prompt" in row:
        return "prompts with answers" if len(row) > 1 else "prompts", "prompt_dataset"
    texts = [name for name, value in row.items() if isinstance(value, str)]
    if texts and ("text" in row or len(row) == 1):
        return "raw text", f"text_completion_dataset column={'text' if 'text' in row else texts[0]}"
    return "unknown", ""


# Builder -> transform of its rows, where a check needs no further settings.
_TRANSFORMS: dict[str, Callable[..., Any]] = {
    "alpaca_dataset": AlpacaToMessages,
    "instruct_dataset": InputOutputToMessages,
    "preference_dataset": ChosenRejectedToMessages,
}
# Builder -> columns of the answers, where no setting names them.
_ANSWERS = {"alpaca_dataset": ["output"], "kto_dataset": ["completion"], "preference_dataset": ["chosen", "rejected"]}
_ANSWER_SETTINGS = (
    "conversation_column",
    "column_map.conversations",
    "column_map.output",
    "column_map.chosen",
    "column_map.rejected",
)


def _settings_of(reader: str) -> tuple[str, dict[str, str]]:
    """Return the builder of a reader, and its settings."""
    builder, *words = re.split(r" (?=[\w.]+=)", reader)  # a column's name may have spaces
    return builder, dict(word.split("=", 1) for word in words)


def _problem(row: Any, reader: str) -> str | None:
    """Return why a conversation cannot be trained on, if a check without tokenizer finds a reason."""
    builder, settings = _settings_of(reader)
    columns = {
        name.removeprefix("column_map."): column for name, column in settings.items() if name.startswith("column_map.")
    }
    if builder == "chat_dataset":
        _, transform, key = _STYLES[settings["conversation_style"]]
        columns = {key: settings["conversation_column"]}
    elif builder in _TRANSFORMS:
        transform = _TRANSFORMS[builder]
    else:
        return None
    try:
        sample = transform(column_map=columns or None)(row)
        messages = sample["messages"] if "messages" in sample else sample["chosen"]
        if builder != "preference_dataset":
            validate_messages(messages)
    except DataError as error:
        return str(error)
    return "no turn is the assistant's: there is nothing to train on" if all(turn.masked for turn in messages) else None


def _has_empty_answer(row: Mapping[str, Any], reader: str) -> bool:
    """Return whether an answer of a row that would be trained on says nothing."""
    builder, settings = _settings_of(reader)
    names = [settings[name] for name in _ANSWER_SETTINGS if name in settings] or _ANSWERS.get(builder, [])
    try:
        turns = [turn for name in names for turn in as_messages(answer_turns(row, name))]
    except DataError:
        return False  # a problem of its own
    return any(turn.role == "assistant" and not turn.masked and is_empty(turn) for turn in turns)


def _characters(value: Any) -> int:
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(map(_characters, value.values()))
    return sum(map(_characters, value)) if isinstance(value, list) else 0


def _others(path: Path) -> Iterator[tuple[int, Any]]:
    """Yield (number, row) of a file that is not JSON Lines; .json and .parquet files have row numbers, others lines."""
    suffix = Path(path.name.lower().removesuffix(".gz")).suffix
    if suffix == ".json":
        with open_lines(path) as file:
            try:
                rows = parse_json_line(file.read())
            except UserError as error:
                raise UserError(f"{path}: {error}; correct the file.") from error
        if not isinstance(rows, list):
            raise UserError(f"{path}: it holds one {type(rows).__name__}, not a list of rows.")
        yield from enumerate(rows, 1)
    elif suffix in (".csv", ".tsv"):
        yield from _table(path, "\t" if suffix == ".tsv" else ",")
    elif suffix == ".txt":
        for number, text in enumerate(_texts(path), 1):
            if not text.isspace():
                yield number, {"text": text.rstrip("\n")}
    elif suffix == ".parquet":
        yield from enumerate(_parquet_rows(path), 1)
    else:
        raise UserError(f"{path}: a file of this kind is not shown: use .jsonl, .json, .csv, .tsv, .parquet or .txt.")


def _table(path: Path, delimiter: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (first line, row) of a CSV file with a header; missing fields are None."""
    csv.field_size_limit(1 << 30)
    reader, line = csv.DictReader(_texts(path), delimiter=delimiter), 1
    try:
        header, line = reader.fieldnames or (), reader.line_num + 1
        for row in reader:
            if more := row.get(None):
                raise UserError(
                    f"{path}, line {line}: it has {len(header) + len(more)} fields and the header has {len(header)}: "
                    "put texts with the delimiter in quotes."
                )
            yield line, row
            line = reader.line_num + 1
    except csv.Error as error:
        raise UserError(f"{path}, line {line}: it cannot be read ({error}): save the file again.") from error


def _texts(path: Path) -> Iterator[str]:
    with open_lines(path) as file:
        for number, line in enumerate(file, 1):
            try:
                yield decode_line(line) + "\n"
            except UserError as error:
                raise UserError(f"{path}, line {number}: {error}.") from error


def _parquet_rows(path: Path) -> Iterator[dict[str, Any]]:
    import pyarrow
    import pyarrow.parquet

    try:
        for batch in pyarrow.parquet.ParquetFile(path).iter_batches(1024):
            yield from batch.to_pylist()
    except pyarrow.ArrowException as error:
        raise UserError(f"{path}: it is not a Parquet file, or not the whole of it: download it again.") from error


def read_rows(path: Path) -> Iterator[tuple[int, Any]]:
    """Yield (number, row) of a data file; the number is the line in text files, the row in others, counted from 1.

    Raises:
        UserError: the file type is not supported, or a line is broken.
    """
    if not has_json_lines(path):
        yield from _others(path)
        return
    for number, line in numbered_lines(path):
        try:
            yield number, parse_json_line(line)
        except UserError as error:
            raise UserError(f"{path}, line {number}: {error}; correct the line.") from error


def scan(path: Path, *, everything: bool) -> FileFacts:
    """Read a file: count and compare all rows, and inspect the first ``SAMPLE`` or all of them.

    Args:
        path: .jsonl, .json, .csv, .tsv, .parquet or .txt file.
        everything: inspect all rows.

    Raises:
        UserError: the file is empty, unreadable or of an unsupported type.
    """
    if path.stat().st_size == 0:
        raise UserError(f"{path}: the file is empty.")
    facts = FileFacts(str(path))
    is_lines = has_json_lines(path)
    for number, row in numbered_lines(path) if is_lines else _others(path):
        facts.rows += 1
        key = hash(row.rstrip() if is_lines else json.dumps(row, sort_keys=True, default=str))
        if facts.hashes.setdefault(key, number) != number:
            facts.copies.append((number, facts.hashes[key]))
        if everything or facts.rows <= SAMPLE:
            try:
                _look(facts, number, parse_json_line(row) if is_lines else row)
            except UserError as error:
                facts.problems.append((number, str(error)))
    if not facts.rows:
        raise UserError(f"{path}: there are no rows in it.")
    return facts


def _look(facts: FileFacts, number: int, row: Any) -> None:
    facts.read += 1
    if not isinstance(row, Mapping):
        facts.problems.append((number, f"a row must be a mapping column -> value, not {type(row).__name__}"))
        return
    kind, reader = format_of(row)
    facts.formats[kind, reader] += 1
    facts.firsts.setdefault((kind, reader), number)
    facts.columns[", ".join(row)] += 1
    facts.characters.append(_characters(row))
    if _CALLS.search(json.dumps(row, default=str)):
        facts.calls += 1
    if _has_empty_answer(row, reader):
        facts.empty.append(number)
    if facts.example is None:
        facts.example = row
    if problem := _problem(row, reader):
        facts.problems.append((number, problem))


def histogram(values: list[int], unit: str) -> str:
    """Return a text histogram with about ten bins of a round width; the last bin is open."""
    ordered = sorted(values)
    top = ordered[min(len(ordered) - 1, int(0.98 * len(ordered)))]
    magnitude = 10 ** max(len(str(max(top // 10, 1))) - 1, 0)
    width = next(m * magnitude for m in (1, 2, 5, 10, 20) if m * magnitude * 10 > top)
    counts = Counter(min(value // width, top // width + 1) for value in values)
    most, last = max(counts.values()), top // width + 1
    lines = []
    for place in range(last + 1):
        if place < last or counts[place]:
            until = f"{(place + 1) * width - 1:>9,}" if place < last else " or more "
            bar = "#" * -(-counts[place] * _BAR // most)
            lines.append(f"  {place * width:>9,} {'to' if place < last else '  '} {until}  {bar} {counts[place]:,}")
    middle = ordered[len(ordered) // 2]
    return "\n".join([f"{unit}: {ordered[0]:,} to {ordered[-1]:,}, half have at most {middle:,}", *lines])


def report(facts: FileFacts) -> list[str]:
    """Return the report of a file as lines."""
    size = Path(facts.path).stat().st_size
    part = (
        "all"
        if facts.read >= facts.rows - len(facts.problems)
        else f"the first {facts.read:,}; --all looks into every row"
    )
    lines = [f"{facts.path}: {facts.rows:,} rows, {size / 1e6:,.1f} MB (formats and sizes of {part})"]
    for (kind, reader), count in facts.formats.most_common(5):
        first = f", the first in line {facts.firsts[kind, reader]}" if len(facts.formats) > 1 else ""
        called = f": torchtune.datasets.{reader}" if reader else ""
        lines.append(f"format      {kind}, {count:,} rows{first}{called}")
    if len(facts.formats) > 1:
        lines.append("warning     the rows are of several formats: split the file, a dataset reads one of them")
    if len(facts.columns) > 1:
        for names, count in facts.columns.most_common(5):
            lines.append(f"columns     {names}, {count:,} rows")
    if facts.calls:
        lines.append(f"tool calls  {facts.calls:,} rows have tools or call them")
    if facts.empty:
        lines.append(
            f"empty       {len(facts.empty):,} rows have an answer that says nothing, the first in line "
            f"{facts.empty[0]}: they are refused, unless allow_empty_answers=true"
        )
    lines.append(f"duplicates  {_copies(facts)}")
    for number, reason in facts.problems[:10]:
        lines.append(f"error       {facts.path}:{number}: {reason}")
    if len(facts.problems) > 10:
        lines.append(f"error       … and {len(facts.problems) - 10:,} more rows")
    if facts.characters:
        lines.append(histogram(facts.characters, "characters per row"))
    return lines


def _copies(facts: FileFacts) -> str:
    if not facts.copies:
        return "none: no row is the same as another"
    number, first = facts.copies[0]
    return f"{len(facts.copies):,} rows are the same as an earlier one, the first in line {number} (as line {first})"


def shared_rows(train: FileFacts, held_out: FileFacts) -> str:
    """Return the report line on rows that occur in both files."""
    both = train.hashes.keys() & held_out.hashes.keys()
    if not both:
        return f"leaks       none: no row of {held_out.path} is in {train.path}"
    first = min(held_out.hashes[key] for key in both)
    return (
        f"leaks       {len(both):,} rows of {held_out.path} are in {train.path} too, the first in line {first}: "
        "remove them from one"
    )

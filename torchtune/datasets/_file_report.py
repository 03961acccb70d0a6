"""Inspection of a data file without tokenizer: format, sizes, duplicates and broken lines."""

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
    parse_json_text,
    read_label,
    role_of,
    validate_messages,
)
from torchtune.datasets._file_formats import (
    LOADERS,
    Line,
    format_of_file,
    numbered_records,
    parsed,
    settings_of,
    suffix_of,
)
from torchtune.utils import UserError

SAMPLE = 2000  # rows that are inspected by default
_BAR = 32
_ADVICE = (
    "name those that are read: column_map.input=... column_map.output=... (an instruction and its answer), "
    "column=... (plain text) or conversation_column=... (messages)"
)
# Beginning of a list of mappings as JSON text.
_LIST_OF_MAPPINGS = re.compile(r"\s*\[\s*\{")
_CALLS = re.compile(r'"(tool_calls|function_call|tools|functions)": (?!null|\[\]|"")')
# Name of a conversation format -> turn field that only this format has, its transform, and its column's name.
STYLES: dict[str, tuple[str, Callable[..., Any], str]] = {
    "openai": ("role", OpenAIToMessages, "messages"),
    "sharegpt": ("from", ShareGPTToMessages, "conversations"),
}

# Name of a conversation format -> what a report calls it.
KINDS = {"openai": "OpenAI messages", "sharegpt": "ShareGPT"}


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
        labels: number of rows of raw text with a label, which no dataset reads.
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
    labels: int = 0
    problems: list[tuple[int, str]] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    characters: list[int] = field(default_factory=list)
    hashes: dict[int, int] = field(default_factory=dict)
    example: Any = None

    @property
    def format(self) -> tuple[str, str]:
        """(Format, builder with columns) that reads the most rows; conversations of two formats have one builder."""
        readers = {reader.split()[0] if reader else "" for _, reader in self.formats}
        if len(self.formats) > 1 and readers == {"chat_dataset"}:
            return "conversations", "chat_dataset"
        return self.formats.most_common(1)[0][0]


def styles_of(value: Any) -> list[str]:
    """Return the formats in which a value is a conversation, ``openai`` and ``sharegpt``; empty if it is none."""
    if not isinstance(value, list) or not value or not isinstance(value[0], Mapping):
        return []
    return [style for style, (field, _, _) in STYLES.items() if field in value[0]]


def conversations_of(row: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return (column, format) of each reading of a row as a conversation.

    Turns are lists, or JSON text, as in tables; text is read only in a row without lists of turns.
    """
    readings = [(name, style) for name, value in row.items() for style in styles_of(value)]
    if readings:
        return readings
    texts = {name: value for name, value in row.items() if isinstance(value, str) and _LIST_OF_MAPPINGS.match(value)}
    for name, text in texts.items():
        try:
            turns = parse_json_text(text, f"column '{name}'")
        except DataError:  # a text that only begins like JSON
            continue
        readings += [(name, style) for style in styles_of(turns)]
    return readings


def _asks_only(turns: Any) -> bool:
    """Return whether a conversation does not end with a turn of the assistant."""
    try:
        return role_of(turns[-1]) != "assistant"
    except DataError:  # a problem of its own
        return False


def format_of(row: Mapping[str, Any]) -> tuple[str, str]:
    """Return (format, dataset builder with its columns) of a row; ("unknown", "") if no builder reads it."""
    image = next((name for name in ("image", "images") if name in row), None)
    turns = {name: styles[0] for name, value in row.items() if (styles := styles_of(value))}
    if {"chosen", "rejected"} <= row.keys():
        prompts = [name for name in turns if name not in ("chosen", "rejected")]
        prompts += [name for name in ("question", "instruction", "input") if isinstance(row.get(name), str)]
        if "prompt" not in row and prompts:
            columns = f"column_map.chosen=chosen column_map.rejected=rejected column_map.prompt={prompts[0]}"
            return "preference pairs", f"preference_dataset {columns}"
        return "preference pairs", "preference_dataset"
    if {"input", "preferred_output", "non_preferred_output"} <= row.keys():  # OpenAI's format
        columns = "column_map.chosen=preferred_output column_map.rejected=non_preferred_output column_map.prompt=input"
        return "preference pairs", f"preference_dataset {columns}"
    if "completion" in row and read_label(row.get("label")) is not None:
        return "labeled answers (KTO)", "kto_dataset"
    is_alpaca = "instruction" in row and "output" in row
    if read_label(row.get("kto_tag")) is not None and (turns or is_alpaca):  # LLaMA-Factory's format
        columns = f"masking_strategy=train_on_last column_map.completion={_conversation_column(turns)}"
        if is_alpaca:
            columns = "column_map.prompt=instruction column_map.completion=output"
        return "labeled answers (KTO)", f"kto_dataset {columns} column_map.label=kto_tag"
    if is_alpaca:
        return "Alpaca", "alpaca_dataset"
    for question, answer in (("prompt", "completion"), ("input", "output")):
        if {question, answer} <= row.keys() and {question, answer} & turns.keys():
            columns = f"column_map.input={question} column_map.output={answer}"
            return "conversational prompts with completions", f"instruct_dataset {columns}"
    is_prompt = "prompt" in turns and (len(row) > 1 or _asks_only(row["prompt"]))
    if turns and not is_prompt:
        name = _conversation_column(turns)
        style = turns[name]
        if image is not None and style == "sharegpt":
            tag = " image_tag=<image>" if row[image] is None or "<image>" in str(row[name]) else ""
            columns = f"column_map.conversations={name} column_map.image={image}{tag}"
            return "ShareGPT with images", f"multimodal.multimodal_chat_dataset {columns}"
        return KINDS[style], f"chat_dataset conversation_column={name} conversation_style={style}"
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
    if "text" not in row and "prompt" not in row and (readings := conversations_of(row)):  # JSON text
        name, style = readings[0]
        return KINDS[style], f"chat_dataset conversation_column={name} conversation_style={style}"
    if "prompt" in row:
        return "prompts with answers" if len(row) > 1 else "prompts", "prompt_dataset"
    if isinstance(row.get("text"), str) and isinstance(row.get("label"), str):
        return "labeled texts (classification)", "instruct_dataset column_map.input=text column_map.output=label"
    texts = [name for name, value in row.items() if isinstance(value, str)]
    if texts and ("text" in row or len(row) == 1):
        return "raw text", f"text_completion_dataset column={'text' if 'text' in row else texts[0]}"
    return "unknown", ""


def _conversation_column(turns: Mapping[str, str]) -> str:
    """Return the column of a row's conversation: one with a usual name, otherwise the first with turns."""
    usual = [column for _, _, column in STYLES.values() if column in turns]
    return usual[0] if usual else next(iter(turns), "")


# Settings of a dataset on which it depends whether a conversation can be trained on.
CHECKED_SETTINGS = ("allow_any_order", "new_system_prompt")
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
    "column_map.completion",
    "column_map.chosen",
    "column_map.rejected",
)


def _settings_of(reader: str) -> tuple[str, dict[str, str]]:
    """Return the builder of a reader, and its settings."""
    builder, *words = re.split(r" (?=[\w.]+=)", reader)  # a column's name may have spaces
    return builder, dict(word.split("=", 1) for word in words)


def formats_of(transform: Any) -> tuple[str, ...]:
    """Return the formats of rows that a transform to messages reads, as :func:`format_of` names them.

    A transform from outside this library may have an attribute ``formats``; without it, it may read any.
    """
    if isinstance(transform, InputOutputToMessages):
        # Columns of any name may be mapped.
        return (
            "instructions",
            "labeled texts (classification)",
            "questions about images",
            "prompts with answers",
            "conversational prompts with completions",
        )
    if isinstance(transform, AlpacaToMessages):
        return ("Alpaca",)
    if isinstance(transform, ChosenRejectedToMessages):
        return ("preference pairs",)
    return tuple(getattr(transform, "formats", ()))


def _problem(row: Any, reader: str, chosen: Mapping[str, Any]) -> str | None:
    """Return why a conversation cannot be trained on, if a check without tokenizer finds a reason.

    Args:
        row: the row.
        reader: builder with its columns, see :func:`format_of`.
        chosen: settings of the dataset that the user has chosen, of :data:`CHECKED_SETTINGS`.
    """
    builder, settings = _settings_of(reader)
    options = {}
    if chosen.get("new_system_prompt") is not None and builder != "alpaca_dataset":
        options["new_system_prompt"] = chosen["new_system_prompt"]
    columns = {
        name.removeprefix("column_map."): column for name, column in settings.items() if name.startswith("column_map.")
    }
    if builder == "chat_dataset":
        _, transform, key = STYLES[settings["conversation_style"]]
        columns = {key: settings["conversation_column"]}
    elif builder in _TRANSFORMS:
        transform = _TRANSFORMS[builder]
    else:
        return None
    try:
        sample = transform(column_map=columns or None, **options)(row)
        messages = sample["messages"] if "messages" in sample else sample["chosen"]
        if builder != "preference_dataset" and not chosen.get("allow_any_order"):
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


def numbered_rows(path: Path, settings: Mapping[str, Any], split: str = "train") -> Iterator[tuple[int, Any]]:
    """Yield (number, row) of a file or folder as a run reads it; lines of text files are undecoded.

    Args:
        path: path of a data file, possibly compressed, or of a folder.
        settings: settings of the file, such as ``delimiter``.
        split: split of a folder.

    Raises:
        UserError: the file type is not supported, or the file is damaged or cannot be read.
    """
    loader = LOADERS.get(suffix_of(path.name))
    if path.is_dir():
        yield from enumerate(_loaded_rows(path, settings, split), 1)
    elif loader is None:
        raise UserError(f"{path}: a file of this kind is not read: use {', '.join(LOADERS)}.")
    elif loader in ("arrow", "parquet"):
        if settings:
            raise UserError(f"{path}: {min(settings)} is not a setting of a file of this kind: leave it out.")
        yield from enumerate(_loaded_rows(path, {}) if loader == "arrow" else _parquet_rows(path), 1)
    else:
        known = settings_of(loader, settings)
        if known is None:
            raise UserError(f"{path}: {min(settings)} is not a setting of a file of this kind: leave it out.")
        yield from numbered_records(str(path), format_of_file(str(path), loader, known))


def _loaded_rows(path: Path, settings: Mapping[str, Any], split: str = "train") -> Iterator[Any]:
    from torchtune.datasets._file_rows import unparsed
    from torchtune.datasets._row_source import load_rows, without_added_nulls

    rows = load_rows(str(path), split=split, **settings)
    if not hasattr(rows, "with_format"):
        yield from unparsed(rows)
        return
    for batch in rows.with_format("arrow").iter(1000):  # images stay encoded
        yield from map(without_added_nulls, batch.to_pylist())


def _parquet_rows(path: Path) -> Iterator[dict[str, Any]]:
    import pyarrow
    import pyarrow.parquet

    from torchtune.datasets._row_source import without_added_nulls

    try:
        for batch in pyarrow.parquet.ParquetFile(path).iter_batches(1024):
            yield from map(without_added_nulls, batch.to_pylist())
    except pyarrow.ArrowException as error:
        raise UserError(f"{path}: it is not a Parquet file, or not the whole of it: download it again.") from error


def read_rows(path: Path) -> Iterator[tuple[int, Any]]:
    """Yield (number, row) of a data file; the number is the line in text files, the row in others, counted from 1.

    Raises:
        UserError: the file type is not supported, or a line is broken.
    """
    for number, row in numbered_rows(path, {}):
        try:
            yield number, row.format.decode(row) if isinstance(row, Line) else row
        except UserError as error:
            unit = row.format.unit
            raise UserError(f"{path}, {unit} {number}: {error}; correct the {unit}.") from error


def scan(
    path: Path,
    *,
    everything: bool,
    settings: Mapping[str, Any] | None = None,
    chosen: Mapping[str, Any] | None = None,
    split: str = "train",
) -> FileFacts:
    """Read a file or folder: count and compare all rows, and inspect the first ``SAMPLE`` or all of them.

    Args:
        path: path of a data file, possibly compressed, or of a folder.
        everything: inspect all rows.
        settings: settings of the file, such as ``delimiter``.
        chosen: settings of the dataset by which rows are judged, of :data:`CHECKED_SETTINGS`.
        split: split of a folder.

    Raises:
        UserError: the file is empty, unreadable or of an unsupported type.
    """
    if path.is_file() and path.stat().st_size == 0:
        raise UserError(f"{path}: the file is empty.")
    facts = FileFacts(str(path))
    for number, row in numbered_rows(path, settings or {}, split):
        facts.rows += 1
        try:
            columns = parsed(row)
            if not isinstance(columns, Mapping):
                raise DataError(f"a row must be a mapping column -> value, not {type(columns).__name__}")
            kind, reader = format_of(columns)
        except DataError as error:
            facts.problems.append((number, str(error)))
            continue
        key = _key(columns, reader)
        if facts.hashes.setdefault(key, number) != number:
            facts.copies.append((number, facts.hashes[key]))
        if everything or facts.rows <= SAMPLE:
            _look(facts, number, columns, kind, reader, chosen or {})
    if not facts.rows:
        raise UserError(f"{path}: there are no rows in it.")
    return facts


# Columns that a builder reads beside those that its settings name.
_MEDIA, _CONTEXT = {"image", "images"}, {"system", "system_prompt", "tools", "functions"}
_READ = {
    "alpaca_dataset": {"instruction", "input", "output", "history", *_CONTEXT},
    "chat_dataset": _CONTEXT | _MEDIA,
    "instruct_dataset": _CONTEXT | _MEDIA,
    "kto_dataset": {"prompt", "completion", "label"} | _CONTEXT | _MEDIA,
    "multimodal.multimodal_chat_dataset": _CONTEXT,
    "multimodal.vqa_dataset": _CONTEXT,
    "preference_dataset": {"prompt", "chosen", "rejected"} | _CONTEXT | _MEDIA,
    "text_completion_dataset": set(),
}
# Columns that number or name a row, and that no reward reads.
_ROW_NAMES = {"id", "_id", "idx", "index", "row", "row_id", "uid", "uuid", "unnamed: 0"}


def _key(row: Mapping[str, Any], reader: str) -> int:
    """Return a hash of what is read of a row: two rows that differ in another column alone train the same."""
    builder, settings = _settings_of(reader)
    if builder in _READ:
        names = {*settings.values(), *_READ[builder]} & row.keys()
    else:  # rewards may read any column of a prompt
        names = {name for name in row if name.lower() not in _ROW_NAMES}
    read = {name: row[name] for name in names}
    return hash(json.dumps(read, sort_keys=True, default=str))


def _look(
    facts: FileFacts, number: int, row: Mapping[str, Any], kind: str, reader: str, chosen: Mapping[str, Any]
) -> None:
    facts.read += 1
    facts.formats[kind, reader] += 1
    facts.firsts.setdefault((kind, reader), number)
    facts.columns[", ".join(row)] += 1
    facts.characters.append(_characters(row))
    if _CALLS.search(json.dumps(row, default=str)):
        facts.calls += 1
    if _has_empty_answer(row, reader):
        facts.empty.append(number)
    if reader.startswith("text_completion_dataset") and "label" in row:
        facts.labels += 1
    if facts.example is None:
        facts.example = row
    if problem := _problem(row, reader, chosen):
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
    if len(facts.formats) > 1 and facts.format[0] == "conversations":
        lines.append(
            f"            torchtune.datasets.{facts.format[1]} reads all of them, without conversation_column and "
            "conversation_style"
        )
    elif len(facts.formats) > 1:
        lines.append("warning     the rows are of several formats: split the file, a dataset reads one of them")
    is_unknown = ("unknown", "") in facts.formats
    if len(facts.columns) > 1 or is_unknown:
        for names, count in facts.columns.most_common(5):
            lines.append(f"columns     {names}, {count:,} rows")
    if is_unknown:
        lines.append(f"            {_ADVICE}")
    if facts.labels:
        lines.append(
            f"label       column 'label' of {facts.labels:,} rows is read by no dataset: write it as a text, such as a "
            "name, to train it as the answer"
        )
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

"""Inspection of a data file without tokenizer: format, sizes, duplicates and broken lines."""

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from torchtune.data import (
    AlpacaToMessages,
    ChosenRejectedToMessages,
    DataError,
    InputOutputToMessages,
    answer_turns,
    as_messages,
    validate_messages,
)
from torchtune.datasets._file_formats import (
    LOADERS,
    Line,
    decode_row,
    format_of_file,
    numbered_records,
    settings_of,
    suffix_of,
)
from torchtune.datasets._row_formats import (
    LABELED_TEXTS,
    RAW_TEXT,
    STYLES,
    UNKNOWN,
    RowFormat,
    defect_of,
    format_of,
    is_class_label,
)
from torchtune.utils import UserError

SAMPLE = 2000  # rows that are inspected by default
_BAR_WIDTH = 32  # characters of the longest bar of a histogram
_ADVICE = (
    "name those that are read: column_map.input=... column_map.output=... (an instruction and its answer), "
    "column=... (plain text) or conversation_column=... (messages)"
)
# Settings of a format that are not the name of a column.
_OTHER_SETTINGS = {"conversation_style", "image_tag", "masking_strategy"}
# Conversations of several formats: a chat dataset finds the format in each row.
_CONVERSATIONS = RowFormat("conversations", "chat_dataset")
# A row, as JSON, that has tools or calls them.
_CALLS = re.compile(r'"(tool_calls|function_call|tools|functions)": (?!null|\[\]|"")')


@dataclass
class FileFacts:
    """Facts about a data file.

    Attributes:
        rows: number of rows.
        read: number of inspected rows.
        formats: format -> number of rows.
        firsts: format -> number of the first such row.
        examples: format -> the first such row.
        defects: (line or row, reason) of rows without a format whose values no dataset reads.
        columns: names of all columns of a row -> number of rows.
        calls: number of rows with tools or tool calls.
        empty: numbers of the rows with an answer that says nothing.
        problems: (line or row, reason) of rows that cannot be used.
        undecoded: number of rows that are no mappings or cannot be decoded; they are problems and never inspected.
        copies: (row, earlier equal row) for every duplicate in the file, counted from 1.
        characters: number of characters of each inspected row.
        hashes: hash of a row -> number of the first row with it.
    """

    path: str
    rows: int = 0
    read: int = 0
    formats: Counter[RowFormat] = field(default_factory=Counter)
    firsts: dict[RowFormat, int] = field(default_factory=dict)
    examples: dict[RowFormat, Mapping[str, Any]] = field(default_factory=dict)
    defects: list[tuple[int, str]] = field(default_factory=list)
    columns: Counter[str] = field(default_factory=Counter)
    calls: int = 0
    empty: list[int] = field(default_factory=list)
    problems: list[tuple[int, str]] = field(default_factory=list)
    undecoded: int = 0
    copies: list[tuple[int, int]] = field(default_factory=list)
    characters: list[int] = field(default_factory=list)
    hashes: dict[int, int] = field(default_factory=dict)

    @property
    def format(self) -> RowFormat:
        """Format of the most rows; conversations of several formats have one builder, which reads all of them."""
        builders = {row_format.builder for row_format in self.formats}
        if len(self.formats) > 1 and builders == {"chat_dataset"}:
            return _CONVERSATIONS
        return self.main_format

    @property
    def main_format(self) -> RowFormat:
        """Format of the most rows that are not defective; conversations of several formats are counted separately."""
        counts = self.formats.copy()
        if UNKNOWN in counts:
            counts[UNKNOWN] -= len(self.defects)
        # Of as many rows, a format that says most counts: any column with a text alone is a raw text.
        return max(counts, key=lambda row_format: (counts[row_format], _rank(row_format)))

    @property
    def example(self) -> Any:
        """First row of the format of the most rows; None without rows."""
        return self.examples[self.main_format] if self.examples else None

    @property
    def defect(self) -> str:
        """Why no dataset reads the rows, as of the first of them; empty if one of them can be read."""
        if not self.defects or len(self.defects) < self.read:
            return ""
        number, reason = self.defects[0]
        return f"row {number}: {reason}"


def _rank(row_format: RowFormat) -> int:
    """Return how much a format says of a row: nothing, that it is a text, or more."""
    if row_format == UNKNOWN:
        return 0
    if row_format.kind == RAW_TEXT:
        return 1
    return 2


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


def _problem(row: Any, row_format: RowFormat, user_settings: Mapping[str, Any]) -> str | None:
    """Return why a conversation cannot be trained on, if a check without tokenizer finds a reason.

    Args:
        row: the row.
        row_format: its format.
        user_settings: settings of the dataset that the user has chosen, of :data:`CHECKED_SETTINGS`.

    Returns:
        None if there is no reason, or the builder does not read conversations.
    """
    builder = row_format.builder
    settings = dict(row_format.settings)
    # As the builder makes the transform of this row; alpaca_dataset has no new_system_prompt.
    options = {}
    if user_settings.get("new_system_prompt") is not None and builder != "alpaca_dataset":
        options["new_system_prompt"] = user_settings["new_system_prompt"]
    columns = {}
    for name, column in settings.items():
        if name.startswith("column_map."):
            columns[name.removeprefix("column_map.")] = column
    if builder == "chat_dataset":
        _, transform, key = STYLES[settings["conversation_style"]]
        columns = {key: settings["conversation_column"]}
    elif builder in _TRANSFORMS:
        transform = _TRANSFORMS[builder]
    else:
        return None
    try:
        sample = transform(column_map=columns or None, **options)(row)
        # Of a pair, the chosen answer stands for both: the transform has compared their prompts.
        messages = sample.get("messages", sample.get("chosen"))
        # Preference datasets take turns in any order.
        if builder != "preference_dataset" and not user_settings.get("allow_any_order"):
            validate_messages(messages)
    except DataError as error:
        return str(error)
    if all(turn.masked for turn in messages):  # the row would have no label
        if any(turn.role == "assistant" for turn in messages):
            return "the turns of the assistant say that they are not trained on: there is nothing to train on"
        return "no turn is the assistant's: there is nothing to train on"
    return None


def _has_empty_answer(row: Mapping[str, Any], row_format: RowFormat) -> bool:
    """Return whether an answer of a row that would be trained on says nothing."""
    columns = [column for name, column in row_format.settings if name in _ANSWER_SETTINGS]
    if not columns:
        columns = _ANSWERS.get(row_format.builder, [])
    turns = []
    try:
        for column in columns:
            turns += as_messages(answer_turns(row, column))
    except DataError:
        return False  # a problem of its own
    return any(turn.role == "assistant" and not turn.masked and turn.is_empty for turn in turns)


def _count_characters(value: Any) -> int:
    """Return the number of characters of all texts in a value."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(map(_count_characters, value.values()))
    if isinstance(value, list):
        return sum(map(_count_characters, value))
    return 0


def numbered_rows(path: Path, settings: Mapping[str, Any], split: str = "train") -> Iterator[tuple[int, Any]]:
    """Yield (number, row) of a file or folder as a run reads it, counted from 1.

    Lines of text files are undecoded, so that the caller can report a broken line and go on.

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
        if loader == "arrow":
            rows = _loaded_rows(path, {})
        else:
            rows = _parquet_rows(path)
        yield from enumerate(rows, 1)
    else:
        format_settings = settings_of(loader, settings)
        if format_settings is None:
            raise UserError(f"{path}: {min(settings)} is not a setting of a file of this kind: leave it out.")
        yield from numbered_records(str(path), format_of_file(str(path), loader, format_settings))


def _loaded_rows(path: Path, settings: Mapping[str, Any], split: str = "train") -> Iterator[Any]:
    """Yield the rows that a dataset would load; images stay encoded, and lines of files undecoded."""
    from torchtune.datasets._data_files import undecoded_records
    from torchtune.datasets._row_source import load_rows, without_added_nulls

    rows = load_rows(str(path), split=split, **settings)
    if not hasattr(rows, "with_format"):
        yield from undecoded_records(rows)
        return
    for batch in rows.with_format("arrow").iter(1000):
        yield from map(without_added_nulls, batch.to_pylist())


def _parquet_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a Parquet file as they are read, without the copy that the ``datasets`` package makes."""
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
        if isinstance(row, Line):
            unit = row.format.unit
            try:
                row = row.format.decode(row)
            except UserError as error:
                raise UserError(f"{path}, {unit} {number}: {error}; correct the {unit}.") from error
        yield number, row


def scan(
    path: Path,
    *,
    everything: bool,
    settings: Mapping[str, Any] | None = None,
    chosen: Mapping[str, Any] | None = None,
    split: str = "train",
    at_most: int | None = None,
) -> FileFacts:
    """Read a file or folder: count and compare all rows, and inspect the first ``SAMPLE`` or all of them.

    Args:
        path: path of a data file, possibly compressed, or of a folder.
        everything: inspect all rows.
        settings: settings of the file, such as ``delimiter``.
        chosen: settings of the dataset by which rows are judged, of :data:`CHECKED_SETTINGS`.
        split: split of a folder.
        at_most: number of rows after which to stop reading.

    Raises:
        UserError: the file is empty, unreadable or of an unsupported type.
    """
    if path.is_file() and path.stat().st_size == 0:
        raise UserError(f"{path}: the file is empty.")
    facts = FileFacts(str(path))
    rows = islice(numbered_rows(path, settings or {}, split), at_most)
    _read_rows(facts, rows, everything=everything, chosen=chosen or {})
    if not facts.rows:
        raise UserError(f"{path}: there are no rows in it.")
    if len(facts.formats) > 1:
        # The rows are read again, because only now their format is known.
        rows = islice(numbered_rows(path, settings or {}, split), at_most)
        inspected = rows if everything else islice(rows, SAMPLE)
        _separate_bad_rows(facts, inspected)
    return facts


def scan_rows(name: str, rows: Sequence[Mapping[str, Any]]) -> FileFacts:
    """Inspect rows that are in memory, as :func:`scan` does those of a file.

    Args:
        name: name of their source.
        rows: the rows, all of which are inspected.
    """
    facts = FileFacts(name)
    _read_rows(facts, enumerate(rows, 1), everything=True, chosen={})
    _separate_bad_rows(facts, enumerate(rows, 1))
    return facts


def _read_rows(
    facts: FileFacts, rows: Iterable[tuple[int, Any]], *, everything: bool, chosen: Mapping[str, Any]
) -> None:
    """Add the facts about (number, row) to those of a file; see :func:`scan`.

    ``chosen`` are the settings of the dataset by which rows are judged.
    """
    for number, row in rows:
        facts.rows += 1
        try:
            columns = decode_row(row)
            row_format = format_of(columns)
        except DataError as error:
            facts.problems.append((number, str(error)))
            facts.undecoded += 1
            continue
        # All rows are compared; what takes longer is done for a sample.
        key = _hash_of(columns, row_format)
        first = facts.hashes.setdefault(key, number)
        if first != number:
            facts.copies.append((number, first))
        if everything or facts.rows <= SAMPLE:
            _inspect(facts, number, columns, row_format, chosen)


def _separate_bad_rows(facts: FileFacts, rows: Iterable[tuple[int, Any]]) -> None:
    """Count bad rows of the file's format among its problems, and not as rows of a second format.

    Args:
        facts: facts about all rows.
        rows: (number, row) of the inspected rows.
    """
    if len(facts.formats) < 2:  # no row differs from the others
        return
    main_format = facts.main_format
    if main_format == UNKNOWN:  # there is no format by which to judge the other rows
        return
    formats: Counter[RowFormat] = Counter()
    firsts: dict[RowFormat, int] = {}
    bad_rows = {}
    for number, row in rows:
        try:
            columns = decode_row(row)
        except DataError:  # among the problems already
            continue
        row_format = format_of(columns)
        reason = None
        # A row that the same builder reads, such as a chat in another style, is no bad one.
        if row_format.builder != main_format.builder:
            reason = _reason_for_bad_row(columns, row_format, main_format, facts.examples[main_format])
        if reason is None:
            formats[row_format] += 1
            firsts.setdefault(row_format, number)
        else:
            bad_rows[number] = reason
    facts.formats = formats
    facts.firsts = firsts
    facts.defects = []  # their rows are problems from here on
    # A bad row may have a problem of the format that its columns suggest, which its reason replaces.
    problems = [(number, reason) for number, reason in facts.problems if number not in bad_rows]
    facts.problems = sorted([*problems, *bad_rows.items()])


def _reason_for_bad_row(
    row: Mapping[str, Any], row_format: RowFormat, main_format: RowFormat, example: Mapping[str, Any]
) -> str | None:
    """Return why a row is a bad one of the file's format; None if it is one of another format.

    Args:
        row: the row.
        row_format: its format by itself.
        main_format: format of the file.
        example: a row of that format.
    """
    if row_format == UNKNOWN:
        return defect_of(row)
    # A row with the same columns lacks a value: by itself, {"messages": "x"} is a raw text.
    columns = {column for name, column in main_format.settings if name not in _OTHER_SETTINGS}
    if not columns <= row.keys() or not row.keys() <= example.keys():
        return None
    if columns:
        reason = _problem(row, main_format, {})
        if reason is not None:
            return reason
    if row.keys() == example.keys():
        for name, value in row.items():
            if value is None and example[name] is not None:
                return f"column '{name}' holds nothing"
    return None


# Columns that a builder reads beside those that its settings name.
_MEDIA = {"image", "images"}
_CONTEXT = {"system", "system_prompt", "tools", "functions"}
_READ = {
    "alpaca_dataset": {"instruction", "input", "output", "history", *_CONTEXT},
    "chat_dataset": _CONTEXT | _MEDIA,
    "classification_dataset": {"text", "label"},
    "embedding_dataset": {"query", "positive", "negatives"},
    "instruct_dataset": _CONTEXT | _MEDIA,
    "kto_dataset": {"prompt", "completion", "label"} | _CONTEXT | _MEDIA,
    "multimodal.multimodal_chat_dataset": _CONTEXT,
    "multimodal.vqa_dataset": _CONTEXT,
    "reranking_dataset": {"query", "document", "label"},
    "preference_dataset": {"prompt", "chosen", "rejected"} | _CONTEXT | _MEDIA,
    "text_completion_dataset": set(),
}
# Columns that number or name a row, and that no reward reads.
_ROW_NAMES = {"id", "_id", "idx", "index", "row", "row_id", "uid", "uuid", "unnamed: 0"}


def _hash_of(row: Mapping[str, Any], row_format: RowFormat) -> int:
    """Return a hash of the columns that training reads; rows with equal hashes are duplicates."""
    if row_format.builder in _READ:
        names_in_settings = {column for _, column in row_format.settings}
        names = names_in_settings | _READ[row_format.builder]
    else:  # rewards may read any column of a prompt
        names = {name for name in row if name.lower() not in _ROW_NAMES}
    columns = {name: value for name, value in row.items() if name in names}
    return hash(json.dumps(columns, sort_keys=True, default=str))


def _inspect(
    facts: FileFacts, number: int, row: Mapping[str, Any], row_format: RowFormat, chosen: Mapping[str, Any]
) -> None:
    """Add the facts about a row; ``chosen`` are settings of the dataset, see :func:`scan`."""
    facts.read += 1
    facts.formats[row_format] += 1
    facts.firsts.setdefault(row_format, number)
    facts.examples.setdefault(row_format, row)
    if row_format == UNKNOWN:
        defect = defect_of(row)
        if defect is not None:
            facts.defects.append((number, defect))
    facts.columns[", ".join(row) or "none"] += 1
    facts.characters.append(_count_characters(row))
    if _CALLS.search(json.dumps(row, default=str)):
        facts.calls += 1
    if _has_empty_answer(row, row_format):
        facts.empty.append(number)
    problem = _problem(row, row_format, chosen)
    if problem:
        facts.problems.append((number, problem))


def histogram(values: list[int], unit: str) -> str:
    """Return a text histogram with about ten bins of a round width; the last bin is open."""
    ordered = sorted(values)
    # Bins end at the 98th percentile, so that a few long rows do not make them wide.
    percentile = min(len(ordered) - 1, int(0.98 * len(ordered)))
    top = ordered[percentile]
    # The width is 1, 2 or 5 times a power of ten: the first with which ten bins reach the top. Factors from 10 on are
    # those of the next power.
    num_digits = len(str(max(top // 10, 1)))
    magnitude = 10 ** (num_digits - 1)
    width = next(factor * magnitude for factor in (1, 2, 5, 10, 20) if factor * magnitude * 10 > top)
    last = top // width + 1  # the open bin, which has the values above the bin of the percentile
    counts = Counter(min(value // width, last) for value in values)
    most = max(counts.values())
    median = ordered[len(ordered) // 2]
    lines = [f"{unit}: {ordered[0]:,} to {ordered[-1]:,}, half have at most {median:,}"]
    for number in range(last + 1):
        count = counts[number]
        bar = "#" * math.ceil(count * _BAR_WIDTH / most)
        if number < last:
            lines.append(f"  {number * width:>9,} to {(number + 1) * width - 1:>9,}  {bar} {count:,}")
        elif count:
            lines.append(f"  {number * width:>9,}     or more   {bar} {count:,}")
    return "\n".join(lines)


def report(facts: FileFacts) -> list[str]:
    """Return the report of a file as lines."""
    size = Path(facts.path).stat().st_size
    inspected = "all"
    if facts.read < facts.rows - facts.undecoded:
        inspected = f"the first {facts.read:,}; --all looks into every row"
    lines = [f"{facts.path}: {facts.rows:,} rows, {size / 1e6:,.1f} MB (formats and sizes of {inspected})"]
    for row_format, count in facts.formats.most_common(5):
        line = f"format      {row_format.kind}, {count:,} rows"
        if len(facts.formats) > 1:
            line += f", the first in line {facts.firsts[row_format]}"
        if row_format.builder:
            line += f": torchtune.datasets.{row_format.reader}"
        lines.append(line)
    # A chat dataset finds the format in each row; any other dataset reads one.
    if len(facts.formats) > 1 and facts.format is _CONVERSATIONS:
        lines.append(
            f"            torchtune.datasets.{_CONVERSATIONS.builder} reads all of them, without conversation_column "
            "and conversation_style"
        )
    elif len(facts.formats) > 1:
        lines.append("warning     the rows are of several formats: split the file, a dataset reads one of them")
    is_unknown = UNKNOWN in facts.formats
    # Columns that are the same in all rows of a known format say nothing new.
    if len(facts.columns) > 1 or is_unknown:
        for names, count in facts.columns.most_common(5):
            lines.append(f"columns     {names}, {count:,} rows")
    if facts.defect:
        lines.append(
            f"            no dataset reads them: {facts.defect}: correct the rows, or name columns that hold texts"
        )
    elif is_unknown:
        lines.append(f"            {_ADVICE}")
    if RowFormat(LABELED_TEXTS, "classification_dataset") in facts.formats:
        lines.append(
            "            torchtune.datasets.instruct_dataset column_map.input=text column_map.output=label trains "
            "labels that are texts as answers of a language model"
        )
    # A chat whose rows also have a label could be meant for a classifier: chat_dataset ignores the label.
    chat_formats = [row_format for row_format in facts.formats if row_format.builder == "chat_dataset"]
    if chat_formats and facts.example is not None and is_class_label(facts.example.get("label")):
        column = dict(chat_formats[0].settings)["conversation_column"]
        lines.append(
            f"            torchtune.datasets.classification_dataset column={column} trains a "
            "classifier on the column label, which chats do not read"
        )
    if facts.calls:
        lines.append(f"tool calls  {facts.calls:,} rows have tools or call them")
    if facts.empty:
        lines.append(
            f"empty       {len(facts.empty):,} rows have an answer that says nothing, the first in line "
            f"{facts.empty[0]}: they are refused, unless allow_empty_answers=true"
        )
    if facts.copies:
        number, first = facts.copies[0]
        lines.append(
            f"duplicates  {len(facts.copies):,} rows are the same as an earlier one, the first in line {number} (as "
            f"line {first})"
        )
    else:
        lines.append("duplicates  none: no row is the same as another")
    for number, reason in facts.problems[:10]:
        lines.append(f"error       {facts.path}:{number}: {reason}")
    if len(facts.problems) > 10:
        lines.append(f"error       … and {len(facts.problems) - 10:,} more rows")
    if facts.characters:
        lines.append(histogram(facts.characters, "characters per row"))
    return lines


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

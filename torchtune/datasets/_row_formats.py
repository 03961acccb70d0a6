"""Formats of rows: by its columns, what a row holds, which dataset reads it, and which column has the conversation."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torchtune.data import (
    AlpacaToMessages,
    ChosenRejectedToMessages,
    DataError,
    InputOutputToMessages,
    MaskingStrategy,
    OpenAIToMessages,
    ShareGPTToMessages,
    Transform,
    as_messages,
    column,
    kind_of,
    parse_json_text,
    role_of,
    turns_of_column,
)

# Name of a conversation format -> turn field that only this format has, its transform, and its column's name.
STYLES: dict[str, tuple[str, Callable[..., Any], str]] = {
    "openai": ("role", OpenAIToMessages, "messages"),
    "sharegpt": ("from", ShareGPTToMessages, "conversations"),
}
# Name of a conversation format -> what a report calls it.
CONVERSATION_FORMATS = {"openai": "OpenAI messages", "sharegpt": "ShareGPT"}
# Beginning of a list of mappings as JSON text.
_LIST_OF_MAPPINGS = re.compile(r"\s*\[\s*\{")
# Pairs of columns that hold a question and its answer.
_QUESTION_COLUMNS = (("input", "output"), ("question", "answer"), ("prompt", "completion"), ("prompt", "response"))

# Kinds of rows, as a report and messages call them.
TOKEN_IDS = "token ids"
RETRIEVAL = "queries with passages (embedding)"
RERANKING = "queries with labeled documents (reranking)"
LABELED_TEXTS = "labeled texts (classification)"
LABELED_ANSWERS = "labeled answers (KTO)"
PREFERENCE_PAIRS = "preference pairs"
ALPACA = "Alpaca"
INSTRUCTIONS = "instructions"
CONVERSATIONAL_PROMPTS = "conversational prompts with completions"
QUESTIONS_ABOUT_IMAGES = "questions about images"
PROMPTS_WITH_ANSWERS = "prompts with answers"
RAW_TEXT = "raw text"

# Names of settings of a dataset builder, and their values: mostly columns.
Settings = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class RowFormat:
    """What a row holds, and which dataset reads it.

    Attributes:
        kind: what messages call it, such as ``"preference pairs"``.
        builder: name of the dataset builder that reads it; empty if there is none.
        settings: settings of the builder, mostly the names of columns.
    """

    kind: str
    builder: str = ""
    settings: Settings = ()

    @property
    def reader(self) -> str:
        """The builder with its settings, as on a command line; empty if no builder reads the row."""
        return " ".join([self.builder, *(f"{name}={value}" for name, value in self.settings)])

    def __str__(self) -> str:
        return f"{self.kind} ({self.reader})"


UNKNOWN = RowFormat("unknown")


def column_map(**columns: str) -> Settings:
    """Return the settings that map columns: ``column_map.input=question`` for ``input="question"``."""
    return tuple((f"column_map.{name}", column) for name, column in columns.items())


def chat_format(column: str, style: str) -> RowFormat:
    """Return the format of rows with a conversation in a column, in the format ``openai`` or ``sharegpt``."""
    settings = (("conversation_column", column), ("conversation_style", style))
    return RowFormat(CONVERSATION_FORMATS[style], "chat_dataset", settings)


def styles_of(value: Any) -> list[str]:
    """Return the formats in which a value is a conversation, ``openai`` and ``sharegpt``."""
    if not isinstance(value, list) or not value or not isinstance(value[0], Mapping):
        return []
    return [style for style, (field, _, _) in STYLES.items() if field in value[0]]


def conversations_of(row: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return (column, format) of each reading of a row as a conversation.

    Turns are lists, or JSON text, as in tables; text is read only in a row without lists of turns.
    """
    readings = []
    for name, value in row.items():
        readings += [(name, style) for style in styles_of(value)]
    if readings:
        return readings
    for name, value in row.items():
        if not isinstance(value, str) or not _LIST_OF_MAPPINGS.match(value):
            continue
        try:
            turns = parse_json_text(value, f"column '{name}'")
        except DataError:  # a text that only begins like JSON
            continue
        readings += [(name, style) for style in styles_of(turns)]
    return readings


def format_of(row: Mapping[str, Any]) -> RowFormat:
    """Return the format of a row; ``UNKNOWN`` if no dataset reads it."""
    styles = {}  # of the columns with turns
    for name, value in row.items():
        styles_of_column = styles_of(value)
        if styles_of_column:
            styles[name] = styles_of_column[0]  # turns that have the keys of both are read as OpenAI messages
    # From special columns to common ones: a pair of answers also has a prompt, a labeled chat also is a chat, and a
    # text is in most rows.
    row_format = (
        _token_format(row)
        or _retrieval_format(row)
        or _reranking_format(row)
        or _preference_format(row, styles)
        or _labeled_format(row, styles)
        or _alpaca_format(row)
        or _labeled_conversation_format(row, styles)
        or _conversation_format(row, styles)
        or _question_format(row)
        or _text_format(row)
    )
    return row_format or UNKNOWN


def defect_of(row: Mapping[str, Any]) -> str | None:
    """Return why no dataset reads a row of the format ``UNKNOWN``; None if only the names of its columns are unknown.

    A row is defective if it has the columns of a usual format with other values in them, or neither text nor turns.
    """
    if not row:
        return "the row has no columns"
    # The column of a conversation whose turns are broken: `format_of` did not take them for turns.
    for _, _, name in STYLES.values():
        if name in row:
            try:
                as_messages(turns_of_column(row[name], name))
            except DataError as error:
                return str(error)
    for columns in (*_QUESTION_COLUMNS, ("text",)):  # pairs of a question and an answer, and plain text
        if not all(name in row for name in columns):
            continue
        for name in columns:
            if not isinstance(row[name], str):
                return f"column '{name}' holds {kind_of(row[name])}, not a text"
    if not any(isinstance(value, str | list | Mapping) for value in row.values()):
        return f"none of the columns {', '.join(row)} holds a text or turns"
    return None


def readings_of(row: Mapping[str, Any]) -> list[RowFormat]:
    """Return each reading of a row as a conversation or, in a row without one, as a question with its answer.

    A row with two columns of turns, or with two questions or answers, has several, and only its owner knows which one
    is meant.
    """
    readings: list[RowFormat] = []
    for name, style in conversations_of(row):
        readings.append(chat_format(name, style))
    if readings:
        return readings
    for question, answer in _QUESTION_COLUMNS:
        if isinstance(row.get(question), str) and isinstance(row.get(answer), str):
            settings = column_map(input=question, output=answer)
            readings.append(RowFormat(INSTRUCTIONS, "instruct_dataset", settings))
    return readings


def _token_format(row: Mapping[str, Any]) -> RowFormat | None:
    """Return the format of token ids, in the column that tokenizers of ``transformers`` write."""
    ids = row.get("input_ids")
    if isinstance(ids, list) and ids and all(isinstance(token, int) for token in ids):
        return RowFormat(TOKEN_IDS, "pretokenized_dataset")
    return None


def _retrieval_format(row: Mapping[str, Any]) -> RowFormat | None:
    """Return the format of a query with a passage that answers it, and perhaps passages that do not."""
    if not isinstance(row.get("positive"), str):
        return None
    # "anchor" and "negative" are the columns of sentence-transformers' data sets.
    queries = [name for name in ("query", "anchor", "question") if isinstance(row.get(name), str)]
    if not queries:
        return None
    settings: Settings = ()
    if queries[0] != "query" or "negative" in row:
        settings = column_map(query=queries[0], positive="positive")
        for name in ("negatives", "negative"):
            if name in row:
                settings += column_map(negatives=name)
                break
    return RowFormat(RETRIEVAL, "embedding_dataset", settings)


def _reranking_format(row: Mapping[str, Any]) -> RowFormat | None:
    """Return the format of a query with a document and the label of both."""
    is_pair = isinstance(row.get("query"), str) and isinstance(row.get("document"), str)
    if is_pair and isinstance(row.get("label"), int | float):
        return RowFormat(RERANKING, "reranking_dataset")
    return None


def _preference_format(row: Mapping[str, Any], styles: Mapping[str, str]) -> RowFormat | None:
    """Return the format of a pair of answers, whose prompt may have one of several names."""
    settings: Settings = ()
    if {"chosen", "rejected"} <= row.keys():
        prompts = [name for name in styles if name not in ("chosen", "rejected")]
        prompts += [name for name in ("question", "instruction", "input") if isinstance(row.get(name), str)]
        if "prompt" not in row and prompts:
            settings = column_map(chosen="chosen", rejected="rejected", prompt=prompts[0])
    elif {"input", "preferred_output", "non_preferred_output"} <= row.keys():  # OpenAI's format
        settings = column_map(chosen="preferred_output", rejected="non_preferred_output", prompt="input")
    else:
        return None
    return RowFormat(PREFERENCE_PAIRS, "preference_dataset", settings)


def _is_alpaca(row: Mapping[str, Any]) -> bool:
    return "instruction" in row and "output" in row


def _labeled_format(row: Mapping[str, Any], styles: Mapping[str, str]) -> RowFormat | None:
    """Return the format of an answer that is labeled good or bad."""
    settings: Settings = ()
    if "completion" in row and read_label(row.get("label")) is not None:
        return RowFormat(LABELED_ANSWERS, "kto_dataset")
    if read_label(row.get("kto_tag")) is None:
        return None
    # LLaMA-Factory's format.
    if _is_alpaca(row):
        settings = column_map(prompt="instruction", completion="output", label="kto_tag")
    elif styles:
        columns = column_map(completion=_conversation_column(styles), label="kto_tag")
        settings = (("masking_strategy", "train_on_last"), *columns)
    else:
        return None
    return RowFormat(LABELED_ANSWERS, "kto_dataset", settings)


def _alpaca_format(row: Mapping[str, Any]) -> RowFormat | None:
    if not _is_alpaca(row):
        return None
    return RowFormat(ALPACA, "alpaca_dataset")


def _labeled_conversation_format(row: Mapping[str, Any], styles: Mapping[str, str]) -> RowFormat | None:
    """Return the format of a labeled conversation without an answer, which only a classifier can be trained on."""
    name = _conversation_column({column: style for column, style in styles.items() if column != "prompt"})
    if not name or not is_class_label(row.get("label")) or _ends_with_answer(row[name]):
        return None
    return RowFormat(LABELED_TEXTS, "classification_dataset", (("column", name),))


def _conversation_format(row: Mapping[str, Any], styles: Mapping[str, str]) -> RowFormat | None:
    """Return the format of a conversation: in one column, in a prompt and a completion, or with images."""
    for question, answer in (("prompt", "completion"), ("input", "output")):
        if question in row and answer in row and (question in styles or answer in styles):
            settings = column_map(input=question, output=answer)
            return RowFormat(CONVERSATIONAL_PROMPTS, "instruct_dataset", settings)
    # A prompt to answer, with columns for its reward, is no training conversation; `_text_format` reads it.
    is_prompt = "prompt" in styles and (len(row) > 1 or not _ends_with_answer(row["prompt"]))
    if not styles or is_prompt:
        return None
    name = _conversation_column(styles)
    style = styles[name]
    image = _image_column(row)
    # Of OpenAI messages, chat_dataset reads the images without settings.
    if image is not None and style == "sharegpt":
        settings = column_map(conversations=name, image=image)
        # A row without an image shows nothing: tags are the usual layout, and do no harm where there is no image.
        has_tags = row[image] is None or "<image>" in str(row[name])
        if has_tags:
            settings = (*settings, ("image_tag", "<image>"))
        return RowFormat("ShareGPT with images", "multimodal.multimodal_chat_dataset", settings)
    return chat_format(name, style)


def _conversation_column(styles: Mapping[str, str]) -> str:
    """Return the column of a row's conversation: one with a usual name, otherwise the first with turns."""
    for _, _, name in STYLES.values():
        if name in styles:
            return name
    return next(iter(styles), "")


def _image_column(row: Mapping[str, Any]) -> str | None:
    """Return the column of a row's images; None if it has none."""
    for name in ("image", "images"):
        if name in row:
            return name
    return None


def _ends_with_answer(turns: Any) -> bool:
    """Return whether a conversation ends with a turn of the assistant, or with one that cannot be read."""
    try:
        return role_of(turns[-1]) == "assistant"
    except DataError:  # a problem of its own
        return True


def _question_format(row: Mapping[str, Any]) -> RowFormat | None:
    """Return the format of a question with an answer, both texts, and perhaps with an image."""
    for question, answer in _QUESTION_COLUMNS:
        if not isinstance(row.get(question), str) or not isinstance(row.get(answer), str):
            continue
        if question == "question" and "####" in row[answer]:  # GSM8K's format
            return RowFormat(PROMPTS_WITH_ANSWERS, "prompt_dataset", (("column", question),))
        image = _image_column(row)
        if image is not None:
            settings = column_map(input=question, output=answer, image=image)
            return RowFormat(QUESTIONS_ABOUT_IMAGES, "multimodal.vqa_dataset", settings)
        return RowFormat(INSTRUCTIONS, "instruct_dataset", column_map(input=question, output=answer))
    return None


def _text_format(row: Mapping[str, Any]) -> RowFormat | None:
    """Return the format of rows of texts: a conversation as JSON, a prompt, a labeled text, or plain text."""
    # A text or a prompt that happens to be JSON stays a text or a prompt.
    if "text" not in row and "prompt" not in row:
        readings = conversations_of(row)  # as JSON text
        if readings:
            return chat_format(*readings[0])
    if "prompt" in row:
        kind = "prompts"
        if len(row) > 1:  # rewards read the other columns
            kind = PROMPTS_WITH_ANSWERS
        return RowFormat(kind, "prompt_dataset")
    if isinstance(row.get("text"), str) and is_class_label(row.get("label")):
        return RowFormat(LABELED_TEXTS, "classification_dataset")
    texts = [name for name, value in row.items() if isinstance(value, str)]
    if not texts:
        return None
    if "text" in row:
        return RowFormat(RAW_TEXT, "text_completion_dataset", (("column", "text"),))
    # A text in the column of a conversation is one that cannot be read, such as a list that Python has printed.
    conversation_columns = {name for _, _, name in STYLES.values()}
    # Of several columns without a usual name, only the user knows which one is meant.
    if len(row) == 1 and texts[0] not in conversation_columns:
        return RowFormat(RAW_TEXT, "text_completion_dataset", (("column", texts[0]),))
    return None


def is_class_label(value: Any) -> bool:
    """Return whether a value is a class, a list of classes, or a number."""
    items = [value]
    if isinstance(value, list):
        items = value
    return all(isinstance(item, str | int | float) for item in items)


def formats_of(transform: Any) -> tuple[str, ...]:
    """Return the kinds of rows (:class:`RowFormat`) that a transform to messages reads.

    A transform from outside this library may have an attribute ``formats``; without it, it may read any.
    """
    if isinstance(transform, InputOutputToMessages):
        # Columns of any name may be mapped.
        return (
            INSTRUCTIONS,
            LABELED_TEXTS,
            QUESTIONS_ABOUT_IMAGES,
            PROMPTS_WITH_ANSWERS,
            CONVERSATIONAL_PROMPTS,
        )
    if isinstance(transform, AlpacaToMessages):
        return (ALPACA,)
    if isinstance(transform, ChosenRejectedToMessages):
        return (PREFERENCE_PAIRS,)
    return tuple(getattr(transform, "formats", ()))


class ConversationToMessages(Transform):
    """Transform of a conversation in OpenAI or ShareGPT format, which finds column and format in each row.

    Args:
        conversation_column: column of the conversation; None: the only one that holds a conversation.
        conversation_style: ``"openai"`` or ``"sharegpt"``; None: that of the first turn.
        new_system_prompt: system prompt that replaces the conversation's system turn.
        masking_strategy: see :func:`torchtune.data.mask_messages`.

    Raises:
        DataError: the style is unknown; when called, a row has no conversation, or several.
    """

    takes_encoded_images = True  # encoded files need not be decoded first

    def __init__(
        self,
        conversation_column: str | None,
        conversation_style: str | None,
        new_system_prompt: str | None,
        masking_strategy: MaskingStrategy,
    ) -> None:
        if conversation_style is not None and conversation_style not in STYLES:
            raise DataError(f"conversation_style must be {' or '.join(STYLES)}, not '{conversation_style}'.")
        self.conversation_column = conversation_column
        self.conversation_style = conversation_style
        self.new_system_prompt = new_system_prompt
        self.masking_strategy = masking_strategy

    @property
    def formats(self) -> tuple[str, ...]:
        """Formats of rows that are read, see :func:`formats_of`."""
        if self.conversation_style is None:
            return tuple(CONVERSATION_FORMATS.values())
        return (CONVERSATION_FORMATS[self.conversation_style],)

    def __call__(self, sample: Mapping[str, Any]) -> dict[str, Any]:
        """Return ``{"messages": [...]}``, and what else the transform of the format returns."""
        name, style = self._reading(sample)
        _, transform, key = STYLES[style]
        convert = transform(
            column_map={key: name}, new_system_prompt=self.new_system_prompt, masking_strategy=self.masking_strategy
        )
        return convert(sample)

    def _reading(self, sample: Mapping[str, Any]) -> tuple[str, str]:
        """Return the column and the format of the row's conversation: the settings, or what the row has.

        Raises:
            DataError: no column holds a conversation, or the row can be read in two ways.
        """
        if self.conversation_column is not None and self.conversation_style is not None:
            return self.conversation_column, self.conversation_style
        columns = sample
        if self.conversation_column is not None:
            columns = {self.conversation_column: column(sample, self.conversation_column)}
        readings = conversations_of(columns)
        if self.conversation_style is not None:
            readings = [(name, style) for name, style in readings if style == self.conversation_style]
        if len(readings) > 1:
            settings = [f"conversation_column={name} conversation_style={style}" for name, style in readings[:2]]
            raise DataError(f"the row can be read in two ways: set {' or '.join(settings)}")
        if not readings:
            if self.conversation_column is not None:
                return self.conversation_column, "openai"  # the transform of that style names the mistake
            raise DataError(f"no column holds a conversation among {', '.join(map(repr, sample)) or 'none'}")
        return readings[0]


def read_label(value: Any) -> bool | None:
    """Return whether an answer is good, by its label (a bool, 1, 0, or one of them as text); None for another value."""
    if isinstance(value, str):
        return {"true": True, "1": True, "false": False, "0": False}.get(value.strip().lower())
    if value in (True, False):  # also 1 and 0, and 1.0 and 0.0
        return bool(value)
    return None

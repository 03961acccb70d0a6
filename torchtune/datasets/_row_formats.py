"""Formats of rows: by the columns of a row, what it holds and which dataset reads it."""

import re
from collections.abc import Callable, Mapping
from typing import Any

from torchtune.data import (
    AlpacaToMessages,
    ChosenRejectedToMessages,
    DataError,
    InputOutputToMessages,
    OpenAIToMessages,
    ShareGPTToMessages,
    parse_json_text,
    role_of,
)

# Name of a conversation format -> turn field that only this format has, its transform, and its column's name.
STYLES: dict[str, tuple[str, Callable[..., Any], str]] = {
    "openai": ("role", OpenAIToMessages, "messages"),
    "sharegpt": ("from", ShareGPTToMessages, "conversations"),
}
# Name of a conversation format -> what a report calls it.
KINDS = {"openai": "OpenAI messages", "sharegpt": "ShareGPT"}
# Beginning of a list of mappings as JSON text.
_LIST_OF_MAPPINGS = re.compile(r"\s*\[\s*\{")
# Pairs of columns that hold a question and its answer.
_QUESTION_COLUMNS = (("input", "output"), ("question", "answer"), ("prompt", "completion"), ("prompt", "response"))

RETRIEVAL = "queries with passages (embedding)"
RERANKING = "queries with labeled documents (reranking)"
LABELED_TEXTS = "labeled texts (classification)"

# What a row holds, and the dataset builder that reads it with its settings: "preference pairs", "preference_dataset".
RowFormat = tuple[str, str]


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
    """Return (format, dataset builder with its columns) of a row; ("unknown", "") if no builder reads it."""
    styles = {}  # of the columns with turns
    for name, value in row.items():
        if styles_of(value):
            styles[name] = styles_of(value)[0]
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
    return row_format or ("unknown", "")


def readings_of(row: Mapping[str, Any]) -> list[RowFormat]:
    """Return each reading of a row as a conversation or, in a row without one, as a question with its answer.

    A row with two columns of turns, or with two questions or answers, has several, and only its owner knows which one
    is meant.
    """
    readings: list[RowFormat] = []
    for column, style in conversations_of(row):
        readings.append((KINDS[style], f"chat_dataset conversation_column={column} conversation_style={style}"))
    if readings:
        return readings
    for question, answer in _QUESTION_COLUMNS:
        if isinstance(row.get(question), str) and isinstance(row.get(answer), str):
            readings.append(
                ("instructions", f"instruct_dataset column_map.input={question} column_map.output={answer}")
            )
    return readings


def _token_format(row: Mapping[str, Any]) -> RowFormat | None:
    ids = row.get("input_ids")
    if isinstance(ids, list) and ids and all(isinstance(token, int) for token in ids):
        return "token ids", "pretokenized_dataset"
    return None


def _retrieval_format(row: Mapping[str, Any]) -> RowFormat | None:
    if not isinstance(row.get("positive"), str):
        return None
    # "anchor" and "negative" are the columns of sentence-transformers' data sets.
    queries = [name for name in ("query", "anchor", "question") if isinstance(row.get(name), str)]
    if not queries:
        return None
    columns = ""
    if queries[0] != "query" or "negative" in row:
        columns = f" column_map.query={queries[0]} column_map.positive=positive"
        for name in ("negatives", "negative"):
            if name in row:
                columns += f" column_map.negatives={name}"
                break
    return RETRIEVAL, f"embedding_dataset{columns}"


def _reranking_format(row: Mapping[str, Any]) -> RowFormat | None:
    is_pair = isinstance(row.get("query"), str) and isinstance(row.get("document"), str)
    if is_pair and isinstance(row.get("label"), int | float):
        return RERANKING, "reranking_dataset"
    return None


def _preference_format(row: Mapping[str, Any], styles: Mapping[str, str]) -> RowFormat | None:
    if {"chosen", "rejected"} <= row.keys():
        prompts = [name for name in styles if name not in ("chosen", "rejected")]
        prompts += [name for name in ("question", "instruction", "input") if isinstance(row.get(name), str)]
        if "prompt" not in row and prompts:
            columns = f"column_map.chosen=chosen column_map.rejected=rejected column_map.prompt={prompts[0]}"
            return "preference pairs", f"preference_dataset {columns}"
        return "preference pairs", "preference_dataset"
    if {"input", "preferred_output", "non_preferred_output"} <= row.keys():  # OpenAI's format
        columns = "column_map.chosen=preferred_output column_map.rejected=non_preferred_output column_map.prompt=input"
        return "preference pairs", f"preference_dataset {columns}"
    return None


def _is_alpaca(row: Mapping[str, Any]) -> bool:
    return "instruction" in row and "output" in row


def _labeled_format(row: Mapping[str, Any], styles: Mapping[str, str]) -> RowFormat | None:
    if "completion" in row and read_label(row.get("label")) is not None:
        return "labeled answers (KTO)", "kto_dataset"
    if read_label(row.get("kto_tag")) is None:
        return None
    # LLaMA-Factory's format.
    if _is_alpaca(row):
        columns = "column_map.prompt=instruction column_map.completion=output"
    elif styles:
        columns = f"masking_strategy=train_on_last column_map.completion={_conversation_column(styles)}"
    else:
        return None
    return "labeled answers (KTO)", f"kto_dataset {columns} column_map.label=kto_tag"


def _alpaca_format(row: Mapping[str, Any]) -> RowFormat | None:
    return ("Alpaca", "alpaca_dataset") if _is_alpaca(row) else None


def _labeled_conversation_format(row: Mapping[str, Any], styles: Mapping[str, str]) -> RowFormat | None:
    """Return the format of a labeled conversation without an answer, which only a classifier can be trained on."""
    name = _conversation_column({column: style for column, style in styles.items() if column != "prompt"})
    if not name or not is_class_label(row.get("label")) or _ends_with_answer(row[name]):
        return None
    return LABELED_TEXTS, f"classification_dataset column={name}"


def _conversation_format(row: Mapping[str, Any], styles: Mapping[str, str]) -> RowFormat | None:
    for question, answer in (("prompt", "completion"), ("input", "output")):
        if question in row and answer in row and (question in styles or answer in styles):
            columns = f"column_map.input={question} column_map.output={answer}"
            return "conversational prompts with completions", f"instruct_dataset {columns}"
    is_prompt = "prompt" in styles and (len(row) > 1 or not _ends_with_answer(row["prompt"]))
    if not styles or is_prompt:
        return None
    name = _conversation_column(styles)
    style = styles[name]
    image = _image_column(row)
    if image is not None and style == "sharegpt":
        has_tags = row[image] is None or "<image>" in str(row[name])
        columns = f"column_map.conversations={name} column_map.image={image}"
        if has_tags:
            columns += " image_tag=<image>"
        return "ShareGPT with images", f"multimodal.multimodal_chat_dataset {columns}"
    return KINDS[style], f"chat_dataset conversation_column={name} conversation_style={style}"


def _conversation_column(styles: Mapping[str, str]) -> str:
    """Return the column of a row's conversation: one with a usual name, otherwise the first with turns."""
    usual = [column for _, _, column in STYLES.values() if column in styles]
    return usual[0] if usual else next(iter(styles), "")


def _image_column(row: Mapping[str, Any]) -> str | None:
    return next((name for name in ("image", "images") if name in row), None)


def _ends_with_answer(turns: Any) -> bool:
    """Return whether a conversation ends with a turn of the assistant, or with one that cannot be read."""
    try:
        return role_of(turns[-1]) == "assistant"
    except DataError:  # a problem of its own
        return True


def _question_format(row: Mapping[str, Any]) -> RowFormat | None:
    for question, answer in _QUESTION_COLUMNS:
        if not isinstance(row.get(question), str) or not isinstance(row.get(answer), str):
            continue
        if question == "question" and "####" in row[answer]:  # GSM8K's format
            return "prompts with answers", f"prompt_dataset column={question}"
        columns = f"column_map.input={question} column_map.output={answer}"
        image = _image_column(row)
        if image is not None:
            return "questions about images", f"multimodal.vqa_dataset {columns} column_map.image={image}"
        return "instructions", f"instruct_dataset {columns}"
    return None


def _text_format(row: Mapping[str, Any]) -> RowFormat | None:
    if "text" not in row and "prompt" not in row:
        readings = conversations_of(row)  # as JSON text
        if readings:
            name, style = readings[0]
            return KINDS[style], f"chat_dataset conversation_column={name} conversation_style={style}"
    if "prompt" in row:
        return "prompts with answers" if len(row) > 1 else "prompts", "prompt_dataset"
    if isinstance(row.get("text"), str) and is_class_label(row.get("label")):
        return LABELED_TEXTS, "classification_dataset"
    texts = [name for name, value in row.items() if isinstance(value, str)]
    if texts and ("text" in row or len(row) == 1):
        return "raw text", f"text_completion_dataset column={'text' if 'text' in row else texts[0]}"
    return None


def is_class_label(value: Any) -> bool:
    """Return whether a value is a class, a list of classes, or a number."""
    items = value if isinstance(value, list) else [value]
    return all(isinstance(item, str | int | float) for item in items)


def builder_and_settings(reader: str) -> tuple[str, dict[str, str]]:
    """Return the dataset builder of a format, as :func:`format_of` names it, and its settings."""
    builder, *settings = re.split(r" (?=[\w.]+=)", reader)  # a column's name may have spaces
    return builder, dict(setting.split("=", 1) for setting in settings)


def formats_of(transform: Any) -> tuple[str, ...]:
    """Return the formats of rows that a transform to messages reads, as :func:`format_of` names them.

    A transform from outside this library may have an attribute ``formats``; without it, it may read any.
    """
    if isinstance(transform, InputOutputToMessages):
        # Columns of any name may be mapped.
        return (
            "instructions",
            LABELED_TEXTS,
            "questions about images",
            "prompts with answers",
            "conversational prompts with completions",
        )
    if isinstance(transform, AlpacaToMessages):
        return ("Alpaca",)
    if isinstance(transform, ChosenRejectedToMessages):
        return ("preference pairs",)
    return tuple(getattr(transform, "formats", ()))


def read_label(value: Any) -> bool | None:
    """Return whether an answer is good, by its label (a bool, 1, 0, or one of them as text); None for another value."""
    if isinstance(value, str):
        return {"true": True, "1": True, "false": False, "0": False}.get(value.strip().lower())
    return bool(value) if value in (True, False) else None

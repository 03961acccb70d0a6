"""Images of rows, and their checks before training."""

import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from torchtune.data import (
    DataError,
    Message,
    Video,
    check_image,
    each_image,
    image_size,
    open_image,
    tools_entry,
)
from torchtune.datasets._bad_rows import BadRows
from torchtune.datasets._data_files import location_of
from torchtune.datasets._processes import in_parts
from torchtune.datasets._row_source import TableRows, without_added_nulls
from torchtune.datasets._tokenized import Tokenize, arrays_of
from torchtune.tokenizers import tool_options


class EncodedRows(TableRows):
    """Rows of a ``datasets.Dataset`` in which images stay encoded, as ``{"bytes", "path"}``.

    Args:
        table: a ``datasets.Dataset``.
    """

    def __init__(self, table: Any) -> None:
        super().__init__(table.with_format("arrow"))

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        return (self[index] for index in range(len(self)))

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        return without_added_nulls(self.table[index].to_pylist()[0])


def encoded(rows: Any, message_transform: Any) -> Any:
    """Return rows of a table as :class:`EncodedRows` if ``message_transform`` accepts encoded images."""
    if not getattr(message_transform, "takes_encoded_images", False):
        return rows
    table = rows
    if isinstance(rows, TableRows):
        table = rows.table
    is_table = hasattr(table, "with_format") and hasattr(table, "features")  # a datasets.Dataset
    if not is_table:
        return rows
    return EncodedRows(table)


def images_of(sample: Mapping[str, Any]) -> list[Any]:
    """Return the images and videos of a conversation, in order."""
    images = []
    for message in sample.get("messages") or ():
        if isinstance(message, Message):
            images += message.get_media()
    return images


def size_of(image: Any) -> tuple[int, int]:
    """Return (width, height) of an image in pixels; raise :class:`DataError` if it cannot be read."""
    if isinstance(image, torch.Tensor):
        return image.shape[-1], image.shape[-2]
    return image_size(image)


def content_of(image: Any) -> Any:
    """Return a value that identifies an image: its bytes or path, or the ``id`` of any other object."""
    if isinstance(image, Video):
        return tuple(map(content_of, image.frames))
    if isinstance(image, Mapping):
        return image.get("bytes") or image.get("path")
    if isinstance(image, bytes):
        return image
    if isinstance(image, str | Path):
        return str(image)
    return id(image)


def check_images(sample: Mapping[str, Any], decode: bool) -> list[int]:
    """Check a conversation's images and, if ``decode``, decode them; raise :class:`DataError` if one is unreadable.

    Returns:
        number of images, and a checksum of their paths or bytes (0 if they have neither).
    """

    def check(image: Any) -> None:
        if not isinstance(image, torch.Tensor):  # pixels need no check
            check_image(image, decode)

    images = images_of(sample)
    each_image(check, images)
    checksum = 0
    for image in images:
        frames = [image]
        if isinstance(image, Video):
            frames = image.frames
        for frame in frames:
            content = content_of(frame)
            if isinstance(content, str):
                content = content.encode()
            if not isinstance(content, int):  # the id of an object, which differs from run to run
                checksum = zlib.crc32(content, checksum)
    return [len(images), checksum]


def tokenize_text(
    tokenizer: Any, messages: Sequence[Message], inference: bool = False, tools: list[Any] | None = None
) -> tuple[Any, Any, dict[str, Any]]:
    """Tokenize a conversation and its tools without decoding its images.

    Returns:
        tokens, mask, and a note for the row, which is empty without images.

    Raises:
        DataError: the conversation cannot be tokenized, an image cannot be opened, or the tokenizer returns no patches.
    """
    if not any(message.contains_media for message in messages):
        sample = {"messages": messages} | tools_entry(tools)
        if inference:
            row = tokenizer(sample, inference=True)
        else:
            row = arrays_of(tokenizer, sample)
        return row["tokens"], row["mask"], {}
    if not getattr(tokenizer, "gives_patches", False):
        raise DataError(f"a turn has an image, but a {type(tokenizer).__name__} takes text only here: use text")
    options = tool_options(tokenizer, tools)
    tokens, mask = tokenizer.tokenize_messages(messages, add_end_tokens=not inference, **options)
    return tokens, mask, {"images": check_images({"messages": messages}, decode=False)}


def with_open_images(sample: dict[str, Any]) -> dict[str, Any]:
    """Replace image paths and bytes by Pillow images; raise :class:`DataError` if an image cannot be read."""

    def opened(image: Any) -> Any:
        if isinstance(image, torch.Tensor):
            return image
        return open_image(image)

    images = iter(each_image(opened, images_of(sample)))
    for message in sample.get("messages") or ():
        if not isinstance(message, Message) or not message.contains_media:
            continue
        content = []
        for item in message.content:
            if item["type"] != "text":
                item = {**item, "content": next(images)}
            content.append(item)
        message.content = content
    return sample


def check_rows(rows: Any, check: Any, bad: BadRows) -> list[Any]:
    """Return ``check(row)`` for all rows.

    Raises:
        DataError: some rows cannot be trained on and are not skipped.
    """

    def noted(row: Mapping[str, Any]) -> list[dict[str, Any]]:
        return [{"": {"note": check(row)}}]  # a sample without tokens

    notes = []
    for _, facts in in_parts(rows, Tokenize(noted, names=[])):
        notes += facts["notes"]
        for index, reason in facts["bad"]:
            bad.add(index, reason)
    bad.check()
    return notes


def row_error(error: DataError, source: str, row: int, rows: Any, skips: bool) -> DataError:
    """Build the error of a row that failed only when it was read."""
    position = f"{source}, row {row}"
    location = location_of(rows, row)
    if location:
        position += f" ({location})"
    advice = "correct it"
    if not skips:
        advice += ", or leave such rows out with on_bad_row=skip"
    return DataError(f"{position}: {str(error).rstrip('.')}; {advice}.")

"""Images of rows, and their checks before training."""

import zlib
from collections.abc import Mapping, Sequence
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
from torchtune.datasets._data_files import decoded_rows, location_of
from torchtune.datasets._processes import in_parts
from torchtune.tokenizers import arrays_of, tool_options
from torchtune.utils import sign_of_life


def takes_encoded_images(message_transform: Any) -> bool:
    """Return whether a message transform reads the images of a table as bytes or paths, without decoding them."""
    return getattr(message_transform, "takes_encoded_images", False)


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
    """Replace image paths and bytes by Pillow images, in the messages of the sample itself; tensors stay as they are.

    Raises:
        DataError: an image cannot be read.
    """

    def opened(image: Any) -> Any:
        if isinstance(image, torch.Tensor):
            return image
        return open_image(image)

    images = iter(each_image(opened, images_of(sample)))  # in one call, which numbers the images in an error
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

    # Reasons are returned, because the part may be checked in another process, which has its own copy of `bad`.
    def check_part(start: int, part: Any) -> tuple[list[Any], list[tuple[int, str]]]:
        notes = []
        reasons = []
        for index, row in enumerate(decoded_rows(part), start):
            sign_of_life(f"row {index}")
            if isinstance(row, DataError):
                reasons.append((index, str(row)))
                continue
            try:
                notes.append(check(row))
            except DataError as error:
                reasons.append((index, str(error)))
            except RecursionError:
                reasons.append((index, "it is nested too deeply"))
        return notes, reasons

    notes = []
    for notes_of_part, reasons in in_parts(rows, check_part):
        notes += notes_of_part
        for index, reason in reasons:
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

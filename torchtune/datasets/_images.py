"""Rows with images: what is checked before they are read."""

import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from torchtune.data import DataError, Message
from torchtune.data._images import open_image
from torchtune.datasets._bad_rows import BadRows
from torchtune.datasets._parallel import in_parts
from torchtune.datasets._tokenize import Tokenize


class EncodedRows:
    """Rows of the datasets package with images as files, ``{"bytes", "path"}``, not as pixels.

    Args:
        rows: a ``datasets.Dataset``.
    """

    def __init__(self, rows: Any) -> None:
        self._rows = rows.with_format("arrow")

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        return (self[index] for index in range(len(self)))

    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return [self[one] for one in range(*index.indices(len(self)))]
        return self._rows[index].to_pylist()[0]


def encoded(rows: Any, message_transform: Any) -> Any:
    """The rows with images as files, if they are of the datasets package and ``message_transform`` takes such."""
    is_table = hasattr(rows, "with_format") and hasattr(rows, "features")
    return EncodedRows(rows) if is_table and getattr(message_transform, "takes_encoded_images", False) else rows


def images_of(sample: Mapping[str, Any]) -> list[Any]:
    """The images of a conversation, in order."""
    messages = sample.get("messages") or ()
    return [image for message in messages if isinstance(message, Message) for image in message.get_media()]


def size_of(image: Any) -> tuple[int, int]:
    """(width, height) of an image, in pixels. Raises :class:`DataError`."""
    if isinstance(image, torch.Tensor):
        return image.shape[-1], image.shape[-2]
    return open_image(image, decode=False).size


def content_of(image: Any) -> Any:
    """What tells an image from others, without its pixels if it has a name."""
    if isinstance(image, Mapping):
        return image.get("bytes") or image.get("path")
    if isinstance(image, bytes):
        return image
    return str(image) if isinstance(image, str | Path) else id(image)


def check_images(sample: Mapping[str, Any], decode: bool) -> list[int]:
    """Read the headers of a conversation's images, or all of them. Raises :class:`DataError`.

    Returns:
        how many there are, and a checksum of their names or files; 0 where they have none.
    """
    images, checksum = images_of(sample), 0
    for image in images:
        if not isinstance(image, torch.Tensor):
            open_image(image, decode)
        if not isinstance(content := content_of(image), int):
            checksum = zlib.crc32(content.encode() if isinstance(content, str) else content, checksum)
    return [len(images), checksum]


def summary(notes: Sequence[Sequence[int]]) -> dict[str, Any]:
    """What :func:`check_images` returned for all rows, in one."""
    checksums = ",".join(str(checksum) for _, checksum in notes)
    return {"images": sum(count for count, _ in notes), "image_names": zlib.crc32(checksums.encode()), "notes": []}


def with_images(sample: dict[str, Any]) -> dict[str, Any]:
    """Put Pillow images in the place of paths, for the model transform. Raises :class:`DataError`."""
    for message in sample.get("messages") or ():
        if isinstance(message, Message) and message.contains_media:
            message.content = [
                {**item, "content": open_image(item["content"])}
                if item["type"] == "image" and not isinstance(item["content"], torch.Tensor)
                else item
                for item in message.content
            ]
    return sample


def check_rows(rows: Any, check: Any, bad: BadRows) -> list[Any]:
    """Call ``check(row)`` for all rows, and return what it returned.

    Raises:
        DataError: some rows cannot be trained on and are not left out.
    """

    def noted(index: int, row: Mapping[str, Any]) -> dict[str, Any]:
        return {"": {"note": check(row)}}

    notes = []
    for part in in_parts(rows, Tokenize(noted, [], None)):
        notes += part.notes
        for index, reason in part.bad:
            bad.add(index, reason)
    bad.check()
    return notes


def row_error(error: DataError, source: str, row: int, rows: Any, skips: bool) -> DataError:
    """What is wrong with a row that was not seen before it was read."""
    place = getattr(rows, "place", None)
    where = "" if place is None else f" ({place(row)})"
    hint = "" if skips else ", or leave such rows out with on_bad_row=skip"
    return DataError(f"{source}, row {row}{where}: {str(error).rstrip('.')}; correct it{hint}.")

"""Images in the content of a turn."""

import base64
import binascii
import http.client
import io
import struct
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import torch

from torchtune.data._common import DataError
from torchtune.utils._optional import require

_BROKEN = (OSError, ValueError, SyntaxError, EOFError, struct.error, zlib.error, http.client.HTTPException)


def _pillow() -> Any:
    return require("PIL.Image", extra="vision", purpose="Reading an image")


def _name(value: Any) -> str:
    """How messages call an image."""
    if isinstance(value, Mapping):
        return "the image" if value.get("path") is None else f"the image {value['path']}"
    text = str(value) if isinstance(value, str | Path) else ""
    return f"the image {text}" if text and not text.startswith("data:") else "the image"


def _data(value: Any) -> bytes:
    """The file of an image."""
    if isinstance(value, Mapping):  # as the datasets package stores one
        return value["bytes"] if value.get("bytes") is not None else Path(value["path"]).read_bytes()
    text = str(value)
    if text.startswith(("http://", "https://")):
        with urlopen(text, timeout=60) as response:
            return response.read()
    if text.startswith("data:"):
        return base64.b64decode(text.partition(",")[2], validate=True)
    return Path(value).expanduser().read_bytes()


def _reason(error: Exception) -> str:
    if isinstance(error, FileNotFoundError):
        return "there is no such file"
    if isinstance(error, binascii.Error):
        return "its base64 is broken"
    if type(error).__name__ == "UnidentifiedImageError":
        return "it is of no kind that Pillow reads"
    return str(getattr(error, "strerror", None) or error).rstrip(".")


def open_image(value: Any, decode: bool = True) -> Any:
    """Read an image, upright and without transparency (on white).

    Args:
        value: a path, an http(s) or ``data:`` address, a mapping with ``bytes`` or ``path``, or a Pillow image.
        decode: read the pixels; else the header only, of what is on this machine.

    Returns:
        a Pillow image, in RGB if it is decoded; ``None`` for a web address that is not decoded.

    Raises:
        DataError: it cannot be read, or is no image.
        UserError: Pillow is not installed.
    """
    pillow = _pillow()
    if isinstance(value, str) and not decode and value.startswith(("http://", "https://")):
        return None
    if not isinstance(value, str | Path | Mapping | pillow.Image):
        raise DataError(f"an image must be a path, an address, its bytes or a Pillow image, not {type(value).__name__}")
    if isinstance(value, Mapping) and value.get("bytes") is None and value.get("path") is None:
        raise DataError("an image has neither 'bytes' nor a 'path'")
    try:
        if isinstance(value, pillow.Image):
            return _in_rgb(value) if decode else value
        if not decode and isinstance(value, str | Path) and not str(value).startswith("data:"):
            with pillow.open(Path(value).expanduser()) as image:  # which reads the header alone
                return image
        image = pillow.open(io.BytesIO(_data(value)))
        if not decode:
            return image
        return _in_rgb(require("PIL.ImageOps", extra="vision", purpose="Reading an image").exif_transpose(image))
    except (*_BROKEN, pillow.DecompressionBombError) as error:
        raise DataError(f"{_name(value)} cannot be read ({_reason(error)})") from error


def _in_rgb(image: Any) -> Any:
    """RGB, without transparency: on white."""
    if "A" not in image.getbands() and image.info.get("transparency") is None:
        return image.convert("RGB")
    image = image.convert("RGBA")
    return _pillow().alpha_composite(_pillow().new("RGBA", image.size, "white"), image).convert("RGB")


def as_pixels(value: Any) -> torch.Tensor:
    """The pixels of an image, uint8 ``[3, height, width]``. For ``value`` and errors see :func:`open_image`."""
    image = open_image(value)
    pixels = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
    return pixels.view(image.height, image.width, 3).permute(2, 0, 1)


def load_image(image_loc: Path | str) -> torch.Tensor:
    """Read an image from a file or an http(s) address.

    Args:
        image_loc: path or address.

    Returns:
        uint8 ``[3, height, width]``, red, green and blue; transparency is put on white.

    Raises:
        DataError: it cannot be read, or is no image.
        UserError: Pillow is not installed.
    """
    return as_pixels(image_loc).contiguous()


def format_content_with_images(content: str, *, image_tag: str, images: list[Any]) -> list[dict[str, Any]]:
    """Replace the image tags of a text by images.

    Args:
        content: text with one ``image_tag`` per image.
        image_tag: placeholder of an image.
        images: the images, in order.

    Returns:
        content items, ``{"type": "text" | "image", "content": ...}``.

    Raises:
        DataError: the number of tags is not the number of images.

    Example:
        >>> torchtune.data.format_content_with_images("See <image>!", image_tag="<image>", images=["a.png"])[1]
        {'type': 'image', 'content': 'a.png'}
    """
    texts = content.split(image_tag)
    if len(texts) - 1 != len(images):
        raise DataError(f"a turn has {len(texts) - 1} '{image_tag}' but {len(images)} images")
    items: list[dict[str, Any]] = []
    for i, text in enumerate(texts):
        if text:
            items.append({"type": "text", "content": text})
        if i < len(images):
            items.append({"type": "image", "content": images[i]})
    return items

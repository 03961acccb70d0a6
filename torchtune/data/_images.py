"""Read images in the content of a turn."""

import base64
import binascii
import io
import os
import stat
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchtune.data._messages import Video
from torchtune.data._rows import DataError
from torchtune.utils import require

if TYPE_CHECKING:
    import torch

# Other formats are excluded because Pillow runs external programs for some of them, such as Ghostscript for EPS.
_FORMATS = ("AVIF", "BMP", "GIF", "JPEG", "JPEG2000", "MPO", "PNG", "PPM", "TIFF", "WEBP")
_EXIF_ORIENTATION = 0x0112
_FIRST_TRANSPOSED = 5  # smallest orientation that swaps rows and columns
_TIFF_WIDTH = 0x0100
_TIFF_HEIGHT = 0x0101
_TAG = "<image>"  # placeholder of an image in a text
_FILE_ENDS = {"JPEG": b"\xff\xd9", "MPO": b"\xff\xd9", "PNG": b"IEND"}  # bytes near the end of a complete file
_IMAGE_ERRORS = (OSError, ValueError, SyntaxError, EOFError, struct.error, zlib.error)


def _require_pillow() -> Any:
    return require("PIL.Image", extra="vision", purpose="Reading an image")


def _image_name(value: Any) -> str:
    """Return the name of an image in messages."""
    path = value
    if isinstance(value, Mapping):
        path = value.get("path")
    if not isinstance(path, str | Path) or not str(path) or str(path).startswith("data:"):
        return "the image"
    return f"the image {path}"


def is_url(value: Any) -> bool:
    """Return whether an image is an http(s) or ``data:`` URL, not a file name."""
    return str(value).startswith(("http://", "https://", "data:"))


@contextmanager
def _open_pillow_image(value: Any) -> Iterator[Any]:
    """Open the Pillow image of a path, a ``data:`` URL or bytes; a Pillow image is passed through and not closed."""
    if isinstance(value, _require_pillow().Image):
        yield value
        return
    if isinstance(value, str) and value.startswith("data:"):
        value = base64.b64decode(value.partition(",")[2], validate=True)
    if isinstance(value, str | Path):
        value = Path(value).expanduser()
        if not stat.S_ISREG(value.stat().st_mode):  # reading a pipe would block, and a device may be endless
            raise ValueError("it is not a regular file")
    pillow = _require_pillow()
    pillow.init()  # registers the formats in OPEN
    # Only known formats: Pillow opens some others by running a program. A build of Pillow may lack AVIF.
    formats = [name for name in _FORMATS if name in pillow.OPEN]
    file = value
    if not isinstance(value, Path):
        file = io.BytesIO(value)
    with pillow.open(file, formats=formats) as image:
        yield image


def _explain_error(error: Exception) -> str:
    """Return the reason why an image cannot be read, for a user who sees the file."""
    if isinstance(error, FileNotFoundError):
        return "there is no such file"
    if type(error).__name__ == "DecompressionBombError":
        return "it has more pixels than Pillow decodes: reduce it"
    if isinstance(error, binascii.Error):
        return "its base64 is broken"
    if type(error).__name__ == "UnidentifiedImageError":
        return "it is of no kind that is read: save it as PNG or JPEG"
    return str(getattr(error, "strerror", None) or error).rstrip(".")


def open_image(value: Any) -> Any:
    """Read an image, apply its EXIF rotation, and replace transparency by white.

    Args:
        value: a path, a ``data:`` URL, the bytes of a file, a mapping with ``bytes`` or ``path`` as the ``datasets``
            package stores it, or a Pillow image; or a :class:`Video` of these.

    Returns:
        A Pillow image in RGB, or a :class:`Video` of these.

    Raises:
        DataError: the value is not an image, cannot be read, has several frames, or is a web URL.
        UserError: Pillow is not installed.
    """
    return _with_opened_image(value, _decoded)


def check_image(value: Any, decode: bool = False) -> None:
    """Check that an image can be read, by the header of its file or by decoding it.

    Args:
        value: see :func:`open_image`.
        decode: decode the pixels of every file; otherwise only the pixels of files that seem to be truncated.

    Raises:
        DataError: see :func:`open_image`.
    """
    if decode:
        _with_opened_image(value, _decoded)
    else:
        _with_opened_image(value, _checked)


def each_image(function: Callable[[Any], Any], images: Sequence[Any], name: str = "image") -> list[Any]:
    """Return ``function(image)`` for all images of a row; a :class:`DataError` names the image by its number."""
    results = []
    for number, image in enumerate(images, 1):
        try:
            results.append(function(image))
        except DataError as error:
            raise DataError(f"{name} {number} of {len(images)}: {error}") from error
    return results


def image_size(value: Any) -> tuple[Any, ...]:
    """Return (width, height) of an image in pixels, after its EXIF rotation, read from the header of its file.

    For a video, return (width, height, number of frames, fps). For ``value`` and errors see :func:`open_image`.

    Raises:
        DataError: the frames of a video have different sizes.
    """
    size = _with_opened_image(value, _size)
    if not isinstance(size, Video):
        return size
    frame_sizes = size.frames
    for frame_size in frame_sizes:
        if frame_size != frame_sizes[0]:
            raise DataError(
                f"the frames of a video have different sizes, {frame_sizes[0]} and {frame_size}: resize them"
            )
    return (*frame_sizes[0], len(frame_sizes), size.fps)


def _with_opened_image(value: Any, function: Callable[[Any], Any]) -> Any:
    """Return ``function(image)`` for an opened Pillow image; raise :class:`DataError` if it cannot be read.

    For a video, return a :class:`Video` with the results for its frames.
    """
    if isinstance(value, Video):
        frames = each_image(lambda frame: _with_opened_image(frame, function), value.frames, "frame")
        return value._replace(frames=tuple(frames))
    pil_image = _require_pillow()
    name = _image_name(value)
    if isinstance(value, Mapping):
        data = value.get("bytes")
        path = value.get("path")
        if data is None and path is None:
            raise DataError("an image has neither 'bytes' nor a 'path'")
        if data is not None and not isinstance(data, bytes | bytearray | memoryview):
            raise DataError(f"'bytes' of {name} must be the bytes of its file, not {type(data).__name__}")
        value = path
        if data is not None:  # the path beside the bytes is only a name
            value = bytes(data)
    if not isinstance(value, str | Path | bytes | pil_image.Image):
        raise DataError(f"an image must be a path, its bytes or a Pillow image, not {type(value).__name__}")
    if isinstance(value, str) and value.startswith(("http://", "https://")):
        raise DataError(
            f"{name} is an address of the web, from which nothing is fetched: download it and give its path"
        )
    try:
        with _open_pillow_image(value) as image:
            return function(image)  # may decode the pixels, and so find that the file is damaged
    except (*_IMAGE_ERRORS, pil_image.DecompressionBombError) as error:
        raise DataError(f"{name} cannot be read ({_explain_error(error)})") from error


def _check_header(image: Any) -> None:
    """Raise ``ValueError`` for images that lose frames or values in the conversion to RGB."""
    if image.format != "MPO" and getattr(image, "is_animated", False):  # further frames of an MPO are previews
        raise ValueError("it has several frames or pages: save each that you need as a PNG")
    if image.mode == "F":
        raise ValueError("its pixels are floating-point numbers: save it with 8 or 16 bits")


def _checked(image: Any) -> None:
    """Check an opened image; decode it only if its file seems to be cut off, because decoding takes long."""
    _check_header(image)
    file_end = _FILE_ENDS.get(image.format)
    file = getattr(image, "fp", None)
    if file_end is None or file is None:
        return
    position = file.tell()  # Pillow reads on from here
    size = file.seek(0, os.SEEK_END)
    file.seek(max(size - 64, 0))  # some programs write a few bytes behind the end of the image
    seems_complete = file_end in file.read()
    file.seek(position)
    if not seems_complete:
        image.load()


def _decoded(image: Any) -> Any:
    """Return an opened image in RGB, rotated as its EXIF data say."""
    _check_header(image)
    return _to_rgb(require("PIL.ImageOps", extra="vision", purpose="Reading an image").exif_transpose(image))


def _size(image: Any) -> tuple[int, int]:
    """Return (width, height) of an opened image after its EXIF rotation, without decoding it."""
    has_exif = image.format != "PNG" or "exif" in image.info  # getexif() decodes a PNG without this entry
    is_transposed = has_exif and image.getexif().get(_EXIF_ORIENTATION, 1) >= _FIRST_TRANSPOSED
    width, height = image.size
    if image.format == "TIFF":  # recent releases of Pillow swap width and height themselves
        width = image.tag_v2[_TIFF_WIDTH]
        height = image.tag_v2[_TIFF_HEIGHT]
    if is_transposed:
        return height, width
    return width, height


def _to_rgb(image: Any) -> Any:
    """Convert to RGB; replace transparency by white."""
    if image.mode[0] == "I":
        image = _to_8_bits(image)
    if "A" not in image.getbands() and image.info.get("transparency") is None:
        return image.convert("RGB")
    pillow = _require_pillow()
    image = image.convert("RGBA")
    background = pillow.new("RGBA", image.size, "white")
    return pillow.alpha_composite(background, image).convert("RGB")


def _to_8_bits(image: Any) -> Any:
    """Convert 16-bit grayscale, because Pillow's ``convert`` clips everything above 255 to white.

    Raises:
        ValueError: the values are not in the 8-bit or 16-bit range.
    """
    low, high = image.getextrema()
    if image.mode == "I" and low >= 0 and high <= 255:
        return image
    if low < 0 or high > 0xFFFF:
        raise ValueError(f"its pixels are numbers from {low} to {high}: save it with 8 or 16 bits")
    scaled = image.convert("I").point(lambda value: value * (1 / 257) + 0.5)  # 65535 / 257 = 255, rounded
    return scaled.convert("L")


def read_pixels(value: Any) -> "torch.Tensor":
    """Read an image as pixels, uint8 ``[3, height, width]``. For ``value`` and errors see :func:`open_image`."""
    import torch

    image = open_image(value)
    pixels = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
    return pixels.view(image.height, image.width, 3).permute(2, 0, 1)


def load_image(image_loc: Path | str) -> "torch.Tensor":
    """Read an image from a file.

    Args:
        image_loc: path, or a ``data:`` URL.

    Returns:
        uint8 ``[3, height, width]``, red, green and blue; transparency is replaced by white.

    Raises:
        DataError: the file cannot be read or is not an image.
        UserError: Pillow is not installed.
    """
    return read_pixels(image_loc).contiguous()


def format_content_with_images(content: str, *, image_tag: str, images: list[Any]) -> list[dict[str, Any]]:
    """Replace the image tags of a text by images.

    Args:
        content: text with one ``image_tag`` per image.
        image_tag: placeholder of an image.
        images: the images, in order.

    Returns:
        Content items, ``{"type": "text" | "image", "content": ...}``.

    Raises:
        DataError: the numbers of tags and images differ.

    Example:
        >>> torchtune.data.format_content_with_images("See <image>!", image_tag="<image>", images=["a.png"])[1]
        {'type': 'image', 'content': 'a.png'}
    """
    texts = content.split(image_tag)
    if len(texts) - 1 != len(images):
        raise DataError(f"a turn has {len(texts) - 1} '{image_tag}' but {len(images)} image(s)")
    items: list[dict[str, Any]] = []
    for i, text in enumerate(texts):
        if text:
            items.append({"type": "text", "content": text})
        if i < len(images):
            items.append({"type": "image", "content": images[i]})
    return items


def insert_images(turns: Sequence[Any], images: Sequence[Any]) -> list[Any]:
    """Fill the empty content parts ``{"type": "image"}`` of the turns with the images of the row, in order."""
    num_empty_parts = 0
    num_with_image = 0  # parts of type image that have an image of their own
    filled_turns = []
    for turn in turns:
        # A Message has its images already, and a text has no place for one.
        if type(turn) is not dict or not isinstance(turn.get("content"), list):
            filled_turns.append(turn)
            continue
        content = []
        for part in turn["content"]:
            is_image_part = type(part) is dict and part.get("type") in ("image", "image_url")
            if is_image_part:
                # Empty parts of llava-instruct-mix, {"index": 0, "text": None, "type": "image"}, have more keys.
                has_image = any(part[key] is not None for key in part.keys() - {"type", "index", "text"})
                if has_image:
                    num_with_image += 1
                else:
                    if num_empty_parts < len(images):
                        part = {"type": "image", "content": images[num_empty_parts]}
                    num_empty_parts += 1
            content.append(part)
        filled_turns.append({**turn, "content": content})
    # The images of a row may repeat those in its turns, which then have no empty parts.
    images_repeat_turns = num_empty_parts == 0 and num_with_image > 0
    if num_empty_parts != len(images) and not images_repeat_turns:
        raise DataError(
            f"the row has {len(images)} images, but its turns have {num_empty_parts} parts of type 'image' for them"
        )
    return filled_turns


def images_of_columns(row: Mapping[str, Any]) -> list[Any]:
    """Return the images in the column ``image`` or ``images``. Raises :class:`DataError` if both have images."""
    image = row.get("image")
    images = row.get("images")
    if image and images:
        raise DataError("it has both image and images, but may have only one of them")
    value = image or images
    if not value:
        return []
    if isinstance(value, list | tuple):
        return list(value)
    return [value]


def with_images(content: Any, images: Sequence[Any]) -> Any:
    """Insert images into a text or a conversation, and return the turns.

    Images without a tag ``<image>`` in a text come before the text. Without images, a conversation is unchanged.

    Raises:
        DataError: the number of images differs from the number of their placeholders.
    """
    if not isinstance(content, str):
        if images and isinstance(content, Sequence):
            return insert_images(content, images)
        return content
    if images and _TAG in content:
        return [{"role": "user", "content": format_content_with_images(content, image_tag=_TAG, images=list(images))}]
    if not images:
        return [{"role": "user", "content": content}]
    return [{"role": "user", "content": images_before_text(images, content)}]


def images_before_text(images: Sequence[Any], text: str) -> list[dict[str, Any]]:
    """Return content items: the images, then the text."""
    items: list[dict[str, Any]] = [{"type": "image", "content": image} for image in images]
    items.append({"type": "text", "content": text})
    return items

"""Images in the content of a turn."""

import io
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import torch

from torchtune.data._common import DataError
from torchtune.utils import UserError


def load_image(image_loc: Path | str) -> torch.Tensor:
    """Read an image from a file or an http(s) address.

    Args:
        image_loc: path or address.

    Returns:
        uint8 ``[3, height, width]``, red, green and blue.

    Raises:
        DataError: it cannot be read, or is no image.
        UserError: Pillow is not installed.
    """
    try:
        from PIL import Image
    except ModuleNotFoundError as error:
        raise UserError("load_image needs the package 'pillow', which is not installed: pip install pillow.") from error
    try:
        if str(image_loc).startswith(("http://", "https://")):
            with urlopen(str(image_loc), timeout=60) as response:
                data = response.read()
        else:
            data = Path(image_loc).read_bytes()
        image = Image.open(io.BytesIO(data)).convert("RGB")
    except OSError as error:
        raise DataError(f"the image {image_loc} cannot be read ({error})") from error
    pixels = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
    return pixels.view(image.height, image.width, 3).permute(2, 0, 1).contiguous()


def padded_collate_tiled_images_and_mask(batch: list[dict[str, Any]], *args: Any, **kwargs: Any) -> dict[str, Any]:
    """Raise: batches with images are not in this release. Copied generation and evaluation recipes import the name.

    Raises:
        UserError: always.
    """
    raise UserError("padded_collate_tiled_images_and_mask: vision models are not in this release: use a text model.")


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

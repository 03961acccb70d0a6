"""Images among the text of a turn."""

from typing import Any

from torchtune.data._common import DataError


def format_content_with_images(content: str, *, image_tag: str, images: list[Any]) -> list[dict[str, Any]]:
    """Put images where their tag stands in a text.

    Args:
        content: text with one ``image_tag`` per image.
        image_tag: what stands for an image.
        images: the images, in order.

    Returns:
        content items, ``{"type": "text" | "image", "content": ...}``.

    Raises:
        DataError: another number of tags than of images.
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

"""Images in the content of a turn."""

from typing import Any

from torchtune.data._common import DataError


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

"""Size of an image within a canvas."""

import math


def get_inscribed_size(
    image_size: tuple[int, int], target_size: tuple[int, int], max_size: int | None
) -> tuple[int, int]:
    """Return the largest size at which an image fits into a canvas with its aspect ratio preserved.

    Args:
        image_size: (height, width) of the image.
        target_size: (height, width) of the canvas.
        max_size: maximum length in pixels of an upscaled side; ``None`` limits upscaling only by the canvas.

    Returns:
        (height, width), at least 1 each.

    Example:
        >>> from torchtune.modules.transforms.vision_utils.get_inscribed_size import get_inscribed_size
        >>> get_inscribed_size((200, 100), (1000, 1200), max_size=None)
        (1000, 500)
        >>> get_inscribed_size((200, 100), (1000, 1200), max_size=600)
        (600, 300)
    """
    (height, width), (most_height, most_width) = image_size, target_size
    if max_size is not None:
        most_height = min(max(height, max_size), most_height)
        most_width = min(max(width, max_size), most_width)
    by_height, by_width = most_height / height, most_width / width
    if by_width < by_height:
        return min(max(math.floor(height * by_width), 1), most_height), most_width
    return most_height, min(max(math.floor(width * by_height), 1), most_width)

"""Resizing with a preserved aspect ratio."""

from typing import Any

import torch
from torch.nn import functional as F

from torchtune.data import DataError
from torchtune.modules.transforms.vision_utils.get_inscribed_size import get_inscribed_size

_MODES = {"nearest": "nearest-exact", "nearest-exact": "nearest-exact", "bilinear": "bilinear", "bicubic": "bicubic"}


def resampling_mode(resample: Any) -> str:
    """Convert a name or torchvision ``InterpolationMode`` to a mode of ``F.interpolate``, or raise DataError."""
    name = str(getattr(resample, "value", resample)).lower()
    if name not in _MODES:
        raise DataError(f"resample must be one of {', '.join(_MODES)}, not '{name}'.")
    return _MODES[name]


def resize_with_pad(
    image: torch.Tensor, target_size: tuple[int, int], resample: Any, max_size: int | None = None
) -> torch.Tensor:
    """Resize an image to fit a canvas, preserving its aspect ratio; pad with zeros on the right and at the bottom.

    uint8 images are resized in fixed point, as in Pillow; bilinear results differ from Pillow by at most one level.

    Args:
        image: ``[c, height, width]``.
        target_size: (height, width) of the canvas.
        resample: ``"nearest"``, ``"bilinear"`` or ``"bicubic"``, with antialiasing; or torchvision's InterpolationMode.
        max_size: see :func:`get_inscribed_size`.

    Returns:
        ``[c, target_height, target_width]``, same dtype as the image.

    Raises:
        DataError: ``resample`` is unknown.

    Example:
        >>> from torchtune.modules.transforms.vision_utils.resize_with_pad import resize_with_pad
        >>> resize_with_pad(torch.ones(1, 2, 2), (3, 4), "bilinear", max_size=2)
        tensor([[[1., 1., 0., 0.],
                 [1., 1., 0., 0.],
                 [0., 0., 0., 0.]]])
    """
    mode = resampling_mode(resample)
    height, width = get_inscribed_size(image.shape[-2:], target_size, max_size)
    if (height, width) != tuple(image.shape[-2:]):
        image = F.interpolate(image[None], size=(height, width), mode=mode, antialias=mode != "nearest-exact")[0]
    return F.pad(image, (0, target_size[1] - width, 0, target_size[0] - height))

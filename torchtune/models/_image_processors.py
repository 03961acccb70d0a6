"""Shared parts of image processors: sizes and token counts as integers, patches as arrays, without torch.

The processor of a family has ``plan(size) -> Plan``, ``patches(image) -> array``, and ``layout(plan)``, the token ids
or the text that replace an image's placeholder.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from torchtune.data import DataError, Grid
from torchtune.utils import require

CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
_FILE = "preprocessor_config.json"
BICUBIC, LANCZOS = 3, 1


class Plan(NamedTuple):
    """Size of an image after resizing, grids of patches of its parts, and number of its tokens with features."""

    height: int
    width: int
    grids: tuple[Grid, ...]
    tokens: int


def check_settings(
    config: Mapping[str, Any], resample: int = BICUBIC, steps: Sequence[str] = ("do_normalize",)
) -> None:
    """Check the fields of ``preprocessor_config.json`` that have one supported value.

    Raises:
        DataError: a field has another value.
    """
    for field in ("do_resize", "do_rescale", *steps):
        if config.get(field, True) is not True:
            raise DataError(f"{_FILE} has {field} = {config[field]}, which is not supported")
    if config.get("resample", resample) != resample or abs(config.get("rescale_factor", 1 / 255) * 255 - 1) > 1e-6:
        name = "bicubic" if resample == BICUBIC else "Lanczos"
        raise DataError(f"{_FILE}: only {name} resampling ({resample}) and a factor of 1/255 are supported")


def given_numbers(**numbers: Any) -> dict[str, int]:
    """Return the numbers that are not None; raise :class:`DataError` if one is not a positive whole number."""
    for name, value in numbers.items():
        if value is not None and (not isinstance(value, int) or value < 1):
            raise DataError(f"{_FILE}: {name} is {value!r}, which is no positive whole number")
    return {name: value for name, value in numbers.items() if value is not None}


def given_colors(config: Mapping[str, Any]) -> dict[str, tuple[float, ...]]:
    """Return ``mean`` and ``std`` of the colors, if the file has them."""
    colors = {"mean": config.get("image_mean"), "std": config.get("image_std")}
    return {name: tuple(map(float, value)) for name, value in colors.items() if value is not None}


def resize(image: Any, width: int, height: int, resample: int = BICUBIC) -> Any:
    """Resize a Pillow image."""
    resampling = require("PIL.Image", extra="vision", purpose="Reading an image").Resampling
    return image.resize((width, height), resampling(resample))


def normalized(image: Any, mean: Sequence[float], std: Sequence[float]) -> np.ndarray:
    """Return the pixels of a Pillow image in RGB, float32 ``[rows, columns, 3]``."""
    mean, std = (np.asarray(value, np.float32) for value in (mean, std))
    return (np.asarray(image, np.float32) / 255 - mean) / std


def by_block(pixels: np.ndarray, patch_size: int, merge: int) -> np.ndarray:
    """Cut pixels ``[rows, columns, 3]`` into patches ``[p, patch_size, patch_size, 3]``, ordered by block.

    Blocks of ``merge`` x ``merge`` patches that become one token are consecutive.
    """
    rows, columns = (side // patch_size // merge for side in pixels.shape[:2])
    cut = pixels.reshape(rows, merge, patch_size, columns, merge, patch_size, 3)
    return cut.transpose(0, 3, 1, 4, 2, 5, 6).reshape(-1, patch_size, patch_size, 3)

"""Image processor of Mistral 3 and Ministral 3."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from torchtune.data import DataError
from torchtune.models._image_processors import (
    CLIP_MEAN,
    CLIP_STD,
    Plan,
    by_block,
    check_settings,
    given_colors,
    given_numbers,
    normalized,
    resize,
)


@dataclass(frozen=True)
class PixtralImages:
    """Image processor of Mistral 3 and Ministral 3.

    Attributes:
        patch_size: rows and columns of pixels of a patch.
        merge: rows and columns of patches that become one token.
        longest: largest side of an image; larger ones are reduced.
        mean: mean of red, green and blue.
        std: standard deviation of red, green and blue.
    """

    patch_size: int = 16
    merge: int = 2
    longest: int = 1024
    mean: tuple[float, ...] = CLIP_MEAN
    std: tuple[float, ...] = CLIP_STD

    @classmethod
    def from_config(cls, config: Mapping[str, Any], model: Mapping[str, Any]) -> "PixtralImages":
        """Read ``preprocessor_config.json`` and ``config.json``.

        Raises:
            DataError: a field has a value that this processor does not support.
        """
        check_settings(config)
        patch = config.get("patch_size")
        numbers = given_numbers(
            patch_size=patch.get("height") if isinstance(patch, Mapping) else patch,
            merge=model.get("spatial_merge_size"),
            longest=(config.get("size") or {}).get("longest_edge"),
        )
        return cls(**numbers, **given_colors(config))

    def plan(self, size: tuple[int, int]) -> Plan:
        """Return the size, grid and number of tokens of an image, from its (width, height) in pixels.

        Raises:
            DataError: the image is so long that it would have no pixel left.
        """
        width, height = size
        factor = self.patch_size * self.merge
        ratio = max(height / self.longest, width / self.longest)
        if ratio > 1:
            height, width = math.floor(height / ratio), math.floor(width / ratio)
        if not height or not width:
            raise DataError(f"an image of {size[0]} x {size[1]} pixels is too long: reduced, it has no pixel left")
        rows, columns = ((side - 1) // factor + 1 for side in (height, width))
        grid = (1, rows * self.merge, columns * self.merge)
        return Plan(rows * factor, columns * factor, (grid,), rows * columns)

    def patches(self, image: Any) -> np.ndarray:
        """Return the patches of a Pillow image in RGB, float32 ``[p, 3 * patch_size²]``, ordered by block."""
        plan = self.plan(image.size)
        pixels = normalized(resize(image, plan.width, plan.height), self.mean, self.std)
        blocks = by_block(pixels, self.patch_size, self.merge)
        return blocks.transpose(0, 3, 1, 2).reshape(len(blocks), -1)

    def layout(self, plan: Plan) -> str:
        """Return the text that replaces the placeholder of an image."""
        rows, columns = (side // self.merge for side in plan.grids[0][1:])
        return "[IMG_BREAK]".join(["[IMG]" * columns] * rows) + "[IMG_END]"

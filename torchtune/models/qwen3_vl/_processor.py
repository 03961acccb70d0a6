"""Image processor of Qwen 2.5-VL, Qwen 3-VL and Qwen 3.5."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torchtune.data import DataError
from torchtune.models._image_processors import (
    ImageProcessor,
    Plan,
    check_settings,
    given_colors,
    given_numbers,
)

_MOST_ASPECT = 200


@dataclass(frozen=True, kw_only=True)
class QwenImages(ImageProcessor):
    """Image processor of Qwen 2.5-VL, Qwen 3-VL and Qwen 3.5.

    Attributes:
        min_pixels: images with fewer pixels are enlarged.
        max_pixels: images with more pixels are reduced.
        token: id of the placeholder, one for each token of an image.
    """

    patch_size: int = 14
    merge: int = 2
    frames: int = 2
    min_pixels: int = 56 * 56
    max_pixels: int = 28 * 28 * 1280
    token: int = 0

    @classmethod
    def from_config(cls, config: Mapping[str, Any], model: Mapping[str, Any]) -> "QwenImages":
        """Read ``preprocessor_config.json`` and ``config.json``.

        Raises:
            DataError: a field has a value that this processor does not support.
        """
        check_settings(config)
        size = config.get("size") or {}
        numbers = given_numbers(
            patch_size=config.get("patch_size"),
            merge=config.get("merge_size"),
            frames=config.get("temporal_patch_size"),
            min_pixels=config.get("min_pixels") or size.get("shortest_edge"),
            max_pixels=config.get("max_pixels") or size.get("longest_edge"),
        )
        return cls(**numbers, **given_colors(config), token=model.get("image_token_id", 0))

    def plan(self, size: tuple[int, int]) -> Plan:
        """Return the size, grid and number of tokens of an image, from its (width, height) in pixels.

        Raises:
            DataError: one side is more than 200 times the other.
        """
        width, height = size
        if max(height, width) > _MOST_ASPECT * min(height, width):
            raise DataError(f"an image of {width} x {height} pixels is too long: its sides may differ by 200 times")
        factor = self.patch_size * self.merge
        rows, columns = (round(side / factor) * factor for side in (height, width))
        if rows * columns > self.max_pixels:
            scale = math.sqrt((height * width) / self.max_pixels)
            rows, columns = (max(factor, math.floor(side / scale / factor) * factor) for side in (height, width))
        elif rows * columns < self.min_pixels:
            scale = math.sqrt(self.min_pixels / (height * width))
            rows, columns = (math.ceil(side * scale / factor) * factor for side in (height, width))
        return self.plan_of(rows, columns)

    def layout(self, plan: Plan) -> list[int]:
        """Return the tokens that replace the placeholder of an image."""
        return [self.token] * plan.tokens

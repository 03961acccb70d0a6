"""Image processor of Qwen: sizes and token counts as integers, and patches as arrays."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from torchtune.data import DataError, Grid
from torchtune.utils import require

_CLIP_MEAN, _CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
_MOST_ASPECT = 200


class Plan(NamedTuple):
    """Result of :meth:`QwenImages.plan`: size after resizing, grid of patches, and number of tokens."""

    height: int
    width: int
    grid: Grid
    tokens: int


@dataclass(frozen=True)
class QwenImages:
    """Image processor of Qwen 2.5-VL, Qwen 3-VL and Qwen 3.5.

    Attributes:
        patch_size: rows and columns of pixels of a patch.
        merge: rows and columns of patches that become one token.
        frames: frames of a patch; an image is repeated.
        min_pixels: images with fewer pixels are enlarged.
        max_pixels: images with more pixels are reduced.
        mean: mean of red, green and blue.
        std: standard deviation of red, green and blue.
        token: the placeholder in rendered text, one for each token of an image.
    """

    patch_size: int = 14
    merge: int = 2
    frames: int = 2
    min_pixels: int = 56 * 56
    max_pixels: int = 28 * 28 * 1280
    mean: tuple[float, ...] = _CLIP_MEAN
    std: tuple[float, ...] = _CLIP_STD
    token: str = "<|image_pad|>"

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "QwenImages":
        """Read ``preprocessor_config.json``.

        Raises:
            DataError: a field has a value that this processor does not support.
        """
        size = {**(config.get("size") or {})}
        for field in ("do_resize", "do_rescale", "do_normalize"):
            if config.get(field, True) is not True:
                raise DataError(f"preprocessor_config.json has {field} = {config[field]}, which is not supported")
        if config.get("resample", 3) != 3 or abs(config.get("rescale_factor", 1 / 255) * 255 - 1) > 1e-6:
            raise DataError("preprocessor_config.json: only bicubic resampling (3) and a factor of 1/255 are supported")
        numbers = {
            "patch_size": config.get("patch_size"),
            "merge": config.get("merge_size"),
            "frames": config.get("temporal_patch_size"),
            "min_pixels": config.get("min_pixels") or size.get("shortest_edge"),
            "max_pixels": config.get("max_pixels") or size.get("longest_edge"),
        }
        for name, value in numbers.items():
            if value is not None and (not isinstance(value, int) or value < 1):
                raise DataError(f"preprocessor_config.json: {name} is {value!r}, which is no positive whole number")
        colors = {"mean": config.get("image_mean"), "std": config.get("image_std")}
        given = {name: tuple(map(float, value)) for name, value in colors.items() if value is not None}
        return cls(**{name: value for name, value in numbers.items() if value is not None}, **given)

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
        grid = (1, rows // self.patch_size, columns // self.patch_size)
        return Plan(rows, columns, grid, grid[1] * grid[2] // self.merge**2)

    def patches(self, image: Any) -> np.ndarray:
        """Return the patches of a Pillow image in RGB, float32 ``[p, 3 * frames * patch_size²]``, ordered by block."""
        resampling = require("PIL.Image", extra="vision", purpose="Reading an image").Resampling
        plan, p, m = self.plan(image.size), self.patch_size, self.merge
        resized = image.resize((plan.width, plan.height), resampling.BICUBIC)
        mean, std = (np.asarray(value, np.float32) for value in (self.mean, self.std))
        pixels = (np.asarray(resized, np.float32) / 255 - mean) / std
        _, rows, columns = plan.grid
        blocks = pixels.reshape(rows // m, m, p, columns // m, m, p, 3).transpose(0, 3, 1, 4, 6, 2, 5)
        still = np.broadcast_to(blocks[:, :, :, :, :, None], (*blocks.shape[:5], self.frames, p, p))
        return still.reshape(rows * columns, -1)

    def layout(self, grid: Grid) -> str:
        """Return the text that replaces the placeholder of an image."""
        return self.token * (math.prod(grid) // self.merge**2)

"""Image processor of SmolVLM 2 and Idefics 3."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from torchtune.models._image_processors import LANCZOS, Plan, TiledProcessor

_LARGEST = 4096
_AROUND, _IMAGE, _WHOLE = "<fake_token_around_image>", "<image>", "<global-img>"


@dataclass(frozen=True, kw_only=True)
class TiledImages(TiledProcessor):
    """Image processor of SmolVLM 2 and Idefics 3: tiles of a large image, then the whole image as a tile.

    Attributes:
        longest: longer side of an image after resizing.
        splits: whether images are split into tiles.
    """

    resample: ClassVar[int] = LANCZOS
    tower_tile: ClassVar[int] = 224
    tile: int = 364
    longest: int = 4 * 364
    splits: bool = True

    @classmethod
    def from_config(cls, config: Mapping[str, Any], model: Mapping[str, Any]) -> "TiledImages":
        """See :meth:`ImageProcessor.from_config`."""
        return replace(super().from_config(config, model), splits=bool(config.get("do_image_splitting", True)))

    @classmethod
    def numbers(cls, config: Mapping[str, Any], model: Mapping[str, Any]) -> dict[str, Any]:
        """See :meth:`ImageProcessor.numbers`."""
        return {
            "patch_size": (model.get("vision_config") or {}).get("patch_size", 32),
            "merge": model.get("scale_factor", 2),
            "tile": (config.get("max_image_size") or {}).get("longest_edge"),
            "longest": (config.get("size") or {}).get("longest_edge"),
        }

    def plan(self, size: tuple[int, int]) -> Plan:
        """Return size, grids and number of tokens of an image, from its (width, height) in pixels."""
        width, height = self._tiled(self._first(size)) if self.splits else (self.tile, self.tile)
        return self.plan_of_tiles(height, width)

    def _first(self, size: tuple[int, int]) -> tuple[int, int]:
        """Return (width, height) with the longer side of ``longest`` pixels."""
        ratio, most = size[0] / size[1], self.longest
        longer_first = size[0] >= size[1]
        shorter = int(most / ratio) if longer_first else int(most * ratio)
        longer, shorter = most, max(shorter + shorter % 2, 1)
        if longer > _LARGEST:
            ratio = longer / shorter
            longer, shorter = _LARGEST, max(int(_LARGEST / ratio), 1)
        return (longer, shorter) if longer_first else (shorter, longer)

    def _tiled(self, size: tuple[int, int]) -> tuple[int, int]:
        """Return (width, height) as multiples of a tile."""
        (width, height), tile = size, self.tile
        ratio = width / height
        if width >= height:
            width = math.ceil(width / tile) * tile
            return width, math.ceil(int(width / ratio) / tile) * tile
        height = math.ceil(height / tile) * tile
        return math.ceil(int(height * ratio) / tile) * tile, height

    def pixels(self, image: Any) -> np.ndarray:
        """Return the patches of a Pillow image in RGB, uint8 ``[p, 3 * patch_size²]``, by tile and by block."""
        plan = self.plan(image.size)
        whole = self.resized(image, *self._first(image.size))
        whole = self.resized(whole, plan.width, plan.height)
        return self.cut_tiles(whole, whole)

    def layout(self, plan: Plan) -> str:
        """Return the text that replaces the placeholder of an image."""
        tokens = _IMAGE * (plan.tokens // len(plan.grids))
        whole = f"{_AROUND}{_WHOLE}{tokens}{_AROUND}"
        if len(plan.grids) == 1:
            return whole
        rows, columns = plan.height // self.tile, plan.width // self.tile
        lines = [
            "".join(f"{_AROUND}<row_{row + 1}_col_{column + 1}>{tokens}" for column in range(columns)) + "\n"
            for row in range(rows)
        ]
        return "".join([*lines, "\n", whole])

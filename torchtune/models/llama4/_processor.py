"""Image processor of Llama 4."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch

from torchtune.data import DataError
from torchtune.models._image_processors import BILINEAR, Plan, TiledProcessor
from torchtune.modules.transforms.vision import find_supported_resolutions, get_canvas_best_fit, get_inscribed_size


@dataclass(frozen=True, kw_only=True)
class LlamaImages(TiledProcessor):
    """Image processor of Llama 4: tiles of the best-fitting canvas, then the whole image as a tile.

    Attributes:
        max_tiles: maximum number of tiles of a canvas.
    """

    patch_size: int = 14
    merge: int = 2
    placeholder: ClassVar[str] = "<|image|>"
    resample: ClassVar[int] = BILINEAR
    tower_tile: ClassVar[int] = 448
    tile: int = 336
    max_tiles: int = 16

    @classmethod
    def numbers(cls, config: Mapping[str, Any], model: Mapping[str, Any]) -> dict[str, Any]:
        """See :meth:`ImageProcessor.numbers`."""
        if config.get("resize_to_max_canvas"):
            raise DataError("preprocessor_config.json has resize_to_max_canvas = True, which is not supported")
        return {
            "patch_size": (model.get("vision_config") or {}).get("patch_size"),
            "tile": (config.get("size") or {}).get("height"),
            "max_tiles": config.get("max_patches"),
        }

    def plan(self, size: tuple[int, int]) -> Plan:
        """Return size of the canvas, grids and number of tokens of an image, from its (width, height) in pixels."""
        canvases = torch.tensor(find_supported_resolutions(self.max_tiles, self.tile))
        image = torch.empty(size[::-1], device="meta")
        return self.plan_of_tiles(*get_canvas_best_fit(image, canvases, resize_to_max_canvas=False))

    def pixels(self, image: Any) -> np.ndarray:
        """Return the patches of a Pillow image in RGB, uint8 ``[p, 3 * patch_size²]``, by tile and by block."""
        plan = self.plan(image.size)
        height, width = get_inscribed_size(image.size[::-1], (plan.height, plan.width), self.tile)
        canvas = self.resized(image, width, height).crop((0, 0, plan.width, plan.height))
        return self.cut_tiles(canvas, image)

    def layout(self, plan: Plan) -> str:
        """Return the text that replaces the placeholder of an image."""
        tokens = "<|patch|>" * (plan.tokens // len(plan.grids))
        rows = plan.height // self.tile
        columns = plan.width // self.tile
        row = "<|tile_x_separator|>".join([tokens] * columns) + "<|tile_y_separator|>"
        tiles = row * rows if len(plan.grids) > 1 else ""
        return f"<|image_start|>{tiles}<|image|>{tokens}<|image_end|>"

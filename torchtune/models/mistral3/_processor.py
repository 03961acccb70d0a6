"""Image processor of Mistral 3, Ministral 3 and Pixtral."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torchtune.data import DataError
from torchtune.models._image_processors import ImageProcessor, Plan


@dataclass(frozen=True, kw_only=True)
class PixtralImages(ImageProcessor):
    """Image processor of Mistral 3, Ministral 3 and Pixtral.

    Attributes:
        longest: largest side of an image; larger ones are reduced.
    """

    patch_size: int = 16
    merge: int = 2
    longest: int = 1024

    @classmethod
    def numbers(cls, config: Mapping[str, Any], model: Mapping[str, Any]) -> dict[str, Any]:
        """See :meth:`ImageProcessor.numbers`."""
        patch = config.get("patch_size")
        return {
            "patch_size": patch.get("height") if isinstance(patch, Mapping) else patch,
            "merge": model.get("spatial_merge_size", 1 if model.get("model_type") == "llava" else None),
            "longest": (config.get("size") or {}).get("longest_edge"),
        }

    def plan(self, size: tuple[int, int]) -> Plan:
        """See :meth:`ImageProcessor.plan`; refuses an image so long that it would have no pixel left."""
        width, height = size
        factor = self.patch_size * self.merge
        ratio = max(height / self.longest, width / self.longest)
        if ratio > 1:
            height, width = math.floor(height / ratio), math.floor(width / ratio)
        if not height or not width:
            raise DataError(f"an image of {size[0]} x {size[1]} pixels is too long: reduced, it has no pixel left")
        rows, columns = ((side - 1) // factor + 1 for side in (height, width))
        return self.plan_of(rows * factor, columns * factor)

    def layout(self, plan: Plan) -> str:
        """Return the text that replaces the placeholder of an image."""
        rows, columns = (side // self.merge for side in plan.grids[0][1:])
        return "[IMG_BREAK]".join(["[IMG]" * columns] * rows) + "[IMG_END]"

"""Image processor of Gemma 4."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torchtune.data import DataError
from torchtune.models._image_processors import ImageProcessor, Plan, check_settings, given_numbers


@dataclass(frozen=True, kw_only=True)
class GemmaImages(ImageProcessor):
    """Image processor of Gemma 4: every image gets about as many tokens.

    Attributes:
        max_tokens: maximum number of tokens of an image.
        around: ids of the tokens before, in and after an image.
    """

    patch_size: int = 16
    merge: int = 3
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    std: tuple[float, ...] = (0.5, 0.5, 0.5)
    channels_last: ClassVar[bool] = True
    max_tokens: int = 280
    around: tuple[int, int, int] = (255_999, 258_880, 258_882)

    @classmethod
    def from_config(cls, config: Mapping[str, Any], model: Mapping[str, Any]) -> "GemmaImages":
        """Read ``preprocessor_config.json`` and ``config.json``.

        Raises:
            DataError: a field has a value that this processor does not support.
        """
        check_settings(config, steps=())
        if config.get("do_normalize"):
            raise DataError("preprocessor_config.json has do_normalize = True, which is not supported")
        numbers = given_numbers(
            patch_size=config.get("patch_size"),
            merge=config.get("pooling_kernel_size"),
            max_tokens=config.get("max_soft_tokens"),
        )
        names = ("boi_token_id", "image_token_id", "eoi_token_id")
        around = tuple(model.get(name, default) for name, default in zip(names, cls.around, strict=True))
        return cls(**numbers, around=around)

    def plan(self, size: tuple[int, int]) -> Plan:
        """Return the size, grid and number of tokens of an image, from its (width, height) in pixels.

        Raises:
            DataError: the image is so long that it would have no pixel left.
        """
        width, height = size
        factor, most = self.patch_size * self.merge, self.max_tokens * (self.patch_size * self.merge) ** 2
        scale = math.sqrt(most / (height * width))
        rows, columns = (math.floor(scale * side / factor) * factor for side in (height, width))
        if not rows and not columns:
            raise DataError(f"an image of {width} x {height} pixels cannot be resized to {self.max_tokens} tokens")
        if not rows:
            rows, columns = factor, min(width // height, self.max_tokens) * factor
        elif not columns:
            rows, columns = min(height // width, self.max_tokens) * factor, factor
        return self.plan_of(rows, columns)

    def layout(self, plan: Plan) -> list[int]:
        """Return the tokens that replace the placeholder of an image."""
        first, image, last = self.around
        return [first, *[image] * plan.tokens, last]

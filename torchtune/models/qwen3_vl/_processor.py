"""Processor of images and videos of Qwen 2.5-VL, Qwen 3-VL and Qwen 3.5."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from torchtune.data import DataError, Video, image_size
from torchtune.models._image_processors import (
    ImageProcessor,
    Plan,
    check_settings,
    given_colors,
    given_numbers,
    resize,
)

_MOST_ASPECT = 200
_START, _END = "<|vision_start|>", "<|vision_end|>"


@dataclass(frozen=True, kw_only=True)
class QwenImages(ImageProcessor):
    """Processor of images and videos of Qwen 2.5-VL, Qwen 3-VL and Qwen 3.5.

    Attributes:
        min_pixels: images with fewer pixels are enlarged.
        max_pixels: images with more pixels are reduced.
        video: processor with the limits of videos, for each frame or, without ``tokens_per_second``, for all frames; by
            default those of images.
        token: id of the placeholder, one for each token of an image.
        tokens_per_second: distance of positions after a second of a video (Qwen 2.5-VL); 0: the time is in the text.
    """

    video_placeholder: ClassVar[str] = "<|video_pad|>"
    patch_size: int = 14
    merge: int = 2
    frames: int = 2
    min_pixels: int = 56 * 56
    max_pixels: int = 28 * 28 * 1280
    video: "QwenImages | None" = None
    token: int = 0
    tokens_per_second: float = 0.0

    @classmethod
    def from_config(cls, config: Mapping[str, Any], model: Mapping[str, Any]) -> "QwenImages":
        """Read ``preprocessor_config.json``, with ``video_preprocessor_config.json`` in it, and ``config.json``.

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
        if model.get("model_type") == "qwen2_5_vl":
            numbers["tokens_per_second"] = (model.get("vision_config") or {}).get("tokens_per_second", 4)
        found = cls(**numbers, **given_colors(config), token=model.get("image_token_id", 0))
        if not (own := config.get("video_processor")):
            return found
        video = cls.from_config(own, model)
        if own.get("cap_pixels_per_frame") or video.colors != found.colors:
            raise DataError("the processor of videos has cap_pixels_per_frame or own colors, which are not supported")
        return replace(found, video=video)

    def plan(self, size: tuple[Any, ...]) -> Plan:
        """Return the size, grid and number of tokens of an image or a video, from its size in pixels.

        Args:
            size: (width, height), and number of frames and frames per second of a video.

        Raises:
            DataError: one side is more than 200 times the other.
        """
        width, height, *video = size
        if not video:
            return self.plan_of(*self._resized(width, height))
        count, fps = video
        counted = 1 if self.tokens_per_second else count
        if counted > 1 and (scale := self.patch_size * self.merge / min(width, height)) > 1:
            width, height = int(width * scale), int(height * scale)
        plan = self.plan_of(*(self.video or self)._resized(width, height, counted))
        firsts = range(0, count, self.frames)
        times = [(first / fps + (min(first + self.frames, count) - 1) / fps) / 2 for first in firsts]
        return plan._replace(
            grids=((len(firsts), *plan.grids[0][1:]),),
            tokens=len(firsts) * plan.tokens,
            texts=("",) if self.tokens_per_second else tuple(f"<{time:.1f} seconds>" for time in times),
            step=self.tokens_per_second * (self.frames / fps),
        )

    def _resized(self, width: int, height: int, count: int = 1) -> tuple[int, int]:
        """Return height and width after resizing, with the limits for ``count`` frames."""
        if max(height, width) > _MOST_ASPECT * min(height, width):
            raise DataError(f"an image of {width} x {height} pixels is too long: its sides may differ by 200 times")
        factor = self.patch_size * self.merge
        rows, columns = (round(side / factor) * factor for side in (height, width))
        whole = rows * columns * max(round(count / self.frames) * self.frames, 1)
        if whole > self.max_pixels:
            scale = math.sqrt((count * height * width) / self.max_pixels)
            rows, columns = (max(factor, math.floor(side / scale / factor) * factor) for side in (height, width))
        elif whole < self.min_pixels:
            scale = math.sqrt(self.min_pixels / (count * height * width))
            rows, columns = (math.ceil(side * scale / factor) * factor for side in (height, width))
        return rows, columns

    def layout(self, plan: Plan) -> list[int] | str:
        """Return the tokens, or the text, that replace the placeholder of an image or a video."""
        if not plan.texts:
            return [self.token] * plan.tokens
        part = f"{_START}{self.video_placeholder * (plan.tokens // len(plan.texts))}{_END}"
        return "".join(text + part for text in plan.texts)

    def pixels(self, image: Any) -> np.ndarray:
        """Return the patches of a Pillow image in RGB, uint8 ``[p, pixels * 3]``, ordered by block.

        Of a :class:`torchtune.data.Video`, return ``[p, pixels * 3 * frames]``, ordered by frame and by block.
        """
        if not isinstance(image, Video):
            return super().pixels(image)
        plan = self.plan(image_size(image))
        cut = [self.cut(resize(frame, plan.width, plan.height)) for frame in image.frames]
        cut += cut[-1:] * (-len(cut) % self.frames)
        frames = np.stack(cut).reshape(-1, self.frames, len(cut[0]), 3, self.patch_size**2)
        return frames.transpose(0, 2, 3, 1, 4).reshape(-1, self.frames * cut[0].shape[1])

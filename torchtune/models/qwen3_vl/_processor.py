"""Processor of images and videos of Qwen 2.5-VL, Qwen 3-VL and Qwen 3.5."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torchtune.data import DataError
from torchtune.models._image_processors import ImageProcessor, Plan

_MOST_ASPECT = 200


@dataclass(frozen=True, kw_only=True)
class QwenImages(ImageProcessor):
    """Processor of images and videos of Qwen 2.5-VL, Qwen 3-VL and Qwen 3.5.

    Attributes:
        min_pixels: images with fewer pixels are enlarged.
        max_pixels: images with more pixels are reduced.
        video: processor with the limits of videos, for each frame or, without ``tokens_per_second``, for all frames;
            by default this one.
        token: id of the placeholder, one for each token of an image.
        tokens_per_second: distance of positions after a second of a video (Qwen 2.5-VL); 0: the time is in the text.
    """

    video_placeholder: ClassVar[str] = "<|video_pad|>"
    around: ClassVar[tuple[str, str]] = ("<|vision_start|>", "<|vision_end|>")
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
        """See :meth:`ImageProcessor.from_config`."""
        found = replace(super().from_config(config, model), token=model.get("image_token_id", 0))
        if model.get("model_type") == "qwen2_5_vl":
            tower = model.get("vision_config") or {}
            found = replace(found, tokens_per_second=tower.get("tokens_per_second", 4))
        if not (own := config.get("video_processor")):
            return found
        video = cls.from_config(own, model)
        if own.get("cap_pixels_per_frame") or video.colors != found.colors:
            raise DataError("the processor of videos has cap_pixels_per_frame or own colors, which are not supported")
        return replace(found, video=video)

    @classmethod
    def numbers(cls, config: Mapping[str, Any], model: Mapping[str, Any]) -> dict[str, Any]:
        """See :meth:`ImageProcessor.numbers`."""
        size = config.get("size") or {}
        return {
            "patch_size": config.get("patch_size"),
            "merge": config.get("merge_size"),
            "frames": config.get("temporal_patch_size"),
            "min_pixels": config.get("min_pixels") or size.get("shortest_edge"),
            "max_pixels": config.get("max_pixels") or size.get("longest_edge"),
        }

    def plan(self, size: tuple[Any, ...]) -> Plan:
        """See :meth:`ImageProcessor.plan`; refuses an image with one side more than 200 times the other."""
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
        plan = self.plan_of_frames(plan, [f"<{time:.1f} seconds>" for time in times])
        if not self.tokens_per_second:
            return plan
        return plan._replace(texts=("",), step=self.tokens_per_second * (self.frames / fps))

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
        return self.frames_layout(plan, self.video_placeholder) if plan.texts else [self.token] * plan.tokens

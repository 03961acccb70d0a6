"""Processor of images and videos of Gemma 4."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torchtune.data import DataError
from torchtune.models._image_processors import ImageProcessor, Plan, check_settings, given_colors, given_numbers

_UNCHANGED = {"mean": (0.0,) * 3, "std": (1.0,) * 3}


@dataclass(frozen=True, kw_only=True)
class GemmaImages(ImageProcessor):
    """Processor of images and videos of Gemma 4: every image gets about as many tokens, and every frame.

    Attributes:
        max_tokens: maximum number of tokens of an image.
        frame_tokens: maximum number of tokens of a frame of a video.
    """

    video_placeholder: ClassVar[str] = "<|video|>"
    around: ClassVar[tuple[str, str]] = ("<|image>", "<image|>")
    channels_last: ClassVar[bool] = True
    patch_size: int = 16
    merge: int = 3
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    std: tuple[float, ...] = (0.5, 0.5, 0.5)
    max_tokens: int = 280
    frame_tokens: int = 70

    @classmethod
    def from_config(cls, config: Mapping[str, Any], model: Mapping[str, Any]) -> "GemmaImages":
        """See :meth:`ImageProcessor.from_config`."""
        video = config.get("video_processor") or {}
        for one in (config, video):
            check_settings(one, steps=())
            if one.get("do_normalize") and {**_UNCHANGED, **given_colors(one)} != _UNCHANGED:
                raise DataError("preprocessor_config.json has do_normalize = True, which is not supported")
        numbers = given_numbers(
            patch_size=config.get("patch_size"),
            merge=config.get("pooling_kernel_size"),
            max_tokens=config.get("max_soft_tokens"),
            frame_tokens=video.get("max_soft_tokens"),
        )
        found = cls(**numbers)
        if model.get("model_type") != "gemma4_unified":
            return found
        return replace(found, patch_size=found.patch_size * found.merge, merge=1, **_UNCHANGED)

    def plan(self, size: tuple[Any, ...]) -> Plan:
        """See :meth:`ImageProcessor.plan`; refuses an image so long that it would have no pixel left."""
        width, height, *video = size
        if not video:
            return self._plan(width, height, self.max_tokens)
        count, fps = video
        times = [divmod(int(frame / fps), 60) for frame in range(count)]
        texts = [
            f"{' ' if frame else ''}{minutes:02d}:{seconds:02d} " for frame, (minutes, seconds) in enumerate(times)
        ]
        return self.plan_of_frames(self._plan(width, height, self.frame_tokens), texts)

    def _plan(self, width: int, height: int, tokens: int) -> Plan:
        factor = self.patch_size * self.merge
        scale = math.sqrt(tokens * factor**2 / (height * width))
        rows, columns = (math.floor(scale * side / factor) * factor for side in (height, width))
        if not rows and not columns:
            raise DataError(f"an image of {width} x {height} pixels cannot be resized to {tokens} tokens")
        if not rows:
            rows, columns = factor, min(width // height, tokens) * factor
        elif not columns:
            rows, columns = min(height // width, tokens) * factor, factor
        return self.plan_of(rows, columns)

    def layout(self, plan: Plan) -> str:
        """Return the text that replaces the placeholder of an image or a video."""
        return self.frames_layout(plan, self.video_placeholder if plan.texts else "<|image|>")

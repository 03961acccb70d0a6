"""Processor of images and videos of Gemma 4."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torchtune.data import DataError
from torchtune.models._image_processors import ImageProcessor, Plan


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
        frame = {"max_soft_tokens": cls.frame_tokens, **(config.get("video_processor") or {})}
        for one in (config, frame):
            colors = (one.get("image_mean") or [0.0] * 3, one.get("image_std") or [1.0] * 3)
            if one.get("do_normalize") and colors != ([0.0] * 3, [1.0] * 3):
                raise DataError("preprocessor_config.json has do_normalize = True, which is not supported")
        colors = {"do_normalize": True, "image_mean": None, "image_std": None}
        found, video = (super(GemmaImages, cls).from_config({**one, **colors}, model) for one in (config, frame))
        return replace(found, frame_tokens=video.max_tokens)

    @classmethod
    def numbers(cls, config: Mapping[str, Any], model: Mapping[str, Any]) -> dict[str, Any]:
        """See :meth:`ImageProcessor.numbers`."""
        names = {"patch_size": "patch_size", "merge": "pooling_kernel_size", "max_tokens": "max_soft_tokens"}
        return {ours: config.get(theirs) for ours, theirs in names.items()}

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

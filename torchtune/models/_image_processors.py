"""Base classes of image processors.

The image processor of a family implements ``plan(size)``, which computes sizes and token counts (:class:`Plan`), and
``layout(plan)``, the token ids or the text that replace an image's placeholder; ``pixels(image)`` returns the patches.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np

from torchtune.data import Colors, DataError, Grid, Video, image_size
from torchtune.models._hf_fields import format_value, is_number
from torchtune.utils import require

# Mean and standard deviation of OpenAI's CLIP.
CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
# Filters, with Pillow's numbers.
BICUBIC = 3
BILINEAR = 2
LANCZOS = 1
_FILTERS = {BICUBIC: "bicubic", BILINEAR: "bilinear", LANCZOS: "Lanczos"}


class Plan(NamedTuple):
    """Sizes of an image or a video after resizing.

    Attributes:
        height: height in pixels.
        width: width in pixels.
        grids: frames, rows and columns of patches, for each part of the image.
        tokens: number of tokens with features of the vision tower.
        texts: for a video, the text before each frame of patches.
        step: for a video, the time between frames, in positions; see :func:`torchtune.data.grid_positions`.
    """

    height: int
    width: int
    grids: tuple[Grid, ...]
    tokens: int
    texts: tuple[str, ...] = ()
    step: float = 0.0


@dataclass(frozen=True, kw_only=True)
class ImageProcessor:
    """Base class of image processors.

    Attributes:
        patch_size: rows and columns of pixels of a patch.
        merge: rows and columns of patches that become one token.
        mean: mean of red, green and blue.
        std: standard deviation of red, green and blue.
        frames: number of frames in a patch; an image is repeated in each frame.
        channels_last: whether the values of a patch are ordered by row, column and color, instead of by color first.
        placeholder: special token that the chat template writes for an image; by default the image token.
        video_placeholder: special token that stands for a video; empty if the processor does not support videos.
        around: special tokens before and after a frame of a video.
        resample: filter that resizes images.
    """

    patch_size: int
    merge: int
    mean: tuple[float, ...] = CLIP_MEAN
    std: tuple[float, ...] = CLIP_STD
    frames: int = 1
    channels_last: ClassVar[bool] = False
    placeholder: ClassVar[str] = ""
    video_placeholder: ClassVar[str] = ""
    around: ClassVar[tuple[str, str]] = ("", "")
    resample: ClassVar[int] = BICUBIC

    @classmethod
    def from_config(cls, config: Mapping[str, Any], model: Mapping[str, Any]) -> Self:
        """Build the processor from the contents of ``preprocessor_config.json`` and ``config.json``.

        ``config`` also contains ``video_preprocessor_config.json``.

        Raises:
            DataError: a field has a value that this processor does not support; the message is only the reason.
        """
        for field in ("do_resize", "do_rescale", "do_normalize"):
            if config.get(field, True) is not True:
                raise DataError(f"{field} = {config[field]} is not supported")
        for field in ("size", "max_image_size"):
            if not isinstance(config.get(field) or {}, Mapping):
                raise DataError(f"{field} = {format_value(config[field])} is not an object")
        factor = config.get("rescale_factor", 1 / 255)
        has_factor = is_number(factor) and abs(factor * 255 - 1) < 1e-6  # files may round it
        if config.get("resample", cls.resample) != cls.resample or not has_factor:
            name = f"{_FILTERS[cls.resample]} resampling ({cls.resample})"
            raise DataError(f"only {name} and a factor of 1/255 are supported")
        values: dict[str, Any] = {}
        for name, value in cls.read_sizes(config, model).items():
            if value is None:  # the default of the class
                continue
            if not isinstance(value, int) or value < 1:
                raise DataError(f"{name} = {format_value(value)} is not a positive whole number")
            values[name] = value
        for name, field in (("mean", "image_mean"), ("std", "image_std")):
            colors = config.get(field)
            if colors is None:  # the default of the class
                continue
            if not isinstance(colors, list | tuple) or len(colors) != 3 or not all(map(is_number, colors)):
                raise DataError(f"{field} = {format_value(colors)} is not three numbers")
            values[name] = tuple(float(color) for color in colors)
        return cls(**values)

    @classmethod
    def read_sizes(cls, config: Mapping[str, Any], model: Mapping[str, Any]) -> dict[str, Any]:
        """Return the integer attributes in the arguments of :meth:`from_config`; None stands for the default."""
        raise NotImplementedError

    def plan(self, size: tuple[Any, ...]) -> Plan:
        """Compute the size, the grids and the number of tokens of an image or a video.

        Args:
            size: (width, height) in pixels; for a video also the number of frames and the frames per second.

        Raises:
            DataError: the aspect ratio of the image is too large.
        """
        raise NotImplementedError

    def layout(self, plan: Plan) -> list[int] | str:
        """Return the tokens, or the text, that replace the placeholder of an image or a video."""
        raise NotImplementedError

    def frames_layout(self, plan: Plan, token: str) -> str:
        """Return the text that replaces an image or a video: per frame, repeated ``token`` between ``around``."""
        first, last = self.around
        texts = plan.texts or ("",)
        tokens = token * (plan.tokens // len(texts))
        return "".join(f"{text}{first}{tokens}{last}" for text in texts)

    def pixels(self, image: Any) -> np.ndarray:
        """Return the patches of a Pillow image in RGB, uint8 ``[p, pixels * 3]``, ordered by part and by block.

        For a :class:`torchtune.data.Video`, return ``[p, pixels * 3 * frames]``, ordered by frame and by block.
        """
        if not isinstance(image, Video):
            plan = self.plan(image.size)
            return self.patches_of(self.resized(image, plan.width, plan.height))
        plan = self.plan(image_size(image))
        frames = [self.patches_of(self.resized(frame, plan.width, plan.height)) for frame in image.frames]
        frames += frames[-1:] * (-len(frames) % self.frames)  # the last frame is repeated, until a patch is full
        patches_per_frame, values_per_patch = frames[0].shape
        # [patches in time, frames of a patch, patches of a frame, color, pixel]
        patches = np.stack(frames).reshape(-1, self.frames, patches_per_frame, 3, self.patch_size**2)
        # A patch is ordered by color, then by frame, then by pixel.
        return patches.transpose(0, 2, 3, 1, 4).reshape(-1, self.frames * values_per_patch)

    def resized(self, image: Any, width: int, height: int) -> Any:
        """Resize a Pillow image."""
        resampling = require("PIL.Image", extra="vision", purpose="Reading an image").Resampling
        return image.resize((width, height), resampling(self.resample))

    @property
    def colors(self) -> Colors:
        """Conversion of the pixels to the values of patches."""
        return Colors(self.mean, self.std, 3 * self.frames * self.patch_size**2, self.channels_last)

    def plan_for_size(self, height: int, width: int) -> Plan:
        """Return the plan of an image that is resized to ``height`` and ``width``."""
        rows = height // self.patch_size
        columns = width // self.patch_size
        return Plan(height, width, ((1, rows, columns),), rows * columns // self.merge**2)

    def plan_for_frames(self, plan: Plan, texts: Sequence[str]) -> Plan:
        """Return the plan of a video, from the plan of one frame; ``texts`` has one text per frame of patches."""
        count = len(texts)
        grids = ((count, *plan.grids[0][1:]),)
        return plan._replace(grids=grids, tokens=count * plan.tokens, texts=tuple(texts))

    def patches_of(self, image: Any) -> np.ndarray:
        """Return the patches of a resized image; pixels beyond the last block are dropped.

        Blocks of ``merge`` x ``merge`` patches that become one token are consecutive.
        """
        side = self.patch_size
        merge = self.merge
        rows = image.height // side // merge
        columns = image.width // side // merge
        pixels = np.array(image)[: rows * merge * side, : columns * merge * side]
        # [block row, row in the block, pixel row, block column, column in the block, pixel column, color]
        blocks = pixels.reshape(rows, merge, side, columns, merge, side, 3)
        patches = blocks.transpose(0, 3, 1, 4, 2, 5, 6).reshape(-1, side, side, 3)
        if not self.channels_last:
            patches = patches.transpose(0, 3, 1, 2)
        return patches.reshape(len(patches), -1)


@dataclass(frozen=True, kw_only=True)
class TiledImageProcessor(ImageProcessor):
    """Base class of image processors that cut a large image into tiles and add the resized whole image as a tile.

    Attributes:
        tile: side of a tile, in pixels.
        tower_tile: default side of the vision tower's input, in pixels.
    """

    tower_tile: ClassVar[int]
    tile: int
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    std: tuple[float, ...] = (0.5, 0.5, 0.5)

    @classmethod
    def from_config(cls, config: Mapping[str, Any], model: Mapping[str, Any]) -> Self:
        """See :meth:`ImageProcessor.from_config`. Also raises if the tower takes tiles of another size."""
        processor = super().from_config(config, model)
        side = (model.get("vision_config") or {}).get("image_size", cls.tower_tile)
        if processor.tile != side:
            raise DataError(
                f"tiles have {processor.tile} pixels, but the tower in config.json takes {side}: download the "
                "checkpoint again"
            )
        return processor

    def plan_for_tiles(self, height: int, width: int) -> Plan:
        """Return the plan of an image of ``height`` x ``width`` pixels that is cut into tiles."""
        num_tiles = height * width // self.tile**2
        if num_tiles > 1:
            num_tiles += 1  # the whole image
        side = self.tile // self.patch_size
        return Plan(height, width, ((1, side, side),) * num_tiles, num_tiles * (side // self.merge) ** 2)

    def patches_of_tiles(self, image: Any, whole: Any) -> np.ndarray:
        """Return the patches of the tiles of ``image``; if there are several, also of ``whole``, resized to a tile."""
        tiles = []
        for top in range(0, image.height, self.tile):
            for left in range(0, image.width, self.tile):
                tiles.append(image.crop((left, top, left + self.tile, top + self.tile)))
        if len(tiles) > 1:
            tiles.append(self.resized(whole, self.tile, self.tile))
        return np.concatenate([self.patches_of(tile) for tile in tiles])

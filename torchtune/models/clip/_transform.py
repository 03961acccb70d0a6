"""Image transform that makes normalized tiles."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from torchtune.data import DataError, Transform, read_pixels
from torchtune.modules.transforms.vision_utils.get_canvas_best_fit import (
    find_supported_resolutions,
    get_canvas_best_fit,
)
from torchtune.modules.transforms.vision_utils.resize_with_pad import resampling_mode, resize_with_pad
from torchtune.modules.transforms.vision_utils.tile_crop import tile_crop

# Mean and standard deviation of OpenAI's CLIP.
CLIP_MEAN = [0.48145466, 0.4578275, 0.40821073]
CLIP_STD = [0.26862954, 0.26130258, 0.27577711]


class CLIPImageTransform(Transform):
    """Transform that resizes an image to the best-fitting canvas of tiles, normalizes it, and cuts it into tiles.

    The image keeps its aspect ratio and is padded on the right and at the bottom. Without ``resize_to_max_canvas``, a
    small image is upscaled at most to the size of a tile.

    Args:
        image_mean: mean of red, green and blue, for values from 0 to 1; ``None``: no normalization.
        image_std: standard deviation of red, green and blue.
        possible_resolutions: (height, width) of the canvases, in pixels; ``None``: all with up to ``max_num_tiles``
            tiles.
        tile_size: width and height of a tile, in pixels.
        max_num_tiles: maximum number of tiles per image.
        dtype: dtype of the tiles.
        resample: ``"nearest"``, ``"bilinear"`` or ``"bicubic"``, with antialiasing.
        resize_to_max_canvas: upscale the image as much as the canvases allow.

        Raises:
            DataError: only one of ``image_mean`` and ``image_std`` is set or has not 3 values, there is no canvas, or
                ``resample`` is unknown.

    Example:
        >>> transform = torchtune.models.clip.CLIPImageTransform(tile_size=4, max_num_tiles=4)
        >>> sample = transform({"image": torch.zeros(3, 4, 7, dtype=torch.uint8)})
        >>> sample["image"].shape, sample["aspect_ratio"]
        (torch.Size([2, 3, 4, 4]), tensor([1, 2]))
    """

    def __init__(
        self,
        *,
        image_mean: Sequence[float] | None = None,
        image_std: Sequence[float] | None = None,
        possible_resolutions: Sequence[tuple[int, int]] | None = None,
        tile_size: int = 224,
        max_num_tiles: int | None = 4,
        dtype: torch.dtype = torch.bfloat16,
        resample: str = "bilinear",
        resize_to_max_canvas: bool = False,
    ) -> None:
        if (image_mean is None) != (image_std is None):
            raise DataError("image_mean and image_std belong together: give both or neither.")
        for name, values in (("image_mean", image_mean), ("image_std", image_std)):
            if values is not None and len(values) != 3:
                raise DataError(f"{name} needs 3 values, of red, green and blue, not {len(values)}.")
        if possible_resolutions is None:
            if not max_num_tiles:
                raise DataError("CLIPImageTransform needs possible_resolutions or max_num_tiles.")
            possible_resolutions = find_supported_resolutions(max_num_tiles, tile_size)
        resampling_mode(resample)
        self.possible_resolutions = torch.tensor(possible_resolutions).reshape(-1, 2)
        self.mean, self.std = (
            None if values is None else torch.tensor(values)[:, None, None] for values in (image_mean, image_std)
        )
        self.tile_size, self.dtype = tile_size, dtype
        self.resample, self.resize_to_max_canvas = resample, resize_to_max_canvas
        self.max_size = None if resize_to_max_canvas else tile_size

    def __call__(self, sample: Mapping[str, Any], inference: bool = False) -> dict[str, Any]:
        """Replace ``image`` by tiles and add ``aspect_ratio``.

        Args:
            sample: sample with ``image``: a Pillow image, a path or URL, or a tensor ``[c, height, width]`` with 1 or 3
                channels, uint8 or floating point from 0 to 1.
            inference: ignored.

        Returns:
            The sample with ``image`` ``[tiles, 3, tile_size, tile_size]``, row by row, and ``aspect_ratio``, int64
            ``[2]``: rows and columns of tiles.

            Raises:
                DataError: the image cannot be read, the tensor has a wrong shape, dtype or range, or the canvas that
                    fits best does not consist of whole tiles.
        """
        image = _three_channels(sample["image"])
        canvas = get_canvas_best_fit(image, self.possible_resolutions, self.resize_to_max_canvas)
        if canvas[0] % self.tile_size or canvas[1] % self.tile_size:
            raise DataError(
                f"possible_resolutions: {canvas[0]} x {canvas[1]}, which fits an image of {image.shape[1]} x "
                f"{image.shape[2]} best, is not of whole tiles of {self.tile_size}."
            )
        image = resize_with_pad(image, canvas, self.resample, self.max_size)
        pixels = image.float() / 255 if image.dtype == torch.uint8 else image
        if self.mean is not None:
            pixels = (pixels - self.mean) / self.std
        return {
            **sample,
            "image": tile_crop(pixels.to(self.dtype), self.tile_size),
            "aspect_ratio": torch.tensor(canvas) // self.tile_size,
        }


def _three_channels(image: Any) -> torch.Tensor:
    """Convert to uint8 or float32 ``[3, height, width]``. Raises :class:`DataError` for invalid images."""
    if not isinstance(image, torch.Tensor):
        return read_pixels(image)
    if image.dim() != 3 or image.shape[0] not in (1, 3) or not image.numel():
        raise DataError(f"an image must be a tensor [c, height, width] of 1 or 3 channels, not {tuple(image.shape)}")
    if image.dtype != torch.uint8 and not image.is_floating_point():
        raise DataError(f"an image must be of uint8 or floating point, not {image.dtype}")
    if image.dtype != torch.uint8:
        low, high = (float(value) for value in image.aminmax())
        if not 0 <= low <= high <= 1:
            raise DataError(f"an image of floating point must be from 0 to 1, not {low:g} to {high:g}: uint8 is to 255")
    return (image if image.dtype == torch.uint8 else image.float()).expand(3, -1, -1)

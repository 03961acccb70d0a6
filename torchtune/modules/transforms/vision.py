"""Images as tiles: the canvas of an image, resizing, padding and cutting, and the mask of cross-attention to tiles."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch.nn import functional as F

from torchtune.data import DataError, Transform

# Name of a filter -> mode of ``F.interpolate``.
_INTERPOLATION_MODES = {
    "nearest": "nearest-exact",
    "nearest-exact": "nearest-exact",
    "bilinear": "bilinear",
    "bicubic": "bicubic",
}


def find_supported_resolutions(max_num_tiles: int, tile_size: int) -> list[tuple[int, int]]:
    """Return the sizes of all canvases of at most ``max_num_tiles`` square tiles, by height, then by width.

    Args:
        max_num_tiles: maximum number of tiles in a canvas.
        tile_size: side of a tile, in pixels.

    Returns:
        (height, width) of each canvas, in pixels.

    Example:
        >>> from torchtune.modules.transforms.vision import find_supported_resolutions
        >>> find_supported_resolutions(max_num_tiles=2, tile_size=224)
        [(224, 224), (224, 448), (448, 224)]
    """
    resolutions = []
    for rows in range(1, max_num_tiles + 1):
        for columns in range(1, max_num_tiles // rows + 1):
            resolutions.append((rows * tile_size, columns * tile_size))
    return resolutions


def get_canvas_best_fit(
    image: torch.Tensor, possible_resolutions: torch.Tensor, resize_to_max_canvas: bool
) -> tuple[int, int]:
    """Return the canvas that upscales the image least or, if none is large enough, downscales it least.

    Of several such canvases, the one with the smallest area is returned.

    Args:
        image: ``[..., height, width]``.
        possible_resolutions: ``[n, 2]``, (height, width) of the canvases, in pixels.
        resize_to_max_canvas: choose the canvas with the largest scale, even if a smaller one is large enough.

    Returns:
        (height, width) of the canvas, in pixels.

    Example:
        >>> from torchtune.modules.transforms.vision import get_canvas_best_fit
        >>> canvases = torch.tensor([[224, 672], [672, 224], [224, 448], [448, 224], [224, 224]])
        >>> get_canvas_best_fit(torch.zeros(3, 200, 300), canvases, resize_to_max_canvas=False)
        (224, 448)
    """
    image_size = torch.tensor(image.shape[-2:], dtype=torch.float64)
    # The side of the image that fills its canvas first limits the scale.
    scales = (possible_resolutions / image_size).amin(dim=1)  # [n]
    is_upscaling = scales >= 1
    if resize_to_max_canvas or not is_upscaling.any():
        best_scale = scales.max()
    else:
        best_scale = scales[is_upscaling].min()
    candidates = possible_resolutions[scales == best_scale]
    smallest = candidates.prod(dim=1).argmin()
    height, width = candidates[smallest].tolist()
    return height, width


def get_inscribed_size(
    image_size: tuple[int, int], target_size: tuple[int, int], max_size: int | None
) -> tuple[int, int]:
    """Return the largest size at which an image fits into a canvas with its aspect ratio preserved.

    Args:
        image_size: (height, width) of the image.
        target_size: (height, width) of the canvas.
        max_size: maximum length in pixels of an upscaled side; ``None`` limits upscaling only by the canvas.

    Returns:
        (height, width), at least 1 each.

    Example:
        >>> from torchtune.modules.transforms.vision import get_inscribed_size
        >>> get_inscribed_size((200, 100), (1000, 1200), max_size=None)
        (1000, 500)
        >>> get_inscribed_size((200, 100), (1000, 1200), max_size=600)
        (600, 300)
    """
    height, width = image_size
    max_height, max_width = target_size
    if max_size is not None:
        max_height = min(max(height, max_size), max_height)
        max_width = min(max(width, max_size), max_width)
    scale_of_height = max_height / height
    scale_of_width = max_width / width
    # The side with the smaller scale fills the canvas; the other one is rounded down, but not to nothing.
    if scale_of_width < scale_of_height:
        scaled_height = max(math.floor(height * scale_of_width), 1)
        return min(scaled_height, max_height), max_width
    scaled_width = max(math.floor(width * scale_of_height), 1)
    return max_height, min(scaled_width, max_width)


def interpolation_mode(resample: Any) -> str:
    """Convert the name of a filter, or torchvision's ``InterpolationMode``, to a mode of ``F.interpolate``.

    Raises:
        DataError: the filter is unknown.
    """
    name = str(getattr(resample, "value", resample)).lower()
    if name not in _INTERPOLATION_MODES:
        raise DataError(f"resample must be one of {', '.join(_INTERPOLATION_MODES)}, not '{name}'.")
    return _INTERPOLATION_MODES[name]


def resize_with_pad(
    image: torch.Tensor, target_size: tuple[int, int], resample: Any, max_size: int | None = None
) -> torch.Tensor:
    """Resize an image to fit a canvas, preserving its aspect ratio; pad with zeros on the right and at the bottom.

    uint8 images are resized in fixed point, as in Pillow; bilinear results differ from Pillow by at most one level.

    Args:
        image: ``[c, height, width]``.
        target_size: (height, width) of the canvas.
        resample: ``"nearest"``, ``"bilinear"`` or ``"bicubic"``, with antialiasing; or torchvision's InterpolationMode.
        max_size: see :func:`get_inscribed_size`.

    Returns:
        ``[c, target_height, target_width]``, same dtype as the image.

    Raises:
        DataError: ``resample`` is unknown.

    Example:
        >>> from torchtune.modules.transforms.vision import resize_with_pad
        >>> resize_with_pad(torch.ones(1, 2, 2), (3, 4), "bilinear", max_size=2)
        tensor([[[1., 1., 0., 0.],
                 [1., 1., 0., 0.],
                 [0., 0., 0., 0.]]])
    """
    mode = interpolation_mode(resample)
    height, width = get_inscribed_size(image.shape[-2:], target_size, max_size)
    if (height, width) != tuple(image.shape[-2:]):
        antialias = mode != "nearest-exact"  # which takes single pixels
        batch = F.interpolate(image[None], size=(height, width), mode=mode, antialias=antialias)  # [1, c, h, w]
        image = batch[0]
    target_height, target_width = target_size
    return F.pad(image, (0, target_width - width, 0, target_height - height))


def tile_crop(image: torch.Tensor, tile_size: int) -> torch.Tensor:
    """Cut an image into square tiles, row by row.

    Args:
        image: ``[c, height, width]``.
        tile_size: side of a tile, in pixels.

    Returns:
        ``[tiles, c, tile_size, tile_size]``.

    Raises:
        DataError: ``tile_size`` does not divide height and width.

    Example:
        >>> from torchtune.modules.transforms.vision import tile_crop
        >>> tile_crop(torch.arange(8).view(1, 2, 4), tile_size=2)[1]
        tensor([[[2, 3],
                 [6, 7]]])
    """
    channels, height, width = image.shape
    if height % tile_size or width % tile_size:
        raise DataError(f"An image of {height} x {width} cannot be cut into tiles of {tile_size}.")
    rows = height // tile_size
    columns = width // tile_size
    grid = image.view(channels, rows, tile_size, columns, tile_size)
    tiles = grid.permute(1, 3, 0, 2, 4)  # [rows, columns, c, tile_size, tile_size]
    return tiles.reshape(rows * columns, channels, tile_size, tile_size)


class VisionCrossAttentionMask(Transform):
    """Transform that builds the cross-attention mask between text tokens and images.

    An image token and the tokens after it, up to the next image token, attend to the image. The images of adjacent
    image tokens share one range, up to the next image token after them.

    Args:
        tile_size: side of a tile, in pixels.
        patch_size: side of a patch, in pixels.
        image_token_id: id of the image token.

    Example:
        >>> transform = torchtune.modules.transforms.VisionCrossAttentionMask(4, 2, image_token_id=9)
        >>> sample = {"tokens": [1, 9, 2], "encoder_input": {"images": [torch.zeros(1, 3, 4, 4)]}}
        >>> transform(sample)["encoder_mask"][0].int().tolist()
        [[0, 0, 0, 0, 0], [1, 1, 1, 1, 1], [1, 1, 1, 1, 1]]
    """

    def __init__(self, tile_size: int, patch_size: int, image_token_id: int) -> None:
        if tile_size % patch_size:
            raise DataError(f"patch_size={patch_size} does not divide tile_size={tile_size}.")
        self.patches_per_tile = (tile_size // patch_size) ** 2
        self.image_token_id = image_token_id

    def visible(self, tokens: list[int]) -> list[tuple[int, int]]:
        """Return the range of tokens that attend to each image, as (start, exclusive end)."""
        starts = [index for index, token in enumerate(tokens) if token == self.image_token_id]
        ends = [*starts, len(tokens)][1:]
        # From the last image to the first: adjacent images end together, where the last of them ends.
        for image in reversed(range(len(starts) - 1)):
            if starts[image] + 1 == starts[image + 1]:
                ends[image] = ends[image + 1]
        return list(zip(starts, ends, strict=True))

    def __call__(self, sample: Mapping[str, Any], inference: bool = False) -> dict[str, Any]:
        """Add ``encoder_mask``.

        Args:
            sample: ``tokens``, and ``encoder_input`` with ``images``: per image ``[tiles, c, tile_size, tile_size]``.
            inference: ignored.

        Returns:
            The sample with ``encoder_mask``, one bool mask per image: ``[s, tiles * (patches_per_tile + 1)]``, True
            where a token attends. Each tile has an additional position for the class token. The masks are expanded
            views: copy them before writing to them.

        Raises:
            DataError: the numbers of images and image tokens differ.
        """
        tokens = sample["tokens"]
        images = sample["encoder_input"]["images"]
        ranges = self.visible(tokens)
        if len(ranges) != len(images):
            raise DataError(f"the text has {len(ranges)} tokens of images, but there are {len(images)} images")
        positions = torch.arange(len(tokens))[:, None]  # [s, 1]
        masks = []
        for (start, end), tiles in zip(ranges, images, strict=True):
            attends = (positions >= start) & (positions < end)  # [s, 1]
            num_features = len(tiles) * (self.patches_per_tile + 1)  # with a class token for each tile
            masks.append(attends.expand(-1, num_features))
        return {**sample, "encoder_mask": masks}

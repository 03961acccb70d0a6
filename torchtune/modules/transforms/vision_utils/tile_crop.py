"""Cutting an image into tiles."""

import torch

from torchtune.data import DataError


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
        >>> from torchtune.modules.transforms.vision_utils.tile_crop import tile_crop
        >>> tile_crop(torch.arange(8).view(1, 2, 4), tile_size=2)[1]
        tensor([[[2, 3],
                 [6, 7]]])
    """
    channels, height, width = image.shape
    if height % tile_size or width % tile_size:
        raise DataError(f"An image of {height} x {width} cannot be cut into tiles of {tile_size}.")
    tiles = image.view(channels, height // tile_size, tile_size, width // tile_size, tile_size)
    return tiles.permute(1, 3, 0, 2, 4).reshape(-1, channels, tile_size, tile_size)

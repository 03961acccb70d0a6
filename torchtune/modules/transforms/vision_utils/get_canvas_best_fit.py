"""Choice of the tile canvas for an image."""

import torch


def find_supported_resolutions(max_num_tiles: int, tile_size: int) -> list[tuple[int, int]]:
    """Return the sizes of all canvases of at most ``max_num_tiles`` square tiles.

    Args:
        max_num_tiles: maximum number of tiles in a canvas.
        tile_size: side of a tile, in pixels.

    Returns:
        (height, width) of each canvas, in pixels.

    Example:
        >>> from torchtune.modules.transforms.vision_utils.get_canvas_best_fit import find_supported_resolutions
        >>> find_supported_resolutions(max_num_tiles=2, tile_size=224)
        [(224, 224), (224, 448), (448, 224)]
    """
    return [
        (rows * tile_size, columns * tile_size)
        for rows in range(1, max_num_tiles + 1)
        for columns in range(1, max_num_tiles // rows + 1)
    ]


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
        >>> from torchtune.modules.transforms.vision_utils.get_canvas_best_fit import get_canvas_best_fit
        >>> canvases = torch.tensor([[224, 672], [672, 224], [224, 448], [448, 224], [224, 224]])
        >>> get_canvas_best_fit(torch.zeros(3, 200, 300), canvases, resize_to_max_canvas=False)
        (224, 448)
    """
    size = torch.tensor(image.shape[-2:], dtype=torch.float64)
    scales = (possible_resolutions / size).amin(dim=1)
    enlarging = scales >= 1
    if not enlarging.any() or resize_to_max_canvas:
        best = scales.max()
    else:
        best = scales[enlarging].min()
    chosen = possible_resolutions[scales == best]
    height, width = chosen[chosen.prod(dim=1).argmin()].tolist()
    return height, width

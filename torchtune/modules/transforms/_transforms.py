"""Transforms of samples with images."""

from collections.abc import Mapping
from typing import Any

import torch

from torchtune.data import DataError, Transform


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
        starts = [i for i, token in enumerate(tokens) if token == self.image_token_id]
        ends = [*starts, len(tokens)][1:]
        for i in reversed(range(len(starts) - 1)):
            if starts[i] + 1 == starts[i + 1]:
                ends[i] = ends[i + 1]
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
        tokens, images = sample["tokens"], sample["encoder_input"]["images"]
        visible = self.visible(tokens)
        if len(visible) != len(images):
            raise DataError(f"the text has {len(visible)} tokens of images, but there are {len(images)} images")
        positions = torch.arange(len(tokens))[:, None]
        return {
            **sample,
            "encoder_mask": [
                ((positions >= start) & (positions < end)).expand(-1, len(tiles) * (self.patches_per_tile + 1))
                for (start, end), tiles in zip(visible, images, strict=True)
            ],
        }

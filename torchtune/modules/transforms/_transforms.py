"""Transforms of samples with images."""

from collections.abc import Mapping
from typing import Any

import torch

from torchtune.data import DataError, Transform


class VisionCrossAttentionMask(Transform):
    """Which tokens of a text attend to which image.

    An image is visible from its token to the token of the next image. Images whose tokens are adjacent are visible
    together.

    Args:
        tile_size: side of a tile, in pixels.
        patch_size: side of a patch, in pixels.
        image_token_id: token that stands for an image.

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
        """The first token that sees each image, and the one behind the last."""
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
            inference: has no effect.

        Returns:
            the sample with a mask per image, bool ``[s, tiles * (patches_per_tile + 1)]``, True where a token attends
            (one position more than patches: the class token). It is a view that takes ``s`` bytes: copy it before
            writing to it.

        Raises:
            DataError: there are more, or less, images than tokens of images.
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

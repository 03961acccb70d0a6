"""CLIP's position embeddings of patches in a tile, and of tiles in an image."""

import torch
from torch import Tensor, nn


def _tokens_per_tile(tile_size: int, patch_size: int) -> int:
    return (tile_size // patch_size) ** 2 + 1


def _of_tiles(table: Tensor, aspect_ratio: Tensor, tiles: int) -> Tensor:
    """Entries ``[n, tiles, ...]`` of a table ``[rows, columns, ...]`` for the tiles of n images; 0 for padding."""
    number = torch.arange(tiles, device=aspect_ratio.device)
    is_real = number < aspect_ratio.prod(-1, keepdim=True)
    width = aspect_ratio[:, 1:].clamp(min=1)
    found = table[(number // width) * is_real, (number % width) * is_real]
    return found * is_real[(...,) + (None,) * (found.dim() - 2)]


class TokenPositionalEmbedding(nn.Module):
    """Position embedding of tokens in a tile, ``positional_embedding`` ``[tokens, d]``.

    Args:
        embed_dim: d.
        tile_size: width and height of a tile, in pixels.
        patch_size: width and height of a patch.
    """

    def __init__(self, embed_dim: int, tile_size: int, patch_size: int) -> None:
        super().__init__()
        tokens = _tokens_per_tile(tile_size, patch_size)
        self.positional_embedding = nn.Parameter(torch.randn(tokens, embed_dim) * embed_dim**-0.5)

    def forward(self, x: Tensor, *args: Tensor) -> Tensor:
        """Add the embeddings to ``[..., tokens, d]``; further arguments are ignored."""
        return x + self.positional_embedding


class TiledTokenPositionalEmbedding(nn.Module):
    """Position embeddings of tokens in a tile and in the full image, weighted by a tanh gate.

    Args:
        max_num_tiles: maximum number of tiles per image.
        embed_dim: d.
        tile_size: width and height of a tile, in pixels.
        patch_size: width and height of a patch.
    """

    def __init__(self, max_num_tiles: int, embed_dim: int, tile_size: int, patch_size: int) -> None:
        super().__init__()
        self.max_num_tiles = max_num_tiles
        shape, scale = (_tokens_per_tile(tile_size, patch_size), embed_dim), embed_dim**-0.5
        self.local_token_positional_embedding = nn.Parameter(torch.randn(shape) * scale)
        everywhere = torch.randn(max_num_tiles, max_num_tiles, *shape) * scale
        self.global_token_positional_embedding = nn.Parameter(everywhere)
        self.gate = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor, aspect_ratio: Tensor) -> Tensor:
        """Add the embeddings.

        Args:
            x: ``[n, tiles, tokens, d]`` for n images.
            aspect_ratio: int64 ``[n, 2]``: (height, width) of each image in tiles; further tiles are padding.
        """
        gate = self.gate.tanh()
        x = x + self.local_token_positional_embedding * (1 - gate)
        return x + _of_tiles(self.global_token_positional_embedding, aspect_ratio, x.shape[1]) * gate


class TilePositionalEmbedding(nn.Module):
    """Position embedding of a tile in its image, with a tanh gate.

    Args:
        max_num_tiles: maximum number of tiles per image.
        embed_dim: d.
    """

    def __init__(self, max_num_tiles: int, embed_dim: int) -> None:
        super().__init__()
        self.max_num_tiles = max_num_tiles
        table = torch.randn(max_num_tiles, max_num_tiles, 1, embed_dim) * embed_dim**-0.5
        self.embedding = nn.Parameter(table)
        self.gate = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor, aspect_ratio: Tensor) -> Tensor:
        """Add the embeddings to ``[n, tiles, tokens, d]``; see :meth:`TiledTokenPositionalEmbedding.forward`."""
        return x + _of_tiles(self.embedding, aspect_ratio, x.shape[1]) * self.gate.tanh()

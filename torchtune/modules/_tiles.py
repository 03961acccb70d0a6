"""Batches of image tiles: their layout, padding and attention mask."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from torchtune.modules._outside_graphs import outside_graphs
from torchtune.utils import to_device


@dataclass(frozen=True)
class TileMask:
    """Attention mask of image tiles that is not materialized.

    An image's real positions come before its padding. Real positions attend to all positions, padding only to real
    ones: Llama 3.2 Vision was trained this way, and its features depend on it.

    Attributes:
        groups: (number of images, real positions of each), in the order of the batch.
    """

    groups: tuple[tuple[int, int], ...]

    @outside_graphs  # so that new image sizes do not recompile
    def attend(self, q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0) -> Tensor:
        """Compute attention of queries, keys and values ``[b, s, n, h]``; the result has the same shape."""
        found, start = [], 0
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        for images, real in self.groups:
            rows = slice(start, start + images)
            parts = [F.scaled_dot_product_attention(q[rows, :, :real], k[rows], v[rows], dropout_p=dropout_p)]
            if real < q.shape[2]:
                seen = k[rows, :, :real], v[rows, :, :real]
                parts.append(F.scaled_dot_product_attention(q[rows, :, real:], *seen, dropout_p=dropout_p))
            found.append(torch.cat(parts, dim=2) if len(parts) > 1 else parts[0])
            start += images
        return (torch.cat(found) if len(found) > 1 else found[0]).transpose(1, 2)


@dataclass(frozen=True)
class Tiles:
    """Layout of a batch of image tiles as encoder sequences.

    A sequence ``[max_num_tiles * (tokens + padding), d]`` has the tokens of all tiles, then the padding of all tiles.
    Images are sorted by their number of tiles.

    Attributes:
        shape: (batch size, images per row, tiles per image) of the input.
        max_num_tiles: tiles per sequence; missing tiles of an image are padding.
        tokens: tokens per tile.
        padding: padding positions per tile.
        order: int64 ``[b * images]``, indices of the sorted images; None: the order of the input.
        mask: attention mask of the sequences.
        ratios: int64 ``[b * images, 2]``: (height, width) of each sorted image in tiles.
    """

    shape: tuple[int, int, int]
    max_num_tiles: int
    tokens: int
    padding: int
    order: Tensor | None
    mask: TileMask
    ratios: Tensor

    @classmethod
    def of(cls, images: Tensor, aspect_ratio: Tensor, max_num_tiles: int, tokens: int, multiple: int = 1) -> "Tiles":
        """Compute the layout of a batch of images.

        Args:
            images: ``[b, images, tiles, c, h, w]``.
            aspect_ratio: int64 ``[b, images, 2]``: (height, width) of each image in tiles; 0 for padding images.
            max_num_tiles: tiles per sequence.
            tokens: tokens per tile.
            multiple: pad the positions of a tile to a multiple of this.

        Raises:
            ValueError: an image has more tiles than ``images`` or than ``max_num_tiles``.
        """
        b, per_row, tiles = images.shape[:3]
        if tiles > max_num_tiles:
            raise ValueError(f"Images of {tiles} tiles are too large for an encoder of {max_num_tiles} tiles.")
        ratios = aspect_ratio.reshape(-1, 2)
        counts = [height * width for height, width in ratios.tolist()]
        if max(counts) > tiles:
            largest = tuple(ratios[counts.index(max(counts))].tolist())
            raise ValueError(f"aspect_ratio says {largest} for an image of which {tiles} tiles are given.")
        counts = [max(count, 1) for count in counts]
        order = sorted(range(len(counts)), key=counts.__getitem__)
        kept = order == list(range(len(counts)))
        order = None if kept else to_device(order, images.device)
        groups = tuple((counts.count(count), count * tokens) for count in sorted(set(counts)))
        ratios = ratios.to(images.device)
        ratios = ratios if order is None else ratios[order]
        return cls((b, per_row, tiles), max_num_tiles, tokens, -tokens % multiple, order, TileMask(groups), ratios)

    def pad(self, x: Tensor) -> Tensor:
        """Pad and sort patches ``[b * images * tiles, n, d]``: ``[b * images, max_num_tiles, n, d]``.

        Padding tiles are zero.
        """
        x = x.unflatten(0, (-1, self.shape[2]))
        x = F.pad(x, (0, 0, 0, 0, 0, self.max_num_tiles - self.shape[2]))
        return x if self.order is None else x[self.order]

    def join(self, tokens: Tensor, padding: Tensor | None = None) -> Tensor:
        """Concatenate tokens ``[n, max_num_tiles, tokens, d]`` and padding, by default zeros, to ``[n, s, d]``."""
        if padding is None:
            padding = tokens.new_zeros(*tokens.shape[:2], self.padding, tokens.shape[3])
        return torch.cat([tokens.flatten(1, 2), padding.flatten(1, 2)], dim=1)

    def split(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Split sequences ``[n, s, d]`` into tokens and padding; the inverse of :meth:`join`."""
        sizes = self.max_num_tiles * self.tokens, self.max_num_tiles * self.padding
        return tuple(part.unflatten(1, (self.max_num_tiles, -1)) for part in x.split(sizes, dim=1))

    def unpad(self, x: Tensor) -> Tensor:
        """Return the tokens ``[b, images, tiles, tokens, d]`` of sequences ``[n, s, d]``, in the input's order."""
        x = self.split(x)[0][:, : self.shape[2]]
        return (x if self.order is None else x[self.order.argsort()]).unflatten(0, self.shape[:2])

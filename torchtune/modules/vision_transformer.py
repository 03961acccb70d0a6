"""Vision transformer for tiled images: CLIP's, whose tiles attend to each other.

It computes layer by layer what :class:`torchtune.modules.vision_tower.VisionTower` does, with the same layers, but the
two differ in what a sequence is. The tower has a ragged list of patches, and boundaries between images that attention
does not cross. Here the tiles of an image are one sequence, padded to the number of tiles in pre-training; the padding
takes part in attention (:class:`TileMask`), and the features of checkpoints depend on it.
"""

import copy
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torchtune.modules.kernels.attention import TileMask
from torchtune.modules.rms_norm import Fp32LayerNorm
from torchtune.utils import to_device


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
        batch_size, images_per_row, num_tiles = images.shape[:3]
        if num_tiles > max_num_tiles:
            raise ValueError(f"Images of {num_tiles} tiles are too large for an encoder of {max_num_tiles} tiles.")
        ratios = aspect_ratio.reshape(-1, 2)  # [b * images, 2]
        counts = []  # of tiles, by image
        for height, width in ratios.tolist():
            if height * width > num_tiles:
                raise ValueError(
                    f"aspect_ratio says {(height, width)} for an image of which {num_tiles} tiles are given."
                )
            counts.append(max(height * width, 1))  # a padding image is one tile
        # Sorted, images of one size are consecutive, and the mask attends to them at once.
        sorted_images = sorted(range(len(counts)), key=counts.__getitem__)
        order = None
        ratios = ratios.to(images.device)
        if sorted_images != list(range(len(counts))):
            order = to_device(sorted_images, images.device)
            ratios = ratios[order]
        groups = tuple((counts.count(count), count * tokens) for count in sorted(set(counts)))
        return cls(
            shape=(batch_size, images_per_row, num_tiles),
            max_num_tiles=max_num_tiles,
            tokens=tokens,
            padding=-tokens % multiple,
            order=order,
            mask=TileMask(groups),
            ratios=ratios,
        )

    def pad(self, x: Tensor) -> Tensor:
        """Pad and sort patches ``[b * images * tiles, n, d]``: ``[b * images, max_num_tiles, n, d]``.

        Padding tiles are zero.
        """
        num_tiles = self.shape[2]
        x = x.unflatten(0, (-1, num_tiles))
        x = F.pad(x, (0, 0, 0, 0, 0, self.max_num_tiles - num_tiles))
        return x if self.order is None else x[self.order]

    def join(self, tokens: Tensor, padding: Tensor | None = None) -> Tensor:
        """Concatenate tokens ``[n, max_num_tiles, tokens, d]`` and padding, by default zeros, to ``[n, s, d]``."""
        if padding is None:
            num_images, num_tiles, _, width = tokens.shape
            padding = tokens.new_zeros(num_images, num_tiles, self.padding, width)
        return torch.cat([tokens.flatten(1, 2), padding.flatten(1, 2)], dim=1)

    def split(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Split sequences ``[n, s, d]`` into tokens and padding; the inverse of :meth:`join`."""
        tokens, padding = x.split([self.max_num_tiles * self.tokens, self.max_num_tiles * self.padding], dim=1)
        return tokens.unflatten(1, (self.max_num_tiles, -1)), padding.unflatten(1, (self.max_num_tiles, -1))

    def unpad(self, x: Tensor) -> Tensor:
        """Return the tokens ``[b, images, tiles, tokens, d]`` of sequences ``[n, s, d]``, in the input's order."""
        batch_size, images_per_row, num_tiles = self.shape
        tokens, _ = self.split(x)
        tokens = tokens[:, :num_tiles]  # [b * images, tiles, tokens, d]
        if self.order is not None:
            tokens = tokens[self.order.argsort()]
        return tokens.unflatten(0, (batch_size, images_per_row))


class CLSEmbedding(nn.Module):
    """Learned CLS token ``weight`` ``[d]`` that is prepended or appended to the patches of every tile.

    Args:
        embed_dim: width d of the token.
        append: append the token to the patches instead of prepending it.
    """

    def __init__(self, embed_dim: int, append: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(embed_dim) * embed_dim**-0.5)
        self.append = append

    def forward(self, x: Tensor) -> Tensor:
        """Concatenate the CLS token: ``[..., patches, d]`` to ``[..., patches + 1, d]``."""
        token = self.weight.to(x.dtype).expand(*x.shape[:-2], 1, -1)
        return torch.cat([x, token] if self.append else [token, x], dim=-2)


class CLSProjection(nn.Module):
    """Projection of the CLS token of every tile.

    Args:
        embed_dim: width d of the CLS token.
        cls_output_dim: width of the output.
        is_last: whether the CLS token comes after the patches.
    """

    def __init__(self, embed_dim: int, cls_output_dim: int, is_last: bool = False) -> None:
        super().__init__()
        self.proj = nn.Linear(embed_dim, cls_output_dim, bias=False)
        self.is_last = is_last

    def forward(self, x: Tensor) -> Tensor:
        """Project the CLS token: ``[b, images, tiles, tokens, d]`` to ``[b, images, tiles, 1, cls_output_dim]``."""
        return self.proj(x[..., -1:, :] if self.is_last else x[..., :1, :])


class VisionTransformer(nn.Module):
    """Vision transformer over the patches of all tiles of an image (Dosovitskiy et al. 2020, arXiv:2010.11929).

    The tiles of an image attend to each other. Images are padded internally to the number of tiles in pre-training, so
    that the features of an image do not depend on the other images of the batch.

    Args:
        patch_size: width and height of a patch, in pixels.
        tile_size: width and height of a tile, in pixels.
        num_layers: number of layers.
        embed_dim: width d of the hidden states.
        layer: layer that is copied ``num_layers`` times.
        token_pos_embedding: adds position embeddings of the tokens in a tile:
            ``[n, tiles, tokens, d], aspect_ratio [n, 2] -> [n, tiles, tokens, d]``.
        pre_tile_pos_embed: adds position embeddings of the tiles before the layers, with the same signature.
        post_tile_pos_embed: adds position embeddings of the tiles after the layers, with the same signature.
        cls_projection: projection of the output.
        out_indices: indices of the layers with inputs that are also returned.
        in_channels: number of channels of an image.
        append_cls_token: whether the CLS token comes after the patches.
        norm_eps: eps of the norms before and after the layers.

    Raises:
        ValueError: ``patch_size`` does not divide ``tile_size``, or an index in ``out_indices`` is out of range.

    Example:
        >>> sizes = {"embed_dim": 8, "num_layers": 1, "num_heads": 2}
        >>> encoder = torchtune.models.clip.clip_vision_encoder(tile_size=4, patch_size=2, **sizes)
        >>> features, hidden = encoder(torch.ones(1, 1, 2, 3, 4, 4), torch.tensor([[[1, 2]]]))
        >>> features.shape
        torch.Size([1, 1, 2, 5, 8])
    """

    def __init__(
        self,
        patch_size: int,
        tile_size: int,
        num_layers: int,
        embed_dim: int,
        layer: nn.Module,
        token_pos_embedding: nn.Module,
        pre_tile_pos_embed: nn.Module | None = None,
        post_tile_pos_embed: nn.Module | None = None,
        cls_projection: nn.Module | None = None,
        out_indices: list[int] | None = None,
        in_channels: int = 3,
        append_cls_token: bool = False,
        norm_eps: float = 1e-5,
    ) -> None:
        super().__init__()
        if tile_size < 1 or patch_size < 1 or tile_size % patch_size:
            raise ValueError(f"tile_size ({tile_size}) must be a multiple of patch_size ({patch_size}).")
        for index in out_indices or ():
            if not 0 <= index < num_layers:
                raise ValueError(f"out_indices has {index}, but the layers are 0 to {num_layers - 1}.")
        self.patches_per_tile = (tile_size // patch_size) ** 2
        self.out_indices = list(out_indices or ())
        self.max_num_tiles = getattr(token_pos_embedding, "max_num_tiles", None)
        self.pre_tile_pos_embed = pre_tile_pos_embed
        self.post_tile_pos_embed = post_tile_pos_embed
        self.token_pos_embedding = token_pos_embedding
        self.cls_projection = cls_projection
        self.layers = nn.ModuleList([copy.deepcopy(layer) for _ in range(num_layers)])
        self.conv = nn.Conv2d(in_channels, embed_dim, patch_size, stride=patch_size, bias=False)
        self.ln_pre = Fp32LayerNorm(embed_dim, eps=norm_eps)
        self.ln_post = Fp32LayerNorm(embed_dim, eps=norm_eps)
        self.cls_token_embedding = CLSEmbedding(embed_dim, append_cls_token)

    def get_image_tokens_per_tile(self) -> int:
        """Return the number of patches of a tile, plus one for the CLS token."""
        return self.patches_per_tile + 1

    def forward(self, images: Tensor, aspect_ratio: Tensor | None = None) -> tuple[Tensor, list[Tensor]]:
        """Encode images.

        Args:
            images: ``[b, images, tiles, c, tile_size, tile_size]``.
            aspect_ratio: int64 ``[b, images, 2]``: (height, width) of each image in tiles; by default one tile.

        Returns:
            Features ``[b, images, tiles, tokens, d]``, projected by ``cls_projection`` if there is one, and the inputs
            of the layers ``out_indices``, ``[b, images, tiles, tokens, d]`` each.

        Raises:
            ValueError: the shape of an argument is invalid.
        """
        x, hidden_states, tiles = self.encode(images, aspect_ratio)
        features = tiles.unpad(x)
        if self.cls_projection is not None:
            features = self.cls_projection(features)
        return features, [tiles.unpad(hidden) for hidden in hidden_states]

    def encode(self, images: Tensor, aspect_ratio: Tensor | None = None) -> tuple[Tensor, list[Tensor], Tiles]:
        """Encode images without removing the padding: returns sequences, hidden states and their layout."""
        if images.dim() != 6:
            raise ValueError(f"images have the shape {list(images.shape)}: give [b, images, tiles, c, h, w].")
        batch_size, images_per_row, num_tiles = images.shape[:3]
        if aspect_ratio is None:
            if num_tiles > 1:
                raise ValueError("aspect_ratio must say how the tiles of an image lie: give [b, images, 2].")
            aspect_ratio = torch.ones(batch_size, images_per_row, 2, dtype=torch.int64, device=images.device)
        patches = self.conv(images.flatten(0, 2).to(self.conv.weight.dtype))  # [b * images * tiles, d, rows, columns]
        patches = patches.flatten(2).transpose(1, 2)  # [b * images * tiles, patches, d]
        if patches.shape[1] != self.patches_per_tile:
            raise ValueError(f"A tile has {patches.shape[1]} patches, but the encoder needs {self.patches_per_tile}.")
        tokens_per_tile = self.get_image_tokens_per_tile()
        if self.max_num_tiles is None:
            tiles = Tiles.of(images, aspect_ratio, num_tiles, tokens_per_tile)
        else:
            # Checkpoints were trained with max_num_tiles tiles per image, and positions padded to a multiple of 8.
            tiles = Tiles.of(images, aspect_ratio, self.max_num_tiles, tokens_per_tile, multiple=8)

        x = tiles.pad(patches)  # [n, max_num_tiles, patches, d] of n images
        if self.pre_tile_pos_embed is not None:
            x = self.pre_tile_pos_embed(x, tiles.ratios)
        x = self.cls_token_embedding(x)  # [n, max_num_tiles, tokens, d]
        x = self.ln_pre(self.token_pos_embedding(x, tiles.ratios))

        x = tiles.join(x)  # [n, s, d]
        hidden_states = []
        for index, layer in enumerate(self.layers):
            if index in self.out_indices:
                hidden_states.append(x)
            x = layer(x, mask=tiles.mask)
        x = self.ln_post(x)
        if self.post_tile_pos_embed is not None:
            # Tiles have an embedding, and so does the padding of a tile.
            tokens, padding = tiles.split(x)
            tokens = self.post_tile_pos_embed(tokens, tiles.ratios)
            padding = self.post_tile_pos_embed(padding, tiles.ratios)
            x = tiles.join(tokens, padding)
        return x, hidden_states, tiles

"""Vision transformer for tiled images."""

import copy

import torch
from torch import Tensor, nn

from torchtune.modules._tiles import Tiles
from torchtune.modules.rms_norm import Fp32LayerNorm


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
        wrong = [index for index in out_indices or () if not 0 <= index < num_layers]
        if wrong:
            raise ValueError(f"out_indices has {wrong[0]}, but the layers are 0 to {num_layers - 1}.")
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
        x, hidden, tiles = self.encode(images, aspect_ratio)
        x = tiles.unpad(x)
        return x if self.cls_projection is None else self.cls_projection(x), [tiles.unpad(h) for h in hidden]

    def encode(self, images: Tensor, aspect_ratio: Tensor | None = None) -> tuple[Tensor, list[Tensor], Tiles]:
        """Encode images without removing the padding: returns sequences, hidden states and their layout."""
        if images.dim() != 6:
            raise ValueError(f"images have the shape {list(images.shape)}: give [b, images, tiles, c, h, w].")
        b, per_row, given = images.shape[:3]
        if aspect_ratio is None:
            if given > 1:
                raise ValueError("aspect_ratio must say how the tiles of an image lie: give [b, images, 2].")
            aspect_ratio = torch.ones(b, per_row, 2, dtype=torch.int64, device=images.device)
        patches = self.conv(images.flatten(0, 2).to(self.conv.weight.dtype)).flatten(2).transpose(1, 2)
        if patches.shape[1] != self.patches_per_tile:
            raise ValueError(f"A tile has {patches.shape[1]} patches, but the encoder needs {self.patches_per_tile}.")
        tokens = self.get_image_tokens_per_tile()
        # Tiled checkpoints were trained with max_num_tiles tiles per image, and positions padded to a multiple of 8.
        size = (given, tokens, 1) if self.max_num_tiles is None else (self.max_num_tiles, tokens, 8)
        tiles = Tiles.of(images, aspect_ratio, *size)
        x = tiles.pad(patches)
        if self.pre_tile_pos_embed is not None:
            x = self.pre_tile_pos_embed(x, tiles.ratios)
        x = self.ln_pre(self.token_pos_embedding(self.cls_token_embedding(x), tiles.ratios))
        x, hidden = tiles.join(x), []
        for index, layer in enumerate(self.layers):
            if index in self.out_indices:
                hidden.append(x)
            x = layer(x, mask=tiles.mask)
        x = self.ln_post(x)
        if self.post_tile_pos_embed is not None:
            x = tiles.join(*(self.post_tile_pos_embed(part, tiles.ratios) for part in tiles.split(x)))
        return x, hidden, tiles

"""CLIP over the tiles of an image: its encoder and its image transform.

Only Llama 3.2 Vision and configs of earlier releases need this encoder (https://arxiv.org/abs/2103.00020); other models
have the tower of :class:`torchtune.models.VisionDescription`. Both have the same layers (:func:`encoder_layer`). The
parts of checkpoints that the tower does not have are here:

- position embeddings of a tile in its image, with gates, beside those of a patch in its tile;
- a class token before the patches, and its projection;
- attention across the tiles of an image and their padding (:class:`torchtune.modules.VisionTransformer`);
- resizing with torch instead of Pillow, whose values differ by a level (:class:`CLIPImageTransform`).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from torchtune._lazy import former_package
from torchtune.data import DataError, Transform, read_pixels
from torchtune.models._build_vision import tower_layer
from torchtune.models._description import ModelError, VisionDescription
from torchtune.models._image_processors import CLIP_MEAN, CLIP_STD
from torchtune.modules.feed_forward import FeedForward
from torchtune.modules.rms_norm import TanhGate
from torchtune.modules.transformer import TransformerSelfAttentionLayer
from torchtune.modules.transforms.vision import (
    find_supported_resolutions,
    get_canvas_best_fit,
    interpolation_mode,
    resize_with_pad,
    tile_crop,
)
from torchtune.modules.vision_transformer import CLSProjection, VisionTransformer


def _tokens_per_tile(tile_size: int, patch_size: int) -> int:
    return (tile_size // patch_size) ** 2 + 1  # patches, and the class token


def _tile_embeddings(table: Tensor, aspect_ratio: Tensor, num_tiles: int) -> Tensor:
    """Return entries ``[n, tiles, t, d]`` of a table ``[rows, columns, t, d]`` of the tiles of n images; 0 for padding.

    Args:
        table: position embeddings, of all tokens of a tile (t = tokens) or of the tile (t = 1).
        aspect_ratio: int64 ``[n, 2]``: (height, width) of each image in tiles.
        num_tiles: number of tiles of an image with its padding.
    """
    index = torch.arange(num_tiles, device=aspect_ratio.device)  # [tiles]
    is_tile = index < aspect_ratio.prod(-1, keepdim=True)  # [n, tiles]; False for padding
    width = aspect_ratio[:, 1:].clamp(min=1)  # [n, 1]
    row = (index // width) * is_tile  # padding takes any entry of the table, here the first one
    column = (index % width) * is_tile
    return table[row, column] * is_tile[..., None, None]  # [n, tiles, t, d]


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
        tokens = _tokens_per_tile(tile_size, patch_size)
        std = embed_dim**-0.5
        local_table = torch.randn(tokens, embed_dim) * std
        global_table = torch.randn(max_num_tiles, max_num_tiles, tokens, embed_dim) * std
        self.local_token_positional_embedding = nn.Parameter(local_table)
        self.global_token_positional_embedding = nn.Parameter(global_table)
        self.gate = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor, aspect_ratio: Tensor) -> Tensor:
        """Add the embeddings.

        Args:
            x: ``[n, tiles, tokens, d]`` for n images.
            aspect_ratio: int64 ``[n, 2]``: (height, width) of each image in tiles; further tiles are padding.
        """
        gate = self.gate.tanh()
        x = x + self.local_token_positional_embedding * (1 - gate)
        return x + _tile_embeddings(self.global_token_positional_embedding, aspect_ratio, x.shape[1]) * gate


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
        return x + _tile_embeddings(self.embedding, aspect_ratio, x.shape[1]) * self.gate.tanh()


def clip_mlp(in_dim: int, out_dim: int, hidden_dim: int, activation: nn.Module) -> FeedForward:
    """Build CLIP's feed-forward layer: two projections with biases. For recipes of earlier releases alone.

    Args:
        in_dim: input size.
        out_dim: output size.
        hidden_dim: intermediate size.
        activation: activation between the projections.
    """
    return FeedForward(
        gate_proj=nn.Linear(in_dim, hidden_dim),
        down_proj=nn.Linear(hidden_dim, out_dim),
        activation=activation,
    )


def encoder_layer(
    embed_dim: int,
    num_heads: int,
    activation: Callable[[], nn.Module],
    *,
    attn_bias: bool = False,
    norm_eps: float = 1e-5,
    is_gated: bool = False,
) -> TransformerSelfAttentionLayer:
    """Build a layer of an image encoder with bidirectional attention.

    Args:
        embed_dim: d.
        num_heads: number of heads.
        activation: makes the activation of the feed-forward.
        attn_bias: whether the projections of attention have biases.
        norm_eps: eps of the norms.
        is_gated: whether tanh gates scale the outputs of attention and feed-forward.
    """
    description = VisionDescription(
        num_layers=1,
        embed_dim=embed_dim,
        intermediate_dim=4 * embed_dim,
        num_heads=num_heads,
        attn_bias=attn_bias,
        attn_output_bias=attn_bias,
        norm_eps=norm_eps,
        patch_size=1,  # a layer alone has neither patches nor a projector
        output_dim=embed_dim,
    )
    layer = tower_layer(description)
    # A description has no other activations than those of checkpoints, and no gates.
    layer.mlp.activation = activation()
    if is_gated:
        layer.sa_scale = TanhGate()
        layer.mlp_scale = TanhGate()
    return layer


def clip_vision_encoder(
    tile_size: int,
    patch_size: int,
    embed_dim: int,
    num_layers: int,
    num_heads: int,
    activation: Callable[[], nn.Module] = nn.SiLU,
    cls_output_dim: int = 512,
    attn_bias: bool = True,
    use_rope: bool = False,
    out_indices: list[int] | None = None,
    output_cls_projection: bool = False,
    max_num_tiles: int = 4,
    in_channels: int = 3,
    append_cls_token: bool = False,
    use_tile_pos_embed: bool = True,
    norm_eps: float = 1e-5,
) -> VisionTransformer:
    """Build CLIP's vision encoder.

    Args:
        tile_size: width and height of a tile, in pixels.
        patch_size: width and height of a patch.
        embed_dim: d.
        num_layers: number of layers.
        num_heads: heads per layer.
        activation: makes the activation of the feed-forward.
        cls_output_dim: size of the projected CLS token.
        attn_bias: whether the projections of attention have biases.
        use_rope: must be False.
        out_indices: indices of layers whose inputs are also returned.
        output_cls_projection: whether the output is the projected CLS token of every tile.
        max_num_tiles: maximum number of tiles per image.
        in_channels: channels of an image.
        append_cls_token: whether the CLS token comes after the patches.
        use_tile_pos_embed: whether tiles have position embeddings.
        norm_eps: eps of the norms.

    Raises:
        ModelError: ``use_rope`` is True, or ``num_heads`` does not divide ``embed_dim``.
    """
    if use_rope:  # accepted for configs of earlier releases
        raise ModelError("use_rope: encoders with rotary positions (Llama 4) are not in this release: set it to False.")
    # The order in which modules are built decides about their random weights. VisionTransformer copies the layer.
    layer = encoder_layer(embed_dim, num_heads, activation, attn_bias=attn_bias, norm_eps=norm_eps)
    token_pos_embedding: nn.Module
    pre_tile_pos_embed = None
    post_tile_pos_embed = None
    if max_num_tiles > 1:  # an image of one tile needs no positions of tiles
        token_pos_embedding = TiledTokenPositionalEmbedding(max_num_tiles, embed_dim, tile_size, patch_size)
        if use_tile_pos_embed:
            pre_tile_pos_embed = TilePositionalEmbedding(max_num_tiles, embed_dim)
            post_tile_pos_embed = TilePositionalEmbedding(max_num_tiles, embed_dim)
    else:
        token_pos_embedding = TokenPositionalEmbedding(embed_dim, tile_size, patch_size)
    cls_projection = None
    if output_cls_projection:
        cls_projection = CLSProjection(embed_dim, cls_output_dim, is_last=append_cls_token)
    return VisionTransformer(
        patch_size=patch_size,
        tile_size=tile_size,
        num_layers=num_layers,
        embed_dim=embed_dim,
        layer=layer,
        token_pos_embedding=token_pos_embedding,
        pre_tile_pos_embed=pre_tile_pos_embed,
        post_tile_pos_embed=post_tile_pos_embed,
        cls_projection=cls_projection,
        out_indices=out_indices,
        in_channels=in_channels,
        append_cls_token=append_cls_token,
        norm_eps=norm_eps,
    )


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
        interpolation_mode(resample)  # raises for an unknown filter
        self.possible_resolutions = torch.tensor(possible_resolutions).reshape(-1, 2)
        self.mean = None if image_mean is None else torch.tensor(image_mean)[:, None, None]
        self.std = None if image_std is None else torch.tensor(image_std)[:, None, None]
        self.tile_size = tile_size
        self.dtype = dtype
        self.resample = resample
        self.resize_to_max_canvas = resize_to_max_canvas
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
            DataError: the image cannot be read, the tensor has a wrong shape, dtype or range, or the canvas that fits
                best does not consist of whole tiles.
        """
        image = _three_channels(sample["image"])  # [3, height, width]
        canvas = get_canvas_best_fit(image, self.possible_resolutions, self.resize_to_max_canvas)
        if canvas[0] % self.tile_size or canvas[1] % self.tile_size:
            raise DataError(
                f"possible_resolutions: {canvas[0]} x {canvas[1]}, which fits an image of {image.shape[1]} x "
                f"{image.shape[2]} best, is not of whole tiles of {self.tile_size}."
            )
        pixels = resize_with_pad(image, canvas, self.resample, self.max_size)
        if pixels.dtype == torch.uint8:
            pixels = pixels.float() / 255
        if self.mean is not None:
            pixels = (pixels - self.mean) / self.std
        return {
            **sample,
            "image": tile_crop(pixels.to(self.dtype), self.tile_size),
            "aspect_ratio": torch.tensor(canvas) // self.tile_size,
        }


def _three_channels(image: Any) -> Tensor:
    """Convert to uint8 or float32 ``[3, height, width]``. Raises :class:`DataError` for invalid images."""
    if not isinstance(image, Tensor):
        return read_pixels(image)
    if image.dim() != 3 or image.shape[0] not in (1, 3) or not image.numel():
        raise DataError(f"an image must be a tensor [c, height, width] of 1 or 3 channels, not {tuple(image.shape)}")
    if image.dtype != torch.uint8:
        if not image.is_floating_point():
            raise DataError(f"an image must be of uint8 or floating point, not {image.dtype}")
        low, high = (float(value) for value in image.aminmax())
        if not 0 <= low <= high <= 1:  # also for NaN
            raise DataError(f"an image of floating point must be from 0 to 1, not {low:g} to {high:g}: uint8 is to 255")
        image = image.float()
    return image.expand(3, -1, -1)


def clip_vit_224_transform() -> CLIPImageTransform:
    """Build the image transform of CLIP ViT at 224 pixels: one tile, to which the image is scaled."""
    return CLIPImageTransform(
        image_mean=CLIP_MEAN,
        image_std=CLIP_STD,
        tile_size=224,
        max_num_tiles=1,
        resample="bilinear",
        resize_to_max_canvas=True,
    )


__all__ = [
    "CLIPImageTransform",
    "TilePositionalEmbedding",
    "TiledTokenPositionalEmbedding",
    "TokenPositionalEmbedding",
    "clip_mlp",
    "clip_vision_encoder",
]
__getattr__, __path__ = former_package(__name__)

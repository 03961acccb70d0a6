"""Component builders of CLIP's vision encoder."""

from collections.abc import Callable

from torch import nn

from torchtune.models._description import ModelError
from torchtune.models.clip._position_embeddings import (
    TiledTokenPositionalEmbedding,
    TilePositionalEmbedding,
    TokenPositionalEmbedding,
)
from torchtune.modules.attention import MultiHeadAttention
from torchtune.modules.feed_forward import FeedForward
from torchtune.modules.layer_norm import Fp32LayerNorm
from torchtune.modules.tanh_gate import TanhGate
from torchtune.modules.transformer import TransformerSelfAttentionLayer
from torchtune.modules.vision_transformer import CLSProjection, VisionTransformer


def clip_mlp(in_dim: int, out_dim: int, hidden_dim: int, activation: nn.Module) -> FeedForward:
    """Build CLIP's feed-forward layer: two projections with biases.

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
    if embed_dim % num_heads:
        raise ModelError(f"embed_dim ({embed_dim}) must be a multiple of num_heads ({num_heads}).")
    names = ("q_proj", "k_proj", "v_proj", "output_proj")
    return TransformerSelfAttentionLayer(
        MultiHeadAttention(
            embed_dim=embed_dim,
            num_heads=num_heads,
            num_kv_heads=num_heads,
            head_dim=embed_dim // num_heads,
            is_causal=False,
            **{name: nn.Linear(embed_dim, embed_dim, bias=attn_bias) for name in names},
        ),
        clip_mlp(embed_dim, embed_dim, 4 * embed_dim, activation()),
        sa_norm=Fp32LayerNorm(embed_dim, eps=norm_eps),
        mlp_norm=Fp32LayerNorm(embed_dim, eps=norm_eps),
        sa_scale=TanhGate() if is_gated else None,
        mlp_scale=TanhGate() if is_gated else None,
    )


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
    if use_rope:
        raise ModelError("use_rope: encoders with rotary positions (Llama 4) are not in this release: set it to False.")
    is_tiled = max_num_tiles > 1
    has_places = is_tiled and use_tile_pos_embed
    sizes = (embed_dim, tile_size, patch_size)
    return VisionTransformer(
        patch_size=patch_size,
        tile_size=tile_size,
        num_layers=num_layers,
        embed_dim=embed_dim,
        layer=encoder_layer(embed_dim, num_heads, activation, attn_bias=attn_bias, norm_eps=norm_eps),
        token_pos_embedding=(
            TiledTokenPositionalEmbedding(max_num_tiles, *sizes) if is_tiled else TokenPositionalEmbedding(*sizes)
        ),
        pre_tile_pos_embed=TilePositionalEmbedding(max_num_tiles, embed_dim) if has_places else None,
        post_tile_pos_embed=TilePositionalEmbedding(max_num_tiles, embed_dim) if has_places else None,
        cls_projection=CLSProjection(embed_dim, cls_output_dim, append_cls_token) if output_cls_projection else None,
        out_indices=out_indices,
        in_channels=in_channels,
        append_cls_token=append_cls_token,
        norm_eps=norm_eps,
    )

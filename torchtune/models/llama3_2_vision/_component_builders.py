"""Component builders of Llama 3.2 Vision."""

from collections.abc import Collection

from torch import nn

from torchtune.models._build import build
from torchtune.models._builders import scale_hidden_dim_for_mlp
from torchtune.models._description import Description
from torchtune.models._rope_scaling import Llama3RopeScaling
from torchtune.models._spec import ModelSpec
from torchtune.models.clip import clip_vision_encoder, encoder_layer
from torchtune.models.llama3_2_vision._description import VisionDescription
from torchtune.models.llama3_2_vision._encoder import Llama3VisionEncoder, Llama3VisionProjectionHead
from torchtune.models.llama3_2_vision._lora import lora_part_builder
from torchtune.modules.attention import MultiHeadAttention
from torchtune.modules.cross_attention import TransformerCrossAttentionLayer
from torchtune.modules.feed_forward import FeedForward
from torchtune.modules.model_fusion import DeepFusionModel, FusionEmbedding, FusionLayer
from torchtune.modules.rms_norm import RMSNorm
from torchtune.modules.tanh_gate import TanhGate
from torchtune.modules.transformer import TransformerDecoder


def build_vision(
    d: VisionDescription,
    spec: ModelSpec | None,
    *,
    decoder_trainable: bool = True,
    encoder_trainable: bool = True,
    fusion_trainable: bool = True,
) -> DeepFusionModel:
    """Build the full model; see :class:`DeepFusionModel` for the last three arguments."""
    encoder = llama3_2_vision_encoder(
        patch_size=d.patch_size,
        num_heads=d.num_clip_heads,
        clip_embed_dim=d.clip_dim,
        clip_num_layers=d.num_clip_layers,
        clip_hidden_states=list(d.clip_hidden_states),
        num_layers_projection=d.num_projection_layers,
        decoder_embed_dim=d.embed_dim,
        tile_size=d.tile_size,
        max_num_tiles=d.max_num_tiles,
        in_channels=d.in_channels,
        norm_eps=d.clip_norm_eps,
    )
    model = DeepFusionModel(
        _fused(d.text, d.fusion_layers, d.num_special_tokens),
        encoder,
        decoder_trainable=decoder_trainable,
        encoder_trainable=encoder_trainable,
        fusion_trainable=fusion_trainable,
    )
    model.description, model.spec = d, spec
    return model


def _fused(text: Description, fusion_layers: Collection[int], num_special_tokens: int) -> TransformerDecoder:
    """Text decoder with cross-attention before some layers, and additional tokens."""
    decoder = build(text)
    for index in fusion_layers:
        decoder.layers[index] = FusionLayer(decoder.layers[index], _cross_attention_layer(text))
    decoder.tok_embeddings = FusionEmbedding(text.vocab_size, num_special_tokens, text.embed_dim)
    return decoder


def _cross_attention_layer(d: Description) -> TransformerCrossAttentionLayer:
    return TransformerCrossAttentionLayer(
        MultiHeadAttention(
            embed_dim=d.embed_dim,
            num_heads=d.num_heads,
            num_kv_heads=d.num_kv_heads,
            head_dim=d.head_dim,
            q_proj=nn.Linear(d.embed_dim, d.q_dim, bias=False),
            k_proj=nn.Linear(d.embed_dim, d.kv_dim, bias=False),
            v_proj=nn.Linear(d.embed_dim, d.kv_dim, bias=False),
            output_proj=nn.Linear(d.q_dim, d.embed_dim, bias=False),
            q_norm=RMSNorm(d.head_dim, d.norm_eps),
            k_norm=RMSNorm(d.head_dim, d.norm_eps),
            attn_dropout=d.attn_dropout,
            is_causal=False,
        ),
        FeedForward(
            gate_proj=nn.Linear(d.embed_dim, d.intermediate_dim, bias=False),
            down_proj=nn.Linear(d.intermediate_dim, d.embed_dim, bias=False),
            up_proj=nn.Linear(d.embed_dim, d.intermediate_dim, bias=False),
        ),
        ca_norm=RMSNorm(d.embed_dim, d.norm_eps),
        mlp_norm=RMSNorm(d.embed_dim, d.norm_eps),
        ca_scale=TanhGate(),
        mlp_scale=TanhGate(),
    )


def llama3_2_vision_projection_head(
    *,
    num_layers: int,
    num_heads: int,
    decoder_embed_dim: int,
    clip_embed_dim: int,
    num_hidden_inputs: int,
    norm_eps: float = 1e-5,
) -> Llama3VisionProjectionHead:
    """Build the projection head.

    Args:
        num_layers: number of layers.
        num_heads: heads per layer.
        decoder_embed_dim: width of the decoder.
        clip_embed_dim: width of CLIP.
        num_hidden_inputs: number of CLIP's hidden states that are also projected.
        norm_eps: eps of the norms.
    """
    layers = [
        encoder_layer(clip_embed_dim, num_heads, nn.GELU, norm_eps=norm_eps, is_gated=True) for _ in range(num_layers)
    ]
    output = nn.Linear(clip_embed_dim * (num_hidden_inputs + 1), decoder_embed_dim)
    return Llama3VisionProjectionHead(layers, output, num_hidden_inputs)


def llama3_2_vision_encoder(
    *,
    patch_size: int,
    num_heads: int,
    clip_embed_dim: int,
    clip_num_layers: int,
    clip_hidden_states: list[int] | None,
    num_layers_projection: int,
    decoder_embed_dim: int,
    tile_size: int,
    max_num_tiles: int = 4,
    in_channels: int = 3,
    norm_eps: float = 1e-5,
) -> Llama3VisionEncoder:
    """Build the image encoder: CLIP and the projection head.

    Args:
        patch_size: width and height of a patch, in pixels.
        num_heads: heads per layer.
        clip_embed_dim: width of CLIP.
        clip_num_layers: number of CLIP's layers.
        clip_hidden_states: indices of CLIP's layers whose inputs are also projected.
        num_layers_projection: number of layers of the projection head.
        decoder_embed_dim: width of the decoder.
        tile_size: width and height of a tile.
        max_num_tiles: maximum number of tiles per image.
        in_channels: channels of an image.
        norm_eps: eps of the norms.
    """
    clip = clip_vision_encoder(
        tile_size,
        patch_size,
        clip_embed_dim,
        clip_num_layers,
        num_heads,
        nn.GELU,
        attn_bias=False,
        out_indices=clip_hidden_states,
        max_num_tiles=max_num_tiles,
        in_channels=in_channels,
        norm_eps=norm_eps,
    )
    head = llama3_2_vision_projection_head(
        num_layers=num_layers_projection,
        num_heads=num_heads,
        decoder_embed_dim=decoder_embed_dim,
        clip_embed_dim=clip_embed_dim,
        num_hidden_inputs=len(clip_hidden_states or ()),
        norm_eps=norm_eps,
    )
    return Llama3VisionEncoder(clip, head)


def llama3_2_vision_decoder(
    *,
    vocab_size: int,
    num_layers: int,
    fusion_interval: int,
    num_special_tokens: int,
    num_heads: int,
    num_kv_heads: int,
    embed_dim: int,
    max_seq_len: int,
    encoder_max_seq_len: int,
    rope_base: float = 500_000.0,
    intermediate_dim: int | None = None,
) -> TransformerDecoder:
    """Build the text decoder with its cross-attention layers.

    Args:
        vocab_size: number of tokens.
        num_layers: number of self-attention layers.
        fusion_interval: every ``fusion_interval``-th layer has cross-attention before it.
        num_special_tokens: number of additional tokens, with embeddings that are trained with the fusion.
        num_heads: query heads per layer.
        num_kv_heads: key and value heads per layer.
        embed_dim: width of the residual stream.
        max_seq_len: maximum sequence length.
        encoder_max_seq_len: informational; caches take their size from the encoder's output.
        rope_base: base (theta) of the rotary embeddings.
        intermediate_dim: width of the feed-forward layers; by default computed from ``embed_dim``.
    """
    text = Description(
        vocab_size=vocab_size,
        num_layers=num_layers,
        embed_dim=embed_dim,
        intermediate_dim=intermediate_dim or scale_hidden_dim_for_mlp(embed_dim),
        max_seq_len=max_seq_len,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        rope_base=rope_base,
        rope_scaling=Llama3RopeScaling(),
    )
    return _fused(text, range(fusion_interval - 1, num_layers, fusion_interval), num_special_tokens)


lora_llama3_2_vision_decoder = lora_part_builder(
    llama3_2_vision_decoder,
    "decoder",
    "lora_llama3_2_vision_decoder",
    "the text decoder with LoRA adapters on its self-attention layers, cross-attention layers, or both",
)
lora_llama3_2_vision_encoder = lora_part_builder(
    llama3_2_vision_encoder,
    "encoder",
    "lora_llama3_2_vision_encoder",
    "the image encoder with LoRA adapters on CLIP, on the projection head, or on both",
)

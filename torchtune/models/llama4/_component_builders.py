"""Component builders of Llama 4: the text decoder, the vision tower and its projector, from their sizes."""

from dataclasses import replace

from torchtune.models._build import build
from torchtune.models._build_vision import build_tower
from torchtune.models._description import ModelError
from torchtune.models._spec import get_spec
from torchtune.models.llama4._model_builders import SIZES, SPEC
from torchtune.modules.transformer import TransformerDecoder
from torchtune.modules.vision_tower import PatchMerger as Llama4VisionProjectionHead
from torchtune.modules.vision_tower import VisionTower as Llama4VisionEncoder

__all__ = ["Llama4VisionEncoder", "Llama4VisionProjectionHead"]


def llama4_decoder(
    *,
    vocab_size: int,
    num_layers: int,
    num_heads: int,
    num_kv_heads: int,
    embed_dim: int,
    hidden_dim: int,
    max_seq_len: int,
    attn_dropout: float = 0.0,
    rope_base: int = 500_000,
    norm_eps: float = 1e-5,
    num_experts: int = 16,
    experts_per_token: int = 1,
    use_shared_expert: bool = True,
    use_qk_norm: bool = True,
    moe_every_n_layers: int | None = None,
    mlp_hidden_dim: int | None = None,
    skip_rope_interval: int | None = None,
    attention_chunk_size: int | None = None,
    use_scaled_rope: bool = False,
    rope_scale_factor: float = 16.0,
    rope_low_freq_factor: float = 1.0,
    rope_high_freq_factor: float = 1.0,
    old_context_len: int = 8192,
) -> TransformerDecoder:
    """Build a text decoder of Llama 4 from its sizes.

    Args:
        vocab_size: number of tokens.
        num_layers: number of layers.
        num_heads: query heads per layer.
        num_kv_heads: key and value heads per layer.
        embed_dim: width of the residual stream.
        hidden_dim: width of an expert and of the shared expert.
        max_seq_len: longest sequence.
        attn_dropout: dropout probability of attention weights.
        rope_base: base (theta) of the rotary embeddings.
        norm_eps: eps of the norms.
        num_experts: experts per layer.
        experts_per_token: experts that a token is routed to.
        use_shared_expert: whether layers also have an expert for all tokens.
        use_qk_norm: whether queries and keys are normalized per head after RoPE.
        moe_every_n_layers: every n-th layer has experts; by default every layer.
        mlp_hidden_dim: width of feed-forward layers without experts.
        skip_rope_interval: every n-th layer has no RoPE, and attends to all positions; by default none.
        attention_chunk_size: size of the chunks of attention in the other layers; by default none.
        use_scaled_rope: whether RoPE has Llama 3.1's scaling, with the following numbers.
        rope_scale_factor: factor of long wavelengths.
        rope_low_freq_factor: defines the long wavelengths.
        rope_high_freq_factor: defines the short wavelengths.
        old_context_len: pre-training context length.
    """
    config = {
        "vocab_size": vocab_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "hidden_size": embed_dim,
        "head_dim": embed_dim // num_heads,
        "intermediate_size": hidden_dim,
        "intermediate_size_mlp": mlp_hidden_dim or hidden_dim,
        "max_position_embeddings": max_seq_len,
        "attention_dropout": attn_dropout,
        "rope_theta": rope_base,
        "rms_norm_eps": norm_eps,
        "num_local_experts": num_experts,
        "num_experts_per_tok": experts_per_token,
        "use_qk_norm": use_qk_norm,
        "interleave_moe_layer_step": moe_every_n_layers or 1,
        "no_rope_layers": [int((i + 1) % (skip_rope_interval or num_layers + 1) > 0) for i in range(num_layers)],
    }
    if attention_chunk_size:
        config["attention_chunk_size"] = attention_chunk_size
    else:
        config["layer_types"] = ["full_attention"] * num_layers
    if use_scaled_rope:
        config["rope_scaling"] = {
            "rope_type": "llama3",
            "factor": rope_scale_factor,
            "low_freq_factor": rope_low_freq_factor,
            "high_freq_factor": rope_high_freq_factor,
            "original_max_position_embeddings": old_context_len,
        }
    description = SPEC.from_hf_config(config)
    return build(description if use_shared_expert else replace(description, shared_expert_dim=0), SPEC)


def llama4_vision_encoder(
    *,
    patch_size: int,
    num_heads: int,
    clip_embed_dim: int,
    clip_num_layers: int,
    clip_hidden_states: list[int] | None = None,
    projection_embed_dim: int,
    decoder_embed_dim: int,
    tile_size: int,
    max_num_tiles: int = 1,
    in_channels: int = 3,
) -> Llama4VisionEncoder:
    """Build the vision tower of Llama 4 and its projector.

    Args:
        patch_size: width and height of a patch, in pixels.
        num_heads: heads per layer.
        clip_embed_dim: width of the tower.
        clip_num_layers: number of layers.
        clip_hidden_states: must be empty: the projector takes the output of the tower alone.
        projection_embed_dim: width of the projector.
        decoder_embed_dim: width of the decoder.
        tile_size: width and height of a tile, in pixels.
        max_num_tiles: informational; the tower takes any number of tiles.
        in_channels: channels of an image.

    Raises:
        ModelError: ``clip_hidden_states`` has layers, or the sizes do not fit each other.
    """
    if clip_hidden_states:
        raise ModelError("clip_hidden_states: the projector of Llama 4 takes no hidden states, leave it out.")
    sizes = {
        "patch_size": patch_size,
        "num_attention_heads": num_heads,
        "hidden_size": clip_embed_dim,
        "intermediate_size": 4 * clip_embed_dim,
        "num_hidden_layers": clip_num_layers,
        "image_size": tile_size,
        "num_channels": in_channels,
        **dict.fromkeys(("vision_output_dim", "projector_input_dim", "projector_output_dim"), projection_embed_dim),
    }
    text = {**SPEC.to_hf_config(SIZES["llama4_scout_17b_16e"]), "hidden_size": decoder_embed_dim}
    config = {"text_config": text, "vision_config": sizes}
    return build_tower(get_spec("llama4_vl").from_hf_config(config).vision)


def llama4_vision_projection_head(
    *, decoder_embed_dim: int, clip_embed_dim: int, projection_embed_dim: int
) -> Llama4VisionProjectionHead:
    """Build the projector of Llama 4's vision tower, which makes one token of 2 x 2 patches.

    Args:
        decoder_embed_dim: width of the decoder.
        clip_embed_dim: width of the tower.
        projection_embed_dim: width of the projector.
    """
    sizes = {"patch_size": 2, "num_heads": 1, "clip_num_layers": 1, "tile_size": 4, "clip_embed_dim": clip_embed_dim}
    widths = {"projection_embed_dim": projection_embed_dim, "decoder_embed_dim": decoder_embed_dim}
    return llama4_vision_encoder(**sizes, **widths).projector

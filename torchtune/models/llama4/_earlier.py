"""Builders and transform of Llama 4 with the arguments of earlier releases.

Only recipes and configs with these names need this file. New code builds the model with
:func:`torchtune.models.image_text_model` (family ``llama4_vl``) and reads images with
:func:`torchtune.models.image_text_transform`. Everything that computes is theirs: text decoder, vision tower, projector
and image processor. This file only turns the arguments of earlier releases into a description.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from torchtune.data import DataError, PromptTemplateInterface, TemplateType, as_messages, get_prompt_template
from torchtune.models._build import build
from torchtune.models._build_vision import PartTraining, adapt_parts, build_tower, check_parts, part_of_module
from torchtune.models._builders import Builder, LoraAttnModules, named_function
from torchtune.models._description import ModelError
from torchtune.models._image_transform import ImageEncoder
from torchtune.models._spec import get_spec
from torchtune.models.llama3 import base_llama_tp_plan as decoder_only_tp_plan
from torchtune.models.llama4._model import SIZES, SPEC, Llama4ImageProcessor, Llama4Tokenizer
from torchtune.modules.model_fusion import EarlyFusionModel
from torchtune.modules.transformer import TransformerDecoder
from torchtune.modules.vision_transformer import PatchMerger as Llama4VisionProjectionHead
from torchtune.modules.vision_transformer import VisionTower as Llama4VisionEncoder
from torchtune.tokenizers import parse_hf_tokenizer_json

__all__ = ["Llama4VisionEncoder", "Llama4VisionProjectionHead", "decoder_only_tp_plan"]


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
        skip_rope_interval: every n-th layer has no RoPE, attends to all positions, and scales queries by a factor that
            grows with the logarithm of their position; by default none.
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
        "no_rope_layers": [1] * num_layers,  # despite the name, 1 is a layer with RoPE
    }
    if skip_rope_interval:
        for layer in range(skip_rope_interval - 1, num_layers, skip_rope_interval):
            config["no_rope_layers"][layer] = 0
    if attention_chunk_size:
        config["attention_chunk_size"] = attention_chunk_size
    else:
        # Without types, layers with RoPE would have the default: chunks of 8192 positions.
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
    if not use_shared_expert:  # which a config.json cannot express
        description = replace(description, shared_expert_dim=0)
    return build(description, SPEC)


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
    vision_config = {
        "patch_size": patch_size,
        "num_attention_heads": num_heads,
        "hidden_size": clip_embed_dim,
        "intermediate_size": 4 * clip_embed_dim,
        "num_hidden_layers": clip_num_layers,
        "image_size": tile_size,
        "num_channels": in_channels,
        "vision_output_dim": projection_embed_dim,
        "projector_input_dim": projection_embed_dim,
        "projector_output_dim": projection_embed_dim,
    }
    # Of the text decoder, only the width matters to the tower.
    text_config = {**SPEC.to_hf_config(SIZES["llama4_scout_17b_16e"]), "hidden_size": decoder_embed_dim}
    config = {"text_config": text_config, "vision_config": vision_config}
    description = get_spec("llama4_vl").from_hf_config(config)
    return build_tower(description.vision)


def llama4_vision_projection_head(
    *, decoder_embed_dim: int, clip_embed_dim: int, projection_embed_dim: int
) -> Llama4VisionProjectionHead:
    """Build the projector of Llama 4's vision tower, which makes one token of 2 x 2 patches.

    Args:
        decoder_embed_dim: width of the decoder.
        clip_embed_dim: width of the tower.
        projection_embed_dim: width of the projector.
    """
    # The sizes of the other modules, which are thrown away, are the smallest ones.
    encoder = llama4_vision_encoder(
        patch_size=2,
        num_heads=1,
        clip_num_layers=1,
        tile_size=4,
        clip_embed_dim=clip_embed_dim,
        projection_embed_dim=projection_embed_dim,
        decoder_embed_dim=decoder_embed_dim,
    )
    return encoder.projector


_PATCH = 200_092  # the token <|patch|>
_IMAGE_SIZE = "image_size: width and height of a tile, in pixels; must be the checkpoint's."
_DOC = """Build {title} with its vision tower.

    Args:
        decoder_trainable: whether to train the text decoder.
        encoder_trainable: whether to train the vision tower.
        fusion_trainable: whether to train its projector.
        {image_size}
    """
_LORA_DOC = """Build {title} with its vision tower and LoRA adapters.

    Args:
        lora_attn_modules: attention projections with an adapter, in the text decoder and in the tower.
        decoder_trainable: ``"lora"``: the text decoder has adapters; ``"frozen"``: it has none.
        encoder_trainable: the same for the vision tower.
        fusion_trainable: the same for its projector, with ``apply_lora_to_output``.
        apply_lora_to_mlp: whether the feed-forward projections and the experts have an adapter.
        apply_lora_to_output: whether the output projection and the projector have an adapter.
        lora_rank: rank of the adapters.
        lora_alpha: the adapters are scaled by ``lora_alpha / lora_rank``.
        lora_dropout: dropout probability of the adapters' input.
        use_dora: train the magnitude of the adapted weights separately (DoRA).
        quantize_base: quantize the frozen base weights to NF4.
        {image_size}

    Raises:
        ModelError: a part is ``"full"``, which adapter files cannot store, or nothing would be trained.
    """


def _builder(name: str, title: str) -> Builder:
    """Make the builder ``name`` of a text decoder with the vision tower of Llama 4.

    Args:
        name: key of the text decoder in ``SIZES``.
        title: name of the model in docstrings.
    """

    def builder(
        decoder_trainable: bool = True,
        encoder_trainable: bool = False,
        fusion_trainable: bool = True,
        image_size: int = 336,
    ) -> EarlyFusionModel:
        return _build_early_fusion(name, decoder_trainable, encoder_trainable, fusion_trainable, image_size)

    return named_function(builder, name, __name__, _DOC.format(title=title, image_size=_IMAGE_SIZE))


def _lora_builder(name: str, title: str, prefix: str = "lora_") -> Builder:
    """Make the builder with LoRA adapters, whose name begins with ``prefix``; see :func:`_builder`."""

    def builder(
        lora_attn_modules: LoraAttnModules,
        *,
        decoder_trainable: PartTraining = "lora",
        encoder_trainable: PartTraining = "frozen",
        fusion_trainable: PartTraining = "lora",
        apply_lora_to_mlp: bool = False,
        apply_lora_to_output: bool = False,
        lora_rank: int = 8,
        lora_alpha: float = 16,
        lora_dropout: float = 0.0,
        use_dora: bool = False,
        quantize_base: bool = prefix == "qlora_",
        image_size: int = 336,
    ) -> EarlyFusionModel:
        check_parts(
            {
                "decoder_trainable": decoder_trainable,
                "encoder_trainable": encoder_trainable,
                "fusion_trainable": fusion_trainable,
            },
            "lora",
            f"adapter files cannot store other weights: {name} trains them",
        )
        return adapt_parts(
            _build_early_fusion(name, image_size=image_size),
            {
                "language_model": decoder_trainable,
                "vision_tower": encoder_trainable,
                # As in earlier releases; adapt_parts itself adapts a projector whatever the flag.
                "projector": fusion_trainable if apply_lora_to_output else "frozen",
            },
            lora_attn_modules=lora_attn_modules,
            apply_lora_to_mlp=apply_lora_to_mlp,
            apply_lora_to_output=apply_lora_to_output,
            quantize_base=quantize_base,
            part_of=part_of_module,
            rank=lora_rank,
            alpha=lora_alpha,
            dropout=lora_dropout,
            use_dora=use_dora,
        )

    return named_function(builder, prefix + name, __name__, _LORA_DOC.format(title=title, image_size=_IMAGE_SIZE))


def _build_early_fusion(
    name: str,
    decoder_trainable: bool = True,
    encoder_trainable: bool = False,
    fusion_trainable: bool = True,
    image_size: int = 336,
) -> EarlyFusionModel:
    spec = get_spec("llama4_vl")
    text_config = SPEC.to_hf_config(SIZES[name])
    vision_config = {"hidden_size": 1408, "vision_output_dim": 4096, "image_size": image_size}
    image_text = build(spec.from_hf_config({"text_config": text_config, "vision_config": vision_config}), spec)
    model = EarlyFusionModel(
        image_text.decoder,
        {"vision": image_text.encoder},
        {"vision": _PATCH},
        decoder_trainable,
        encoder_trainable,
        fusion_trainable,
    )
    model.description = image_text.description
    model.spec = spec
    return model


llama4_scout_17b_16e = _builder("llama4_scout_17b_16e", "Llama 4 Scout 17B-16E")
lora_llama4_scout_17b_16e = _lora_builder("llama4_scout_17b_16e", "Llama 4 Scout 17B-16E")
qlora_llama4_scout_17b_16e = _lora_builder("llama4_scout_17b_16e", "Llama 4 Scout 17B-16E", prefix="qlora_")
llama4_maverick_17b_128e = _builder("llama4_maverick_17b_128e", "Llama 4 Maverick 17B-128E")
lora_llama4_maverick_17b_128e = _lora_builder("llama4_maverick_17b_128e", "Llama 4 Maverick 17B-128E")
qlora_llama4_maverick_17b_128e = _lora_builder("llama4_maverick_17b_128e", "Llama 4 Maverick 17B-128E", prefix="qlora_")
BUILDERS = {
    builder.__name__: builder
    for builder in (
        llama4_scout_17b_16e,
        lora_llama4_scout_17b_16e,
        qlora_llama4_scout_17b_16e,
        llama4_maverick_17b_128e,
        lora_llama4_maverick_17b_128e,
        qlora_llama4_maverick_17b_128e,
    )
}

# Special tokens of the layout of an image.
_LAYOUT = ("patch", "image", "image_start", "image_end", "tile_x_separator", "tile_y_separator")


class Llama4Transform(ImageEncoder, Llama4Tokenizer):
    """Llama 4's tokenizer that also processes the images of a conversation.

    Rows raise an error if ``max_seq_len`` would cut off images; text is cut at its end.

    Args:
        path: path of Meta's ``tokenizer.model``.
        tile_size: width and height of a tile, in pixels.
        patch_size: width and height of a patch, in pixels.
        max_num_tiles: maximum number of tiles per image, without the tile of the whole image.
        pixel_shuffle_scaling_factor: inverse of the rows and columns of patches that become one token.
        special_tokens_path: path of a ``tokenizer.json`` with special tokens that replace Llama 4's.
        max_seq_len: maximum number of tokens; ``None``: no truncation.
        image_mean: mean of red, green and blue; ``None``: no normalization.
        image_std: standard deviation of red, green and blue.
        dtype: accepted for older configs; the model converts patches to its dtype.
        prompt_template: adds texts to the messages before they are formatted.

    Raises:
        DataError: a file is missing or broken, or lacks a token of images.
    """

    required = (*Llama4Tokenizer.required, *_LAYOUT)

    def __init__(
        self,
        path: str,
        *,
        tile_size: int,
        patch_size: int,
        max_num_tiles: int = 4,
        pixel_shuffle_scaling_factor: float = 0.5,
        special_tokens_path: str | None = None,
        max_seq_len: int | None = None,
        image_mean: Sequence[float] | None = None,
        image_std: Sequence[float] | None = None,
        dtype: torch.dtype = torch.bfloat16,
        prompt_template: PromptTemplateInterface | TemplateType | None = None,
    ) -> None:
        special_tokens = None
        if special_tokens_path is not None:
            special_tokens = parse_hf_tokenizer_json(special_tokens_path)
        super().__init__(path, special_tokens, max_seq_len, get_prompt_template(prompt_template))
        self.tile_size = tile_size
        self.patch_size = patch_size
        self.max_num_tiles = max_num_tiles
        self.image_tokens = (self.special_tokens["<|patch|>"],)
        self.processor = Llama4ImageProcessor(
            patch_size=patch_size,
            merge=round(1 / pixel_shuffle_scaling_factor),
            tile=tile_size,
            max_tiles=max_num_tiles,
            mean=tuple(map(float, image_mean or (0, 0, 0))),
            std=tuple(map(float, image_std or (1, 1, 1))),
        )

    def __call__(self, sample: Mapping[str, Any], inference: bool = False) -> dict[str, Any]:
        """Replace ``messages`` by tokens and images; see :class:`torchtune.models.ImageTextTransform`.

        Raises:
            DataError: the messages do not fit the chat format, an image cannot be read, or ``max_seq_len`` would cut
                off an image.
        """
        messages = as_messages(sample["messages"])
        row = super().__call__({**sample, "messages": messages}, inference)
        return {**row, **self.encode_images(messages, row["tokens"])}

    def tokenize_messages(self, messages: Any, **kwargs: Any) -> tuple[list[int], list[bool]]:
        """Tokenize as :class:`Llama4Tokenizer`; raises ``DataError`` if it cuts off images."""
        messages = as_messages(messages)
        tokens, mask = super().tokenize_messages(messages, **kwargs)
        num_image_tokens = 0
        for message in messages:
            for image in message.get_media():
                num_image_tokens += self.plan(image).tokens
        num_cut_off = num_image_tokens - tokens.count(self.image_tokens[0])
        if num_cut_off:
            raise DataError(
                f"max_seq_len={self.max_seq_len} would cut {num_cut_off} tokens of images off a row: raise it"
            )
        # Tokens of images are never trained on.
        layout_ids = {self.special_tokens[f"<|{name}|>"] for name in _LAYOUT}
        return tokens, [masked or token in layout_ids for token, masked in zip(tokens, mask, strict=True)]

    def _image_ids(self, image: Any) -> list[int]:
        layout = self.processor.layout(self.plan(image))
        return [self.special_tokens[name] for name in re.findall(r"<\|\w+\|>", layout)]


def llama4_transform(
    path: str,
    max_seq_len: int | None = 8192,
    image_size: int = 336,
    max_num_tiles: int = 16,
    special_tokens_path: str | None = None,
    prompt_template: TemplateType | None = None,
) -> Llama4Transform:
    """Build the transform of Llama 4: patches of 14 pixels, four of which become a token.

    Args:
        path: path of Meta's ``tokenizer.model``.
        max_seq_len: maximum number of tokens; ``None``: no truncation.
        image_size: width and height of a tile, in pixels; must be the model's.
        max_num_tiles: maximum number of tiles per image, without the tile of the whole image.
        special_tokens_path: path of a ``tokenizer.json`` with special tokens that replace Llama 4's.
        prompt_template: dotted path of a template, or a mapping role -> [text before, text after].

    Raises:
        DataError: a file is missing or broken.
    """
    return Llama4Transform(
        path,
        tile_size=image_size,
        patch_size=14,
        max_num_tiles=max_num_tiles,
        special_tokens_path=special_tokens_path,
        max_seq_len=max_seq_len,
        image_mean=(0.5, 0.5, 0.5),
        image_std=(0.5, 0.5, 0.5),
        prompt_template=prompt_template,
    )

"""Llama 3.2 Vision: its image encoder, cross-attention and sizes, and their builders with and without LoRA.

The model predates image tokens in the text: its encoder is CLIP, and the decoder attends to the encoder's output.
Layers, feed-forwards and adapters of parts are those of the newer vision-language models
(:mod:`torchtune.models._build_vision`); the projection head, which has layers of its own, is in this family alone.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from torchtune.models._build import build, feed_forward
from torchtune.models._build_vision import PartTraining, adapt_parts, check_parts
from torchtune.models._builders import Builder, LoraAttnModules, Model, named_function
from torchtune.models._description import Description, Llama3RopeScaling, ModelError
from torchtune.models._spec import ModelSpec
from torchtune.models.clip import clip_vision_encoder, encoder_layer
from torchtune.models.llama3_2_vision._format import (
    HF,
    HF_MODULES,
    META_FILES,
    DeepFusionDescription,
    TilesDescription,
    read,
    write,
)
from torchtune.modules import Tiles
from torchtune.modules.attention import MultiHeadAttention
from torchtune.modules.model_fusion import DeepFusionModel, FusionEmbedding, FusionLayer, register_fusion_module
from torchtune.modules.rms_norm import RMSNorm, TanhGate
from torchtune.modules.transformer import TransformerCrossAttentionLayer, TransformerDecoder
from torchtune.modules.vision_transformer import VisionTransformer


class Llama3VisionProjectionHead(nn.Module):
    """Self-attention layers over CLIP's features, and a projection of their output and CLIP's hidden states.

    Args:
        layers: self-attention layers.
        output: projection ``d * (1 + num_hidden_inputs) -> width of the decoder``.
        num_hidden_inputs: number of hidden states.
    """

    def __init__(self, layers: Sequence[nn.Module], output: nn.Module, num_hidden_inputs: int = 0) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.output = output
        self.num_hidden = num_hidden_inputs

    def forward(self, x: Tensor, hidden_states: list[Tensor] | None = None, tiles: Tiles | None = None) -> Tensor:
        """Project features.

        Args:
            x: ``[b, images, tiles, tokens, d]``; with ``tiles``, sequences ``[n, s, d]``.
            hidden_states: ``num_hidden_inputs`` tensors of the shape of ``x``.
            tiles: layout of the images in the sequences.

        Returns:
            Tensor ``[b, images * tiles * tokens, width of the decoder]``.

        Raises:
            ValueError: the number of hidden states is wrong.
        """
        hidden_states = hidden_states or []
        if len(hidden_states) != self.num_hidden:
            raise ValueError(f"The projection head needs {self.num_hidden} hidden states, got {len(hidden_states)}.")
        # The layers attend to all tokens of an image, across its tiles.
        if tiles is None:
            shape = x.shape
            x = x.flatten(2, 3).flatten(0, 1)  # [b * images, tiles * tokens, d]
            for layer in self.layers:
                x = layer(x)
            x = x.view(shape)
        else:
            for layer in self.layers:
                x = layer(x, mask=tiles.mask)
            x = tiles.unpad(x)
            hidden_states = [tiles.unpad(hidden) for hidden in hidden_states]
        if hidden_states:
            # In checkpoints, the hidden states of a channel are neighbors: [..., d, num_hidden].
            hidden = torch.stack(hidden_states, dim=-1).flatten(-2)
            x = torch.cat([x, hidden], dim=-1)  # [b, images, tiles, tokens, d * (1 + num_hidden)]
        return self.output(x.flatten(1, 3))


class Llama3VisionEncoder(nn.Module):
    """Image encoder, which computes the features that the decoder attends to.

    The parameters of the projection head are fusion parameters.

    Args:
        clip: vision transformer.
        projection_head: projection of its features.
    """

    def __init__(self, clip: VisionTransformer, projection_head: Llama3VisionProjectionHead) -> None:
        super().__init__()
        self.clip = clip
        self.projection = projection_head
        register_fusion_module(self.projection)

    def forward(self, images: Tensor, aspect_ratio: Tensor | None = None) -> Tensor:
        """Encode images.

        Args:
            images: ``[b, images, tiles, c, tile_size, tile_size]``.
            aspect_ratio: int64 ``[b, images, 2]``: (height, width) of each image in tiles; by default one tile.

        Returns:
            Tensor ``[b, images * tiles * tokens, width of the decoder]``.
        """
        return self.projection(*self.clip.encode(images, aspect_ratio))

    def blank(self, device: torch.device) -> dict[str, Tensor]:
        """Return the arguments of :meth:`forward` for one blank image."""
        conv = self.clip.conv
        patches_per_side = math.isqrt(self.clip.patches_per_tile)
        tile_size = patches_per_side * conv.kernel_size[0]
        shape = (1, 1, 1, conv.in_channels, tile_size, tile_size)  # [b, images, tiles, c, h, w]
        return {"images": torch.zeros(shape, device=device, dtype=conv.weight.dtype)}


def part_of(path: str) -> str:
    """Return the part of a model that a module belongs to: decoder, encoder or fusion."""
    names = path.split(".")
    if "fusion_layer" in names or "projection" in names:
        return "fusion"
    return "encoder" if "clip" in names else "decoder"


def adapt(
    model: Model,
    parts: Mapping[str, bool],
    lora_attn_modules: LoraAttnModules,
    apply_lora_to_mlp: bool = False,
    apply_lora_to_output: bool = False,
    *,
    lora_rank: int = 8,
    lora_alpha: float = 16,
    lora_dropout: float = 0.0,
    use_dora: bool = False,
    quantize_base: bool = False,
) -> Model:
    """Add LoRA adapters to parts of a model, freeze all other parameters, and return the model.

    Args:
        model: Llama 3.2 Vision, or its decoder or encoder.
        parts: whether each part has adapters.
        lora_attn_modules: projections of attention with an adapter.
        apply_lora_to_mlp: whether the feed-forward projections have an adapter.
        apply_lora_to_output: whether the output projections of decoder and projection head have an adapter.
        lora_rank: rank of the adapters.
        lora_alpha: the adapters are scaled by ``lora_alpha / lora_rank``.
        lora_dropout: dropout probability of the adapters' input.
        use_dora: train the magnitude of the adapted weights separately (DoRA).
        quantize_base: quantize the frozen base weights to NF4.

    Raises:
        ModelError: no part or module is chosen, or ``lora_attn_modules`` has an unknown name.
    """
    training: dict[str, PartTraining] = {}
    for part, has_adapters in parts.items():
        training[part] = "lora" if has_adapters else "frozen"
    check_parts(training, "lora", "")  # the values are valid: it only raises if no part has adapters
    return adapt_parts(
        model,
        training,
        lora_attn_modules=lora_attn_modules,
        apply_lora_to_mlp=apply_lora_to_mlp,
        apply_lora_to_output=apply_lora_to_output,
        quantize_base=quantize_base,
        part_of=part_of,
        rank=lora_rank,
        alpha=lora_alpha,
        dropout=lora_dropout,
        use_dora=use_dora,
    )


def build_vision(
    d: DeepFusionDescription,
    spec: ModelSpec | None,
    *,
    decoder_trainable: bool = True,
    encoder_trainable: bool = True,
    fusion_trainable: bool = True,
) -> DeepFusionModel:
    """Build the full model; see :class:`DeepFusionModel` for the last three arguments."""
    v = d.vision
    encoder = llama3_2_vision_encoder(
        patch_size=v.patch_size,
        num_heads=v.num_heads,
        clip_embed_dim=v.embed_dim,
        clip_num_layers=v.num_layers,
        clip_hidden_states=list(v.hidden_layers),
        num_layers_projection=v.num_projection_layers,
        decoder_embed_dim=d.embed_dim,
        tile_size=v.tile_size,
        max_num_tiles=v.max_num_tiles,
        in_channels=v.num_channels,
        norm_eps=v.norm_eps,
    )
    model = DeepFusionModel(
        build_decoder(d.text, d.fusion_layers, d.num_special_tokens),
        encoder,
        decoder_trainable=decoder_trainable,
        encoder_trainable=encoder_trainable,
        fusion_trainable=fusion_trainable,
    )
    model.description = d
    model.spec = spec
    return model


def build_decoder(text: Description, fusion_layers: Collection[int], num_special_tokens: int) -> TransformerDecoder:
    """Build a text decoder with cross-attention before the layers ``fusion_layers``, and additional tokens."""
    decoder = build(text)
    for index in fusion_layers:
        decoder.layers[index] = FusionLayer(decoder.layers[index], _cross_attention_layer(text))
    decoder.tok_embeddings = FusionEmbedding(text.vocab_size, num_special_tokens, text.embed_dim)
    return decoder


def _cross_attention_layer(d: Description) -> TransformerCrossAttentionLayer:
    """Build a layer with cross-attention of the text to all features of its images.

    It has no RoPE, because features have no positions in the text. New gates are closed: the layer adds nothing.
    """
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
        feed_forward(d, d.intermediate_dim),
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
    layers = []
    for _ in range(num_layers):
        layers.append(encoder_layer(clip_embed_dim, num_heads, nn.GELU, norm_eps=norm_eps, is_gated=True))
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


SPEC = ModelSpec(
    name="llama3_2_vision",
    architectures=("MllamaForConditionalGeneration",),
    from_hf_config=read,
    to_hf_config=write,
    weight_maps={"hf": HF, "meta": META_FILES, "hf_modules": HF_MODULES},
    model_types=("LLAMA3_VISION",),
    builder=build_vision,
)

_11B = DeepFusionDescription(
    vocab_size=128_256,
    num_layers=32,
    embed_dim=4096,
    intermediate_dim=14_336,
    max_seq_len=131_072,
    num_heads=32,
    num_kv_heads=8,
    rope_base=500_000.0,
    rope_scaling=Llama3RopeScaling(),
    fusion_layers=tuple(range(3, 32, 4)),
    vision=TilesDescription(
        tile_size=560,
        patch_size=14,
        embed_dim=1280,
        intermediate_dim=5120,
        num_layers=32,
        num_heads=16,
        hidden_layers=(3, 7, 15, 23, 30),
        num_projection_layers=8,
        output_dim=4096,
    ),
)
SIZES = {
    "llama3_2_vision_11b": _11B,
    "llama3_2_vision_90b": replace(
        _11B,
        num_layers=80,
        embed_dim=8192,
        intermediate_dim=28_672,
        num_heads=64,
        head_dim=128,
        rope_dim=128,
        fusion_layers=tuple(range(3, 80, 4)),
        vision=replace(_11B.vision, output_dim=8192),
    ),
}


_DOC = """Build Llama 3.2 Vision {size}.

    Args:
        decoder_trainable: whether to train the text decoder.
        encoder_trainable: whether to train CLIP, the image encoder.
        fusion_trainable: whether to train cross-attention, projection head and special tokens.
        image_size: width and height of a tile, in pixels; must be the checkpoint's.
    """
_LORA_DOC = """Build Llama 3.2 Vision {size} with LoRA adapters.

    Args:
        lora_attn_modules: attention projections with an adapter.
        decoder_trainable: ``"lora"``: the text decoder has adapters; ``"frozen"``: it has none.
        encoder_trainable: the same for CLIP, the image encoder.
        fusion_trainable: the same for cross-attention and projection head.
        apply_lora_to_mlp: whether the feed-forward projections have an adapter.
        apply_lora_to_output: whether the output projections of decoder and projection head have an adapter.
        lora_rank: rank of the adapters.
        lora_alpha: the adapters are scaled by ``lora_alpha / lora_rank``.
        lora_dropout: dropout probability of the adapters' input.
        use_dora: train the magnitude of the adapted weights separately (DoRA).
        quantize_base: quantize the frozen base weights to NF4.
        image_size: width and height of a tile, in pixels; must be the checkpoint's.

    Raises:
        ModelError: a part is ``"full"``, which adapter files cannot store, or no part is ``"lora"``.
    """


def _builder(name: str, size: str) -> Builder:
    """Make the builder of a size without adapters."""

    def builder(
        decoder_trainable: bool = False,
        encoder_trainable: bool = True,
        fusion_trainable: bool = True,
        image_size: int = 560,
    ) -> DeepFusionModel:
        parts = {
            "decoder_trainable": decoder_trainable,
            "encoder_trainable": encoder_trainable,
            "fusion_trainable": fusion_trainable,
        }
        for part, is_trained in parts.items():
            if not isinstance(is_trained, bool):
                raise ModelError(f"{part} is {is_trained!r}, but it must be True or False (adapters: lora_{name}).")
        return build_vision(_with_tile_size(SIZES[name], image_size), SPEC, **parts)

    return named_function(builder, name, __name__, _DOC.format(size=size))


def _lora_builder(name: str, size: str) -> Builder:
    """Make the builder of a size with LoRA adapters."""

    def builder(
        lora_attn_modules: LoraAttnModules,
        decoder_trainable: PartTraining = "frozen",
        encoder_trainable: PartTraining = "lora",
        fusion_trainable: PartTraining = "lora",
        apply_lora_to_mlp: bool = False,
        apply_lora_to_output: bool = False,
        lora_rank: int = 8,
        lora_alpha: float = 16,
        lora_dropout: float = 0.0,
        use_dora: bool = False,
        quantize_base: bool = False,
        image_size: int = 560,
    ) -> DeepFusionModel:
        parts = {
            "decoder_trainable": decoder_trainable,
            "encoder_trainable": encoder_trainable,
            "fusion_trainable": fusion_trainable,
        }
        check_parts(parts, "lora", f"adapter files cannot store other weights: {name} trains them")
        return adapt(
            build_vision(_with_tile_size(SIZES[name], image_size), SPEC),
            {part.removesuffix("_trainable"): training == "lora" for part, training in parts.items()},
            lora_attn_modules,
            apply_lora_to_mlp,
            apply_lora_to_output,
            lora_rank=lora_rank,
            lora_alpha=lora_alpha,
            lora_dropout=lora_dropout,
            use_dora=use_dora,
            quantize_base=quantize_base,
        )

    return named_function(builder, f"lora_{name}", __name__, _LORA_DOC.format(size=size))


def _with_tile_size(d: DeepFusionDescription, tile_size: int) -> DeepFusionDescription:
    return replace(d, vision=replace(d.vision, tile_size=tile_size))


llama3_2_vision_11b = _builder("llama3_2_vision_11b", "11B")
llama3_2_vision_90b = _builder("llama3_2_vision_90b", "90B")
lora_llama3_2_vision_11b = _lora_builder("llama3_2_vision_11b", "11B")
lora_llama3_2_vision_90b = _lora_builder("llama3_2_vision_90b", "90B")
qlora_llama3_2_vision_11b = partial(lora_llama3_2_vision_11b, quantize_base=True)
qlora_llama3_2_vision_90b = partial(lora_llama3_2_vision_90b, quantize_base=True)

"""Llama 3.2 Vision: its image encoder, cross-attention and sizes, and their builders with and without LoRA.

The model predates image tokens in the text: its encoder is CLIP, whose modules and names no other family has, and the
decoder attends to the encoder's output.
"""

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from torchtune._lazy import former_names
from torchtune.models._build import build
from torchtune.models._build_vision import Part, adapt_parts, check_parts
from torchtune.models._builders import Builder, LoraAttnModules, Model, named_function, scale_hidden_dim_for_mlp
from torchtune.models._description import Description, ModelError
from torchtune.models._rope_scaling import Llama3RopeScaling
from torchtune.models._spec import ModelSpec
from torchtune.models.clip import clip_vision_encoder, encoder_layer
from torchtune.models.llama3_2_vision._format import HF, HF_MODULES, META_FILES, VisionDescription, read, write
from torchtune.modules import Tiles
from torchtune.modules.attention import MultiHeadAttention
from torchtune.modules.cross_attention import TransformerCrossAttentionLayer
from torchtune.modules.feed_forward import FeedForward
from torchtune.modules.model_fusion import DeepFusionModel, FusionEmbedding, FusionLayer, register_fusion_module
from torchtune.modules.rms_norm import RMSNorm
from torchtune.modules.scales import TanhGate
from torchtune.modules.transformer import TransformerDecoder
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
        hidden = hidden_states or []
        if len(hidden) != self.num_hidden:
            raise ValueError(f"The projection head needs {self.num_hidden} hidden states, got {len(hidden)}.")
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
            hidden = [tiles.unpad(state) for state in hidden]
        if hidden:
            # Hidden states are the fastest dimension: [..., d * num_hidden].
            x = torch.cat([x, torch.stack(hidden, dim=-1).flatten(-2)], dim=-1)
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
        side = round(self.clip.patches_per_tile**0.5) * conv.kernel_size[0]
        return {"images": torch.zeros(1, 1, 1, conv.in_channels, side, side, device=device, dtype=conv.weight.dtype)}


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
    training: dict[str, Part] = {}
    for part, has_adapters in parts.items():
        training[part] = "lora" if has_adapters else "frozen"
    check_parts(training, "lora", "")
    return adapt_parts(
        model,
        training,
        lora_attn_modules,
        apply_lora_to_mlp,
        apply_lora_to_output,
        quantize_base,
        part_of,
        rank=lora_rank,
        alpha=lora_alpha,
        dropout=lora_dropout,
        use_dora=use_dora,
    )


def lora_part_builder(base: Callable[..., Model], part: str, name: str, noun: str) -> Callable[..., Model]:
    """Make the LoRA variant of the builder of a part; its arguments are keyword-only.

    Args:
        base: builder of the part without adapters.
        part: name of the part with adapters, in addition to the fusion layers.
        name: name of the new function.
        noun: name of the built model, for the docstring.
    """
    base_parameters = inspect.signature(base).parameters
    adapter_parameters = dict(inspect.signature(adapt).parameters)
    del adapter_parameters["model"], adapter_parameters["parts"]
    flags = {}  # part -> argument that says whether it has adapters
    for adapted_part in (part, "fusion"):
        flags[adapted_part] = inspect.Parameter(
            f"{adapted_part}_lora", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=bool
        )
    positional = [*flags.values()]
    keyword_only = [*base_parameters.values()]
    for parameter in adapter_parameters.values():
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY:
            keyword_only.append(parameter)
        else:
            positional.append(parameter)
    signature = inspect.signature(base).replace(parameters=[*positional, *keyword_only])

    def builder(*args: Any, **kwargs: Any) -> Model:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        values = bound.arguments
        parts = {adapted_part: values[flag.name] for adapted_part, flag in flags.items()}
        model = base(**{argument: values[argument] for argument in base_parameters})
        return adapt(model, parts, **{argument: values[argument] for argument in adapter_parameters})

    builder.__signature__ = signature
    doc = f"The other arguments are those of :func:`{base.__name__}` and of the ``lora_*`` builders."
    return named_function(builder, name, base.__module__, f"Build {noun}.\n\n    {doc}\n    ")


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
    model.description = d
    model.spec = spec
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


SPEC = ModelSpec(
    name="llama3_2_vision",
    architectures=("MllamaForConditionalGeneration",),
    from_hf_config=read,
    to_hf_config=write,
    weight_maps={"hf": HF, "meta": META_FILES, "hf_modules": HF_MODULES},
    model_types=("LLAMA3_VISION",),
    builder=build_vision,
)

_11B = VisionDescription(
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
    tile_size=560,
    clip_dim=1280,
    num_clip_layers=32,
    num_clip_heads=16,
    clip_hidden_states=(3, 7, 15, 23, 30),
    num_projection_layers=8,
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


def _builders(name: str, size: str) -> tuple[Builder, Builder]:
    """Make the builders of a size, without and with LoRA adapters."""

    def full(
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
        for part, trains in parts.items():
            if not isinstance(trains, bool):
                raise ModelError(f"{part} is {trains!r}, but it must be True or False (adapters: lora_{name}).")
        return build_vision(replace(SIZES[name], tile_size=image_size), SPEC, **parts)

    def lora(
        lora_attn_modules: LoraAttnModules,
        decoder_trainable: Part = "frozen",
        encoder_trainable: Part = "lora",
        fusion_trainable: Part = "lora",
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
            build_vision(replace(SIZES[name], tile_size=image_size), SPEC),
            {part.removesuffix("_trainable"): way == "lora" for part, way in parts.items()},
            lora_attn_modules,
            apply_lora_to_mlp,
            apply_lora_to_output,
            lora_rank=lora_rank,
            lora_alpha=lora_alpha,
            lora_dropout=lora_dropout,
            use_dora=use_dora,
            quantize_base=quantize_base,
        )

    return (
        named_function(full, name, __name__, _DOC.format(size=size)),
        named_function(lora, f"lora_{name}", __name__, _LORA_DOC.format(size=size)),
    )


llama3_2_vision_11b, lora_llama3_2_vision_11b = _builders("llama3_2_vision_11b", "11B")
llama3_2_vision_90b, lora_llama3_2_vision_90b = _builders("llama3_2_vision_90b", "90B")
qlora_llama3_2_vision_11b = partial(lora_llama3_2_vision_11b, quantize_base=True)
qlora_llama3_2_vision_90b = partial(lora_llama3_2_vision_90b, quantize_base=True)

__getattr__ = former_names(__name__)

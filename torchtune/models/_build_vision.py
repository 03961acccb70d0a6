"""Build vision towers and vision-language models from their descriptions."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn

from torchtune.models._build import build, feed_forward
from torchtune.models._hf_vision import ImageTextFormat, read_config, write_config
from torchtune.models._image_processors import ImageProcessor
from torchtune.models._spec import ModelSpec
from torchtune.models._vision_description import ImageTextDescription, VisionDescription
from torchtune.models._weight_map import WeightMap
from torchtune.modules.attention import MultiHeadAttention
from torchtune.modules.feed_forward import FeedForward
from torchtune.modules.layer_norm import Fp32LayerNorm
from torchtune.modules.model_fusion import ImageTextModel
from torchtune.modules.position_embeddings import GridRotaryPositionalEmbeddings
from torchtune.modules.rms_norm import RMSNorm
from torchtune.modules.transformer import TransformerSelfAttentionLayer
from torchtune.modules.vision_tower import (
    AxisPositions,
    ClassedPositions,
    ClippedLinear,
    InterpolatedPositions,
    PatchMerger,
    Standardization,
    VisionTower,
)

_POSITIONS = {"interpolated": InterpolatedPositions, "classed": ClassedPositions, "axes": AxisPositions}


def build_image_text(d: ImageTextDescription, spec: ModelSpec | None = None) -> ImageTextModel:
    """Build a vision-language model with image tokens in the text sequence, on the default device and dtype.

    Args:
        d: the description of the model.
        spec: the model family; checkpoints read it from the model.
    """
    decoder = build(d.text)
    if decoder.layer_embeddings is not None:  # as in transformers, images give the pad token's embedding no gradient
        decoder.layer_embeddings.embeddings.padding_idx = d.pad_token
    model = ImageTextModel(
        decoder,
        build_tower(d.vision),
        d.image_tokens,
        grid_positions=bool(d.rope_axes),
        pad_token=d.pad_token,
        image_blocks=d.image_blocks,
    )
    model.description, model.spec = d, spec
    return model


def image_text_family(
    name: str,
    formats: Sequence[ImageTextFormat],
    names: WeightMap,
    processor: type[ImageProcessor],
    text: ModelSpec | None = None,
    weight_maps: Mapping[str, WeightMap] | None = None,
    **more: Any,
) -> ModelSpec:
    """Make the specification of a family of vision-language models.

    Args:
        name: see :class:`ModelSpec`.
        formats: formats of ``config.json``.
        names: weight names of Hugging Face's files; if the names in ``transformers`` differ, the family reads both.
        processor: class of the image processor.
        text: specification of the text decoder, which provides the other attributes.
        weight_maps: weight names of further formats.
        **more: further attributes of :class:`ModelSpec`.
    """
    inside = {} if names.modules == WeightMap(()).modules else {"hf_modules": names.prefixed(dict(names.modules))}
    values = {
        "name": name,
        "architectures": tuple(dict.fromkeys(one.architecture for one in formats)),
        "from_hf_config": partial(read_config, formats),
        "to_hf_config": partial(write_config, formats),
        "weight_maps": {"hf": names, **inside, **(weight_maps or {})},
        "builder": build_image_text,
        "image_processor": processor.from_config,
        **more,
    }
    return replace(text, **values) if text else ModelSpec(**values)


def build_tower(v: VisionDescription) -> VisionTower:
    """Build a vision tower with its projector."""
    rope = None if v.rope == "none" else GridRotaryPositionalEmbeddings(v.head_dim, v.rope_base, kind=v.rope)
    table = _POSITIONS.get(v.positions)
    return VisionTower(
        patch_norm=_norm(v.norm, v.patch_values, v.norm_eps) if v.patch_norms else None,
        patch_embed=nn.Linear(v.patch_values, v.embed_dim, bias=v.patch_bias),
        embed_norm=_norm(v.norm, v.embed_dim, v.norm_eps) if v.patch_norms else None,
        positions=None if table is None else table(v.positions_side, v.embed_dim),
        rope=rope,
        first_norm=_norm(v.norm, v.embed_dim, v.norm_eps) if v.first_norm else None,
        layers=[_layer(v, rope) for _ in range(v.num_layers)],
        norm=_norm(v.norm, v.embed_dim, v.norm_eps) if v.last_norm else None,
        projector=_projector(v),
        deep_projectors={layer: _projector(v, deep=True) for layer in v.deep_layers},
        merge=v.merge,
        window=v.window,
        full_layers=v.full_layers,
    )


def _norm(kind: str, dim: int, eps: float) -> nn.Module | None:
    kinds = {"layer": Fp32LayerNorm, "rms": RMSNorm, "plain": partial(nn.RMSNorm, elementwise_affine=False)}
    return kinds[kind](dim, eps=eps) if kind in kinds else None


def _layer(v: VisionDescription, rope: nn.Module | None) -> TransformerSelfAttentionLayer:
    d = v.embed_dim
    biases = {**dict.fromkeys(("q_proj", "k_proj", "v_proj"), v.attn_bias), "output_proj": v.attn_output_bias}
    norm = partial(_norm, v.norm, d, v.norm_eps)
    layer = TransformerSelfAttentionLayer(
        MultiHeadAttention(
            embed_dim=d,
            num_heads=v.num_heads,
            num_kv_heads=v.num_heads,
            head_dim=v.head_dim,
            **{name: nn.Linear(d, d, bias=bias) for name, bias in biases.items()},
            pos_embeddings=rope,
            is_causal=False,
            q_norm=RMSNorm(v.head_dim, v.norm_eps) if v.head_norms else None,
            k_norm=RMSNorm(v.head_dim, v.norm_eps) if v.head_norms else None,
            v_norm_eps=v.norm_eps if v.head_norms else None,
            qk_norm_before_rope=True,
            scale=v.attn_scale,
        ),
        feed_forward(v, v.intermediate_dim),
        sa_norm=norm(),
        mlp_norm=norm(),
        sa_scale=norm() if v.post_norms else None,
        mlp_scale=norm() if v.post_norms else None,
    )
    if v.clipped:
        for path, module in list(layer.named_modules()):
            if isinstance(module, nn.Linear):
                layer.set_submodule(path, ClippedLinear(module))
    return layer


def _projector(v: VisionDescription, deep: bool = False) -> PatchMerger:
    merged = v.embed_dim if v.merge_pools else v.embed_dim * v.merge**2
    width, bias, reduce = merged, v.projector_bias, None
    if v.merge_reduces:
        width, reduce = v.embed_dim, nn.Linear(width, v.embed_dim, bias=False)
    elif v.projector_first:
        reduce = nn.Sequential(nn.Linear(width, v.projector_dim, bias=bias), nn.GELU())
        width = v.projector_dim
    elif v.merge_standardized:
        reduce = Standardization(v.embed_dim)
    mlp: nn.Module = nn.Linear(width, v.projector_dim or v.output_dim, bias=bias)
    if v.projector_dim:
        mlp = FeedForward(
            gate_proj=mlp, down_proj=nn.Linear(v.projector_dim, v.output_dim, bias=bias), activation=nn.GELU()
        )
    norms_merged = deep or v.merge_pools
    norm = _norm(v.merge_norm, merged if norms_merged else v.embed_dim, v.merge_norm_eps)
    return PatchMerger(
        v.merge,
        mlp,
        **{"merged_norm" if norms_merged else "norm": norm},
        reduce=reduce,
        channels_first=v.merge_channels_first,
        pools=v.merge_pools,
    )

"""Build vision towers and vision-language models, from descriptions and from checkpoints."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from torch import nn

from torchtune.models._build import build, feed_forward
from torchtune.models._builders import LoraAttnModules, Model, convert_to_lora
from torchtune.models._description import ImageTextDescription, ModelError, VisionDescription
from torchtune.models._from_hf_config import from_hf_config
from torchtune.models._hf_vision import ImageTextFormat, read_config, write_config
from torchtune.models._image_processors import ImageProcessor
from torchtune.models._spec import ModelSpec
from torchtune.models._weight_map import WeightMap
from torchtune.modules.attention import MultiHeadAttention
from torchtune.modules.feed_forward import FeedForward
from torchtune.modules.model_fusion import ImageTextModel
from torchtune.modules.position_embeddings import GridRotaryPositionalEmbeddings
from torchtune.modules.rms_norm import Fp32LayerNorm, RMSNorm
from torchtune.modules.transformer import TransformerSelfAttentionLayer
from torchtune.modules.vision_transformer import (
    AxisPositions,
    ClassedPositions,
    ClippedLinear,
    InterpolatedPositions,
    PatchMerger,
    Standardization,
    VisionTower,
)

# How a part of a model is trained: not at all, by adapters, or all of its weights.
PartTraining = Literal["frozen", "lora", "full"]

# Kind of learned position embeddings -> module.
_POSITIONS = {"interpolated": InterpolatedPositions, "classed": ClassedPositions, "axes": AxisPositions}


def build_image_text(d: ImageTextDescription, spec: ModelSpec | None = None) -> ImageTextModel:
    """Build a vision-language model with image tokens in the text sequence, on the default device and dtype.

    Args:
        d: the description of the model.
        spec: the model family; checkpoints read it from the model.
    """
    decoder = build(d.text)
    if decoder.layer_embeddings is not None:
        # As in transformers, images give the embedding of the pad token no gradient.
        decoder.layer_embeddings.embeddings.padding_idx = d.pad_token
    model = ImageTextModel(
        decoder,
        build_tower(d.vision),
        d.image_tokens,
        grid_positions=bool(d.rope_axes),
        pad_token=d.pad_token,
        image_blocks=d.image_blocks,
    )
    model.description = d
    model.spec = spec
    return model


def image_text_family(
    name: str,
    formats: Sequence[ImageTextFormat],
    names: WeightMap,
    processor: type[ImageProcessor],
    text: ModelSpec | None = None,
    weight_maps: Mapping[str, WeightMap] | None = None,
    **attributes: Any,
) -> ModelSpec:
    """Make the specification of a family of vision-language models.

    Args:
        name: see :class:`ModelSpec`.
        formats: formats of ``config.json``.
        names: weight names of Hugging Face's files; if the names in ``transformers`` differ, the family reads both.
        processor: class of the image processor.
        text: specification of the text decoder, which provides the other attributes.
        weight_maps: weight names of further formats.
        **attributes: further attributes of :class:`ModelSpec`.
    """
    all_maps = {"hf": names}
    if names.modules != WeightMap(()).modules:  # modules of transformers have other names than its files
        all_maps["hf_modules"] = names.prefixed(dict(names.modules))
    all_maps |= weight_maps or {}
    values = {
        "name": name,
        # Once each, in order: formats of one architecture may differ in their text decoder.
        "architectures": tuple(dict.fromkeys(hf_format.architecture for hf_format in formats)),
        "from_hf_config": partial(read_config, formats),
        "to_hf_config": partial(write_config, formats),
        "weight_maps": all_maps,
        "builder": build_image_text,
        "image_processor": processor.from_config,
        **attributes,
    }
    if text is None:
        return ModelSpec(**values)
    return replace(text, **values)


def build_tower(v: VisionDescription) -> VisionTower:
    """Build a vision tower with its projector."""
    rope = None
    if v.rope != "none":
        rope = GridRotaryPositionalEmbeddings(v.head_dim, v.rope_base, kind=v.rope)
    # The order in which modules are built decides about their random weights.
    patch_embed = nn.Linear(v.patch_values, v.embed_dim, bias=v.patch_bias)
    positions = None
    if v.positions != "none":
        positions = _POSITIONS[v.positions](v.positions_side, v.embed_dim)
    return VisionTower(
        patch_norm=_norm(v.norm, v.patch_values, v.norm_eps) if v.patch_norms else None,
        patch_embed=patch_embed,
        embed_norm=_norm(v.norm, v.embed_dim, v.norm_eps) if v.patch_norms else None,
        positions=positions,
        rope=rope,
        first_norm=_norm(v.norm, v.embed_dim, v.norm_eps) if v.first_norm else None,
        layers=[tower_layer(v, rope) for _ in range(v.num_layers)],
        norm=_norm(v.norm, v.embed_dim, v.norm_eps) if v.last_norm else None,
        projector=_projector(v),
        deep_projectors={layer: _projector(v, deep=True) for layer in v.deep_layers},
        merge=v.merge,
        window=v.window,
        full_layers=v.full_layers,
    )


def _norm(kind: str, dim: int, eps: float) -> nn.Module | None:
    """Build a norm of a kind of :attr:`VisionDescription.norm` or ``merge_norm``; None for ``"none"``."""
    if kind == "layer":
        return Fp32LayerNorm(dim, eps=eps)
    if kind == "rms":
        return RMSNorm(dim, eps=eps)
    if kind == "plain":
        return nn.RMSNorm(dim, eps=eps, elementwise_affine=False)
    return None


def tower_layer(v: VisionDescription, rope: nn.Module | None = None) -> TransformerSelfAttentionLayer:
    """Build a layer of a vision tower, whose patches attend to each other in both directions."""
    width = v.embed_dim
    norm = partial(_norm, v.norm, width, v.norm_eps)
    layer = TransformerSelfAttentionLayer(
        MultiHeadAttention(
            embed_dim=width,
            num_heads=v.num_heads,
            num_kv_heads=v.num_heads,
            head_dim=v.head_dim,
            q_proj=nn.Linear(width, width, bias=v.attn_bias),
            k_proj=nn.Linear(width, width, bias=v.attn_bias),
            v_proj=nn.Linear(width, width, bias=v.attn_bias),
            output_proj=nn.Linear(width, width, bias=v.attn_output_bias),
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
        # A list, because set_submodule changes the modules that named_modules walks through.
        for path, module in list(layer.named_modules()):
            if isinstance(module, nn.Linear):
                layer.set_submodule(path, ClippedLinear(module))
    return layer


def _projector(v: VisionDescription, deep: bool = False) -> PatchMerger:
    """Build the projector of the tower's output, or with ``deep`` of the output of one of its layers."""
    if v.merge_pools:
        merged_dim = v.embed_dim  # a token is the mean of its patches
    else:
        merged_dim = v.embed_dim * v.merge**2  # their concatenation
    input_dim = merged_dim
    reduce: nn.Module | None = None  # between the merge and the MLP; at most one of the three kinds
    if v.merge_reduces:
        reduce = nn.Linear(merged_dim, v.embed_dim, bias=False)
        input_dim = v.embed_dim
    elif v.projector_first:
        reduce = nn.Sequential(nn.Linear(merged_dim, v.projector_dim, bias=v.projector_bias), nn.GELU())
        input_dim = v.projector_dim
    elif v.merge_standardized:
        reduce = Standardization(v.embed_dim)
    # Without an intermediate width, the projector is this layer alone.
    mlp: nn.Module = nn.Linear(input_dim, v.projector_dim or v.output_dim, bias=v.projector_bias)
    if v.projector_dim:
        down_proj = nn.Linear(v.projector_dim, v.output_dim, bias=v.projector_bias)
        mlp = FeedForward(gate_proj=mlp, down_proj=down_proj, activation=nn.GELU())
    norms: dict[str, nn.Module] = {}
    if deep or v.merge_pools:  # the token is normalized after its patches are merged
        norms["merged_norm"] = _norm(v.merge_norm, merged_dim, v.merge_norm_eps)
    else:  # each patch is normalized before it is merged
        norms["norm"] = _norm(v.merge_norm, v.embed_dim, v.merge_norm_eps)
    return PatchMerger(
        v.merge,
        mlp,
        **norms,
        reduce=reduce,
        channels_first=v.merge_channels_first,
        pools=v.merge_pools,
    )


def adapt_parts(
    model: Model,
    parts: Mapping[str, PartTraining],
    *,
    lora_attn_modules: LoraAttnModules,
    apply_lora_to_mlp: bool,
    apply_lora_to_output: bool,
    quantize_base: bool,
    part_of: Callable[[str], str],
    **options: Any,
) -> Model:
    """Add LoRA adapters to the parts that are ``"lora"``, freeze all other parameters, and return the model.

    See :func:`add_lora` for the arguments, and :class:`~torchtune.modules.peft.LoRA` for ``options``; ``part_of``
    returns the part of a module from its path.

    Raises:
        ModelError: a part that is ``"lora"`` has no module with an adapter.
    """
    from torchtune.modules.peft import LoRA

    # A projector is adapted whole: the arguments of add_lora choose among the layers of the other parts.
    candidates = []
    for path, module in model.named_modules():
        if isinstance(module, nn.Linear) and part_of(path) == "projector":
            candidates.append(path)
    if lora_attn_modules or apply_lora_to_mlp or apply_lora_to_output:  # LoRA raises if it has no target
        selection = LoRA(
            attn_modules=lora_attn_modules, apply_to_mlp=apply_lora_to_mlp, apply_to_output=apply_lora_to_output
        )
        candidates += selection.select(model)
    targets = [path for path in dict.fromkeys(candidates) if parts.get(part_of(path)) == "lora"]
    adapted_parts = {part_of(path) for path in targets}
    for part, training in parts.items():
        if training == "lora" and part not in adapted_parts:
            raise ModelError(
                f"{part} is 'lora', but lora_attn_modules and apply_lora_to_mlp name none of its layers: name "
                "projections of attention, or choose 'frozen'."
            )
    return convert_to_lora(model, LoRA(target_modules=targets, **options), quantize_base)


def check_parts(parts: Mapping[str, PartTraining], trained: PartTraining, alternative: str) -> None:
    """Raise :class:`ModelError` unless every part is ``trained`` or ``"frozen"``, and at least one is ``trained``.

    Args:
        parts: name of an argument or a part -> its value.
        trained: ``"full"`` or ``"lora"``, the way in which this builder trains parts.
        alternative: what trains a part in the other way, for the message.
    """
    for part, training in parts.items():
        if training not in ("frozen", trained):
            hint = f" ({alternative})" if training in ("lora", "full") else ""
            raise ModelError(f"{part} is {training!r}: choose '{trained}' or 'frozen'{hint}.")
    if trained not in parts.values():
        raise ModelError(f"{', '.join(parts)} are all 'frozen': nothing would be trained, choose '{trained}' for one.")


def part_of_module(path: str) -> str:
    """Return the part of a model that a parameter or module belongs to, from its dotted path."""
    if path.startswith("decoder."):
        return "language_model"
    if "projector" in path:
        return "projector"
    return "vision_tower"


def image_text_model(
    checkpoint_dir: str | Path,
    vision_tower: PartTraining = "frozen",
    projector: PartTraining = "full",
    language_model: PartTraining = "full",
) -> ImageTextModel:
    """Build a vision-language model with image tokens from the ``config.json`` of its checkpoint.

    Args:
        checkpoint_dir: folder of the checkpoint.
        vision_tower: ``"full"`` trains the vision tower, ``"frozen"`` does not.
        projector: as ``vision_tower``, for the projector of the tower's output, including DeepStack projectors.
        language_model: as ``vision_tower``, for the text decoder.

    Raises:
        ModelError: the model is a text model, a part is ``"lora"``, or all parts are frozen; further cases in
            :func:`from_hf_config`.

    Example:
        >>> torchtune.models.image_text_model(checkpoint)
        Traceback (most recent call last):
        ...
        torchtune.models._description.ModelError: ... has a model of text: use from_hf_config, or ...
    """
    model = _build_from_checkpoint(checkpoint_dir)
    parts = {"vision_tower": vision_tower, "projector": projector, "language_model": language_model}
    check_parts(parts, "full", "lora_image_text_model has adapters")
    for path, parameter in model.named_parameters():
        if parameter.requires_grad:  # others are constants of the checkpoint
            parameter.requires_grad_(parts[part_of_module(path)] == "full")
    return model


def lora_image_text_model(
    checkpoint_dir: str | Path,
    lora_attn_modules: LoraAttnModules,
    vision_tower: PartTraining = "frozen",
    projector: PartTraining = "frozen",
    language_model: PartTraining = "lora",
    apply_lora_to_mlp: bool = False,
    apply_lora_to_output: bool = False,
    lora_rank: int = 8,
    lora_alpha: float = 16,
    lora_dropout: float = 0.0,
    use_dora: bool = False,
    quantize_base: bool = False,
) -> ImageTextModel:
    """Build a vision-language model with LoRA adapters from the ``config.json`` of its checkpoint.

    Args:
        checkpoint_dir: folder of the checkpoint.
        lora_attn_modules: attention projections with an adapter, in the tower and in the text decoder.
        vision_tower: ``"lora"``: the vision tower has adapters; ``"frozen"``: it has none.
        projector: as ``vision_tower``, for all linear layers of the projector.
        language_model: as ``vision_tower``, for the text decoder.
        apply_lora_to_mlp: whether the feed-forward projections have an adapter.
        apply_lora_to_output: whether the output projection has an adapter; it must not be tied to the embeddings.
        lora_rank: rank of the adapters.
        lora_alpha: the adapters are scaled by ``lora_alpha / lora_rank``.
        lora_dropout: dropout probability of the adapters' input.
        use_dora: train the magnitude of the adapted weights separately (DoRA).
        quantize_base: quantize the frozen base weights to NF4.

    Raises:
        ModelError: the model is a text model, a part is ``"full"``, which adapter files cannot store, or all parts are
            frozen; further cases in :func:`from_hf_config`.
    """
    model = _build_from_checkpoint(checkpoint_dir)
    parts = {"vision_tower": vision_tower, "projector": projector, "language_model": language_model}
    check_parts(parts, "lora", "adapter files cannot store other weights: image_text_model trains them")
    return adapt_parts(
        model,
        parts,
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


def _build_from_checkpoint(checkpoint_dir: str | Path) -> ImageTextModel:
    """Build the model of a checkpoint with its vision tower; raise :class:`ModelError` if it has none."""
    model = from_hf_config(checkpoint_dir, images=True)
    if not isinstance(model, ImageTextModel):
        raise ModelError(f"{checkpoint_dir} has a model of text: use from_hf_config, or the builder of its size.")
    return model

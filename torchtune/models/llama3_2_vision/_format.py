"""Llama 3.2 Vision: its description, ``config.json``, and weight names in the files of Hugging Face and Meta."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from torchtune.models._description import Description, ModelError, VisionDescription
from torchtune.models._hf_config import HFFormat
from torchtune.models._hf_fields import Fields, is_whole
from torchtune.models._weight_map import (
    ExternalSlice,
    Identity,
    Op,
    Row,
    Slices,
    WeightMap,
    WeightMapError,
    is_empty,
)
from torchtune.models._weight_names import HF_INTERLEAVED, META
from torchtune.modules.transforms.vision import find_supported_resolutions


@dataclass(frozen=True, kw_only=True)
class TilesDescription(VisionDescription):
    """Description of an image encoder over tiles: CLIP, and a projection head with layers of its own.

    Raises:
        ModelError: a field is invalid, or fields are inconsistent.
    """

    # CLIP
    tile_size: int
    max_num_tiles: int = 4
    hidden_layers: tuple[int, ...]  # layers whose inputs are also projected
    patch_bias: bool = False
    attn_bias: bool = False
    attn_output_bias: bool = False
    activation: Literal["silu", "gelu", "gelu_tanh"] = "gelu"
    norm_eps: float = 1e-5
    first_norm: bool = True
    last_norm: bool = True

    # Projection head
    num_projection_layers: int

    def __post_init__(self) -> None:
        super().__post_init__()
        for field in ("tile_size", "num_layers", "max_num_tiles", "num_channels", "num_projection_layers"):
            if not 1 <= getattr(self, field) < 2**16:
                raise ModelError(f"vision: {field} must be from 1 to {2**16 - 1:,}, got {getattr(self, field)}.")
        if self.tile_size % self.patch_size:
            raise ModelError(
                f"vision: tile_size ({self.tile_size}) must be a multiple of patch_size ({self.patch_size})."
            )
        are_layers = all(0 <= layer < self.num_layers for layer in self.hidden_layers)
        if not are_layers or list(self.hidden_layers) != sorted(set(self.hidden_layers)):
            raise ModelError(
                f"vision: hidden_layers must be layers of the encoder, 0 to {self.num_layers - 1}, in ascending order, "
                f"got {list(self.hidden_layers)}."
            )

    @property
    def aspect_ratios(self) -> list[tuple[int, int]]:
        """All (height, width) of images in tiles, in the order of checkpoints, which number them from 1."""
        return find_supported_resolutions(self.max_num_tiles, tile_size=1)


@dataclass(frozen=True, kw_only=True)
class DeepFusionDescription(Description):
    """Description of a text decoder with cross-attention to the tiles of images.

    Raises:
        ModelError: a field is invalid, or fields are inconsistent.
    """

    fusion_layers: tuple[int, ...]  # decoder layers with a cross-attention layer before them
    num_special_tokens: int = 8  # additional tokens, which are trained with the fusion
    vision: TilesDescription

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.fusion_layers or not all(0 <= layer < self.num_layers for layer in self.fusion_layers):
            raise ModelError(
                f"fusion_layers must be layers of the decoder, 0 to {self.num_layers - 1}, got "
                f"{list(self.fusion_layers)}."
            )
        if not 1 <= self.num_special_tokens < 2**16:
            raise ModelError(f"num_special_tokens must be from 1 to {2**16 - 1:,}, got {self.num_special_tokens}.")
        if self.vision.output_dim != self.embed_dim:
            raise ModelError(
                f"vision: output_dim ({self.vision.output_dim}) must be embed_dim of the text ({self.embed_dim})."
            )

    def other_numbers(self, layer: int) -> dict[str, int]:
        """Return the indices of a decoder layer and of the cross-attention before it in checkpoints.

        ``numbered`` and ``cross`` count both kinds of layers, ``fusion`` counts cross-attention layers.
        """
        num_before = sum(fusion_layer < layer for fusion_layer in self.fusion_layers)
        has_fusion = layer in self.fusion_layers
        return {
            "numbered": layer + num_before + has_fusion,
            "cross": layer + num_before,
            "fusion": num_before,
        }


_NAME = "MllamaForConditionalGeneration"
_TEXT = HFFormat(
    _NAME,
    "mllama_text_model",
    "interleaved",
    defaults={
        "num_key_value_heads": 8,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-5,
        "vocab_size": 128_256,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_attention_heads": 32,
    },
)
# Defaults of transformers
_CROSS_LAYERS = [3, 8, 13, 18, 23, 28, 33, 38]
_NUM_LAYERS = 40
_HIDDEN_LAYERS = [3, 7, 15, 23, 30]
_TOWER_FIELDS = (  # of vision_config: (name in the file, name in the description, default of transformers)
    ("image_size", "tile_size", 448),
    ("patch_size", "patch_size", 14),
    ("hidden_size", "embed_dim", 1280),
    ("num_hidden_layers", "num_layers", 32),
    ("attention_heads", "num_heads", 16),
    ("num_global_layers", "num_projection_layers", 8),
    ("max_num_tiles", "max_num_tiles", 4),
    ("num_channels", "num_channels", 3),
)


def read(config: Mapping[str, Any], ignore_fields: Collection[str] = ()) -> DeepFusionDescription:
    """Make a description from the contents of a ``config.json``; see :meth:`HFFormat.read`.

    Raises:
        ModelError: a field is missing, or its value has no equivalent in a description. The message names it.
    """
    for name in ("text_config", "vision_config"):
        if not isinstance(config.get(name), Mapping):
            raise ModelError(f"config.json of {_NAME} lacks the object '{name}': download it again.")
    outer_names = {"text_config", "vision_config", "image_token_index", "tie_word_embeddings"}
    Fields(config, _NAME, {*ignore_fields, *outer_names}).refuse_unread()
    text, fusion_layers = _read_text(dict(config["text_config"]), ignore_fields)
    vision = _read_vision(dict(config["vision_config"]), text.embed_dim, ignore_fields)
    return DeepFusionDescription(**vars(text), fusion_layers=fusion_layers, vision=vision)


def _read_text(config: dict[str, Any], ignore_fields: Collection[str]) -> tuple[Description, tuple[int, ...]]:
    """Read the text decoder, and the indices of its layers with cross-attention before them."""
    fields = Fields(config, _NAME, set(ignore_fields))
    num_layers = config.pop("num_hidden_layers", _NUM_LAYERS)  # self-attention and cross-attention
    cross_layers = fields.list_of("cross_attention_layers", num_layers, int, _CROSS_LAYERS)
    # The self-attention layer after a cross-attention, counted without cross-attention.
    fusion_layers = tuple(layer - num_before for num_before, layer in enumerate(cross_layers))
    fits = is_whole(num_layers, 2**16) and len(fusion_layers) > 0
    if fits:
        is_ascending = list(fusion_layers) == sorted(set(fusion_layers))
        fits = is_ascending and fusion_layers[0] >= 0 and fusion_layers[-1] < num_layers - len(fusion_layers)
    if not fits:
        raise ModelError(
            f"config.json of {_NAME} has cross_attention_layers = {cross_layers} of {num_layers} layers, but a "
            "self-attention layer must come after each of them."
        )
    # The dropout of attention has another name here. transformers does not use the usual one.
    dropout = config.pop("dropout", None)
    if dropout and config.get("attention_dropout"):
        raise fields.refusal("attention_dropout", config["attention_dropout"])
    if dropout:
        config["attention_dropout"] = dropout
    if "rope_parameters" not in config:  # which has the base inside
        config.setdefault("rope_theta", 500_000.0)
    config.pop("cross_attention_layers", None)
    config["num_hidden_layers"] = num_layers - len(fusion_layers)
    text = _TEXT.read(config, ignore_fields)
    if text.tie_word_embeddings:  # the embeddings have rows of special tokens, which the output projection lacks
        raise fields.refusal("tie_word_embeddings", fields.peek("tie_word_embeddings"))
    if text.head_dim * text.num_heads != text.embed_dim:  # transformers has no field for it
        raise fields.refusal("head_dim", fields.peek("head_dim"))
    return text, fusion_layers


def _read_vision(config: dict[str, Any], output_dim: int, ignore_fields: Collection[str]) -> TilesDescription:
    """Read the image encoder.

    Args:
        config: ``vision_config``.
        output_dim: width of the text decoder.
        ignore_fields: names of fields that need not be read.
    """
    # Configs of 2024 have tie_word_embeddings here, although the image encoder has no tokens.
    fields = Fields(config, f"{_NAME} (vision_config)", {*ignore_fields, "tie_word_embeddings"})
    values = {attribute: fields.typed(name, default) for name, attribute, default in _TOWER_FIELDS}
    hidden_layers = tuple(fields.list_of("intermediate_layers_indices", values["num_layers"], int, _HIDDEN_LAYERS))
    vision = TilesDescription(
        **values,
        intermediate_dim=4 * values["embed_dim"],
        output_dim=output_dim,
        hidden_layers=hidden_layers,
        norm_eps=float(fields.take("norm_eps", 1e-5)),
    )
    fields.typed("num_attention_heads", vision.num_heads)  # marks it as read: attention_heads is the field that counts
    # Fields with one supported value: (name, value, default of transformers).
    for name, value, default in (
        ("hidden_act", "gelu", "gelu"),
        ("intermediate_size", vision.intermediate_dim, 5120),
        ("vision_output_dim", vision.embed_dim * (1 + len(hidden_layers)), 7680),
        ("supported_aspect_ratios", _as_lists(vision.aspect_ratios), None),
    ):
        if fields.take(name, default) not in (value, None):
            raise fields.refusal(name, fields.peek(name))
    fields.refuse_unread()
    return vision


def _as_lists(ratios: Sequence[tuple[int, int]]) -> list[list[int]]:
    return [[height, width] for height, width in ratios]


def write(d: DeepFusionDescription) -> dict[str, Any]:
    """Make the ``config.json`` from which ``transformers`` builds the same model.

    Raises:
        ModelError: a ``config.json`` cannot express the description.
    """
    text = _TEXT.write(d.text)
    # Of the whole model, computed by transformers from other fields, and called "dropout" in this architecture.
    for name in ("architectures", "head_dim", "attention_dropout"):
        text.pop(name, None)
    text["num_hidden_layers"] = d.num_layers + len(d.fusion_layers)
    text["cross_attention_layers"] = [d.other_numbers(layer)["cross"] for layer in d.fusion_layers]
    text["dropout"] = d.attn_dropout
    vision = {
        "model_type": "mllama_vision_model",
        "hidden_act": "gelu",
        **{name: getattr(d.vision, attribute) for name, attribute, _ in _TOWER_FIELDS},
        "intermediate_size": d.vision.intermediate_dim,
        "vision_output_dim": d.vision.embed_dim * (1 + len(d.vision.hidden_layers)),
        "norm_eps": d.vision.norm_eps,
        "intermediate_layers_indices": list(d.vision.hidden_layers),
        "supported_aspect_ratios": _as_lists(d.vision.aspect_ratios),
    }
    config = {
        "architectures": [_NAME],
        "model_type": "mllama",
        "image_token_index": d.vocab_size,  # the first of the special tokens, which follow the vocabulary
        "text_config": text,
        "vision_config": vision,
    }
    # Whoever reads this file must get the same model.
    reread = read(config)
    if reread != d:
        raise ModelError(f"A config.json of {_NAME} cannot express {d}, only {reread}.")
    return config


_FORKED = (
    "The checkpoint's embeddings of tiles differ from one aspect ratio to another, or of padding are not zero, but "
    "this model has one for every place in an image: use a checkpoint whose image encoder was not trained by others."
)


@dataclass(frozen=True)
class EmbeddingRows(Op):
    """Op that splits an external embedding into tokens and, the last rows, special tokens."""

    def to_tune(self, tensors: Sequence[Tensor], description: DeepFusionDescription) -> list[Tensor]:
        """Split the embedding."""
        return list(tensors[0].split([description.vocab_size, description.num_special_tokens]))

    def to_external(self, tensors: Sequence[Tensor], description: DeepFusionDescription) -> list[Tensor]:
        """Concatenate the embeddings."""
        return [torch.cat(list(tensors))]


@dataclass(frozen=True)
class Patches(Op):
    """Op between an external matrix ``[d, c * p * p]`` and our convolution ``[d, c, p, p]``."""

    def to_tune(self, tensors: Sequence[Tensor], description: DeepFusionDescription) -> list[Tensor]:
        """Convert the matrix to a convolution."""
        return [tensors[0].unflatten(1, description.vision.patch_shape)]

    def to_external(self, tensors: Sequence[Tensor], description: DeepFusionDescription) -> list[Tensor]:
        """Convert the convolution to a matrix."""
        return [tensors[0].flatten(1)]

    def external_slices(
        self, which: int, slices: Slices, shapes: Sequence[Sequence[int]], description: DeepFusionDescription
    ) -> list[ExternalSlice]:
        """Return complete rows."""
        if is_empty(slices):
            return []
        return [_FlatSlice(0, (slices[0], slice(0, shapes[0][1])))]


class _FlatSlice(ExternalSlice):
    """Rows of the external matrix of :class:`Patches`."""

    def of(self, ours: Tensor) -> Tensor:
        """Return the values of the external slice from our slice."""
        return ours.flatten(1)

    def fill(self, ours: Tensor, value: Tensor) -> None:
        """Copy the values of the external slice to our slice."""
        ours.copy_(value.view(ours.shape))


@dataclass(frozen=True)
class TileTable(Op):
    """Op between external tile embeddings by aspect ratio and ours by position.

    Ours are ``[rows, columns, n, d]``, the external ones ``[1 + ratios, tiles * n * d]`` with a copy of each position
    in every aspect ratio that has it. Ratio 0, and missing tiles of a ratio, are zero.
    """

    def to_tune(self, tensors: Sequence[Tensor], description: DeepFusionDescription) -> list[Tensor]:
        """Convert to embeddings by position, 0 if no ratio has it. Raises ``WeightMapError`` if copies differ."""
        external = tensors[0]
        max_num_tiles = description.vision.max_num_tiles
        # [1 + ratios, tiles, n, d]
        by_ratio = external.view(external.shape[0], max_num_tiles, -1, description.vision.embed_dim)
        by_position = by_ratio.new_zeros(max_num_tiles, max_num_tiles, *by_ratio.shape[2:])  # [rows, columns, n, d]
        for ratio, (height, width) in enumerate(description.vision.aspect_ratios, 1):
            by_position[:height, :width] = by_ratio[ratio, : height * width].unflatten(0, (height, width))
        # Later ratios overwrote earlier ones: with one embedding per position, all of them were equal.
        if not external.is_meta and not torch.equal(self.to_external([by_position], description)[0], external):
            raise WeightMapError(_FORKED)
        return [by_position]

    def to_external(self, tensors: Sequence[Tensor], description: DeepFusionDescription) -> list[Tensor]:
        """Convert to embeddings by aspect ratio."""
        by_position = tensors[0]
        ratios = description.vision.aspect_ratios
        by_ratio = by_position.new_zeros(len(ratios) + 1, description.vision.max_num_tiles, *by_position.shape[2:])
        for ratio, (height, width) in enumerate(ratios, 1):
            by_ratio[ratio, : height * width] = by_position[:height, :width].flatten(0, 1)
        return [by_ratio.flatten(1)]

    def external_slices(
        self, which: int, slices: Slices, shapes: Sequence[Sequence[int]], description: DeepFusionDescription
    ) -> list[ExternalSlice]:
        """Return a slice per tile of every ratio; our slice must have complete rows of positions."""
        if is_empty(slices):
            return []
        max_num_tiles = description.vision.max_num_tiles
        values_per_tile = shapes[0][1] // max_num_tiles
        rows = slices[0]
        external_slices: list[ExternalSlice] = []
        positions: set[tuple[int, int]] = set()
        ratios = [(0, 1), *description.vision.aspect_ratios]  # ratio 0 has no tiles
        for ratio, (height, width) in enumerate(ratios):
            for tile in range(max_num_tiles):
                external = (slice(ratio, ratio + 1), slice(tile * values_per_tile, (tile + 1) * values_per_tile))
                row, column = divmod(tile, width)
                if row >= height:
                    if rows.start == 0:  # one rank checks that missing tiles are zero
                        external_slices.append(_ZeroSlice(0, external))
                elif rows.start <= row < rows.stop:
                    is_first = (row, column) not in positions  # it is read, and later copies must equal it
                    external_slices.append(_PositionSlice(0, external, (row - rows.start, column), is_first=is_first))
                    positions.add((row, column))
        return external_slices


@dataclass(frozen=True, eq=False)
class _PositionSlice(ExternalSlice):
    """Slice of one position (row, column): the first slice of a position is copied, the others must be equal."""

    is_first: bool = True

    def of(self, ours: Tensor) -> Tensor:
        """Return the values of the external slice from our slice."""
        return ours[self.rows].reshape(1, -1)

    def fill(self, ours: Tensor, value: Tensor) -> None:
        """Copy the values of the external slice to our slice, or compare them."""
        row, column = self.rows
        value = value.view(ours.shape[2:]).to(ours)
        if self.is_first:
            if column == 0:
                ours[row].zero_()  # some positions of the row are in no aspect ratio
            ours[row, column] = value
        elif not torch.equal(ours[row, column], value):
            raise WeightMapError(_FORKED)


class _ZeroSlice(ExternalSlice):
    """Slice of zeros."""

    def of(self, ours: Tensor) -> Tensor:
        """Return zeros."""
        return ours.new_zeros(1, self.slices[1].stop - self.slices[1].start)

    def fill(self, ours: Tensor, value: Tensor) -> None:
        """Check that the external slice is zero."""
        if value.any():
            raise WeightMapError(_FORKED)


# Cross-attention: ours, Hugging Face, Meta
_CROSS = (
    ("attn.q_proj.weight", "cross_attn.q_proj.weight", "attention.wq.weight"),
    ("attn.k_proj.weight", "cross_attn.k_proj.weight", "attention.wk.weight"),
    ("attn.v_proj.weight", "cross_attn.v_proj.weight", "attention.wv.weight"),
    ("attn.output_proj.weight", "cross_attn.o_proj.weight", "attention.wo.weight"),
    ("attn.q_norm.scale", "cross_attn.q_norm.weight", "attention.q_norm.weight"),
    ("attn.k_norm.scale", "cross_attn.k_norm.weight", "attention.k_norm.weight"),
    ("mlp.w1.weight", "mlp.gate_proj.weight", "feed_forward.w1.weight"),
    ("mlp.w2.weight", "mlp.down_proj.weight", "feed_forward.w2.weight"),
    ("mlp.w3.weight", "mlp.up_proj.weight", "feed_forward.w3.weight"),
    ("ca_norm.scale", "input_layernorm.weight", "attention_norm.weight"),
    ("mlp_norm.scale", "post_attention_layernorm.weight", "ffn_norm.weight"),
    ("ca_scale.scale", "cross_attn_attn_gate", "gate_attn"),
    ("mlp_scale.scale", "cross_attn_mlp_gate", "gate_ffwd"),
)
# Layers of CLIP and of the projection head: ours, Hugging Face, Meta
_ENCODER_LAYER = (
    ("attn.q_proj.weight", "self_attn.q_proj.weight", "attn.wq.weight"),
    ("attn.k_proj.weight", "self_attn.k_proj.weight", "attn.wk.weight"),
    ("attn.v_proj.weight", "self_attn.v_proj.weight", "attn.wv.weight"),
    ("attn.output_proj.weight", "self_attn.o_proj.weight", "attn.wo.weight"),
    ("mlp.w1.weight", "mlp.fc1.weight", "mlp.c_fc.weight"),
    ("mlp.w1.bias", "mlp.fc1.bias", "mlp.c_fc.bias"),
    ("mlp.w2.weight", "mlp.fc2.weight", "mlp.c_proj.weight"),
    ("mlp.w2.bias", "mlp.fc2.bias", "mlp.c_proj.bias"),
    ("sa_norm.weight", "input_layernorm.weight", "ln_1.weight"),
    ("sa_norm.bias", "input_layernorm.bias", "ln_1.bias"),
    ("mlp_norm.weight", "post_attention_layernorm.weight", "ln_2.weight"),
    ("mlp_norm.bias", "post_attention_layernorm.bias", "ln_2.bias"),
)
_GATES = (("sa_scale.scale", "gate_attn", "gate_attn"), ("mlp_scale.scale", "gate_ffn", "gate_ffn"))
# Other weights of CLIP: ours, Hugging Face, Meta
_CLIP = (
    (
        "token_pos_embedding.local_token_positional_embedding",
        "gated_positional_embedding.embedding",
        "positional_embedding",
    ),
    (
        "token_pos_embedding.global_token_positional_embedding",
        "gated_positional_embedding.tile_embedding.weight",
        "gated_positional_embedding",
    ),
    ("token_pos_embedding.gate", "gated_positional_embedding.gate", "gated_positional_embedding_gate"),
    (
        "pre_tile_pos_embed.embedding",
        "pre_tile_positional_embedding.embedding.weight",
        "pre_tile_pos_embed.embedding",
    ),
    ("pre_tile_pos_embed.gate", "pre_tile_positional_embedding.gate", "pre_tile_pos_embed.gate"),
    ("ln_pre.weight", "layernorm_pre.weight", "ln_pre.weight"),
    ("ln_pre.bias", "layernorm_pre.bias", "ln_pre.bias"),
    (
        "post_tile_pos_embed.embedding",
        "post_tile_positional_embedding.embedding.weight",
        "post_tile_pos_embed.embedding",
    ),
    ("post_tile_pos_embed.gate", "post_tile_positional_embedding.gate", "post_tile_pos_embed.gate"),
    ("ln_post.weight", "layernorm_post.weight", "ln_post.weight"),
    ("ln_post.bias", "layernorm_post.bias", "ln_post.bias"),
    ("cls_token_embedding.weight", "class_embedding", "class_embedding"),
    ("conv.weight", "patch_embedding.weight", "conv1._linear.weight"),
)
# Prefixes of the names of the tables above, in the files of Hugging Face and Meta.
_PREFIXES = {
    "hf": {
        "cross": "language_model.model.layers.{cross}.",
        "clip": "vision_model.",
        "clip_layer": "vision_model.transformer.layers.{block}.",
        "head_layer": "vision_model.global_transformer.layers.{head}.",
        "projection": "multi_modal_projector.",
    },
    "meta": {
        "cross": "text_model.cross_attention_layers.{fusion}.",
        "clip": "vision_model.vision_encoder.",
        "clip_layer": "vision_model.vision_encoder.transformer.resblocks.{block}.",
        "head_layer": "vision_model.vision_encoder.global_transformer.resblocks.{head}.",
        "projection": "vision_model.vision_projection.",
    },
}
# Weights that files of Hugging Face hold by aspect ratio.
_TILE_TABLES = (
    "token_pos_embedding.global_token_positional_embedding",
    "pre_tile_pos_embed.embedding",
    "post_tile_pos_embed.embedding",
)


def _rows(file_format: Literal["hf", "meta"]) -> list[Row]:
    """Return the rows of all weights except the text decoder's."""
    prefixes = _PREFIXES[file_format]
    column = ("hf", "meta").index(file_format)
    rows = []
    for tune, *names in _CROSS:
        external = f"{prefixes['cross']}{names[column]}"
        rows.append(Row(external, f"decoder.layers.{{layer}}.fusion_layer.{tune}", when="fusion_layers"))
    for tune, *names in _ENCODER_LAYER:
        rows.append(Row(f"{prefixes['clip_layer']}{names[column]}", f"encoder.clip.layers.{{block}}.{tune}"))
    for tune, *names in (*_ENCODER_LAYER, *_GATES):
        rows.append(Row(f"{prefixes['head_layer']}{names[column]}", f"encoder.projection.layers.{{head}}.{tune}"))
    for tune, *names in _CLIP:
        op: Op = Identity()
        if file_format == "hf" and tune in _TILE_TABLES:
            op = TileTable()
        elif file_format == "meta" and tune == "conv.weight":  # a matrix in files of Meta
            op = Patches()
        rows.append(Row(f"{prefixes['clip']}{names[column]}", f"encoder.clip.{tune}", op))
    for parameter in ("weight", "bias"):
        rows.append(Row(f"{prefixes['projection']}{parameter}", f"encoder.projection.output.{parameter}"))
    return rows


def _text_rows(names: WeightMap, prefix: str, layer: str) -> list[Row]:
    """Return the rows of the text decoder's weights.

    Args:
        names: weight map of a text-only checkpoint.
        prefix: prefix of the external names.
        layer: placeholder of the external number of a layer.
    """
    rows = []
    for row in names.rows:
        if not row.external.startswith("score."):  # there are no classifiers with images
            external = prefix + row.external.replace("{layer}", layer)
            rows.append(Row(external, f"decoder.{row.tune}", row.op, row.when))
    return rows


_BOTH = ("decoder.tok_embeddings.weight", "decoder.tok_embeddings.fusion_embedding.weight")
_EMBEDDING = "language_model.model.embed_tokens.weight"
_HF_TEXT = [row for row in _text_rows(HF_INTERLEAVED, "language_model.", "{numbered}") if row.external != _EMBEDDING]
HF = WeightMap(
    (Row(_EMBEDDING, _BOTH, EmbeddingRows()), *_HF_TEXT, *_rows("hf")),
    modules=(
        ("language_model.model.", "model.language_model."),
        ("language_model.lm_head.", "lm_head."),
        ("vision_model.", "model.vision_model."),
        ("multi_modal_projector.", "model.multi_modal_projector."),
    ),
)
# transformers 5 can save tensors under its module names.
HF_MODULES = HF.prefixed(dict(HF.modules))
META_FILES = WeightMap(
    (
        *_text_rows(META, "text_model.", "{layer}"),
        Row("text_model.learnable_embedding.weight", _BOTH[1]),
        *_rows("meta"),
    ),
    ignore=("text_model.rope.freqs",),
)

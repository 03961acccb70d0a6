"""Llama 3.2 Vision: its description, ``config.json``, and weight names in the files of Hugging Face and Meta."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor

from torchtune.models._description import Description, ModelError
from torchtune.models._hf_config import HFFormat
from torchtune.models._hf_fields import Fields, is_whole
from torchtune.models._weight_map import Row, WeightMap, WeightMapError
from torchtune.models._weight_names import HF_INTERLEAVED, META
from torchtune.models._weight_ops import ExternalSlice, Identity, Op, Slices, is_empty


@dataclass(frozen=True, kw_only=True)
class VisionDescription(Description):
    """Description of the text decoder, the fusion layers and the image encoder.

    Raises:
        ModelError: a field is invalid, or fields are inconsistent.
    """

    # Fusion
    fusion_layers: tuple[int, ...]  # decoder layers with a cross-attention layer before them
    num_special_tokens: int = 8  # additional tokens, which are trained with the fusion

    # Encoder: CLIP ...
    tile_size: int
    clip_dim: int
    num_clip_layers: int
    num_clip_heads: int
    clip_hidden_states: tuple[int, ...]  # layers whose inputs are also projected
    patch_size: int = 14
    max_num_tiles: int = 4
    in_channels: int = 3
    clip_norm_eps: float = 1e-5
    # ... and the layers of the projection head
    num_projection_layers: int

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.fusion_layers or not all(0 <= layer < self.num_layers for layer in self.fusion_layers):
            raise ModelError(
                f"fusion_layers must be layers of the decoder, 0 to {self.num_layers - 1}, got "
                f"{list(self.fusion_layers)}."
            )
        sizes = ("tile_size", "patch_size", "clip_dim", "num_clip_layers", "num_clip_heads", "max_num_tiles")
        for name in (*sizes, "in_channels", "num_special_tokens", "num_projection_layers"):
            if not 1 <= getattr(self, name) < 2**16:
                raise ModelError(f"{name} must be from 1 to {2**16 - 1:,}, got {getattr(self, name)}.")
        if self.tile_size % self.patch_size:
            raise ModelError(f"tile_size ({self.tile_size}) must be a multiple of patch_size ({self.patch_size}).")
        if self.clip_dim % self.num_clip_heads:
            raise ModelError(
                f"clip_dim ({self.clip_dim}) must be a multiple of num_clip_heads ({self.num_clip_heads})."
            )
        are_layers = all(0 <= layer < self.num_clip_layers for layer in self.clip_hidden_states)
        if not are_layers or list(self.clip_hidden_states) != sorted(set(self.clip_hidden_states)):
            raise ModelError(
                f"clip_hidden_states must be layers of the encoder, 0 to {self.num_clip_layers - 1}, in ascending "
                f"order, got {list(self.clip_hidden_states)}."
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

    @property
    def aspect_ratios(self) -> list[tuple[int, int]]:
        """All (height, width) of images in tiles, in the order of checkpoints, which number them from 1."""
        return aspect_ratios(self.max_num_tiles)


def aspect_ratios(max_num_tiles: int) -> list[tuple[int, int]]:
    """Return all (height, width) of at most ``max_num_tiles`` tiles, by height, then by width."""
    sides = range(1, max_num_tiles + 1)
    return [(height, width) for height, width in product(sides, sides) if height * width <= max_num_tiles]


_NAME = "MllamaForConditionalGeneration"
_TEXT = HFFormat(
    _NAME,
    "mllama_text_model",
    "interleaved",
    defaults=(
        ("num_key_value_heads", 8),
        ("max_position_embeddings", 131_072),
        ("rms_norm_eps", 1e-5),
        ("vocab_size", 128_256),
        ("hidden_size", 4096),
        ("intermediate_size", 14_336),
        ("num_attention_heads", 32),
    ),
)
# Defaults of transformers
_CROSS_LAYERS = [3, 8, 13, 18, 23, 28, 33, 38]
_NUM_LAYERS = 40
_HIDDEN_STATES = [3, 7, 15, 23, 30]
_SIZES = (  # of vision_config: (name in the file, name in the description, default of transformers)
    ("image_size", "tile_size", 448),
    ("patch_size", "patch_size", 14),
    ("hidden_size", "clip_dim", 1280),
    ("num_hidden_layers", "num_clip_layers", 32),
    ("attention_heads", "num_clip_heads", 16),
    ("num_global_layers", "num_projection_layers", 8),
    ("max_num_tiles", "max_num_tiles", 4),
    ("num_channels", "in_channels", 3),
)


def read(config: Mapping[str, Any], ignore_fields: Collection[str] = ()) -> VisionDescription:
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
    vision = _read_vision(dict(config["vision_config"]), ignore_fields)
    return VisionDescription(**vars(text), fusion_layers=fusion_layers, **vision)


def _read_text(config: dict[str, Any], ignore_fields: Collection[str]) -> tuple[Description, tuple[int, ...]]:
    """Read the text decoder, and the indices of its layers with cross-attention before them."""
    fields = Fields(config, _NAME, set(ignore_fields))
    cross_layers = fields.list_of("cross_attention_layers", _NUM_LAYERS, int, _CROSS_LAYERS)
    num_layers = config.pop("num_hidden_layers", _NUM_LAYERS)  # self-attention and cross-attention
    # The self-attention layer after a cross-attention, counted without cross-attention.
    fusion_layers = tuple(layer - num_before for num_before, layer in enumerate(cross_layers))
    fits = is_whole(num_layers, 2**16) and fusion_layers and list(fusion_layers) == sorted(set(fusion_layers))
    if not fits or not 0 <= fusion_layers[0] <= fusion_layers[-1] < num_layers - len(fusion_layers):
        raise ModelError(
            f"config.json of {_NAME} has cross_attention_layers = {cross_layers} of {num_layers} layers, but a "
            "self-attention layer must come after each of them."
        )
    if config.pop("dropout", None) and config.get("attention_dropout"):
        raise fields.refusal("attention_dropout", config["attention_dropout"])
    if fields.peek("dropout"):
        config["attention_dropout"] = fields.peek("dropout")
    if "rope_parameters" not in config:
        config.setdefault("rope_theta", 500_000.0)
    config = {key: value for key, value in config.items() if key not in ("cross_attention_layers", "dropout")}
    text = _TEXT.read({**config, "num_hidden_layers": num_layers - len(fusion_layers)}, ignore_fields)
    if text.tie_word_embeddings or text.head_dim * text.num_heads != text.embed_dim:
        name = "tie_word_embeddings" if text.tie_word_embeddings else "head_dim"
        raise fields.refusal(name, fields.peek(name))
    return text, fusion_layers


def _read_vision(config: dict[str, Any], ignore_fields: Collection[str]) -> dict[str, Any]:
    # Configs of 2024 have tie_word_embeddings here, although the image encoder has no tokens.
    fields = Fields(config, f"{_NAME} (vision_config)", {*ignore_fields, "tie_word_embeddings"})
    hidden_states = tuple(fields.list_of("intermediate_layers_indices", _NUM_LAYERS, int, _HIDDEN_STATES))
    values = {field: fields.typed(name, default) for name, field, default in _SIZES}
    values["clip_hidden_states"] = hidden_states
    values["clip_norm_eps"] = float(fields.take("norm_eps", 1e-5))
    width = values["clip_dim"]
    fields.typed("num_attention_heads", values["num_clip_heads"])
    supported_ratios = [list(ratio) for ratio in aspect_ratios(values["max_num_tiles"])]
    # Fields with one supported value: (name, value, default of transformers).
    for name, value, default in (
        ("hidden_act", "gelu", "gelu"),
        ("intermediate_size", 4 * width, 5120),
        ("vision_output_dim", width * (1 + len(hidden_states)), 7680),
        ("supported_aspect_ratios", supported_ratios, None),
    ):
        if fields.take(name, default) not in (value, None):
            raise fields.refusal(name, fields.peek(name))
    fields.refuse_unread()
    return values


def write(d: VisionDescription) -> dict[str, Any]:
    """Make the ``config.json`` from which ``transformers`` builds the same model.

    Raises:
        ModelError: a ``config.json`` cannot express the description.
    """
    text = _TEXT.write(d.text)
    text = {key: value for key, value in text.items() if key not in ("architectures", "head_dim", "attention_dropout")}
    text |= {
        "num_hidden_layers": d.num_layers + len(d.fusion_layers),
        "cross_attention_layers": [d.other_numbers(layer)["cross"] for layer in d.fusion_layers],
        "dropout": d.attn_dropout,
    }
    vision = {
        "model_type": "mllama_vision_model",
        "hidden_act": "gelu",
        **{name: getattr(d, field) for name, field, _ in _SIZES},
        "intermediate_size": 4 * d.clip_dim,
        "vision_output_dim": d.clip_dim * (1 + len(d.clip_hidden_states)),
        "norm_eps": d.clip_norm_eps,
        "intermediate_layers_indices": list(d.clip_hidden_states),
        "supported_aspect_ratios": [list(ratio) for ratio in d.aspect_ratios],
    }
    config = {
        "architectures": [_NAME],
        "model_type": "mllama",
        "image_token_index": d.vocab_size,
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

    def to_tune(self, tensors: Sequence[Tensor], description: VisionDescription) -> list[Tensor]:
        """Split the embedding."""
        return list(tensors[0].split([description.vocab_size, description.num_special_tokens]))

    def to_external(self, tensors: Sequence[Tensor], description: VisionDescription) -> list[Tensor]:
        """Concatenate the embeddings."""
        return [torch.cat(list(tensors))]


@dataclass(frozen=True)
class Patches(Op):
    """Op between an external matrix ``[d, c * p * p]`` and our convolution ``[d, c, p, p]``."""

    def to_tune(self, tensors: Sequence[Tensor], description: VisionDescription) -> list[Tensor]:
        """Convert the matrix to a convolution."""
        p = description.patch_size
        return [tensors[0].unflatten(1, (description.in_channels, p, p))]

    def to_external(self, tensors: Sequence[Tensor], description: VisionDescription) -> list[Tensor]:
        """Convert the convolution to a matrix."""
        return [tensors[0].flatten(1)]

    def external_slices(
        self, which: int, slices: Slices, shapes: Sequence[Sequence[int]], description: VisionDescription
    ) -> list[ExternalSlice]:
        """Return complete rows."""
        return [] if is_empty(slices) else [_Flat(0, (slices[0], slice(0, shapes[0][1])))]


class _Flat(ExternalSlice):
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

    def to_tune(self, tensors: Sequence[Tensor], description: VisionDescription) -> list[Tensor]:
        """Convert to embeddings by position, 0 if no ratio has it. Raises ``WeightMapError`` if copies differ."""
        (external,) = tensors
        max_tiles = description.max_num_tiles
        by_ratio = external.view(external.shape[0], max_tiles, -1, description.clip_dim)  # [1 + ratios, tiles, n, d]
        by_position = by_ratio.new_zeros(max_tiles, max_tiles, *by_ratio.shape[2:])
        for ratio, (height, width) in enumerate(description.aspect_ratios, 1):
            by_position[:height, :width] = by_ratio[ratio, : height * width].unflatten(0, (height, width))
        # Later ratios overwrote earlier ones: with one embedding per position, all of them were equal.
        if not external.is_meta and not torch.equal(self.to_external([by_position], description)[0], external):
            raise WeightMapError(_FORKED)
        return [by_position]

    def to_external(self, tensors: Sequence[Tensor], description: VisionDescription) -> list[Tensor]:
        """Convert to embeddings by aspect ratio."""
        (by_position,) = tensors
        ratios = description.aspect_ratios
        by_ratio = by_position.new_zeros(len(ratios) + 1, description.max_num_tiles, *by_position.shape[2:])
        for ratio, (height, width) in enumerate(ratios, 1):
            by_ratio[ratio, : height * width] = by_position[:height, :width].flatten(0, 1)
        return [by_ratio.flatten(1)]

    def external_slices(
        self, which: int, slices: Slices, shapes: Sequence[Sequence[int]], description: VisionDescription
    ) -> list[ExternalSlice]:
        """Return a slice per tile of every ratio; our slice must have complete rows of positions."""
        if is_empty(slices):
            return []
        tile_size = shapes[0][1] // description.max_num_tiles
        rows = slices[0]
        external_slices: list[ExternalSlice] = []
        positions: set[tuple[int, int]] = set()
        for ratio, (height, width) in enumerate([(0, 1), *description.aspect_ratios]):  # ratio 0 has no tiles
            for tile in range(description.max_num_tiles):
                external = (slice(ratio, ratio + 1), slice(tile * tile_size, (tile + 1) * tile_size))
                row, column = divmod(tile, width)
                if row >= height:
                    if rows.start == 0:  # one rank checks that missing tiles are zero
                        external_slices.append(_Blank(0, external))
                elif rows.start <= row < rows.stop:
                    is_first = (row, column) not in positions
                    external_slices.append(_Position(0, external, (row - rows.start, column), is_first=is_first))
                    positions.add((row, column))
        return external_slices


@dataclass(frozen=True, eq=False)
class _Position(ExternalSlice):
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


class _Blank(ExternalSlice):
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
# Columns of the tables, and prefixes of the names in each format
_HF = 1
_META = 2
_CROSS_PREFIX = {
    _HF: "language_model.model.layers.{cross}.",
    _META: "text_model.cross_attention_layers.{fusion}.",
}
_CLIP_PREFIX = {_HF: "vision_model.", _META: "vision_model.vision_encoder."}
_CLIP_LAYER_PREFIX = {
    _HF: "vision_model.transformer.layers.{clip}.",
    _META: "vision_model.vision_encoder.transformer.resblocks.{clip}.",
}
_HEAD_LAYER_PREFIX = {
    _HF: "vision_model.global_transformer.layers.{head}.",
    _META: "vision_model.vision_encoder.global_transformer.resblocks.{head}.",
}
_PROJECTION_PREFIX = {_HF: "multi_modal_projector.", _META: "vision_model.vision_projection."}


def _clip_op(column: int, external: str) -> Op:
    """Return the op of a weight of CLIP."""
    if column == _HF and external.endswith("embedding.weight") and "tile" in external:
        return TileTable()
    if column == _META and external == "conv1._linear.weight":
        return Patches()
    return Identity()


def _rows(column: int) -> list[Row]:
    """Return the rows of all weights except the text decoder's."""
    rows = []
    for row in _CROSS:
        tune = f"decoder.layers.{{layer}}.fusion_layer.{row[0]}"
        rows.append(Row(_CROSS_PREFIX[column] + row[column], tune, when="fusion_layers"))
    for row in _ENCODER_LAYER:
        rows.append(Row(_CLIP_LAYER_PREFIX[column] + row[column], f"encoder.clip.layers.{{clip}}.{row[0]}"))
    for row in (*_ENCODER_LAYER, *_GATES):
        rows.append(Row(_HEAD_LAYER_PREFIX[column] + row[column], f"encoder.projection.layers.{{head}}.{row[0]}"))
    for row in _CLIP:
        op = _clip_op(column, row[column])
        rows.append(Row(_CLIP_PREFIX[column] + row[column], f"encoder.clip.{row[0]}", op))
    for parameter in ("weight", "bias"):
        rows.append(Row(_PROJECTION_PREFIX[column] + parameter, f"encoder.projection.output.{parameter}"))
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
    (Row(_EMBEDDING, _BOTH, EmbeddingRows()), *_HF_TEXT, *_rows(_HF)),
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
        *_rows(_META),
    ),
    ignore=("text_model.rope.freqs",),
)

"""Weight maps of Llama 3.2 Vision for the files of Hugging Face and Meta."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from torchtune.models._weight_map import Row, WeightMap, WeightMapError
from torchtune.models._weight_names import HF_INTERLEAVED, META
from torchtune.models._weight_ops import ExternalSlice, Identity, Op, Slices, is_empty
from torchtune.models.llama3_2_vision._description import VisionDescription

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
        (theirs,) = tensors
        most = description.max_num_tiles
        tiles = theirs.view(theirs.shape[0], most, -1, description.clip_dim)
        ours = tiles.new_zeros(most, most, *tiles.shape[2:])
        for number, (height, width) in enumerate(description.aspect_ratios, 1):
            ours[:height, :width] = tiles[number, : height * width].unflatten(0, (height, width))
        if not theirs.is_meta and not torch.equal(self.to_external([ours], description)[0], theirs):
            raise WeightMapError(_FORKED)
        return [ours]

    def to_external(self, tensors: Sequence[Tensor], description: VisionDescription) -> list[Tensor]:
        """Convert to embeddings by aspect ratio."""
        (ours,) = tensors
        ratios = description.aspect_ratios
        theirs = ours.new_zeros(len(ratios) + 1, description.max_num_tiles, *ours.shape[2:])
        for number, (height, width) in enumerate(ratios, 1):
            theirs[number, : height * width] = ours[:height, :width].flatten(0, 1)
        return [theirs.flatten(1)]

    def external_slices(
        self, which: int, slices: Slices, shapes: Sequence[Sequence[int]], description: VisionDescription
    ) -> list[ExternalSlice]:
        """Return a slice per tile of every ratio; our slice must have complete rows of positions."""
        if is_empty(slices):
            return []
        size, rows = shapes[0][1] // description.max_num_tiles, slices[0]
        found: list[ExternalSlice] = []
        seen: set[tuple[int, int]] = set()
        for number, (height, width) in enumerate([(0, 1), *description.aspect_ratios]):
            for tile in range(description.max_num_tiles):
                where = (slice(number, number + 1), slice(tile * size, (tile + 1) * size))
                row, column = divmod(tile, width)
                if row >= height:
                    found += [_Blank(0, where)] if rows.start == 0 else []
                elif rows.start <= row < rows.stop:
                    found.append(_Place(0, where, (row - rows.start, column), is_first=(row, column) not in seen))
                    seen.add((row, column))
        return found


@dataclass(frozen=True, eq=False)
class _Place(ExternalSlice):
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
# Layers of CLIP and of the projection head
_ENCODER_LAYER = (
    *((f"attn.{a}_proj.weight", f"self_attn.{a}_proj.weight", f"attn.w{a}.weight") for a in "qkv"),
    ("attn.output_proj.weight", "self_attn.o_proj.weight", "attn.wo.weight"),
    *((f"mlp.w1.{kind}", f"mlp.fc1.{kind}", f"mlp.c_fc.{kind}") for kind in ("weight", "bias")),
    *((f"mlp.w2.{kind}", f"mlp.fc2.{kind}", f"mlp.c_proj.{kind}") for kind in ("weight", "bias")),
    *((f"sa_norm.{kind}", f"input_layernorm.{kind}", f"ln_1.{kind}") for kind in ("weight", "bias")),
    *((f"mlp_norm.{kind}", f"post_attention_layernorm.{kind}", f"ln_2.{kind}") for kind in ("weight", "bias")),
)
_GATES = (("sa_scale.scale", "gate_attn", "gate_attn"), ("mlp_scale.scale", "gate_ffn", "gate_ffn"))
# Other weights of the encoder: ours, (Hugging Face, op), (Meta, op)
_TABLE, _SAME, _PATCHES = TileTable(), Identity(), Patches()
_ENCODER = (
    (
        "clip.token_pos_embedding.local_token_positional_embedding",
        ("gated_positional_embedding.embedding", _SAME),
        ("positional_embedding", _SAME),
    ),
    (
        "clip.token_pos_embedding.global_token_positional_embedding",
        ("gated_positional_embedding.tile_embedding.weight", _TABLE),
        ("gated_positional_embedding", _SAME),
    ),
    (
        "clip.token_pos_embedding.gate",
        ("gated_positional_embedding.gate", _SAME),
        ("gated_positional_embedding_gate", _SAME),
    ),
    *(
        row
        for end in ("pre", "post")
        for row in (
            (
                f"clip.{end}_tile_pos_embed.embedding",
                (f"{end}_tile_positional_embedding.embedding.weight", _TABLE),
                (f"{end}_tile_pos_embed.embedding", _SAME),
            ),
            (
                f"clip.{end}_tile_pos_embed.gate",
                (f"{end}_tile_positional_embedding.gate", _SAME),
                (f"{end}_tile_pos_embed.gate", _SAME),
            ),
            *(
                (f"clip.ln_{end}.{kind}", (f"layernorm_{end}.{kind}", _SAME), (f"ln_{end}.{kind}", _SAME))
                for kind in ("weight", "bias")
            ),
        )
    ),
    ("clip.cls_token_embedding.weight", ("class_embedding", _SAME), ("class_embedding", _SAME)),
    ("clip.conv.weight", ("patch_embedding.weight", _SAME), ("conv1._linear.weight", _PATCHES)),
)
# Prefixes of cross-attention, encoder, layers of CLIP, layers of the projection head, and projection
_HF, _META = 1, 2
_PLACES = {
    _HF: (
        "language_model.model.layers.{cross}.",
        "vision_model.",
        "vision_model.transformer.layers.{clip}.",
        "vision_model.global_transformer.layers.{head}.",
        "multi_modal_projector.",
    ),
    _META: (
        "text_model.cross_attention_layers.{fusion}.",
        "vision_model.vision_encoder.",
        "vision_model.vision_encoder.transformer.resblocks.{clip}.",
        "vision_model.vision_encoder.global_transformer.resblocks.{head}.",
        "vision_model.vision_projection.",
    ),
}


def _rows(column: int) -> list[Row]:
    """Rows of all weights except the text decoder's."""
    cross, encoder, clip, head, projection = _PLACES[column]
    rows = [
        Row(cross + row[column], f"decoder.layers.{{layer}}.fusion_layer.{row[0]}", when="fusion_layers")
        for row in _CROSS
    ]
    rows += [Row(clip + row[column], f"encoder.clip.layers.{{clip}}.{row[0]}") for row in _ENCODER_LAYER]
    rows += [
        Row(head + row[column], f"encoder.projection.layers.{{head}}.{row[0]}") for row in (*_ENCODER_LAYER, *_GATES)
    ]
    rows += [Row(encoder + row[column][0], f"encoder.{row[0]}", row[column][1]) for row in _ENCODER]
    rows += [Row(projection + kind, f"encoder.projection.output.{kind}") for kind in ("weight", "bias")]
    return rows


def _text_rows(names: WeightMap, start: str, layer: str) -> list[Row]:
    """Rows of the text decoder's weights: ``start`` and the names in a text-only checkpoint."""
    return [
        Row(start + row.external.replace("{layer}", layer), f"decoder.{row.tune}", row.op, row.when)
        for row in names.rows
        if not str(row.external).startswith("score.")
    ]


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

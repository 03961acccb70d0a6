"""Weight names of text decoders with image tokens in Hugging Face checkpoints."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from torchtune.models._description import Description
from torchtune.models._weight_map import Row, WeightMap
from torchtune.models._weight_ops import ExternalSlice, Op, Slices, Split, is_empty


@dataclass(frozen=True)
class FlatPatches(Op):
    """Op between the convolution of checkpoints, ``[d, *patch_shape]``, and our matrix ``[d, patch values]``."""

    def to_tune(self, tensors: Sequence[Tensor], description: Description) -> list[Tensor]:
        """Flatten the convolution."""
        return [tensors[0].flatten(1)]

    def to_external(self, tensors: Sequence[Tensor], description: Description) -> list[Tensor]:
        """Reshape the matrix to a convolution."""
        return [tensors[0].unflatten(1, description.patch_shape)]

    def external_slices(
        self, which: int, slices: Slices, shapes: Sequence[Sequence[int]], description: Description
    ) -> list[ExternalSlice]:
        """Return complete rows."""
        whole = tuple(slice(0, size) for size in shapes[0][1:])
        return [] if is_empty(slices) else [_Convolution(0, (slices[0], *whole))]


class _Convolution(ExternalSlice):
    """Rows of the external convolution of :class:`FlatPatches`."""

    def of(self, ours: Tensor) -> Tensor:
        """Return the values of the external slice from our slice."""
        return ours.unflatten(1, [part.stop for part in self.slices[1:]])

    def fill(self, ours: Tensor, value: Tensor) -> None:
        """Copy the values of the external slice to our slice."""
        ours.copy_(value.flatten(1))


# Names of Qwen's tower: ours, theirs, whether there is a bias, op.
_QKV = tuple(f"attn.{name}_proj" for name in "qkv")
_QWEN_LAYER = (
    ("sa_norm", "norm1"),
    ("mlp_norm", "norm2"),
    ("attn.output_proj", "attn.proj"),
    ("mlp.w1", "mlp.linear_fc1"),
    ("mlp.w2", "mlp.linear_fc2"),
)
_QWEN_MERGER = (("mlp.w1", "linear_fc1"), ("mlp.w2", "linear_fc2"))
_BOTH = ("weight", "bias")


def _pairs(theirs: str, ours: str, modules: Iterable[tuple[str, str]]) -> list[Row]:
    """Rows of weight and bias of modules (our name, their name)."""
    return [Row(f"{theirs}{b}.{kind}", f"{ours}{a}.{kind}") for a, b in modules for kind in _BOTH]


def _fused_qkv(layer: str, ours: str) -> list[Row]:
    return [
        Row(f"{layer}attn.qkv.{kind}", tuple(f"{ours}{name}.{kind}" for name in _QKV), Split(("vision_dim",) * 3))
        for kind in _BOTH
    ]


def qwen_tower(start: str = "model.visual.") -> list[Row]:
    """Make the rows of the tower of Qwen 3-VL and Qwen 3.5."""
    layer, ours = f"{start}blocks.{{block}}.", "encoder.layers.{block}."
    merger, deep = [("norm", "norm"), *_QWEN_MERGER], [("merged_norm", "norm"), *_QWEN_MERGER]
    return [
        Row(f"{start}patch_embed.proj.weight", "encoder.patch_embed.weight", FlatPatches()),
        Row(f"{start}patch_embed.proj.bias", "encoder.patch_embed.bias"),
        Row(f"{start}pos_embed.weight", "encoder.positions.table.weight"),
        *_fused_qkv(layer, ours),
        *_pairs(layer, ours, _QWEN_LAYER),
        *_pairs(f"{start}merger.", "encoder.projector.", merger),
        *_pairs(f"{start}deepstack_merger_list.{{deep}}.", "encoder.deep_projectors.{deep}.", deep),
    ]


def qwen_windowed_tower(start: str) -> list[Row]:
    """Make the rows of the tower of Qwen 2.5-VL."""
    layer, ours = f"{start}blocks.{{block}}.", "encoder.layers.{block}."
    gated = [("attn.output_proj", "attn.proj"), ("mlp.w1", "mlp.gate_proj"), ("mlp.w2", "mlp.down_proj")]
    return [
        Row(f"{start}patch_embed.proj.weight", "encoder.patch_embed.weight", FlatPatches()),
        *_fused_qkv(layer, ours),
        *_pairs(layer, ours, [*gated, ("mlp.w3", "mlp.up_proj")]),
        *(Row(f"{layer}norm{i}.weight", f"{ours}{norm}.scale") for i, norm in enumerate(("sa_norm", "mlp_norm"), 1)),
        Row(f"{start}merger.ln_q.weight", "encoder.projector.norm.scale"),
        *_pairs(f"{start}merger.", "encoder.projector.", [("mlp.w1", "mlp.0"), ("mlp.w2", "mlp.2")]),
    ]


def image_text_names(text: WeightMap, prefixes: Mapping[str, str], tower: Sequence[Row]) -> WeightMap:
    """Make the weight map of a text decoder with image tokens.

    Args:
        text: map of the text decoder alone.
        prefixes: prefix in a text-only checkpoint -> prefix in this one.
        tower: rows of the tower.
    """
    text = text.prefixed(prefixes)

    def nested(ours: str | tuple[str, ...]) -> str | tuple[str, ...]:
        return f"decoder.{ours}" if isinstance(ours, str) else tuple(f"decoder.{name}" for name in ours)

    rows = [replace(row, tune=nested(row.tune)) for row in text.rows]
    tied = tuple(replace(tie, source=f"decoder.{tie.source}") for tie in text.tied)
    return WeightMap((*rows, *tower), tied, text.ignore)

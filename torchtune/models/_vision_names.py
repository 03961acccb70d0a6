"""Weight names of text decoders with image tokens in Hugging Face checkpoints."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from torchtune.models._description import Description
from torchtune.models._weight_map import WeightMap
from torchtune.models._weight_ops import ExternalSlice, Op, Slices, is_empty
from torchtune.models._weight_rows import Row


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


@dataclass(frozen=True)
class SwappedAxes(Op):
    """Op that swaps the first two dimensions of a tensor."""

    def to_tune(self, tensors: Sequence[Tensor], description: Description) -> list[Tensor]:
        """Swap the dimensions."""
        return [tensors[0].transpose(0, 1).contiguous()]

    def to_external(self, tensors: Sequence[Tensor], description: Description) -> list[Tensor]:
        """Swap the dimensions."""
        return self.to_tune(tensors, description)

    def external_slices(
        self, which: int, slices: Slices, shapes: Sequence[Sequence[int]], description: Description
    ) -> list[ExternalSlice]:
        """Return one slice."""
        first, second, *rest = slices
        return [] if is_empty(slices) else [_Swapped(0, (second, first, *rest))]


class _Swapped(ExternalSlice):
    """Slice of the external tensor of :class:`SwappedAxes`."""

    def of(self, ours: Tensor) -> Tensor:
        """Return the values of the external slice from our slice."""
        return ours.transpose(0, 1)

    def fill(self, ours: Tensor, value: Tensor) -> None:
        """Copy the values of the external slice to our slice."""
        ours.copy_(value.transpose(0, 1))


class _Convolution(ExternalSlice):
    """Rows of the external convolution of :class:`FlatPatches`."""

    def of(self, ours: Tensor) -> Tensor:
        """Return the values of the external slice from our slice."""
        return ours.unflatten(1, [part.stop for part in self.slices[1:]])

    def fill(self, ours: Tensor, value: Tensor) -> None:
        """Copy the values of the external slice to our slice."""
        ours.copy_(value.flatten(1))


def attention_names(theirs: str = "self_attn", output: str = "o_proj") -> list[tuple[str, str]]:
    """Return the names of the linear layers of attention, (ours, theirs)."""
    names = [(f"attn.{name}_proj", f"{theirs}.{name}_proj") for name in "qkv"]
    return [*names, ("attn.output_proj", f"{theirs}.{output}")]


def gated_names(theirs: str = "mlp") -> list[tuple[str, str]]:
    """Return the names of the linear layers of a gated feed-forward layer, (ours, theirs)."""
    names = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
    return [(f"mlp.{ours}", f"{theirs}.{name}") for ours, name in names.items()]


def rms_norms(theirs: str, ours: str, modules: Iterable[tuple[str, str]]) -> list[Row]:
    """Make the rows of RMSNorms; for the arguments see :func:`renamed_modules`."""
    return [Row(f"{theirs}{b}.weight", f"{ours}{a}.scale") for a, b in modules]


def renamed_modules(
    theirs: str, ours: str, modules: Iterable[tuple[str, str]], kinds: Sequence[str] = ("weight", "bias")
) -> list[Row]:
    """Make the rows of modules with weight and bias.

    Args:
        theirs: beginning of the external names.
        ours: beginning of our names.
        modules: rest of each module's name: (ours, theirs).
        kinds: parameters of each module.
    """
    return [Row(f"{theirs}{b}.{kind}", f"{ours}{a}.{kind}") for a, b in modules for kind in kinds]


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

"""Rows and groups of weight maps: names and layouts of tensors in two formats."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from torchtune.models._description import Description
from torchtune.models._weight_ops import ExternalSlice, Identity, Op, Slices
from torchtune.utils import UserError


class WeightMapError(UserError, ValueError):
    """Raised when names or tensors of a checkpoint do not match the model; the message names the tensor."""


@dataclass(frozen=True)
class Row:
    """Row of a weight map.

    Attributes:
        external: template or templates of the external names.
        tune: template or templates of our names.
        op: converts the external tensors to ours and back.
        when: conditions, separated by spaces: attributes of the description, such as ``vision.clipped``. An attribute
            is a bool, a number (0 is False), or the indices of layers; ``!`` before its name negates it.
    """

    external: str | tuple[str, ...]
    tune: str | tuple[str, ...]
    op: Op = Identity()  # noqa: RUF009 - ops are frozen dataclasses
    when: str = ""


@dataclass(frozen=True)
class Tied:
    """Tied tensor that other formats may store as a copy; the copy must equal its source.

    Attributes:
        external: external name, for example ``lm_head.weight``.
        source: our name of the shared tensor, for example ``tok_embeddings.weight``.
        when: attribute of the description that is True if the weights are tied.
        write: whether to write the copy.
    """

    external: str
    source: str
    when: str = "tie_word_embeddings"
    write: bool = False


@dataclass(frozen=True, eq=False)
class Group:
    """External tensors and our tensors that are converted together, with concrete names.

    Attributes:
        external: external names, in the order of :meth:`to_tune`.
        tune: our names, in the order of :meth:`to_external`.

    Example:
        >>> group = torchtune.models.Group(("a.weight",), ("b.weight",), torchtune.models.Identity(), None)
        >>> group.to_tune([torch.ones(2)])
        [tensor([1., 1.])]
    """

    external: tuple[str, ...]
    tune: tuple[str, ...]
    op: Op
    description: Description

    def to_tune(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Convert external tensors, in the order of ``external``, to our tensors, in the order of ``tune``."""
        return self.op.to_tune(tensors, self.description)

    def to_external(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Convert our tensors, in the order of ``tune``, to external tensors, in the order of ``external``."""
        return self.op.to_external(tensors, self.description)

    def for_shapes(self, shapes: Sequence[Sequence[int]]) -> "Group":
        """Return the group for external tensors of these shapes, for families with several file layouts."""
        return replace(self, op=self.op.for_shapes(shapes, self.description))

    def read(
        self,
        name: str,
        slices: Slices,
        target: Tensor,
        shapes: Sequence[Sequence[int]],
        source: Callable[[str, Slices], Tensor],
    ) -> None:
        """Fill ``target`` with a slice of one of our tensors, reading only the required data.

        Args:
            name: name of our tensor.
            slices: the slice.
            target: tensor with the shape of the slice.
            shapes: shapes of the external tensors, in the order of ``external``.
            source: reads a slice of an external tensor.
        """
        for part in self.op.external_slices(self.tune.index(name), slices, shapes, self.description):
            part.fill(target, source(self.external[part.external], part.slices))

    def external_slices(self, name: str, slices: Slices, shapes: Sequence[Sequence[int]]) -> list[ExternalSlice]:
        """Return the slices of external tensors that form a slice of one of our tensors; see :meth:`read`."""
        return self.op.external_slices(self.tune.index(name), slices, shapes, self.description)

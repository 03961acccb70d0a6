"""Ops of a weight map: reversible rearrangements of tensors."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from operator import attrgetter
from typing import ClassVar

import torch
from torch import Tensor

from torchtune.models._description import Description, ModelError

# Slice of a tensor: one range per dimension.
Slices = tuple[slice, ...]


def is_empty(slices: Slices) -> bool:
    """Return whether a slice is empty, for example a rank's shard if there are more ranks than rows."""
    return any(part.stop <= part.start for part in slices)


@dataclass(frozen=True, eq=False)
class ExternalSlice:
    """Slice of an external tensor, and the corresponding rows in a slice of our tensor.

    Attributes:
        external: index of the external tensor in its group.
        slices: slice of the external tensor.
        rows: rows of our slice: indices int64 ``[rows]``, a range, one index (which drops the dimension), a tuple of
            such values, or None for all rows.
        transposed: whether the last two dimensions are swapped.
    """

    external: int
    slices: Slices
    rows: Tensor | slice | int | tuple[slice | int, ...] | None = None
    transposed: bool = False

    def of(self, ours: Tensor) -> Tensor:
        """Return the values of the external slice from our slice."""
        found = ours if self.rows is None else ours[self.rows]
        return found.transpose(-1, -2) if self.transposed else found

    def fill(self, ours: Tensor, value: Tensor) -> None:
        """Copy the values of the external slice to our slice."""
        value = value.transpose(-1, -2) if self.transposed else value
        if isinstance(self.rows, Tensor):
            ours[self.rows.to(ours.device)] = value.to(ours)
        else:
            (ours if self.rows is None else ours[self.rows]).copy_(value)


class Op(ABC):
    """Base class of exact, reversible conversions between the external tensors of a group and ours, without arithmetic.

    Attributes:
        rowwise: whether the op only reorders the first dimension of one tensor, so that it also applies to biases,
            ``lora_b`` and magnitudes.
    """

    rowwise: ClassVar[bool] = False

    @abstractmethod
    def to_tune(self, tensors: Sequence[Tensor], description: Description) -> list[Tensor]:
        """Convert external tensors to our tensors."""

    @abstractmethod
    def to_external(self, tensors: Sequence[Tensor], description: Description) -> list[Tensor]:
        """Convert our tensors to external tensors."""

    def for_shapes(self, shapes: Sequence[Sequence[int]], description: Description) -> "Op":
        """Return the op for external tensors of these shapes, for families with several file layouts."""
        return self

    def external_slices(
        self, which: int, slices: Slices, shapes: Sequence[Sequence[int]], description: Description
    ) -> list[ExternalSlice]:
        """Return the slices of external tensors that form a slice of one of our tensors.

        The default implementation applies :meth:`to_tune` to the row indices; it is for ops that only move rows.

        Args:
            which: index of our tensor in its group.
            slices: slice of our tensor.
            shapes: shapes of the external tensors.
            description: the description of the model.
        """
        if is_empty(slices):
            return []
        ends = list(accumulate(shape[0] for shape in shapes))
        numbers = [torch.arange(end - shape[0], end) for end, shape in zip(ends, shapes, strict=True)]
        rows, order = self.to_tune(numbers, description)[which][slices[0]].sort()
        tensors = torch.bucketize(rows, torch.tensor(ends), right=True)
        breaks = (rows.diff() != 1) | (tensors.diff() != 0)
        cuts = [0, *(breaks.nonzero().flatten() + 1).tolist(), len(rows)]
        found = []
        for start, stop in pairwise(cuts):
            number, ours = int(tensors[start]), order[start:stop]
            first = int(rows[start]) - (ends[number] - shapes[number][0])
            kept = bool((ours.diff() == 1).all())  # contiguous rows in the same order
            index = slice(int(ours[0]), int(ours[0]) + len(ours)) if kept else ours
            found.append(ExternalSlice(number, (slice(first, first + stop - start), *slices[1:]), index))
        return found


@dataclass(frozen=True)
class Identity(Op):
    """Op that changes nothing.

    Example:
        >>> torchtune.models.Identity().to_tune([torch.ones(2)], None)
        [tensor([1., 1.])]
    """

    rowwise: ClassVar[bool] = True

    def to_tune(self, tensors: Sequence[Tensor], description: Description) -> list[Tensor]:
        """Return the same tensors."""
        return list(tensors)

    def to_external(self, tensors: Sequence[Tensor], description: Description) -> list[Tensor]:
        """Return the same tensors."""
        return list(tensors)

    def external_slices(
        self, which: int, slices: Slices, shapes: Sequence[Sequence[int]], description: Description
    ) -> list[ExternalSlice]:
        """Return the same slice."""
        return [ExternalSlice(which, slices)]


@dataclass(frozen=True)
class InterleaveRope(Op):
    """Op between Hugging Face's order of query or key rows (rotated pairs half a head apart) and interleaved pairs.

    It acts on the first dimension, ``[heads * head_dim, …]``; the number of heads follows from the shape.
    """

    rowwise: ClassVar[bool] = True

    def to_tune(self, tensors: Sequence[Tensor], description: Description) -> list[Tensor]:
        """Convert half-split rows to interleaved rows."""
        return [self._regroup(tensor, 2, description.head_dim // 2) for tensor in tensors]

    def to_external(self, tensors: Sequence[Tensor], description: Description) -> list[Tensor]:
        """Convert interleaved rows to half-split rows."""
        return [self._regroup(tensor, description.head_dim // 2, 2) for tensor in tensors]

    @staticmethod
    def _regroup(tensor: Tensor, outer: int, inner: int) -> Tensor:
        rest = tensor.shape[1:]
        if tensor.shape[0] % (outer * inner):
            raise ValueError(f"{tensor.shape[0]} rows are no multiple of the head size {outer * inner}.")
        return tensor.reshape(-1, outer, inner, *rest).transpose(1, 2).reshape(tensor.shape)


@dataclass(frozen=True)
class Split(Op):
    """Op that splits the rows of a fused projection into several of our tensors.

    Attributes:
        sizes: attributes of the description with the number of rows of each part.
    """

    sizes: tuple[str, ...]

    def to_tune(self, tensors: Sequence[Tensor], description: Description) -> list[Tensor]:
        """Split a fused tensor into its parts."""
        (fused,) = tensors
        return list(fused.split([attrgetter(size)(description) for size in self.sizes]))

    def to_external(self, tensors: Sequence[Tensor], description: Description) -> list[Tensor]:
        """Concatenate the parts into a fused tensor."""
        return [torch.cat(list(tensors))]


@dataclass(frozen=True)
class HeadGroups(Op):
    """Op for fused projections of a mixer: external rows are ordered by head group, our rows by part.

    Attributes:
        sizes: attributes of the description's ``mixer`` with the number of rows of each part in a group.
        groups: attribute of ``mixer`` with the number of groups.
    """

    sizes: tuple[str, ...]
    groups: str = "num_key_heads"
    rowwise: ClassVar[bool] = True

    def to_tune(self, tensors: Sequence[Tensor], description: Description) -> list[Tensor]:
        """Reorder rows from groups of parts to parts of groups."""
        (grouped,) = tensors
        groups, sizes = self._numbers(description)
        parts = grouped.unflatten(0, (groups, sum(sizes))).split(sizes, dim=1)
        return [torch.cat([part.flatten(0, 1) for part in parts])]

    def to_external(self, tensors: Sequence[Tensor], description: Description) -> list[Tensor]:
        """Reorder rows from parts of groups to groups of parts."""
        (ours,) = tensors
        groups, sizes = self._numbers(description)
        parts = ours.split([groups * size for size in sizes])
        return [torch.cat([part.unflatten(0, (groups, -1)) for part in parts], dim=1).flatten(0, 1)]

    def _numbers(self, description: Description) -> tuple[int, list[int]]:
        mixer = description.mixer
        return getattr(mixer, self.groups), [getattr(mixer, size) for size in self.sizes]


@dataclass(frozen=True)
class FusedAdapter(Op):
    """Op between n adapters of rank r and one adapter of their fused projection.

    The fused adapter is ``A [n * r, in]`` and ``B [out, n * r]``; ours are n matrices ``lora_a [r, in]``, then n
    matrices ``lora_b [part, r]``. ``A`` is the concatenation of all ``lora_a``; ``B`` has the matrices ``lora_b`` on
    its block diagonal and zeros elsewhere, so the product is the same.

    Attributes:
        sizes: attributes of the description with the number of rows of each part.

    Example:
        >>> torchtune.models.FusedAdapter(("q", "k", "v")).sizes
        ('q', 'k', 'v')
    """

    sizes: tuple[str, ...]

    def to_tune(self, tensors: Sequence[Tensor], description: Description) -> list[Tensor]:
        """Split a fused adapter; raises ``ModelError`` if ``B`` has nonzero elements off its block diagonal."""
        first, second = tensors
        parts = len(self.sizes)
        blocks = self._rows(second, description)
        columns = [block.chunk(parts, dim=1) for block in blocks]
        if first.shape[0] % parts or any(
            bool(column.any()) for i, row in enumerate(columns) for j, column in enumerate(row) if i != j
        ):
            raise ModelError("The adapter of a fused projection is not made of one for each of its parts.")
        return [*first.chunk(parts), *(columns[i][i] for i in range(parts))]

    def to_external(self, tensors: Sequence[Tensor], description: Description) -> list[Tensor]:
        """Fuse the adapters."""
        parts = len(self.sizes)
        return [torch.cat(list(tensors[:parts])), torch.block_diag(*tensors[parts:])]

    def spread(self, tensors: Sequence[Tensor], description: Description) -> list[Tensor]:
        """Convert an ordinary adapter of rank r of the fused projection to the block-diagonal form of rank n · r."""
        first, second = tensors
        return [first.repeat(len(self.sizes), 1), torch.block_diag(*self._rows(second, description))]

    def _rows(self, second: Tensor, description: Description) -> Sequence[Tensor]:
        return second.split([attrgetter(size)(description) for size in self.sizes])

    def external_slices(
        self, which: int, slices: Slices, shapes: Sequence[Sequence[int]], description: Description
    ) -> list[ExternalSlice]:
        """Return rows of ``A``, or rows of ``B`` with their zeros; for a column slice, columns of a diagonal block."""
        if is_empty(slices):
            return []
        parts = len(self.sizes)
        rank, number = shapes[0][0] // parts, which % parts
        start = number * rank
        rows, columns = slices
        if which < parts:
            return [ExternalSlice(0, (slice(start + rows.start, start + rows.stop), columns))]
        above = sum(attrgetter(size)(description) for size in self.sizes[:number])
        rows = slice(above + rows.start, above + rows.stop)
        if columns.stop - columns.start < rank:
            return [ExternalSlice(1, (rows, slice(start + columns.start, start + columns.stop)))]
        inside = slice(0, rows.stop - rows.start), slice(start, start + rank)
        return [_Placed(1, (rows, slice(0, parts * rank)), inside=inside)]


@dataclass(frozen=True, eq=False)
class _Placed(ExternalSlice):
    """Slice of an external matrix that has our values in the slice ``inside`` and zeros elsewhere."""

    inside: tuple[slice, slice] = (slice(None), slice(None))

    def of(self, ours: Tensor) -> Tensor:
        """Return the values of the external slice from our slice."""
        found = ours.new_zeros([part.stop - part.start for part in self.slices])
        found[self.inside] = super().of(ours)
        return found

    def fill(self, ours: Tensor, value: Tensor) -> None:
        """Copy the values of the external slice to our slice."""
        super().fill(ours, value[self.inside])


@dataclass(frozen=True)
class ExpertAdapter(Op):
    """Op between the adapters of stacked experts and the flattened adapter of their fused parameter in ``peft``.

    Peft's ``A`` is ``[experts * n * r, in]`` with the expert slowest, its ``B`` ``[n * out, n * r * experts]`` with the
    expert fastest; ours are n tensors ``a [experts, in, r]``, then n tensors ``b [experts, r, out]``. As in
    :class:`FusedAdapter`, the n adapters of a fused parameter are on the block diagonal.

    Attributes:
        parts: n, the number of our weights in the parameter.
        swapped: whether ``peft`` treats a parameter ``[experts, in, out]`` as ``[experts, out, in]``; its ``A`` then
            consists of our ``b``.

    Example:
        >>> torchtune.models.ExpertAdapter(parts=2).swapped
        False
    """

    parts: int = 1
    swapped: bool = False

    def to_tune(self, tensors: Sequence[Tensor], description: Description) -> list[Tensor]:
        """Split a fused adapter; raises ``ModelError`` if it has nonzero elements off its block diagonal."""
        experts = (description.num_experts, -1)
        first = tensors[0].unflatten(0, experts)  # [e, n r, in]
        second = tensors[1].unflatten(1, experts[::-1]).permute(2, 0, 1)  # [e, n out, n r]
        if self.swapped:
            first, second = second.transpose(1, 2), first.transpose(1, 2)
        blocks = [block.chunk(self.parts, dim=2) for block in second.chunk(self.parts, dim=1)]
        if any(bool(block.any()) for i, row in enumerate(blocks) for j, block in enumerate(row) if i != j):
            raise ModelError("The adapter of fused experts is not made of one for each of their matrices.")
        inner = [part.transpose(1, 2).contiguous() for part in first.chunk(self.parts, dim=1)]
        return inner + [blocks[i][i].transpose(1, 2).contiguous() for i in range(self.parts)]

    def to_external(self, tensors: Sequence[Tensor], description: Description) -> list[Tensor]:
        """Fuse the adapters."""
        inner, outer = (
            [part.transpose(1, 2) for part in half] for half in (tensors[: self.parts], tensors[self.parts :])
        )
        first, second = torch.cat(inner, dim=1), _block_diagonal(outer)  # [e, n r, in], [e, n out, n r]
        if self.swapped:
            first, second = second.transpose(1, 2), first.transpose(1, 2)
        return [first.flatten(0, 1), second.permute(1, 2, 0).flatten(1)]

    def spread(self, tensors: Sequence[Tensor], description: Description) -> list[Tensor]:
        """Convert an ordinary adapter of rank r of the fused parameter to the block-diagonal form of rank n · r."""
        inner, outer = replace(self, parts=1).to_tune(tensors, description)
        return self.to_external([inner] * self.parts + list(outer.chunk(self.parts, dim=2)), description)

    def external_slices(
        self, which: int, slices: Slices, shapes: Sequence[Sequence[int]], description: Description
    ) -> list[ExternalSlice]:
        """Return rows of ``A`` (a slice per expert) or columns of ``B`` (a slice per LoRA rank), for some experts."""
        if is_empty(slices):
            return []
        experts, (first, second), count = slices[0], shapes, description.num_experts
        is_b, part = which >= self.parts, which % self.parts
        rank, everything = first[0] // count // self.parts, slice(0, None)
        wide = (first[1] if self.swapped else second[0]) // self.parts  # out
        block = slice(part * wide, (part + 1) * wide) if is_b else everything
        if is_b == self.swapped:
            starts = [(expert * self.parts + part) * rank for expert in range(experts.start, experts.stop)]
            return [
                _Placed(0, (slice(at, at + rank), slice(0, first[1])), i, not is_b, inside=(everything, block))
                for i, at in enumerate(starts)
            ]
        found = []
        for k in range(rank):
            ours, left = ((everything, k) if is_b else (everything, everything, k)), (part * rank + k) * count
            place = slice(0, second[0]), slice(left + experts.start, left + experts.stop)
            found.append(_Placed(1, place, ours, True, inside=(block, everything)))
        return found


def _block_diagonal(parts: Sequence[Tensor]) -> Tensor:
    """Return ``[e, n out, n r]`` from n tensors ``[e, out, r]``."""
    zero = torch.zeros_like(parts[0])
    rows = [torch.cat([part if i == j else zero for j in range(len(parts))], dim=2) for i, part in enumerate(parts)]
    return torch.cat(rows, dim=1)


@dataclass(frozen=True)
class FusedExperts(Op):
    """Op that splits an external tensor ``[experts, parts * out, in]`` into our tensors ``[experts, in, out]``.

    Attributes:
        parts: number of our tensors.
        transpose: if False, the external tensor is ``[experts, in, parts * out]``.
        peft_swaps: see :attr:`ExpertAdapter.swapped`.
        both: whether files with the other layout also exist; :meth:`for_shapes` recognizes them by their shapes.
    """

    parts: int = 1
    transpose: bool = True
    peft_swaps: bool = False
    both: bool = False

    def for_shapes(self, shapes: Sequence[Sequence[int]], description: Description) -> Op:
        """Return the op for the layout of a file. Raises :class:`ModelError` if both layouts have the same shapes."""
        inner, outer = description.embed_dim, description.expert_dim
        inner, outer = (inner, self.parts * outer) if self.parts > 1 else (outer, inner)
        if not self.both or len(shapes[0]) != 3:
            return self
        if inner == outer:
            raise ModelError(f"Experts of {inner} x {outer} have two layouts in files, which cannot be told apart.")
        return replace(self, transpose=tuple(shapes[0][1:]) == (outer, inner))

    def to_tune(self, tensors: Sequence[Tensor], description: Description) -> list[Tensor]:
        """Split a fused tensor into its parts."""
        (fused,) = tensors
        fused = fused.transpose(1, 2) if self.transpose else fused
        return [part.contiguous() for part in fused.chunk(self.parts, dim=2)]

    def to_external(self, tensors: Sequence[Tensor], description: Description) -> list[Tensor]:
        """Concatenate the parts to a fused tensor."""
        if not self.transpose:
            return [torch.cat(list(tensors), dim=2)]
        return [torch.cat([part.transpose(1, 2) for part in tensors], dim=1)]

    def external_slices(
        self, which: int, slices: Slices, shapes: Sequence[Sequence[int]], description: Description
    ) -> list[ExternalSlice]:
        """Return one slice of the fused tensor."""
        experts, inner, outer = slices
        start = which * shapes[0][1 if self.transpose else 2] // self.parts
        whole = slice(start + outer.start, start + outer.stop)
        theirs = (experts, whole, inner) if self.transpose else (experts, inner, whole)
        return [] if is_empty(slices) else [ExternalSlice(0, theirs, transposed=self.transpose)]


@dataclass(frozen=True)
class Stack(Op):
    """Op that stacks external matrices ``[out, in]`` into one of our tensors (experts).

    Attributes:
        transpose: whether our tensor is ``[experts, in, out]`` instead of ``[experts, out, in]``.
    """

    transpose: bool = False

    def to_tune(self, tensors: Sequence[Tensor], description: Description) -> list[Tensor]:
        """Stack matrices into a tensor ``[experts, …]``."""
        stacked = torch.stack(list(tensors))
        return [stacked.transpose(1, 2).contiguous() if self.transpose else stacked]

    def to_external(self, tensors: Sequence[Tensor], description: Description) -> list[Tensor]:
        """Split a tensor ``[experts, …]`` into its matrices."""
        (stacked,) = tensors
        return [part.contiguous() for part in (stacked.transpose(1, 2) if self.transpose else stacked).unbind()]

    def external_slices(
        self, which: int, slices: Slices, shapes: Sequence[Sequence[int]], description: Description
    ) -> list[ExternalSlice]:
        """Return a slice of one matrix per expert."""
        experts, *inner = slices
        inside = tuple(reversed(inner)) if self.transpose else tuple(inner)
        numbers = () if is_empty(slices) else range(experts.start, experts.stop)
        return [ExternalSlice(number, inside, number - experts.start, self.transpose) for number in numbers]


@dataclass(frozen=True)
class FlatPatches(Op):
    """Op between the convolution of checkpoints, ``[d, *patch_shape]``, and our matrix ``[d, patch values]``."""

    def to_tune(self, tensors: Sequence[Tensor], description: Description) -> list[Tensor]:
        """Flatten the convolution."""
        return [tensors[0].flatten(1)]

    def to_external(self, tensors: Sequence[Tensor], description: Description) -> list[Tensor]:
        """Reshape the matrix to a convolution."""
        return [tensors[0].unflatten(1, description.vision.patch_shape)]

    def external_slices(
        self, which: int, slices: Slices, shapes: Sequence[Sequence[int]], description: Description
    ) -> list[ExternalSlice]:
        """Return complete rows."""
        theirs = (slices[0], *(slice(0, size) for size in shapes[0][1:]))
        return [] if is_empty(slices) else [_Viewed(0, theirs, view=lambda ours: ours.unflatten(1, shapes[0][1:]))]


@dataclass(frozen=True)
class SwappedAxes(Op):
    """Op that swaps the first two dimensions of a tensor."""

    def to_tune(self, tensors: Sequence[Tensor], description: Description) -> list[Tensor]:
        """Swap the dimensions."""
        return [tensors[0].transpose(0, 1).contiguous()]

    to_external = to_tune

    def external_slices(
        self, which: int, slices: Slices, shapes: Sequence[Sequence[int]], description: Description
    ) -> list[ExternalSlice]:
        """Return one slice."""
        theirs = (slices[1], slices[0], *slices[2:])
        return [] if is_empty(slices) else [_Viewed(0, theirs, view=lambda ours: ours.transpose(0, 1))]


@dataclass(frozen=True, eq=False, kw_only=True)
class _Viewed(ExternalSlice):
    """Slice of an external tensor that is a view of ours."""

    view: Callable[[Tensor], Tensor]

    def of(self, ours: Tensor) -> Tensor:
        return self.view(ours)

    def fill(self, ours: Tensor, value: Tensor) -> None:
        self.view(ours).copy_(value)

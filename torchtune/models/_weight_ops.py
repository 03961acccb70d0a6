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
        values = ours if self.rows is None else ours[self.rows]
        return values.transpose(-1, -2) if self.transposed else values

    def fill(self, ours: Tensor, value: Tensor) -> None:
        """Copy the values of the external slice to our slice."""
        if self.transposed:
            value = value.transpose(-1, -2)
        if isinstance(self.rows, Tensor):
            ours[self.rows.to(ours.device)] = value.to(ours)
        elif self.rows is None:
            ours.copy_(value)
        else:
            ours[self.rows].copy_(value)


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
        # Number the rows of all external tensors, and let the op move the numbers instead of the rows.
        ends = list(accumulate(shape[0] for shape in shapes))
        numbers = [torch.arange(end - shape[0], end) for end, shape in zip(ends, shapes, strict=True)]
        rows, order = self.to_tune(numbers, description)[which][slices[0]].sort()  # order: rows of our slice
        tensors = torch.bucketize(rows, torch.tensor(ends), right=True)  # external tensor of each row
        # Each run of consecutive rows of one tensor is read at once.
        breaks = (rows.diff() != 1) | (tensors.diff() != 0)
        cuts = [0, *(breaks.nonzero().flatten() + 1).tolist(), len(rows)]
        external_slices = []
        for start, stop in pairwise(cuts):
            external = int(tensors[start])
            first = int(rows[start]) - (ends[external] - shapes[external][0])
            our_rows = order[start:stop]
            is_contiguous = bool((our_rows.diff() == 1).all())
            index = slice(int(our_rows[0]), int(our_rows[0]) + len(our_rows)) if is_contiguous else our_rows
            external_rows = slice(first, first + stop - start)
            external_slices.append(ExternalSlice(external, (external_rows, *slices[1:]), index))
        return external_slices


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
        if tensor.shape[0] % (outer * inner):
            raise ValueError(f"{tensor.shape[0]} rows are not a multiple of the head size {outer * inner}.")
        heads = tensor.reshape(-1, outer, inner, *tensor.shape[1:])  # [h, outer, inner, ...]
        return heads.transpose(1, 2).reshape(tensor.shape)


@dataclass(frozen=True)
class Split(Op):
    """Op that splits the rows of a fused projection into several of our tensors.

    Attributes:
        sizes: attributes of the description with the number of rows of each part.
    """

    sizes: tuple[str, ...]

    def to_tune(self, tensors: Sequence[Tensor], description: Description) -> list[Tensor]:
        """Split a fused tensor into its parts."""
        return list(tensors[0].split([attrgetter(size)(description) for size in self.sizes]))

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
        num_groups, sizes = self._group_sizes(description)
        grouped = tensors[0].unflatten(0, (num_groups, sum(sizes)))  # [groups, rows of a group, ...]
        parts = grouped.split(sizes, dim=1)  # each [groups, rows of the part, ...]
        return [torch.cat([part.flatten(0, 1) for part in parts])]

    def to_external(self, tensors: Sequence[Tensor], description: Description) -> list[Tensor]:
        """Reorder rows from parts of groups to groups of parts."""
        num_groups, sizes = self._group_sizes(description)
        parts = tensors[0].split([num_groups * size for size in sizes])
        grouped = torch.cat([part.unflatten(0, (num_groups, -1)) for part in parts], dim=1)  # [groups, rows, ...]
        return [grouped.flatten(0, 1)]

    def _group_sizes(self, description: Description) -> tuple[int, list[int]]:
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
        lora_a, lora_b = tensors
        num_parts = len(self.sizes)
        # [row of blocks][column of blocks]
        blocks = [rows.chunk(num_parts, dim=1) for rows in self._split_rows(lora_b, description)]
        if lora_a.shape[0] % num_parts or not _is_block_diagonal(blocks):
            raise ModelError("The adapter of a fused projection is not made of one for each of its parts.")
        return [*lora_a.chunk(num_parts), *(blocks[part][part] for part in range(num_parts))]

    def to_external(self, tensors: Sequence[Tensor], description: Description) -> list[Tensor]:
        """Fuse the adapters."""
        num_parts = len(self.sizes)
        return [torch.cat(list(tensors[:num_parts])), torch.block_diag(*tensors[num_parts:])]

    def to_block_diagonal(self, tensors: Sequence[Tensor], description: Description) -> list[Tensor]:
        """Convert an ordinary adapter of rank r of the fused projection to the block-diagonal form of rank n · r."""
        lora_a, lora_b = tensors
        return [lora_a.repeat(len(self.sizes), 1), torch.block_diag(*self._split_rows(lora_b, description))]

    def _split_rows(self, lora_b: Tensor, description: Description) -> Sequence[Tensor]:
        return lora_b.split([attrgetter(size)(description) for size in self.sizes])

    def external_slices(
        self, which: int, slices: Slices, shapes: Sequence[Sequence[int]], description: Description
    ) -> list[ExternalSlice]:
        """Return rows of ``A``, or rows of ``B`` with their zeros; for a column slice, columns of a diagonal block."""
        if is_empty(slices):
            return []
        num_parts = len(self.sizes)
        rank = shapes[0][0] // num_parts
        part = which % num_parts
        first_column = part * rank  # of the part in B; its first row in A
        rows, columns = slices
        is_lora_a = which < num_parts  # of our tensors, the first half are lora_a, the second half lora_b
        if is_lora_a:
            return [ExternalSlice(0, (slice(first_column + rows.start, first_column + rows.stop), columns))]
        first_row = sum(attrgetter(size)(description) for size in self.sizes[:part])
        rows_of_b = slice(first_row + rows.start, first_row + rows.stop)
        if columns.stop - columns.start < rank:
            columns_of_b = slice(first_column + columns.start, first_column + columns.stop)
            return [ExternalSlice(1, (rows_of_b, columns_of_b))]
        inside = (slice(0, rows.stop - rows.start), slice(first_column, first_column + rank))
        return [_PaddedSlice(1, (rows_of_b, slice(0, num_parts * rank)), inside=inside)]


def _is_block_diagonal(blocks: Sequence[Sequence[Tensor]]) -> bool:
    """Return whether all blocks ``[row][column]`` of a matrix are zero, except on the diagonal."""
    for row, blocks_of_row in enumerate(blocks):
        for column, block in enumerate(blocks_of_row):
            if row != column and bool(block.any()):
                return False
    return True


@dataclass(frozen=True, eq=False)
class _PaddedSlice(ExternalSlice):
    """Slice of an external matrix that has our values in the slice ``inside`` and zeros elsewhere."""

    inside: tuple[slice, slice] = (slice(None), slice(None))

    def of(self, ours: Tensor) -> Tensor:
        """Return the values of the external slice from our slice."""
        values = ours.new_zeros([part.stop - part.start for part in self.slices])
        values[self.inside] = super().of(ours)
        return values

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
        num_experts = description.num_experts
        lora_a = tensors[0].unflatten(0, (num_experts, -1))  # [e, n r, in]
        lora_b = tensors[1].unflatten(1, (-1, num_experts)).permute(2, 0, 1)  # [e, n out, n r]
        if self.swapped:
            lora_a, lora_b = lora_b.transpose(1, 2), lora_a.transpose(1, 2)
        blocks = [rows.chunk(self.parts, dim=2) for rows in lora_b.chunk(self.parts, dim=1)]
        if not _is_block_diagonal(blocks):
            raise ModelError("The adapter of fused experts is not made of one for each of their matrices.")
        ours_a = [part.transpose(1, 2).contiguous() for part in lora_a.chunk(self.parts, dim=1)]
        ours_b = [blocks[part][part].transpose(1, 2).contiguous() for part in range(self.parts)]
        return ours_a + ours_b

    def to_external(self, tensors: Sequence[Tensor], description: Description) -> list[Tensor]:
        """Fuse the adapters."""
        lora_a = torch.cat([part.transpose(1, 2) for part in tensors[: self.parts]], dim=1)  # [e, n r, in]
        lora_b = _block_diagonal([part.transpose(1, 2) for part in tensors[self.parts :]])  # [e, n out, n r]
        if self.swapped:
            lora_a, lora_b = lora_b.transpose(1, 2), lora_a.transpose(1, 2)
        return [lora_a.flatten(0, 1), lora_b.permute(1, 2, 0).flatten(1)]

    def to_block_diagonal(self, tensors: Sequence[Tensor], description: Description) -> list[Tensor]:
        """Convert an ordinary adapter of rank r of the fused parameter to the block-diagonal form of rank n · r."""
        lora_a, lora_b = replace(self, parts=1).to_tune(tensors, description)
        return self.to_external([lora_a] * self.parts + list(lora_b.chunk(self.parts, dim=2)), description)

    def external_slices(
        self, which: int, slices: Slices, shapes: Sequence[Sequence[int]], description: Description
    ) -> list[ExternalSlice]:
        """Return rows of ``A`` (a slice per expert) or columns of ``B`` (a slice per LoRA rank), for some experts."""
        if is_empty(slices):
            return []
        shape_a, shape_b = shapes  # [e n r, in] and [n out, n r e]; swapped: [e n r, out] and [n in, n r e]
        experts = slices[0]
        num_experts = description.num_experts
        rank = shape_a[0] // num_experts // self.parts
        is_b = which >= self.parts  # of our tensors, the first half are a, the second half b
        part = which % self.parts
        everything = slice(0, None)
        inside = everything  # the channels of our matrix in the external one: of b, a block of the diagonal
        if is_b:
            num_channels = shape_a[1] if self.swapped else shape_b[0]
            width = num_channels // self.parts
            inside = slice(part * width, (part + 1) * width)
        external_slices: list[ExternalSlice] = []
        if is_b == self.swapped:  # our tensor is in A, in which the rows of an expert are consecutive
            for index, expert in enumerate(range(experts.start, experts.stop)):
                first_row = (expert * self.parts + part) * rank
                rows = slice(first_row, first_row + rank)
                external_slices.append(
                    _PaddedSlice(0, (rows, slice(0, shape_a[1])), index, not is_b, inside=(everything, inside))
                )
            return external_slices
        for channel in range(rank):  # of B, in which the columns of a LoRA channel are consecutive
            our_rows = (everything, channel) if is_b else (everything, everything, channel)
            first_column = (part * rank + channel) * num_experts
            columns = slice(first_column + experts.start, first_column + experts.stop)
            external_slices.append(
                _PaddedSlice(1, (slice(0, shape_b[0]), columns), our_rows, True, inside=(inside, everything))
            )
        return external_slices


def _block_diagonal(parts: Sequence[Tensor]) -> Tensor:
    """Return ``[e, n out, n r]`` from n tensors ``[e, out, r]``."""
    zero = torch.zeros_like(parts[0])
    rows = []
    for part, tensor in enumerate(parts):
        blocks = [zero] * len(parts)
        blocks[part] = tensor
        rows.append(torch.cat(blocks, dim=2))
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
        if not self.both or len(shapes[0]) != 3:
            return self
        if self.parts > 1:  # the matrices to the intermediate width
            in_dim = description.embed_dim
            out_dim = self.parts * description.expert_dim
        else:
            in_dim = description.expert_dim
            out_dim = description.embed_dim
        if in_dim == out_dim:
            raise ModelError(f"Experts of {in_dim} x {out_dim} have two layouts in files, which cannot be told apart.")
        return replace(self, transpose=tuple(shapes[0][1:]) == (out_dim, in_dim))

    def to_tune(self, tensors: Sequence[Tensor], description: Description) -> list[Tensor]:
        """Split a fused tensor into its parts."""
        fused = tensors[0]
        if self.transpose:
            fused = fused.transpose(1, 2)  # [e, in, parts * out]
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
        if is_empty(slices):
            return []
        experts, in_channels, out_channels = slices
        first = which * shapes[0][1 if self.transpose else 2] // self.parts
        fused_channels = slice(first + out_channels.start, first + out_channels.stop)
        if self.transpose:
            external = (experts, fused_channels, in_channels)
        else:
            external = (experts, in_channels, fused_channels)
        return [ExternalSlice(0, external, transposed=self.transpose)]


@dataclass(frozen=True)
class Stack(Op):
    """Op that stacks external matrices ``[out, in]`` into one of our tensors (experts).

    Attributes:
        transpose: whether our tensor is ``[experts, in, out]`` instead of ``[experts, out, in]``.
    """

    transpose: bool = False

    def to_tune(self, tensors: Sequence[Tensor], description: Description) -> list[Tensor]:
        """Stack matrices into a tensor ``[experts, …]``."""
        stacked = torch.stack(list(tensors))  # [e, out, in]
        if self.transpose:
            stacked = stacked.transpose(1, 2).contiguous()
        return [stacked]

    def to_external(self, tensors: Sequence[Tensor], description: Description) -> list[Tensor]:
        """Split a tensor ``[experts, …]`` into its matrices."""
        stacked = tensors[0]
        if self.transpose:
            stacked = stacked.transpose(1, 2)  # [e, out, in]
        return [matrix.contiguous() for matrix in stacked.unbind()]

    def external_slices(
        self, which: int, slices: Slices, shapes: Sequence[Sequence[int]], description: Description
    ) -> list[ExternalSlice]:
        """Return a slice of one matrix per expert."""
        if is_empty(slices):
            return []
        experts, *channels = slices
        if self.transpose:
            channels.reverse()
        external_slices = []
        for expert in range(experts.start, experts.stop):
            external_slices.append(ExternalSlice(expert, tuple(channels), expert - experts.start, self.transpose))
        return external_slices


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
        if is_empty(slices):
            return []
        patch_shape = shapes[0][1:]
        external = (slices[0], *(slice(0, size) for size in patch_shape))
        return [_ViewedSlice(0, external, view=lambda ours: ours.unflatten(1, patch_shape))]


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
        if is_empty(slices):
            return []
        external = (slices[1], slices[0], *slices[2:])
        return [_ViewedSlice(0, external, view=lambda ours: ours.transpose(0, 1))]


@dataclass(frozen=True, eq=False, kw_only=True)
class _ViewedSlice(ExternalSlice):
    """Slice of an external tensor that is a view of ours."""

    view: Callable[[Tensor], Tensor]

    def of(self, ours: Tensor) -> Tensor:
        return self.view(ours)

    def fill(self, ours: Tensor, value: Tensor) -> None:
        self.view(ours).copy_(value)

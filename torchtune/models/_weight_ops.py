"""Ops of weight maps that rearrange tensors: rotary halves, fused projections, mixtures of experts, patches.

:class:`torchtune.models._weight_map.Op` is their base class.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import ClassVar

import torch
from torch import Tensor

from torchtune.models._description import Description, ModelError
from torchtune.models._weight_map import PEFT_PREFIX, ExternalSlice, Op, Row, Slices, is_empty


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

    def peft_rows(self, row: Row) -> list[Row]:
        """Return the rows of the adapter of a fused projection, which is one of ours for each part."""
        if not row.external_templates[0].endswith(".weight"):
            return []
        external = PEFT_PREFIX + row.external_templates[0].removesuffix(".weight")
        modules = [name.removesuffix(".weight") for name in row.tune_templates]
        lora_a = tuple(f"{module}.lora_a.weight" for module in modules)
        lora_b = tuple(f"{module}.lora_b.weight" for module in modules)
        magnitudes = tuple(f"{module}.magnitude" for module in modules)
        adapter = (f"{external}.lora_A.weight", f"{external}.lora_B.weight")
        return [
            Row(adapter, lora_a + lora_b, FusedAdapter(self.sizes), row.when),
            Row(f"{external}.lora_magnitude_vector", magnitudes, self, row.when),
        ]


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
        if columns.stop - columns.start < rank:  # a shard of the part's LoRA channels
            columns_of_b = slice(first_column + columns.start, first_column + columns.stop)
            return [ExternalSlice(1, (rows_of_b, columns_of_b))]
        # Whole rows: the part's channels are at first_column, and zeros elsewhere, which an export writes, too.
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
        rows = []
        for index, part in enumerate(tensors[self.parts :]):  # [e, r, out]
            zero = torch.zeros_like(part.transpose(1, 2))
            blocks = [zero] * self.parts
            blocks[index] = part.transpose(1, 2)
            rows.append(torch.cat(blocks, dim=2))
        lora_b = torch.cat(rows, dim=1)  # [e, n out, n r], with the parts on the block diagonal
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
        # Where our matrix lies along the channels of the external one: a has all of them, b a block of the diagonal.
        inside = everything
        if is_b:
            if self.swapped:
                num_channels = shape_a[1]
            else:
                num_channels = shape_b[0]
            width = num_channels // self.parts
            inside = slice(part * width, (part + 1) * width)
        external_slices: list[ExternalSlice] = []
        is_in_external_a = is_b == self.swapped
        if is_in_external_a:  # there, the rows of an expert are consecutive
            for index, expert in enumerate(range(experts.start, experts.stop)):
                first_row = (expert * self.parts + part) * rank
                rows = slice(first_row, first_row + rank)
                columns = slice(0, shape_a[1])
                external_slices.append(
                    _PaddedSlice(0, (rows, columns), index, transposed=not is_b, inside=(everything, inside))
                )
            return external_slices
        for channel in range(rank):  # of the external B, in which the columns of a LoRA channel are consecutive
            if is_b:
                our_rows = (everything, channel)
            else:
                our_rows = (everything, everything, channel)
            first_column = (part * rank + channel) * num_experts
            columns = slice(first_column + experts.start, first_column + experts.stop)
            external_slices.append(
                _PaddedSlice(1, (slice(0, shape_b[0]), columns), our_rows, transposed=True, inside=(inside, everything))
            )
        return external_slices


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
        if self.transpose:
            num_fused = shapes[0][1]
        else:
            num_fused = shapes[0][2]
        first = which * num_fused // self.parts
        fused_channels = slice(first + out_channels.start, first + out_channels.stop)
        if self.transpose:
            external = (experts, fused_channels, in_channels)
        else:
            external = (experts, in_channels, fused_channels)
        return [ExternalSlice(0, external, transposed=self.transpose)]

    def peft_rows(self, row: Row) -> list[Row]:
        """Return the row of the adapter of a parameter that holds one or more matrices of all experts."""
        # The name of the mixture: that of the weight without the experts and the matrix.
        block = row.external_templates[0].replace(".experts", "").replace(".{expert}", "").removesuffix(".weight")
        block = block.rpartition(".")[0]
        adapters = []
        for template in row.tune_templates:
            experts, _, matrix = template.rpartition(".")
            adapters.append(f"{experts}.lora_{matrix.removesuffix('_proj')}")
        # peft wraps the parameters of a module one inside another, in their order: down_proj is the outermost.
        module = f"{PEFT_PREFIX}{block}.experts"
        if not row.tune_templates[0].endswith(".down_proj"):
            module += ".base_layer"
        external = (f"{module}.lora_A.weight", f"{module}.lora_B.weight")
        lora_a = tuple(f"{adapter}_a" for adapter in adapters)
        lora_b = tuple(f"{adapter}_b" for adapter in adapters)
        return [Row(external, lora_a + lora_b, ExpertAdapter(self.parts, self.peft_swaps), row.when)]


@dataclass(frozen=True)
class Stack(Op):
    """Op that stacks external matrices ``[out, in]`` into one of our tensors (experts).

    Attributes:
        transpose: whether our tensor is ``[experts, in, out]`` instead of ``[experts, out, in]``.
    """

    transpose: bool = False
    matrix_per_expert: ClassVar[bool] = True

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

    def peft_rows(self, row: Row) -> list[Row]:
        """Return the rows of ``X.lora_gate_a`` and ``_b``, the adapters of stacked experts ``X.gate_proj``.

        Files have one adapter per gated expert, or one fused adapter for experts without a gate.
        """
        external = PEFT_PREFIX + row.external_templates[0].removesuffix(".weight")
        experts, _, matrix = row.tune_templates[0].rpartition(".")
        adapter = f"{experts}.lora_{matrix.removesuffix('_proj')}"
        gated = f"{row.when} mlp_gated"
        ungated = f"{row.when} !mlp_gated"
        return [
            Row(f"{external}.lora_A.weight", f"{adapter}_a", self, gated),
            Row(f"{external}.lora_B.weight", f"{adapter}_b", self, gated),
            *FusedExperts().peft_rows(replace(row, when=ungated)),
        ]


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

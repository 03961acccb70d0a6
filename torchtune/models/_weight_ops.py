"""Reversible rearrangements of tensors, the third column of a weight map."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from torchtune.models._description import Description


class Op(ABC):
    """Turns the external tensors of a group into ours and back, exactly (no arithmetic, only placement).

    Attributes:
        rowwise: whether it only reorders the first dimension of one tensor, so that it fits biases, ``lora_b`` and
            magnitudes as it fits the weight.
    """

    rowwise: ClassVar[bool] = False

    @abstractmethod
    def to_tune(self, tensors: Sequence[Tensor], description: Description) -> list[Tensor]:
        """Our tensors from the external ones."""

    @abstractmethod
    def to_external(self, tensors: Sequence[Tensor], description: Description) -> list[Tensor]:
        """The external tensors from ours."""


@dataclass(frozen=True)
class Identity(Op):
    """The tensor as it is."""

    rowwise: ClassVar[bool] = True

    def to_tune(self, tensors: Sequence[Tensor], description: Description) -> list[Tensor]:
        """The same tensors."""
        return list(tensors)

    def to_external(self, tensors: Sequence[Tensor], description: Description) -> list[Tensor]:
        """The same tensors."""
        return list(tensors)


@dataclass(frozen=True)
class InterleaveRope(Op):
    """Query or key rows: Hugging Face keeps the two channels of a rotation half a head apart, we side by side.

    Acts on the first dimension, ``[heads * head_dim, …]``; the number of heads follows from the tensor.
    """

    rowwise: ClassVar[bool] = True

    def to_tune(self, tensors: Sequence[Tensor], description: Description) -> list[Tensor]:
        """Half-split rows to interleaved rows."""
        return [self._regroup(tensor, 2, description.head_dim // 2) for tensor in tensors]

    def to_external(self, tensors: Sequence[Tensor], description: Description) -> list[Tensor]:
        """Interleaved rows to half-split rows."""
        return [self._regroup(tensor, description.head_dim // 2, 2) for tensor in tensors]

    @staticmethod
    def _regroup(tensor: Tensor, outer: int, inner: int) -> Tensor:
        rest = tensor.shape[1:]
        if tensor.shape[0] % (outer * inner):
            raise ValueError(f"{tensor.shape[0]} rows are no multiple of the head size {outer * inner}.")
        return tensor.reshape(-1, outer, inner, *rest).transpose(1, 2).reshape(tensor.shape)


@dataclass(frozen=True)
class Split(Op):
    """One external tensor whose rows are several of ours, one after the other (fused projections).

    Attributes:
        sizes: attributes of the description that give the number of rows of each part.
    """

    sizes: tuple[str, ...]

    def to_tune(self, tensors: Sequence[Tensor], description: Description) -> list[Tensor]:
        """One fused tensor to its parts."""
        (fused,) = tensors
        return list(fused.split([getattr(description, size) for size in self.sizes]))

    def to_external(self, tensors: Sequence[Tensor], description: Description) -> list[Tensor]:
        """The parts to one fused tensor."""
        return [torch.cat(list(tensors))]


@dataclass(frozen=True)
class Stack(Op):
    """Several external matrices ``[out, in]`` that are slices of one tensor of ours (experts).

    Attributes:
        transpose: ours holds each slice as ``[in, out]``.
    """

    transpose: bool = False

    def to_tune(self, tensors: Sequence[Tensor], description: Description) -> list[Tensor]:
        """Matrices to one tensor ``[experts, …]``."""
        stacked = torch.stack(list(tensors))
        return [stacked.transpose(1, 2).contiguous() if self.transpose else stacked]

    def to_external(self, tensors: Sequence[Tensor], description: Description) -> list[Tensor]:
        """One tensor ``[experts, …]`` to its matrices."""
        (stacked,) = tensors
        return [part.contiguous() for part in (stacked.transpose(1, 2) if self.transpose else stacked).unbind()]

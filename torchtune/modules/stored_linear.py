"""Linear layers that store the weight in another format, for example quantized."""

from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from torchtune.modules.kernels.onednn import linear, mm


class Stored(NamedTuple):
    """A frozen weight in its storage format.

    Attributes:
        decode: computes the full weight from ``tensors``.
        tensors: the stored tensors.
        dtype: dtype of the full weight.
    """

    decode: Callable[..., Tensor]
    tensors: tuple[Tensor, ...]
    dtype: torch.dtype

    def full(self) -> Tensor:
        """Decode the full weight."""
        return self.decode(*self.tensors)


class StoredLinear(nn.Linear):
    """Base class of linear layers that store the weight in another format.

    A conversion replaces ``nn.Linear`` by a subclass (see
    :meth:`torchtune.modules.conversion.Conversion.stored_weights`). With an adapter, the layer remains an instance of
    this class and keeps its parameters.

    Example:
        >>> class Halved(torchtune.modules.StoredLinear):
        ...     def full_weight(self):
        ...         return self.weight / 2
        ...
        >>> layer = Halved(2, 3)
        >>> torch.equal(layer.full_weight(), layer.weight / 2)
        True
    """

    # Parameter -> (output dimension, input dimension), which tensor parallelism shards; None: no such dimension.
    # Other parameters are replicated.
    parallel_dims: ClassVar[Mapping[str, tuple[int | None, int | None]]]

    @abstractmethod
    def full_weight(self) -> Tensor:
        """Return the weight ``[out, in]`` in the compute dtype."""

    def stored_weight(self) -> Tensor | Stored:
        """Return the weight for matrix products; with a :class:`Stored`, autograd saves no full weight."""
        return self.full_weight()

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer: ``[..., in]`` to ``[..., out]``."""
        return frozen_linear(x, self.stored_weight(), self.bias)


class _FrozenLinear(torch.autograd.Function):
    """x Wᵀ + bias with a frozen W that is decoded in the forward pass and again in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, decode: Callable[..., Tensor], *stored: Tensor) -> Tensor:
        ctx.save_for_backward(*stored)
        ctx.decode = decode
        return linear(x, decode(*stored), bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        needs_x, needs_bias, *_ = ctx.needs_input_grad
        stored = ctx.saved_tensors  # read once: activation checkpointing frees them
        grad_x = (
            mm(grad.reshape(-1, grad.shape[-1]), ctx.decode(*stored)).view(*grad.shape[:-1], -1) if needs_x else None
        )
        grad_bias = grad.flatten(0, -2).sum(0) if needs_bias else None
        return grad_x, grad_bias, None, *(None for _ in stored)


def frozen_linear(x: Tensor, weight: Tensor | Stored, bias: Tensor | None = None) -> Tensor:
    """Compute ``F.linear``, also of a :class:`Stored` weight, which is decoded again in the backward pass.

    Args:
        x: ``[..., in]``.
        weight: ``[out, in]``.
        bias: ``[out]`` or ``None``.
    """
    if isinstance(weight, Stored):
        return _FrozenLinear.apply(x, bias, weight.decode, *weight.tensors)
    return F.linear(x, weight, bias)

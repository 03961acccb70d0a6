"""Output projections: with a soft cap on the logits, and with the weight of the token embedding."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class CappedLinear(nn.Linear):
    """Output projection with a soft cap.

    Args:
        in_features: d.
        out_features: v.
        softcap: logits become ``softcap * tanh(logits / softcap)``, in float32.
    """

    def __init__(self, in_features: int, out_features: int, softcap: float) -> None:
        super().__init__(in_features, out_features, bias=False)
        self.softcap = softcap

    def forward(self, x: Tensor) -> Tensor:
        """Compute logits: ``[..., d]`` to ``[..., v]``."""
        return soft_cap(super().forward(x), self.softcap)


def soft_cap(logits: Tensor, softcap: float | None) -> Tensor:
    """Compute ``softcap * tanh(logits / softcap)`` in at least float32; with None, return the logits unchanged."""
    if softcap is None:
        return logits
    return softcap * torch.tanh(logits.to(torch.promote_types(logits.dtype, torch.float32)) / softcap)


class TiedLinear:
    """Output projection with the weight of another module; a callable, not a module.

    It adds no key to the state dict. The weight is read at every call, so ``to_empty``, conversions and resizing of
    the other module take effect.

    Args:
        tied_module: module with a ``weight`` ``[v, d]``, for example the token embedding.
        softcap: logits become ``softcap * tanh(logits / softcap)``, in float32.

    Raises:
        AttributeError: ``tied_module`` has no ``weight``.

    Example:
        >>> embedding = torch.nn.Embedding(50, 8)
        >>> torchtune.modules.TiedLinear(embedding)(torch.ones(1, 3, 8)).shape
        torch.Size([1, 3, 50])
    """

    def __init__(self, tied_module: nn.Module, softcap: float | None = None) -> None:
        if not hasattr(tied_module, "weight"):
            raise AttributeError(f"{type(tied_module).__name__} has no attribute 'weight' to tie to.")
        self.tied_module = tied_module
        self.softcap = softcap
        self.linear = F.linear  # replaced by generation

    @property
    def weight(self) -> Tensor:
        """The shared weight ``[v, d]``."""
        return self.tied_module.weight

    def __call__(self, x: Tensor) -> Tensor:
        """Compute logits: ``[..., d]`` to ``[..., v]``."""
        weight = self.tied_module.weight
        if hasattr(weight, "device_mesh"):  # sharded over the vocabulary
            from torchtune.modules.parallel.collectives import vocabulary_parallel_linear  # slow to import

            return soft_cap(vocabulary_parallel_linear(x, weight), self.softcap)
        return soft_cap(self.linear(x, weight), self.softcap)

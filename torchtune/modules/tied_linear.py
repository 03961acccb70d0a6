"""Output projection with the weight of the token embedding."""

from torch import Tensor, nn
from torch.nn import functional as F

from torchtune.modules.capped_linear import soft_cap


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
            from torchtune.modules.parallel import vocabulary_parallel_linear  # slow to import

            return soft_cap(vocabulary_parallel_linear(x, weight), self.softcap)
        return soft_cap(self.linear(x, weight), self.softcap)

"""The output projection of models that share it with their embeddings."""

from torch import Tensor, nn
from torch.nn import functional as F


class TiedLinear:
    """Callable that projects with the weight of another module, and is no module itself.

    It therefore adds no key to a state dict, and follows its module through ``to_empty``, conversions and resizing:
    the weight is looked up at every call.

    Args:
        tied_module: has a ``weight`` ``[v, d]``, for example the token embedding.

    Raises:
        AttributeError: the module has no ``weight``.
    """

    def __init__(self, tied_module: nn.Module) -> None:
        if not hasattr(tied_module, "weight"):
            raise AttributeError(f"{type(tied_module).__name__} has no attribute 'weight' to tie to.")
        self.tied_module = tied_module

    @property
    def weight(self) -> Tensor:
        """The shared weight ``[v, d]``."""
        return self.tied_module.weight

    def __call__(self, x: Tensor) -> Tensor:
        """``[..., d]`` to ``[..., v]``."""
        return F.linear(x, self.tied_module.weight)

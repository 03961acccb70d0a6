"""Linear layers with parameters in another form than a plain weight, for example quantized."""

from abc import abstractmethod
from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor, nn
from torch.nn import functional as F


class StoredLinear(nn.Linear):
    """Base class of linear layers that store the weight in another form.

    A conversion replaces ``nn.Linear`` by them (see
    :meth:`torchtune.modules.conversion.Conversion.stored_weights`). With an adapter, the layer remains an instance of
    this class and keeps its parameters.
    """

    # Parameter -> its output and its input dimension (or None), by which tensor parallelism shards it. Parameters that
    # are not named are replicated.
    parallel_dims: ClassVar[Mapping[str, tuple[int | None, int | None]]]

    @abstractmethod
    def full_weight(self) -> Tensor:
        """The weight ``[out, in]``, in the dtype in which the layer computes."""

    def forward(self, x: Tensor) -> Tensor:
        """``[..., in]`` to ``[..., out]``."""
        return F.linear(x, self.full_weight(), self.bias)

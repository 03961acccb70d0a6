"""Linear layers that keep their weight in another form, quantised for example."""

from abc import abstractmethod
from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor, nn
from torch.nn import functional as F


class StoredLinear(nn.Linear):
    """Base class of linear layers whose parameters store the weight in another form.

    A conversion puts them in the place of ``nn.Linear`` (see
    :meth:`torchtune.modules.conversion.Conversion.stored_weights`). Adapters may be put on top: the adapted layer is an
    instance of this class too and has the same parameters.
    """

    # Which dimension of a parameter belongs to the outputs and which to the inputs, None for neither: tensor
    # parallelism shards them with the layer. Parameters that are not named are replicated.
    parallel_dims: ClassVar[Mapping[str, tuple[int | None, int | None]]]

    @abstractmethod
    def full_weight(self) -> Tensor:
        """The weight ``[out, in]``, in the dtype in which the layer computes."""

    def forward(self, x: Tensor) -> Tensor:
        """``[..., in]`` to ``[..., out]``."""
        return F.linear(x, self.full_weight(), self.bias)

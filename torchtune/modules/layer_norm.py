"""Layer normalization."""

from torch import Tensor, nn
from torch.nn import functional as F


class Fp32LayerNorm(nn.LayerNorm):
    """``torch.nn.LayerNorm`` computed in float32, with the same arguments.

    Example:
        >>> torchtune.modules.Fp32LayerNorm(2)(torch.tensor([[1.0, 3.0]], dtype=torch.bfloat16)).dtype
        torch.bfloat16
    """

    def forward(self, x: Tensor) -> Tensor:
        """Normalize ``[..., d]``; shape and dtype are kept."""
        weight, bias = (None if value is None else value.float() for value in (self.weight, self.bias))
        return F.layer_norm(x.float(), self.normalized_shape, weight, bias, self.eps).to(x.dtype)

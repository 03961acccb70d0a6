"""What layers share that compute as their quantised selves would."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from torchtune.modules import _torchao


class FakeQuantSwitch:
    """Whether the layers of a model simulate quantisation now.

    Attributes:
        on: see above.
    """

    def __init__(self) -> None:
        self.on = True


class FakeQuantized(nn.Module):
    """A layer with fake quantizers of its input and its weight; mixed into the class of a linear layer.

    Attributes:
        activation_fake_quantizer: of the input, or None.
        weight_fake_quantizer: of the weight, or None.
        fake_quant: shared by all layers of a model.
    """

    activation_fake_quantizer: nn.Module | None
    weight_fake_quantizer: nn.Module | None
    fake_quant: FakeQuantSwitch

    def set_up_fake_quant(self, base_config: Any, switch: FakeQuantSwitch) -> None:
        """Add what :meth:`forward` needs."""
        found = _torchao.fake_quantizers(base_config, self.weight.shape)
        self.activation_fake_quantizer, self.weight_fake_quantizer = found
        self.fake_quant = switch

    def quantized_weight(self) -> Tensor:
        """The weight ``[out, in]`` that is quantised: what a checkpoint will hold, adapters merged."""
        return self.weight

    def forward(self, x: Tensor) -> Tensor:
        """``[..., in]`` to ``[..., out]``."""
        if not self.fake_quant.on:
            return super().forward(x)
        if not torch.is_grad_enabled():
            return self._simulate(x)
        # Autograd would keep a quantised copy of every weight of the model; it keeps the input, and makes it again.
        return checkpoint(self._simulate, x, use_reentrant=False, preserve_rng_state=False)

    def _simulate(self, x: Tensor) -> Tensor:
        weight = self.quantized_weight()
        if self.activation_fake_quantizer is not None:
            x = self.activation_fake_quantizer(x)
        if self.weight_fake_quantizer is not None:
            weight = self.weight_fake_quantizer(weight)
        return F.linear(x, weight, self.bias)

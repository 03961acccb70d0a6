"""Base class of linear layers that simulate quantization."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from torchtune.modules.low_precision import torchao_interface


class FakeQuantSwitch:
    """Switch shared by all fake-quantized layers of a model.

    Attributes:
        on: whether the layers simulate quantization.
    """

    def __init__(self) -> None:
        self.on = True


class FakeQuantized(nn.Module):
    """Mixin for linear layers that fake-quantizes the input and the weight.

    Attributes:
        activation_fake_quantizer: fake quantizer of the input, or None.
        weight_fake_quantizer: fake quantizer of the weight, or None.
        fake_quant: switch shared by all layers of a model.
    """

    activation_fake_quantizer: nn.Module | None
    weight_fake_quantizer: nn.Module | None
    fake_quant: FakeQuantSwitch

    def set_up_fake_quant(self, base_config: Any, switch: FakeQuantSwitch) -> None:
        """Add the fake quantizers and the switch that :meth:`forward` needs."""
        found = torchao_interface.fake_quantizers(base_config, self.weight.shape)
        self.activation_fake_quantizer, self.weight_fake_quantizer = found
        self.fake_quant = switch

    def quantized_weight(self) -> Tensor:
        """Return the weight ``[out, in]`` to fake-quantize, the one that an export writes.

        Subclasses with adapters return the merged weight.
        """
        return self.weight

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer: ``[..., in]`` to ``[..., out]``."""
        if not self.fake_quant.on:
            return super().forward(x)
        if not torch.is_grad_enabled():
            return self._simulate(x)
        # Autograd would save a quantized copy of every weight: save only the input and recompute.
        return checkpoint(self._simulate, x, use_reentrant=False, preserve_rng_state=False)

    def _simulate(self, x: Tensor) -> Tensor:
        weight = self.quantized_weight()
        if self.activation_fake_quantizer is not None:
            x = self.activation_fake_quantizer(x)
        if self.weight_fake_quantizer is not None:
            weight = self.weight_fake_quantizer(weight)
        return F.linear(x, weight, self.bias)


class FakeQuantLinear(FakeQuantized, nn.Linear):
    """Linear layer with fake-quantized weight and input; the gradient is a straight-through estimate.

    The gradient of a clipped value is zero. Parameters have the names of ``nn.Linear``.
    """

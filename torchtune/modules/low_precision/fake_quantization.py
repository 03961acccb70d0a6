"""Fake quantization: linear layers that compute with the rounded values of a quantized model while they are trained.

Weights keep their precision. Each forward pass rounds them, and the input if the quantizer rounds inputs, and the
gradient passes through the rounding. torchao does the rounding (its fake quantizers). Which layers of a model simulate
which quantizer is decided by :class:`torchtune.modules.low_precision.quantizers.FakeQuantize`.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from torchtune.modules.low_precision.torchao_interface import fake_quantizers


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
        """Add the fake quantizers and the switch that :meth:`forward` needs.

        Args:
            base_config: torchao's configuration of the quantized model.
            switch: switch of the model's layers.

        Raises:
            ConversionError: torchao cannot simulate this configuration.
        """
        of_inputs, of_weight = fake_quantizers(base_config, self.weight.shape)
        self.activation_fake_quantizer = of_inputs
        self.weight_fake_quantizer = of_weight
        self.fake_quant = switch

    def weight_to_quantize(self) -> Tensor:
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
        """Apply the layer with rounded input ``[..., in]`` and weight, which have the gradients of the plain ones."""
        weight = self.weight_to_quantize()
        if self.activation_fake_quantizer is not None:
            x = self.activation_fake_quantizer(x)
        if self.weight_fake_quantizer is not None:
            weight = self.weight_fake_quantizer(weight)
        return F.linear(x, weight, self.bias)


class FakeQuantLinear(FakeQuantized, nn.Linear):
    """Linear layer with fake-quantized weight and input; the gradient is a straight-through estimate.

    The gradient of a clipped value is zero. Parameters have the names of ``nn.Linear``.
    """


def fake_quant_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Return the fake-quantized layers of a model, by path."""
    return {path: module for path, module in model.named_modules() if isinstance(module, FakeQuantized)}


def set_fake_quant(module: nn.Module, enabled: bool = True) -> None:
    """Enable or disable fake quantization of a layer and of all layers with the same switch.

    Args:
        module: any module; one that is not fake-quantized does not change, so that this is a function for
            ``model.apply``.
        enabled: whether the layers simulate quantization.
    """
    if isinstance(module, FakeQuantized):
        module.fake_quant.on = enabled

"""Fake quantization and float8, as recipes of earlier releases call them."""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from torchtune.modules.low_precision.layers import set_fake_quant
from torchtune.modules.low_precision.quantizers import (
    QAT_QUANTIZERS,
    Int4WeightOnlyQATQuantizerModuleSwap,
    Int8DynActInt4WeightQATQuantizerModuleSwap,
)
from torchtune.modules.peft import LoRALinear, QATLoRALinear

# Functions for model.apply, under the names of earlier releases; all modes are enabled and disabled alike.
_enable_linear_fake_quant = set_fake_quant
_disable_linear_fake_quant = partial(set_fake_quant, enabled=False)
enable_4w_fake_quant_module_swap = _enable_linear_fake_quant
enable_8da4w_fake_quant_module_swap = _enable_linear_fake_quant
disable_4w_fake_quant_module_swap = _disable_linear_fake_quant
disable_8da4w_fake_quant_module_swap = _disable_linear_fake_quant

_QAT_MODES = {
    quantizer_class.mode
    for quantizer_class in (
        *QAT_QUANTIZERS,
        Int4WeightOnlyQATQuantizerModuleSwap,
        Int8DynActInt4WeightQATQuantizerModuleSwap,
    )
}


def _get_enable_fake_quant(quantizer_mode: str) -> Callable[[nn.Module], None] | None:
    """Return the function for ``model.apply`` that enables fake quantization; None for a mode without it."""
    return _enable_linear_fake_quant if quantizer_mode in _QAT_MODES else None


def _get_disable_fake_quant(quantizer_mode: str) -> Callable[[nn.Module], None] | None:
    """Return the function for ``model.apply`` that disables fake quantization; None for a mode without it."""
    return _disable_linear_fake_quant if quantizer_mode in _QAT_MODES else None


def swap_lora_linear_with_qat(
    module: nn.Module, activation_qat_config: Any | None = None, weight_qat_config: Any | None = None
) -> None:
    """Replace every LoRA layer of a module by one with fake quantizers, in place.

    Args:
        module: module that contains LoRA layers.
        activation_qat_config: torchao's ``FakeQuantizeConfigBase`` of inputs, or None.
        weight_qat_config: the same for weights with the adapter merged in, or None.

    Raises:
        ConversionError: an adapter has dropout.
    """
    for name, child in module.named_children():
        if type(child) is LoRALinear:
            setattr(module, name, QATLoRALinear.from_lora_linear(child, activation_qat_config, weight_qat_config))
        else:
            swap_lora_linear_with_qat(child, activation_qat_config, weight_qat_config)


def is_fp8_tensorwise_scaling(fp8_recipe_name: str | None) -> bool:
    """Return whether float8 training uses one scale per tensor: the default, or ``"tensorwise"``."""
    return fp8_recipe_name in (None, "tensorwise")

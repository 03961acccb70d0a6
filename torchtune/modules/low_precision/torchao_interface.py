"""The only module that imports torchao, because torchao's import paths change between releases.

It makes torchao's configurations of quantized weights, quantizes layers with them, and makes fake quantizers, float8
layers and the states of low-bit optimizers. torchao is imported at the first use.
"""

import functools
import logging
import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from torchtune.modules.conversion import ConversionError
from torchtune.utils import first_line, require


@contextmanager
def _silence_torchao() -> Iterator[None]:
    """Silence torchao's logs and warnings about kernels that this machine lacks."""
    level_before = logging.root.manager.disable  # records up to this level are dropped
    logging.disable(max(level_before, logging.WARNING))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level_before)


@functools.cache
def torchao_quantization() -> ModuleType:
    """Import and return ``torchao.quantization``.

    Raises:
        UserError: torchao is not installed.
    """
    with _silence_torchao():
        require("torchao.quantization.qat", extra="quantization", purpose="Quantization")
        return require("torchao.quantization", extra="quantization", purpose="Quantization")


def int_config(bits: int, group_size: int | None, *, dynamic_activations: bool) -> Any:
    """Return torchao's configuration of symmetric integer weights.

    Args:
        bits: bits per weight, 2 to 8.
        group_size: number of consecutive weights of a row that share a scale; None: one scale per row.
        dynamic_activations: quantize inputs to int8, with a scale per token.
    """
    quantization = torchao_quantization()
    if group_size is None:
        granularity = quantization.PerAxis(0)
    else:
        granularity = quantization.PerGroup(group_size)
    dtype = getattr(torch, f"int{bits}")
    if dynamic_activations:
        return quantization.Int8DynamicActivationIntxWeightConfig(weight_dtype=dtype, weight_granularity=granularity)
    return quantization.IntxWeightOnlyConfig(weight_dtype=dtype, granularity=granularity)


def float8_config() -> Any:
    """Return torchao's configuration of float8 (e4m3) weights with a scale per row."""
    return torchao_quantization().Float8WeightOnlyConfig(weight_dtype=torch.float8_e4m3fn)


def group_size(base_config: Any) -> int | None:
    """Return the group size of a torchao configuration, or None if it has none."""
    # torchao's classes of configurations have no common field for it.
    for granularity_field in ("weight_granularity", "granularity"):
        granularity = getattr(base_config, granularity_field, None)
        size = getattr(granularity, "group_size", None)
        if size is not None:
            return size
    return getattr(base_config, "group_size", None)


def fake_quantizers(base_config: Any, shape: torch.Size) -> tuple[nn.Module | None, nn.Module | None]:
    """Return torchao's fake quantizers of the input and of the weight of a linear layer; None: not quantized.

    Args:
        base_config: configuration of torchao.
        shape: shape of the weight, ``[out, in]``.

    Raises:
        ConversionError: torchao cannot simulate this configuration.
    """
    quantization = torchao_quantization()
    out_dim, in_dim = shape
    # torchao prepares the layers of a model, so it gets a model of one layer, from which the quantizers are taken.
    model = nn.Sequential(nn.Linear(in_dim, out_dim, bias=False, device="meta"))
    try:
        with _silence_torchao():  # imports more of torchao
            quantization.quantize_(model, quantization.qat.QATConfig(base_config, step="prepare"))
    except (ValueError, AssertionError, NotImplementedError) as error:
        raise ConversionError(
            f"quantizer: torchao cannot simulate {type(base_config).__name__} in training ({first_line(error)}): "
            "choose another quantizer."
        ) from error
    prepared = model[0]
    return prepared.activation_fake_quantizer, prepared.weight_fake_quantizer


def fake_quantize_configs(base_config: Any, group_size: int | None) -> tuple[Any, Any]:
    """Return the configurations of torchao's fake quantizers of inputs and weights; None: not quantized."""
    smallest_weight = torch.Size((1, group_size or 1))
    of_inputs, of_weights = fake_quantizers(base_config, smallest_weight)
    inputs_config = None if of_inputs is None else of_inputs.config
    weights_config = None if of_weights is None else of_weights.config
    return inputs_config, weights_config


def fake_quantizer(config: Any) -> nn.Module:
    """Make the fake quantizer of a ``FakeQuantizeConfigBase`` of torchao."""
    return torchao_quantization().qat.FakeQuantizerBase.from_config(config)


def quantize_linears(model: nn.Module, base_config: Any, paths: set[str]) -> None:
    """Quantize the weights of linear layers in place.

    Args:
        model: model that is not on the meta device.
        base_config: configuration of torchao.
        paths: paths of the layers.

    Raises:
        ConversionError: torchao raises an error, for example because this device lacks a kernel.
    """
    quantization = torchao_quantization()
    try:
        quantization.quantize_(model, base_config, filter_fn=lambda module, path: path in paths)
    except (ValueError, AssertionError, NotImplementedError, ImportError, RuntimeError) as error:
        device = next(model.parameters()).device
        raise ConversionError(
            f"quantizer: torchao refuses {type(base_config).__name__} on {device} ({first_line(error)}): choose "
            "another quantizer, or another device."
        ) from error


@torch.no_grad()
def quantized(weight: Tensor, base_config: Any) -> tuple[Tensor, Tensor]:
    """Quantize the weight of a linear layer with torchao.

    Args:
        weight: ``[out, in]``.
        base_config: from :func:`int_config` or :func:`float8_config`.

    Returns:
        Quantized values ``[out, in]``, int8 or float8, and their scales ``[out, groups]``.

    Raises:
        ConversionError: torchao raises an error.
    """
    out_dim, in_dim = weight.shape
    layer = nn.Linear(in_dim, out_dim, bias=False, device="meta")
    layer.weight = nn.Parameter(weight, requires_grad=False)
    model = nn.Sequential(layer)  # in which the path of the layer is "0"
    quantize_linears(model, base_config, {"0"})
    quantized_weight = model[0].weight
    return quantized_weight.qdata, quantized_weight.scale


def convert_to_float8(model: nn.Module, paths: set[str], recipe: str, *, emulate: bool) -> None:
    """Replace linear layers by layers that compute their matrix products in float8.

    Args:
        model: model, possibly on the meta device.
        paths: paths of the layers.
        recipe: ``tensorwise``, ``rowwise`` or ``rowwise_with_gw_hp``.
        emulate: round the operands to float8 and multiply them in high precision.
    """
    torchao_quantization()
    import torchao.float8 as float8

    config = float8.Float8LinearConfig.from_recipe_name(recipe)
    # The number of tokens is the inner dimension of the weight gradient's product, and need not be a multiple of 16.
    config = replace(config, emulate=emulate, pad_inner_dim=True)
    float8.convert_to_float8_training(model, module_filter_fn=lambda _, path: path in paths, config=config)


def is_float8_linear(module: nn.Module) -> bool:
    """Return whether :func:`convert_to_float8` made the layer."""
    return type(module).__module__.startswith("torchao.float8.")


@dataclass(frozen=True)
class StateFormat:
    """Storage format of a torchao optimizer's states: ``8bit``, ``4bit`` or ``fp8``."""

    name: str
    block_size: int

    def zeros(self, numel: int, device: torch.device, *, signed: bool) -> Tensor:
        """Return a state of zeros: as many as asked for, and those that fill the last block; at least one block."""
        num_blocks = max(1, math.ceil(numel / self.block_size))
        shape = (num_blocks * self.block_size,)
        if self.name == "fp8":
            from torchao.optim.subclass_fp8 import OptimStateFp8

            return OptimStateFp8.zeros(shape, self.block_size, device)
        if self.name == "8bit":
            from torchao.optim.subclass_8bit import OptimState8bit

            return OptimState8bit.zeros(shape, signed, self.block_size, device)
        from torchao.optim.subclass_4bit import OptimState4bit

        return OptimState4bit.zeros(shape, signed, self.block_size, device)


def low_bit_format(optimizer: Any) -> tuple[StateFormat, type[torch.optim.Optimizer]] | None:
    """Return the state format of a torchao optimizer and torch's equivalent class; None for other optimizers."""
    if not type(optimizer).__module__.startswith("torchao."):
        return None  # avoids importing torchao
    import torchao.optim

    for torch_class in (torch.optim.AdamW, torch.optim.Adam):
        for state in ("8bit", "4bit", "Fp8"):
            torchao_class = getattr(torchao.optim, f"{torch_class.__name__}{state}", None)
            if type(optimizer) is torchao_class:
                return StateFormat(state.lower(), optimizer.block_size), torch_class
    return None

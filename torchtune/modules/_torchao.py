"""All that the library uses of torchao, whose paths move between releases; nothing else imports it."""

import functools
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from torchtune.modules.conversion import ConversionError
from torchtune.utils import require


@contextmanager
def _quiet() -> Iterator[None]:
    """A block without what torchao logs of kernels that this machine lacks."""
    before = logging.root.manager.disable
    logging.disable(max(before, logging.WARNING))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


@functools.cache
def torchao_quantization() -> ModuleType:
    """``torchao.quantization``.

    Raises:
        UserError: torchao is not installed.
    """
    with _quiet():
        require("torchao.quantization.qat", extra="quantization", purpose="Quantization")
        return require("torchao.quantization", extra="quantization", purpose="Quantization")


def int_config(bits: int, group_size: int | None, *, dynamic_activations: bool) -> Any:
    """Configuration of torchao for symmetric integer weights.

    Args:
        bits: of a weight, 2 to 8.
        group_size: neighbours along the input dimension that share a scale; None for all of a row.
        dynamic_activations: quantise inputs to int8, each token with a range of its own.
    """
    ao = torchao_quantization()
    granularity = ao.PerAxis(0) if group_size is None else ao.PerGroup(group_size)
    dtype = getattr(torch, f"int{bits}")
    if dynamic_activations:
        return ao.Int8DynamicActivationIntxWeightConfig(weight_dtype=dtype, weight_granularity=granularity)
    return ao.IntxWeightOnlyConfig(weight_dtype=dtype, granularity=granularity)


def float8_config() -> Any:
    """Configuration of torchao for weights in float8 (e4m3), a scale for each row."""
    ao = torchao_quantization()
    return ao.Float8WeightOnlyConfig(weight_dtype=torch.float8_e4m3fn)


def group_size(base_config: Any) -> int | None:
    """How many neighbours along the input dimension share a scale, where a configuration says so."""
    for name in ("weight_granularity", "granularity"):
        size = getattr(getattr(base_config, name, None), "group_size", None)
        if size is not None:
            return size
    return getattr(base_config, "group_size", None)


def fake_quantizers(base_config: Any, shape: torch.Size) -> tuple[nn.Module | None, nn.Module | None]:
    """The modules that simulate the quantised inputs and weights of a linear layer, with ``enabled`` to be set.

    Args:
        base_config: configuration of torchao.
        shape: of the weight.

    Raises:
        ConversionError: torchao cannot simulate this configuration.
    """
    ao = torchao_quantization()
    out_dim, in_dim = shape
    layer = nn.Sequential(nn.Linear(in_dim, out_dim, bias=False, device="meta"))
    try:
        with _quiet():  # imports more of torchao
            ao.quantize_(layer, ao.qat.QATConfig(base_config, step="prepare"))
    except (ValueError, AssertionError, NotImplementedError) as error:
        raise ConversionError(
            f"quantizer: torchao cannot simulate {type(base_config).__name__} in training ({_first_line(error)}): "
            "choose another quantizer."
        ) from error
    return layer[0].activation_fake_quantizer, layer[0].weight_fake_quantizer


def fake_quantize_configs(base_config: Any, group_size: int | None) -> tuple[Any, Any]:
    """Torchao's configurations of the fake quantizers of inputs and weights; None for what stays as it is."""
    found = fake_quantizers(base_config, torch.Size((1, group_size or 1)))
    return getattr(found[0], "config", None), getattr(found[1], "config", None)


def fake_quantizer(config: Any) -> nn.Module:
    """The module that simulates what a ``FakeQuantizeConfigBase`` of torchao says."""
    return torchao_quantization().qat.FakeQuantizerBase.from_config(config)


def quantize_linears(model: nn.Module, base_config: Any, paths: set[str]) -> None:
    """Quantise the weights of linear layers in place.

    Args:
        model: has real weights.
        base_config: configuration of torchao.
        paths: of the layers.

    Raises:
        ConversionError: torchao refuses, for want of a kernel on this device for example.
    """
    ao = torchao_quantization()
    try:
        ao.quantize_(model, base_config, filter_fn=lambda module, path: path in paths)
    except (ValueError, AssertionError, NotImplementedError, ImportError, RuntimeError) as error:
        device = next(model.parameters()).device
        raise ConversionError(
            f"quantizer: torchao refuses {type(base_config).__name__} on {device} ({_first_line(error)}): choose "
            "another quantizer, or another device."
        ) from error


@torch.no_grad()
def quantized(weight: Tensor, base_config: Any) -> tuple[Tensor, Tensor]:
    """What torchao makes of the weight of a linear layer.

    Args:
        weight: ``[out, in]``.
        base_config: from :func:`int_config` or :func:`float8_config`.

    Returns:
        values ``[out, in]``, int8 or float8, and their scales ``[out, groups]``: the weight is their product.

    Raises:
        ConversionError: torchao refuses.
    """
    layer = nn.Linear(*reversed(weight.shape), bias=False, device="meta")
    layer.weight = nn.Parameter(weight, requires_grad=False)
    model = nn.Sequential(layer)
    quantize_linears(model, base_config, {"0"})
    return model[0].weight.qdata, model[0].weight.scale


def compute_in_float8(model: nn.Module, paths: set[str], recipe: str, *, emulate: bool) -> None:
    """Let linear layers compute their products in float8, in place.

    Args:
        model: may be on the meta device.
        paths: of the layers.
        recipe: ``tensorwise``, ``rowwise`` or ``rowwise_with_gw_hp``.
        emulate: round the operands and multiply them in high precision.
    """
    torchao_quantization()
    import torchao.float8 as float8

    config = float8.Float8LinearConfig.from_recipe_name(recipe)
    # The tokens of a batch are an inner dimension of the product for the weight's gradient, and any number
    config = replace(config, emulate=emulate, pad_inner_dim=True)
    float8.convert_to_float8_training(model, module_filter_fn=lambda _, path: path in paths, config=config)


def is_float8_linear(module: nn.Module) -> bool:
    """Whether :func:`compute_in_float8` made it."""
    return type(module).__module__.startswith("torchao.float8.")


class ShardInFloat8:
    """The two functions that FSDP looks for on the shard of a weight: it sends float8, a byte for each element.

    They are set on a plain tensor, not on a subclass, so that whatever reads or changes the shard sees what it is.

    Args:
        layer: of :func:`compute_in_float8`, with one scale for its weight.
        scale: float32 scalar, equal on all ranks: the weight times it is rounded.
    """

    def __init__(self, layer: nn.Module, scale: Tensor) -> None:
        self.mm_config, self.dtype = layer.linear_mm_config, layer.config.cast_config_weight.target_dtype
        self.scale = scale

    @staticmethod
    def set_on(layer: nn.Module, scale: Tensor) -> None:
        """Let FSDP round the shard of a layer's weight by a scale from now on."""
        sent, shard = ShardInFloat8(layer, scale), layer.weight._local_tensor  # FSDP's own object, not one like it
        shard.fsdp_pre_all_gather, shard.fsdp_post_all_gather = sent.fsdp_pre_all_gather, sent.fsdp_post_all_gather

    @staticmethod
    def is_set_on(layer: nn.Module) -> bool:
        """Whether :meth:`set_on` was called for the shard that the layer's weight has now."""
        return hasattr(layer.weight._local_tensor, "fsdp_pre_all_gather")

    @staticmethod
    def scales(largest: Tensor, layer: nn.Module) -> Tensor:
        """float32 scales of weights, of which ``largest`` has the largest absolute values."""
        from torchao.float8.float8_utils import amax_to_scale

        return amax_to_scale(largest, layer.config.cast_config_weight.target_dtype)

    def fsdp_pre_all_gather(self, mesh: Any, size: Any, stride: Any, module: nn.Module, policy: Any) -> tuple[Any, Any]:
        """(what is gathered, what is not); shards are padded to the longest."""
        from torchao.float8.float8_training_tensor import hp_tensor_and_scale_to_float8

        shard = module.weight.to_local()
        data = hp_tensor_and_scale_to_float8(shard, self.scale, self.dtype, self.mm_config)._data.view(torch.uint8)
        missing = -(-size[0] // mesh.size()) - len(data)
        return (nn.functional.pad(data, (0, 0, 0, missing)) if missing else data,), None

    def fsdp_post_all_gather(
        self, gathered: tuple[Tensor, ...], _: None, dtype: torch.dtype, *, out: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        """The weight; or nothing, when ``out`` has the gathered memory already."""
        from torchao.float8.float8_training_tensor import Float8TrainingTensor, GemmInputRole

        if out is not None:
            out._scale = self.scale
            return None
        data = gathered[0].view(self.dtype)
        weight = Float8TrainingTensor(data, self.scale, dtype, self.mm_config, gemm_input_role=GemmInputRole.WEIGHT)
        return weight, (data,)


@dataclass(frozen=True)
class StateFormat:
    """How an optimizer of torchao keeps its states: ``8bit``, ``4bit`` or ``fp8``."""

    name: str
    bits: int
    block_size: int


def low_bit_format(optimizer: Any) -> tuple[StateFormat, type[torch.optim.Optimizer]] | None:
    """Format of the states of an optimizer of torchao, and torch's optimizer with its arithmetic; None for others."""
    if not type(optimizer).__module__.startswith("torchao."):
        return None  # what is not there yet has made no optimizer
    import torchao.optim

    for base, same in (("AdamW", torch.optim.AdamW), ("Adam", torch.optim.Adam)):
        for name, bits in (("8bit", 8), ("4bit", 4), ("Fp8", 8)):
            if type(optimizer) is getattr(torchao.optim, base + name, None):
                return StateFormat(name.lower(), bits, optimizer.block_size), same
    return None


def state_map(name: str, signed: bool) -> Tensor:
    """float32 [256 or 16]: the value of every code of a state in ``8bit`` or ``4bit``, ascending, from -1 to 1."""
    if name == "8bit":
        from torchao.optim.subclass_8bit import OptimState8bit as Kind
    else:
        from torchao.optim.subclass_4bit import OptimState4bit as Kind
    return Kind.zeros((256,), signed, 256, torch.device("cpu")).qmap.clone()


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0].rstrip(".") or type(error).__name__

"""Quantizers of a model's weights: in quantization-aware training (``*QATQuantizer``) and at export.

A quantizer stands for a configuration of torchao. It quantizes the weights of linear layers, with one scale per group
of consecutive elements along the input dimension. Embeddings, norms and the output projection keep their precision.
Recipes for quantization-aware training take a ``*QATQuantizer``; the recipe ``quantize`` takes any quantizer.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, Literal

from torch import Tensor, nn

from torchtune._lazy import former_names
from torchtune.modules import torchao_formats
from torchtune.modules.conversion import apply_conversions
from torchtune.modules.fake_quant import (
    FakeQuantize,
    check_group_size,
    fake_quant_layers,
    quantizable_layers,
    set_fake_quant,
)
from torchtune.modules.low_precision import Float8Training
from torchtune.modules.peft import QATLoRALinear
from torchtune.modules.peft.lora import LoRALinear
from torchtune.utils import UserError

__all__ = [
    "Float8Quantizer",
    "GGUFQuantizer",
    "Int4WeightOnlyQATQuantizer",
    "Int4WeightOnlyQATQuantizerModuleSwap",
    "Int4WeightOnlyQuantizer",
    "Int8DynActInt4WeightQATQuantizer",
    "Int8DynActInt4WeightQATQuantizerModuleSwap",
    "Int8DynActInt4WeightQuantizer",
    "Int8WeightOnlyQATQuantizer",
    "Int8WeightOnlyQuantizer",
    "QATQuantizer",
    "Quantizer",
    "convert_to_float8_training",
    "fake_quantization",
    "get_quantizer_mode",
    "is_fp8_tensorwise_scaling",
    "swap_lora_linear_with_qat",
]

FileType = Literal["F32", "F16", "BF16", "Q8_0", "Q5_1", "Q5_0", "Q4_1", "Q4_0"]


class Quantizer:
    """Base class of quantizers of a model's linear layers.

    Args:
        group_size: number of consecutive elements along the input dimension that share a scale; None: one scale per
            row.

    Attributes:
        mode: short name, for example ``"8da4w"``.
        bits: bits per weight.
        activations: dtype of quantized inputs: ``"int8"``, ``"float8"`` or None.
        group_size: see Args.

    Example:
        >>> from torchtune.training.quantization import Int8WeightOnlyQuantizer, Quantizer
        >>> isinstance(Int8WeightOnlyQuantizer(), Quantizer)
        True
    """

    mode: ClassVar[str]
    bits: ClassVar[int]
    activations: ClassVar[str | None] = None

    def __init__(self, group_size: int | None) -> None:
        self.group_size = group_size

    @property
    def base_config(self) -> Any:
        """torchao's configuration for quantizing the model."""
        return torchao_formats.int_config(self.bits, self.group_size, dynamic_activations=self.activations == "int8")

    @property
    def layout(self) -> dict[str, Any]:
        """Fields that determine the quantized values: quantizers with equal layouts produce equal models."""
        return {"bits": self.bits, "group_size": self.group_size, "activations": self.activations}

    def quantized(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Quantize one weight: return values ``[out, in]`` and scales ``[out, groups]``, with weight = values * scales.

        Raises:
            ConversionError: torchao raises an error.
        """
        return torchao_formats.quantized(weight, self.base_config)

    def quantize(self, model: nn.Module) -> nn.Module:
        """Replace the weights of the linear layers by torchao's quantized weights, and return the model.

        Raises:
            ConversionError: the group size does not divide the width of a layer, or torchao raises an error.
        """
        layers = quantizable_layers(model)
        check_group_size(layers, self.group_size)
        torchao_formats.quantize_linears(model, self.base_config, set(layers))
        return model


class QATQuantizer(Quantizer):
    """Base class of quantizers for quantization-aware training, which simulates the quantization.

    Example:
        >>> from torchtune.training.quantization import Int8WeightOnlyQATQuantizer, QATQuantizer
        >>> isinstance(Int8WeightOnlyQATQuantizer(), QATQuantizer)
        True
    """

    def prepare(self, model: nn.Module) -> nn.Module:
        """Add fake quantization to the linear layers of a model, and return it.

        Raises:
            ConversionError: see :class:`torchtune.modules.fake_quant.FakeQuantize`.
        """
        apply_conversions(model, [FakeQuantize(self.base_config)])
        return model

    def get_activation_fake_quantize_config(self) -> Any:
        """Return torchao's configuration of inputs, or None; for :func:`swap_lora_linear_with_qat`."""
        activations, _ = torchao_formats.fake_quantize_configs(self.base_config, self.group_size)
        return activations

    def get_weight_fake_quantize_config(self) -> Any:
        """Return torchao's configuration of weights, or None; for :func:`swap_lora_linear_with_qat`."""
        _, weights = torchao_formats.fake_quantize_configs(self.base_config, self.group_size)
        return weights

    def convert(self, model: nn.Module) -> nn.Module:
        """Quantize a prepared model with adapters merged in, and return it; its outputs do not change.

        Raises:
            ConversionError: torchao raises an error.
            UserError: the model was not prepared.
        """
        layers = fake_quant_layers(model)
        if not layers:
            raise UserError("quantizer: convert() takes a model of prepare(), this one simulates no quantization.")
        for path, layer in layers.items():
            out_features, in_features = layer.weight.shape
            linear = nn.Linear(in_features, out_features, bias=layer.bias is not None, device="meta")
            # The rounded values of the simulation: torchao finds the same scales in them, and outputs do not change.
            linear.weight = nn.Parameter(layer.quantized_weight().detach(), requires_grad=False)
            linear.bias = layer.bias
            model.set_submodule(path, linear)
        model.conversions = []
        torchao_formats.quantize_linears(model, self.base_config, set(layers))
        return model


class Int8DynActInt4WeightQuantizer(Quantizer):
    """int4 weights with one scale per group; int8 inputs with one range per token (8da4w).

    Args:
        groupsize: number of consecutive elements along the input dimension that share a scale.

    Example:
        >>> model = torchtune.training.quantization.Int8DynActInt4WeightQuantizer(groupsize=32).quantize(model)
    """

    mode = "8da4w"
    bits = 4
    activations = "int8"

    def __init__(self, groupsize: int = 256) -> None:
        super().__init__(groupsize)


class Int4WeightOnlyQuantizer(Quantizer):
    """int4 weights with one scale per group; inputs keep their precision.

    Args:
        groupsize: number of consecutive elements along the input dimension that share a scale.
        inner_k_tiles: accepted for older configs; ignored, as checkpoints do not depend on a kernel's weight layout.

    Example:
        >>> torchtune.training.quantization.Int4WeightOnlyQuantizer(groupsize=32).mode
        '4w'
    """

    mode = "4w"
    bits = 4

    def __init__(self, groupsize: int = 128, inner_k_tiles: int = 8) -> None:
        super().__init__(groupsize)


class Int8WeightOnlyQuantizer(Quantizer):
    """int8 weights with one scale per row; inputs keep their precision.

    Example:
        >>> torchtune.training.quantization.Int8WeightOnlyQuantizer().mode
        '8w'
    """

    mode = "8w"
    bits = 8

    def __init__(self) -> None:
        super().__init__(None)


class Float8Quantizer(Quantizer):
    """float8 (e4m3) weights with one scale per row.

    Args:
        dynamic_activations: also quantize inputs to float8, one scale per token; for GPUs with float8 matrix products.

    Example:
        >>> torchtune.training.quantization.Float8Quantizer(dynamic_activations=False).mode
        'f8'
    """

    mode = "f8"
    bits = 8

    def __init__(self, dynamic_activations: bool = True) -> None:
        super().__init__(None)
        self.activations = "float8" if dynamic_activations else None

    @property
    def base_config(self) -> Any:
        """torchao's configuration of the weights."""
        return torchao_formats.float8_config()


class Int8DynActInt4WeightQATQuantizer(QATQuantizer):
    """int4 weights with one scale per group; int8 inputs with one range per token.

    Args:
        groupsize: number of consecutive elements along the input dimension that share a scale.

    Example:
        >>> qat = torchtune.training.quantization.Int8DynActInt4WeightQATQuantizer(groupsize=32)
        >>> _ = qat.prepare(model)  # training now sees the rounding
    """

    mode = "8da4w-qat"
    bits = 4
    activations = "int8"

    def __init__(self, groupsize: int = 256) -> None:
        super().__init__(groupsize)


class Int4WeightOnlyQATQuantizer(QATQuantizer):
    """int4 weights with one scale per group; inputs keep their precision.

    Args:
        groupsize: number of consecutive elements along the input dimension that share a scale.
        inner_k_tiles: accepted for older configs; ignored, as checkpoints do not depend on a kernel's weight layout.

    Example:
        >>> qat = torchtune.training.quantization.Int4WeightOnlyQATQuantizer(groupsize=32)
        >>> _ = qat.prepare(model)  # training now sees the rounding
    """

    mode = "4w-qat"
    bits = 4

    def __init__(self, groupsize: int = 256, inner_k_tiles: int = 8) -> None:
        super().__init__(groupsize)


class Int8WeightOnlyQATQuantizer(QATQuantizer):
    """int8 weights with one scale per row; inputs keep their precision.

    Example:
        >>> _ = torchtune.training.quantization.Int8WeightOnlyQATQuantizer().prepare(model)
    """

    mode = "8w-qat"
    bits = 8

    def __init__(self) -> None:
        super().__init__(None)


class Int4WeightOnlyQATQuantizerModuleSwap(Int4WeightOnlyQATQuantizer):
    """Older name of :class:`Int4WeightOnlyQATQuantizer`.

    Example:
        >>> torchtune.training.quantization.Int4WeightOnlyQATQuantizerModuleSwap(groupsize=32).mode
        '4w-qat-module-swap'
    """

    mode = "4w-qat-module-swap"


class Int8DynActInt4WeightQATQuantizerModuleSwap(Int8DynActInt4WeightQATQuantizer):
    """Older name of :class:`Int8DynActInt4WeightQATQuantizer`.

    Example:
        >>> torchtune.training.quantization.Int8DynActInt4WeightQATQuantizerModuleSwap(groupsize=32).mode
        '8da4w-qat-module-swap'
    """

    mode = "8da4w-qat-module-swap"


class GGUFQuantizer:
    """Quantizer for GGUF files (llama.cpp). Embedding and output projection have at least 8 bits, vectors are float32.

    Args:
        file_type: ``"Q8_0"``, ``"Q5_1"``, ``"Q5_0"``, ``"Q4_1"``, ``"Q4_0"`` (blocks of 32), or ``"BF16"``, ``"F16"``,
            ``"F32"``.

    Example:
        >>> torchtune.training.quantization.GGUFQuantizer("Q4_0").mode
        'gguf'
    """

    mode = "gguf"

    def __init__(self, file_type: FileType = "Q8_0") -> None:
        self.file_type = file_type


def get_quantizer_mode(quantizer: Any | None) -> str | None:
    """Return the short name of a quantizer, for example ``"8da4w"``; None for any other object.

    Example:
        >>> torchtune.training.get_quantizer_mode(torchtune.training.quantization.Int8WeightOnlyQuantizer())
        '8w'
    """
    return quantizer.mode if isinstance(quantizer, Quantizer | GGUFQuantizer) else None


def fake_quantization(
    quantizer: Any, after_n_steps: int | None, step: Callable[[], int], total_steps: int
) -> FakeQuantize:
    """Build the conversion that simulates a quantizer in training.

    Args:
        quantizer: a ``*QATQuantizer``.
        after_n_steps: number of training steps before fake quantization starts.
        step: returns the number of completed steps.
        total_steps: number of steps of the run.

    Raises:
        UserError: ``quantizer`` is not a ``*QATQuantizer``.
        ConversionError: fake quantization would not start within ``total_steps``.
    """
    if not isinstance(quantizer, QATQuantizer):
        choices = ", ".join(quantizer_class.__name__ for quantizer_class in QATQuantizer.__subclasses__())
        raise UserError(f"quantizer: {type(quantizer).__name__} cannot be simulated in training: choose {choices}.")
    return FakeQuantize(quantizer.base_config, after_n_steps=after_n_steps, step=step, total_steps=total_steps)


# Functions for model.apply, under the names of earlier releases; all modes are enabled and disabled alike.
_enable_linear_fake_quant = set_fake_quant
_disable_linear_fake_quant = partial(set_fake_quant, enabled=False)
enable_4w_fake_quant_module_swap = enable_8da4w_fake_quant_module_swap = _enable_linear_fake_quant
disable_4w_fake_quant_module_swap = disable_8da4w_fake_quant_module_swap = _disable_linear_fake_quant


def _has_fake_quant(mode: str) -> bool:
    """Return whether ``mode`` is the mode of a ``*QATQuantizer`` or of its ``*ModuleSwap`` class."""
    modes = set()
    for quantizer_class in QATQuantizer.__subclasses__():
        modes.add(quantizer_class.mode)
        modes.update(module_swap_class.mode for module_swap_class in quantizer_class.__subclasses__())
    return mode in modes


def _get_enable_fake_quant(quantizer_mode: str) -> Callable[[nn.Module], None] | None:
    """Return the function for ``model.apply`` that enables fake quantization; None for a mode without it."""
    return _enable_linear_fake_quant if _has_fake_quant(quantizer_mode) else None


def _get_disable_fake_quant(quantizer_mode: str) -> Callable[[nn.Module], None] | None:
    """Return the function for ``model.apply`` that disables fake quantization; None for a mode without it."""
    return _disable_linear_fake_quant if _has_fake_quant(quantizer_mode) else None


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


def convert_to_float8_training(model: nn.Module, fp8_recipe_name: str | None = None) -> nn.Module:
    """Compute the linear layers of the transformer layers in float8, in place.

    Args:
        model: decoder without adapters, possibly on the meta device.
        fp8_recipe_name: see :class:`~torchtune.modules.low_precision.Float8Training`; None is ``"tensorwise"``.

    Returns:
        ``model``.

    Raises:
        ConversionError: the recipe is unknown, or excluded by another conversion of the model.
    """
    apply_conversions(model, [Float8Training(fp8_recipe_name or "tensorwise")])
    return model


__getattr__ = former_names(__name__)

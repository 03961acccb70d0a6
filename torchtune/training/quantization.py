"""Quantizers: how the weights of a model are quantised, while it trains (``*QATQuantizer``) and when it is exported.

A quantizer is a name for a configuration of torchao. Weights of the linear layers are quantised, each group of
neighbours along the input dimension with a scale of its own; embeddings, norms and the output projection keep their
precision. Recipes of quantisation-aware training take a ``*QATQuantizer``, the recipe ``quantize`` any.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
import yaml
from torch import Tensor, nn

from torchtune.modules import _torchao
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
from torchtune.utils import UserError, get_logger

if TYPE_CHECKING:
    from torchtune.training.checkpointing._model_source import ModelSource

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
    "check_quantizer",
    "convert_to_float8_training",
    "fake_quantization",
    "get_quantizer_mode",
    "is_fp8_tensorwise_scaling",
    "quantize_checkpoint",
    "swap_lora_linear_with_qat",
]

FileType = Literal["F32", "F16", "BF16", "Q8_0", "Q5_1", "Q5_0", "Q4_1", "Q4_0"]


class Quantizer:
    """Base class: quantises the linear layers of a model.

    Args:
        group_size: neighbours along the input dimension that share a scale; None for all of a row.

    Attributes:
        mode: short name, for example ``"8da4w"``.
        bits: of a weight.
        activations: how inputs are quantised: ``"int8"``, ``"float8"`` or None.
        group_size: as given.

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
        """torchao's configuration of the quantised model."""
        return _torchao.int_config(self.bits, self.group_size, dynamic_activations=self.activations == "int8")

    @property
    def layout(self) -> dict[str, Any]:
        """All that decides the quantised values: two quantizers of one layout make the same model."""
        return {"bits": self.bits, "group_size": self.group_size, "activations": self.activations}

    def quantized(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Values ``[out, in]`` and scales ``[out, groups]`` of a weight; it stands for their product.

        Raises:
            ConversionError: torchao refuses.
        """
        return _torchao.quantized(weight, self.base_config)

    def quantize(self, model: nn.Module) -> nn.Module:
        """Replace the weights of the linear layers by torchao's quantised ones, and return the model.

        Raises:
            ConversionError: a width that the group size does not divide, or torchao refuses.
        """
        layers = quantizable_layers(model)
        check_group_size(layers, self.group_size)
        _torchao.quantize_linears(model, self.base_config, set(layers))
        return model


class QATQuantizer(Quantizer):
    """Base class of quantizers whose arithmetic is simulated in training.

    Example:
        >>> from torchtune.training.quantization import Int8WeightOnlyQATQuantizer, QATQuantizer
        >>> isinstance(Int8WeightOnlyQATQuantizer(), QATQuantizer)
        True
    """

    def prepare(self, model: nn.Module) -> nn.Module:
        """Simulate quantisation in the linear layers of a model, and return it.

        Raises:
            ConversionError: see :class:`torchtune.modules.fake_quant.FakeQuantize`.
        """
        apply_conversions(model, [FakeQuantize(self.base_config)])
        return model

    def get_activation_fake_quantize_config(self) -> Any:
        """Return torchao's configuration of inputs, or None; for :func:`swap_lora_linear_with_qat`."""
        return _torchao.fake_quantize_configs(self.base_config, self.group_size)[0]

    def get_weight_fake_quantize_config(self) -> Any:
        """Return torchao's configuration of weights, or None; for :func:`swap_lora_linear_with_qat`."""
        return _torchao.fake_quantize_configs(self.base_config, self.group_size)[1]

    def convert(self, model: nn.Module) -> nn.Module:
        """Quantise a prepared model, adapters merged in, and return it: it computes what it did when it was prepared.

        Raises:
            ConversionError: torchao refuses.
            UserError: the model was not prepared.
        """
        layers = fake_quant_layers(model)
        if not layers:
            raise UserError("quantizer: convert() takes a model of prepare(), this one simulates no quantisation.")
        for path, layer in layers.items():
            plain = nn.Linear(*reversed(layer.weight.shape), bias=layer.bias is not None, device="meta")
            plain.weight = nn.Parameter(layer.quantized_weight().detach(), requires_grad=False)
            plain.bias = layer.bias
            parent, _, name = path.rpartition(".")
            setattr(model.get_submodule(parent), name, plain)
        model.conversions = []
        _torchao.quantize_linears(model, self.base_config, set(layers))
        return model


class Int8DynActInt4WeightQuantizer(Quantizer):
    """int4 weights, a scale for each group; int8 inputs, a range for each token (8da4w).

    Args:
        groupsize: neighbours along the input dimension that share a scale.

    Example:
        >>> model = torchtune.training.quantization.Int8DynActInt4WeightQuantizer(groupsize=32).quantize(model)
    """

    mode, bits, activations = "8da4w", 4, "int8"

    def __init__(self, groupsize: int = 256) -> None:
        super().__init__(groupsize)


class Int4WeightOnlyQuantizer(Quantizer):
    """int4 weights, a scale for each group; inputs keep their precision.

    Args:
        groupsize: neighbours along the input dimension that share a scale.
        inner_k_tiles: accepted for older configs; how a kernel orders weights is no part of a checkpoint.

    Example:
        >>> torchtune.training.quantization.Int4WeightOnlyQuantizer(groupsize=32).mode
        '4w'
    """

    mode, bits = "4w", 4

    def __init__(self, groupsize: int = 128, inner_k_tiles: int = 8) -> None:
        super().__init__(groupsize)


class Int8WeightOnlyQuantizer(Quantizer):
    """int8 weights, a scale for each row; inputs keep their precision.

    Example:
        >>> torchtune.training.quantization.Int8WeightOnlyQuantizer().mode
        '8w'
    """

    mode, bits = "8w", 8

    def __init__(self) -> None:
        super().__init__(None)


class Float8Quantizer(Quantizer):
    """float8 (e4m3) weights, a scale for each row.

    Args:
        dynamic_activations: quantise inputs to float8 as well, a scale for each token; for GPUs that multiply float8.

    Example:
        >>> torchtune.training.quantization.Float8Quantizer(dynamic_activations=False).mode
        'f8'
    """

    mode, bits = "f8", 8

    def __init__(self, dynamic_activations: bool = True) -> None:
        super().__init__(None)
        self.activations = "float8" if dynamic_activations else None

    @property
    def base_config(self) -> Any:
        """torchao's configuration of the weights."""
        return _torchao.float8_config()


class Int8DynActInt4WeightQATQuantizer(QATQuantizer):
    """int4 weights, a scale for each group; int8 inputs, a range for each token.

    Args:
        groupsize: neighbours along the input dimension that share a scale.

    Example:
        >>> qat = torchtune.training.quantization.Int8DynActInt4WeightQATQuantizer(groupsize=32)
        >>> _ = qat.prepare(model)  # training now sees the rounding
    """

    mode, bits, activations = "8da4w-qat", 4, "int8"

    def __init__(self, groupsize: int = 256) -> None:
        super().__init__(groupsize)


class Int4WeightOnlyQATQuantizer(QATQuantizer):
    """int4 weights, a scale for each group; inputs keep their precision.

    Args:
        groupsize: neighbours along the input dimension that share a scale.
        inner_k_tiles: accepted for older configs; how a kernel orders weights is no part of a checkpoint.

    Example:
        >>> qat = torchtune.training.quantization.Int4WeightOnlyQATQuantizer(groupsize=32)
        >>> _ = qat.prepare(model)  # training now sees the rounding
    """

    mode, bits = "4w-qat", 4

    def __init__(self, groupsize: int = 256, inner_k_tiles: int = 8) -> None:
        super().__init__(groupsize)


class Int8WeightOnlyQATQuantizer(QATQuantizer):
    """int8 weights, a scale for each row; inputs keep their precision.

    Example:
        >>> _ = torchtune.training.quantization.Int8WeightOnlyQATQuantizer().prepare(model)
    """

    mode, bits = "8w-qat", 8

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
    """One GGUF file for llama.cpp; embedding and output projection keep at least 8 bits, vectors float32.

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
    """The short name of a quantizer, for example ``"8da4w"``; ``None`` for anything else, such as no quantizer.

    Example:
        >>> torchtune.training.get_quantizer_mode(torchtune.training.quantization.Int8WeightOnlyQuantizer())
        '8w'
    """
    return quantizer.mode if isinstance(quantizer, Quantizer | GGUFQuantizer) else None


def fake_quantization(
    quantizer: Any, after_n_steps: int | None, step: Callable[[], int], total_steps: int
) -> FakeQuantize:
    """The conversion that simulates a quantizer in training.

    Args:
        quantizer: a ``*QATQuantizer``.
        after_n_steps: train so many steps without it first.
        step: returns the number of steps taken so far.
        total_steps: of the run.

    Raises:
        UserError: it is no such quantizer.
        ConversionError: nothing would be fake-quantised in ``total_steps``.
    """
    if not isinstance(quantizer, QATQuantizer):
        known = ", ".join(kind.__name__ for kind in QATQuantizer.__subclasses__())
        raise UserError(f"quantizer: {type(quantizer).__name__} cannot be simulated in training: choose {known}.")
    return FakeQuantize(quantizer.base_config, after_n_steps=after_n_steps, step=step, total_steps=total_steps)


def check_quantizer(quantizer: Any, model: nn.Module, source: "ModelSource | None" = None) -> None:
    """See whether a quantizer fits a model, before weights and data are read.

    Args:
        quantizer: as the config names it.
        model: on the meta device; converted if there is no ``source``.
        source: the checkpoint that is to be quantised; None where quantisation is simulated in training.

    Raises:
        UserError: it does not fit, or is none, or the checkpoint is quantised already.
    """
    from torchtune.training.checkpointing._quantize import refuse_parts, refuse_quantized

    refuse_parts(model)
    if source is None:
        apply_conversions(model, [fake_quantization(quantizer, None, lambda: 0, 1)])
        return
    _require_quantizer(quantizer)
    refuse_quantized(source)
    if isinstance(quantizer, Quantizer):
        check_group_size(quantizable_layers(model), quantizer.group_size)


def _require_quantizer(quantizer: Any) -> None:
    if not isinstance(quantizer, Quantizer | GGUFQuantizer):
        names = [name for name in __all__ if name.endswith("Quantizer") and "QAT" not in name]
        known = ", ".join(name for name in names if name != "Quantizer")
        raise UserError(f"quantizer: {type(quantizer).__name__} is no quantizer: choose out of {known}.")


def quantize_checkpoint(
    source: "ModelSource",
    model: nn.Module,
    quantizer: Any,
    output_dir: str | Path,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
) -> None:
    """Write a checkpoint quantised, one tensor at a time, with its tokenizer and other small files.

    Args:
        source: the checkpoint, under Hugging Face's names.
        model: what it is, on the meta device; values are not read.
        quantizer: a :class:`Quantizer`, for compressed-tensors, or a :class:`GGUFQuantizer`.
        output_dir: a folder that is not there yet, written atomically.
        device: where weights are quantised.
        dtype: of what is not quantised, and of the weights before they are; that of the checkpoint by default.

    Raises:
        UserError: the folder is there, the quantizer is none, or the checkpoint cannot be quantised by it.

    Example:
        >>> source = torchtune.training.ModelSource(checkpoint)
        >>> quantizer = torchtune.training.quantization.Int8WeightOnlyQuantizer()
        >>> torchtune.training.quantize_checkpoint(source, model, quantizer, folder / "int8")
        >>> (folder / "int8" / "config.json").is_file()
        True
    """
    _require_quantizer(quantizer)
    folder = Path(output_dir)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"output_dir: {folder} is there already and is not overwritten: name a new folder.")
    if isinstance(quantizer, GGUFQuantizer):
        from torchtune.training.checkpointing._gguf_export import export_gguf

        export_gguf(source, model, quantizer.file_type, folder, dtype=dtype)
    else:
        from torchtune.training.checkpointing._quantize import write_compressed

        write_compressed(source, model, quantizer, folder, device=device, dtype=dtype)
    trained_for = _trained_for(source.checkpoint_dir)
    if trained_for and trained_for.layout != getattr(quantizer, "layout", None):
        get_logger().warning(
            f"{source.checkpoint_dir} was trained for {type(trained_for).__name__} with group_size "
            f"{trained_for.group_size}, and {folder} is quantised otherwise: expect other outputs than in training."
        )


def _trained_for(folder: Path) -> QATQuantizer | None:
    """The quantizer that a checkpoint of this library was trained with."""
    path = folder / "torchtune_config.yaml"
    node = (yaml.safe_load(path.read_text(encoding="utf-8")) or {}).get("quantizer") if path.is_file() else None
    if not isinstance(node, dict):
        return None
    options = {key: value for key, value in node.items() if key != "_component_"}
    kind = globals().get(str(node.get("_component_")).removeprefix(f"{__name__}."))
    return kind(**options) if isinstance(kind, type) and issubclass(kind, QATQuantizer) else None


_enable_linear_fake_quant, _disable_linear_fake_quant = set_fake_quant, partial(set_fake_quant, enabled=False)
enable_4w_fake_quant_module_swap = enable_8da4w_fake_quant_module_swap = _enable_linear_fake_quant
disable_4w_fake_quant_module_swap = disable_8da4w_fake_quant_module_swap = _disable_linear_fake_quant


def _has_fake_quant(mode: str) -> bool:
    return any(mode == kind.mode for base in QATQuantizer.__subclasses__() for kind in (base, *base.__subclasses__()))


def _get_enable_fake_quant(quantizer_mode: str) -> Callable[[nn.Module], None] | None:
    """What ``model.apply`` takes to switch the simulation on; ``None`` for a mode without one."""
    return _enable_linear_fake_quant if _has_fake_quant(quantizer_mode) else None


def _get_disable_fake_quant(quantizer_mode: str) -> Callable[[nn.Module], None] | None:
    """What ``model.apply`` takes to switch the simulation off; ``None`` for a mode without one."""
    return _disable_linear_fake_quant if _has_fake_quant(quantizer_mode) else None


def swap_lora_linear_with_qat(
    module: nn.Module, activation_qat_config: Any | None = None, weight_qat_config: Any | None = None
) -> None:
    """Give every LoRA layer of a module fake quantizers, in place.

    Args:
        module: has LoRA layers below it.
        activation_qat_config: torchao's ``FakeQuantizeConfigBase`` of inputs, or None.
        weight_qat_config: of weights with the adapter merged in, or None.

    Raises:
        ConversionError: an adapter with dropout.
    """
    for name, child in module.named_children():
        if type(child) is LoRALinear:
            setattr(module, name, QATLoRALinear.from_lora_linear(child, activation_qat_config, weight_qat_config))
        else:
            swap_lora_linear_with_qat(child, activation_qat_config, weight_qat_config)


def is_fp8_tensorwise_scaling(fp8_recipe_name: str | None) -> bool:
    """Whether float8 training scales whole tensors: the default, or ``"tensorwise"``."""
    return fp8_recipe_name in (None, "tensorwise")


def convert_to_float8_training(model: nn.Module, fp8_recipe_name: str | None = None) -> nn.Module:
    """Let the linear layers of the layers compute in float8, in place.

    Args:
        model: a decoder, without adapters; it may be on the meta device.
        fp8_recipe_name: see :class:`~torchtune.modules.low_precision.Float8Training`; None is ``"tensorwise"``.

    Returns:
        ``model``.

    Raises:
        ConversionError: an unknown recipe, or a conversion of the model that excludes it.
    """
    apply_conversions(model, [Float8Training(fp8_recipe_name or "tensorwise")])
    return model

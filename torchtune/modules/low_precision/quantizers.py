"""Quantizers of a model's weights, which the key ``quantizer`` of a config names.

A quantizer is a component: a config names its class and its group size. It stands for a configuration of torchao, which
quantizes the weights of linear layers with one scale per group of consecutive elements along the input dimension.
Embeddings, norms and the output projection keep their precision (:func:`quantizable_layers`).

A recipe of training takes a ``*QATQuantizer``:

1. ``config.instantiate`` makes the object.
2. :func:`fake_quantization` makes a conversion of it, :class:`FakeQuantize`, and the recipe applies it to the model on
   the meta device, after adapters.
3. The conversion replaces the linear layers of the transformer layers by fake-quantized ones
   (:mod:`torchtune.modules.low_precision.layers`), whose forward pass rounds weight and input as torchao would. Before
   step ``fake_quant_after_n_steps``, a hook of the model switches the rounding off.
4. Checkpoints hold the weights that are not rounded. After the last one, the checkpointer's ``save_quantized`` writes
   them once more as :meth:`Quantizer.quantized` rounds them.

The recipe ``quantize`` takes any :class:`Quantizer` or a :class:`GGUFQuantizer`, and
:func:`torchtune.checkpoints.quantize_checkpoint` writes each weight of a finished checkpoint quantized. Quantizers of
the same bits, groups and inputs produce the same values, whether the model was trained for them or not.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from torch import Tensor, nn

from torchtune.modules.conversion import (
    Conversion,
    ConversionError,
    ConversionReport,
    Phase,
    apply_conversions,
    change_class,
)
from torchtune.modules.low_precision import torchao_interface
from torchtune.modules.low_precision.layers import (
    FakeQuantized,
    FakeQuantLinear,
    FakeQuantSwitch,
    fake_quant_layers,
)
from torchtune.modules.moe.experts import GroupedExperts
from torchtune.modules.peft.lora import DoRALinear, LoRALinear, QATLoRALinear, check_no_dropout
from torchtune.utils import UserError

if TYPE_CHECKING:  # DTensor is slow to import
    from torch.distributed.tensor.parallel import ParallelStyle

FileType = Literal["F32", "F16", "BF16", "Q8_0", "Q5_1", "Q5_0", "Q4_1", "Q4_0"]


class Quantizer:
    """Base class of quantizers of a model's linear layers.

    Args:
        group_size: number of consecutive elements along the input dimension that share a scale; None: one scale per
            row.

    Attributes:
        mode: short name, for example ``"8da4w"``.
        bits: bits per weight.
        weight_type: ``"int"`` or ``"float"``.
        activations: dtype of quantized inputs: ``"int8"``, ``"float8"`` or None.
        group_size: see Args.

    Example:
        >>> from torchtune.training.quantization import Int8WeightOnlyQuantizer, Quantizer
        >>> isinstance(Int8WeightOnlyQuantizer(), Quantizer)
        True
    """

    mode: ClassVar[str]
    bits: ClassVar[int]
    weight_type: ClassVar[Literal["int", "float"]] = "int"
    activations: ClassVar[str | None] = None

    def __init__(self, group_size: int | None) -> None:
        self.group_size = group_size

    @property
    def base_config(self) -> Any:
        """torchao's configuration for quantizing the model."""
        has_int8_inputs = self.activations == "int8"
        return torchao_interface.int_config(self.bits, self.group_size, dynamic_activations=has_int8_inputs)

    @property
    def layout(self) -> dict[str, Any]:
        """Fields that determine the quantized values: quantizers with equal layouts produce equal models."""
        return {
            "bits": self.bits,
            "weight_type": self.weight_type,
            "group_size": self.group_size,
            "activations": self.activations,
        }

    def quantized(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Quantize one weight: return values ``[out, in]`` and scales ``[out, groups]``, with weight = values * scales.

        Raises:
            ConversionError: torchao raises an error.
        """
        return torchao_interface.quantized(weight, self.base_config)

    def quantize(self, model: nn.Module) -> nn.Module:
        """Replace the weights of the linear layers by torchao's quantized weights, and return the model.

        Raises:
            ConversionError: the group size does not divide the width of a layer, or torchao raises an error.
        """
        layers = quantizable_layers(model)
        check_group_size(layers, self.group_size)
        torchao_interface.quantize_linears(model, self.base_config, set(layers))
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
            ConversionError: a layer cannot be quantized, or the model has another conversion that excludes this one.
        """
        apply_conversions(model, [FakeQuantize(self.base_config)])
        return model

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
            # torchao rounds this weight as the simulation did in each forward pass.
            linear.weight = nn.Parameter(layer.weight_to_quantize().detach(), requires_grad=False)
            linear.bias = layer.bias
            model.set_submodule(path, linear)
        model.conversions = []  # adapters are merged, and the quantization is real
        torchao_interface.quantize_linears(model, self.base_config, set(layers))
        return model

    def get_activation_fake_quantize_config(self) -> Any:
        """Return torchao's configuration of inputs, or None; recipes of earlier releases call it."""
        activations, _ = torchao_interface.fake_quantize_configs(self.base_config, self.group_size)
        return activations

    def get_weight_fake_quantize_config(self) -> Any:
        """Return torchao's configuration of weights, or None; recipes of earlier releases call it."""
        _, weights = torchao_interface.fake_quantize_configs(self.base_config, self.group_size)
        return weights


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
    weight_type = "float"

    def __init__(self, dynamic_activations: bool = True) -> None:
        super().__init__(None)
        self.activations = "float8" if dynamic_activations else None

    @property
    def base_config(self) -> Any:
        """torchao's configuration of the weights."""
        return torchao_interface.float8_config()


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


# Quantizers of a finished checkpoint that an error message offers.
EXPORT_QUANTIZERS = (
    Float8Quantizer,
    GGUFQuantizer,
    Int4WeightOnlyQuantizer,
    Int8DynActInt4WeightQuantizer,
    Int8WeightOnlyQuantizer,
)
# Quantizers that recipes of training take; the classes of the older names are not offered.
QAT_QUANTIZERS = (
    Int8DynActInt4WeightQATQuantizer,
    Int4WeightOnlyQATQuantizer,
    Int8WeightOnlyQATQuantizer,
)


def get_quantizer_mode(quantizer: Any | None) -> str | None:
    """Return the short name of a quantizer, for example ``"8da4w"``; None for any other object.

    Example:
        >>> torchtune.training.get_quantizer_mode(torchtune.training.quantization.Int8WeightOnlyQuantizer())
        '8w'
    """
    if isinstance(quantizer, Quantizer | GGUFQuantizer):
        return quantizer.mode
    return None


def fake_quantization(
    quantizer: Any, after_n_steps: int | None, step: Callable[[], int], total_steps: int
) -> "FakeQuantize":
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
        choices = ", ".join(quantizer_class.__name__ for quantizer_class in QAT_QUANTIZERS)
        raise UserError(f"quantizer: {type(quantizer).__name__} cannot be simulated in training: choose {choices}.")
    return FakeQuantize(quantizer.base_config, after_n_steps=after_n_steps, step=step, total_steps=total_steps)


class FakeQuantize(Conversion):
    """Conversion that fake-quantizes the linear layers of a model as torchao would quantize them.

    Training updates and saves high-precision weights. Each forward pass rounds them, and the inputs if the
    configuration quantizes these, to the values of the quantized model.

    Args:
        base_config: configuration of torchao for the quantized model, for example ``IntxWeightOnlyConfig()``.
        after_n_steps: number of steps before fake quantization starts.
        step: returns the number of steps taken so far; required with ``after_n_steps``.
        total_steps: number of steps of the run.

    Raises:
        ConversionError: fake quantization would start after ``total_steps``, or ``step`` is missing.
    """

    phase: ClassVar[Phase] = Phase.FAKE_QUANT

    def __init__(
        self,
        base_config: Any,
        *,
        after_n_steps: int | None = None,
        step: Callable[[], int] | None = None,
        total_steps: int | None = None,
    ) -> None:
        if after_n_steps and step is None:
            raise ConversionError(
                "fake_quant_after_n_steps: pass step, a function that returns the steps taken so far."
            )
        if after_n_steps and total_steps is not None and after_n_steps >= total_steps:
            raise ConversionError(
                f"fake_quant_after_n_steps is {after_n_steps}, but the run ends after {total_steps} steps, so nothing "
                "would be fake-quantized: make it smaller, or train without quantizer."
            )
        self._base_config = base_config
        self._after_n_steps = after_n_steps or 0
        self._step = step
        self._switch = FakeQuantSwitch()

    def convert(self, model: nn.Module) -> ConversionReport:
        """Replace linear layers by :class:`FakeQuantLinear`, and LoRA layers by :class:`QATLoRALinear`.

        Raises:
            ConversionError: a layer cannot be quantized; the model is then unchanged.
        """
        layers = quantizable_layers(model)
        check_group_size(layers, torchao_interface.group_size(self._base_config))
        # All layers are made before the first one is replaced, so that an error leaves the model unchanged.
        fake_quantized = {path: self._fake_quantize(path, layer) for path, layer in layers.items()}
        for path, layer in fake_quantized.items():
            model.set_submodule(path, layer)
        start = "from the first step on"
        if self._after_n_steps:
            # A method, because a copy of the model then switches the copies of its layers.
            model.register_forward_pre_hook(self._set_switch)
            start = f"from step {self._after_n_steps + 1} on"
        note = f"{type(self._base_config).__name__}, {start}"
        return ConversionReport("Fake quantization", list(fake_quantized), note=note)

    def _fake_quantize(self, path: str, layer: nn.Module) -> FakeQuantized:
        """Make a fake-quantized layer with the parameters of ``layer``."""
        if isinstance(layer, DoRALinear):  # before LoRALinear, of which it is a subclass
            raise ConversionError(
                f"quantizer: '{path}' has a DoRA adapter, which has no fake quantization: set use_dora to False."
            )
        if isinstance(layer, LoRALinear):
            # The sum of base and adapter is rounded, so that the adapter has no input of its own to drop.
            check_no_dropout(layer.dropout.p)
            fake_quantized = change_class(layer, QATLoRALinear)
        elif type(layer).forward is nn.Linear.forward:
            fake_quantized = change_class(layer, FakeQuantLinear)
        else:
            raise ConversionError(
                f"quantizer: '{path}' is a {type(layer).__name__}, which computes more than a linear layer and has no "
                "fake quantization."
            )
        fake_quantized.set_up_fake_quant(self._base_config, self._switch)  # one switch for all layers
        return fake_quantized

    def _set_switch(self, *_: object) -> None:
        """Turn the simulation on or off, before each forward pass of the model."""
        self._switch.on = self._step() >= self._after_n_steps

    def parallel_style(self, module: nn.Module, style: "ParallelStyle") -> "ParallelStyle":
        """Raise for fake-quantized layers: a sharded input has no quantization range per token.

        Raises:
            ConversionError: the layer is fake-quantized.
        """
        if isinstance(module, FakeQuantized):
            raise ConversionError(
                "quantizer: fake quantization needs whole layers: set tensor_parallel_dim to 1, parameters are sharded "
                "over data_parallel_shard_dim all the same."
            )
        return style


def quantizable_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Return the linear layers to quantize, by path: all of the transformer layers, but not the output projection.

    The output projection stays in high precision, as in vLLM's published checkpoints: it is often tied to the
    embedding, and its errors affect the logits directly.

    Raises:
        ConversionError: the model has experts, or no linear layer.
    """
    layers: dict[str, nn.Module] = {}
    for path, module in model.named_modules():
        if isinstance(module, GroupedExperts):
            raise ConversionError(
                f"quantizer: the experts of '{path}' cannot be quantized yet: choose a model without experts."
            )
        is_in_layers = ".layers." in f".{path}"
        is_part_of_adapter = path.endswith((".lora_a", ".lora_b"))
        if is_in_layers and isinstance(module, nn.Linear | LoRALinear) and not is_part_of_adapter:
            layers[path] = module
    if not layers:
        raise ConversionError(f"quantizer: {type(model).__name__} has no linear layer in a list called 'layers'.")
    return layers


def check_group_size(layers: dict[str, nn.Module], group_size: int | None) -> None:
    """Check that the group size divides the input width of every layer.

    Args:
        layers: linear layers by path.
        group_size: number of consecutive elements that share a scale; None: one scale per row, which always fits.

    Raises:
        ConversionError: the group size does not divide the width of a layer.
    """
    if group_size is None:
        return
    for path, layer in layers.items():
        width = layer.weight.shape[1]
        if group_size < 2 or width % group_size:
            raise ConversionError(
                f"quantizer: groupsize {group_size} does not divide the {width} inputs of '{path}': choose one that "
                "divides them all."
            )

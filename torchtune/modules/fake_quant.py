"""Quantization-aware training (QAT): linear layers with fake-quantized weights and inputs."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

from torch import nn

from torchtune.modules import torchao_formats
from torchtune.modules._fake_quantized import FakeQuantized, FakeQuantSwitch
from torchtune.modules.conversion import Conversion, ConversionError, ConversionReport, Phase, change_class
from torchtune.modules.moe.experts import GroupedExperts
from torchtune.modules.peft.dora import DoRALinear
from torchtune.modules.peft.lora import LoRALinear
from torchtune.modules.peft.qat_lora import QATLoRALinear, check_dropout

if TYPE_CHECKING:  # DTensor is slow to import
    from torch.distributed.tensor.parallel import ParallelStyle


class FakeQuantLinear(FakeQuantized, nn.Linear):
    """Linear layer with fake-quantized weight and input; the gradient is a straight-through estimate.

    The gradient of a clipped value is zero. Parameters have the names of ``nn.Linear``.
    """


def quantizable_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Return the linear layers to quantize, by path: all of the transformer layers, but not the output projection.

    The output projection stays in high precision, as in vLLM's published checkpoints: it is often tied to the
    embedding, and its errors affect the logits directly.

    Raises:
        ConversionError: the model has experts, or no linear layer.
    """
    found: dict[str, nn.Module] = {}
    for path, module in model.named_modules():
        if isinstance(module, GroupedExperts):
            raise ConversionError(
                f"quantizer: the experts of '{path}' cannot be quantized yet: choose a model without experts."
            )
        if ".layers." in f".{path}" and isinstance(module, nn.Linear | LoRALinear) and not _is_inside_adapter(path):
            found[path] = module
    if not found:
        raise ConversionError(f"quantizer: {type(model).__name__} has no linear layer in a list called 'layers'.")
    return found


def _is_inside_adapter(path: str) -> bool:
    return path.rpartition(".")[2] in ("lora_a", "lora_b")


def check_group_size(layers: dict[str, nn.Module], size: int | None) -> None:
    """Check that the group size divides the input width of every layer.

    Raises:
        ConversionError: the group size does not divide the width of a layer.
    """
    for path, layer in layers.items():
        width = layer.weight.shape[1]
        if size is not None and (size < 2 or width % size):
            raise ConversionError(
                f"quantizer: groupsize {size} does not divide the {width} inputs of '{path}': choose one that divides "
                "them all."
            )


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
        self._base_config, self._after, self._step = base_config, after_n_steps or 0, step
        self._switch = FakeQuantSwitch()

    def convert(self, model: nn.Module) -> ConversionReport:
        """Replace linear layers by :class:`FakeQuantLinear`, and LoRA layers by :class:`QATLoRALinear`.

        Raises:
            ConversionError: a layer cannot be quantized; the model is then unchanged.
        """
        layers = quantizable_layers(model)
        check_group_size(layers, torchao_formats.group_size(self._base_config))
        new = {path: self._convert_layer(path, layer) for path, layer in layers.items()}
        for path, layer in new.items():
            model.set_submodule(path, layer)
        if self._after:
            model.register_forward_pre_hook(self._set_switch)
        when = f"from step {self._after + 1} on" if self._after else "from the first step on"
        return ConversionReport("Fake quantization", list(new), note=f"{type(self._base_config).__name__}, {when}")

    def _convert_layer(self, path: str, layer: nn.Module) -> nn.Module:
        if isinstance(layer, DoRALinear):
            raise ConversionError(
                f"quantizer: '{path}' has a DoRA adapter, which has no fake quantization: set use_dora to False."
            )
        if isinstance(layer, LoRALinear):
            check_dropout(layer.dropout.p)
            new = change_class(layer, QATLoRALinear)
        elif type(layer).forward is nn.Linear.forward:
            new = change_class(layer, FakeQuantLinear)
        else:
            raise ConversionError(
                f"quantizer: '{path}' is a {type(layer).__name__}, which computes more than a linear layer and has no "
                "fake quantization."
            )
        new.set_up_fake_quant(self._base_config, self._switch)
        return new

    def _set_switch(self, *_: object) -> None:
        self._switch.on = self._step() >= self._after

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


def fake_quant_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Return the fake-quantized layers of a model, by path."""
    return {path: module for path, module in model.named_modules() if isinstance(module, FakeQuantized)}


def set_fake_quant(module: nn.Module, enabled: bool = True) -> None:
    """Enable or disable fake quantization of a layer and of all layers with the same switch."""
    if isinstance(module, FakeQuantized):
        module.fake_quant.on = enabled

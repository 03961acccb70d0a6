"""Layers with frozen weights in 4 or 8 bits, and layers that round their trained weights as a quantizer would.

A :class:`StoredLinear` decodes its weight for every matrix product, and again in the backward pass, so that no full
weight is kept. The quantized layers and experts store the formats of :mod:`torchtune.modules.low_precision.formats`.

Weights of a :class:`FakeQuantized` layer keep their precision. Each forward pass rounds them, and the input if the
quantizer rounds inputs, and the gradient passes through the rounding. torchao does the rounding (its fake quantizers).
Which layers of a model simulate which quantizer is decided by
:class:`torchtune.modules.low_precision.quantizers.FakeQuantize`.
"""

from abc import abstractmethod
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from torchtune.modules.conversion import ConversionError, change_class
from torchtune.modules.kernels.onednn import linear, mm
from torchtune.modules.low_precision.formats import NF4, Float8, Int8, Stored, WeightFormat
from torchtune.modules.low_precision.torchao_interface import fake_quantizers
from torchtune.modules.moe.experts import GroupedExperts


class StoredLinear(nn.Linear):
    """Base class of linear layers that store the weight in another format.

    A conversion replaces ``nn.Linear`` by a subclass (see
    :meth:`torchtune.modules.conversion.Conversion.stored_weights`). With an adapter, the layer remains an instance of
    this class and keeps its parameters.

    Example:
        >>> class Halved(torchtune.modules.StoredLinear):
        ...     def full_weight(self):
        ...         return self.weight / 2
        ...
        >>> layer = Halved(2, 3)
        >>> torch.equal(layer.full_weight(), layer.weight / 2)
        True
    """

    # Parameter -> (output dimension, input dimension), which tensor parallelism shards; None: no such dimension.
    # Other parameters are replicated.
    parallel_dims: ClassVar[Mapping[str, tuple[int | None, int | None]]]

    @abstractmethod
    def full_weight(self) -> Tensor:
        """Return the weight ``[out, in]`` in the compute dtype."""

    def stored_weight(self) -> Tensor | Stored:
        """Return the weight for matrix products; with a :class:`Stored`, autograd saves no full weight."""
        return self.full_weight()

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer: ``[..., in]`` to ``[..., out]``."""
        return frozen_linear(x, self.stored_weight(), self.bias)


class _FrozenLinear(torch.autograd.Function):
    """x Wᵀ + bias with a frozen W that is decoded in the forward pass and again in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, bias: Tensor | None, decode: Callable[..., Tensor], *stored_tensors: Tensor
    ) -> Tensor:
        ctx.save_for_backward(*stored_tensors)
        ctx.decode = decode
        return linear(x, decode(*stored_tensors), bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        needs_grad_x, needs_grad_bias, *_ = ctx.needs_input_grad
        stored_tensors = ctx.saved_tensors  # read once: activation checkpointing frees them
        grad_x = None
        if needs_grad_x:
            weight = ctx.decode(*stored_tensors)
            grad_rows = grad.reshape(-1, grad.shape[-1])  # [..., out] -> [n, out]
            grad_x = mm(grad_rows, weight).view(*grad.shape[:-1], -1)  # [..., in]
        grad_bias = None
        if needs_grad_bias:
            grad_bias = grad.flatten(0, -2).sum(0)
        return grad_x, grad_bias, None, *[None] * len(stored_tensors)


def frozen_linear(x: Tensor, weight: Tensor | Stored, bias: Tensor | None = None) -> Tensor:
    """Compute ``F.linear``, also of a :class:`Stored` weight, which is decoded again in the backward pass.

    Args:
        x: ``[..., in]``.
        weight: ``[out, in]``.
        bias: ``[out]`` or ``None``.
    """
    if isinstance(weight, Stored):
        return _FrozenLinear.apply(x, bias, weight.decode, *weight.tensors)
    return F.linear(x, weight, bias)


class QuantizedModule(nn.Module):
    """Base class of modules with frozen parameters in a storage format.

    The tensors that store a parameter are parameters with its name and a suffix of the format.

    Attributes:
        format: storage format of the parameters.
        plain_class: class of the module that is not quantized.
    """

    format: WeightFormat
    plain_class: ClassVar[type[nn.Module]]

    @abstractmethod
    def quantized_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the names and full shapes of the quantized parameters."""

    def get_stored(self, name: str) -> Stored:
        """Return the parameter called ``name`` in the storage format."""
        tensors = tuple(getattr(self, tensor_name) for tensor_name in self.format.tensor_names(name))
        return Stored(self.format.decode, tensors, self.format.dtype)

    def quantize_parameters(self, weight_format: WeightFormat) -> None:
        """Freeze the module and replace parameters by their quantized tensors; on the meta device they are empty."""
        self.format = weight_format
        for name in self.quantized_shapes():
            weight = getattr(self, name)
            if weight.is_meta:
                tensors = weight_format.empty(weight)
            else:
                tensors = weight_format.encode(weight.detach())
            for tensor_name, tensor in zip(weight_format.tensor_names(name), tensors, strict=True):
                setattr(self, tensor_name, nn.Parameter(tensor, requires_grad=False))
        self.requires_grad_(False)

    def without_quantization(self) -> nn.Module:
        """Make a frozen module that is not quantized; parameters that were quantized are on the meta device."""
        plain = change_class(self, self.plain_class)
        for name, shape in self.quantized_shapes().items():
            for tensor_name in self.format.tensor_names(name):
                delattr(plain, tensor_name)
            weight = torch.empty(shape, dtype=self.format.dtype, device="meta")
            setattr(plain, name, nn.Parameter(weight, requires_grad=False))
        del plain.format
        return plain


class QuantizedLinear(QuantizedModule, StoredLinear):
    """Base class of linear layers with a frozen, quantized weight; ``bias`` is not quantized.

    Args:
        in_dim: width of the input.
        out_dim: width of the output.
        bias: whether there is a bias.
        device: device of the parameters.
        dtype: compute dtype.
        **quantization_kwargs: options of the format: for NF4 ``block_size``, the number of columns that share a scale,
            64 by default.

    Raises:
        ConversionError: the block size does not divide ``in_dim``, or an option is unknown.
    """

    format_class: ClassVar[type[WeightFormat]]
    plain_class = nn.Linear

    def __init__(
        self,
        in_dim: int,
        out_dim: int,
        bias: bool = False,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
        **quantization_kwargs: Any,
    ) -> None:
        super().__init__(in_dim, out_dim, bias=bias, device=device, dtype=dtype)
        self._quantize(**quantization_kwargs)

    @classmethod
    def from_linear(cls, linear: nn.Linear, **options: Any) -> "QuantizedLinear":
        """Make a frozen layer with the bias and the quantized weight of ``linear``.

        Args:
            linear: layer on any device, which is not changed; on the meta device, nothing is quantized.
            options: options of the format.
        """
        quantized = change_class(linear, cls)
        quantized._quantize(**options)
        return quantized

    def _quantize(self, **options: Any) -> None:
        weight_format = self.format_class(self.weight.dtype, **options)
        reason = weight_format.explain_unsupported(self.in_features)
        if reason:
            raise ConversionError(f"{type(self).__name__}: {reason}, the width of the input.")
        self.quantize_parameters(weight_format)

    def quantized_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the name and the full shape of the weight."""
        return {"weight": (self.out_features, self.in_features)}

    def full_weight(self) -> Tensor:
        """Return the dequantized weight ``[out, in]``."""
        return self.stored_weight().full()

    def stored_weight(self) -> Stored:
        """Return the weight in its storage format."""
        return self.get_stored("weight")

    def extra_repr(self) -> str:
        """Return sizes and format for ``repr``."""
        return f"{super().extra_repr()}, weight={type(self.format).__name__}"


class FrozenNF4Linear(QuantizedLinear):
    """Linear layer with a frozen NF4 weight (4 bits, double quantization).

    Example:
        >>> torchtune.modules.low_precision.FrozenNF4Linear(128, 64).full_weight().shape
        torch.Size([64, 128])
    """

    format_class = NF4
    parallel_dims: ClassVar[dict[str, tuple[int | None, int | None]]] = {
        "weight": (0, 1),
        "weight_scale": (0, 1),
        "weight_range": (0, None),
        "bias": (0, None),
    }

    def _quantize(self, **options: Any) -> None:
        unknown = sorted(set(options) - {"block_size", "scaler_block_size"})
        if unknown:
            raise ConversionError(f"{', '.join(unknown)}: no option of an NF4 weight, remove it (there is block_size).")
        options.pop("scaler_block_size", None)  # older configs set it; here, the scales of a row are quantized together
        super()._quantize(**options)


class FrozenInt8Linear(QuantizedLinear):
    """Linear layer with a frozen int8 weight and a scale per row.

    Example:
        >>> from torchtune.modules.low_precision import QuantizeBase
        >>> from torchtune.modules.peft import LoRA
        >>> converters = [QuantizeBase("int8"), LoRA(rank=2, target_modules=["q_proj"])]
        >>> model, _ = torchtune.load(checkpoint, adapter=converters, device="cpu")
    """

    format_class = Int8
    parallel_dims: ClassVar[dict[str, tuple[int | None, int | None]]] = {
        "weight": (0, 1),
        "weight_scale": (0, None),
        "bias": (0, None),
    }


class FrozenFloat8Linear(FrozenInt8Linear):
    """Linear layer with a frozen float8 (e4m3) weight and a scale per row.

    Example:
        >>> torchtune.modules.low_precision.FrozenFloat8Linear(16, 8).full_weight().shape
        torch.Size([8, 16])
    """

    format_class = Float8


class QuantizedExperts(QuantizedModule, GroupedExperts):
    """Base class of experts with frozen matrices ``[e, i, o]``; each row ``[o]`` is quantized separately."""

    @classmethod
    def from_experts(cls, experts: GroupedExperts, weight_format: WeightFormat) -> "QuantizedExperts":
        """Make frozen experts with the quantized matrices of ``experts``; on the meta device, they are empty."""
        quantized_class = _quantized_class(type(experts))
        quantized = change_class(experts, quantized_class)
        quantized.quantize_parameters(weight_format)
        return quantized

    def quantized_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the names and full shapes of the stacked matrices."""
        return self.matrix_shapes()

    def stored_weight(self, name: str) -> Stored:
        """Return the stacked matrices called ``name`` in their storage format."""
        return self.get_stored(name)


@cache
def _quantized_class(experts_class: type[GroupedExperts]) -> type[QuantizedExperts]:
    """Make the class of quantized experts that compute as ``experts_class`` does."""
    name = f"Quantized{experts_class.__name__}"
    return type(name, (QuantizedExperts, experts_class), {"plain_class": experts_class})


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

"""Layers with frozen weights in 4 or 8 bits."""

from functools import cache
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from torchtune.modules.conversion import ConversionError, change_class
from torchtune.modules.low_precision._formats import NF4, Float8, Int8, WeightFormat
from torchtune.modules.moe.experts import GroupedExperts
from torchtune.modules.stored_linear import Stored, StoredLinear


class QuantizedLinear(StoredLinear):
    """Base class of linear layers with a frozen, quantized weight.

    The parameter ``weight`` and the parameters with this name and a suffix are the tensors of the storage format;
    ``bias`` is not quantized.

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

    format: WeightFormat
    kind: ClassVar[type[WeightFormat]]

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
        new = change_class(linear, cls)
        new._quantize(**options)
        return new

    def _quantize(self, **options: Any) -> None:
        self.format = self.kind(self.weight.dtype, **options)
        if reason := self.format.explain_unsupported(self.in_features):
            raise ConversionError(f"{type(self).__name__}: {reason}, the width of the input.")
        quantize_parameter(self, "weight", self.format)
        self.requires_grad_(False)

    def to_linear(self) -> nn.Linear:
        """Make a frozen ``nn.Linear`` on the meta device, with the same bias."""
        linear = change_class(self, nn.Linear)
        restore_parameter(linear, "weight", self.format, (self.out_features, self.in_features))
        del linear.format
        return linear

    def full_weight(self) -> Tensor:
        """Return the dequantized weight ``[out, in]``."""
        return self.stored_weight().full()

    def stored_weight(self) -> Stored:
        """Return the weight in its storage format."""
        return get_stored(self, "weight")

    def extra_repr(self) -> str:
        """Return sizes and format for ``repr``."""
        return f"{super().extra_repr()}, weight={type(self.format).__name__}"


class FrozenNF4Linear(QuantizedLinear):
    """Linear layer with a frozen NF4 weight (4 bits, double quantization).

    Example:
        >>> torchtune.modules.low_precision.FrozenNF4Linear(128, 64).full_weight().shape
        torch.Size([64, 128])
    """

    kind = NF4
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

    kind = Int8
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

    kind = Float8


class QuantizedExperts(GroupedExperts):
    """Base class of experts with frozen matrices ``[e, i, o]``; each row ``[o]`` is quantized separately."""

    format: WeightFormat
    plain_kind: type[GroupedExperts]

    @classmethod
    def from_experts(cls, experts: GroupedExperts, form: WeightFormat) -> "QuantizedExperts":
        """Make frozen experts with the quantized matrices of ``experts``; on the meta device, they are empty."""
        new = change_class(experts, _quantized_kind(type(experts)))
        new.format = form
        for name in matrix_names(experts):
            quantize_parameter(new, name, form)
        return new.requires_grad_(False)

    def to_experts(self) -> GroupedExperts:
        """Make frozen experts that are not quantized, on the meta device."""
        plain = change_class(self, self.plain_kind)
        for name, shape in self.matrix_shapes().items():
            restore_parameter(plain, name, self.format, shape)
        del plain.format
        return plain

    def stored_weight(self, name: str) -> Stored:
        """Return the stacked matrices called ``name`` in their storage format."""
        return get_stored(self, name)


@cache
def _quantized_kind(plain: type[GroupedExperts]) -> type[QuantizedExperts]:
    return type(f"Quantized{plain.__name__}", (QuantizedExperts, plain), {"plain_kind": plain})


def matrix_names(experts: GroupedExperts) -> list[str]:
    """Return the names of the stacked matrices ``[e, i, o]`` of experts."""
    return list(experts.matrix_shapes())


def get_stored(module: nn.Module, name: str) -> Stored:
    """Return the weight called ``name`` in the storage format of ``module``."""
    form: WeightFormat = module.format
    return Stored(form.decode, tuple(getattr(module, name + suffix) for suffix in form.suffixes), form.dtype)


def quantize_parameter(module: nn.Module, name: str, form: WeightFormat) -> None:
    """Replace the parameter called ``name`` by its quantized tensors; on the meta device they are empty."""
    weight = getattr(module, name)
    tensors = form.empty(weight) if weight.is_meta else form.encode(weight.detach())
    for suffix, tensor in zip(form.suffixes, tensors, strict=True):
        setattr(module, name + suffix, nn.Parameter(tensor, requires_grad=False))


def restore_parameter(module: nn.Module, name: str, form: WeightFormat, shape: tuple[int, ...]) -> None:
    """Replace the quantized tensors of a parameter by an empty parameter on the meta device."""
    for suffix in form.suffixes:
        delattr(module, name + suffix)
    weight = torch.empty(shape, dtype=form.dtype, device="meta")
    setattr(module, name, nn.Parameter(weight, requires_grad=False))

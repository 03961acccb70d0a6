"""Layers whose frozen weights are stored in four or eight bits."""

from functools import cache
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from torchtune.modules._recast import recast
from torchtune.modules.conversion import ConversionError
from torchtune.modules.low_precision._formats import NF4, Float8, Int8, WeightFormat
from torchtune.modules.moe.experts import GroupedExperts
from torchtune.modules.stored_linear import Stored, StoredLinear


class QuantizedLinear(StoredLinear):
    """Base class of linear layers whose frozen weight is quantised.

    ``weight`` and the parameters beside it are those of the format; ``bias`` stays as it is.

    Args:
        in_dim: width of the input.
        out_dim: width of the output.
        bias: whether there is a bias.
        device: of the parameters.
        dtype: in which the layer computes.
        **quantization_kwargs: of the format; NF4 has ``block_size``, columns that share a scale, 64 by default.

    Raises:
        ConversionError: a block size that does not divide ``in_dim``, or an option that does not exist.
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
        """A layer with the weight of ``linear``, quantised if it has values, and the same bias; both frozen.

        Args:
            linear: on any device; kept as it is.
            options: of the format.
        """
        new = recast(linear, cls)
        new._quantize(**options)
        return new

    def _quantize(self, **options: Any) -> None:
        self.format = self.kind(self.weight.dtype, **options)
        if reason := self.format.refusal(self.in_features):
            raise ConversionError(f"{type(self).__name__}: {reason}, the width of the input.")
        store(self, "weight", self.format)
        self.requires_grad_(False)

    def to_linear(self) -> nn.Linear:
        """A plain layer on the meta device, frozen, with the same bias."""
        linear = recast(self, nn.Linear)
        restore(linear, "weight", self.format, (self.out_features, self.in_features))
        del linear.format
        return linear

    def full_weight(self) -> Tensor:
        """The dequantised weight ``[out, in]``."""
        return self.stored_weight().full()

    def stored_weight(self) -> Stored:
        """The weight as it is stored."""
        return stored(self, "weight")

    def extra_repr(self) -> str:
        """Sizes and format."""
        return f"{super().extra_repr()}, weight={type(self.format).__name__}"


class FrozenNF4Linear(QuantizedLinear):
    """Linear layer with a frozen weight of four bits an element (NF4, double quantisation).

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
        options.pop("scaler_block_size", None)  # of older configs; here the scales of a row are quantised together
        super()._quantize(**options)


class FrozenInt8Linear(QuantizedLinear):
    """Linear layer with a frozen weight of eight bits an element and a scale for every row.

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
    """Linear layer with a frozen weight in float8 (e4m3) and a scale for every row.

    Example:
        >>> torchtune.modules.low_precision.FrozenFloat8Linear(16, 8).full_weight().shape
        torch.Size([8, 16])
    """

    kind = Float8


class QuantizedExperts(GroupedExperts):
    """Base class of experts whose frozen matrices are quantised, each row ``[o]`` of ``[e, i, o]`` by itself."""

    format: WeightFormat
    plain_kind: type[GroupedExperts]

    @classmethod
    def from_experts(cls, experts: GroupedExperts, form: WeightFormat) -> "QuantizedExperts":
        """Experts with the matrices of ``experts``, quantised if they have values; biases are kept, all is frozen."""
        new = recast(experts, _quantized_kind(type(experts)))
        new.format = form
        for name in matrices(experts):
            store(new, name, form)
        return new.requires_grad_(False)

    def to_experts(self) -> GroupedExperts:
        """Plain experts on the meta device, frozen."""
        plain = recast(self, self.plain_kind)
        for name, shape in self.matrix_shapes().items():
            restore(plain, name, self.format, shape)
        del plain.format
        return plain

    def stored_weight(self, name: str) -> Stored:
        """The matrices called ``name``, as they are stored."""
        return stored(self, name)


@cache
def _quantized_kind(plain: type[GroupedExperts]) -> type[QuantizedExperts]:
    return type(f"Quantized{plain.__name__}", (QuantizedExperts, plain), {"plain_kind": plain})


def matrices(experts: GroupedExperts) -> list[str]:
    """Names of the stacked matrices ``[e, i, o]`` of experts."""
    return list(experts.matrix_shapes())


def stored(module: nn.Module, name: str) -> Stored:
    """The parameter that was called ``name``, as ``module`` stores it."""
    form: WeightFormat = module.format
    return Stored(form.decode, tuple(getattr(module, name + suffix) for suffix in form.suffixes), form.dtype)


def store(module: nn.Module, name: str, form: WeightFormat) -> None:
    """Put the parameters of a format in the place of the one called ``name``, with its values if it has any."""
    weight = getattr(module, name)
    tensors = form.empty(weight) if weight.is_meta else form.encode(weight.detach())
    for suffix, tensor in zip(form.suffixes, tensors, strict=True):
        setattr(module, name + suffix, nn.Parameter(tensor, requires_grad=False))


def restore(module: nn.Module, name: str, form: WeightFormat, shape: tuple[int, ...]) -> None:
    """Put an empty parameter of the meta device in the place of those that store it."""
    for suffix in form.suffixes:
        delattr(module, name + suffix)
    weight = torch.empty(shape, dtype=form.dtype, device="meta")
    setattr(module, name, nn.Parameter(weight, requires_grad=False))

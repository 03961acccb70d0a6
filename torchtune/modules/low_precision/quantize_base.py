"""Conversion that quantizes base weights."""

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor, nn

from torchtune.modules.conversion import (
    Conversion,
    ConversionError,
    ConversionReport,
    Phase,
    StoredWeight,
    nearest_module_names,
)
from torchtune.modules.low_precision.formats import WeightFormat
from torchtune.modules.low_precision.layers import (
    FrozenFloat8Linear,
    FrozenInt8Linear,
    FrozenNF4Linear,
    QuantizedExperts,
    QuantizedLinear,
)
from torchtune.modules.moe.experts import GroupedExperts
from torchtune.modules.moe.moe import TokenChoiceTopKRouter

BaseDtype = Literal["nf4", "int8", "float8"]
_LAYERS: dict[str, type[QuantizedLinear]] = {
    "nf4": FrozenNF4Linear,
    "int8": FrozenInt8Linear,
    "float8": FrozenFloat8Linear,
}
_DEFAULT = ("layers.*", "*.layers.*")


class QuantizeBase(Conversion):
    """Conversion that freezes a model and stores its linear layers and experts in 4 or 8 bits, for QLoRA.

    Weights are quantized one at a time while the checkpoint is loaded. Every matrix product dequantizes the weight to
    the model's dtype; the dequantized weight is not saved for the backward pass. Only adapters can be trained.

    By default, the linear layers and experts inside ``layers`` are quantized, except routers. Embeddings and the output
    projection, tied or not, keep their dtype. Layers with an input width that is not a multiple of ``block_size`` also
    keep their dtype; the conversion report lists them.

    Args:
        dtype: ``"nf4"`` (4.1 to 4.3 bits per element), ``"int8"`` or ``"float8"`` (8 bits per element).
        block_size: columns that share a scale in NF4, a multiple of 2; 64 by default. Must be None for other dtypes.
        target_modules: :mod:`fnmatch` patterns that match a module path or its end; by default modules inside
            ``layers``.

    Raises:
        ConversionError: an argument is invalid.

    Example:
        >>> from torchtune.modules.low_precision import QuantizeBase
        >>> from torchtune.modules.peft import LoRA
        >>> model, _ = torchtune.load(checkpoint, adapter=[QuantizeBase(), LoRA(rank=2)], device="cpu")  # QLoRA
        >>> type(model.layers[0].attn.q_proj).__name__
        'LoRALinear'
    """

    phase: ClassVar[Phase] = Phase.QUANTIZED_BASE

    def __init__(
        self, dtype: BaseDtype = "nf4", block_size: int | None = None, target_modules: Sequence[str] | None = None
    ) -> None:
        if dtype not in _LAYERS:
            raise ConversionError(f"QuantizeBase: dtype is '{dtype}', choose out of {', '.join(get_args(BaseDtype))}.")
        if block_size is not None and dtype != "nf4":
            raise ConversionError(f"QuantizeBase: {dtype} has a scale for every row, so remove block_size.")
        if target_modules is not None and not target_modules:
            raise ConversionError("QuantizeBase: target_modules is empty, name at least one module or remove the key.")
        self.dtype = dtype
        self.options: dict[str, Any] = {} if block_size is None else {"block_size": block_size}
        self.target_modules = None if target_modules is None else list(target_modules)
        self._formats: dict[str, WeightFormat] = {}
        self._format(torch.float32)  # raises for invalid options

    def _format(self, dtype: torch.dtype) -> WeightFormat:
        return _LAYERS[self.dtype].kind(dtype, **self.options)

    def convert(self, model: nn.Module) -> ConversionReport:
        """Replace the target layers and freeze the model.

        Raises:
            ConversionError: a target matches no layer or cannot be quantized; the model is then unchanged.
        """
        chosen, left = self._select_modules(model)
        before = _size_in_mib(model)
        for path, module in chosen.items():
            if isinstance(module, GroupedExperts):
                dtype = next(module.parameters()).dtype
                new = QuantizedExperts.from_experts(module, self._format(dtype))
            else:
                new = _LAYERS[self.dtype].from_linear(module, **self.options)
            model.set_submodule(path, new)
        model.requires_grad_(False)
        self._formats |= {name: module.format for name, module, _ in _quantized_weights(model)}
        note = f"{before:,.1f} MiB of weights become {_size_in_mib(model):,.1f} MiB"
        if left:
            note += f"; {len(left)} keep their dtype, because {next(iter(left.values()))}: " + ", ".join(
                nearest_module_names("", list(left), count=4)
            )
        return ConversionReport(name=f"Base in {self.dtype}", replaced=list(chosen), note=note)

    def _select_modules(self, model: nn.Module) -> tuple[dict[str, nn.Module], dict[str, str]]:
        """Return the modules to quantize by path, and the reason for each default target that is not quantized."""
        kinds = (nn.Linear, GroupedExperts)
        routers = {id(module.gate) for module in model.modules() if isinstance(module, TokenChoiceTopKRouter)}
        layers = {
            path: module
            for path, module in model.named_modules()
            if isinstance(module, kinds) and id(module) not in routers
        }
        chosen = {}
        for asked in self.target_modules or ["*"]:
            patterns = _DEFAULT if self.target_modules is None else (asked, f"*.{asked}")
            matching = [path for path in layers if any(fnmatchcase(path, pattern) for pattern in patterns)]
            if not matching:
                nearest = ", ".join(nearest_module_names(asked, list(layers))) or "none: it has no linear layer"
                what = "is in its layers" if self.target_modules is None else f"matches '{asked}'"
                raise ConversionError(
                    f"QuantizeBase: no linear layer of the model {what}, the nearest names are {nearest}."
                )
            chosen |= {path: layers[path] for path in matching}
        left = {path: reason for path, module in chosen.items() if (reason := self._explain_unsupported(module))}
        self._check(model, chosen, left)
        return {path: module for path, module in chosen.items() if path not in left}, left

    def _check(self, model: nn.Module, chosen: Mapping[str, nn.Module], left: Mapping[str, str]) -> None:
        embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
        for path, module in chosen.items():
            if isinstance(module, QuantizedLinear | QuantizedExperts):
                raise ConversionError(f"QuantizeBase: '{path}' is quantized already, a base weight is quantized once.")
            if isinstance(module, GroupedExperts):
                continue
            if id(module.weight) in embeddings:
                raise ConversionError(
                    f"QuantizeBase: '{path}' shares its weight with the token embedding and cannot be quantized, "
                    "leave it out of target_modules."
                )
            if type(module).forward is not nn.Linear.forward:
                raise ConversionError(
                    f"QuantizeBase: '{path}' is a {type(module).__name__}, which is more than a linear layer and "
                    "cannot be quantized: leave it out by target_modules."
                )
        if left and (self.target_modules is not None or len(left) == len(chosen)):
            path, reason = next(iter(left.items()))
            raise ConversionError(
                f"QuantizeBase: {reason}, the width of '{path}': choose a block_size that does, or "
                "leave the layer out by target_modules."
            )

    def _explain_unsupported(self, module: nn.Module) -> str:
        form = self._format(torch.float32)
        if isinstance(module, GroupedExperts):
            reasons = (form.explain_unsupported(shape[-1]) for shape in module.matrix_shapes().values())
            return next((reason for reason in reasons if reason), "")
        return form.explain_unsupported(module.in_features)

    def revert(self, model: nn.Module) -> None:
        """Replace quantized layers by layers that are not quantized, on the meta device.

        Raises:
            ConversionError: the weights are not on the meta device.
        """
        modules = [(path, module) for path, module in model.named_modules() if hasattr(module, "format")]
        for _, module in modules:
            if any(not parameter.is_meta for parameter in module.parameters()):
                raise ConversionError(
                    "QuantizeBase: the base is quantized already, so a conversion that comes before it cannot be "
                    "applied any more: apply it while the model is on the meta device."
                )
        for path, module in modules:
            plain = module.to_experts() if isinstance(module, QuantizedExperts) else module.to_linear()
            model.set_submodule(path, plain)

    def stored_weights(self, model: nn.Module) -> dict[str, StoredWeight]:
        """Return the quantized weights, which are stored ``by_rows``."""
        return {
            name: StoredWeight(shape, module.format.dtype, _tensor_names(name, module.format), by_rows=True)
            for name, module, shape in _quantized_weights(model)
        }

    def from_full(self, name: str, tensor: Tensor) -> dict[str, Tensor]:
        """Quantize a weight or some of its rows."""
        form = self._formats[name]
        if not tensor.isfinite().all():
            raise ConversionError(f"QuantizeBase: '{name}' has values that are not finite and cannot be quantized.")
        return dict(zip(_tensor_names(name, form), form.encode(tensor), strict=True))

    def to_full(self, name: str, tensors: Mapping[str, Tensor]) -> Tensor:
        """Dequantize a weight."""
        form = self._formats[name]
        return form.decode(*(tensors[part] for part in _tensor_names(name, form)))


def _size_in_mib(model: nn.Module) -> float:
    return sum(parameter.numel() * parameter.element_size() for parameter in model.parameters()) / 2**20


def _tensor_names(name: str, form: WeightFormat) -> tuple[str, ...]:
    return tuple(name + suffix for suffix in form.suffixes)


def _quantized_weights(model: nn.Module) -> list[tuple[str, nn.Module, tuple[int, ...]]]:
    """(name, module, shape) of every quantized weight."""
    found = []
    for path, module in model.named_modules():
        if isinstance(module, QuantizedExperts):
            found += [(f"{path}.{name}", module, shape) for name, shape in module.matrix_shapes().items()]
        elif isinstance(module, QuantizedLinear):
            found.append((f"{path}.weight", module, (module.out_features, module.in_features)))
    return found


def reparametrize_as_dtype_state_dict_post_hook(
    model: nn.Module,
    state_dict: dict[str, Any],
    prefix: str = "",
    *args: Any,
    dtype: torch.dtype = torch.bfloat16,
    offload_to_cpu: bool = True,
    **kwargs: Any,
) -> None:
    """State-dict hook that replaces quantized weights by dequantized ones.

    It is for ``model.state_dict()`` in user code; recipes do not need it for their checkpoints.

    Args:
        model: the model.
        state_dict: state dict of the model, changed in place.
        prefix: prefix of its keys.
        *args: further arguments of hooks, unused.
        dtype: dtype of the dequantized weights.
        offload_to_cpu: move every tensor to the CPU.
        **kwargs: unused.
    """
    for name, module, _ in _quantized_weights(model):
        tensors = [state_dict.pop(prefix + part) for part in _tensor_names(name, module.format)]
        state_dict[prefix + name] = module.format.decode(*tensors).to(dtype)
    if offload_to_cpu:
        state_dict.update((key, value.cpu()) for key, value in state_dict.items() if isinstance(value, torch.Tensor))

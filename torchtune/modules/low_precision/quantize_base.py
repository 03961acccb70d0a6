"""Quantized base weights for QLoRA: the conversion of a model, and a state-dict hook that dequantizes them."""

from collections.abc import Iterator, Mapping, Sequence
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
    QuantizedModule,
)
from torchtune.modules.moe.experts import GroupedExperts
from torchtune.modules.moe.moe import TokenChoiceTopKRouter

BaseDtype = Literal["nf4", "int8", "float8"]
_LAYER_CLASSES: dict[str, type[QuantizedLinear]] = {
    "nf4": FrozenNF4Linear,
    "int8": FrozenInt8Linear,
    "float8": FrozenFloat8Linear,
}
_DEFAULT_PATTERNS = ("layers.*", "*.layers.*")


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
        if dtype not in _LAYER_CLASSES:
            raise ConversionError(f"QuantizeBase: dtype is '{dtype}', choose out of {', '.join(get_args(BaseDtype))}.")
        if block_size is not None and dtype != "nf4":
            raise ConversionError(f"QuantizeBase: {dtype} has a scale for every row, so remove block_size.")
        if isinstance(target_modules, str):
            raise ConversionError(
                f"QuantizeBase: target_modules is the text '{target_modules}': give a list of patterns, for example "
                f"['{target_modules}']."
            )
        if target_modules is not None and not target_modules:
            raise ConversionError("QuantizeBase: target_modules is empty, name at least one module or remove the key.")
        self.dtype = dtype
        self.options: dict[str, Any] = {}  # of the format, which has the default of block_size
        if block_size is not None:
            self.options["block_size"] = block_size
        self.target_modules = None if target_modules is None else list(target_modules)
        self._formats: dict[str, WeightFormat] = {}  # by the name of the quantized weight
        self._make_format(torch.float32)  # raises for an invalid block size

    def _make_format(self, dtype: torch.dtype) -> WeightFormat:
        """Make the storage format of weights that decode to ``dtype``."""
        return _LAYER_CLASSES[self.dtype].format_class(dtype, **self.options)

    def convert(self, model: nn.Module) -> ConversionReport:
        """Replace the target layers and freeze the model.

        Raises:
            ConversionError: a target matches no layer or cannot be quantized; the model is then unchanged.
        """
        targets = self._find_targets(model)
        unsupported = self._explain_unsupported(targets)
        self._check(model, targets, unsupported)
        mib_before = _size_in_mib(model)
        linear_class = _LAYER_CLASSES[self.dtype]
        replaced = []
        for path, module in targets.items():
            if path in unsupported:
                continue
            if isinstance(module, GroupedExperts):
                dtype = next(module.parameters()).dtype
                quantized = QuantizedExperts.from_experts(module, self._make_format(dtype))
            else:
                quantized = linear_class.from_linear(module, **self.options)
            model.set_submodule(path, quantized)
            replaced.append(path)
        model.requires_grad_(False)
        for name, module, _ in _quantized_weights(model):
            self._formats[name] = module.format  # from_full and to_full get names alone
        mib_after = _size_in_mib(model)
        note = f"{mib_before:,.1f} MiB of weights become {mib_after:,.1f} MiB"
        if unsupported:
            first_reason = next(iter(unsupported.values()))
            names = ", ".join(nearest_module_names("", list(unsupported), count=4))  # the first, layer numbers as "*"
            note += f"; {len(unsupported)} keep their dtype, because {first_reason}: {names}"
        return ConversionReport(name=f"Base in {self.dtype}", replaced=replaced, note=note)

    def _find_targets(self, model: nn.Module) -> dict[str, nn.Module]:
        """Return the linear layers and experts that the patterns match, by path.

        Raises:
            ConversionError: a pattern matches none.
        """
        # A rounded gate of a router would select other experts.
        gates_of_routers = set()
        for module in model.modules():
            if isinstance(module, TokenChoiceTopKRouter):
                gates_of_routers.add(module.gate)
        layers = {}
        for path, module in model.named_modules():
            if isinstance(module, nn.Linear | GroupedExperts) and module not in gates_of_routers:
                layers[path] = module
        if self.target_modules is None:
            paths = _matching_paths(layers, _DEFAULT_PATTERNS)
            if not paths:
                raise _no_match("*", "is in its layers", layers)
            return {path: layers[path] for path in paths}
        targets = {}
        for target in self.target_modules:
            paths = _matching_paths(layers, (target, f"*.{target}"))  # a whole path, or its end
            if not paths:
                raise _no_match(target, f"matches '{target}'", layers)
            for path in paths:
                targets[path] = layers[path]
        return targets

    def _explain_unsupported(self, targets: Mapping[str, nn.Module]) -> dict[str, str]:
        """Return the reason for each target whose width the format does not support."""
        weight_format = self._make_format(torch.float32)
        reasons = {}
        for path, module in targets.items():
            if isinstance(module, GroupedExperts):
                widths = [shape[-1] for shape in module.matrix_shapes().values()]
            else:
                widths = [module.in_features]
            for width in widths:
                reason = weight_format.explain_unsupported(width)
                if reason:
                    reasons.setdefault(path, reason)
        return reasons

    def _check(self, model: nn.Module, targets: Mapping[str, nn.Module], unsupported: Mapping[str, str]) -> None:
        """Raise ``ConversionError`` for a target that cannot be quantized."""
        embedding_weights = set()
        for module in model.modules():
            if isinstance(module, nn.Embedding):
                embedding_weights.add(module.weight)
        for path, module in targets.items():
            if isinstance(module, QuantizedModule):
                raise ConversionError(f"QuantizeBase: '{path}' is quantized already, a base weight is quantized once.")
            if isinstance(module, GroupedExperts):  # the checks below are of linear layers
                continue
            if module.weight in embedding_weights:
                raise ConversionError(
                    f"QuantizeBase: '{path}' shares its weight with the token embedding and cannot be quantized, "
                    "leave it out of target_modules."
                )
            if type(module).forward is not nn.Linear.forward:
                raise ConversionError(
                    f"QuantizeBase: '{path}' is a {type(module).__name__}, which is more than a linear layer and "
                    "cannot be quantized: leave it out by target_modules."
                )
        # Of the default targets, some may keep their dtype; targets that the user names may not.
        is_refused = self.target_modules is not None or len(unsupported) == len(targets)
        if unsupported and is_refused:
            path, reason = next(iter(unsupported.items()))
            raise ConversionError(
                f"QuantizeBase: {reason}, the width of '{path}': choose a block_size that does, or "
                "leave the layer out by target_modules."
            )

    def revert(self, model: nn.Module) -> None:
        """Replace quantized layers by layers that are not quantized, on the meta device.

        Raises:
            ConversionError: the weights are not on the meta device.
        """
        quantized = {path: module for path, module in model.named_modules() if isinstance(module, QuantizedModule)}
        for module in quantized.values():
            is_on_meta = all(parameter.is_meta for parameter in module.parameters())
            if not is_on_meta:
                raise ConversionError(
                    "QuantizeBase: the base is quantized already, so a conversion that comes before it cannot be "
                    "applied any more: apply it while the model is on the meta device."
                )
        for path, module in quantized.items():
            model.set_submodule(path, module.without_quantization())

    def stored_weights(self, model: nn.Module) -> dict[str, StoredWeight]:
        """Return the quantized weights, which are stored ``by_rows``."""
        weights = {}
        for name, module, shape in _quantized_weights(model):
            tensor_names = module.format.tensor_names(name)
            weights[name] = StoredWeight(shape, module.format.dtype, tensor_names, by_rows=True)
        return weights

    def from_full(self, name: str, tensor: Tensor) -> dict[str, Tensor]:
        """Quantize a weight or some of its rows."""
        weight_format = self._formats[name]
        if not tensor.isfinite().all():
            raise ConversionError(f"QuantizeBase: '{name}' has values that are not finite and cannot be quantized.")
        tensor_names = weight_format.tensor_names(name)
        stored_tensors = weight_format.encode(tensor)
        return dict(zip(tensor_names, stored_tensors, strict=True))

    def to_full(self, name: str, tensors: Mapping[str, Tensor]) -> Tensor:
        """Dequantize a weight."""
        weight_format = self._formats[name]
        stored_tensors = [tensors[tensor_name] for tensor_name in weight_format.tensor_names(name)]
        return weight_format.decode(*stored_tensors)


def _matching_paths(layers: Mapping[str, nn.Module], patterns: Sequence[str]) -> list[str]:
    """Return the paths of the layers that match one of the patterns."""
    paths = []
    for path in layers:
        if any(fnmatchcase(path, pattern) for pattern in patterns):
            paths.append(path)
    return paths


def _no_match(target: str, condition: str, layers: Mapping[str, nn.Module]) -> ConversionError:
    """Return the error that no layer meets a condition, with the names that are most similar to the target."""
    nearest = ", ".join(nearest_module_names(target, list(layers))) or "none: it has no linear layer"
    return ConversionError(f"QuantizeBase: no linear layer of the model {condition}, the nearest names are {nearest}.")


def _size_in_mib(model: nn.Module) -> float:
    num_bytes = sum(parameter.nbytes for parameter in model.parameters())
    return num_bytes / 2**20


def _quantized_weights(model: nn.Module) -> Iterator[tuple[str, QuantizedModule, tuple[int, ...]]]:
    """Yield (name, module, full shape) of each quantized weight."""
    for path, module in model.named_modules():
        if isinstance(module, QuantizedModule):
            for name, shape in module.quantized_shapes().items():
                yield f"{path}.{name}", module, shape


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
        tensors = [state_dict.pop(prefix + tensor_name) for tensor_name in module.format.tensor_names(name)]
        state_dict[prefix + name] = module.format.decode(*tensors).to(dtype)
    if not offload_to_cpu:
        return
    for key, value in state_dict.items():
        if isinstance(value, torch.Tensor):
            state_dict[key] = value.cpu()

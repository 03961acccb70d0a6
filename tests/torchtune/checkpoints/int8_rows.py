"""A conversion from outside the library, which stores the weights of linear layers as int8 with a scale per row."""

from collections.abc import Mapping
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from torchtune.modules.conversion import Conversion, ConversionReport, Phase, StoredWeight
from torchtune.modules.stored_linear import StoredLinear


def quantized(weight: Tensor) -> tuple[Tensor, Tensor]:
    """int8 ``[out, in]`` and float32 ``[out]``: absmax of every row."""
    scale = weight.float().abs().amax(1).clamp(min=1e-12) / 127
    return (weight / scale.unsqueeze(1)).round().to(torch.int8), scale


def dequantized(weight: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    return (weight.float() * scale.unsqueeze(1)).to(dtype)


class Int8Linear(StoredLinear):
    parallel_dims = {"weight": (0, 1), "scale": (0, None), "bias": (0, None)}  # noqa: RUF012

    def __init__(self, linear: nn.Linear) -> None:
        bias = linear.bias is not None
        super().__init__(linear.in_features, linear.out_features, bias, device="meta", dtype=linear.weight.dtype)
        device = linear.weight.device
        self.dtype = linear.weight.dtype
        shape = linear.weight.shape
        self.weight = nn.Parameter(torch.empty(shape, dtype=torch.int8, device=device), requires_grad=False)
        self.scale = nn.Parameter(torch.empty(shape[0], dtype=torch.float32, device=device), requires_grad=False)
        self.bias = linear.bias

    def full_weight(self) -> Tensor:
        return dequantized(self.weight, self.scale, self.dtype)


class Int8Rows(Conversion):
    phase = Phase.QUANTIZED_BASE

    def __init__(self, target: str = "layers.*", by_rows: bool = True) -> None:
        self.target, self.by_rows = target, by_rows

    def convert(self, model: nn.Module) -> ConversionReport:
        linears = {path: module for path, module in model.named_modules() if type(module) is nn.Linear}
        chosen = [path for path in linears if fnmatchcase(path, self.target)]
        for path in chosen:
            parent, _, name = path.rpartition(".")
            setattr(model.get_submodule(parent), name, Int8Linear(linears[path]))
        return ConversionReport("Int8", chosen)

    def stored_weights(self, model: nn.Module) -> dict[str, StoredWeight]:
        return {
            f"{path}.weight": StoredWeight(
                tuple(module.weight.shape), module.dtype, (f"{path}.weight", f"{path}.scale"), self.by_rows
            )
            for path, module in model.named_modules()
            if isinstance(module, Int8Linear)
        }

    def from_full(self, name: str, tensor: Tensor) -> dict[str, Tensor]:
        weight, scale = quantized(tensor)
        return {name: weight, f"{name.removesuffix('weight')}scale": scale}

    def to_full(self, name: str, tensors: Mapping[str, Tensor]) -> Tensor:
        return dequantized(tensors[name], tensors[f"{name.removesuffix('weight')}scale"], torch.float32)

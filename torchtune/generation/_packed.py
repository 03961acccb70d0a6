"""Linear layers of the same input as one product, with their weights in oneDNN's layout."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from torchtune.generation._errors import GenerationError
from torchtune.modules.peft.lora import LoRALinear
from torchtune.utils import onednn_layout, onednn_linear


def check_no_gradient(*tensors: Tensor) -> None:
    """What is computed here has no gradient: a loop that trains on it would train nothing, in silence."""
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        raise GenerationError(
            "A linear layer inside of fast_linears is called with gradients, and it has none: call the model in "
            "torch.no_grad() or torch.inference_mode(), or close what generates before you train."
        )


class Packed:
    """Layers of the same input as one product.

    The rows of all A matrices are part of the product. A second, small one multiplies their outputs by the scaled B
    matrices and adds the result: adapters cost little, and without a merge the base's bits stay as they are. The first
    layer that is called computes for all; the others take their outputs if they are given the same tensor.

    Args:
        layers: of one input width and dtype. Their weights are empty until :meth:`restore`.
    """

    @torch.inference_mode(False)
    @torch.no_grad()
    def __init__(self, layers: Sequence[nn.Linear | LoRALinear]) -> None:
        weights = [layer.weight.detach() for layer in layers]
        self.layers = layers
        self._adapted = [layer for layer in layers if isinstance(layer, LoRALinear)]
        self._ranks = [layer.rank for layer in self._adapted]
        self._widths = [len(weight) for weight in weights]
        rows = weights + [layer.lora_a.weight.detach() for layer in self._adapted]
        self._weight = onednn_layout(torch.cat(rows) if len(rows) > 1 else rows[0])
        self._up = self._scaled_up(weights[0])
        self._bias = None
        if any(layer.bias is not None for layer in layers):
            self._bias = weights[0].new_zeros(sum(map(len, rows)))
            for layer, part in zip(layers, self._bias.split(self._widths + self._ranks), strict=False):
                part.copy_(0 if layer.bias is None else layer.bias)
        for layer in layers:
            layer.weight.data = layer.weight.new_empty(0)
        self._parameters = [parameter for layer in layers for parameter in layer.parameters()]
        self._input: Tensor | None = None
        self._outputs: list[Tensor | None] = []

    def _scaled_up(self, like: Tensor) -> Tensor:
        """The scaled B matrices, block-diagonal ``[all ranks, all outputs]``."""
        up, row, column = like.new_zeros(sum(self._ranks), sum(self._widths)), 0, 0
        for layer, width in zip(self.layers, self._widths, strict=True):
            if isinstance(layer, LoRALinear):
                up[row : row + layer.rank, column : column + width] = layer.lora_b.weight.t() * layer.scaling
                row += layer.rank
            column += width
        return up

    def output(self, index: int, x: Tensor) -> Tensor:
        """Output ``[..., out]`` of one of the layers."""
        if len(self.layers) == 1:
            return self.product(x)
        if x is not self._input or self._outputs[index] is None:
            self._input, self._outputs = x, list(self.outputs(x))
        found, self._outputs[index] = self._outputs[index], None
        if all(one is None for one in self._outputs):
            self._input = None
        return found

    def outputs(self, x: Tensor) -> tuple[Tensor, ...]:
        """Outputs ``[..., out]`` of all layers."""
        return self.product(x).split_with_sizes(self._widths, -1)

    def product(self, x: Tensor) -> Tensor:
        """Outputs of all layers, one after the other: ``[..., sum of out]``."""
        check_no_gradient(x, *self._parameters)
        y = onednn_linear(x, self._weight, self._bias)
        if not self._adapted:
            return y
        rows, width = y.view(-1, y.shape[-1]), sum(self._widths)
        low = rows[:, width:]
        for layer, part in zip(self._adapted, low.split(self._ranks, -1), strict=True):
            if layer.disabled:
                part.zero_()
        rows[:, :width].addmm_(low, self._up)
        return y[..., :width]

    @torch.inference_mode(False)
    @torch.no_grad()
    def restore(self) -> None:
        """Give the layers their weights back."""
        rows = self._weight.to_dense()
        alone = len(rows) == self._widths[0]
        for layer, weight in zip(self.layers, rows.split(self._widths + self._ranks), strict=False):
            layer.weight.data = weight if alone else weight.clone()

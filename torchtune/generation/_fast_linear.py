"""Linear layers on CPU during generation: oneDNN products, with weights in its own layout.

A step of decoding multiplies few rows by every weight. oneDNN reads weights fastest in its own blocked layout. In
float32, which PyTorch multiplies with MKL, a product of 16 rows takes half the time with AVX-512 on an AMD processor
and three quarters of it with AVX2; in bfloat16, two thirds. It has no gradient and rounds differently.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torchtune.generation._generation_error import GenerationError
from torchtune.generation._uncompiled import uncompiled
from torchtune.modules.latent_attention import LatentAttention
from torchtune.modules.peft.lora import LoRALinear
from torchtune.modules.tied_linear import TiedLinear
from torchtune.training.parallel import reshard
from torchtune.utils import computes_on_cpu, onednn_computes, onednn_layout, onednn_linear


def _is_plain(weight: object) -> bool:
    """Return whether oneDNN can multiply by the weight: a whole matrix on CPU, not sharded, quantized or a view."""
    return (
        type(weight) in (nn.Parameter, Tensor)
        and weight.dtype in (torch.float32, torch.bfloat16)
        and onednn_computes(weight.dtype)
        and computes_on_cpu(weight.device)
        and weight.is_contiguous()
        and weight.untyped_storage().nbytes() == weight.nbytes
    )


def _product(x: Tensor, weight: Tensor, bias: Tensor | None = None, layer: nn.Module | None = None) -> Tensor:
    """``F.linear``; ``layer`` has parameters that are used, or will be.

    Raises:
        GenerationError: there would be a gradient, and a loop that trains on it would train nothing, in silence.
    """
    if torch.is_grad_enabled():
        parameters = () if layer is None else layer.parameters()
        if any(tensor.requires_grad for tensor in (x, weight, *parameters)):
            raise GenerationError(
                "A linear layer inside of fast_linears is called with gradients, and it has none: call the model in "
                "torch.no_grad() or torch.inference_mode(), or close what generates before you train."
            )
    return onednn_linear(x, weight, bias)


class _Packed:
    """Forward of a linear layer with its weight in oneDNN's layout.

    Args:
        layer: plain or with an adapter. Its weight is empty until :meth:`restore`.
    """

    @torch.inference_mode(False)
    @torch.no_grad()
    def __init__(self, layer: nn.Linear | LoRALinear) -> None:
        self._layer, self._weight = layer, onednn_layout(layer.weight.detach())
        layer.weight.data = layer.weight.new_empty(0)
        layer.forward = self

    def __call__(self, x: Tensor) -> Tensor:
        layer = self._layer
        y = _product(x, self._weight, layer.bias, layer)
        if isinstance(layer, LoRALinear) and not layer.disabled:
            low = x.flatten(0, -2) @ layer.lora_a.weight.t()
            y.flatten(0, -2).addmm_(low, layer.lora_b.weight.t(), alpha=layer.scaling)
        return y

    @torch.inference_mode(False)
    @torch.no_grad()
    def restore(self) -> None:
        """Give the layer its weight back."""
        self._layer.weight.data = self._weight.to_dense()
        del self._layer.forward


def _packable(model: nn.Module) -> list[nn.Module]:
    """Layers that are called, plain, and the only users of their weight."""
    parts = {id(part) for m in model.modules() if isinstance(m, LoRALinear) for part in (m.lora_a, m.lora_b)}
    parts |= {id(m.kv_proj) for m in model.modules() if isinstance(m, LatentAttention)}  # whose weight a step reads
    users = Counter(id(p) for m in model.modules() for p in m._parameters.values())
    return [
        module
        for module in model.modules()
        if type(module) in (nn.Linear, LoRALinear)
        and id(module) not in parts
        and "forward" not in vars(module)
        and users[id(module.weight)] == 1
        and _is_plain(module.weight)
        and getattr(module, "lora_a", module).weight.dtype == module.weight.dtype
    ]


@contextmanager
def fast_linears(model: nn.Module, *, pack: bool) -> Iterator[None]:
    """Context manager in which the model's plain linear layers on CPU run in oneDNN, without gradients.

    Layers of other classes, dtypes and devices and sharded layers are unchanged, and under autocast all are; compiled
    layers run uncompiled. Inside another such context for the same model, it does nothing.

    Args:
        model: with ``layers`` and ``output``, in evaluation mode.
        pack: move the weights into oneDNN's layout; without it, all layers are unchanged. Parameters are empty until
            the context ends, which restores their bits: there is never a second copy of more than one weight. Both
            ways take about as long as 5 to 10 steps.

    Raises:
        GenerationError: inside, a layer is called with gradients.

    Example:
        >>> with torchtune.generation.fast_linears(model, pack=True):
        ...     text = torchtune.generate(model, tokenizer, "Why?", max_new_tokens=2)
    """
    reshard(model)  # FSDP may hold whole weights after a forward pass, and takes them away later
    packed: list[_Packed] = []
    pack = pack and not torch.is_autocast_enabled("cpu")
    output = getattr(model, "output", None)
    tied = pack and type(output) is TiedLinear and output.linear is F.linear and _is_plain(output.weight)
    with uncompiled(model):
        try:
            if pack:
                for layer in _packable(model):
                    packed.append(_Packed(layer))
            if tied:
                output.linear = _product
            yield
        finally:
            while packed:  # each is freed before the next: all together are a second copy of the model
                packed.pop().restore()
            if tied:
                output.linear = F.linear

"""Fast linear layers on CPU during generation: oneDNN products with weights in oneDNN's blocked layout.

A decoding step multiplies few rows by every weight. In float32, which PyTorch multiplies with MKL, a product of 16
rows takes half the time with AVX-512 on an AMD processor, and three quarters with AVX2; in bfloat16, two thirds. The
products have no gradient and round differently.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torchtune.generation._sampling import GenerationError
from torchtune.modules.attention import LatentAttention
from torchtune.modules.output_projection import TiedLinear
from torchtune.modules.peft.lora import LoRALinear
from torchtune.training.parallel import reshard
from torchtune.utils import computes_on_cpu, onednn_computes, onednn_layout, onednn_linear

_SMALL_RANK = 64  # of adapters; a float32 copy of a larger one would take more memory than it saves time
_ORIGINAL_ATTRIBUTE = "_torchdynamo_orig_callable"  # attribute of the function that torch.compile returns


@contextmanager
def uncompiled(model: nn.Module) -> Iterator[None]:
    """Context manager in which compiled layers of the model run uncompiled.

    Shapes of rows and caches change from step to step of generation, and most changes would recompile a layer. At its
    limit of recompilations, the compiler would also give up on training.
    """
    compiled_calls = [(module, module._compiled_call_impl) for module in model.modules()]
    # A layer with activation checkpointing has a CheckpointedForward in the place of its forward method, and the
    # forward inside of that object is compiled.
    compiled_forwards = []
    for module in model.modules():
        checkpointed = vars(module).get("forward")
        if hasattr(getattr(checkpointed, "forward", None), _ORIGINAL_ATTRIBUTE):
            compiled_forwards.append((checkpointed, checkpointed.forward))
    try:
        for module, _ in compiled_calls:
            module._compiled_call_impl = None
        for checkpointed, forward in compiled_forwards:
            checkpointed.forward = getattr(forward, _ORIGINAL_ATTRIBUTE)
        yield
    finally:
        for module, call in compiled_calls:
            module._compiled_call_impl = call
        for checkpointed, forward in compiled_forwards:
            checkpointed.forward = forward


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
    """Return ``F.linear(x, weight, bias)``, without gradients; ``layer`` is the layer of the weight.

    Raises:
        GenerationError: gradients are enabled; a training loop would silently train nothing.
    """
    if torch.is_grad_enabled():
        parameters = ()
        if layer is not None:
            parameters = layer.parameters()
        if any(tensor.requires_grad for tensor in (x, weight, *parameters)):
            raise GenerationError(
                "Linear layers have no gradients inside fast_linears: call the model in torch.no_grad() or "
                "torch.inference_mode(), or close the generator before you train."
            )
    return onednn_linear(x, weight, bias)


class _Packed:
    """Forward of a linear layer with its weight in oneDNN's layout.

    Args:
        layer: linear layer, plain or with an adapter; its weight is empty until :meth:`restore`.
    """

    @torch.inference_mode(False)
    @torch.no_grad()
    def __init__(self, layer: nn.Linear | LoRALinear) -> None:
        self._layer = layer
        self._weight = onednn_layout(layer.weight.detach())
        self._adapter: tuple[Tensor, Tensor] | None = None
        is_adapted = isinstance(layer, LoRALinear) and layer.weight.dtype == torch.bfloat16
        if is_adapted and layer.rank <= _SMALL_RANK:
            # A bfloat16 product of few rows with a small matrix takes three times as long as one in float32.
            self._adapter = layer.lora_a.weight.float(), layer.lora_b.weight.float()
        layer.weight.data = layer.weight.new_empty(0)
        layer.forward = self

    def __call__(self, x: Tensor) -> Tensor:
        layer = self._layer
        y = _product(x, self._weight, layer.bias, layer)
        if not isinstance(layer, LoRALinear) or layer.disabled:
            return y
        if self._adapter is not None:
            lora_a, lora_b = self._adapter
            low = F.linear(x.float(), lora_a)  # [..., d] -> [..., rank]
            return y.add_(F.linear(low, lora_b), alpha=layer.scaling)
        low = x.flatten(0, -2) @ layer.lora_a.weight.t()  # [b * s, rank]
        y.flatten(0, -2).addmm_(low, layer.lora_b.weight.t(), alpha=layer.scaling)
        return y

    @torch.inference_mode(False)
    @torch.no_grad()
    def restore(self) -> None:
        """Restore the layer's weight."""
        self._layer.weight.data = self._weight.to_dense()
        del self._layer.forward


def _packable(model: nn.Module) -> list[nn.Module]:
    """Return the linear layers that run in oneDNN: plain, called as modules, and with a weight that is not shared."""
    not_called: set[int] = set()  # layers whose weights others read
    users: Counter[int] = Counter()  # modules of each parameter
    for module in model.modules():
        if isinstance(module, LoRALinear):
            not_called |= {id(module.lora_a), id(module.lora_b)}
        elif isinstance(module, LatentAttention):
            not_called.add(id(module.kv_proj))  # a decoding step reads this weight itself
        users.update(id(parameter) for parameter in module._parameters.values())
    layers = []
    for module in model.modules():
        if type(module) not in (nn.Linear, LoRALinear) or id(module) in not_called:
            continue
        has_own_forward = "forward" in vars(module)  # packed already, or wrapped: _Packed would replace the wrapper
        # _Packed adds the adapter's product without a cast.
        has_one_dtype = getattr(module, "lora_a", module).weight.dtype == module.weight.dtype
        is_shared = users[id(module.weight)] > 1  # the other module would read the emptied weight
        if not has_own_forward and has_one_dtype and not is_shared and _is_plain(module.weight):
            layers.append(module)
    return layers


@contextmanager
def fast_linears(model: nn.Module, *, pack: bool) -> Iterator[None]:
    """Context manager in which linear layers on CPU, plain or with LoRA, run in oneDNN, without gradients.

    Layers of other classes, dtypes and devices and sharded layers do not change; under autocast, no layer changes.
    Compiled layers run uncompiled. Nested contexts for the same model have no effect.

    Args:
        model: a decoder with ``layers`` and ``output``, in evaluation mode.
        pack: convert the weights to oneDNN's layout; if False, no weight is converted. Parameters are empty until the
            context ends and restores them exactly. At most one weight exists twice at a time. The conversion back
            and forth takes as long as 5 to 10 decoding steps.

    Raises:
        GenerationError: a layer is called with gradients inside the context.

    Example:
        >>> with torchtune.generation.fast_linears(model, pack=True):
        ...     text = torchtune.generate(model, tokenizer, "Why?", max_new_tokens=2)
    """
    reshard(model)  # FSDP may keep unsharded weights after a forward pass, and free them later
    packed: list[_Packed] = []
    pack = pack and not torch.is_autocast_enabled("cpu")
    # A tied output has no weight of its own to pack: only its product is replaced.
    output = getattr(model, "output", None)
    is_plain_tied = type(output) is TiedLinear and output.linear is F.linear and _is_plain(output.weight)
    tied = pack and is_plain_tied
    with uncompiled(model):
        try:
            if pack:
                for layer in _packable(model):
                    packed.append(_Packed(layer))
            if tied:
                output.linear = _product
            yield
        finally:
            while packed:  # one by one, because all packed weights together are a second copy of the model
                packed.pop().restore()
            if tied:
                output.linear = F.linear

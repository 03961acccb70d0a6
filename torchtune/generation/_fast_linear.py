"""Linear layers on CPU during generation: oneDNN products, with weights in its own layout.

PyTorch multiplies float32 matrices on CPU with MKL. oneDNN is faster for the few rows of a decoding step (1.7 times at
16 rows on an AMD processor) and for prompts. It reads weights fastest in blocks: again 1.3 times at 16 rows, 1.6 times
at one, in bfloat16 too. Its operator has no gradient and rounds differently. With a weight of its own layout, layers of
the same input are one product, adapters included.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torchtune.generation._packed import Packed, check_no_gradient
from torchtune.generation._step import step_of
from torchtune.modules.feed_forward import FeedForward
from torchtune.modules.latent_attention import LatentAttention
from torchtune.modules.peft.lora import LoRALinear
from torchtune.modules.tied_linear import TiedLinear
from torchtune.modules.transformer import TransformerSelfAttentionLayer
from torchtune.training.parallel._shards import reshard
from torchtune.utils import computes_on_cpu, onednn_computes, onednn_linear


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


def _product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    check_no_gradient(x, weight)
    return onednn_linear(x, weight, bias)


def _linear(layer: nn.Linear, x: Tensor) -> Tensor:
    return _product(x, layer.weight, layer.bias)


def _adapted(layer: LoRALinear, x: Tensor) -> Tensor:
    check_no_gradient(x, layer.lora_a.weight)
    y = onednn_linear(x, layer.weight, layer.bias)
    if not layer.disabled:
        low = x.flatten(0, -2) @ layer.lora_a.weight.t()
        y.flatten(0, -2).addmm_(low, layer.lora_b.weight.t(), alpha=layer.scaling)
    return y


_ORIGINAL = "_torchdynamo_orig_callable"  # of what torch.compile returns
_KINDS = {nn.Linear: _linear, LoRALinear: _adapted}


def _candidates(model: nn.Module) -> list[nn.Module]:
    """Layers that are called, plain, and the only users of their weight."""
    parts = {id(part) for m in model.modules() if isinstance(m, LoRALinear) for part in (m.lora_a, m.lora_b)}
    parts |= {id(m.kv_proj) for m in model.modules() if isinstance(m, LatentAttention)}  # whose weight a step reads
    users = Counter(id(p) for m in model.modules() for p in m._parameters.values())
    return [
        module
        for module in model.modules()
        if type(module) in _KINDS
        and id(module) not in parts
        and "forward" not in vars(module)
        and users[id(module.weight)] == 1
        and _is_plain(module.weight)
        and getattr(module, "lora_a", module).weight.dtype == module.weight.dtype
    ]


def _groups(model: nn.Module, candidates: Sequence[nn.Module]) -> list[list[nn.Module]]:
    """The candidates, those together that a layer calls with the same input."""
    free = {id(module): module for module in candidates}
    found = []
    for module in model.modules():
        names: tuple[str, ...] = ()
        if isinstance(module, TransformerSelfAttentionLayer):
            module, names = module.attn, ("q_proj", "k_proj", "v_proj")
        elif isinstance(module, FeedForward):
            names = ("w1", "w3")
        parts = dict.fromkeys(getattr(module, name, None) for name in names)  # of which two may be the same
        group = [part for part in parts if id(part) in free]
        if any(part._forward_pre_hooks for part in group):  # of which each may change the input
            continue
        if len({(part.weight.shape[1], part.weight.dtype) for part in group}) == 1:
            found.append([free.pop(id(part)) for part in group])
    return found + [[module] for module in free.values()]


@contextmanager
def uncompiled(model: nn.Module) -> Iterator[None]:
    """Context manager in which compiled layers of the model run as they are written.

    Rows, columns and caches change from step to step of generation, and most changes compile a layer once more. At the
    limit of the compiler nothing is compiled any more, training included.
    """
    compiled = [(module, module._compiled_call_impl) for module in model.modules()]
    wrapped = [vars(module).get("forward") for module in model.modules()]  # of recomputed layers: compiled inside
    inner = [(one, one.forward) for one in wrapped if hasattr(getattr(one, "forward", None), _ORIGINAL)]
    try:
        for module, _ in compiled:
            module._compiled_call_impl = None
        for one, call in inner:
            one.forward = getattr(call, _ORIGINAL)
        yield
    finally:
        for module, call in compiled:
            module._compiled_call_impl = call
        for one, call in inner:
            one.forward = call


@contextmanager
def fast_linears(model: nn.Module, *, pack: bool) -> Iterator[None]:
    """Context manager in which the model's plain linear layers on CPU run in oneDNN, without gradients.

    Layers of other classes, dtypes and devices and sharded layers are unchanged, and under autocast all are; compiled
    layers run uncompiled. Inside another such context for the same model, it does nothing. Inside, replace no module of
    attention and feed-forward layers; hooks may come and go.

    Args:
        model: with ``layers`` and ``output``, in evaluation mode.
        pack: move the weights into oneDNN's layout, with a copy of the adapters. Parameters are empty until the context
            ends, which restores their bits: there is never a second copy of more than the weights of an attention or
            feed-forward layer. Both ways take about as long as 5 to 10 steps.

    Raises:
        GenerationError: inside, a layer is called with gradients.

    Example:
        >>> with torchtune.generation.fast_linears(model, pack=True):
        ...     text = torchtune.generate(model, tokenizer, "Why?", max_new_tokens=2)
    """
    reshard(model)  # FSDP may hold whole weights after a forward pass, and takes them away later
    changed: list[nn.Module] = []
    packs: list[Packed] = []
    output = getattr(model, "output", None)
    tied = type(output) is TiedLinear and output.linear is F.linear and _is_plain(output.weight)
    with uncompiled(model):
        try:
            if not torch.is_autocast_enabled("cpu"):
                candidates = _candidates(model)
                if pack:
                    for group in _groups(model, candidates):
                        packs.append(Packed(group))
                        for index, module in enumerate(group):
                            module.forward = partial(packs[-1].output, index)
                            changed.append(module)
                    for layer in model.modules():
                        if (step := step_of(layer, packs)) is not None:
                            layer.forward = step
                            changed.append(layer)
                else:
                    for module in candidates:
                        if module.weight.dtype == torch.float32:
                            module.forward = partial(_KINDS[type(module)], module)
                            changed.append(module)
                if tied:
                    output.linear = _product
            yield
        finally:
            for module in changed:
                vars(module).pop("forward", None)
            while packs:  # each is freed before the next: all together are a second copy of the model
                packs.pop().restore()
            if tied:
                output.linear = F.linear

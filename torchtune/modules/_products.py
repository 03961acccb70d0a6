"""Matrix products in float32 on CPU.

PyTorch multiplies float32 matrices on CPU with MKL, which keeps to AVX2 on processors of AMD. oneDNN, which PyTorch
uses for bfloat16, has AVX-512 on all of them: 2.1 times the speed on a Zen 5, in full float32. Its operator has no
gradient, and a call costs 10 µs more.
"""

from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from torchtune.utils import (
    computes_on_cpu,
    in_function_transform,
    onednn_computes,
    onednn_linear,
    saved_tensor_hooks,
)

_WORTH = 2**21  # multiplications from which on oneDNN is faster, its call included
_ROWS = 64  # from which on a layer saves more than looking at all its operations costs: more than decoding has
_BLOCK = 2**22  # elements of a result that is copied into another tensor


@cache
def _is_faster_here() -> bool:
    has_both = onednn_computes(torch.float32) and torch.backends.mkl.is_available()
    return has_both and torch.backends.cpu.get_cpu_capability() == "AVX512"


def _is_plain(tensor: Tensor) -> bool:
    """Whether it is float32 on CPU and no subclass with products of its own."""
    return tensor.dtype == torch.float32 and computes_on_cpu(tensor.device) and type(tensor) in (Tensor, nn.Parameter)


def _is_worth(multiplications: int, *tensors: Tensor) -> bool:
    return (
        not torch.compiler.is_compiling()  # first: sizes that are looked at are sizes that are compiled for
        and multiplications >= _WORTH
        and all(_is_plain(tensor) for tensor in tensors)
        and _is_faster_here()
        and torch.backends.mkldnn.enabled
    )


def _dense(matrix: Tensor) -> Tensor:
    """The matrix in strides that oneDNN reads: rows or columns without gaps between their elements."""
    inner, outer = sorted(zip(matrix.stride(), matrix.shape, strict=True))
    return matrix if inner[0] == 1 and outer[0] >= inner[1] else matrix.contiguous()


def _product(a: Tensor, b: Tensor) -> Tensor:
    return onednn_linear(_dense(a), _dense(b).t())


def mm(a: Tensor, b: Tensor, *, out: Tensor | None = None, add: bool = False) -> Tensor:
    """``a b``, without a gradient.

    Args:
        a: ``[n, k]``, any strides.
        b: ``[k, m]``, any strides.
        out: ``[n, m]``, to write to; no temporary of this size is made.
        add: add the product to ``out``.
    """
    if not _is_worth(a.shape[0] * b.numel(), a, b):
        return out.addmm_(a, b) if add else torch.mm(a, b, out=out)
    if out is None:
        return _product(a, b)
    n, m = out.shape
    parts = max(1, out.numel() // _BLOCK)
    if m > n:
        pieces = [(a, block, part) for block, part in zip(b.chunk(parts, 1), out.chunk(parts, 1), strict=True)]
    else:
        pieces = [(block, b, part) for block, part in zip(a.chunk(parts), out.chunk(parts), strict=True)]
    for left, right, part in pieces:
        found = _product(left, right)
        part.add_(found) if add else part.copy_(found)
    return out


def _is_worth_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether oneDNN, which checks no shapes, is faster and does what ``F.linear`` does."""
    return (
        x.ndim > 1
        and x.shape[-1:] == weight.shape[1:]
        and (bias is None or (_is_plain(bias) and bias.shape == weight.shape[:1]))
        and _is_worth(x.numel() * weight.shape[0], x, weight)
    )


def fast_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor | None:
    """``F.linear`` by oneDNN, without a gradient; None where that is no faster."""
    return onednn_linear(x, _dense(weight), bias) if _is_worth_linear(x, weight, bias) else None


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        needs = ctx.needs_input_grad
        ctx.save_for_backward(rows if needs[1] else None, weight if needs[0] else None)
        return onednn_linear(rows, _dense(weight), bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight = ctx.saved_tensors
        product = torch.mm if torch.is_grad_enabled() else mm  # a gradient of gradients is asked for
        grad_rows = None if weight is None else product(grad, weight)
        grad_weight = None if rows is None else product(grad.t(), rows)
        return grad_rows, grad_weight, grad.sum(0) if ctx.needs_input_grad[2] else None


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``F.linear``: ``[..., in]`` to ``[..., out]``, with gradients."""
    if not _is_worth_linear(input, weight, bias) or torch.is_autocast_enabled("cpu") or in_function_transform():
        return F.linear(input, weight, bias)
    # Views outside of the node: its result may be changed in place.
    return _Linear.apply(input.flatten(0, -2), weight, bias).view(*input.shape[:-1], len(weight))


class _Linears(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self._hooks = saved_tensor_hooks()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Activation checkpointing of a part computes it again outside, where the products must be the same.
        is_ours = func is F.linear and saved_tensor_hooks() == self._hooks
        return (linear if is_ours else func)(*args, **(kwargs or {}))


def fast_products(x: Tensor) -> AbstractContextManager[Any]:
    """Context manager in which every ``F.linear``, and so every ``nn.Linear``, computes as :func:`linear` does.

    Layers keep their class, for conversions that look for ``nn.Linear``.

    Args:
        x: what a layer computes on, ``[..., d]``; where oneDNN is no faster for it, or rows are few, nothing changes.
    """
    rows, d = x.shape[:-1].numel(), x.shape[-1]
    return _Linears() if _is_worth(rows * d * d, x) and rows >= _ROWS else nullcontext()

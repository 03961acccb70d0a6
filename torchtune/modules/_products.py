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
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from torchtune.utils import computes_on_cpu, onednn_linear

_WORTH = 2**21  # multiplications from which on oneDNN is faster, its call included
_ROWS = 64  # from which on a layer saves more than looking at all its operations costs: more than decoding has
_BLOCK = 2**22  # elements of a result that is copied into another tensor


@cache
def _is_faster_here() -> bool:
    has_both = torch.backends.mkldnn.is_available() and torch.backends.mkl.is_available()
    return has_both and torch.backends.cpu.get_cpu_capability() == "AVX512"


def _is_plain(tensor: Tensor) -> bool:
    """Whether it is float32 on CPU and no subclass with products of its own."""
    return tensor.dtype == torch.float32 and computes_on_cpu(tensor.device) and type(tensor) in (Tensor, nn.Parameter)


def _is_worth(multiplications: int, *tensors: Tensor) -> bool:
    return (
        multiplications >= _WORTH
        and all(_is_plain(tensor) for tensor in tensors)
        and not torch.compiler.is_compiling()
        and _is_faster_here()
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


def fast_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor | None:
    """``F.linear`` by oneDNN, without a gradient; None where that is no faster."""
    if x.ndim < 2 or not _is_worth(x.numel() * weight.shape[0], x, weight):
        return None
    return onednn_linear(x, _dense(weight), bias)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return fast_linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        grad = grad.flatten(0, -2)
        grad_x = mm(grad, weight).view(x.shape) if needs_x else None
        grad_weight = mm(grad.t(), x.flatten(0, -2)) if needs_weight else None
        return grad_x, grad_weight, grad.sum(0) if needs_bias else None


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``F.linear``: ``[..., in]`` to ``[..., out]``, with gradients."""
    if x.ndim > 1 and _is_worth(x.numel() * weight.shape[0], x, weight):
        return _Linear.apply(x, weight, bias)
    return F.linear(x, weight, bias)


class _Linears(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return (linear if func is F.linear else func)(*args, **(kwargs or {}))


def fast_products(x: Tensor) -> AbstractContextManager[Any]:
    """Context manager in which every ``F.linear``, and so every ``nn.Linear``, computes as :func:`linear` does.

    Layers keep their class, for conversions that look for ``nn.Linear``.

    Args:
        x: what a layer computes on, ``[..., d]``; where oneDNN is no faster for it, or rows are few, nothing changes.
    """
    rows, d = x.shape[:-1].numel(), x.shape[-1]
    return _Linears() if rows >= _ROWS and _is_worth(rows * d * d, x) else nullcontext()

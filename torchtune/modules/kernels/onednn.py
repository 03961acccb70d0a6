"""Float32 matrix products on CPU with oneDNN.

PyTorch multiplies float32 matrices on CPU with MKL, which keeps to AVX2 on processors of AMD. oneDNN, which PyTorch
uses for bfloat16, has AVX-512 on all of them: 2.1 times the speed on a Zen 5, in full float32, and 1.7 times that of a
training step. Its operator has no gradient, and a call costs 10 µs more.
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

# Multiplications of a product from which on oneDNN is faster, its call included.
_MIN_MULTIPLICATIONS = 2**21
# Rows of a layer's input from which on it saves more than looking at all its operations costs: more than decoding has.
_MIN_ROWS = 64


@cache
def _is_faster_here() -> bool:
    """Whether this machine has MKL and oneDNN, and AVX-512, which oneDNN alone uses on all processors."""
    has_both = onednn_computes(torch.float32) and torch.backends.mkl.is_available()
    return has_both and torch.backends.cpu.get_cpu_capability() == "AVX512"


def uses_onednn(dtype: torch.dtype, multiplications: int) -> bool:
    """Return whether :func:`mm` uses oneDNN for a product on CPU with this number of multiplications."""
    if dtype != torch.float32 or multiplications < _MIN_MULTIPLICATIONS:
        return False
    return _is_faster_here() and torch.backends.mkldnn.enabled


def _is_plain(tensor: Tensor) -> bool:
    """Whether the tensor is float32 on CPU and no subclass, which may define its own products."""
    is_float32_on_cpu = tensor.dtype == torch.float32 and computes_on_cpu(tensor.device)
    return is_float32_on_cpu and type(tensor) in (Tensor, nn.Parameter)


def _should_use_onednn(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> bool:
    """Whether oneDNN, which checks no shapes, is faster and does what ``F.linear`` does.

    Args:
        x: ``[..., in]``.
        weight: ``[out, in]``.
        bias: ``[out]`` or None.
    """
    if torch.compiler.is_compiling():  # first: sizes that are looked at are sizes that are compiled for
        return False
    if x.ndim < 2 or x.shape[-1:] != weight.shape[1:]:  # F.linear raises for the latter
        return False
    multiplications = x.numel() * weight.shape[0]
    if not uses_onednn(x.dtype, multiplications):
        return False
    if not (_is_plain(x) and _is_plain(weight)):
        return False
    return bias is None or (_is_plain(bias) and bias.shape == weight.shape[:1])


def _dense(matrix: Tensor) -> Tensor:
    """Make the matrix contiguous unless oneDNN supports its strides: rows or columns without gaps."""
    strides_and_sizes = sorted(zip(matrix.stride(), matrix.shape, strict=True))
    (inner_stride, inner_size), (outer_stride, _) = strides_and_sizes
    if inner_stride == 1 and outer_stride >= inner_size:
        return matrix
    return matrix.contiguous()


def mm(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
    """Compute the matrix product ``a b`` of ``[n, k]`` and ``[k, m]``, any strides, without a gradient.

    Args:
        a: ``[n, k]``.
        b: ``[k, m]``.
        out: where the product is written, ``[n, m]``; by default a new tensor.
    """
    if not _should_use_onednn(a, b.t()):
        return torch.mm(a, b, out=out)
    product = onednn_linear(_dense(a), _dense(b).t())
    if out is None:
        return product
    return out.copy_(product)  # oneDNN writes to no tensor of the caller


class _Linear(torch.autograd.Function):
    """``rows weightᵀ + bias`` with oneDNN, whose operator has no gradient: ``[n, in]`` to ``[n, out]``."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        needs_rows, needs_weight, _ = ctx.needs_input_grad
        # The gradient of each factor needs the other one.
        saved_rows = rows if needs_weight else None
        saved_weight = weight if needs_rows else None
        ctx.save_for_backward(saved_rows, saved_weight)
        return onednn_linear(rows, _dense(weight), bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight = ctx.saved_tensors
        # With create_graph=True, the products need gradients of their own.
        product = torch.mm if torch.is_grad_enabled() else mm
        grad_rows = None
        grad_weight = None
        grad_bias = None
        if weight is not None:
            grad_rows = product(grad, weight)  # [n, in]
        if rows is not None:
            grad_weight = product(grad.t(), rows)  # [out, in]
        if ctx.needs_input_grad[2]:
            grad_bias = grad.sum(0)
        return grad_rows, grad_weight, grad_bias


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``F.linear``: ``[..., in]`` to ``[..., out]``, with gradients."""
    if not _should_use_onednn(input, weight, bias) or torch.is_autocast_enabled("cpu") or in_function_transform():
        return F.linear(input, weight, bias)
    # Views are made outside of the autograd node, because its result may be changed in place.
    rows = input.flatten(0, -2)  # [n, in]
    outputs = _Linear.apply(rows, weight, bias)  # [n, out]
    return outputs.view(*input.shape[:-1], len(weight))


class _Linears(TorchFunctionMode):
    """Mode in which ``F.linear`` is :func:`linear`."""

    def __init__(self) -> None:
        super().__init__()
        self._hooks = saved_tensor_hooks()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # A checkpointed region is recomputed outside of this mode, where its products must be the same.
        if func is F.linear and saved_tensor_hooks() == self._hooks:
            func = linear
        return func(*args, **(kwargs or {}))


def fast_products(x: Tensor) -> AbstractContextManager[Any]:
    """Return a context manager in which ``F.linear``, and so ``nn.Linear``, runs :func:`linear`.

    Layers keep their class, because conversions look for ``nn.Linear``.

    Args:
        x: input of the layer, ``[..., d]``; if oneDNN is not faster for it, or it has few rows, nothing changes.
    """
    # While the compiler traces, no size is looked at, as in _should_use_onednn.
    if torch.compiler.is_compiling() or x.shape[:-1].numel() < _MIN_ROWS:
        return nullcontext()
    if not (_is_plain(x) and _is_faster_here()):
        return nullcontext()
    return _Linears()

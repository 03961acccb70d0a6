"""LoRA projection as one autograd node, and merging of adapters."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from torchtune.modules.kernels.onednn import linear, mm
from torchtune.modules.stored_linear import Stored
from torchtune.utils import computes_on_cpu, in_dispatch_mode


def lora_scaling(rank: int, alpha: float, *, use_rslora: bool = False) -> float:
    """Return the factor of the update ``B A``: ``alpha / rank``, or ``alpha / sqrt(rank)`` with rsLoRA."""
    return alpha / (rank**0.5 if use_rslora else rank)


class LoRAProjection(torch.autograd.Function):
    """y = x Wᵀ + bias + scale · (x ∘ mask) Aᵀ Bᵀ (Hu et al., "LoRA", 2021, equation 3).

    For the backward pass it saves ``x`` (for the gradient of A), ``x Aᵀ`` of width ``rank``, and with dropout a mask of
    one byte per element. Low-rank products write into a given tensor, so that selective checkpointing, which saves
    some products, does not see them; where it may save the base's product, that is not changed in place.
    W is ``decode(*stored)`` and is decoded again in the backward pass, so only the stored tensors are saved.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        bias: Tensor | None,
        lora_a: Tensor,
        lora_b: Tensor,
        mask: Tensor | None,
        scale: float,
        decode: Callable[..., Tensor],
        *stored: Tensor,
    ) -> Tensor:
        """x and mask [..., in], W [out, in], lora_a [r, in], lora_b [out, r] -> [..., out]."""
        rows = x.reshape(-1, x.shape[-1])  # [n, in]
        adapter_rows = rows if mask is None else torch.where(mask.view_as(rows), rows, 0.0)
        low = adapter_rows.new_empty(adapter_rows.shape[0], lora_a.shape[0])  # [n, r]
        torch.mm(adapter_rows, lora_a.t(), out=low)
        base = linear(rows, decode(*stored), bias).to(rows.dtype)  # autocast may change it
        y = torch.empty_like(base) if torch.compiler.is_compiling() or in_dispatch_mode() else base
        torch.addmm(base, low, lora_b.t(), alpha=scale, out=y)
        _, _, needs_a, needs_b, _, _, _, needs_weight, *_ = ctx.needs_input_grad
        saved_rows = rows if needs_weight or needs_a else None
        saved_low = low if needs_b else None
        ctx.save_for_backward(saved_rows, lora_a, lora_b, saved_low, mask, *stored)
        ctx.scale = scale
        ctx.decode = decode
        ctx.shape = x.shape
        return y.view(*x.shape[:-1], y.shape[-1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Compute the required gradients of x, bias, A, B and W."""
        rows, lora_a, lora_b, low, mask, *stored = ctx.saved_tensors
        needs_x, needs_bias, needs_a, needs_b, _, _, _, needs_weight, *_ = ctx.needs_input_grad
        grad = grad.reshape(-1, grad.shape[-1])  # [n, out]
        if mask is not None:
            mask = mask.view(grad.shape[0], -1)  # [n, in]
        grad_x = grad_weight = grad_bias = grad_a = grad_b = None
        if needs_x or needs_a:
            grad_low = _scaled_mm(grad, lora_b, ctx.scale)  # [n, r]
        if needs_a:
            adapter_rows = rows if mask is None else torch.where(mask, rows, 0.0)
            grad_a = mm(grad_low.t(), adapter_rows)
            del adapter_rows  # [n, in], not needed for the products below
        if needs_b and computes_on_cpu(grad.device):
            grad_b = _scaled_mm(low.t(), grad, ctx.scale).t()  # faster than a narrow result
        elif needs_b:
            grad_b = _scaled_mm(grad.t(), low, ctx.scale)  # autograd would copy a transposed gradient
        if needs_x:
            grad_x = mm(grad, ctx.decode(*stored))
            if mask is None:
                grad_x.addmm_(grad_low, lora_a)
            else:
                grad_x.addcmul_(grad_low @ lora_a, mask)
            grad_x = grad_x.view(ctx.shape)
        if needs_weight:
            grad_weight = mm(grad.t(), rows)
        if needs_bias:
            grad_bias = grad.sum(0)
        # Only the first stored tensor, a weight that is not in a storage format, can have a gradient.
        other_stored = [None] * (len(stored) - 1)
        return grad_x, grad_bias, grad_a, grad_b, None, None, None, grad_weight, *other_stored


def _scaled_mm(a: Tensor, b: Tensor, scale: float) -> Tensor:
    """Compute ``scale · a b``, in one launch on an accelerator."""
    if computes_on_cpu(a.device):
        return mm(a, b).mul_(scale)
    unread = a.new_empty(())  # its factor is 0
    return torch.addmm(unread, a, b, beta=0, alpha=scale)


def _identity(weight: Tensor) -> Tensor:
    return weight


def lora_projection(
    x: Tensor,
    weight: Tensor | Stored,
    bias: Tensor | None,
    lora_a: Tensor,
    lora_b: Tensor,
    *,
    scale: float,
    dropout: float = 0.0,
) -> Tensor:
    """Compute a frozen projection plus its low-rank update.

    Args:
        x: [..., in].
        weight: [out, in]; a quantized weight gets no gradient.
        bias: [out] or ``None``.
        lora_a: [r, in].
        lora_b: [out, r].
        scale: alpha / rank.
        dropout: dropout probability of the adapter's input (0 outside of training).

    Returns:
        [..., out].
    """
    mask = None
    if dropout >= 1.0:
        scale = 0.0  # nothing of the input remains
    elif dropout > 0.0:
        mask = torch.empty(x.shape, dtype=torch.bool, device=x.device).bernoulli_(1.0 - dropout)
        scale = scale / (1.0 - dropout)
    if isinstance(weight, Stored):
        decode = weight.decode
        stored = weight.tensors
    else:
        decode = _identity
        stored = (weight,)
    return LoRAProjection.apply(x, bias, lora_a, lora_b, mask, scale, decode, *stored)


def init_from_weight(weight: Tensor, how: str, rank: int, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Initialize an adapter from its base weight, as ``peft`` does.

    ``"pissa"`` takes the first singular vectors (Meng et al., "PiSSA", 2024), ``"olora"`` the first vectors of the QR
    decomposition (Büyükakyüz, "OLoRA", 2024).

    Args:
        weight: float32 [out, in].
        how: ``"pissa"`` or ``"olora"``.
        rank: r.
        scale: scale of the update.

    Returns:
        W - scale · B A, A [r, in] and B [out, r], in float32.
    """
    if how == "pissa":
        left, values, right = torch.linalg.svd(weight, full_matrices=False)
        # B and A share a singular value evenly; scale · B A is the best approximation of rank r.
        root = (values[:rank] / scale).sqrt()  # [r]
        b = left[:, :rank] * root
        a = root.unsqueeze(1) * right[:rank]
    else:
        left, right = torch.linalg.qr(weight)
        b = left[:, :rank].contiguous()
        a = right[:rank].contiguous()
    base = torch.addmm(weight, b, a, alpha=-scale)
    return base, a, b


def updated_weight(weight: Tensor, lora_a: Tensor, lora_b: Tensor, scale: float) -> Tensor:
    """Compute ``weight`` [out, in] + scale · B A in at least float32, on the device of ``weight``."""
    compute = torch.promote_types(weight.dtype, torch.float32)
    a = lora_a.to(weight.device, compute)
    b = lora_b.to(weight.device, compute)
    return torch.addmm(weight.to(compute), b, a, alpha=scale)


def merged_weight(
    weight: Tensor, lora_a: Tensor, lora_b: Tensor, scale: float, magnitude: Tensor | None = None
) -> Tensor:
    """Merge an adapter into ``weight``, keeping its dtype; with ``magnitude`` [out], scale the rows to it (DoRA)."""
    merged = updated_weight(weight, lora_a, lora_b, scale)
    if magnitude is not None:
        factors = magnitude.to(merged.device, merged.dtype) / merged.norm(dim=1)  # [out]
        merged = merged.mul_(factors.unsqueeze(1))
    return merged.to(weight.dtype)

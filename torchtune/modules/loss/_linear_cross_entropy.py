"""Cross entropy of a linear projection, without ever holding all logits."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

# Rows whose float32 scores are held at once on CPU: few enough to stay in cache between the passes over them.
_CPU_SCORE_ELEMENTS = 2**20

RowLoss = Callable[[Tensor, Tensor], Tensor]


def row_losses(logits: Tensor, target: Tensor) -> Tensor:
    """Cross entropy of every row, in float32 at least: logits [n, v], target [n] -> [n]."""
    compute = torch.promote_types(logits.dtype, torch.float32)
    logits = logits.to(compute)
    return torch.logsumexp(logits, -1) - logits.gather(-1, target.unsqueeze(-1)).squeeze(-1)


def row_losses_and_gradient(logits: Tensor, target: Tensor) -> Tensor:
    """Cross entropy of every row [n]; ``logits`` [n, v] is overwritten with its gradient, softmax − one-hot."""
    compute = torch.promote_types(logits.dtype, torch.float32)
    column = target.unsqueeze(-1)
    scores = torch.log_softmax(logits, -1, dtype=compute)
    losses = scores.gather(-1, column).squeeze(-1).neg_()
    scores = scores.exp_()
    scores.scatter_add_(-1, column, torch.full_like(column, -1, dtype=compute))
    logits.copy_(scores)
    return losses


def _in_blocks(function: RowLoss, logits: Tensor, target: Tensor) -> Tensor:
    """Apply ``function`` to blocks of rows and join what it returns."""
    rows = max(1, _CPU_SCORE_ELEMENTS // logits.shape[1]) if logits.device.type == "cpu" else len(target)
    parts = [function(*part) for part in zip(logits.split(rows), target.split(rows), strict=True)]
    return torch.cat(parts)


class _LinearCrossEntropy(torch.autograd.Function):
    """Sum of the cross entropies of hidden · weightᵀ; the gradients are made in the forward pass, chunk by chunk."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, target: Tensor, chunk_rows: int, with_gradient: RowLoss
    ) -> Tensor:
        """Shapes: hidden [n, d], weight [v, d], target [n] -> scalar in float32 at least."""
        needs_hidden, needs_weight, *_ = ctx.needs_input_grad
        compute = torch.promote_types(hidden.dtype, torch.float32)
        num_chunks = -(-len(target) // chunk_rows)
        grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        grad_weight = None
        total = torch.zeros((), dtype=compute, device=hidden.device)
        for start in range(0, len(target), chunk_rows):
            rows = slice(start, start + chunk_rows)
            logits = hidden[rows] @ weight.t()
            total += _in_blocks(with_gradient, logits, target[rows]).sum()
            if needs_hidden:
                torch.mm(logits, weight, out=grad_hidden[rows])
            if not needs_weight:
                continue
            if grad_weight is None:
                grad_weight = logits.t() @ hidden[rows]
                if num_chunks > 1:
                    grad_weight = grad_weight.to(compute)
            elif grad_weight.dtype == logits.dtype:
                grad_weight.addmm_(logits.t(), hidden[rows])
            else:
                grad_weight += logits.t() @ hidden[rows]
        ctx.gradients = (grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype))
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """The stored gradients, scaled in place; a second backward pass would scale them twice and is refused."""
        if ctx.gradients is None:
            raise RuntimeError(
                "LinearCrossEntropyLoss: its gradients were used up by a first backward pass, call the loss again "
                "instead of passing retain_graph=True."
            )
        gradients, ctx.gradients = ctx.gradients, None
        scaled = [None if gradient is None else gradient.mul_(grad) for gradient in gradients]
        return *scaled, None, None, None


@torch.compiler.disable
def linear_cross_entropy_sum(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    chunk_rows: int,
    without_gradient: RowLoss = row_losses,
    with_gradient: RowLoss = row_losses_and_gradient,
) -> Tensor:
    """Sum over rows of the cross entropy between softmax(hidden · weightᵀ) and target.

    Args:
        hidden: [n, d].
        weight: [v, d], same dtype.
        target: int64 [n], without ignored entries.
        chunk_rows: rows whose logits exist at once.
        without_gradient: (logits, target) -> losses of rows.
        with_gradient: the same, which also overwrites logits with their gradient.

    Returns:
        scalar, float32 (float64 for float64 inputs).
    """
    if torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad):
        return _LinearCrossEntropy.apply(hidden, weight, target, chunk_rows, with_gradient)
    total = torch.zeros((), dtype=torch.promote_types(hidden.dtype, torch.float32), device=hidden.device)
    for rows, targets in zip(hidden.split(chunk_rows), target.split(chunk_rows), strict=True):
        total += _in_blocks(without_gradient, rows @ weight.t(), targets).sum()
    return total

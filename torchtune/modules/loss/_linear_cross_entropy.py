"""Chunked cross entropy of a linear projection, without materializing all logits."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from torchtune.modules._outside_graphs import outside_graphs
from torchtune.modules._products import mm
from torchtune.modules.loss._row_losses import record_row_losses
from torchtune.utils import computes_on_cpu

# Number of logits per softmax block; on CPU small enough to stay in cache.
_CPU_BLOCK = 2**20
LOGITS_BLOCK = 2**26

# (logits, target) -> losses of rows.
RowLoss = Callable[[Tensor, Tensor], Tensor]


def take_gradients(ctx: Any, name: str) -> Any:
    """Return and clear the gradients that a forward pass stored in ``ctx.gradients``; callers scale them in place.

    Raises:
        RuntimeError: an earlier backward pass used them.
    """
    if ctx.gradients is None:
        raise RuntimeError(
            f"{name}: its gradients were used up by a first backward pass, call the loss again instead of passing "
            "retain_graph=True."
        )
    gradients, ctx.gradients = ctx.gradients, None
    return gradients


def row_losses(logits: Tensor, target: Tensor) -> Tensor:
    """Compute the cross entropy of every row in at least float32: logits [n, v], target [n] -> [n]."""
    compute = torch.promote_types(logits.dtype, torch.float32)
    logits = logits.to(compute)
    return torch.logsumexp(logits, -1) - logits.gather(-1, target.unsqueeze(-1)).squeeze(-1)


def row_losses_and_gradient(logits: Tensor, target: Tensor) -> Tensor:
    """Compute the cross entropy of every row [n], and overwrite ``logits`` [n, v] with its gradient, softmax − one-hot.

    The largest probability is 1 / Σ exp(logit − largest logit), which gives the normalizer without another pass.
    """
    compute = torch.promote_types(logits.dtype, torch.float32)
    column = target.unsqueeze(-1)
    margins = logits.amax(-1).to(compute) - logits.gather(-1, column).squeeze(-1)
    gradient = torch.softmax(logits, -1, dtype=compute)
    losses = margins - gradient.amax(-1).log_()
    gradient.scatter_add_(-1, column, torch.full_like(column, -1, dtype=compute))
    logits.copy_(gradient)
    return losses


def _map_blocks(function: RowLoss, logits: Tensor, target: Tensor) -> Tensor:
    block = _CPU_BLOCK if computes_on_cpu(logits.device) else LOGITS_BLOCK
    rows = max(1, block // logits.shape[1])
    parts = [function(*part) for part in zip(logits.split(rows), target.split(rows), strict=True)]
    return torch.cat(parts)


class _WeightGradient:
    """Sum of logits_gradientᵀ · hidden over chunks, in at least float32 if there is more than one chunk."""

    def __init__(self, weight: Tensor, chunks: int) -> None:
        compute = torch.promote_types(weight.dtype, torch.float32)
        self.product = torch.empty_like(weight)
        self.total = torch.zeros_like(weight, dtype=compute) if chunks > 1 and compute != weight.dtype else None
        self.empty = True

    def add(self, gradient: Tensor, hidden: Tensor) -> None:
        """Add one chunk: gradient [n, v], hidden [n, d]."""
        if self.empty or self.total is not None:
            mm(gradient.t(), hidden, out=self.product)
        else:
            mm(gradient.t(), hidden, out=self.product, add=True)
        if self.total is not None:
            self.total += self.product
        self.empty = False

    def result(self) -> Tensor:
        """Return the sum [v, d] in the dtype of the weight."""
        return self.product if self.total is None else self.product.copy_(self.total)


class _LinearCrossEntropy(torch.autograd.Function):
    """Sum of the cross entropies of hidden · weightᵀ; the forward pass computes the gradients chunk by chunk."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, target: Tensor, chunk_rows: int, with_gradient: RowLoss
    ) -> Tensor:
        """hidden [n, d], weight [v, d], target [n] -> scalar in at least float32."""
        needs_hidden, needs_weight, *_ = ctx.needs_input_grad
        compute = torch.promote_types(hidden.dtype, torch.float32)
        total = torch.zeros((), dtype=compute, device=hidden.device)
        grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        grad_weight = _WeightGradient(weight, chunks=-(-len(target) // chunk_rows)) if needs_weight else None
        buffer = hidden.new_empty(min(chunk_rows, len(target)), weight.shape[0])
        for start in range(0, len(target), chunk_rows):
            rows = slice(start, start + chunk_rows)
            logits = mm(hidden[rows], weight.t(), out=buffer[: len(target[rows])])
            total += record_row_losses(_map_blocks(with_gradient, logits, target[rows])).sum()
            if grad_hidden is not None:
                mm(logits, weight, out=grad_hidden[rows])
            if grad_weight is not None:
                grad_weight.add(logits, hidden[rows])
        ctx.gradients = (grad_hidden, None if grad_weight is None else grad_weight.result())
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the stored gradients, scaled in place; raises in a second backward pass."""
        gradients = take_gradients(ctx, "LinearCrossEntropyLoss")
        scaled = [None if gradient is None else gradient.mul_(grad) for gradient in gradients]
        return *scaled, None, None, None


@outside_graphs
def linear_cross_entropy_sum(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    chunk_rows: int,
    without_gradient: RowLoss = row_losses,
    with_gradient: RowLoss = row_losses_and_gradient,
) -> Tensor:
    """Compute the sum of the cross entropies of hidden · weightᵀ.

    Args:
        hidden: [n, d].
        weight: [v, d]; hidden is cast to its dtype.
        target: int64 [n], without ignored entries.
        chunk_rows: rows per chunk of logits.
        without_gradient: (logits, target) -> losses of rows.
        with_gradient: like ``without_gradient``; also overwrites logits with their gradient.

    Returns:
        Scalar, float32 (float64 for float64 inputs).
    """
    hidden = hidden.to(weight.dtype)
    if torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad):
        return _LinearCrossEntropy.apply(hidden, weight, target, chunk_rows, with_gradient)
    total = torch.zeros((), dtype=torch.promote_types(hidden.dtype, torch.float32), device=hidden.device)
    buffer = hidden.new_empty(min(chunk_rows, len(target)), weight.shape[0])
    for rows, targets in zip(hidden.split(chunk_rows), target.split(chunk_rows), strict=True):
        logits = mm(rows, weight.t(), out=buffer[: len(targets)])
        total += record_row_losses(_map_blocks(without_gradient, logits, targets)).sum()
    return total

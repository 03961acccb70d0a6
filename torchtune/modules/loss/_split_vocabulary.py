"""Cross entropy of a linear projection with a vocabulary that is sharded over ranks."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from torchtune.modules._outside_graphs import outside_graphs
from torchtune.modules._products import mm
from torchtune.modules.loss._linear_cross_entropy import _WeightGradient, take_gradients
from torchtune.modules.loss._row_losses import record_row_losses


def _losses_and_gradient(logits: Tensor, target: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """Compute cross entropies [n] and the gradient of this rank's logits [n, v / ranks].

    The full softmax is exp(logit − m) / Σ exp(logit − m) with the largest logit m of all ranks; the sum and the
    target's logit, which one rank has, are all-reduced.
    """
    own = logits.to(torch.promote_types(logits.dtype, torch.float32))
    top = own.amax(-1)
    dist.all_reduce(top, dist.ReduceOp.MAX, group=group)
    own = own - top.unsqueeze(-1)
    column = target - group.rank() * logits.shape[1]
    here = (column >= 0) & (column < logits.shape[1])
    column = column.masked_fill(~here, 0).unsqueeze(-1)
    chosen = own.gather(-1, column).squeeze(-1).masked_fill(~here, 0.0)
    gradient = own.exp_()
    sums = torch.stack((gradient.sum(-1), chosen))
    dist.all_reduce(sums, group=group)
    gradient /= sums[0].unsqueeze(-1)
    gradient.scatter_add_(-1, column, -here.to(gradient.dtype).unsqueeze(-1))
    return sums[0].log() - sums[1], gradient


class _SplitCrossEntropy(torch.autograd.Function):
    """Cross entropy over a sharded vocabulary; the gradient of ``hidden`` is this rank's partial sum."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        target: Tensor,
        chunk_rows: int,
        group: dist.ProcessGroup,
        softcap: float | None,
    ) -> Tensor:
        """hidden [n, d], weight [v / ranks, d], target [n] -> scalar in at least float32."""
        needs_hidden, needs_weight, *_ = ctx.needs_input_grad
        total = torch.zeros((), dtype=torch.promote_types(hidden.dtype, torch.float32), device=hidden.device)
        grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        grad_weight = _WeightGradient(weight, chunks=-(-len(target) // chunk_rows)) if needs_weight else None
        for start in range(0, len(target), chunk_rows):
            rows = slice(start, start + chunk_rows)
            logits = mm(hidden[rows], weight.t())
            bent = None if softcap is None else torch.tanh(logits.float() / softcap)
            losses, gradient = _losses_and_gradient(logits if bent is None else softcap * bent, target[rows], group)
            if bent is not None:
                gradient *= 1 - bent.square()
            gradient = gradient.to(weight.dtype)
            total += record_row_losses(losses).sum()
            if grad_hidden is not None:
                mm(gradient, weight, out=grad_hidden[rows])
            if grad_weight is not None:
                grad_weight.add(gradient, hidden[rows])
        ctx.gradients = (grad_hidden, None if grad_weight is None else grad_weight.result())
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the stored gradients, scaled in place; raises in a second backward pass."""
        gradients = take_gradients(ctx, "LinearCrossEntropyLoss")
        return *(None if gradient is None else gradient.mul_(grad) for gradient in gradients), None, None, None, None


@outside_graphs
def split_cross_entropy_sum(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    chunk_rows: int,
    group: dist.ProcessGroup,
    softcap: float | None = None,
) -> Tensor:
    """Compute the sum of the cross entropies of hidden · weightᵀ.

    All ranks of ``group`` call it with the same rows and get the same sum.

    Args:
        hidden: [n, d]; its gradient is this rank's partial sum, which the caller must all-reduce.
        weight: [v / ranks, d], the shard of this rank.
        target: int64 [n], without ignored entries.
        chunk_rows: rows per chunk of logits.
        group: process group of the shards.
        softcap: logits become ``softcap * tanh(logits / softcap)``.

    Returns:
        Scalar, float32 (float64 for float64 inputs).
    """
    return _SplitCrossEntropy.apply(hidden.to(weight.dtype), weight, target, chunk_rows, group, softcap)

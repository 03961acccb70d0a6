"""Cross entropy of a linear projection whose vocabulary is split over ranks."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from torchtune.modules._outside_graphs import outside_graphs
from torchtune.modules._products import mm
from torchtune.modules.loss._linear_cross_entropy import _WeightGradient, take_gradients
from torchtune.modules.loss._rows import seen


def _losses_and_gradient(logits: Tensor, target: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """Cross entropies [n] over all ranks' logits, of which these [n, v / ranks] are ours, and our gradient.

    The softmax of the whole is exp(logit − m) / Σ exp(logit − m) with the largest logit m of all ranks; the sum and the
    target's logit, which one rank has, are added over the ranks.
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
    """As for a whole vocabulary; the gradient of ``hidden`` is this rank's summand."""

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
        """Shapes: hidden [n, d], weight [v / ranks, d], target [n] -> scalar in float32 at least."""
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
            total += seen(losses).sum()
            if grad_hidden is not None:
                mm(gradient, weight, out=grad_hidden[rows])
            if grad_weight is not None:
                grad_weight.add(gradient, hidden[rows])
        ctx.gradients = (grad_hidden, None if grad_weight is None else grad_weight.result())
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """The stored gradients, scaled in place; a second backward pass is refused."""
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
    """Sum over rows of the cross entropy between softmax(hidden · weightᵀ) and target.

    All ranks of ``group`` call it with the same rows and get the same sum.

    Args:
        hidden: [n, d]; its gradient is the summand of this rank, to be added over the ranks by who joined it.
        weight: [v / ranks, d], the rows of this rank, in order of the ranks.
        target: int64 [n], without ignored entries.
        chunk_rows: rows whose logits exist at once.
        group: the ranks.
        softcap: logits become ``softcap * tanh(logits / softcap)``.

    Returns:
        scalar, float32 (float64 for float64 inputs).
    """
    return _SplitCrossEntropy.apply(hidden.to(weight.dtype), weight, target, chunk_rows, group, softcap)

"""Cross entropies of rows of logits."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from torchtune.utils import computes_on_cpu

# Number of logits per softmax block; on CPU small enough to stay in cache.
_CPU_BLOCK = 2**20
LOGITS_BLOCK = 2**26

# (logits, target) -> losses of rows; overwrites the logits with their gradient.
RowLosses = Callable[[Tensor, Tensor], Tensor]


def row_losses(logits: Tensor, target: Tensor) -> Tensor:
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


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, function: RowLosses) -> Tensor:
        block = _CPU_BLOCK if computes_on_cpu(logits.device) else LOGITS_BLOCK
        rows = max(1, block // logits.shape[1])
        # Detached: the compiler refuses views that were made without gradients of a tensor that has one, once another
        # view has changed it in place.
        values = logits.detach()
        parts = [function(*part) for part in zip(values.split(rows), target.split(rows), strict=True)]
        ctx.gradient = logits
        ctx.rows = rows
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        factors = grad.unsqueeze(-1)
        if not computes_on_cpu(grad.device):
            return ctx.gradient.mul_(factors), None, None
        # On a CPU, torch multiplies bfloat16 by float32 in 15 times the time that it takes with a cast of small blocks.
        for block, factor in zip(ctx.gradient.split(ctx.rows), factors.split(ctx.rows), strict=True):
            block.copy_(block.to(factor.dtype).mul_(factor))
        return ctx.gradient, None, None


def cross_entropy(logits: Tensor, target: Tensor, function: RowLosses = row_losses) -> Tensor:
    """Compute the cross entropy of every row, at least float32 [n], without another tensor of the logits' size.

    Args:
        logits: [n, v], overwritten with their gradient.
        target: int64 [n].
        function: :func:`row_losses`, or this function compiled.
    """
    return _CrossEntropy.apply(logits, target, function)

"""Chunked log-probabilities of tokens under a linear projection, without materializing all logits."""

from typing import Any, Literal, overload

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from torchtune.modules._outside_graphs import outside_graphs
from torchtune.modules._products import mm
from torchtune.modules.loss._linear_cross_entropy import _WeightGradient

# Default number of logits per chunk.
_CHUNK_ELEMENTS = 2**25


class _Projection:
    """Scaled logits of a chunk of tokens, and their backward pass.

    Args:
        weight: [v, d], or this rank's shard of the rows.
        bias: [v], or this rank's shard.
        softcap: soft cap of the logits.
        temperature: divisor of the logits.
        group: process group of the shards.
    """

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        softcap: float | None,
        temperature: float,
        group: dist.ProcessGroup | None,
    ) -> None:
        self.weight, self.bias, self.softcap, self.temperature, self.group = weight, bias, softcap, temperature, group

    def logits(self, hidden: Tensor) -> Tensor:
        """Compute scaled logits in at least float32: [n, d] -> [n, v]."""
        logits = mm(hidden, self.weight.t())
        if self.bias is not None:
            logits = logits + self.bias
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        return logits.div_(self.temperature)

    def gradient_(self, gradient: Tensor, logits: Tensor) -> Tensor:
        """Convert, in place, the gradient of the scaled logits to the gradient of the matrix product (and bias)."""
        gradient.div_(self.temperature)
        if self.softcap is not None:
            gradient.mul_(1.0 - (logits * (self.temperature / self.softcap)).square())
        return gradient

    def columns(self, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return the target's column [n, 1] in this rank's shard, and whether it is in the shard [n, 1]."""
        columns = targets.unsqueeze(-1)
        if self.group is None:
            return columns, torch.ones_like(columns, dtype=torch.bool)
        columns = columns - self.group.rank() * self.weight.shape[0]
        here = (columns >= 0) & (columns < self.weight.shape[0])
        return columns.masked_fill(~here, 0), here

    def reduce(self, value: Tensor, op: Any = dist.ReduceOp.SUM) -> Tensor:
        """All-reduce ``value`` in place, if the vocabulary is sharded."""
        if self.group is not None:
            dist.all_reduce(value, op, group=self.group)
        return value

    def statistics(self, hidden: Tensor, targets: Tensor, with_entropy: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Return log Σ exp(logits), logit of the target and entropy of every token, [n] each.

        Without ``with_entropy`` the last one is meaningless.
        """
        logits = self.logits(hidden)
        columns, here = self.columns(targets)
        chosen = logits.gather(-1, columns).masked_fill_(~here, 0.0).squeeze(-1)
        top = self.reduce(logits.amax(-1), dist.ReduceOp.MAX)
        shifted = logits.sub_(top.unsqueeze(-1))
        exp = shifted.exp()
        # Clamped, as 0 · -inf would be NaN.
        weighted = (exp * shifted.clamp(min=-1e30)).sum(-1) if with_entropy else torch.zeros_like(top)
        sums = self.reduce(torch.stack((exp.sum(-1), weighted, chosen)))
        logsumexp = sums[0].log()
        return logsumexp + top, sums[2], logsumexp - sums[1] / sums[0]


class _LinearLogProbs(torch.autograd.Function):
    """Log-probabilities and entropies; saves log Σ exp(logits) and recomputes logits in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        options: dict[str, Any],
        chunk_rows: int,
        with_entropy: bool,
    ) -> tuple[Tensor, Tensor]:
        """hidden [t, d], weight [v, d], bias [v], targets [t] -> [t], [t]."""
        projection = _Projection(weight, bias, **options)
        chunks = zip(hidden.split(chunk_rows), targets.split(chunk_rows), strict=True)
        found = [projection.statistics(rows, target, with_entropy) for rows, target in chunks]
        logsumexp, chosen, entropy = (torch.cat(parts) for parts in zip(*found, strict=True))
        ctx.save_for_backward(hidden, weight, bias, targets, logsumexp, entropy)
        ctx.options, ctx.chunk_rows, ctx.with_entropy = options, chunk_rows, with_entropy
        ctx.set_materialize_grads(False)
        return chosen - logsumexp, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None, grad_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        """d log p(target) = one-hot − p; d entropy = −p · (log p + entropy)."""
        hidden, weight, bias, targets, logsumexp, entropy = ctx.saved_tensors
        grad = torch.zeros_like(logsumexp) if grad is None else grad
        needs_hidden, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        projection = _Projection(weight, bias, **ctx.options)
        grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        grad_weight = _WeightGradient(weight, chunks=-(-len(targets) // ctx.chunk_rows)) if needs_weight else None
        grad_bias = torch.zeros_like(bias, dtype=logsumexp.dtype) if needs_bias else None
        for start in range(0, len(targets), ctx.chunk_rows):
            rows = slice(start, start + ctx.chunk_rows)
            logits = projection.logits(hidden[rows])
            log_p = logits - logsumexp[rows, None]
            gradient = log_p.exp()
            by_entropy = 0.0
            if grad_entropy is not None and ctx.with_entropy:
                log_p = log_p.clamp_(min=-1e30).add_(entropy[rows, None]).mul_(grad_entropy[rows, None])
                by_entropy = log_p
            gradient.mul_(-(grad[rows, None] + by_entropy))
            columns, here = projection.columns(targets[rows])
            gradient.scatter_add_(-1, columns, grad[rows, None] * here)
            gradient = projection.gradient_(gradient, logits)
            if grad_bias is not None:
                grad_bias += gradient.sum(0)
            gradient = gradient.to(weight.dtype)
            if grad_hidden is not None:
                mm(gradient, weight, out=grad_hidden[rows])
            if grad_weight is not None:
                grad_weight.add(gradient, hidden[rows])
        return (
            grad_hidden,
            None if grad_weight is None else grad_weight.result(),
            None if grad_bias is None else grad_bias.to(bias.dtype),
            *(None,) * 4,
        )


@overload
def linear_log_probs(
    hidden: Tensor, weight: Tensor, targets: Tensor, *, return_entropy: Literal[True], **options: Any
) -> tuple[Tensor, Tensor]: ...


@overload
def linear_log_probs(hidden: Tensor, weight: Tensor, targets: Tensor, **options: Any) -> Tensor: ...


def linear_log_probs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    bias: Tensor | None = None,
    softcap: float | None = None,
    return_entropy: bool = False,
    chunk_rows: int | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute the log-probabilities of ``targets`` under softmax(projection / temperature).

    Logits are computed chunk by chunk in the forward pass and recomputed in the backward pass; other memory is O(t).
    Products are in the dtype of the weight, softmax and its gradient in float32 (float64 for float64 weights).

    If the weight is sharded over its rows (a ``DTensor`` of tensor parallelism), every rank of the mesh must pass the
    same tokens and gets the same values. The gradient of ``hidden`` is then a partial sum, which the backward pass of
    the all-gather of ``hidden`` reduces.

    Args:
        hidden: hidden states [t, d], cast to the dtype of the weight.
        weight: [v, d].
        targets: int64 [t]; there is no ignore index, so leave out tokens without a target.
        temperature: divides the logits, after bias and soft cap; above 0.
        bias: [v], added to the product; sharded like the weight.
        softcap: logits become ``softcap * tanh(logits / softcap)``.
        return_entropy: also return the entropy of the distribution at each token, in nats; it is differentiable.
        chunk_rows: tokens per chunk of logits; by default a chunk has 2**25 logits.

    Returns:
        Log-probabilities [t] in nats, float32 (float64 for float64 weights); with ``return_entropy`` also the
        entropies [t]. Differentiable once, in hidden, weight and bias.

    Raises:
        ValueError: shapes do not match, or ``temperature`` or ``chunk_rows`` is not positive.

    Example:
        >>> from torchtune.modules.loss import linear_log_probs
        >>> hidden, weight = torch.zeros(3, 8), torch.randn(4, 8)
        >>> linear_log_probs(hidden, weight, torch.tensor([0, 3, 1])).exp()
        tensor([0.2500, 0.2500, 0.2500])
    """
    rows, width = targets.shape[0], weight.shape[1]
    if hidden.shape != (rows, width) or targets.dim() != 1:
        raise ValueError(
            f"linear_log_probs: hidden is {list(hidden.shape)} and targets {list(targets.shape)}, expected "
            f"[t, {width}] and [t]: flatten batches, and keep the tokens that have a target."
        )
    if temperature <= 0 or (chunk_rows is not None and chunk_rows < 1):
        raise ValueError(f"linear_log_probs: temperature {temperature} and chunk_rows {chunk_rows} must be positive.")
    group = None
    if hasattr(weight, "device_mesh"):
        group, weight = weight.device_mesh.get_group(), weight.to_local()
        bias = bias.to_local() if hasattr(bias, "device_mesh") else bias
    if chunk_rows is None:
        chunk_rows = max(1, _CHUNK_ELEMENTS // weight.shape[0])
    options = {"softcap": softcap, "temperature": temperature, "group": group}
    log_probs, entropy = _apply(hidden, weight, bias, targets, options, chunk_rows, return_entropy)
    return (log_probs, entropy) if return_entropy else log_probs


@outside_graphs
def _apply(hidden: Tensor, weight: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    if not len(hidden):  # no tokens: an empty result with a graph to all parameters
        nothing = (hidden.to(weight.dtype) @ weight.t()).sum(-1)
        nothing = nothing.to(torch.promote_types(nothing.dtype, torch.float32))
        return nothing, nothing
    return _LinearLogProbs.apply(hidden.to(weight.dtype), weight, *rest)

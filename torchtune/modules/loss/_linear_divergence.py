"""Chunked divergence between two linear projections of hidden states, without materializing all logits."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from torchtune.modules._outside_graphs import outside_graphs
from torchtune.modules.loss._linear_cross_entropy import take_gradients
from torchtune.modules.loss._projection import Projection, linear_parts

# (student's logits [n, v], rows) -> divergences [n].
RowDivergence = Callable[[Tensor, slice], Tensor]


def _identity(tensor: Tensor) -> Tensor:
    return tensor


class _AllGatherVocabulary(torch.autograd.Function):
    """All-gather of logits along the vocabulary. Every rank computes the same loss and keeps its shard's gradient."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, size: int, group: dist.ProcessGroup) -> Tensor:
        """[n, v of this rank] -> [n, v]; the last rank's shard may be smaller."""
        widest = -(-size // group.size())
        ctx.own = slice(group.rank() * widest, group.rank() * widest + logits.shape[1])
        padded = nn.functional.pad(logits, (0, widest - logits.shape[1])).contiguous()
        parts = [torch.empty_like(padded) for _ in range(group.size())]
        dist.all_gather(parts, padded, group=group)
        return torch.cat(parts, dim=1)[:, :size]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        """Return the gradient of this rank's columns."""
        return grad[:, ctx.own], None, None


class Logits:
    """Output projection as a function of its parameters.

    Args:
        projection: ``model.output``.
        size: compute only the first ``size`` logits; by default all.
    """

    def __init__(self, projection: Projection, size: int | None = None) -> None:
        self._projection, self._size = projection, size
        # Read the weight without calling the module: FSDP would all-gather it for each chunk, on this rank only.
        self._weight, self._bias, self._softcap = linear_parts(projection)

    @property
    def parameters(self) -> list[Tensor]:
        """The trained parameters of the projection."""
        found = [self._weight, self._bias]
        if self._weight is None:  # for example an adapter
            owner = getattr(self._projection, "tied_module", self._projection)
            found = list(owner.parameters()) if isinstance(owner, nn.Module) else []
        return [parameter for parameter in found if parameter is not None and parameter.requires_grad]

    def __call__(self, hidden: Tensor) -> Tensor:
        """Compute logits [n, v] of hidden states [n, d] in at least float32; a sharded vocabulary is all-gathered."""
        weight, bias = self._weight, self._bias
        if weight is None:
            logits = self._projection(hidden)[..., : self._size]
        elif hasattr(weight, "device_mesh"):
            bias = bias.to_local() if hasattr(bias, "device_mesh") else bias
            local = nn.functional.linear(hidden.to(weight.dtype), weight.to_local(), bias)
            logits = _AllGatherVocabulary.apply(local, len(weight), weight.device_mesh.get_group())[:, : self._size]
        else:
            bias = bias if bias is None else bias[: self._size]
            logits = nn.functional.linear(hidden.to(weight.dtype), weight[: self._size], bias)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return logits if self._softcap is None else self._softcap * torch.tanh(logits / self._softcap)


class _LinearDivergence(torch.autograd.Function):
    """Sum of divergences; the forward pass computes the gradients chunk by chunk."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, divergence: RowDivergence, logits: Logits, chunk_rows: int, *parameters: Tensor
    ) -> Tensor:
        """hidden [n, d] -> scalar."""
        total = torch.zeros((), dtype=torch.promote_types(hidden.dtype, torch.float32), device=hidden.device)
        grad_hidden = torch.zeros_like(hidden)
        sums = [torch.zeros_like(p, dtype=torch.promote_types(p.dtype, torch.float32)) for p in parameters]
        for start in range(0, len(hidden), chunk_rows):
            rows = slice(start, start + chunk_rows)
            with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(_identity, _identity):  # no offloading
                chunk = hidden[rows].detach().requires_grad_()
                value = divergence(logits(chunk), rows).sum()
                grads = torch.autograd.grad(value, [chunk, *parameters], allow_unused=True)
            total += value.detach()
            grad_hidden[rows] = grads[0]
            for summed, grad in zip(sums, grads[1:], strict=True):
                if grad is not None:
                    summed += grad
        ctx.gradients = [grad_hidden, *(s.to(p.dtype) for s, p in zip(sums, parameters, strict=True))]
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the stored gradients, scaled in place; raises in a second backward pass."""
        hidden, *parameters = take_gradients(ctx, "divergence_sum")
        return hidden.mul_(grad), None, None, None, *(parameter.mul_(grad) for parameter in parameters)


@outside_graphs
def divergence_sum(hidden: Tensor, divergence: RowDivergence, logits: Logits, chunk_rows: int) -> Tensor:
    """Compute the sum of the divergences of all positions, chunk by chunk.

    The sum weighs positions equally, so the forward pass computes their gradients: logits are computed once, and the
    backward pass does not need the teacher. Gradients of parameters are summed in at least float32.

    Args:
        hidden: the student's hidden states [n, d].
        divergence: (student's logits of a chunk [m, v], slice of its positions) -> divergences [m].
        logits: the student's output projection.
        chunk_rows: positions per chunk of logits.

    Returns:
        Scalar, float32 (float64 for float64 hidden states); differentiable once.
    """
    parameters: Sequence[Tensor] = logits.parameters
    if torch.is_grad_enabled() and (hidden.requires_grad or parameters):
        return _LinearDivergence.apply(hidden, divergence, logits, chunk_rows, *parameters)
    total = torch.zeros((), dtype=torch.promote_types(hidden.dtype, torch.float32), device=hidden.device)
    for start in range(0, len(hidden), chunk_rows):
        rows = slice(start, start + chunk_rows)
        total += divergence(logits(hidden[rows]), rows).sum()
    return total

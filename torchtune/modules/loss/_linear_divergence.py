"""Divergence between two linear projections of hidden states, without full logits of either."""

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


def _keep(tensor: Tensor) -> Tensor:
    return tensor


class _WholeVocabulary(torch.autograd.Function):
    """All-gather of logits along the vocabulary; every rank computes the same of them, and keeps its own gradient."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, size: int, group: dist.ProcessGroup) -> Tensor:
        """[n, v of this rank] -> [n, v]; the last rank may have fewer."""
        widest = -(-size // group.size())
        ctx.own = slice(group.rank() * widest, group.rank() * widest + logits.shape[1])
        padded = nn.functional.pad(logits, (0, widest - logits.shape[1])).contiguous()
        parts = [torch.empty_like(padded) for _ in range(group.size())]
        dist.all_gather(parts, padded, group=group)
        return torch.cat(parts, dim=1)[:, :size]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        """The gradient of this rank's columns."""
        return grad[:, ctx.own], None, None


class Logits:
    """An output projection, as a function of its parameters.

    Args:
        projection: ``model.output``.
        size: number of logits to make, the first ones; all by default.
    """

    def __init__(self, projection: Projection, size: int | None = None) -> None:
        self._projection, self._size = projection, size
        # Not through the module where it can be avoided: FSDP would gather it for each chunk, on this rank alone.
        self._weight, self._bias, self._softcap = linear_parts(projection)

    @property
    def parameters(self) -> list[Tensor]:
        """What the logits depend on besides hidden states, where it is trained."""
        found = [self._weight, self._bias]
        if self._weight is None:  # an adapter, for one
            owner = getattr(self._projection, "tied_module", self._projection)
            found = list(owner.parameters()) if isinstance(owner, nn.Module) else []
        return [parameter for parameter in found if parameter is not None and parameter.requires_grad]

    def __call__(self, hidden: Tensor) -> Tensor:
        """Hidden states [n, d] to logits [n, v], float32 at least; of a sharded vocabulary the whole, on every rank."""
        weight, bias = self._weight, self._bias
        if weight is None:
            logits = self._projection(hidden)[..., : self._size]
        elif hasattr(weight, "device_mesh"):
            bias = bias.to_local() if hasattr(bias, "device_mesh") else bias
            local = nn.functional.linear(hidden.to(weight.dtype), weight.to_local(), bias)
            logits = _WholeVocabulary.apply(local, len(weight), weight.device_mesh.get_group())[:, : self._size]
        else:
            bias = bias if bias is None else bias[: self._size]
            logits = nn.functional.linear(hidden.to(weight.dtype), weight[: self._size], bias)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return logits if self._softcap is None else self._softcap * torch.tanh(logits / self._softcap)


class _LinearDivergence(torch.autograd.Function):
    """Sum of divergences; the gradients are made in the forward pass, chunk by chunk."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, divergence: RowDivergence, logits: Logits, chunk_rows: int, *parameters: Tensor
    ) -> Tensor:
        """Shapes: hidden [n, d] -> scalar."""
        total = torch.zeros((), dtype=torch.promote_types(hidden.dtype, torch.float32), device=hidden.device)
        grad_hidden = torch.zeros_like(hidden)
        sums = [torch.zeros_like(p, dtype=torch.promote_types(p.dtype, torch.float32)) for p in parameters]
        for start in range(0, len(hidden), chunk_rows):
            rows = slice(start, start + chunk_rows)
            with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(_keep, _keep):  # nothing to offload
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
        """The stored gradients, scaled; raises at a second backward pass, which would scale again."""
        hidden, *parameters = take_gradients(ctx, "divergence_sum")
        return hidden.mul_(grad), None, None, None, *(parameter.mul_(grad) for parameter in parameters)


@outside_graphs
def divergence_sum(hidden: Tensor, divergence: RowDivergence, logits: Logits, chunk_rows: int) -> Tensor:
    """Sum of the divergences of some positions, of which logits of ``chunk_rows`` exist at once.

    The sum weighs positions equally, so their gradients are made in the forward pass: logits are computed once, and
    nothing of the other model is needed in the backward pass. Gradients of parameters are summed in float32.

    Args:
        hidden: the student's hidden states [n, d].
        divergence: (its logits of some positions [m, v], which positions) -> divergences [m].
        logits: its output projection.
        chunk_rows: see above.

    Returns:
        scalar, float32 (float64 for float64 hidden states); differentiable once.
    """
    parameters: Sequence[Tensor] = logits.parameters
    if torch.is_grad_enabled() and (hidden.requires_grad or parameters):
        return _LinearDivergence.apply(hidden, divergence, logits, chunk_rows, *parameters)
    total = torch.zeros((), dtype=torch.promote_types(hidden.dtype, torch.float32), device=hidden.device)
    for start in range(0, len(hidden), chunk_rows):
        rows = slice(start, start + chunk_rows)
        total += divergence(logits(hidden[rows]), rows).sum()
    return total

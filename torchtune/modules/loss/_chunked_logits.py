"""Functions of the logits of an output projection, computed chunk by chunk: all logits are never in memory at once."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from torchtune.modules._outside_graphs import outside_graphs
from torchtune.modules.kernels.onednn import linear
from torchtune.modules.output_projection import CappedLinear, soft_cap

# Hidden states [..., d] -> logits [..., v].
Projection = Callable[[Tensor], Tensor]
# (logits of a chunk [n, v], slice of its positions) -> values of its positions [n], one tensor or several.
RowFunction = Callable[[Tensor, slice], Tensor | tuple[Tensor, ...]]

_PLAIN_FORWARDS = (nn.Linear.forward, CappedLinear.forward)


class Logits:
    """Output projection as a function of its parameters.

    A plain projection (its weight, bias and soft cap) is computed without calling the module: FSDP would all-gather the
    weight for each chunk, on this rank only. Any other projection, for example with an adapter, is called.

    Args:
        weight: [v, d], or None for a projection that is called.
        bias: [v].
        softcap: logits become ``softcap * tanh(logits / softcap)``.
        projection: the projection that is called without a weight.

    Attributes:
        group: process group over which tensor parallelism shards the vocabulary, else None.
    """

    def __init__(
        self,
        weight: Tensor | None,
        bias: Tensor | None = None,
        softcap: float | None = None,
        projection: Projection | None = None,
    ) -> None:
        self._weight = weight
        self._bias = bias
        self._softcap = softcap
        self._projection = projection
        self.group: dist.ProcessGroup | None = None
        if _is_sharded(weight):
            self.group = weight.device_mesh.get_group()

    @classmethod
    def of(cls, projection: Projection) -> "Logits":
        """Make the logits of ``model.output``."""
        softcap = getattr(projection, "softcap", None)
        if isinstance(projection, nn.Linear) and type(projection).forward in _PLAIN_FORWARDS:
            return cls(projection.weight, projection.bias, softcap)
        tied_module = getattr(projection, "tied_module", None)
        if isinstance(tied_module, nn.Embedding | nn.Linear):
            return cls(tied_module.weight, softcap=softcap)
        # An adapter, for example: its forward computes more than a product with one weight.
        return cls(None, projection=projection)

    @property
    def is_plain(self) -> bool:
        """Whether the projection is computed without calling it."""
        return self._weight is not None

    @property
    def parameters(self) -> list[Tensor]:
        """The trained parameters of the projection."""
        if self.is_plain:
            parameters = [self._weight, self._bias]
        else:
            module = getattr(self._projection, "tied_module", self._projection)
            parameters = list(module.parameters()) if isinstance(module, nn.Module) else []
        return [parameter for parameter in parameters if parameter is not None and parameter.requires_grad]

    def rows_of(self, elements: int) -> int:
        """Return the number of positions, at least 1, whose logits have about this many elements."""
        weight = self._weight if self.is_plain else self._projection.weight
        return max(1, elements // len(_local_shard(weight)))

    def __call__(self, hidden: Tensor) -> Tensor:
        """Compute logits [n, v] of hidden states [n, d], which the caller may overwrite; with a group, its shard."""
        if not self.is_plain:
            # A copy, because the caller overwrites the logits and the module may need its output in its backward pass.
            return self._projection(hidden).clone()
        weight = _local_shard(self._weight)  # [v, d]
        bias = _local_shard(self._bias)  # [v]
        logits = linear(hidden.to(weight.dtype), weight, bias)  # [n, v]
        return soft_cap(logits, self._softcap)

    def whole(self, logits: Tensor, size: int) -> Tensor:
        """Return the first ``size`` columns of ``logits``, all-gathered with a group, in at least float32."""
        if self.group is not None:
            from torchtune.modules.parallel.collectives import gather_vocabulary  # slow to import

            logits = gather_vocabulary(logits, self.group)
        return at_least_float32(logits[:, :size])


def _is_sharded(parameter: Tensor | None) -> bool:
    return hasattr(parameter, "device_mesh")


def _local_shard(parameter: Tensor | None) -> Tensor | None:
    return parameter.to_local() if _is_sharded(parameter) else parameter


def at_least_float32(x: Tensor) -> Tensor:
    """Convert to float32; float64 is kept."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _identity(tensor: Tensor) -> Tensor:
    return tensor


class _Gradients:
    """Gradients of hidden states and of the projection's parameters, which are summed in at least float32."""

    def __init__(
        self, hidden: Tensor, function: RowFunction, logits: Logits, parameters: Sequence[Tensor], needs_hidden: bool
    ) -> None:
        self.hidden = hidden
        self.function = function
        self.logits = logits
        self.parameters = parameters
        self.of_hidden = torch.zeros_like(hidden) if needs_hidden else None
        self.of_parameters: list[Tensor | None] = [None] * len(parameters)

    def add(self, rows: slice, grads: Sequence[Tensor] | None) -> Tensor:
        """Add the gradients of a chunk, for gradients ``grads`` of its values or of their sum; return the values."""
        # The hooks replace those of offloading: the graph of a chunk is used at once.
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(_identity, _identity):
            chunk = self.hidden[rows].detach().requires_grad_(self.of_hidden is not None)  # [n, d]
            values = self.function(self.logits(chunk), rows)  # [n], one tensor or several
            if grads is None:
                grads = torch.ones_like(values)
            inputs = list(self.parameters)
            if chunk.requires_grad:
                inputs.insert(0, chunk)
            input_grads = list(torch.autograd.grad(values, inputs, grads, allow_unused=True))
        if chunk.requires_grad:
            self.of_hidden[rows] = input_grads.pop(0)
        for index, grad in enumerate(input_grads):
            if grad is None:
                continue
            total = self.of_parameters[index]
            # The gradient of a single chunk keeps its dtype: no copy in float32 is made where nothing is summed.
            self.of_parameters[index] = grad if total is None else at_least_float32(total).add_(grad)
        return values

    def result(self) -> list[Tensor | None]:
        """Return the gradients of the hidden states and of every parameter."""
        gradients = [self.of_hidden]
        for grad, parameter in zip(self.of_parameters, self.parameters, strict=True):
            gradients.append(torch.zeros_like(parameter) if grad is None else grad.to(parameter.dtype))
        return gradients


def _slices(hidden: Tensor, chunk_rows: int) -> list[slice]:
    """Slices of chunks; without positions an empty one, so that every rank runs the same projection."""
    return [slice(start, start + chunk_rows) for start in range(0, max(len(hidden), 1), chunk_rows)]


class _ChunkedSum(torch.autograd.Function):
    """Sum over positions; the forward pass computes the gradients, so that logits are computed once."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, function: RowFunction, logits: Logits, chunk_rows: int, *parameters: Tensor
    ) -> Tensor:
        gradients = _Gradients(hidden, function, logits, parameters, ctx.needs_input_grad[0])
        sums = []
        for rows in _slices(hidden, chunk_rows):
            # No name for the values: it would keep the logits of this chunk while the next one's are computed.
            sums.append(gradients.add(rows, None).detach().sum())
        ctx.gradients = gradients.result()
        return torch.stack(sums).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.gradients is None:
            raise RuntimeError(
                "The gradients of this loss were used up by a first backward pass: call the loss again instead of "
                "passing retain_graph=True."
            )
        scaled = []
        for gradient in ctx.gradients:
            # In place, as this backward pass is the only one.
            scaled.append(None if gradient is None else gradient.mul_(grad))
        ctx.gradients = None
        of_hidden, *of_parameters = scaled
        return of_hidden, None, None, None, *of_parameters


class _ChunkedRows(torch.autograd.Function):
    """Values of positions; the backward pass computes the logits again."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, function: RowFunction, logits: Logits, chunk_rows: int, *parameters: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(hidden)
        ctx.function = function
        ctx.logits = logits
        ctx.chunk_rows = chunk_rows
        return _rows_of(hidden, function, logits, chunk_rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (hidden,) = ctx.saved_tensors
        gradients = _Gradients(hidden, ctx.function, ctx.logits, ctx.logits.parameters, ctx.needs_input_grad[0])
        for rows in _slices(hidden, ctx.chunk_rows):
            gradients.add(rows, [grad[rows] for grad in grads])
        of_hidden, *of_parameters = gradients.result()
        return of_hidden, None, None, None, *of_parameters


def _rows_of(hidden: Tensor, function: RowFunction, logits: Logits, chunk_rows: int) -> tuple[Tensor, ...]:
    chunks = [function(logits(hidden[rows]), rows) for rows in _slices(hidden, chunk_rows)]
    # Chunks of tuples -> a tuple of tensors [n].
    return tuple(torch.cat(values) for values in zip(*chunks, strict=True))


@outside_graphs
def chunked_sum(hidden: Tensor, function: RowFunction, logits: Logits, chunk_rows: int) -> Tensor:
    """Compute the sum of a function over positions.

    The sum weighs positions equally, so the forward pass computes their gradients, and the backward pass scales them.

    Args:
        hidden: hidden states [n, d].
        function: returns one tensor.
        logits: the output projection.
        chunk_rows: positions per chunk of logits.

    Returns:
        Scalar, at least float32; differentiable once. With a group, the gradient of ``hidden`` is a partial sum.
    """
    parameters = logits.parameters
    if torch.is_grad_enabled() and (hidden.requires_grad or parameters):
        return _ChunkedSum.apply(hidden, function, logits, chunk_rows, *parameters)
    sums = [function(logits(hidden[rows]), rows).sum() for rows in _slices(hidden, chunk_rows)]
    return torch.stack(sums).sum()


@outside_graphs
def chunked_rows(hidden: Tensor, function: RowFunction, logits: Logits, chunk_rows: int) -> tuple[Tensor, ...]:
    """Compute a function of every position, which returns a tuple; see :func:`chunked_sum` for the arguments."""
    parameters = logits.parameters
    if torch.is_grad_enabled() and (hidden.requires_grad or parameters):
        return _ChunkedRows.apply(hidden, function, logits, chunk_rows, *parameters)
    return _rows_of(hidden, function, logits, chunk_rows)

"""Cross entropy of labeled tokens, and functions of logits that are computed chunk by chunk.

All logits of a batch are never in memory at once.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from torchtune.data import label_index
from torchtune.modules._outside_graphs import outside_graphs
from torchtune.modules.kernels.onednn import linear
from torchtune.modules.loss.custom_loss import Projection, SFTLoss
from torchtune.modules.output_projection import CappedLinear, soft_cap
from torchtune.utils import computes_on_cpu, deprecated

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


def log_probs_of_rows(
    logits: Tensor, targets: Tensor, group: dist.ProcessGroup | None = None, *, with_entropy: bool = False
) -> tuple[Tensor, ...]:
    """Compute the target's log-prob of every row, [n], and the entropy of the row's distribution if asked for.

    Args:
        logits: [n, v]; with a group, this rank's shard of the vocabulary.
        targets: int64 [n].
        group: process group of the shards.
        with_entropy: also return the entropies, [n].

    Returns:
        One or two tensors, at least float32.
    """
    logits = at_least_float32(logits)
    columns = targets.unsqueeze(-1)  # [n, 1]
    largest = logits.detach().amax(-1, keepdim=True)  # [n, 1]
    if group is not None:
        # Every rank subtracts the same number, so that the sums of exponentials below can be added.
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
        columns = columns - group.rank() * logits.shape[1]
    # Targets in the shard of another rank add 0 here. Without a group no target is masked: one that is no token must
    # fail in gather.
    is_elsewhere = ((columns < 0) | (columns >= logits.shape[1])) & (group is not None)
    shifted = logits - largest
    exp = shifted.exp()
    target_logits = shifted.gather(-1, columns.masked_fill(is_elsewhere, 0))
    target_logits = target_logits.masked_fill(is_elsewhere, 0.0).squeeze(-1)  # [n]
    sums = [exp.sum(-1), target_logits]
    if with_entropy:
        sums.append((exp * shifted.clamp(min=-1e30)).sum(-1))  # clamped, as 0 · -inf would be NaN
    if group is not None:
        from torchtune.modules.parallel.collectives import sum_of_equals  # slow to import

        sums = sum_of_equals(torch.stack(sums), group)
    total = sums[0]
    log_probs = sums[1] - total.log()
    if not with_entropy:
        return (log_probs,)
    # −Σ p log p, with log p = shifted − log total and p = exp / total.
    entropies = total.log() - sums[2] / total
    return log_probs, entropies


# Smaller chunks make the products slow and save little memory. The gradient of a trained weight takes more memory than
# the logits of 512 positions.
_MIN_CHUNK_ROWS = 256
_MIN_CHUNK_ROWS_TRAINED = 512

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
        losses = [
            function(block_logits, block_target)
            for block_logits, block_target in zip(values.split(rows), target.split(rows), strict=True)
        ]
        ctx.gradient = logits  # overwritten by the function
        ctx.rows = rows
        return losses[0] if len(losses) == 1 else torch.cat(losses)

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


def choose_chunk_rows(rows: int, num_output_chunks: int, trained: Tensor | None) -> int:
    """Return the positions per chunk; ``trained`` [v, d] is the output weight if it gets a gradient."""
    even = -(-rows // num_output_chunks)  # rounded up
    if trained is None:
        return max(_MIN_CHUNK_ROWS, even)
    if trained.dtype.itemsize < 4 and 0 < rows <= 2 * trained.shape[1]:
        return rows  # one chunk: less memory than a float32 sum of the weight's gradient
    return max(_MIN_CHUNK_ROWS_TRAINED, even)


class LinearCrossEntropyLoss(SFTLoss, nn.Module):
    """Chunked cross entropy over labeled tokens, from hidden states and the output projection.

    Recipes call :meth:`sum_and_count`. :meth:`forward`, the mean, is for callers that set the projection with
    :meth:`set_model_output`.

    Logits are computed only for labeled tokens, chunk by chunk. Softmax and its gradient are computed in float32
    (float64 for float64 weights), matrix products in the dtype of the weights. The forward pass computes the gradients.

    Args:
        num_output_chunks: maximum number of chunks; a chunk has at least 256 positions, 512 with a trained projection.
        ignore_index: label of ignored tokens.
        tp_enabled: whether the output projection is sharded over a tensor-parallel group.
        mask_ignored_tokens: skip ignored tokens before the projection; ``False`` keeps shapes fixed.

    Example:
        >>> from torchtune.modules.loss import LinearCrossEntropyLoss
        >>> loss, hidden = LinearCrossEntropyLoss(), torch.zeros(1, 3, 8)
        >>> projection = torch.nn.Linear(8, 4, bias=False)
        >>> total, count = loss.sum_and_count(hidden, torch.tensor([[2, -100, 1]]), projection)
        >>> round(total.item(), 4), count.item()  # 2 log(4)
        (2.7726, 2)
    """

    def __init__(
        self,
        num_output_chunks: int = 8,
        ignore_index: int = -100,
        tp_enabled: bool = False,
        mask_ignored_tokens: bool = True,
    ) -> None:
        super().__init__()
        if num_output_chunks < 1:
            raise ValueError(f"num_output_chunks is {num_output_chunks}: it must be at least 1.")
        self.num_output_chunks = num_output_chunks
        self.ignore_index = ignore_index
        self.tp_enabled = tp_enabled
        self.mask_ignored_tokens = mask_ignored_tokens
        # In a tuple, so that the projection does not become a submodule.
        self._projection: tuple[Any, ...] = ()
        self._row_losses = row_losses

    @property
    def tp_requires_loss_parallel_ctx_manager(self) -> bool:
        """Always False: this loss supports a sharded weight without ``loss_parallel()``."""
        return False

    def apply_compile_strategy(self, *args: Any, **kwargs: Any) -> "LinearCrossEntropyLoss":
        """Compile the passes over a chunk's logits, but not the products and the loop over chunks."""
        self._row_losses = torch.compile(row_losses, *args, **kwargs)
        return self

    def set_model_output(self, model: nn.Module) -> None:
        """Use the output projection of ``model``, and set the model's ``skip_output_layer``.

        For older recipes, which call ``loss(model(tokens), labels)``.
        """
        super().set_model_output(model)
        model.skip_output_layer = True
        self._projection = (model.output,)

    @property
    def linear_projection(self) -> Any:
        """The output projection of ``set_model_output``, or ``None`` before that call."""
        return self._projection[0] if self._projection else None

    def compute_cross_entropy(self, hidden_chunk: Tensor, target_chunk: Tensor) -> Tensor:
        """Compute the summed cross entropy of some positions: hidden [n, d], targets [n] -> scalar."""
        logits = Logits.of(self.linear_projection)
        return self._losses_with_ignored(logits(hidden_chunk), target_chunk, logits).sum()

    def _losses(self, logits: Tensor, target: Tensor, projection: Logits) -> Tensor:
        """Cross entropies [n] of logits [n, v], which are overwritten, with a known target [n] in each row."""
        if projection.group is None:
            return cross_entropy(logits, target, self._row_losses)
        return -log_probs_of_rows(logits, target, projection.group)[0]

    def _losses_with_ignored(self, logits: Tensor, target: Tensor, projection: Logits) -> Tensor:
        """As :meth:`_losses`; 0 for ignored tokens."""
        is_ignored = target == self.ignore_index
        losses = self._losses(logits, target.masked_fill(is_ignored, 0), projection)
        return losses.masked_fill(is_ignored, 0.0)

    def mask_inputs(self, hidden: Tensor, target: Tensor, index: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Select labeled tokens: hidden [n, d], target [n] -> [m, d], [m]; ``index`` [m] are their positions."""
        if index is None:
            index = label_index(target, self.ignore_index)
        if len(index) == len(target):
            return hidden, target
        return hidden.index_select(0, index), target.index_select(0, index)

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Compute the mean loss over labeled tokens, or 0 with zero gradients if there are none.

        Args:
            outputs: hidden states [b, s, d].
            targets: labels int64 [b, s], already shifted.

        Returns:
            Scalar, float32 (float64 for float64 inputs).

        Raises:
            AttributeError: ``set_model_output(model)`` has not been called.
        """
        if not self._projection:
            raise AttributeError("LinearCrossEntropyLoss: call set_model_output(model) before the first loss.")
        total, count = self.sum_and_count(outputs, targets, self.linear_projection)
        return total / count.clamp(min=1)

    def sum_and_count(
        self,
        hidden: Tensor,
        labels: Tensor,
        projection: Projection,
        *,
        index: Tensor | None = None,
        weights: Tensor | None = None,
        row_losses: list[Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Compute the weighted sum of the losses of labeled tokens, and the sum of their weights.

        Args:
            hidden: hidden states [b, s, d].
            labels: int64 [b, s], already shifted.
            projection: [n, d] -> logits [n, v], the ``output`` of the model.
            index: int64 [m], positions of the labeled tokens in the flattened batch. Without them, the host waits for
                the device to find their number.
            weights: float32 [b, s], factors of the losses of single tokens; None: each is 1.
            row_losses: list to which the losses of the labeled tokens are appended, detached, chunk by chunk; with
                ``mask_ignored_tokens=False`` those of all positions, 0 for ignored tokens.

        Returns:
            Sum (scalar, float32, or float64 for float64 inputs; 0 with zero gradients if there is no label) and count
            of labels (int64 scalar), or sum of their weights (float32 scalar).
        """
        is_labeled = labels != self.ignore_index
        count = is_labeled.sum() if weights is None else (weights * is_labeled).sum()
        hidden = hidden.flatten(0, -2)  # [b * s, d]
        target = labels.flatten()  # [b * s]
        row_weights = None if weights is None else weights.flatten()  # [b * s]
        if self.mask_ignored_tokens:
            if index is None:
                index = label_index(target, self.ignore_index)
            hidden, target = self.mask_inputs(hidden, target, index)  # [m, d], [m]
            if row_weights is not None:
                row_weights = row_weights.index_select(0, index)  # [m]
            chunk_losses = self._losses
        else:
            chunk_losses = self._losses_with_ignored
        logits = Logits.of(projection)

        def losses(chunk: Tensor, rows: slice) -> Tensor:
            values = chunk_losses(chunk, target[rows], logits)  # [n]
            if row_losses is not None:
                row_losses.append(values.detach())
            return values if row_weights is None else values * row_weights[rows]

        trained = projection.weight if logits.is_plain and logits.parameters else None
        chunk_rows = choose_chunk_rows(len(target), self.num_output_chunks, trained)
        total = chunked_sum(hidden, losses, logits, chunk_rows)
        return total, count


@deprecated("Use torchtune.modules.loss.LinearCrossEntropyLoss instead.")
class CEWithChunkedOutputLoss(LinearCrossEntropyLoss):
    """Older name of :class:`LinearCrossEntropyLoss`; also accepts chunks of logits.

    Args:
        num_output_chunks: number of chunks.
        ignore_index: label of ignored tokens.

    Example:
        >>> from torchtune.modules.loss import CEWithChunkedOutputLoss
        >>> loss = CEWithChunkedOutputLoss(num_output_chunks=2)
        >>> loss([torch.zeros(1, 2, 4), torch.zeros(1, 2, 4)], torch.tensor([[0, 1, 2, -100]])).item()  # log(4)
        1.3862...
    """

    def __init__(self, num_output_chunks: int = 8, ignore_index: int = -100) -> None:
        super().__init__(num_output_chunks=num_output_chunks, ignore_index=ignore_index)

    sum_and_count = LinearCrossEntropyLoss.sum_and_count  # setup_loss must not derive it from forward

    def forward(self, outputs: Tensor | Sequence[Tensor], targets: Tensor) -> Tensor:
        """Compute the mean loss over labeled tokens, 0 if there are none.

        Args:
            outputs: hidden states [b, s, d] after ``set_model_output(model)``, or chunks of logits along the
                sequence, each [b, s / chunks, v].
            targets: labels int64 [b, s], already shifted.

        Returns:
            Scalar, float32 (float64 for float64 inputs).
        """
        if isinstance(outputs, Tensor):
            return super().forward(outputs, targets)
        lengths = [chunk.shape[1] for chunk in outputs]
        chunks = zip(outputs, targets.split(lengths, dim=1), strict=True)
        total = sum(self._sum_of_logits(logits.flatten(0, 1), target.flatten()) for logits, target in chunks)
        count = (targets != self.ignore_index).sum()
        return total / count.clamp(min=1)

    def _sum_of_logits(self, logits: Tensor, target: Tensor) -> Tensor:
        """logits [n, v], target [n] -> scalar."""
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return torch.nn.functional.cross_entropy(logits, target, ignore_index=self.ignore_index, reduction="sum")

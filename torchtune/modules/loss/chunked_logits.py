"""Logits that are computed chunk by chunk: sums and values of positions, and log-probs of tokens.

All logits of a batch are never in memory at once.
"""

from collections.abc import Sequence
from typing import Any, Literal, overload

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import saved_tensors_hooks

from torchtune.data import label_index
from torchtune.modules._outside_graphs import outside_graphs
from torchtune.modules.kernels.onednn import linear
from torchtune.modules.loss.custom_loss import Projection
from torchtune.modules.output_projection import CappedLinear, soft_cap

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
        if isinstance(tied_module, nn.Embedding | nn.Linear):  # not an embedding with other trained rows
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
        parameters: list[Tensor | None] = []
        if self.is_plain:
            parameters = [self._weight, self._bias]
        else:
            module = getattr(self._projection, "tied_module", self._projection)
            if isinstance(module, nn.Module):
                parameters = list(module.parameters())
        return [parameter for parameter in parameters if parameter is not None and parameter.requires_grad]

    def rows_of(self, elements: int) -> int:
        """Return the number of positions, at least 1, whose logits have about this many elements."""
        weight = self._weight if self.is_plain else self._projection.weight
        vocab_size = len(_local_shard(weight))
        return max(1, elements // vocab_size)

    def __call__(self, hidden: Tensor) -> Tensor:
        """Compute logits [n, v] of hidden states [n, d], which the caller may overwrite; with a group, its shard."""
        if not self.is_plain:
            # A copy, because the caller overwrites the logits and the module may need its output in its backward pass.
            return self._projection(hidden).clone()
        weight = _local_shard(self._weight)  # [v, d]
        bias = _local_shard(self._bias)  # [v]
        logits = linear(hidden.to(weight.dtype), weight, bias)  # [n, v]
        return soft_cap(logits, self._softcap)

    def gather_columns(self, logits: Tensor, size: int) -> Tensor:
        """Return the first ``size`` columns of ``logits``, all-gathered with a group, in at least float32."""
        if self.group is not None:
            from torchtune.modules.parallel.collectives import gather_vocabulary  # slow to import

            logits = gather_vocabulary(logits, self.group)
        return at_least_float32(logits[:, :size])


def _is_sharded(parameter: Tensor | None) -> bool:
    return hasattr(parameter, "device_mesh")


def _local_shard(parameter: Tensor | None) -> Tensor | None:
    if _is_sharded(parameter):
        return parameter.to_local()
    return parameter


def at_least_float32(x: Tensor) -> Tensor:
    """Convert to float32; float64 is kept."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _unchanged(tensor: Tensor) -> Tensor:
    return tensor


def kept_on_device() -> saved_tensors_hooks:
    """Context of the graph of a chunk, which is used at once: the hooks replace those that offload activations."""
    return saved_tensors_hooks(_unchanged, _unchanged)


def chunk_slices(num_rows: int, chunk_rows: int) -> list[slice]:
    """Return the slices of chunks; without positions an empty one, so that every rank runs the same projection."""
    starts = range(0, max(num_rows, 1), chunk_rows)
    return [slice(start, start + chunk_rows) for start in starts]


class _Gradients:
    """Gradients of hidden states and of the projection's parameters, which are summed in at least float32.

    Args:
        hidden: hidden states [n, d].
        parameters: parameters of the projection that need gradients.
        needs_hidden: whether the hidden states need one.
    """

    def __init__(self, hidden: Tensor, parameters: Sequence[Tensor], needs_hidden: bool) -> None:
        self.parameters = parameters
        self.of_hidden: Tensor | None = None
        if needs_hidden:
            self.of_hidden = torch.zeros_like(hidden)
        self.of_parameters: list[Tensor | None] = [None] * len(parameters)

    def of_chunk(self, hidden: Tensor, outputs: Any, output_gradients: Any) -> list[Tensor | None]:
        """Return the gradients of a chunk's hidden states, a leaf [n, d], if it needs one, and of every parameter."""
        inputs = list(self.parameters)
        if hidden.requires_grad:
            inputs.insert(0, hidden)
        return list(torch.autograd.grad(outputs, inputs, output_gradients, allow_unused=True))

    def add(self, rows: slice, gradients: list[Tensor | None]) -> None:
        """Add the gradients of a chunk, from :meth:`of_chunk`."""
        of_parameters = gradients
        if self.of_hidden is not None:
            self.of_hidden[rows] = gradients[0]
            of_parameters = gradients[1:]
        for index, gradient in enumerate(of_parameters):
            if gradient is None:
                continue
            total = self.of_parameters[index]
            if total is None:
                # The gradient of a single chunk keeps its dtype: no copy in float32 is made where nothing is summed.
                self.of_parameters[index] = gradient
            else:
                self.of_parameters[index] = at_least_float32(total).add_(gradient)

    def result(self) -> list[Tensor | None]:
        """Return the gradients of the hidden states and of every parameter."""
        gradients = [self.of_hidden]
        for gradient, parameter in zip(self.of_parameters, self.parameters, strict=True):
            if gradient is None:  # no chunk has read it, for example the adapter of another layer
                gradients.append(torch.zeros_like(parameter))
            else:
                gradients.append(gradient.to(parameter.dtype))
        return gradients


class ChunkedSum:
    """Sum of the losses of positions, whose logits are computed chunk by chunk.

    The sum weighs positions by numbers that are known before the backward pass. The gradients of a chunk are therefore
    computed beside its losses, from the same logits, and the backward pass only scales them::

        chunked = ChunkedSum(hidden, logits)
        for rows in chunk_slices(len(hidden), chunk_rows):
            losses, gradients = ...  # a function of its own, with the three steps below, frees the logits on return
            chunked.add(rows, losses, gradients)
            del gradients
        total = chunked.total()

    The three steps are :meth:`chunk_hidden`, the losses of ``logits(chunk)``, and :meth:`chunk_gradients`.

    Args:
        hidden: hidden states [n, d].
        logits: the output projection.

    Attributes:
        needs_gradients: whether anything gets a gradient.
    """

    def __init__(self, hidden: Tensor, logits: Logits) -> None:
        self.logits = logits
        self._hidden = hidden
        self._sums: list[Tensor] = []  # scalars
        parameters = logits.parameters
        self.needs_gradients = torch.is_grad_enabled() and (hidden.requires_grad or bool(parameters))
        self._gradients: _Gradients | None = None
        if self.needs_gradients:
            self._gradients = _Gradients(hidden, parameters, hidden.requires_grad)

    def chunk_hidden(self, rows: slice) -> Tensor:
        """Return the hidden states [n, d] of a chunk, a leaf where its graph ends."""
        needs_gradient = self.needs_gradients and self._hidden.requires_grad
        return self._hidden[rows].detach().requires_grad_(needs_gradient)

    def chunk_gradients(
        self, chunk_hidden: Tensor, outputs: Tensor, output_gradients: Tensor | None = None
    ) -> list[Tensor | None]:
        """Compute the gradients of a chunk, for :meth:`add`.

        Args:
            chunk_hidden: result of :meth:`chunk_hidden`.
            outputs: losses [n], or logits [n, v] whose gradient is known.
            output_gradients: gradients of the sum with respect to the outputs; None: each is 1.
        """
        if self._gradients is None:
            return []
        if output_gradients is None:
            output_gradients = torch.ones_like(outputs)
        return self._gradients.of_chunk(chunk_hidden, outputs, output_gradients)

    def add(self, rows: slice, losses: Tensor, gradients: list[Tensor | None]) -> None:
        """Add the losses [n] of a chunk, and its gradients from :meth:`chunk_gradients`."""
        self._sums.append(losses.sum())
        if self._gradients is not None:
            self._gradients.add(rows, gradients)

    def total(self) -> Tensor:
        """Return the sum.

        Returns:
            Scalar; differentiable once. With a group, the gradient of the hidden states is a partial sum.
        """
        if self._gradients is None:
            return torch.stack(self._sums).sum()
        return _SumWithGradients.apply(self._sums, self._gradients, self._hidden, *self._gradients.parameters)


class _SumWithGradients(torch.autograd.Function):
    """Sum of scalars, with the gradients of hidden states and parameters that were computed beside them."""

    @staticmethod
    def forward(ctx: Any, sums: list[Tensor], gradients: _Gradients, hidden: Tensor, *parameters: Tensor) -> Tensor:
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
        gradients = ctx.gradients
        ctx.gradients = None
        for gradient in gradients:
            if gradient is not None:
                gradient.mul_(grad)  # in place, as this backward pass is the only one
        return None, None, *gradients


class _ChunkedLogProbs(torch.autograd.Function):
    """Log-probs of targets, and entropies; the backward pass computes the logits again.

    The loss may weigh positions by their log-probs, so that no gradient is known before the backward pass.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        targets: Tensor,
        logits: Logits,
        temperature: float,
        chunk_rows: int,
        with_entropy: bool,
        *parameters: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(hidden, targets)
        ctx.logits = logits
        ctx.temperature = temperature
        ctx.chunk_rows = chunk_rows
        ctx.with_entropy = with_entropy
        chunks = []
        for rows in chunk_slices(len(hidden), chunk_rows):
            # No name for the logits: it would keep them while the next chunk's are computed.
            values = log_probs_of_rows(
                logits(hidden[rows]), targets[rows], logits.group, temperature, with_entropy=with_entropy
            )
            chunks.append(values)
        # Tuples of chunks -> a tuple of tensors [n].
        return tuple(torch.cat(values) for values in zip(*chunks, strict=True))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, targets = ctx.saved_tensors
        needs_hidden = ctx.needs_input_grad[0]
        gradients = _Gradients(hidden, ctx.logits.parameters, needs_hidden)
        for rows in chunk_slices(len(hidden), ctx.chunk_rows):
            with torch.enable_grad(), kept_on_device():
                chunk = hidden[rows].detach().requires_grad_(needs_hidden)  # [n, d]
                values = log_probs_of_rows(
                    ctx.logits(chunk), targets[rows], ctx.logits.group, ctx.temperature, with_entropy=ctx.with_entropy
                )
                chunk_gradients = gradients.of_chunk(chunk, values, [grad[rows] for grad in grads])
            del values  # their graph holds the logits
            gradients.add(rows, chunk_gradients)
            del chunk_gradients  # one is of the output weight: before the next chunk allocates its own
        of_hidden, *of_parameters = gradients.result()
        return of_hidden, None, None, None, None, None, *of_parameters


def log_probs_of_rows(
    logits: Tensor, targets: Tensor, group: dist.ProcessGroup | None, temperature: float = 1.0, *, with_entropy: bool
) -> tuple[Tensor, ...]:
    """Compute the target's log-prob of every row, [n], and the entropy of the row's distribution if asked for.

    Args:
        logits: [n, v]; with a group, this rank's shard of the vocabulary.
        targets: int64 [n].
        group: process group of the shards.
        temperature: divisor of the logits.
        with_entropy: also return the entropies, [n].

    Returns:
        One or two tensors, at least float32.
    """
    logits = at_least_float32(logits)
    if temperature != 1.0:
        logits = logits / temperature
    shifted, _, target_logits = shift_rows(logits, targets, group)
    exp = shifted.exp()
    sums = {"exp": exp.sum(-1), "target": target_logits}  # over the vocabulary, [n] each
    if with_entropy:
        finite = shifted.clamp(min=-1e30)  # 0 · -inf would be NaN
        sums["exp · logit"] = (exp * finite).sum(-1)
    if group is not None:  # the shifted logits of all shards have the same maximum subtracted, so that sums add up
        sums = sum_over_shards(sums, group)
    total = sums["exp"]
    log_probs = sums["target"] - total.log()
    if not with_entropy:
        return (log_probs,)
    # −Σ p log p, with log p = shifted − log total and p = exp / total.
    entropies = total.log() - sums["exp · logit"] / total
    return log_probs, entropies


def sum_over_shards(sums: dict[str, Tensor], group: dist.ProcessGroup) -> dict[str, Tensor]:
    """Sum values of rows, [n] by name, over the shards of the vocabulary: in one all-reduce."""
    from torchtune.modules.parallel.collectives import sum_of_equals  # slow to import

    stacked = torch.stack(list(sums.values()))  # [sums, n]
    totals = sum_of_equals(stacked, group)
    return dict(zip(sums, totals, strict=True))


def shift_rows(logits: Tensor, targets: Tensor, group: dist.ProcessGroup | None) -> tuple[Tensor, Tensor, Tensor]:
    """Subtract the largest logit of every row, over all shards of the vocabulary.

    Args:
        logits: [n, v]; with a group, this rank's shard.
        targets: int64 [n].
        group: process group of the shards.

    Returns:
        The shifted logits [n, v], the largest logits [n], and the shifted logits of the targets [n], which are 0 for
        targets in the shard of another rank.
    """
    columns = targets.unsqueeze(-1)  # [n, 1]
    largest = logits.detach().amax(-1, keepdim=True)  # [n, 1]
    if group is not None:
        # Every rank subtracts the same number, so that sums of exponentials can be added.
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
        columns = columns - group.rank() * logits.shape[1]
    is_outside = (columns < 0) | (columns >= logits.shape[1])
    # Without a group no target is masked: one that is no token must fail in gather.
    is_elsewhere = is_outside & (group is not None)
    shifted = logits - largest
    target_logits = shifted.gather(-1, columns.masked_fill(is_elsewhere, 0))
    target_logits = target_logits.masked_fill(is_elsewhere, 0.0).squeeze(-1)  # [n]
    return shifted, largest.squeeze(-1), target_logits


# Default number of logits per chunk.
_CHUNK_ELEMENTS = 2**25


@outside_graphs
def _log_probs(
    hidden: Tensor,
    targets: Tensor,
    logits: Logits,
    temperature: float,
    chunk_rows: int,
    *,
    with_entropy: bool,
) -> tuple[Tensor, ...]:
    """Log-probs [n] of the targets of hidden states [n, d], and entropies [n] if asked for."""
    return _ChunkedLogProbs.apply(hidden, targets, logits, temperature, chunk_rows, with_entropy, *logits.parameters)


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
    width = weight.shape[1]
    if hidden.shape != (targets.shape[0], width) or targets.dim() != 1:
        raise ValueError(
            f"linear_log_probs: hidden is {list(hidden.shape)} and targets {list(targets.shape)}, expected "
            f"[t, {width}] and [t]: flatten batches, and keep the tokens that have a target."
        )
    if temperature <= 0 or (chunk_rows is not None and chunk_rows < 1):
        raise ValueError(f"linear_log_probs: temperature {temperature} and chunk_rows {chunk_rows} must be positive.")
    logits = Logits(weight, bias, softcap)
    chunk_rows = chunk_rows or logits.rows_of(_CHUNK_ELEMENTS)
    log_probs, *entropies = _log_probs(hidden, targets, logits, temperature, chunk_rows, with_entropy=return_entropy)
    if return_entropy:
        return log_probs, entropies[0]
    return log_probs


def token_log_probs(
    hidden: Tensor,
    labels: Tensor,
    projection: Projection,
    temperature: float = 1.0,
    *,
    return_entropy: bool = False,
    index: Tensor | None = None,
) -> Any:
    """Compute the log-probs of labels, with logits only of labeled tokens and chunk by chunk.

    Args:
        hidden: result of ``model(..., output="hidden")`` ``[b, s, d]``.
        labels: int64 ``[b, s]``, already shifted: ``labels[i]`` is predicted at position ``i``.
        projection: ``model.output``.
        temperature: divisor of the logits.
        return_entropy: also return the entropy of the distribution at each label.
        index: int64 ``[n]``, positions of the labels in the flattened batch. Without them, the host waits for the
            device to find their number.

    Returns:
        Tensor ``[b, s]`` in nats, float32 (float64 for float64 weights), 0 without a label. Differentiable once. With
        ``return_entropy`` also the entropies, a tensor like it.

    Example:
        >>> from torchtune.modules.loss import token_log_probs
        >>> hidden, labels = torch.zeros(1, 3, 8), torch.tensor([[0, -100, 1]])
        >>> token_log_probs(hidden, labels, torch.nn.Linear(8, 4, bias=False)).exp()
        tensor([[0.2500, 1.0000, 0.2500]], grad_fn=...)
    """
    flat_labels = labels.flatten()  # [b * s]
    if index is None:
        index = label_index(flat_labels)
    rows = hidden.flatten(0, -2).index_select(0, index)  # [n, d]
    targets = flat_labels.index_select(0, index)  # [n]
    logits = Logits.of(projection)
    chunk_rows = logits.rows_of(_CHUNK_ELEMENTS)
    values_of_rows = _log_probs(rows, targets, logits, temperature, chunk_rows, with_entropy=return_entropy)
    values_of_batch = []  # log-probs, and entropies if asked for
    for values in values_of_rows:  # [n]
        zeros = values.new_zeros(len(flat_labels))  # [b * s]
        values_of_positions = zeros.index_copy(0, index, values)
        values_of_batch.append(values_of_positions.view(labels.shape))
    if return_entropy:
        return values_of_batch
    return values_of_batch[0]

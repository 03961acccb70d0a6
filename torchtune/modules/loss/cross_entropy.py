"""Cross entropy of labeled tokens, and functions of logits that are computed chunk by chunk.

All logits of a batch are never in memory at once.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import GradientEdge

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


def _start_of_sum(values: Tensor) -> tuple[Tensor | GradientEdge, Tensor]:
    """Return where autograd starts to compute the gradients of the sum of ``values``, and the gradient there."""
    node = values.grad_fn
    if node is not None and node.name() == "_CrossEntropyBackward":
        # It starts from the logits, which hold their gradient: a product with ones would be another pass over them.
        return GradientEdge(*node.next_functions[0]), node.gradient.detach()
    return values, torch.ones_like(values)


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
            outputs = values
            if grads is None:
                outputs, grads = _start_of_sum(values)
            inputs = list(self.parameters)
            if chunk.requires_grad:
                inputs.insert(0, chunk)
            input_grads = list(torch.autograd.grad(outputs, inputs, grads, allow_unused=True))
            del outputs, grads  # they may be the logits
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
    shifted, _, target_logits = _shift_rows(at_least_float32(logits), targets, group)
    exp = shifted.exp()
    sums = {"exp": exp.sum(-1), "target": target_logits}  # over the vocabulary, [n] each
    if with_entropy:
        sums["exp · logit"] = (exp * shifted.clamp(min=-1e30)).sum(-1)  # clamped, as 0 · -inf would be NaN
    if group is not None:
        sums = _sum_over_shards(sums, group)
    total = sums["exp"]
    log_probs = sums["target"] - total.log()
    if not with_entropy:
        return (log_probs,)
    # −Σ p log p, with log p = shifted − log total and p = exp / total.
    entropies = total.log() - sums["exp · logit"] / total
    return log_probs, entropies


def _sum_over_shards(sums: dict[str, Tensor], group: dist.ProcessGroup) -> dict[str, Tensor]:
    """Sum values of rows, [n] by name, over the shards of the vocabulary: in one all-reduce."""
    from torchtune.modules.parallel.collectives import sum_of_equals  # slow to import

    totals = sum_of_equals(torch.stack(list(sums.values())), group)
    return dict(zip(sums, totals, strict=True))


def _shift_rows(logits: Tensor, targets: Tensor, group: dist.ProcessGroup | None) -> tuple[Tensor, Tensor, Tensor]:
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
    # Without a group no target is masked: one that is no token must fail in gather.
    is_elsewhere = ((columns < 0) | (columns >= logits.shape[1])) & (group is not None)
    shifted = logits - largest
    target_logits = shifted.gather(-1, columns.masked_fill(is_elsewhere, 0))
    target_logits = target_logits.masked_fill(is_elsewhere, 0.0).squeeze(-1)  # [n]
    return shifted, largest.squeeze(-1), target_logits


# Smaller chunks make the products slow and save little memory. The gradient of a trained weight takes more memory than
# the logits of 512 positions.
_MIN_CHUNK_ROWS = 256
_MIN_CHUNK_ROWS_TRAINED = 512

# Number of logits per softmax block; on CPU small enough to stay in cache.
_CPU_BLOCK = 2**19
LOGITS_BLOCK = 2**26

# Number of products of probabilities and logits that are in memory at once; on CPU 1 MiB, which stays in cache and is
# not returned to the system each time.
_CPU_PRODUCT_BLOCK = 2**18
_PRODUCT_BLOCK = 2**23

# Likeliest tokens over which EAFT measures the entropy, and the largest entropy of so many, about log(20).
_EAFT_TOKENS = 20
_EAFT_LARGEST = 3.0


@dataclass(frozen=True)
class LossTerms:
    """Terms of the loss of a token beside its cross entropy; see :class:`LinearCrossEntropyLoss`.

    Attributes:
        label_smoothing: part of the target that is spread over all tokens.
        z_loss: factor of the squared log-normalizer.
        reweighting: factor of the cross entropy.
        eaft_alpha: exponent of the factor ``eaft``.
    """

    label_smoothing: float = 0.0
    z_loss: float = 0.0
    reweighting: Literal["dft", "eaft"] | None = None
    eaft_alpha: float = 1.0

    @property
    def is_plain(self) -> bool:
        """Whether the loss is the cross entropy alone."""
        return not self.label_smoothing and not self.z_loss and self.reweighting is None

    def factors(self, losses: Tensor, top_logits: Callable[[int], Tensor]) -> Tensor:
        """Return the detached factors of the cross entropies ``losses``, [n].

        Args:
            losses: cross entropies [n].
            top_logits: number k -> the k largest logits of every row, [n, k] or fewer.
        """
        losses = losses.detach()
        if self.reweighting == "dft":
            return torch.exp(-losses)
        if self.reweighting == "eaft":
            log_probs = torch.log_softmax(at_least_float32(top_logits(_EAFT_TOKENS).detach()), -1)  # [n, k]
            entropies = -(log_probs.exp() * log_probs).sum(-1)
            return (entropies.to(losses.dtype) / _EAFT_LARGEST).pow(self.eaft_alpha)
        return torch.ones_like(losses)


# (logits, target) -> losses of rows, and perhaps statistics of rows; overwrites the logits with their gradient.
RowLosses = Callable[[Tensor, Tensor], tuple[Tensor, ...]]


def row_losses(
    logits: Tensor, target: Tensor, terms: LossTerms = LossTerms(), *, with_statistics: bool = False
) -> tuple[Tensor, ...]:
    """Compute the loss of every row [n], and overwrite ``logits`` [n, v] with its gradient, such as softmax − one-hot.

    The largest probability is 1 / Σ exp(logit − largest logit), which gives the normalizer without another pass.

    Args:
        logits: [n, v].
        target: int64 [n].
        terms: terms beside the cross entropy.
        with_statistics: also return whether the target has the largest logit, bool [n], and the entropies of the
            softmax, [n].
    """
    compute = torch.promote_types(logits.dtype, torch.float32)
    column = target.unsqueeze(-1)
    largest = logits.amax(-1).to(compute)  # [n]
    margins = largest - logits.gather(-1, column).squeeze(-1)
    gradient = torch.softmax(logits, -1, dtype=compute)  # [n, v], not the gradient yet
    largest_log_probs = gradient.amax(-1).log_()  # −log Σ exp(logit − largest)
    losses = margins - largest_log_probs
    statistics: tuple[Tensor, ...] = ()
    if with_statistics:
        # −Σ p log p, with log p = logit − largest + largest log p.
        entropies = largest - largest_log_probs - _dot_rows(gradient, logits)
        statistics = (margins == 0, entropies)
    if terms.is_plain:
        gradient.scatter_(-1, column, -1, reduce="add")
    else:
        losses = _add_terms(terms, losses, largest - largest_log_probs, logits, gradient, column)
    logits.copy_(gradient)
    return losses, *statistics


def _dot_rows(probabilities: Tensor, logits: Tensor) -> Tensor:
    """Return Σ p · logit of every row, [n], without a tensor of all products."""
    if torch.compiler.is_compiling():
        return (probabilities * logits).sum(-1)  # one kernel
    on_cpu = computes_on_cpu(logits.device)
    rows = max(1, (_CPU_PRODUCT_BLOCK if on_cpu else _PRODUCT_BLOCK) // logits.shape[1])
    sums = []
    for block, block_logits in zip(probabilities.split(rows), logits.split(rows), strict=True):
        factors = block_logits.to(block.dtype) if on_cpu else block_logits  # a CPU is slow with two dtypes
        sums.append((block * factors).sum(-1))
    return torch.cat(sums)


def _add_terms(
    terms: LossTerms, losses: Tensor, log_normalizers: Tensor, logits: Tensor, gradient: Tensor, column: Tensor
) -> Tensor:
    """Return the losses with other terms, and convert the softmax in ``gradient`` to their gradient.

    Args:
        terms: the terms.
        losses: cross entropies [n].
        log_normalizers: log Σ exp(logit) [n].
        logits: [n, v].
        gradient: softmax [n, v], overwritten.
        column: targets [n, 1].
    """
    smoothing = terms.label_smoothing
    factors = terms.factors(losses, lambda k: logits.topk(min(k, logits.shape[-1]), -1).values)  # [n]
    if smoothing:
        # The mean over all tokens of −log p, with log p = logit − log normalizer.
        uniform_losses = log_normalizers - logits.mean(-1, dtype=gradient.dtype)
        losses = (1.0 - smoothing) * losses + smoothing * uniform_losses
    losses = factors * losses + terms.z_loss * log_normalizers.square()
    # The gradient of the log normalizer is the softmax.
    gradient.mul_((factors + 2.0 * terms.z_loss * log_normalizers).unsqueeze(-1))
    if smoothing:
        gradient.sub_(smoothing / logits.shape[-1])
    gradient.scatter_add_(-1, column, (smoothing - 1.0) * factors.unsqueeze(-1))
    return losses


def sharded_row_losses(
    logits: Tensor, target: Tensor, group: dist.ProcessGroup, terms: LossTerms, *, with_statistics: bool
) -> tuple[Tensor, ...]:
    """As :func:`row_losses`, from this rank's shard of the vocabulary; autograd computes the gradient.

    Args:
        logits: this rank's shard [n, v].
        target: int64 [n], equal on all ranks.
        group: process group of the shards, which have equally many columns.
        terms: terms beside the cross entropy.
        with_statistics: also return whether the target has the largest logit, and the entropies.
    """
    from torchtune.modules.parallel.collectives import gather_vocabulary  # slow to import

    logits = at_least_float32(logits)
    shifted, largest, target_logits = _shift_rows(logits, target, group)
    exp = shifted.exp()
    sums = {"exp": exp.sum(-1), "target": target_logits}  # over the vocabulary, [n] each
    if with_statistics:
        # Clamped, as 0 · -inf would be NaN.
        sums["exp · logit"] = (exp.detach() * shifted.detach().clamp(min=-1e30)).sum(-1)
    if terms.label_smoothing:
        sums["logit"] = shifted.sum(-1)
    sums = _sum_over_shards(sums, group)
    log_totals = sums["exp"].log()
    losses = log_totals - sums["target"]
    statistics: tuple[Tensor, ...] = ()
    if with_statistics:
        entropies = log_totals - sums["exp · logit"] / sums["exp"]
        has_largest = sums["target"] == 0  # of the shifted logits
        statistics = (has_largest.detach(), entropies.detach())
    if terms.is_plain:
        return losses, *statistics

    def top_logits(k: int) -> Tensor:
        """Return the largest logits of all shards, from the largest of each."""
        top = logits.detach().topk(min(k, logits.shape[1]), -1).values
        candidates = gather_vocabulary(top, group)
        return candidates.topk(min(k, candidates.shape[1]), -1).values

    factors = terms.factors(losses, top_logits)
    if terms.label_smoothing:
        num_tokens = logits.shape[1] * group.size()
        uniform_losses = log_totals - sums["logit"] / num_tokens
        losses = (1.0 - terms.label_smoothing) * losses + terms.label_smoothing * uniform_losses
    return factors * losses + terms.z_loss * (largest + log_totals).square(), *statistics


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, function: RowLosses) -> tuple[Tensor, ...]:
        block = _CPU_BLOCK if computes_on_cpu(logits.device) else LOGITS_BLOCK
        rows = max(1, block // logits.shape[1])
        # Detached: the compiler refuses views that were made without gradients of a tensor that has one, once another
        # view has changed it in place.
        values = logits.detach()
        blocks = [
            function(block_logits, block_target)
            for block_logits, block_target in zip(values.split(rows), target.split(rows), strict=True)
        ]
        ctx.gradient = logits  # overwritten by the function
        ctx.rows = rows
        losses, *statistics = blocks[0]
        if len(blocks) > 1:  # tuples of blocks -> a tuple of tensors [n]
            losses, *statistics = [torch.cat(tensors) for tensors in zip(*blocks, strict=True)]
        ctx.mark_non_differentiable(*statistics)
        return losses, *statistics

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Tensor | None) -> tuple[Tensor, None, None]:
        factors = grad.unsqueeze(-1)
        if not computes_on_cpu(grad.device):
            return ctx.gradient.mul_(factors), None, None
        # On a CPU, torch multiplies bfloat16 by float32 in 15 times the time that it takes with a cast of small blocks.
        for block, factor in zip(ctx.gradient.split(ctx.rows), factors.split(ctx.rows), strict=True):
            block.copy_(block.to(factor.dtype).mul_(factor))
        return ctx.gradient, None, None


def cross_entropy(logits: Tensor, target: Tensor, function: RowLosses = row_losses) -> tuple[Tensor, ...]:
    """Compute the loss of every row, at least float32 [n], without another tensor of the logits' size.

    Args:
        logits: [n, v], overwritten with their gradient.
        target: int64 [n].
        function: :func:`row_losses` with its options, or compiled.

    Returns:
        The losses, and the statistics of the function, without gradients.
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
        label_smoothing: ε, part of the target that is spread evenly over all tokens: the loss of a token is
            ``(1 − ε)(−log p) + ε · mean over all tokens of −log p``, as in ``torch.nn.CrossEntropyLoss``.
        z_loss: factor z of ``z · log² Σ exp(logit)``, which keeps logits from drifting (PaLM, arXiv:2204.02311, with
            1e-4).
        reweighting: factor of a token's cross entropy, without a gradient of its own: ``dft``, its probability p
            (dynamic fine-tuning, arXiv:2508.05629, as ``loss_type="dft"`` of TRL), for answers that are to be imitated
            only where the model finds them plausible; ``eaft``, ``(H₂₀ / 3)^α`` with the entropy H₂₀ of the
            renormalized 20 likeliest tokens (entropy-adaptive fine-tuning, arXiv:2601.02151, with the constants of
            ``use_eaft_loss`` of LLaMA-Factory 0.9.5), which learns less where the model is sure of another token.
        eaft_alpha: exponent α of ``eaft``.

    Raises:
        ValueError: a number is out of its range, the reweighting is unknown, or it comes with label smoothing.

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
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        reweighting: Literal["dft", "eaft"] | None = None,
        eaft_alpha: float = 1.0,
    ) -> None:
        super().__init__()
        if num_output_chunks < 1:
            raise ValueError(f"num_output_chunks is {num_output_chunks}: it must be at least 1.")
        if not 0 <= label_smoothing < 1:
            raise ValueError(f"label_smoothing is {label_smoothing}: a part of the target is from 0 to below 1.")
        if not 0 <= z_loss < math.inf:
            raise ValueError(f"z_loss is {z_loss}: it must be at least 0, and finite, for example 1e-4.")
        if reweighting not in (None, "dft", "eaft"):
            raise ValueError(f"reweighting is {reweighting!r}: it must be dft or eaft, or left out.")
        if reweighting is not None and label_smoothing:
            raise ValueError(
                f"reweighting is {reweighting} and label_smoothing {label_smoothing}: the factor of a token is that of "
                "its own probability, not of a spread target: set one of the two."
            )
        if not 0 < eaft_alpha < math.inf:
            raise ValueError(f"eaft_alpha is {eaft_alpha}: it must be above 0, and finite.")
        self.num_output_chunks = num_output_chunks
        self.ignore_index = ignore_index
        self.tp_enabled = tp_enabled
        self.mask_ignored_tokens = mask_ignored_tokens
        # In a tuple, so that the projection does not become a submodule.
        self._projection: tuple[Any, ...] = ()
        self._terms = LossTerms(label_smoothing, z_loss, reweighting, eaft_alpha)
        self._row_losses: Callable[..., tuple[Tensor, ...]] = row_losses

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
        losses, *_ = self._losses_with_ignored(logits(hidden_chunk), target_chunk, logits)
        return losses.sum()

    def _losses(
        self, logits: Tensor, target: Tensor, projection: Logits, *, with_statistics: bool = False
    ) -> tuple[Tensor, ...]:
        """Losses [n] of logits [n, v], which are overwritten, with a known target [n] in each row; and statistics."""
        if projection.group is not None:
            return sharded_row_losses(logits, target, projection.group, self._terms, with_statistics=with_statistics)
        function = partial(self._row_losses, terms=self._terms, with_statistics=with_statistics)
        return cross_entropy(logits, target, function)

    def _losses_with_ignored(
        self, logits: Tensor, target: Tensor, projection: Logits, *, with_statistics: bool = False
    ) -> tuple[Tensor, ...]:
        """As :meth:`_losses`; 0 for ignored tokens."""
        is_ignored = target == self.ignore_index
        target = target.masked_fill(is_ignored, 0)
        values = self._losses(logits, target, projection, with_statistics=with_statistics)
        return tuple(value.masked_fill(is_ignored, 0) for value in values)

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
        metrics: dict[str, tuple[Tensor, Tensor]] | None = None,
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
            metrics: dict to which ``token_accuracy``, whether a label has the largest logit, and ``entropy``, the
                entropy of the prediction in nats, are added as (sum, number of labels), for values that are logged.

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

        correct_sums: list[Tensor] = []  # a scalar of each chunk
        entropy_sums: list[Tensor] = []

        def losses(chunk: Tensor, rows: slice) -> Tensor:
            values, *statistics = chunk_losses(chunk, target[rows], logits, with_statistics=metrics is not None)  # [n]
            if metrics is not None:
                is_correct, entropies = statistics
                correct_sums.append(is_correct.sum())
                entropy_sums.append(entropies.sum())
            if row_losses is not None:
                row_losses.append(values.detach())
            return values if row_weights is None else values * row_weights[rows]

        trained = projection.weight if logits.is_plain and logits.parameters else None
        chunk_rows = choose_chunk_rows(len(target), self.num_output_chunks, trained)
        total = chunked_sum(hidden, losses, logits, chunk_rows)
        if metrics is not None:
            num_labels = is_labeled.sum()
            metrics["token_accuracy"] = (torch.stack(correct_sums).sum(), num_labels)
            metrics["entropy"] = (torch.stack(entropy_sums).sum(), num_labels)
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
        lengths = [logits.shape[1] for logits in outputs]
        total: Tensor | int = 0
        for logits, chunk_targets in zip(outputs, targets.split(lengths, dim=1), strict=True):
            logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
            total = total + nn.functional.cross_entropy(
                logits.flatten(0, 1), chunk_targets.flatten(), ignore_index=self.ignore_index, reduction="sum"
            )
        count = (targets != self.ignore_index).sum()
        return total / count.clamp(min=1)

"""Cross entropy of labeled tokens, and the loss of models with a classification head."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from torchtune.data import label_index
from torchtune.modules._outside_graphs import outside_graphs
from torchtune.modules.loss.chunked_logits import (
    ChunkedSum,
    Logits,
    at_least_float32,
    chunk_slices,
    kept_on_device,
    shift_rows,
    sum_over_shards,
)
from torchtune.modules.loss.custom_loss import LossError, Projection, SFTLoss, zero_loss
from torchtune.utils import computes_on_cpu, deprecated

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

# Number of likeliest tokens over which EAFT measures the entropy, and their largest entropy, about log(20).
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
            top = at_least_float32(top_logits(_EAFT_TOKENS).detach())
            log_probs = torch.log_softmax(top, -1)  # [n, k]
            entropies = -(log_probs.exp() * log_probs).sum(-1)
            uncertainty = entropies.to(losses.dtype) / _EAFT_LARGEST
            return uncertainty.pow(self.eaft_alpha)
        return torch.ones_like(losses)


def cross_entropy_(
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
        gradient.scatter_(-1, column, -1, reduce="add")  # softmax − one-hot
    else:
        log_normalizers = largest - largest_log_probs  # log Σ exp(logit), [n]
        losses = _add_terms(terms, losses, log_normalizers, logits, gradient, column)
    logits.copy_(gradient)  # last, because the terms and statistics read the logits
    return losses, *statistics


def _dot_rows(probabilities: Tensor, logits: Tensor) -> Tensor:
    """Return Σ p · logit of every row, [n], without a tensor of all products."""
    if torch.compiler.is_compiling():
        return (probabilities * logits).sum(-1)  # one kernel
    on_cpu = computes_on_cpu(logits.device)
    block_elements = _CPU_PRODUCT_BLOCK if on_cpu else _PRODUCT_BLOCK
    rows = max(1, block_elements // logits.shape[1])
    sums = []
    for block, block_logits in zip(probabilities.split(rows), logits.split(rows), strict=True):
        if on_cpu:
            block_logits = block_logits.to(block.dtype)  # a CPU is slow with two dtypes
        sums.append((block * block_logits).sum(-1))
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
    vocab_size = logits.shape[-1]
    factors = terms.factors(losses, lambda k: logits.topk(min(k, vocab_size), -1).values)  # [n]
    if smoothing:
        # The mean over all tokens of −log p, with log p = logit − log normalizer.
        uniform_losses = log_normalizers - logits.mean(-1, dtype=gradient.dtype)
        losses = (1.0 - smoothing) * losses + smoothing * uniform_losses
    losses = factors * losses + terms.z_loss * log_normalizers.square()
    # The gradient of the log normalizer is the softmax.
    softmax_factors = factors + 2.0 * terms.z_loss * log_normalizers
    gradient.mul_(softmax_factors.unsqueeze(-1))
    if smoothing:
        gradient.sub_(smoothing / vocab_size)
    gradient.scatter_add_(-1, column, (smoothing - 1.0) * factors.unsqueeze(-1))
    return losses


def sharded_cross_entropy(
    logits: Tensor, target: Tensor, group: dist.ProcessGroup, terms: LossTerms, *, with_statistics: bool
) -> tuple[Tensor, ...]:
    """As :func:`cross_entropy_`, from this rank's shard of the vocabulary; autograd computes the gradient.

    Args:
        logits: this rank's shard [n, v].
        target: int64 [n], equal on all ranks.
        group: process group of the shards, which have equally many columns.
        terms: terms beside the cross entropy.
        with_statistics: also return whether the target has the largest logit, and the entropies.
    """
    from torchtune.modules.parallel.collectives import gather_vocabulary  # slow to import

    logits = at_least_float32(logits)
    shifted, largest, target_logits = shift_rows(logits, target, group)
    exp = shifted.exp()
    sums = {"exp": exp.sum(-1), "target": target_logits}  # over the vocabulary, [n] each
    if with_statistics:
        finite = shifted.detach().clamp(min=-1e30)  # 0 · -inf would be NaN
        sums["exp · logit"] = (exp.detach() * finite).sum(-1)
    if terms.label_smoothing:
        sums["logit"] = shifted.sum(-1)
    sums = sum_over_shards(sums, group)
    log_totals = sums["exp"].log()
    losses = log_totals - sums["target"]
    statistics: tuple[Tensor, ...] = ()
    if with_statistics:
        entropies = log_totals - sums["exp · logit"] / sums["exp"]
        has_largest = sums["target"] == 0  # the largest shifted logit of a row is 0
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
        uniform_losses = log_totals - sums["logit"] / num_tokens  # both of shifted logits: the shift cancels
        losses = (1.0 - terms.label_smoothing) * losses + terms.label_smoothing * uniform_losses
    log_normalizers = largest + log_totals  # of the logits before the shift
    return factors * losses + terms.z_loss * log_normalizers.square(), *statistics


def scale_rows_(logits_gradient: Tensor, factors: Tensor) -> None:
    """Multiply every row of a gradient [n, v] by its factor [n], in place."""
    factors = factors.unsqueeze(-1)  # [n, 1]
    if not computes_on_cpu(logits_gradient.device):
        logits_gradient.mul_(factors)
        return
    # On a CPU, a product of bfloat16 and float32 takes 15 times as long as one of small blocks cast first.
    rows = rows_per_block(logits_gradient)
    for block, block_factors in zip(logits_gradient.split(rows), factors.split(rows), strict=True):
        block.copy_(block.to(block_factors.dtype).mul_(block_factors))


def rows_per_block(logits: Tensor) -> int:
    """Return the number of rows of logits [n, v] whose softmax is computed at once."""
    block_elements = _CPU_BLOCK if computes_on_cpu(logits.device) else LOGITS_BLOCK
    return max(1, block_elements // logits.shape[1])


def choose_chunk_rows(rows: int, num_output_chunks: int, trained: Tensor | None) -> int:
    """Return the number of positions per chunk of logits.

    Args:
        rows: number of all positions.
        num_output_chunks: maximum number of chunks.
        trained: the output weight [v, d] if it gets a gradient.
    """
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
        tp_enabled: without effect, for configs of earlier releases: whether the projection is sharded is seen from it.
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
        # In a tuple, so that the projection does not become a submodule; empty before set_model_output.
        self._projection: tuple[Any, ...] = ()
        self._terms = LossTerms(label_smoothing, z_loss, reweighting, eaft_alpha)
        # Replaced by a compiled function in apply_compile_strategy.
        self._cross_entropy_: Callable[..., tuple[Tensor, ...]] = cross_entropy_

    @property
    def tp_requires_loss_parallel_ctx_manager(self) -> bool:
        """Always False: this loss supports a sharded weight without ``loss_parallel()``."""
        return False

    def apply_compile_strategy(self, *args: Any, **kwargs: Any) -> "LinearCrossEntropyLoss":
        """Compile the passes over a chunk's logits, but not the products and the loop over chunks."""
        self._cross_entropy_ = torch.compile(cross_entropy_, *args, **kwargs)
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
        if not self._projection:
            return None
        return self._projection[0]

    def compute_cross_entropy(self, hidden_chunk: Tensor, target_chunk: Tensor) -> Tensor:
        """Compute the summed cross entropy of some positions: hidden [n, d], targets [n] -> scalar."""
        total, _ = self.sum_and_count(hidden_chunk, target_chunk, self.linear_projection)
        return total

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

    @outside_graphs
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
        num_labels = is_labeled.sum()
        count = num_labels
        row_weights = None
        if weights is not None:
            count = (weights * is_labeled).sum()
            row_weights = weights.flatten()  # [b * s]
        hidden = hidden.flatten(0, -2)  # [b * s, d]
        target = labels.flatten()  # [b * s]
        is_ignored = None
        if self.mask_ignored_tokens:  # no logits of tokens without a label are computed
            if index is None:
                index = label_index(target, self.ignore_index)
            hidden, target = self.mask_inputs(hidden, target, index)  # [m, d], [m]
            if row_weights is not None:
                row_weights = row_weights.index_select(0, index)  # [m]
        else:
            is_ignored = target == self.ignore_index
            target = target.masked_fill(is_ignored, 0)  # any token, because the row's weight is 0
            if row_weights is None:
                row_weights = torch.ones_like(target, dtype=torch.float32)
            row_weights = row_weights.masked_fill(is_ignored, 0)

        logits = Logits.of(projection)
        trained = None  # the output weight, whose gradient decides the size of chunks
        if logits.is_plain and logits.parameters:
            trained = projection.weight
        chunk_rows = choose_chunk_rows(len(target), self.num_output_chunks, trained)
        chunked = ChunkedSum(hidden, logits)
        correct_sums: list[Tensor] = []  # a scalar of each chunk
        entropy_sums: list[Tensor] = []
        # Without labels one empty chunk, so that this rank runs the collectives of the other ranks.
        for rows in chunk_slices(len(target), chunk_rows):
            chunk_weights = None
            if row_weights is not None:
                chunk_weights = row_weights[rows]
            values, gradients = self._compute_chunk(
                chunked, rows, target[rows], chunk_weights, with_statistics=metrics is not None
            )
            if is_ignored is not None:  # their values are those of token 0
                values = [value.masked_fill(is_ignored[rows], 0) for value in values]
            losses, *statistics = values  # [n] each
            if metrics is not None:
                is_correct, entropies = statistics
                correct_sums.append(is_correct.sum())
                entropy_sums.append(entropies.sum())
            if row_losses is not None:
                row_losses.append(losses)  # before the weights, for the log
            if chunk_weights is not None:  # the gradients have them already
                losses = losses * chunk_weights
            chunked.add(rows, losses, gradients)
            del gradients  # one is of the output weight: before the next chunk allocates its own
        if metrics is not None:
            metrics["token_accuracy"] = (torch.stack(correct_sums).sum(), num_labels)
            metrics["entropy"] = (torch.stack(entropy_sums).sum(), num_labels)
        return chunked.total(), count

    def _compute_chunk(
        self, chunked: ChunkedSum, rows: slice, target: Tensor, weights: Tensor | None, *, with_statistics: bool
    ) -> tuple[list[Tensor], list[Tensor | None]]:
        """Compute the losses of a chunk and its gradients; on return, its logits are freed.

        Args:
            chunked: sum over all chunks.
            rows: positions of the chunk.
            target: int64 [n].
            weights: factors [n] of the losses in the gradients; the returned losses are without them.
            with_statistics: also return whether a target has the largest logit, and the entropies.

        Returns:
            Losses and statistics, detached, [n] each; and the gradients of ``chunked.chunk_gradients``.
        """
        chunk_hidden = chunked.chunk_hidden(rows)  # [n, d]
        with kept_on_device():  # the graph below is used at once: activation offloading must not copy its tensors
            logits = chunked.logits(chunk_hidden)  # [n, v]; with tensor parallelism, this rank's shard
            group = chunked.logits.group
            if group is not None:
                losses, *statistics = sharded_cross_entropy(
                    logits, target, group, self._terms, with_statistics=with_statistics
                )
                if weights is not None:
                    weights = weights.to(losses.dtype)
                gradients = chunked.chunk_gradients(chunk_hidden, losses, weights)
                return [losses.detach(), *statistics], gradients
            # The gradient of the logits takes their memory. It is detached: the compiler refuses views that were made
            # without gradients of a tensor that has one, once another view has changed it in place.
            logits_gradient = logits.detach()
            values = self._overwrite_logits(logits_gradient, target, with_statistics=with_statistics)
            if weights is not None and chunked.needs_gradients:
                scale_rows_(logits_gradient, weights.to(values[0].dtype))
            # The backward pass starts from the logits, whose gradient is known: no pass over them computes it from that
            # of the losses.
            return values, chunked.chunk_gradients(chunk_hidden, logits, logits_gradient)

    @torch.no_grad()
    def _overwrite_logits(self, logits: Tensor, target: Tensor, *, with_statistics: bool) -> list[Tensor]:
        """Return the losses of logits [n, v], and statistics; the logits become their gradient, block by block."""
        rows = rows_per_block(logits)
        blocks = []
        for block_logits, block_target in zip(logits.split(rows), target.split(rows), strict=True):
            values = self._cross_entropy_(
                block_logits, block_target, terms=self._terms, with_statistics=with_statistics
            )
            blocks.append(values)
        if len(blocks) == 1:
            return list(blocks[0])
        # Tuples of blocks -> a list of tensors [n].
        return [torch.cat(tensors) for tensors in zip(*blocks, strict=True)]


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
            chunk_logits = at_least_float32(logits).flatten(0, 1)  # [b * s / chunks, v]
            total = total + F.cross_entropy(
                chunk_logits, chunk_targets.flatten(), ignore_index=self.ignore_index, reduction="sum"
            )
        count = (targets != self.ignore_index).sum()
        return total / count.clamp(min=1)


_PROBLEM_TYPES = ("single_label_classification", "multi_label_classification", "regression")


class ClassificationLoss(SFTLoss, nn.Module):
    """Loss of a classifier at the labeled tokens, which are the last ones of the rows.

    It is the loss of ``transformers`` for the same problem type: cross entropy for one class per row, binary cross
    entropy averaged over the classes for several, and the squared error for a number. A label is the number of a target
    in the table that :meth:`set_targets` sets; without a table it is a class.

    Example:
        >>> loss = torchtune.modules.loss.ClassificationLoss()
        >>> hidden, labels = torch.zeros(1, 3, 8), torch.tensor([[-100, -100, 1]])
        >>> total, count = loss.sum_and_count(hidden, labels, torch.nn.Linear(8, 4, bias=False))
        >>> round(total.item(), 4), count.item()  # log(4)
        (1.3863, 1)
    """

    predicts_tokens: ClassVar[bool] = False

    def __init__(self) -> None:
        super().__init__()
        self.problem_type = "single_label_classification"
        self._targets: Tensor | None = None  # [m, c], or [m, 1] of classes and numbers
        self._outputs: list[tuple[Tensor, Tensor]] | None = None

    def set_targets(self, problem_type: str, targets: Tensor) -> None:
        """Set the problem type and the table of targets.

        Args:
            problem_type: ``single_label_classification``, ``multi_label_classification`` or ``regression``.
            targets: float32 ``[m, c]``, one row for each distinct target: the index of a class (``c`` is 1), a 0 or 1
                for each of ``c`` classes, or a number (``c`` is 1).

        Raises:
            LossError: the problem type is unknown.
        """
        if problem_type not in _PROBLEM_TYPES:
            raise LossError(f"problem_type is '{problem_type}': choose one of {', '.join(_PROBLEM_TYPES)}.")
        self.problem_type = problem_type
        self._targets = targets

    def apply_compile_strategy(self, *args: Any, **kwargs: Any) -> nn.Module:
        """Return the loss unchanged: logits of a few rows are not worth a compilation."""
        return self

    @contextmanager
    def recorded(self) -> Iterator[list[tuple[Tensor, Tensor]]]:
        """Yield a list to which every call inside the block appends its logits ``[n, c]`` and targets."""
        self._outputs = []
        try:
            yield self._outputs
        finally:
            self._outputs = None

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Compute the mean loss over labeled tokens, or 0 if there are none.

        Args:
            outputs: logits ``[b, s, c]``.
            targets: labels int64 ``[b, s]``.

        Returns:
            Scalar, at least float32.
        """
        total, count = self.sum_and_count(outputs, targets, nn.Identity())
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
            hidden: hidden states ``[b, s, d]``.
            labels: int64 ``[b, s]``, numbers of targets.
            projection: ``[n, d]`` -> logits ``[n, c]``, the ``output`` of the model.
            index: int64 ``[n]``, positions of the labeled tokens in the flattened batch.
            weights: float32 ``[b, s]``, factors of the losses of single tokens; None: each is 1.
            row_losses: list to which the losses ``[n]`` of the labeled tokens are appended, detached.
            metrics: not changed: scores of classes are computed from all rows of the validation data.

        Returns:
            Sum (scalar, at least float32) and count of labels (int64 scalar), or sum of their weights (float32 scalar).
        """
        del metrics
        labels = labels.flatten()  # [b * s]
        hidden = hidden.flatten(0, -2)  # [b * s, d]
        if index is None:
            index = label_index(labels)
        if not len(index):  # 0 with a graph, because other ranks wait for this one's gradients
            return zero_loss(hidden, projection), torch.zeros((), dtype=torch.int64, device=labels.device)
        labeled_hidden = hidden.index_select(0, index)  # [n, d]
        logits = at_least_float32(projection(labeled_hidden))  # [n, c]
        labels = labels.index_select(0, index)  # [n]
        if self._targets is None:
            targets = labels.unsqueeze(-1)  # [n, 1], classes
        else:
            if self._targets.device != labels.device:  # at the first call
                self._targets = self._targets.to(labels.device)
            targets = self._targets.index_select(0, labels)  # [n, c] or [n, 1]
        # Classes are floats on the way, too, so that the losses of all problems have one signature.
        losses = self._losses(logits, targets.to(logits.dtype))  # [n]
        if self._outputs is not None:  # inside recorded()
            self._outputs.append((logits.detach(), targets.detach()))
        if row_losses is not None:
            row_losses.append(losses.detach())
        if weights is None:
            return losses.sum(), torch.full((), len(index), device=labels.device)
        label_weights = weights.flatten().index_select(0, index)  # [n]
        return (losses * label_weights).sum(), label_weights.sum()

    def _losses(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Losses [n] of logits [n, c] and targets [n, c] or [n, 1], both of the same dtype."""
        if self.problem_type == "single_label_classification":
            classes = targets.squeeze(-1).long()  # [n]
            return F.cross_entropy(logits, classes, reduction="none")
        if self.problem_type == "multi_label_classification":
            losses_of_classes = F.binary_cross_entropy_with_logits(logits, targets, reduction="none")  # [n, c]
            return losses_of_classes.mean(-1)
        return F.mse_loss(logits, targets, reduction="none").mean(-1)

"""Chunked log-probabilities of tokens under an output projection, without materializing all logits."""

from typing import Any, Literal, overload

from torch import Tensor

from torchtune.data import label_index
from torchtune.modules.loss.cross_entropy import Logits, at_least_float32, chunked_rows, log_probs_of_rows
from torchtune.modules.loss.custom_loss import Projection

# Default number of logits per chunk.
_CHUNK_ELEMENTS = 2**25


def _log_probs(
    hidden: Tensor,
    targets: Tensor,
    logits: Logits,
    temperature: float,
    chunk_rows: int,
    *,
    with_entropy: bool = False,
) -> tuple[Tensor, ...]:
    def function(chunk: Tensor, rows: slice) -> tuple[Tensor, ...]:
        scaled = chunk if temperature == 1.0 else at_least_float32(chunk) / temperature
        return log_probs_of_rows(scaled, targets[rows], logits.group, with_entropy=with_entropy)

    return chunked_rows(hidden, function, logits, chunk_rows)


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
    values = _log_probs(hidden, targets, logits, temperature, chunk_rows, with_entropy=return_entropy)
    return values if return_entropy else values[0]


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
    values_of_batch = []
    for values in values_of_rows:  # [n] -> [b, s]
        zeros = values.new_zeros(len(flat_labels))
        values_of_batch.append(zeros.index_copy(0, index, values).view(labels.shape))
    return values_of_batch if return_entropy else values_of_batch[0]

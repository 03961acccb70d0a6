"""Log-probabilities of a batch's labels for any output projection."""

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from torchtune.data import CROSS_ENTROPY_IGNORE_IDX
from torchtune.modules.loss._linear_log_probs import linear_log_probs
from torchtune.modules.loss._projection import Projection, linear_parts

# Number of logits per chunk if the projection is not a plain matrix product.
_CHUNK_ELEMENTS = 2**25


def token_log_probs(hidden: Tensor, labels: Tensor, projection: Projection, temperature: float = 1.0) -> Tensor:
    """Compute the log-probs of labels, with logits only of labeled tokens and chunk by chunk.

    Args:
        hidden: result of ``model(..., output="hidden")`` ``[b, s, d]``.
        labels: int64 ``[b, s]``, already shifted: ``labels[i]`` is predicted at position ``i``.
        projection: ``model.output``.
        temperature: divisor of the logits.

    Returns:
        Tensor ``[b, s]`` in nats, float32 (float64 for float64 weights), 0 without a label. Differentiable once.

    Example:
        >>> from torchtune.modules.loss import token_log_probs
        >>> hidden, labels = torch.zeros(1, 3, 8), torch.tensor([[0, -100, 1]])
        >>> token_log_probs(hidden, labels, torch.nn.Linear(8, 4, bias=False)).exp()
        tensor([[0.2500, 1.0000, 0.2500]], grad_fn=...)
    """
    rows, targets = hidden.flatten(0, -2), labels.flatten()
    index = (targets != CROSS_ENTROPY_IGNORE_IDX).nonzero().squeeze(1)
    weight, bias, softcap = linear_parts(projection)
    if weight is None:
        found = _log_probs_with_recompute(rows, index, targets, projection, temperature)
    else:
        rows, options = rows.index_select(0, index), {"bias": bias, "softcap": softcap, "temperature": temperature}
        found = linear_log_probs(rows, weight, targets.index_select(0, index), **options)
    return found.new_zeros(len(targets)).index_copy(0, index, found).view(labels.shape)


def _log_probs_with_recompute(
    rows: Tensor, index: Tensor, targets: Tensor, projection: Projection, temperature: float
) -> Tensor:
    """Log-probs at ``index`` by calling the projection; the backward pass recomputes the logits."""

    def log_probs(chunk: Tensor, labels: Tensor) -> Tensor:
        logits = projection(chunk)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
        return torch.log_softmax(logits, -1).gather(1, labels[:, None]).squeeze(1)

    if not len(index):  # no tokens: an empty result with a graph to all parameters
        return log_probs(rows[:1], targets[:1].clamp(min=0))[:0] + rows.sum() * 0.0
    size = max(1, _CHUNK_ELEMENTS // projection.weight.shape[0])
    chunks = ((rows.index_select(0, part), targets.index_select(0, part)) for part in index.split(size))
    if not torch.is_grad_enabled():
        return torch.cat([log_probs(*chunk) for chunk in chunks])
    return torch.cat([checkpoint(log_probs, *chunk, use_reentrant=False) for chunk in chunks])

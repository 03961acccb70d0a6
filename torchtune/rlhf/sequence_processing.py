"""Log-probs from logits, and truncation at stop tokens, for recipes with padding and full logits."""

import torch

from torchtune.data import CROSS_ENTROPY_IGNORE_IDX


def truncate_sequence_at_first_stop_token(
    sequences: torch.Tensor, stop_tokens: torch.Tensor, fill_value: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Replace all tokens after the first stop token of each row by a fill value.

    Args:
        sequences: int64 ``[b, s]``.
        stop_tokens: int64 ``[n]``.
        fill_value: replacement of the tokens after the stop token.

    Returns:
        Bool ``[b, s]``, True after the first stop token, and the filled sequences ``[b, s]``.

    Example:
        >>> torchtune.rlhf.truncate_sequence_at_first_stop_token(torch.tensor([[5, 2, 7]]), torch.tensor([2]))[1]
        tensor([[5, 2, 0]])
    """
    is_stop = torch.isin(sequences, stop_tokens).long()
    num_earlier_stops = is_stop.cumsum(dim=-1) - is_stop
    is_truncated = num_earlier_stops > 0
    return is_truncated, sequences.masked_fill(is_truncated, fill_value)


def logits_to_logprobs(logits: torch.Tensor, sequences: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
    """Return log-probs of ``sequences`` ``[b, r]`` under the softmax of ``logits / temperature`` ``[b, r, v]``.

    Returns:
        ``[b, r]`` in nats, in the logits' dtype. :func:`torchtune.modules.loss.linear_log_probs` avoids the logits.

    Example:
        >>> torchtune.rlhf.logits_to_logprobs(torch.zeros(1, 2, 4), torch.tensor([[0, 3]])).exp()
        tensor([[0.2500, 0.2500]])
    """
    log_probs = torch.log_softmax(logits / temperature, dim=-1)
    return log_probs.gather(2, sequences.unsqueeze(-1)).squeeze(-1)


def batched_logits_to_logprobs(
    logits: torch.Tensor, sequences: torch.Tensor, temperature: float = 1.0, chunk_size: int = 4
) -> torch.Tensor:
    """Compute :func:`logits_to_logprobs` for ``chunk_size`` rows at a time.

    Example:
        >>> torchtune.rlhf.batched_logits_to_logprobs(torch.zeros(1, 2, 4), torch.tensor([[0, 3]])).exp()
        tensor([[0.2500, 0.2500]])
    """
    logits_chunks = logits.split(chunk_size)
    sequence_chunks = sequences.split(chunk_size)
    log_probs = []
    for chunk, tokens in zip(logits_chunks, sequence_chunks, strict=True):
        log_probs.append(logits_to_logprobs(chunk, tokens, temperature))
    return torch.cat(log_probs)


def truncate_sequence_for_logprobs(query_response_logits: torch.Tensor, context_length: int) -> torch.Tensor:
    """Select the logits that predict the response: ``[b, context_length + r, v]`` to ``[b, r, v]``.

    Example:
        >>> torchtune.rlhf.truncate_sequence_for_logprobs(torch.zeros(1, 5, 8), context_length=3).shape
        torch.Size([1, 2, 8])
    """
    return query_response_logits[:, context_length - 1 : -1]


def get_batch_log_probs(
    logits: torch.Tensor,
    labels: torch.Tensor,
    label_pad_token_id: int = CROSS_ENTROPY_IGNORE_IDX,
    return_average_logprobs: bool = False,
) -> torch.Tensor:
    """Compute the log-probs of every row's labels, summed or averaged over labeled positions.

    This function shifts the labels: pass labels from :func:`torchtune.data.padded_collate_dpo`. For labels that are
    already shifted, as in this library's datasets, use :func:`torchtune.rlhf.document_log_probs`.

    Args:
        logits: ``[b, s, v]``.
        labels: int64 ``[b, s]``, not shifted: ``labels[i]`` is the token at position ``i``.
        label_pad_token_id: ignore index.
        return_average_logprobs: return the mean instead of the sum.

    Returns:
        ``[b]`` in nats.

    Raises:
        ValueError: logits and labels have incompatible shapes.

    Example:
        >>> logits, labels = torch.zeros(1, 3, 4), torch.tensor([[-100, 1, 2]])
        >>> torchtune.rlhf.get_batch_log_probs(logits, labels).exp()  # 1/4 · 1/4
        tensor([0.0625])
    """
    if logits.shape[:-1] != labels.shape:
        raise ValueError(f"Logits {list(logits.shape)} and labels {list(labels.shape)} differ in batch or length.")
    labels = labels[:, 1:]
    logits = logits[:, :-1]
    is_labeled = labels != label_pad_token_id
    log_probs = logits_to_logprobs(logits, labels.masked_fill(~is_labeled, 0))  # the ignore index is not a token
    sums = log_probs.masked_fill(~is_labeled, 0.0).sum(-1)
    if return_average_logprobs:
        return sums / is_labeled.sum(-1).clamp(min=1)
    return sums

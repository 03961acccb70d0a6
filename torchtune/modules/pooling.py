"""Pooling of hidden states: one vector for each document of a batch."""

from typing import Literal

import torch
from torch import Tensor

from torchtune.data import Batch, DataError

Pooling = Literal["last", "mean"]


def last_hidden_states(hidden: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """Return the hidden state at the last token of every document, and whether this token is on this rank.

    Args:
        hidden: ``[b, s, d]``.
        batch: batch with documents, which define the ends of texts; token ids are not used.

    Returns:
        Hidden states ``[n, d]``, of another token where the last one is not on this rank, and bool ``[n]``.

    Raises:
        DataError: the batch has no documents.

    Example:
        >>> batch = torchtune.data.collate_documents([{"tokens": [5, 6], "labels": [6, -100]}])
        >>> last, is_local = torchtune.modules.last_hidden_states(torch.tensor([[[1.0], [2.0]]]), batch)
        >>> last, is_local
        (tensor([[2.]]), tensor([True]))
    """
    if batch.documents is None:
        raise DataError(
            "collate_fn: a score is read at the end of a document, but the batch has none: use collate_preference."
        )
    rank, _ = batch.shard
    num_tokens = batch.tokens.numel()  # of this rank
    last_token = batch.documents.ends()[: batch.num_documents].to(hidden.device)  # [n], in the whole batch
    last_token = last_token - rank * num_tokens
    is_local = (last_token >= 0) & (last_token < num_tokens)
    # Indexed without a selection, whose size the host would wait for.
    return hidden.flatten(0, -2)[last_token.masked_fill(~is_local, 0)], is_local


def pooled_embeddings(hidden: Tensor, batch: Batch, pooling: Pooling) -> Tensor:
    """Return the embedding of every document, not normalized.

    Args:
        hidden: hidden states from ``model(..., output="hidden")`` ``[b, s, d]``.
        batch: batch with documents.
        pooling: ``"last"``, the hidden state of the last token, or ``"mean"``, the mean over all tokens.

    Returns:
        ``[n, d]``, float32 or wider; for a batch split over context-parallel ranks, this rank's partial sums.

    Raises:
        DataError: the batch has no documents.

    Example:
        >>> batch = torchtune.data.collate_documents([{"tokens": [5, 6], "labels": [6, -100]}])
        >>> torchtune.modules.pooled_embeddings(model(**batch.model_inputs(), output="hidden"), batch, "mean").shape
        torch.Size([1, 32])
    """
    if pooling == "last":
        last_hidden, is_local = last_hidden_states(hidden, batch)
        embeddings = last_hidden.masked_fill(~is_local[:, None], 0.0)
        # The second term keeps the graph connected on ranks without a last token.
        embeddings = embeddings + 0.0 * hidden.sum()
        return embeddings.to(torch.promote_types(hidden.dtype, torch.float32))
    if batch.documents is None:
        raise DataError("collate_fn: a mean is over a document, but the batch has none: use collate_embedding.")
    # Sums of many tokens lose digits in half precision.
    wide = hidden.flatten(0, -2).to(torch.promote_types(hidden.dtype, torch.float32))  # [b * s, d]
    rank, size = batch.shard
    document_ids = batch.documents.document_ids().to(hidden.device).chunk(size)[rank]  # [b * s]
    sums = wide.new_zeros(len(batch.documents.lengths), wide.shape[1]).index_add(0, document_ids, wide)
    lengths = torch.tensor(batch.documents.lengths, device=hidden.device)
    return (sums / lengths[:, None])[: batch.num_documents]  # padding documents are the last

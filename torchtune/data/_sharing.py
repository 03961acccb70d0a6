"""Share common prefixes of documents, so that a prefix is computed once."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

import numpy as np
import torch

from torchtune.data._batch import Batch
from torchtune.data._common import CROSS_ENTROPY_IGNORE_IDX, DataError
from torchtune.data._documents import Documents

# The keys of a prefix are copied for every document that continues it. For fewer tokens the copies cost too much.
MIN_SHARED = 8


def share_prefixes(batch: Batch, groups: Sequence[int], *, labelled: bool = False) -> Batch:
    """Move the common prefix of a group's documents into a separate document before them.

    Results per document do not change: neither the hidden states of their tokens nor :meth:`Batch.sum_per_document`.
    The prefix ends before the first difference in tokens, labels or ``per_token``. So the last token of a prompt is not
    shared, because its label, the first token of the answer, differs.

    Args:
        batch: a batch on the host, with documents.
        groups: group number of every document; documents are compared within a group.
        labelled: also share labeled tokens. This is correct for losses computed from per-document sums, but wrong for
            losses that sum over tokens.

    Returns:
        A batch of one row, with the documents and per-document entries sorted by group. A group with fewer than 8
        common tokens has no prefix; without any prefix, the batch is returned unchanged.

    Raises:
        DataError: the batch has no documents, has entries in ``inputs`` (neither per token nor per document), or is
            split or padded.

    Example:
        >>> rows = [{"tokens": [*range(9), last], "labels": [-100] * 9 + [7]} for last in (20, 30)]
        >>> batch = torchtune.data.collate_documents(rows)
        >>> torchtune.data.share_prefixes(batch, [0, 0]).documents.lengths
        (9, 1, 1)
    """
    if batch.documents is None or batch.inputs or batch.num_padding_documents or batch.shard[1] > 1:
        raise DataError(
            "collate_fn: only text batches with documents, neither padded nor split, can share prefixes: use "
            "torchtune.data.collate_preference, or set share_prefix to False."
        )
    if batch.documents.prefixes:
        return batch
    row = batch._as_row()
    lengths, starts = batch.documents.lengths, [0, *accumulate(batch.documents.lengths)]
    members: dict[int, list[int]] = {}
    for document, group in enumerate(groups):
        members.setdefault(group, []).append(document)
    columns = [row.tokens, row.input_pos, *row.per_token.values(), *([] if row.labels is None else [row.labels])]
    columns = [value[0].reshape(row.num_tokens, -1).numpy() for value in columns]
    order, kept, new_lengths, prefixes = [], [], [], []
    for group in members.values():
        common = _common_length(columns, [(starts[i], lengths[i]) for i in group]) if len(group) > 1 else 0
        if common and not labelled and row.labels is not None:
            label = row.labels[0, starts[group[0]] : starts[group[0]] + common].numpy() != CROSS_ENTROPY_IGNORE_IDX
            common = int(label.argmax()) if label.any() else common
        common = common if common >= MIN_SHARED else 0
        prefix = len(new_lengths) if common else -1
        if common:
            kept.append(np.arange(starts[group[0]], starts[group[0]] + common))
        kept += [np.arange(starts[i] + common, starts[i + 1]) for i in group]
        new_lengths += [common] * (common > 0) + [lengths[i] - common for i in group]
        prefixes += [-1] * (common > 0) + [prefix] * len(group)
        order += group
    if max(prefixes) < 0:
        return batch
    index, documents = torch.from_numpy(np.concatenate(kept)), torch.tensor(order)
    return replace(
        row,
        tokens=row.tokens[:, index],
        labels=None if row.labels is None else row.labels[:, index],
        input_pos=row.input_pos[:, index],
        documents=Documents.from_lengths(new_lengths, prefixes=prefixes),
        per_token={name: value[:, index] for name, value in row.per_token.items()},
        per_document={name: value[documents] for name, value in row.per_document.items()},
    )


def _common_length(columns: Sequence[np.ndarray], spans: Sequence[tuple[int, int]]) -> int:
    """Return the number of leading positions that all spans (start, length) share, at most the shortest length - 1."""
    first, _ = spans[0]
    common = min(length for _, length in spans) - 1
    for start, _ in spans[1:]:
        for values in columns:
            differs = (values[first : first + common] != values[start : start + common]).any(-1)
            common = int(differs.argmax()) if differs.any() else common
    return common

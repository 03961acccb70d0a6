"""Collate functions: convert a list of examples to a batch."""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from torchtune._lazy import former_names
from torchtune.data._batch import Batch, check_shifted
from torchtune.data._documents import Documents
from torchtune.data._ragged_images import Images, join_images
from torchtune.data._rows import CROSS_ENTROPY_IGNORE_IDX, DataError, SourceNumber

Document = Mapping[str, Any]
# An example: a document, or a pack (a list of documents).
Example = Document | Sequence[Document]
_SIDES = ("chosen", "rejected")
_SIDE_PREFIXES = ("chosen_", "rejected_")


def _as_int_tensor(value: Any) -> torch.Tensor:
    """Return token ids or labels, a list, an array or a tensor, as int64 ``[s]``."""
    return torch.as_tensor(value, dtype=torch.int64)


def documents_of(example: Example, *, takes_weights: bool = False) -> list[Document]:
    """Return the documents of an example or pack.

    Args:
        example: the example or pack.
        takes_weights: whether the caller reads ``label_weights``.

    Raises:
        DataError: a document is malformed, or has label weights that the caller does not read.
    """
    documents = example
    if isinstance(example, Mapping) and "seq_lens" in example:  # a pack of a dataset written for earlier releases
        documents = _split_pack(example)
    elif isinstance(example, Mapping):
        documents = [example]
    if not isinstance(documents, list | tuple) or not all(isinstance(document, Mapping) for document in documents):
        raise DataError(f"An example must be a mapping or a list of mappings, not {type(example).__name__}.")
    for document in documents:
        if missing := {"tokens", "labels"} - document.keys():
            raise DataError(f"An example has no '{max(missing)}', it has {', '.join(map(str, document)) or 'nothing'}.")
        num_tokens = len(document["tokens"])
        num_labels = len(document["labels"])
        if num_tokens != num_labels:
            raise DataError(f"An example has {num_tokens} tokens but {num_labels} labels.")
        if "label_weights" in document and not takes_weights:
            raise DataError(
                "Rows have weights of turns other than 0 and 1, which only torchtune.data.collate_documents and "
                "recipes of this release read: leave out collate_fn, or write 0 and 1."
            )
    return list(documents)


def _split_pack(pack: Mapping[str, Any]) -> list[Document]:
    """Split a pack of one row by its ``seq_lens``; the padding at its end is a document, too."""
    lengths = [int(length) for length in pack["seq_lens"]]
    if sum(lengths) != len(pack["tokens"]):
        raise DataError(f"A pack has {len(pack['tokens'])} tokens, and seq_lens of {sum(lengths)} in total.")
    documents = []
    start = 0
    for length in lengths:
        documents.append({name: pack[name][start : start + length] for name in ("tokens", "labels")})
        start += length
    return documents


def collate_documents(batch: Sequence[Example]) -> Batch:
    """Concatenate all documents of a batch, padding-free.

    Args:
        batch: examples with ``tokens`` and pre-shifted ``labels``, or packs (lists of such examples).

    Returns:
        A batch of one row: ``tokens``, ``labels`` and ``input_pos`` are int64 ``[1, s]``, where ``s`` is the number of
        tokens. ``input_pos`` restarts at 0 in every document. A mixture's batch has :attr:`Batch.sources`.
        If an example has ``label_weights`` ``[s]``, the batch has them ``per_token``, with 1 for the other examples.

    Raises:
        DataError: an example has entries other than tokens, labels and :class:`Images`, tokens and labels differ in
            length, or the labels are not shifted.

    Example:
        >>> rows = [{"tokens": [1, 2], "labels": [2, -100]}, {"tokens": [3, 4, 5], "labels": [4, 5, -100]}]
        >>> batch = torchtune.data.collate_documents(rows)
        >>> batch.tokens, batch.input_pos
        (tensor([[1, 2, 3, 4, 5]]), tensor([[0, 1, 0, 1, 2]]))
    """
    documents = []
    for example in batch:
        documents += documents_of(example, takes_weights=True)
    tokens = [_as_int_tensor(document["tokens"]) for document in documents]
    labels = [_as_int_tensor(document["labels"]) for document in documents]
    images = [_images(document) for document in documents]
    for document, document_images in zip(documents, images, strict=True):
        # "mask" is the tokenizer's, from which a dataset makes the labels; some leave it in the example.
        names = {"tokens", "labels", "label_weights", "mask", "source"}
        if document_images is not None:
            names.add("encoder_input")
        if unknown := document.keys() - names:
            raise DataError(
                f"collate_documents takes text and Images, not '{min(unknown)}': set collate_fn to one that batches it."
            )
    boundaries = Documents.from_lengths([len(row) for row in tokens])
    per_token = {}
    if any("label_weights" in document for document in documents):
        weights = [_label_weights(document) for document in documents]
        per_token["label_weights"] = torch.cat(weights)[None]  # [1, s]
    out = Batch(
        tokens=torch.cat(tokens)[None],  # [1, s]
        labels=torch.cat(labels)[None],
        input_pos=boundaries.positions()[None],
        documents=boundaries,
        per_token=per_token,
    )
    check_shifted(out.tokens, out.labels, boundaries.lengths)
    if any(document_images is not None for document_images in images):
        out.inputs["encoder_input"] = {"images": join_images(images, boundaries.lengths)}
    sources = [document.get("source") for document in documents]
    if not all(isinstance(source, SourceNumber) for source in sources):  # not of a mixture
        return out
    source_of_token = torch.from_numpy(np.repeat(np.array(sources, np.int64), boundaries.lengths))
    return replace(out, per_token={**per_token, "source": source_of_token[None]}, sources=sources[0].names)


def _label_weights(document: Document) -> torch.Tensor:
    """Return the weights of a document's labels, float32 ``[s]``, which are 1 unless it states them."""
    num_labels = len(document["labels"])
    if "label_weights" not in document:
        return torch.ones(num_labels)
    weights = torch.as_tensor(document["label_weights"], dtype=torch.float32)
    if weights.shape != (num_labels,):
        raise DataError(f"An example has {num_labels} labels, but label_weights of shape {tuple(weights.shape)}.")
    return weights


def _images(document: Document) -> Images | None:
    """Return the images of a document; None without images, or of another type, which the model encodes itself."""
    inputs = document.get("encoder_input")
    if not isinstance(inputs, Mapping) or not isinstance(inputs.get("images"), Images):
        return None
    return inputs["images"]


def collate_preference(batch: Sequence[Mapping[str, Any]]) -> Batch:
    """Concatenate the answers of preference pairs, or single answers labeled good or bad, padding-free.

    Every answer is a document. Its :class:`Images`, if any, are in ``encoder_input`` (in pairs:
    ``chosen_encoder_input`` and ``rejected_encoder_input``). :meth:`Batch.sum_per_document` and
    :meth:`Batch.chosen_and_rejected` convert per-token log-probs to log-probs of the answers of each pair.

    Args:
        batch: examples with ``chosen_input_ids``, ``chosen_labels``, ``rejected_input_ids``, ``rejected_labels``, or
            with ``tokens``, ``labels`` and ``is_chosen``. Numbers under other names (``margin``, and for pairs
            ``chosen_*`` with ``rejected_*``) become entries of ``per_document``. ``weight`` is the factor of an example
            in the loss, by default 1.

    Returns:
        A batch, see :func:`collate_documents`; for pairs, all chosen answers come before all rejected answers. Its
        ``per_document`` has ``is_chosen``, bool ``[n]``, ``label_counts``, int64 ``[n]``, and for pairs ``pair``, int64
        ``[n]``, the index of the example. If an example has a ``weight``, all have one, float32 ``[n]``. ``terms`` is
        the number of examples with labels, or the sum of their weights.

    Raises:
        DataError: an example lacks a key, tokens and labels differ in length, the labels are not shifted, or a weight
            is negative.

    Example:
        >>> side = {"input_ids": [1, 2, 3], "labels": [2, 3, -100]}
        >>> row = {f"{name}_{key}": value for name in ("chosen", "rejected") for key, value in side.items()}
        >>> torchtune.data.collate_preference([row]).documents.lengths
        (3, 3)
    """
    # A batch of both kinds counts as pairs; its single answers are then refused.
    is_paired = not all("is_chosen" in example for example in batch)
    # (document, numbers) of each answer; of pairs, all chosen answers come first.
    if is_paired:
        answers = [_answer_of_pair(example, "chosen") for example in batch]
        answers += [_answer_of_pair(example, "rejected") for example in batch]
    else:
        answers = [_labeled_answer(example) for example in batch]
    out = collate_documents([document for document, _ in answers])

    is_weighted = any("weight" in numbers for _, numbers in answers)
    if is_weighted:
        for _, numbers in answers:
            numbers["weight"] = float(numbers.get("weight", 1.0))
            if not 0 <= numbers["weight"] < math.inf:
                raise DataError(f"An example has weight {numbers['weight']}: a weight is a number of at least 0.")
    # A number that some examples lack has no value for the others, so that it is left out.
    common_names = set.intersection(*(set(numbers) for _, numbers in answers))
    per_document = {}
    for name in sorted(common_names):
        per_document[name] = torch.tensor([numbers[name] for _, numbers in answers])
    label_counts = []
    for document, _ in answers:
        is_labeled = np.asarray(document["labels"]) != CROSS_ENTROPY_IGNORE_IDX
        label_counts.append(np.count_nonzero(is_labeled))
    per_document["label_counts"] = torch.tensor(label_counts)
    if is_paired:
        per_document["pair"] = torch.arange(len(batch)).repeat(2)
        # A pair counts if both of its answers have labels.
        chosen_counts = label_counts[: len(batch)]
        rejected_counts = label_counts[len(batch) :]
        label_counts = list(map(min, chosen_counts, rejected_counts))
    num_terms: float = 0
    # The answers are longer than the counts if they are pairs: the chosen answers are first.
    for count, (_, numbers) in zip(label_counts, answers, strict=False):
        if count == 0:  # the filler of a rank without data
            continue
        if is_weighted:
            num_terms += numbers["weight"]
        else:
            num_terms += 1
    return replace(out, per_document=per_document, terms=num_terms)


def _answer_of_pair(example: Mapping[str, Any], side: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the document and the numbers of the chosen or rejected answer of an example."""
    names = {"tokens": f"{side}_input_ids", "labels": f"{side}_labels", "encoder_input": f"{side}_encoder_input"}
    document = _select_entries(example, names)
    numbers: dict[str, Any] = {}
    for name, value in example.items():
        if not isinstance(value, int | float):
            continue
        if name.startswith(f"{side}_"):
            numbers[name.removeprefix(f"{side}_")] = value
        elif not name.startswith(_SIDE_PREFIXES):
            numbers.setdefault(name, value)
    numbers["is_chosen"] = side == "chosen"
    return document, numbers


def _labeled_answer(example: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the document and the numbers of an example with a single answer."""
    document = _select_entries(example, {name: name for name in ("tokens", "labels", "encoder_input")})
    numbers = {}
    for name, value in example.items():
        if isinstance(value, int | float) and not name.startswith(_SIDE_PREFIXES):
            numbers[name] = value
    return document, numbers


def _select_entries(example: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Return entries of an example under other names (name -> name in the example).

    Raises:
        DataError: tokens or labels are missing.
    """
    if missing := {names["tokens"], names["labels"]} - example.keys():
        entries = ", ".join(map(str, example)) or "nothing"
        if {"query", "positive"} <= example.keys():
            raise DataError(
                "dataset: the examples are queries with passages: set collate_fn=torchtune.data.collate_embedding, and "
                "as loss torchtune.rlhf.loss.InfoNCELoss."
            )
        if {"documents", "targets"} <= example.keys():
            raise DataError(
                "dataset: the examples are queries with candidates: set "
                "collate_fn=torchtune.data.collate_reranking, and as loss torchtune.rlhf.loss.RerankBCELoss."
            )
        raise DataError(
            f"dataset: an example has no '{min(missing)}', it has {entries}, so it is no pair: use "
            "torchtune.datasets.preference_dataset."
        )
    # Answers without images have no encoder_input.
    return {name: example[key] for name, key in names.items() if key in example}


def _unpredicted_document(tokens: Sequence[int], *, is_counted: bool) -> dict[str, Any]:
    """Return a document whose tokens are read, and none predicted: a text for an embedding model or a reranker.

    Its labels only say which tokens are trained on, for the counts of a run: all, or none of a filler's.
    """
    labels = [CROSS_ENTROPY_IGNORE_IDX] * len(tokens)
    if is_counted:
        labels[:-1] = tokens[1:]
    return {"tokens": tokens, "labels": labels}


# Entries of ``per_document["role"]``.
QUERY, POSITIVE, NEGATIVE = range(3)


def collate_embedding(batch: Sequence[Mapping[str, Any]]) -> Batch:
    """Concatenate queries, positives and negatives, padding-free, for embedding models.

    Args:
        batch: examples with the token ids ``query`` and ``positive``, the list ``negatives`` of token ids, and
            ``labels``: -100 in the filler of a rank without data.

    Returns:
        A batch, see :func:`collate_documents`: first all queries, then all positives in the same order, then all
        negatives. Its ``per_document`` has ``role``, int64 ``[n]`` (0: query, 1: positive, 2: negative), ``example``,
        int64 ``[n]``, the index of the example, ``digest``, int64 ``[n]``, equal for equal documents, and ``counts``,
        bool ``[n]``, False in a filler. ``terms`` is the number of queries that count.

    Raises:
        DataError: an example lacks an entry.

    Example:
        >>> row = {"query": [1, 2], "positive": [3], "negatives": [[4, 5, 6]], "labels": [0]}
        >>> batch = torchtune.data.collate_embedding([row])
        >>> batch.documents.lengths, batch.per_document["role"]
        ((2, 1, 3), tensor([0, 1, 2]))
    """
    for example in batch:
        if missing := {"query", "positive", "negatives", "labels"} - example.keys():
            raise DataError(
                f"dataset: an example has no '{min(missing)}', it has {', '.join(map(str, example)) or 'nothing'}: "
                "use torchtune.datasets.embedding_dataset."
            )
    # (role, index of the example, token ids) of each document. The loss takes the i-th passage for the positive of the
    # i-th query.
    documents = [(QUERY, index, example["query"]) for index, example in enumerate(batch)]
    documents += [(POSITIVE, index, example["positive"]) for index, example in enumerate(batch)]
    for index, example in enumerate(batch):
        documents += [(NEGATIVE, index, negative) for negative in example["negatives"]]

    example_counts = [int(example["labels"][0]) != CROSS_ENTROPY_IGNORE_IDX for example in batch]
    rows = []
    digests = []
    for _, index, tokens in documents:
        rows.append(_unpredicted_document(tokens, is_counted=example_counts[index]))
        # By their digests, which fit in int64, ranks find equal documents of each other, which are no negatives.
        token_bytes = np.asarray(tokens, np.int64).tobytes()
        digests.append(int.from_bytes(blake2b(token_bytes, digest_size=8).digest(), "little", signed=True))
    per_document = {
        "role": torch.tensor([role for role, _, _ in documents]),
        "example": torch.tensor([index for _, index, _ in documents]),
        "digest": torch.tensor(digests),
        "counts": torch.tensor([example_counts[index] for _, index, _ in documents]),
    }
    return replace(collate_documents(rows), per_document=per_document, terms=sum(example_counts))


def collate_reranking(batch: Sequence[Mapping[str, Any]]) -> Batch:
    """Concatenate pairs of queries and documents, padding-free, for rerankers.

    Args:
        batch: examples with ``documents``, the list of token ids of the candidates of a query, ``targets``, a number
            from 0 to 1 for each, and ``labels``: -100 in the filler of a rank without data.

    Returns:
        A batch, see :func:`collate_documents`, in which every pair is a document. Its ``per_document`` has ``example``,
        int64 ``[n]``, the index of the example, ``is_first``, bool ``[n]``, True at the first pair of each example,
        ``target``, float32 ``[n]``, and ``counts``, bool ``[n]``, False in a filler. ``terms`` is the number of
        examples that count.

    Raises:
        DataError: an example lacks an entry.

    Example:
        >>> row = {"documents": [[1, 2], [1, 3, 4]], "targets": [1.0, 0.0], "labels": [0]}
        >>> batch = torchtune.data.collate_reranking([row])
        >>> batch.documents.lengths, batch.per_document["target"]
        ((2, 3), tensor([1., 0.]))
    """
    rows = []
    per_document: dict[str, list[Any]] = {"example": [], "is_first": [], "target": [], "counts": []}
    num_terms = 0
    for index, example in enumerate(batch):
        if missing := {"documents", "targets", "labels"} - example.keys():
            raise DataError(
                f"dataset: an example has no '{min(missing)}', it has {', '.join(map(str, example)) or 'nothing'}: "
                "use torchtune.datasets.reranking_dataset."
            )
        is_counted = int(example["labels"][0]) != CROSS_ENTROPY_IGNORE_IDX
        num_terms += is_counted
        for number, (tokens, target) in enumerate(zip(example["documents"], example["targets"], strict=True)):
            rows.append(_unpredicted_document(tokens, is_counted=is_counted))
            per_document["example"].append(index)
            per_document["is_first"].append(number == 0)  # where the loss counts the example, once
            per_document["target"].append(float(target))
            per_document["counts"].append(is_counted)
    tensors = {name: torch.tensor(values) for name, values in per_document.items()}
    return replace(collate_documents(rows), per_document=tensors, terms=num_terms)


def left_pad_sequence(
    sequences: Sequence[torch.Tensor], batch_first: bool = False, padding_value: float = 0
) -> torch.Tensor:
    """Pad sequences on the left; otherwise like :func:`torch.nn.utils.rnn.pad_sequence`.

    Returns:
        ``[b, s]``, or ``[s, b]`` without ``batch_first``; ``s`` is the longest length.

    Example:
        >>> torchtune.data.left_pad_sequence([torch.tensor([1]), torch.tensor([2, 3])], batch_first=True)
        tensor([[0, 1],
                [2, 3]])
    """
    flipped = [sequence.flip(0) for sequence in sequences]
    padded = pad_sequence(flipped, batch_first=batch_first, padding_value=padding_value)
    return padded.flip(int(batch_first))


def _pad(rows: Sequence[torch.Tensor], value: int, *, multiple: int = 1, left: bool = False) -> torch.Tensor:
    """Pad the rows with ``value`` to the longest length, rounded up to a multiple, and stack them."""
    length = max(map(len, rows))
    length += -length % multiple
    padded = []
    for row in rows:
        num_padding = length - len(row)
        padding = (0, num_padding)
        if left:
            padding = (num_padding, 0)
        padded.append(F.pad(row, padding, value=value))
    return torch.stack(padded)  # [b, s]


def padded_collate(
    batch: Sequence[Mapping[str, Any]],
    *,
    pad_direction: str,
    keys_to_pad: Sequence[str],
    padding_idx: int | Mapping[str, int],
    pad_to_multiple_of: int = 1,
    stack_on_new_dim: bool = False,
) -> dict[str, Any]:
    """Pad keys of the examples to the longest sequence, and stack the values of other keys.

    Args:
        batch: examples.
        pad_direction: ``"left"`` or ``"right"``.
        keys_to_pad: keys with sequences.
        padding_idx: padding value, or a mapping from key to padding value.
        pad_to_multiple_of: pad the length to a multiple of this value.
        stack_on_new_dim: stack the tensors of nested dicts (``encoder_input``) instead of concatenating them.

    Raises:
        DataError: a key is missing, the keys of ``padding_idx`` differ from ``keys_to_pad``, or ``pad_direction`` is
            unknown.

    Example:
        >>> rows = [{"tokens": [1, 2]}, {"tokens": [4]}]
        >>> torchtune.data.padded_collate(rows, pad_direction="right", keys_to_pad=["tokens"], padding_idx=0)["tokens"]
        tensor([[1, 2],
                [4, 0]])
    """
    if pad_direction not in ("left", "right"):
        raise DataError(f"pad_direction must be 'left' or 'right', not '{pad_direction}'.")
    keys = set(keys_to_pad)
    if not keys or not keys <= set(batch[0]):
        raise DataError(f"keys_to_pad {sorted(keys)} must name keys of the examples, which have {sorted(batch[0])}.")
    if isinstance(padding_idx, Mapping) and set(padding_idx) != keys:
        raise DataError(f"padding_idx names {sorted(padding_idx)}, but keys_to_pad {sorted(keys)}.")
    out: dict[str, Any] = {}
    for key in batch[0]:
        values = [example[key] for example in batch]
        if key not in keys:
            out[key] = _stack(values, stack_on_new_dim)
            continue
        value = padding_idx
        if isinstance(padding_idx, Mapping):
            value = padding_idx[key]
        rows = list(map(_as_int_tensor, values))
        out[key] = _pad(rows, value, multiple=pad_to_multiple_of, left=pad_direction == "left")
    return out


def _stack(values: list[Any], stack_on_new_dim: bool) -> Any:
    """Combine one value per example into a tensor; nested dicts keep their keys."""
    if isinstance(values[0], Mapping):
        stacked = {}
        for key in values[0]:
            stacked[key] = _stack([value[key] for value in values], stack_on_new_dim)
        return stacked
    tensors = [torch.as_tensor(value) for value in values]
    if stack_on_new_dim or tensors[0].dim() <= 1:
        return torch.stack(tensors)
    return torch.cat(tensors)


def padded_collate_sft(
    batch: Sequence[Mapping[str, Any]],
    padding_idx: int = 0,
    ignore_idx: int = CROSS_ENTROPY_IGNORE_IDX,
    pad_to_multiple_of: int = 1,
    stack_on_new_dim: bool = False,
    cp_degree: int = 1,
) -> dict[str, Any]:
    """Pad examples on the right to the longest one.

    Args:
        batch: examples with ``tokens``, pre-shifted ``labels`` and, for multimodal models, ``encoder_input``.
        padding_idx: padding value of the tokens.
        ignore_idx: padding value of the labels.
        pad_to_multiple_of: pad the length to a multiple of this value.
        stack_on_new_dim: stack the tensors of ``encoder_input`` instead of concatenating them.
        cp_degree: context-parallel size. If above 1, the length is a multiple of ``2 * cp_degree``, and ``input_pos``
            is added.

    Returns:
        ``tokens`` and ``labels``, int64 ``[b, s]``; if ``cp_degree`` is above 1, ``input_pos``, int64 ``[1, s]``; if
        there are images, ``encoder_input``. Packs are passed to :func:`padded_collate_packed`.

    Raises:
        DataError: the labels are not shifted, or an example is malformed.

    Example:
        >>> rows = [{"tokens": [1, 2], "labels": [2, 3]}, {"tokens": [4], "labels": [5]}]
        >>> torchtune.data.padded_collate_sft(rows, padding_idx=0)["labels"]
        tensor([[   2,    3],
                [   5, -100]])
    """
    if not isinstance(batch[0], Mapping):
        return padded_collate_packed(batch, padding_idx, ignore_idx)
    for example in batch:
        documents_of(example)  # raises for a malformed example
        if "encoder_mask" in example:
            raise DataError(
                "padded_collate_sft has no place for 'encoder_mask': set "
                "collate_fn=torchtune.data.padded_collate_tiled_images_and_mask."
            )
    tokens = [_as_int_tensor(example["tokens"]) for example in batch]
    labels = [_as_int_tensor(example["labels"]) for example in batch]
    if cp_degree > 1:
        # torch's context parallelism gives each rank two chunks, from the start and the end, to balance causal work.
        pad_to_multiple_of *= 2 * cp_degree
    out: dict[str, Any] = {
        "tokens": _pad(tokens, padding_idx, multiple=pad_to_multiple_of),
        "labels": _pad(labels, ignore_idx, multiple=pad_to_multiple_of),
    }
    length = out["tokens"].shape[1]
    lengths = []
    for row in tokens:
        lengths += [len(row), length - len(row)]  # a document and its padding
    check_shifted(out["tokens"], out["labels"], lengths)
    if cp_degree > 1:  # a rank cannot count the positions of its shard from 0
        out["input_pos"] = torch.arange(length)[None]
    if "encoder_input" in batch[0]:
        out["encoder_input"] = _stack([example["encoder_input"] for example in batch], stack_on_new_dim)
    return out


def padded_collate_dpo(
    batch: Sequence[Mapping[str, Sequence[int]]],
    padding_idx: int = 0,
    ignore_idx: int = CROSS_ENTROPY_IGNORE_IDX,
    pad_to_multiple_of: int = 1,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Pad preference pairs: first all chosen rows, then all rejected rows. For recipes copied from earlier releases.

    The returned labels are not shifted: :func:`torchtune.rlhf.get_batch_log_probs` shifts them. The current recipes use
    :func:`collate_preference`, which neither pads nor shifts.

    Args:
        batch: examples with ``chosen_input_ids``, ``chosen_labels``, ``rejected_input_ids``, ``rejected_labels``;
            labels are shifted as in :class:`torchtune.datasets.PreferenceDataset`, or unshifted as in a dataset copied
            from earlier releases.
        padding_idx: padding value of the tokens.
        ignore_idx: padding value of the labels.
        pad_to_multiple_of: pad the length to a multiple of this value.

    Returns:
        Tokens and labels, int64 ``[2 * b, s]``.

    Raises:
        DataError: labels are shifted, but the last position of a row has a label.
    """
    tokens = []
    labels = []
    for side in _SIDES:
        for example in batch:
            tokens.append(_as_int_tensor(example[f"{side}_input_ids"]))
            labels.append(_unshift_labels(tokens[-1], _as_int_tensor(example[f"{side}_labels"])))
    padded_tokens = _pad(tokens, padding_idx, multiple=pad_to_multiple_of)
    padded_labels = _pad(labels, ignore_idx, multiple=pad_to_multiple_of)
    return padded_tokens, padded_labels


def _unshift_labels(tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return unshifted labels ``[s]``: ``labels[i]`` is the token at position i."""
    if ((labels == tokens) | (labels == CROSS_ENTROPY_IGNORE_IDX)).all():  # of a dataset of earlier releases
        return labels
    if labels[-1] != CROSS_ENTROPY_IGNORE_IDX:
        raise DataError("The last label of an answer is that of a token which is not in the row: set it to -100.")
    return torch.cat([torch.full_like(labels[:1], CROSS_ENTROPY_IGNORE_IDX), labels[:-1]])


def _concatenate(pack: Sequence[Document], name: str) -> torch.Tensor:
    """Return the tokens or labels of all documents of a pack, int64 ``[s]``."""
    return torch.cat([_as_int_tensor(document[name]) for document in pack])


def padded_collate_packed(
    batch: Sequence[Example], padding_idx: int = 0, ignore_idx: int = CROSS_ENTROPY_IGNORE_IDX
) -> dict[str, Any]:
    """Stack packs as rows, padded on the right to the longest pack.

    The padding of a row is a separate document. :func:`collate_documents` is the padding-free equivalent.

    Returns:
        ``tokens``, ``labels`` and ``input_pos``, int64 ``[b, s]``; ``documents``, :class:`~torchtune.data.Documents`.

    Raises:
        DataError: the labels are not shifted, or an example is malformed.

    Example:
        >>> pack = [{"tokens": [1, 2], "labels": [2, 3]}, {"tokens": [4], "labels": [5]}]
        >>> torchtune.data.padded_collate_packed([pack])["tokens"]
        tensor([[1, 2, 4]])
    """
    packs = [documents_of(example) for example in batch]
    token_rows = [_concatenate(pack, "tokens") for pack in packs]
    label_rows = [_concatenate(pack, "labels") for pack in packs]
    tokens = _pad(token_rows, padding_idx)
    labels = _pad(label_rows, ignore_idx)
    lengths: list[int] = []
    for pack, row in zip(packs, token_rows, strict=True):
        lengths += [len(document["tokens"]) for document in pack]
        num_padding = tokens.shape[1] - len(row)
        if num_padding:
            lengths.append(num_padding)
    boundaries = Documents.from_lengths(lengths)
    check_shifted(tokens, labels, lengths)
    positions = boundaries.positions().view_as(tokens)
    return {"tokens": tokens, "labels": labels, "input_pos": positions, "documents": boundaries}


def padded_collate_tiled_images_and_mask(
    batch: Sequence[Mapping[str, Any]],
    padding_idx: int = 0,
    ignore_idx: int = CROSS_ENTROPY_IGNORE_IDX,
    pad_direction: str = "right",
    pad_max_tiles: int | None = None,
    pad_max_images: int | None = None,
    pad_to_multiple_of: int = 1,
) -> dict[str, Any]:
    """Pad text, images and cross-attention masks to their maximum sizes in the batch.

    A batch can mix rows with and without images. Padding images and tiles are masked out.

    Args:
        batch: examples with ``tokens``, ``labels`` (optional with left padding), ``encoder_input`` with the lists
            ``images``, of ``[tiles, c, h, w]``, and ``aspect_ratio``, of ``[2]``, and ``encoder_mask``, a list of
            ``[s, tiles * (patches + 1)]``: a tile has its patches and a class token.
        padding_idx: padding value of the tokens.
        ignore_idx: padding value of the labels.
        pad_direction: ``"right"``, or ``"left"`` for inference; applies to the text.
        pad_max_tiles: number of tiles per image after padding; by default the maximum of the batch.
        pad_max_images: number of images per row after padding; by default the maximum of the batch.
        pad_to_multiple_of: pad the length of the text to a multiple of this value.

    Returns:
        ``tokens`` and ``labels``, int64 ``[b, s]``. If there is an image, ``encoder_input`` with ``images``
        ``[b, images, tiles, c, h, w]`` and ``aspect_ratio`` ``[b, images, 2]`` (1 x 1 for padding), and
        ``encoder_mask``, bool ``[b, s, images * tiles * (patches + 1)]``.

    Raises:
        DataError: an example lacks a key, its images, masks and aspect ratios differ in number or size, it has more
            images or tiles than the maximum, its labels are not shifted, or ``pad_direction`` is unknown.

    Example:
        >>> image = {"images": [torch.ones(2, 3, 4, 4)], "aspect_ratio": [torch.tensor([1, 2])]}
        >>> mask = [torch.ones(2, 2 * 5, dtype=torch.bool)]
        >>> seen = {"tokens": [9, 1], "labels": [1, 2], "encoder_input": image, "encoder_mask": mask}
        >>> nothing = {"encoder_input": {"images": [], "aspect_ratio": []}, "encoder_mask": []}
        >>> text = {"tokens": [4], "labels": [5], **nothing}
        >>> out = torchtune.data.padded_collate_tiled_images_and_mask([seen, text])
        >>> out["encoder_input"]["images"].shape, out["encoder_mask"].sum(dim=(1, 2))
        (torch.Size([2, 1, 2, 3, 4, 4]), tensor([20,  0]))
    """
    if pad_direction not in ("left", "right"):
        raise DataError(f"pad_direction must be 'left' or 'right', not '{pad_direction}'.")
    with_labels = pad_direction == "right" or "labels" in batch[0]  # prompts to generate from have none
    for example in batch:
        _check_tiled_example(example, with_labels)
    length = max(len(example["tokens"]) for example in batch)
    length += -length % pad_to_multiple_of
    out: dict[str, Any] = {"tokens": torch.full((len(batch), length), padding_idx)}
    if with_labels:
        out["labels"] = torch.full((len(batch), length), ignore_idx)
    text_starts = []
    lengths = []  # padding, text, padding of each row
    for i, example in enumerate(batch):
        num_tokens = len(example["tokens"])
        start = 0
        if pad_direction == "left":
            start = length - num_tokens
        for name in out:
            out[name][i, start : start + num_tokens] = torch.as_tensor(example[name], dtype=torch.int64)
        text_starts.append(start)
        lengths += [start, num_tokens, length - start - num_tokens]
    if with_labels:
        check_shifted(out["tokens"], out["labels"], lengths)
    if any(len(example["encoder_input"]["images"]) for example in batch):
        out |= _pad_tiled_images(batch, text_starts, length, pad_max_images, pad_max_tiles)
    return out


def _pad_tiled_images(
    batch: Sequence[Mapping[str, Any]],
    text_starts: Sequence[int],
    length: int,
    max_images: int | None,
    max_tiles: int | None,
) -> dict[str, Any]:
    """Pad the images and cross-attention masks of a batch with at least one image.

    Args:
        batch: see :func:`padded_collate_tiled_images_and_mask`.
        text_starts: start of the text of each row.
        length: length of the padded text.
        max_images: number of images per row after padding; by default the maximum of the batch.
        max_tiles: number of tiles per image after padding; by default the maximum of the batch.

    Returns:
        ``encoder_input`` with ``images``, ``[b, images, tiles, c, h, w]``, and ``aspect_ratio``, int64
        ``[b, images, 2]``; and ``encoder_mask``, bool ``[b, length, images * tiles * positions of a tile]``.
    """
    images_of_rows = [example["encoder_input"]["images"] for example in batch]
    images = list(itertools.chain.from_iterable(images_of_rows))
    num_images = max(map(len, images_of_rows))
    num_images = _pad_limit("pad_max_images", max_images, num_images, "images of a row")
    num_tiles = _pad_limit("pad_max_tiles", max_tiles, max(map(len, images)), "tiles of an image")
    first_mask = next(itertools.chain.from_iterable(example["encoder_mask"] for example in batch))
    num_positions = first_mask.shape[1] // len(images[0])  # of a tile: its patches and the class token
    # Fill the tensors in place, to avoid a second copy of images and masks. What is not filled stays masked out.
    # A padding image counts as one tile of zeros.
    pixels = images[0].new_zeros(len(batch), num_images, num_tiles, *images[0].shape[1:])
    ratios = torch.ones(len(batch), num_images, 2, dtype=torch.int64)
    masks = torch.zeros(len(batch), length, num_images, num_tiles, num_positions, dtype=torch.bool)
    for i, (example, start) in enumerate(zip(batch, text_starts, strict=True)):
        inputs = example["encoder_input"]
        num_tokens = len(example["tokens"])
        entries = zip(inputs["images"], inputs["aspect_ratio"], example["encoder_mask"], strict=True)
        for j, (image, ratio, mask) in enumerate(entries):
            num_image_tiles = len(image)
            mask_shape = (num_tokens, num_image_tiles * num_positions)
            if image.shape[1:] != pixels.shape[3:] or mask.shape != mask_shape:
                raise DataError(
                    f"An image {tuple(image.shape)} with the mask {tuple(mask.shape)} does not fit the others of the "
                    f"batch, {tuple(images[0].shape)} with {num_positions} positions a tile."
                )
            pixels[i, j, :num_image_tiles] = image
            ratios[i, j] = torch.as_tensor(ratio)
            mask = mask.view(num_tokens, num_image_tiles, num_positions)
            masks[i, start : start + num_tokens, j, :num_image_tiles] = mask
    return {
        "encoder_input": {"images": pixels, "aspect_ratio": ratios},
        "encoder_mask": masks.view(len(batch), length, -1),
    }


def _check_tiled_example(example: Mapping[str, Any], with_labels: bool) -> None:
    """Raise :class:`DataError` unless an example has images with an aspect ratio and a mask each."""
    if with_labels:
        documents_of(example)  # raises for labels that are missing or do not match the tokens
    inputs = example.get("encoder_input")
    if (
        not isinstance(inputs, Mapping)
        or not {"images", "aspect_ratio"} <= inputs.keys()
        or "encoder_mask" not in example
    ):
        raise DataError(
            f"An example has {', '.join(map(str, example))}, but images need 'encoder_input' with 'images' and "
            "'aspect_ratio', and 'encoder_mask': use the transform of a vision model as the tokenizer."
        )
    num_images = len(inputs["images"])
    num_ratios = len(inputs["aspect_ratio"])
    num_masks = len(example["encoder_mask"])
    if not num_images == num_ratios == num_masks:
        raise DataError(f"An example has {num_images} images, {num_ratios} aspect ratios and {num_masks} masks.")


def _pad_limit(name: str, limit: int | None, maximum: int, noun: str) -> int:
    """Return ``limit``, by default ``maximum``, that of the batch. Raises :class:`DataError` if it is exceeded."""
    if limit is None:
        return maximum
    if maximum > limit:
        raise DataError(f"{name}={limit} is less than the {maximum} {noun} in the batch: raise it.")
    return limit


__getattr__ = former_names(__name__)

"""Batch of token sequences for training, the check that its labels are shifted, and shared prefixes."""

from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from torchtune.data._documents import Documents
from torchtune.data._ragged_images import Images
from torchtune.data._rows import CROSS_ENTROPY_IGNORE_IDX, DataError

_FIELDS = ("tokens", "labels", "input_pos", "documents")
# Keyword arguments of a decoder's forward that are neither per token nor per document.
_MODEL_INPUTS = ("mask", "encoder_input", "encoder_mask")
# Names of entries in transformers -> names here.
_TRANSFORMERS_NAMES = {
    "input_ids": "'tokens'",
    "position_ids": "'input_pos'",
    "attention_mask": "'documents' or 'mask'",
}


@dataclass(eq=False)
class Batch(MutableMapping[str, Any]):
    """Micro-batch of tokens with per-token and per-document values.

    Shapes: ``b`` rows, ``s`` positions, ``n`` documents. Without ``documents``, each row is one document.

    A batch is also a mapping of its entries (``batch["labels"]``, ``batch.pop("labels")``, ``model(**batch)``), so it
    works in code written for dicts. :meth:`to`, :meth:`pad_to_multiple` and :meth:`split` return new batches.

    Attributes:
        tokens: int64 ``[b, s]``.
        labels: int64 ``[b, s]``, shifted: ``labels[i]`` is the token to predict at position ``i``, or the ignore
            index, -100.
        input_pos: int64 ``[b, s]`` or ``[1, s]``, position of each token in its document.
        documents: boundaries of the documents in the flattened ``b * s`` positions; :meth:`split` does not change
            them. A shared prefix counts as part of the documents that continue it, not as a document.
        per_token: tensors ``[b, s, ...]`` by name, for example advantages or old log-probs. ``label_weights``, float32
            ``[b, s]``, are factors of the labels in the loss.
        per_document: tensors ``[n, ...]`` by name, for example rewards; ``n`` is :attr:`num_documents`.
        inputs: other keyword arguments of the model's forward, for example ``mask`` or ``encoder_input``.
        num_padding_documents: number of padding documents at the end of ``documents``.
        shard: (rank, size) of the context-parallel split: this batch is shard ``rank`` of ``size`` equal shards.
        terms: overrides :attr:`num_terms` if the loss does not count labels, for example the number of pairs.
        sources: names of a mixture's datasets; ``per_token["source"]`` has the index of each token's dataset.

    Raises:
        DataError: shapes do not match, or a name occurs twice.

    Example:
        >>> rows = [{"tokens": [1, 2], "labels": [2, -100]}, {"tokens": [3, 4, 5], "labels": [4, 5, -100]}]
        >>> batch = torchtune.data.collate_documents(rows)
        >>> batch.num_tokens, batch.num_labels
        (5, 3)
        >>> model(**batch.model_inputs()).shape
        torch.Size([1, 5, 316])
    """

    tokens: torch.Tensor
    labels: torch.Tensor | None = None
    input_pos: torch.Tensor | None = None
    documents: Documents | None = None
    per_token: dict[str, torch.Tensor] = field(default_factory=dict)
    per_document: dict[str, torch.Tensor] = field(default_factory=dict)
    inputs: dict[str, Any] = field(default_factory=dict)
    num_padding_documents: int = 0
    shard: tuple[int, int] = (0, 1)
    terms: float | None = None
    sources: tuple[str, ...] = ()
    # The labels that were moved to an accelerator, and the positions of those that count, computed on the host.
    _indexed: tuple[torch.Tensor, torch.Tensor] | None = field(default=None, init=False, repr=False)
    # The tokens and labels that were moved to an accelerator, and the batch on the host that they come from.
    _moved: "tuple[torch.Tensor, torch.Tensor, Batch] | None" = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        # A loop that rebuilds mappings, as the Trainer of transformers does, calls ``Batch(mapping)``.
        if not isinstance(self.tokens, torch.Tensor):
            raise DataError(
                f"The tokens of a batch must be a tensor, not {type(self.tokens).__name__}: Batch.from_dict takes a "
                "mapping, and loops that rebuild mappings take dict(batch)."
            )
        shape = tuple(self.tokens.shape)
        # Without input_pos, which may be [1, s].
        for name, value in {"labels": self.labels, **self.per_token}.items():
            if value is not None and value.shape[:2] != self.tokens.shape:
                raise DataError(f"A batch of tokens {shape} has '{name}' of shape {tuple(value.shape)}.")
        # The documents of a shard are those of the whole batch: `split` does not change them.
        if self.documents is not None and self.documents.num_tokens != self.tokens.numel() * self.shard[1]:
            covered = self.documents.num_tokens
            raise DataError(f"A batch of {self.tokens.numel()} tokens has documents that cover {covered}.")
        for name, value in self.per_document.items():
            if len(value) != self.num_documents:
                raise DataError(f"A batch of {self.num_documents} documents has {len(value)} values of '{name}'.")
        # As a mapping, a batch has one entry of each name.
        names = [*_FIELDS, *self.per_token, *self.per_document, *self.inputs]
        duplicates = {name for name in names if names.count(name) > 1}
        if duplicates:
            raise DataError(f"A batch has two entries '{min(duplicates)}': rename one of them.")

    @classmethod
    def from_dict(cls, batch: Mapping[str, Any]) -> "Batch":
        """Convert the dict that a ``collate_fn`` returned; a :class:`Batch` is returned unchanged.

        ``tokens``, ``labels``, ``input_pos``, ``documents``, ``mask``, ``encoder_input`` and ``encoder_mask`` become
        the fields of the same names or entries of ``inputs``. Any other tensor ``[b, s, ...]`` becomes an entry of
        ``per_token``.

        Raises:
            DataError: tokens or labels are not int64 ``[b, s]``, an entry has neither a known name nor the shape
                ``[b, s, ...]``, or the labels are not shifted.
        """
        if isinstance(batch, Batch):
            return batch
        if not isinstance(batch, Mapping):
            raise DataError(f"collate_fn: it gives {type(batch).__name__}, not a mapping with 'tokens' and 'labels'.")
        if "tokens" not in batch:
            raise DataError(f"collate_fn: the batch has no 'tokens', it has {', '.join(map(str, batch)) or 'nothing'}.")
        for name in ("tokens", "labels"):
            value = batch.get(name)
            if value is None:
                continue
            if not isinstance(value, torch.Tensor):
                kind = type(value).__name__
                raise DataError(f"collate_fn: '{name}' must be a torch.int64 tensor [b, s], not {kind}.")
            if value.dim() != 2 or value.dtype != torch.int64:
                kind = f"{value.dtype} of shape {tuple(value.shape)}"
                raise DataError(f"collate_fn: '{name}' must be a torch.int64 tensor [b, s], not {kind}.")
        fields = {name: batch[name] for name in _FIELDS if name in batch}
        # An entry that is None is left out, because entries of `inputs` other than images cannot be padded or split.
        inputs = {name: batch[name] for name in _MODEL_INPUTS if batch.get(name) is not None}
        # Other names are tensors per token, of which a context-parallel rank takes its slice.
        per_token = {name: value for name, value in batch.items() if name not in (*_FIELDS, *_MODEL_INPUTS)}
        for name, value in per_token.items():
            if name in _TRANSFORMERS_NAMES:
                raise DataError(f"collate_fn: it returns '{name}': return {_TRANSFORMERS_NAMES[name]} instead.")
            token_shape = tuple(fields["tokens"].shape)
            if not isinstance(value, torch.Tensor) or value.shape[:2] != token_shape:
                kind = type(value).__name__
                if isinstance(value, torch.Tensor):
                    kind = f"shape {tuple(value.shape)}"
                raise DataError(
                    f"collate_fn: '{name}' ({kind}) is not per token, the tokens are {token_shape}: "
                    "return a torchtune.data.Batch with it in per_document or inputs."
                )
        out = cls(**fields, per_token=per_token, inputs=inputs)
        if out.labels is not None:
            lengths = None  # each row is one document
            if out.documents is not None:
                lengths = out.documents.lengths
            check_shifted(out.tokens, out.labels, lengths)
        return out

    @property
    def num_tokens(self) -> int:
        """Number of positions, including padding."""
        return self.tokens.numel()

    @property
    def num_labels(self) -> int:
        """Number of labeled tokens. On an accelerator this synchronizes with the host: call it before :meth:`to`."""
        if self.labels is None:
            return 0
        return int((self.labels != CROSS_ENTROPY_IGNORE_IDX).sum())

    @property
    def label_index(self) -> torch.Tensor | None:
        """Positions of the labeled tokens in the flattened batch, int64 ``[n]``, on the device of the batch.

        :meth:`to` finds them on the host and sends them along, since to look for them on an accelerator makes the host
        wait for it. ``None`` where they are not known: on the CPU, and after the labels were replaced.
        """
        if self._indexed is None or self._indexed[0] is not self.labels:
            return None
        return self._indexed[1]

    def find_labels(self) -> torch.Tensor:
        """Return the positions of the labeled tokens in the flattened batch, int64 ``[n]``.

        These are :attr:`label_index` where it is known. Otherwise they are looked for, and on an accelerator the host
        waits for their number.
        """
        if self.label_index is None:
            return label_index(self.labels)
        return self.label_index

    @property
    def label_weights(self) -> torch.Tensor | None:
        """Weights of the labels in the loss, float32 ``[b, s]``; ``None`` if the batch has none, so that each is 1."""
        return self.per_token.get("label_weights")

    @property
    def on_host(self) -> "Batch":
        """The same batch on the host, as it was before :meth:`to`, where its values are read without a wait.

        This is the batch itself on the CPU, and where its tokens or labels were replaced since.
        """
        if self._moved is None:
            return self
        tokens, labels, batch = self._moved
        if tokens is not self.tokens or labels is not self.labels:
            return self
        return batch

    @property
    def num_terms(self) -> int | float:
        """Divisor of the sum of a loss over this batch: the number of labeled tokens, or the sum of their weights.

        Collation can set another number, :attr:`terms`. The terms are summed over the ranks of a context-parallel
        group, so only its first rank counts :attr:`terms`. Call it before :meth:`to`, as :attr:`num_labels`.
        """
        rank, _ = self.shard
        if self.terms is not None and rank > 0:  # they are those of the whole batch, not of a shard
            return 0
        if self.terms is not None:
            return self.terms
        weights = self.label_weights
        if weights is None or self.labels is None:
            return self.num_labels
        is_labeled = self.labels != CROSS_ENTROPY_IGNORE_IDX
        return weights[is_labeled].sum(dtype=torch.float64).item()

    @property
    def num_documents(self) -> int:
        """Number of documents, without padding documents and shared prefixes."""
        if self.documents is None:
            return self.tokens.shape[0]
        return len(self.documents.lengths) - self.documents.num_prefixes - self.num_padding_documents

    def model_inputs(self) -> dict[str, Any]:
        """Return the keyword arguments of the model's forward: tokens, positions, documents and :attr:`inputs`."""
        entries = {"tokens": self.tokens, "input_pos": self.input_pos, "documents": self.documents, **self.inputs}
        return {name: value for name, value in entries.items() if value is not None}

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "Batch":
        """Copy the batch to ``device``.

        Args:
            device: target device.
            non_blocking: copy host tensors to CUDA asynchronously, from pinned memory. Ignored for other devices.
        """
        device = torch.device(device)
        pins = non_blocking and device.type == "cuda"
        batch = self
        if pins:
            batch = self.pin_memory()
        batch = batch._map(lambda value: value.to(device, non_blocking=pins))
        if self.labels is not None and self.labels.device.type == "cpu" and device.type != "cpu":
            index = label_index(self.labels)
            if pins:
                index = _pin(index)
            batch._indexed = (batch.labels, index.to(device, non_blocking=pins))
            batch._moved = (batch.tokens, batch.labels, self)
        return batch

    def pin_memory(self) -> "Batch":
        """Copy the batch to pinned host memory; called by ``torch.utils.data.DataLoader(pin_memory=True)``."""
        return self._map(_pin)

    def _map(self, function: Callable[[Any], Any]) -> "Batch":
        """Apply a function to all tensors and documents."""
        return replace(
            self,
            tokens=_map_tensors(function, self.tokens),
            labels=_map_tensors(function, self.labels),
            input_pos=_map_tensors(function, self.input_pos),
            documents=_map_tensors(function, self.documents),
            per_token=_map_tensors(function, self.per_token),
            per_document=_map_tensors(function, self.per_document),
            inputs=_map_tensors(function, self.inputs),
        )

    def _map_per_token(self, function: Callable[[torch.Tensor], torch.Tensor], **changes: Any) -> "Batch":
        """Apply a function to all tensors ``[b, s, ...]``; ``changes`` are new values of other fields.

        The positions of the batch must be explicit, see :meth:`_as_row`.
        """
        labels = None
        if self.labels is not None:
            labels = function(self.labels)
        return replace(
            self,
            tokens=function(self.tokens),
            labels=labels,
            input_pos=function(self.input_pos),
            per_token={name: function(value) for name, value in self.per_token.items()},
            **changes,
        )

    def pad_to_multiple(self, multiple: int) -> "Batch":
        """Pad the sequence length to a multiple of ``multiple``, for shards of equal length on parallel ranks.

        A batch with documents becomes one row, and its padding is an additional document. Labels are padded with the
        ignore index, ``per_token`` with zeros.

        Raises:
            DataError: :attr:`inputs` has something else than the images of documents; its values cannot be padded,
                because their layout is unknown.
        """
        if multiple == 1:
            return self
        images = self._only_images()
        batch = self._as_row()
        num_padding = -batch.tokens.shape[1] % multiple
        if num_padding == 0:
            return batch
        changes: dict[str, Any] = {"inputs": {}}  # images, the only inputs here, are padded below
        if batch.documents is not None:
            # A document of its own: as a part of the last one, the padding would move the end that pooled scores read.
            lengths = [*batch.documents.lengths, num_padding]
            prefixes = list(batch.documents.prefixes)
            if prefixes:
                prefixes.append(-1)
            changes["documents"] = Documents.from_lengths(lengths, prefixes=prefixes)
            changes["num_padding_documents"] = batch.num_padding_documents + 1  # `per_document` has no value for it
        if images is not None:
            changes["inputs"] = {"encoder_input": {"images": images.pad_positions(num_padding)}}
        padded = batch._map_per_token(lambda value: _pad(value, num_padding), **changes)
        if batch.labels is not None:  # the padding above is 0, which would be a token to predict
            padded.labels = _pad(batch.labels, num_padding, CROSS_ENTROPY_IGNORE_IDX)
        return padded

    def split(self, rank: int, size: int) -> "Batch":
        """Return the shard of a context-parallel rank: per-token tensors are sliced, ``documents`` is not.

        Args:
            rank: rank of this process in its context-parallel group.
            size: size of the group.

        Raises:
            DataError: ``size`` does not divide the sequence length (see :meth:`pad_to_multiple`), the batch is already
                split, or :attr:`inputs` has something else than the images of documents.
        """
        if size == 1:
            return self
        images = self._only_images()
        batch = self._as_row()
        length = batch.tokens.shape[1]
        if length % size or self.shard[1] > 1:
            raise DataError(f"A batch of {length} positions in {self.shard[1]} part(s) cannot be split into {size}.")

        def local_shard(value: torch.Tensor) -> torch.Tensor:  # [b, s, ...] -> [b, s / size, ...]
            return value.chunk(size, dim=1)[rank].contiguous()

        inputs = {}
        if images is not None:
            first = rank * length // size
            inputs = {"encoder_input": {"images": images.split_positions(first, first + length // size)}}
        return batch._map_per_token(local_shard, inputs=inputs, shard=(rank, size))

    def split_documents(self, size: int) -> list["Batch"]:
        """Split the batch into batches of up to ``size`` consecutive documents, without its padding documents.

        Values :attr:`per_document` and :attr:`terms` are left out: the parts are only scored, and the loss is that of
        the whole batch.

        Args:
            size: number of documents.

        Raises:
            DataError: the batch has no documents, shared prefixes or entries in :attr:`inputs`, or is split over
                context-parallel ranks.

        Example:
            >>> rows = [{"tokens": [1, 2], "labels": [2, -100]}, {"tokens": [3], "labels": [-100]}]
            >>> batch = torchtune.data.collate_documents(rows)
            >>> [part.tokens.tolist() for part in batch.split_documents(1)]
            [[[1, 2]], [[3]]]
        """
        if self.documents is None or self.documents.prefixes or self.inputs or self.shard[1] > 1:
            raise DataError(
                "collate_fn: only batches of texts whose documents have no shared prefix, on one context-parallel "
                "rank, can be split into documents: use torchtune.data.collate_embedding."
            )
        batch = self._as_row()
        lengths = self.documents.lengths[: self.num_documents]  # padding documents are the last
        starts = [0, *accumulate(lengths)]
        parts = []
        for first in range(0, len(lengths), size):
            part_lengths = lengths[first : first + size]
            positions = slice(starts[first], starts[first + len(part_lengths)])
            labels = None
            if batch.labels is not None:
                labels = batch.labels[:, positions]
            part = Batch(
                tokens=batch.tokens[:, positions],
                labels=labels,
                input_pos=batch.input_pos[:, positions],
                documents=Documents.from_lengths(part_lengths, batch.tokens.device),
                per_token={name: value[:, positions] for name, value in batch.per_token.items()},
            )
            parts.append(part)
        return parts

    def _only_images(self) -> Images | None:
        """Return the images of a row of documents, or None without :attr:`inputs`; raise for other inputs."""
        if not self.inputs:
            return None
        images = None
        encoder_input = self.inputs.get("encoder_input")
        if isinstance(encoder_input, Mapping):
            images = encoder_input.get("images")
        has_others = len(self.inputs) > 1 or not isinstance(images, Images) or images.places is None
        if has_others or self.documents is None or len(self.tokens) > 1:
            raise DataError(
                f"collate_fn: it is not known how to split '{min(self.inputs)}' over processes: use "
                "torchtune.data.collate_documents with tensor_parallel_dim or context_parallel_dim."
            )
        return images

    def _as_row(self) -> "Batch":
        """Return the batch with explicit positions; with documents, flatten it to one row."""
        rows, length = self.tokens.shape
        positions = self.input_pos
        if positions is None and self.documents is not None:
            positions = self.documents.positions().view(rows, length)
        elif positions is None:
            positions = torch.arange(length)
        batch = replace(self, input_pos=positions.expand(rows, length))
        if self.documents is None or rows == 1:
            return batch
        return batch._map_per_token(lambda value: value.flatten(0, 1)[None])  # [b, s, ...] -> [1, b * s, ...]

    def sum_per_document(self, values: torch.Tensor) -> torch.Tensor:
        """Sum per-token values over each document and its shared prefix, without synchronizing with the host.

        Args:
            values: ``[b, s]``, for example log-probs; for bools, the result is the number of True values. After
                :meth:`split`, pass this rank's shard, and all-reduce the results over the context-parallel group.

        Returns:
            Sums ``[n]`` in the dtype of ``values`` (int64 for bools), accumulated in float32 or wider.
            ``torch.use_deterministic_algorithms`` makes the order of additions on CUDA deterministic.

        Raises:
            DataError: the shape of ``values`` is not ``[b, s]``.
        """
        if values.shape != self.tokens.shape:
            raise DataError(
                f"Values {tuple(values.shape)} are not per token, the tokens are {tuple(self.tokens.shape)}."
            )
        if values.dtype == torch.bool:
            values = values.long()
        # Sums of many tokens lose digits in half precision.
        wide = values
        if values.is_floating_point():
            wide = values.to(torch.promote_types(values.dtype, torch.float32))
        if self.documents is None:
            return wide.sum(dim=1).to(values.dtype)
        rank, size = self.shard
        # Documents may reach over shards, so that each rank adds up the positions of its shard.
        document_ids = self.documents.document_ids().to(values.device)  # [b * s] of all shards
        sums = wide.new_zeros(len(self.documents.lengths))
        sums = sums.index_add(0, document_ids.chunk(size)[rank], wide.flatten())
        if self.documents.shared is not None:
            shared = self.documents.shared.map(lambda tensor: tensor.to(sums.device))
            sums = shared.sums(sums)
        return sums[: self.num_documents].to(values.dtype)  # padding documents are the last

    def chosen_and_rejected(self, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Split per-document values into chosen and rejected, by the pairing from :func:`collate_preference`.

        Args:
            values: ``[n]``, one per document.

        Returns:
            Values of the chosen and of the rejected answers, ``[n / 2]`` each; entry ``i`` belongs to pair ``i``.

        Raises:
            DataError: the batch has no pairs.
        """
        if missing := {"pair", "is_chosen"} - self.per_document.keys():
            raise DataError(f"The batch has no pairs ('{min(missing)}' per document): use collate_preference.")
        num_pairs = self.num_documents // 2
        pair = self.per_document["pair"].to(values.device)
        is_chosen = self.per_document["is_chosen"].to(values.device)
        # Each value goes to the place of its pair, those of rejected answers behind all chosen ones: one operation on
        # the device, whatever the order of the documents.
        order = pair + torch.where(is_chosen, 0, num_pairs)
        ordered = torch.zeros_like(values).index_copy(0, order, values)
        return ordered[:num_pairs], ordered[num_pairs:]

    # MutableMapping of the entries, for code written for dicts.

    def _entries(self) -> dict[str, Any]:
        """Return name -> value of all entries that are there."""
        fields = {name: getattr(self, name) for name in _FIELDS}
        present = {name: value for name, value in fields.items() if value is not None}
        return {**present, **self.per_token, **self.per_document, **self.inputs}

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries())

    def __len__(self) -> int:
        return len(self._entries())

    def __getitem__(self, name: str) -> Any:
        return self._entries()[name]

    def __setitem__(self, name: str, value: Any) -> None:
        """Replace an entry, or add one as :meth:`from_dict` does."""
        if name in _FIELDS:
            setattr(self, name, value)
            return
        for entries in (self.per_token, self.per_document, self.inputs):
            if name in entries:
                entries[name] = value
                return
        checked = Batch.from_dict({"tokens": self.tokens, name: value})
        if name in checked.per_token:
            self.per_token[name] = value
        else:
            self.inputs[name] = value

    def __delitem__(self, name: str) -> None:
        if name not in self._entries():
            raise KeyError(name)
        if name in _FIELDS:
            setattr(self, name, None)
        for entries in (self.per_token, self.per_document, self.inputs):
            entries.pop(name, None)


def label_index(labels: torch.Tensor, ignore_index: int = CROSS_ENTROPY_IGNORE_IDX) -> torch.Tensor:
    """Return the positions of labels other than ``ignore_index`` in the flattened tensor, int64 ``[n]``.

    On an accelerator the host waits for their number; :attr:`Batch.label_index` has them without.
    """
    return (labels.flatten() != ignore_index).nonzero().squeeze(1)


def _map_tensors(function: Callable[[Any], Any], value: Any) -> Any:
    """Apply a function to tensors and other values with a method ``to``, including values of nested mappings."""
    if isinstance(value, Mapping):
        return {key: _map_tensors(function, item) for key, item in value.items()}
    if hasattr(value, "to"):
        return function(value)
    return value


def _pin(value: Any) -> Any:
    """Copy a tensor or another value of the host to pinned memory; return other values unchanged."""
    if isinstance(value, torch.Tensor) and value.device.type != "cpu":
        return value
    if hasattr(value, "pin_memory"):
        return value.pin_memory()
    return value


def _pad(value: torch.Tensor, num_padding: int, fill: int = 0) -> torch.Tensor:
    """Pad dimension 1 of ``[b, s, ...]`` on the right."""
    no_padding = (0, 0) * (value.dim() - 2)  # F.pad begins at the last dimension
    return F.pad(value, (*no_padding, 0, num_padding), value=fill)


def check_shifted(
    tokens: torch.Tensor, labels: torch.Tensor, lengths: Sequence[int] | None = None, name: str = "an example"
) -> None:
    """Check that labels are shifted: ``labels[i]`` is the token after position ``i``, unlike in ``transformers``.

    With unshifted labels a model learns to repeat its input. Rows that fit both conventions pass, such as rows
    with one repeated token.

    Args:
        tokens: int64 ``[b, s]`` or ``[s]``; not checked on an accelerator.
        labels: same shape as ``tokens``.
        lengths: lengths of the documents, and of the padding between them (may be 0), in the flattened positions; by
            default each row is one document.
        name: name of the rows, for the error message.

    Raises:
        DataError: every label equals the token at its own position instead of the next token.
    """
    if tokens.device.type != "cpu" or type(tokens) is not torch.Tensor:  # no synchronization, no fake tensors
        return
    is_label = labels != CROSS_ENTROPY_IGNORE_IDX
    if not is_label.any() or (is_label & (labels != tokens)).any():
        return
    # All labels are the tokens at their own positions. This is also right where the next token is the same.
    if lengths is None:
        num_rows = tokens.numel() // tokens.shape[-1]
        lengths = [tokens.shape[-1]] * num_rows
    tokens = tokens.flatten()
    is_label = is_label.flatten().clone()
    labelled_tokens = tokens[is_label]
    last_positions = torch.tensor(list(accumulate(lengths))) - 1
    is_label[last_positions] = False  # no next token
    is_next_same = tokens[1:] == tokens[:-1]
    # A single label proves no convention: a method of training may have labels that are not the next tokens.
    if (is_label[:-1] & ~is_next_same).any() and (labelled_tokens != labelled_tokens[0]).any():
        raise DataError(
            f"The labels of {name} are the tokens at their own position, as transformers takes them: labels[i] is the "
            f"token to predict at position i, and {CROSS_ENTROPY_IGNORE_IDX} where none is: shift them, as in "
            f"labels = [*labels[1:], {CROSS_ENTROPY_IGNORE_IDX}]."
        )


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
    if batch.documents.prefixes:  # shared already
        return batch
    row = batch._as_row()
    lengths = batch.documents.lengths
    starts = [0, *accumulate(lengths)]
    # Documents of a group need not follow each other; those of the new row do, behind their prefix.
    documents_of_group: dict[int, list[int]] = {}
    for document, group in enumerate(groups):
        documents_of_group.setdefault(group, []).append(document)
    compared = [row.tokens, row.input_pos, *row.per_token.values()]
    if row.labels is not None:
        compared.append(row.labels)
    columns = [value[0].reshape(row.num_tokens, -1).numpy() for value in compared]  # [s, values] each
    is_label = None
    if not labelled and row.labels is not None:
        # A labeled token of a prefix would be in the loss once, and not once for each document.
        is_label = row.labels[0].numpy() != CROSS_ENTROPY_IGNORE_IDX
    order: list[int] = []  # of the documents
    positions: list[np.ndarray] = []  # in the row, of the new row's tokens
    new_lengths: list[int] = []
    prefixes: list[int] = []
    for documents in documents_of_group.values():
        num_shared = _num_shared(columns, [(starts[i], lengths[i]) for i in documents], is_label)
        prefix = -1
        if num_shared > 0:
            prefix = len(new_lengths)
            first_start = starts[documents[0]]
            positions.append(np.arange(first_start, first_start + num_shared))
            new_lengths.append(num_shared)
            prefixes.append(-1)
        for i in documents:
            positions.append(np.arange(starts[i] + num_shared, starts[i + 1]))
            new_lengths.append(lengths[i] - num_shared)
            prefixes.append(prefix)
        order += documents
    if max(prefixes) < 0:
        return batch
    index = torch.from_numpy(np.concatenate(positions))
    document_order = torch.tensor(order)
    return row._map_per_token(
        lambda value: value[:, index],
        documents=Documents.from_lengths(new_lengths, prefixes=prefixes),
        per_document={name: value[document_order] for name, value in row.per_document.items()},
    )


def _num_shared(columns: Sequence[np.ndarray], spans: Sequence[tuple[int, int]], is_label: np.ndarray | None) -> int:
    """Return the number of leading tokens that documents share as a prefix; 0 if copies of their keys would not pay.

    Args:
        columns: values of the tokens in which the documents are compared, the labels among them, ``[s, values]`` each.
        spans: start and length of each document.
        is_label: whether a token must not be in a prefix, bool ``[s]``; None for no such token.
    """
    if len(spans) == 1:
        return 0
    first_start, _ = spans[0]
    num_shared = min(length for _, length in spans) - 1  # leaves every document a token: none may be empty
    for start, _ in spans[1:]:
        for values in columns:
            first_values = values[first_start : first_start + num_shared]
            differs = (first_values != values[start : start + num_shared]).any(-1)
            if differs.any():
                num_shared = int(differs.argmax())
    if is_label is not None:
        is_shared_label = is_label[first_start : first_start + num_shared]
        if is_shared_label.any():
            num_shared = int(is_shared_label.argmax())
    if num_shared < MIN_SHARED:
        return 0
    return num_shared

"""Document boundaries in a batch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from torchtune.data._rows import DataError


@dataclass(frozen=True)
class SharedPrefixes:
    """Shared prefixes of documents, as tensors on the device of the batch.

    Attributes:
        keys: int64 ``[k]``, positions of the keys that each document attends to (its prefix, then itself),
            concatenated.
        cu_keys: int32 ``[documents + 1]``, cumulative number of keys of the documents, starting at 0.
        whole: int64 ``[n]``, indices of the documents that are not prefixes.
        prefix: int64 ``[n]``, for each document in ``whole``, index of its prefix, or -1.
    """

    keys: Tensor
    cu_keys: Tensor
    whole: Tensor
    prefix: Tensor

    @classmethod
    def of(cls, starts: Sequence[int], lengths: Sequence[int], prefixes: Sequence[int]) -> "SharedPrefixes":
        """Build from start positions, lengths, and the index of each document's prefix (-1: no prefix)."""
        positions = []  # of each document
        for start, length in zip(starts, lengths, strict=True):
            positions.append(torch.arange(start, start + length))
        keys = []
        document_indices = []  # of those that are not prefixes
        prefix_of_document = []
        prefix_indices = set(prefixes)  # with -1, which is the index of no document
        for document, prefix in enumerate(prefixes):
            document_keys = positions[document]
            if prefix >= 0:
                document_keys = torch.cat([positions[prefix], document_keys])
            keys.append(document_keys)
            if document not in prefix_indices:
                document_indices.append(document)
                prefix_of_document.append(prefix)
        num_keys = list(map(len, keys))
        cu_keys = torch.tensor([0, *accumulate(num_keys)], dtype=torch.int32)
        return cls(torch.cat(keys), cu_keys, torch.tensor(document_indices), torch.tensor(prefix_of_document))

    def sums(self, values: Tensor) -> Tensor:
        """Add the sum of each prefix to the documents that continue it: ``[documents]`` to ``[n]``."""
        return values[self.whole] + torch.where(self.prefix < 0, 0, values[self.prefix])

    def map(self, function: Callable[[Tensor], Tensor]) -> "SharedPrefixes":
        """Apply ``function`` to every tensor."""
        return SharedPrefixes(function(self.keys), function(self.cu_keys), function(self.whole), function(self.prefix))


@dataclass(frozen=True)
class Documents:
    """Boundaries of the documents in a flattened, padding-free batch of ``b * s`` positions.

    Collation sets the boundaries; they are not inferred from end-of-sequence tokens. Attention is causal within each
    document.

    Documents with the same beginning can share it as a prefix, which is in the batch once, as a separate document.
    Tokens of a document that continues a prefix attend to the prefix and to their own document, and their positions
    continue the positions of the prefix.

    Attributes:
        lengths: length of every document without its prefix, in order, on the host.
        cu_seqlens: int32 ``[len(lengths) + 1]``, cumulative lengths from 0, on the device of the batch.
        prefixes: index of each document's prefix, or -1; empty if there are no prefixes.
        shared: the prefixes as tensors; ``None`` if there are none.

    Example:
        >>> torchtune.data.Documents.from_lengths([2, 3]).cu_seqlens
        tensor([0, 2, 5], dtype=torch.int32)
        >>> torchtune.data.Documents.from_lengths([3, 2, 1], prefixes=[-1, 0, 0]).positions()
        tensor([0, 1, 2, 3, 4, 3])
    """

    lengths: tuple[int, ...]
    cu_seqlens: Tensor
    prefixes: tuple[int, ...] = ()
    shared: SharedPrefixes | None = None

    @classmethod
    def from_lengths(
        cls, lengths: Sequence[int], device: torch.device | str | None = None, prefixes: Sequence[int] = ()
    ) -> "Documents":
        """Build from document lengths.

        Args:
            lengths: length of every document.
            device: device of the tensors.
            prefixes: index of each document's prefix, or -1; by default there are no prefixes.

        Raises:
            DataError: there is no document, or a length is below 1.
            ValueError: an index is out of range, or a prefix has a prefix itself.
        """
        lengths = tuple(int(length) for length in lengths)
        prefixes = tuple(int(index) for index in prefixes)
        if not lengths or min(lengths) < 1:
            raise DataError(f"Every document needs at least one token, got lengths {lengths}: leave out empty rows.")
        starts = [0, *accumulate(lengths)]
        shared = None
        if any(index >= 0 for index in prefixes):
            if len(prefixes) != len(lengths) or max(prefixes) >= len(lengths):
                raise ValueError(f"prefixes {prefixes} do not name documents of {len(lengths)}.")
            if any(prefixes[index] >= 0 for index in prefixes if index >= 0):
                raise ValueError(f"A document goes on from one that itself goes on from another: prefixes {prefixes}.")
            shared = SharedPrefixes.of(starts[:-1], lengths, prefixes)
        else:
            prefixes = ()  # -1 for every document means no prefixes, too
        documents = cls(lengths, torch.tensor(starts, dtype=torch.int32), prefixes, shared)
        if device is None:
            return documents
        if torch.device(device).type == "cuda":
            # Of pinned memory the host does not wait for the copy.
            return documents.pin_memory().to(device, non_blocking=True)
        return documents.to(device)

    def split_into_chunks(self, size: int) -> "Documents":
        """Return the boundaries of chunks of ``size`` positions; the last chunk of a document may be shorter.

        Layers that attend within chunks (Llama 4) take each chunk for a document. A chunk that begins in a shared
        prefix and ends in a document becomes two: the end of the prefix, and the start of each document that shares it.
        """
        if self.max_length <= size:
            return self
        lengths: list[int] = []
        first_chunks: list[int] = []  # of each document
        last_chunks: list[int] = []
        for prefix_length, length in zip(self.before, self.lengths, strict=True):
            # Chunks are counted from the start of the prefix.
            cuts = [0, *range(size - prefix_length % size, length, size), length]
            first_chunks.append(len(lengths))
            lengths += [end - start for start, end in pairwise(cuts)]
            last_chunks.append(len(lengths) - 1)
        prefixes = [-1] * len(lengths)
        # Not strict: `self.prefixes` is empty if there are no prefixes.
        for first_chunk, prefix_length, prefix in zip(first_chunks, self.before, self.prefixes, strict=False):
            if prefix_length % size:  # the first chunk begins inside the prefix: the chunk at its end is shared
                prefixes[first_chunk] = last_chunks[prefix]
        return Documents.from_lengths(lengths, self.cu_seqlens.device, prefixes)

    @property
    def max_length(self) -> int:
        """Length of the longest document, including its prefix."""
        return max(before + length for before, length in zip(self.before, self.lengths, strict=True))

    @property
    def before(self) -> tuple[int, ...]:
        """Length of each document's prefix; 0 for documents without a prefix."""
        if not self.prefixes:
            return (0,) * len(self.lengths)
        prefix_lengths = []
        for index in self.prefixes:
            if index >= 0:
                prefix_lengths.append(self.lengths[index])
            else:
                prefix_lengths.append(0)
        return tuple(prefix_lengths)

    @property
    def num_prefixes(self) -> int:
        """Number of prefixes."""
        return len({index for index in self.prefixes if index >= 0})

    @property
    def num_tokens(self) -> int:
        """Number of positions in all documents."""
        return sum(self.lengths)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "Documents":
        """Copy the tensors to ``device``."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> "Documents":
        """Copy the tensors to pinned host memory."""
        return self._map(Tensor.pin_memory)

    def _map(self, function: Callable[[Tensor], Tensor]) -> "Documents":
        shared = None
        if self.shared is not None:
            shared = self.shared.map(function)
        return Documents(self.lengths, function(self.cu_seqlens), self.prefixes, shared)

    def ends(self) -> Tensor:
        """Return the last position of every document that is not a prefix, int64 ``[n]``, on the device."""
        last = self.cu_seqlens[1:].long() - 1
        if self.shared is None:
            return last
        return last[self.shared.whole]

    def document_ids(self) -> Tensor:
        """Return the index of each token's document, int64 ``[b * s]``, on the device of the boundaries."""
        numbers = torch.arange(len(self.lengths), device=self.cu_seqlens.device)
        # Without output_size, the host would wait for the device to read the sum of the lengths.
        return numbers.repeat_interleave(self.cu_seqlens.diff(), output_size=self.num_tokens)

    def positions(self) -> Tensor:
        """Return each token's position in its document, counted from the start of the prefix, int64 ``[b * s]``.

        They are computed on the device of the boundaries.
        """
        first = -self.cu_seqlens[:-1].long()  # position of the token at index 0, if it belonged to the document
        if self.shared is not None:
            prefix = self.shared.prefix
            lengths = self.cu_seqlens.diff().long()
            prefix_lengths = torch.where(prefix < 0, 0, lengths[prefix])
            first = first.index_add(0, self.shared.whole, prefix_lengths)
        indices = torch.arange(self.num_tokens, device=first.device)
        return indices + first[self.document_ids()]

"""Boundaries of the documents in a batch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from itertools import accumulate, pairwise

import torch
from torch import Tensor


@dataclass(frozen=True)
class SharedPrefixes:
    """Which documents go on from which, as tensors on the device of the batch.

    Attributes:
        keys: int64 ``[k]``, the position of every key that is read, one document after the other: those of the
            document that it goes on from, then its own.
        cu_keys: int32 ``[documents + 1]``, cumulative numbers of these keys, from 0.
        whole: int64 ``[n]``, the documents that are no prefix of others.
        prefix: int64 ``[n]``, the document that each of those goes on from, or -1.
    """

    keys: Tensor
    cu_keys: Tensor
    whole: Tensor
    prefix: Tensor

    @classmethod
    def of(cls, starts: Sequence[int], lengths: Sequence[int], prefixes: Sequence[int]) -> "SharedPrefixes":
        """Build from first positions and lengths, and from the document that each one goes on from, or -1."""
        spans = [torch.arange(start, start + length) for start, length in zip(starts, lengths, strict=False)]
        parts = [spans[i] if p < 0 else torch.cat([spans[p], spans[i]]) for i, p in enumerate(prefixes)]
        cu_keys = torch.tensor([0, *accumulate(map(len, parts))], dtype=torch.int32)
        shared = set(prefixes)
        whole = [i for i in range(len(spans)) if i not in shared]
        return cls(torch.cat(parts), cu_keys, torch.tensor(whole), torch.tensor([prefixes[i] for i in whole]))

    def sums(self, values: Tensor) -> Tensor:
        """Sums of all documents ``[documents]`` as sums of those that are no prefix ``[n]``, with their prefix's."""
        return values[self.whole] + torch.where(self.prefix < 0, 0, values[self.prefix])

    def map(self, function: Callable[[Tensor], Tensor]) -> "SharedPrefixes":
        """The same with ``function`` applied to every tensor."""
        return SharedPrefixes(*(function(getattr(self, entry.name)) for entry in fields(self)))


@dataclass(frozen=True)
class Documents:
    """Boundaries of the documents in a flattened, padding-free batch of ``b * s`` positions.

    Collation writes them; they are not inferred from end-of-sequence tokens. Attention is causal within each document.

    Documents that begin alike may share their beginning: it stands once in the batch, as a document of its own, and
    the others go on from it. Their tokens attend to it and to their own document, and their positions follow its last.

    Attributes:
        lengths: length of every document, in order, on the host; without what it shares.
        cu_seqlens: int32 ``[len(lengths) + 1]``, cumulative lengths from 0, on the device of the batch.
        prefixes: index of the document that each one goes on from, or -1; empty if nothing is shared.
        shared: the same as tensors; ``None`` if nothing is shared.

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
            lengths: of every document.
            device: of the tensors.
            prefixes: index of the document that each one goes on from, or -1; by default no document does.

        Raises:
            ValueError: a length is below 1, or a document goes on from one that goes on from another.
        """
        lengths, prefixes = tuple(int(length) for length in lengths), tuple(int(index) for index in prefixes)
        if not lengths or min(lengths) < 1:
            raise ValueError(f"Every document needs at least one token, got lengths {lengths}.")
        starts = [0, *accumulate(lengths)]
        shared = None
        if any(index >= 0 for index in prefixes):
            if len(prefixes) != len(lengths) or max(prefixes) >= len(lengths):
                raise ValueError(f"prefixes {prefixes} do not name documents of {len(lengths)}.")
            if any(prefixes[index] >= 0 for index in prefixes if index >= 0):
                raise ValueError(f"A document goes on from one that itself goes on from another: prefixes {prefixes}.")
            shared = SharedPrefixes.of(starts, lengths, prefixes)
        else:
            prefixes = ()
        documents = cls(lengths, torch.tensor(starts, dtype=torch.int32), prefixes, shared)
        return documents if device is None else documents.to(device)

    def in_chunks(self, size: int) -> "Documents":
        """Boundaries of the chunks of ``size`` positions that each document consists of; its last may be shorter."""
        if self.max_length <= size:
            return self
        lengths, begins, ends = [], [], []
        for before, length in zip(self.before, self.lengths, strict=True):
            cuts = [0, *range(size - before % size, length, size), length]
            begins.append(len(lengths))
            lengths += [end - start for start, end in pairwise(cuts)]
            ends.append(len(lengths) - 1)
        prefixes = [-1] * len(lengths)
        for begin, before, index in zip(begins, self.before, self.prefixes, strict=False):
            prefixes[begin] = ends[index] if before % size else -1  # it goes on in the last chunk of what it shares
        return Documents.from_lengths(lengths, self.cu_seqlens.device, prefixes)

    @property
    def max_length(self) -> int:
        """Length of the longest document, with what it shares."""
        return max(before + length for before, length in zip(self.before, self.lengths, strict=True))

    @property
    def before(self) -> tuple[int, ...]:
        """How many positions of another document each one goes on from."""
        return tuple(self.lengths[index] if index >= 0 else 0 for index in self.prefixes) or (0,) * len(self.lengths)

    @property
    def num_prefixes(self) -> int:
        """Number of documents that others go on from."""
        return len({index for index in self.prefixes if index >= 0})

    @property
    def num_tokens(self) -> int:
        """Number of positions in all documents."""
        return sum(self.lengths)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "Documents":
        """The same boundaries with their tensors on ``device``."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> "Documents":
        """The same boundaries with their tensors in pinned host memory."""
        return self._map(Tensor.pin_memory)

    def _map(self, function: Callable[[Tensor], Tensor]) -> "Documents":
        shared = None if self.shared is None else self.shared.map(function)
        return Documents(self.lengths, function(self.cu_seqlens), self.prefixes, shared)

    def ends(self) -> Tensor:
        """The last position of every document that is no prefix, int64 ``[n]``, on the device."""
        last = self.cu_seqlens[1:].long() - 1
        return last if self.shared is None else last[self.shared.whole]

    def positions(self) -> Tensor:
        """Position of every token in its document, from 0, or from the end of what it shares; int64 ``[b * s]``."""
        spans = zip(self.before, self.lengths, strict=True)
        return torch.cat([torch.arange(before, before + length) for before, length in spans])

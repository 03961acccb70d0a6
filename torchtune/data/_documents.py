"""Boundaries of the documents in a batch."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch


@dataclass(frozen=True)
class Documents:
    """Boundaries of the documents in a flattened, padding-free batch of ``b * s`` positions.

    Collation writes them; they are not inferred from end-of-sequence tokens. Attention is causal within each document.

    Attributes:
        lengths: length of every document, in order, on the host.
        cu_seqlens: int32 ``[len(lengths) + 1]``, cumulative lengths from 0, on the device of the batch.

    Example:
        >>> torchtune.data.Documents.from_lengths([2, 3]).cu_seqlens
        tensor([0, 2, 5], dtype=torch.int32)
    """

    lengths: tuple[int, ...]
    cu_seqlens: torch.Tensor

    @classmethod
    def from_lengths(cls, lengths: Sequence[int], device: torch.device | str | None = None) -> "Documents":
        """Build from document lengths. Raises ``ValueError`` for a length below 1."""
        lengths = tuple(int(length) for length in lengths)
        if not lengths or min(lengths) < 1:
            raise ValueError(f"Every document needs at least one token, got lengths {lengths}.")
        cu_seqlens = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
        return cls(lengths, cu_seqlens.to(device) if device is not None else cu_seqlens)

    def in_chunks(self, size: int) -> "Documents":
        """Boundaries of the chunks of ``size`` positions that each document consists of; its last may be shorter."""
        if self.max_length <= size:
            return self
        lengths = [min(size, length - start) for length in self.lengths for start in range(0, length, size)]
        return Documents.from_lengths(lengths, self.cu_seqlens.device)

    @property
    def max_length(self) -> int:
        """Length of the longest document."""
        return max(self.lengths)

    @property
    def num_tokens(self) -> int:
        """Number of positions in all documents."""
        return sum(self.lengths)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "Documents":
        """The same boundaries with ``cu_seqlens`` on ``device``."""
        return Documents(self.lengths, self.cu_seqlens.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> "Documents":
        """The same boundaries with ``cu_seqlens`` in pinned host memory."""
        return Documents(self.lengths, self.cu_seqlens.pin_memory())

    def positions(self) -> torch.Tensor:
        """Position of every token in its document, from 0; int64 ``[b * s]``."""
        return torch.cat([torch.arange(length) for length in self.lengths])

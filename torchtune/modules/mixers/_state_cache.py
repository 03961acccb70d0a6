"""Cache of a recurrent mixer's state during generation."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from torchtune.modules.kv_cache import Place


class StateCache(nn.Module):
    """Cache of a recurrent state of fixed size and of the last inputs of a convolution.

    The non-persistent buffers ``state`` and ``tail`` are initialized to zero.

    Args:
        state: shape of the state, ``[b, ...]``; ``(0,)`` for mixers without a state.
        tail: shape of the last inputs, ``[b, K - 1, c]``.
        dtype: dtype of ``tail``; the state is float32.

    Example:
        >>> cache = torchtune.modules.mixers.StateCache((2, 4), (8, 2), torch.float32)
        >>> sum(buffer.numel() for buffer in cache.buffers()) >= 2 * 4 + 8 * 2
        True
    """

    def __init__(self, state: Sequence[int], tail: Sequence[int], dtype: torch.dtype) -> None:
        super().__init__()
        self.register_buffer("state", torch.zeros(state), persistent=False)
        self.register_buffer("tail", torch.zeros(tail, dtype=dtype), persistent=False)
        self.place: Place | None = None

    def reset(self) -> None:
        """Empty the cache."""
        self.state.zero_()
        self.tail.zero_()

    def rows(self, count: int) -> slice:
        """Return the cache rows of a forward pass with ``count`` sequences."""
        first = 0 if self.place is None else self.place.row
        return slice(first, first + count)

    def copy_rows(self, source: Tensor, target: Tensor, first: int, end: int) -> None:
        """Copy the rows ``source`` to the rows ``target``; ``first`` and ``end`` are ignored."""
        for kept in (self.state, self.tail):
            if kept.ndim > 1:
                kept[target] = kept[source]

    def move(self, first: int, end: int, to: int, columns: int) -> None:
        """Do nothing: a state has no columns."""

    def extend(self, x: Tensor) -> Tensor:
        """Return the cached inputs and ``x`` ``[b', s, c]`` as ``[b', K - 1 + s, c]``; cache the last inputs."""
        rows, length = self.rows(x.shape[0]), self.tail.shape[1]
        x = torch.cat([self.tail[rows].to(x.dtype), x], dim=1)
        self.tail[rows] = x[:, x.shape[1] - length :]
        return x

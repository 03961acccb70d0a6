"""The state of a mixer that is not attention, kept during generation."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn


class StateCache(nn.Module):
    """What earlier positions have left: a state of fixed size, and the last inputs of a convolution.

    Buffers, none of which is saved: ``state`` and ``tail``, zero at first.

    Args:
        state: shape of the state, ``[b, ...]``; empty for mixers without one.
        tail: shape of the last inputs, ``[b, K - 1, c]``.
        dtype: of ``tail``; the state is float32.
    """

    def __init__(self, state: Sequence[int], tail: Sequence[int], dtype: torch.dtype) -> None:
        super().__init__()
        self.register_buffer("state", torch.zeros(state), persistent=False)
        self.register_buffer("tail", torch.zeros(tail, dtype=dtype), persistent=False)

    def reset(self) -> None:
        """Forget everything."""
        self.state.zero_()
        self.tail.zero_()

    def select(self, rows: Tensor) -> None:
        """Keep these rows, in this order; a row may come more than once."""
        for kept in (self.state, self.tail):
            if kept.ndim > 1:
                kept[: len(rows)] = kept[rows]

    def drop(self, positions: int) -> None:
        """Forget the last positions. Raises ``RuntimeError``: a state cannot."""
        raise RuntimeError("The state of a layer without attention cannot forget positions.")

    def extend(self, x: Tensor) -> Tensor:
        """``x`` ``[b', s, c]`` behind the inputs before it, ``[b', K - 1 + s, c]``; remembers its end."""
        rows, length = x.shape[0], self.tail.shape[1]
        x = torch.cat([self.tail[:rows].to(x.dtype), x], dim=1)
        self.tail[:rows] = x[:, x.shape[1] - length :]
        return x

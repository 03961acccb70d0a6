"""Base class of sequence mixers other than attention, and the cache of their state during generation."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from torchtune.data import Documents
from torchtune.modules.kernels.documents import Boundaries
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
        for buffer in (self.state, self.tail):
            if buffer.ndim > 1:  # a mixer without a state has an empty one
                buffer[target] = buffer[source]

    def move(self, first: int, end: int, to: int, columns: int) -> None:
        """Do nothing: a state has no columns."""

    def extend(self, x: Tensor) -> Tensor:
        """Return the cached inputs and ``x`` ``[b', s, c]`` as ``[b', K - 1 + s, c]``; cache the last inputs."""
        rows = self.rows(x.shape[0])
        num_cached = self.tail.shape[1]  # K - 1
        extended = torch.cat([self.tail[rows].to(x.dtype), x], dim=1)
        self.tail[rows] = extended[:, extended.shape[1] - num_cached :]
        return extended


Blocks = tuple[tuple[int, int], ...]  # number of heads and channels per head of consecutive groups of channels


class MixerShare:
    """The share of a mixer's positions and heads that a process has and computes: all of them.

    :class:`torchtune.modules.parallel.SequenceShare` replaces it if sequences are sharded over ranks. Channels
    lie head by head in blocks: ``((n, h), (m, g))`` are n heads of h channels each, then m heads of g channels.
    """

    def local_positions(self, positions: Tensor) -> Tensor:
        """Return those of ``positions`` ``[b, s]`` that this process's hidden states have."""
        return positions

    def num_heads(self, heads: int) -> int:
        """Return the number of heads that this process computes, of ``heads`` in total."""
        return heads

    def local_channels(self, parameter: Tensor, blocks: Blocks) -> Tensor:
        """Return the channels of this process's heads, from a parameter ``[c, ...]`` of all heads."""
        return parameter

    def gather_positions(
        self, channels: Sequence[Tensor], blocks: Sequence[Blocks], reach: Tensor
    ) -> tuple[Sequence[Tensor], Tensor]:
        """Exchange the channels of other heads for all positions of the sequence.

        Args:
            channels: tensors of one dtype for this process's positions, ``[b, s, c]`` each.
            blocks: blocks of the channels of each tensor.
            reach: number of earlier positions in the same document, ``[b, s]``.

        Returns:
            The channels of this process's heads for all positions, and the reach of all positions, of which numbers
            above 256 may be returned as 256.
        """
        return channels, reach

    def scatter_positions(self, heads: Tensor) -> Tensor:
        """Return all heads ``[b, s, n, h]`` of this process's positions, from its heads of all positions."""
        return heads

    def with_earlier_positions(self, x: Tensor, reach: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Return ``x`` ``[b, s, c]`` and ``reach``, preceded by up to ``count`` positions that other processes have."""
        return x, reach


class RecurrentMixer(nn.Module, ABC):
    """Base class of mixers with a recurrent state, which replace attention (``TransformerSelfAttentionLayer.attn``).

    The call signature is the same as that of attention. The state is reset where ``input_pos`` is 0: at the start of
    each document in a packed batch, and of the text in left-padded prompts. Subclasses implement ``_new_cache`` and
    ``_mix``.

    Example:
        >>> issubclass(torchtune.modules.mixers.ShortConv, torchtune.modules.mixers.RecurrentMixer)
        True
    """

    pos_embeddings = None
    window = None
    softcap = None
    sinks = None

    def __init__(self) -> None:
        super().__init__()
        self.kv_cache: StateCache | None = None
        self.cache_enabled = False
        self.share = MixerShare()

    def sharing_obstacle(self, ranks: int) -> str | None:
        """Return why ``ranks`` ranks cannot share sequences, for an error message, or None if they can.

        Subclasses that compute with :attr:`share` override it.
        """
        return f"the state of {type(self).__name__} layers is not passed from rank to rank"

    @property
    def state_elements(self) -> int:
        """Number of elements of one sequence's state; 0 for mixers without a recurrent state."""
        return 0

    @property
    def kernel_chunk(self) -> int | None:
        """Number of positions in a chunk of this mixer's kernel; None without a kernel that takes their indices."""
        return None

    @property
    def conv_gap(self) -> int:
        """Number of places between documents that the mixer's convolution needs to compute them all as one row."""
        return 0

    @abstractmethod
    def _mix(
        self, x: Tensor, reach: Tensor, cache: StateCache | None, documents: Documents | Boundaries | None
    ) -> Tensor:
        """Mix ``[b, s, d]``.

        Args:
            x: hidden states ``[b, s, d]``.
            reach: ``[b, s]``, number of earlier positions in the same document.
            cache: cache with earlier positions, or None.
            documents: boundaries of the same documents; None: only ``reach`` has them.
        """

    @abstractmethod
    def _new_cache(self, batch_size: int, dtype: torch.dtype) -> StateCache:
        """Make an empty cache on the default device."""

    def setup_cache(self, batch_size: int, dtype: torch.dtype, max_seq_len: int) -> None:
        """Set up the cache for ``batch_size`` rows; ``max_seq_len`` is ignored."""
        if self.kv_cache is None:
            self.kv_cache = self._new_cache(batch_size, dtype)
            self.cache_enabled = True

    def reset_cache(self) -> None:
        """Empty the cache. Raises ``RuntimeError`` if there is no cache."""
        if self.kv_cache is None:
            raise RuntimeError("There is no cache to reset: call setup_cache() first.")
        self.kv_cache.reset()

    def forward(
        self,
        x: Tensor,
        *,
        mask: object = None,
        input_pos: Tensor | None = None,
        documents: Documents | Boundaries | None = None,
        rope: object = None,
    ) -> Tensor:
        """Mix the positions of each document; ``input_pos`` defines the documents.

        Args:
            x: ``[b, s, d]``.
            mask: ignored; accepted because attention has the argument.
            input_pos: position of each token in its document, ``[b, s]``, ``[1, s]`` or ``[s]``; by default each row is
                one document.
            documents: boundaries of the documents that ``input_pos`` defines; kernels of other packages read them.
            rope: ignored.

        Returns:
            Tensor ``[b, s, d]``.
        """
        if input_pos is None:
            input_pos = torch.arange(x.shape[1], device=x.device)
        positions = self.share.local_positions(input_pos.view(-1, input_pos.shape[-1]))
        reach = positions.expand(x.shape[0], -1)
        cache = self.kv_cache if self.cache_enabled else None
        return self._mix(x, reach, cache, documents)


def heads_obstacle(kind: str, ranks: int, heads: int, shared: int, shared_name: str) -> str | None:
    """Return why ``ranks`` ranks cannot share the heads of a mixer, or None if they can.

    Args:
        kind: name of the mixer.
        ranks: number of ranks.
        heads: number of heads with a state.
        shared: number of smaller parts, each for heads / shared consecutive heads. With fewer parts than ranks, some
            ranks compute with the same one.
        shared_name: name of the parts in the message.
    """
    if heads % ranks == 0 and (shared % ranks == 0 or ranks % shared == 0):
        return None
    return (
        f"it must divide the {heads} heads of {kind} layers, and divide their {shared} {shared_name} or be a multiple "
        "of them"
    )

"""The KV cache: keys and values of earlier positions during generation."""

import torch
from torch import Tensor, nn


class KVCache(nn.Module):
    """The KV cache of one attention layer, filled from the left.

    Non-persistent buffers: ``k_cache`` and ``v_cache`` ``[b, n_kv, max_seq_len, h]``, and ``cache_pos``.

    Args:
        batch_size: b.
        max_seq_len: capacity in positions.
        num_kv_heads: n_kv.
        head_dim: h.
        dtype: of keys and values.
    """

    def __init__(self, batch_size: int, max_seq_len: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> None:
        super().__init__()
        shape = (batch_size, num_kv_heads, max_seq_len, head_dim)
        self.register_buffer("k_cache", torch.zeros(shape, dtype=dtype), persistent=False)
        self.register_buffer("v_cache", torch.zeros(shape, dtype=dtype), persistent=False)
        self.register_buffer("cache_pos", torch.arange(0, max_seq_len), persistent=False)
        self.batch_size = batch_size

    @property
    def size(self) -> int:
        """Number of positions filled."""
        return self.cache_pos[0].item()

    def reset(self) -> None:
        """Forget everything."""
        self.k_cache.zero_()
        self.v_cache.zero_()
        self.cache_pos -= self.cache_pos[0].clone()

    def select(self, rows: Tensor) -> None:
        """Keep these rows, in this order; a row may come more than once."""
        for kept in (self.k_cache, self.v_cache):
            kept[: len(rows)] = kept[rows]

    def drop(self, positions: int) -> None:
        """Forget the last positions."""
        self.cache_pos.sub_(positions)

    def update(self, k_val: Tensor, v_val: Tensor) -> tuple[Tensor, Tensor]:
        """Append positions and return the whole cache.

        Args:
            k_val: keys ``[b', n_kv, s, h]`` with b' at most the cache's batch size.
            v_val: values of the same shape.

        Returns:
            Keys and values ``[b', n_kv, max_seq_len, h]``; unfilled positions are zero.

        Raises:
            ValueError: more rows than the cache has.
            AssertionError: more positions than the cache's capacity.
        """
        bsz, _, seq_len, _ = k_val.shape
        if bsz > self.k_cache.shape[0]:
            raise ValueError(f"The cache holds {self.k_cache.shape[0]} rows, but got a batch of {bsz}: make it larger.")
        assert self.cache_pos[0] + seq_len <= self.k_cache.shape[2], (
            f"The cache holds {self.k_cache.shape[2]} positions, too few for {seq_len} more: make it larger."
        )
        where = self.cache_pos[:seq_len]
        self.k_cache[:bsz].index_copy_(2, where, k_val.to(self.k_cache.dtype))
        self.v_cache[:bsz].index_copy_(2, where, v_val.to(self.v_cache.dtype))
        self.cache_pos.add_(seq_len)
        return self.k_cache[:bsz], self.v_cache[:bsz]

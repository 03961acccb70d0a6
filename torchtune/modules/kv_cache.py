"""KV caches: keys and values of earlier positions during generation, and their setup in a model."""

import contextlib
from collections.abc import Generator
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass
class Place:
    """Cache positions that a forward pass of a continuous batch reads and writes; one object, shared by all layers.

    Args:
        row: first row of the batch in the cache.
        first: first column that attention reads.
        end: first column that is written; equal to ``first`` if nothing is cached yet.
        rows: for padding-free prompts ``[1, n]``: the cache row of each position, int64 ``[n]``.
        columns: the cache column of each position, int64 ``[n]``.
        column: the column of one new position of every row of the cache, int64 ``[1]``, instead of the other numbers;
            attention then reads all rows and columns.
    """

    row: int = 0
    first: int = 0
    end: int = 0
    rows: Tensor | None = None
    columns: Tensor | None = None
    column: Tensor | None = None


class KVCache(nn.Module):
    """KV cache of one attention layer, filled from the left.

    Non-persistent buffers: ``k_cache`` and ``v_cache`` ``[b, n_kv, max_seq_len, h]``, and ``cache_pos``.

    Args:
        batch_size: b.
        max_seq_len: capacity in positions.
        num_kv_heads: n_kv.
        head_dim: h.
        dtype: dtype of keys and values.
        value_dim: size of a value; by default ``head_dim``. 0: cache only keys.

    Example:
        >>> sizes = {"batch_size": 1, "max_seq_len": 8, "num_kv_heads": 2, "head_dim": 4}
        >>> cache = torchtune.modules.KVCache(**sizes, dtype=torch.float32)
        >>> cache.size
        0
    """

    def __init__(
        self,
        batch_size: int,
        max_seq_len: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        value_dim: int | None = None,
    ) -> None:
        super().__init__()
        value_dim = head_dim if value_dim is None else value_dim
        k_cache = torch.zeros(batch_size, num_kv_heads, max_seq_len, head_dim, dtype=dtype)
        v_cache = torch.zeros(batch_size, num_kv_heads, max_seq_len, value_dim, dtype=dtype)
        self.register_buffer("k_cache", k_cache, persistent=False)
        self.register_buffer("v_cache", v_cache, persistent=False)
        # The columns that are filled next: its first number is the number of filled positions. A tensor, so that a
        # compiled step is the same for all positions.
        self.register_buffer("cache_pos", torch.arange(0, max_seq_len), persistent=False)
        self.batch_size = batch_size
        self.place: Place | None = None

    @property
    def size(self) -> int:
        """Number of positions filled."""
        return self.cache_pos[0].item()

    def reset(self) -> None:
        """Empty the cache."""
        self.k_cache.zero_()
        self.v_cache.zero_()
        self.cache_pos -= self.cache_pos[0].clone()

    def copy_rows(self, source: Tensor, target: Tensor, first: int, end: int) -> None:
        """Copy columns ``first`` to ``end`` from the rows ``source`` to the rows ``target``."""
        for cache in (self.k_cache, self.v_cache):
            cache[target, :, first:end] = cache[source, :, first:end]

    def read(self, row: int, first: int, end: int) -> tuple[Tensor, Tensor]:
        """Return copies of the keys and values ``[n_kv, s, h]`` of the columns ``first`` to ``end`` of a row."""
        keys = self.k_cache[row, :, first:end]
        values = self.v_cache[row, :, first:end]
        return keys.clone(), values.clone()

    def write(self, row: int, first: int, keys: Tensor, values: Tensor) -> None:
        """Replace keys and values of a row, from the column ``first`` on, by those of :meth:`read`."""
        end = first + keys.shape[1]
        self.k_cache[row, :, first:end] = keys
        self.v_cache[row, :, first:end] = values

    def move(self, first: int, end: int, to: int, columns: int) -> None:
        """Move columns ``first`` to ``end`` to begin at ``to``, and resize the cache to ``columns`` positions."""
        for name in ("k_cache", "v_cache"):
            cache = getattr(self, name)  # [b, n_kv, max_seq_len, h]
            moved = cache[:, :, first:end]
            if columns == cache.shape[2]:
                moved = moved.clone()  # source and target may overlap
            else:
                batch_size, num_kv_heads, _, width = cache.shape
                cache = cache.new_zeros(batch_size, num_kv_heads, columns, width)
                setattr(self, name, cache)
            cache[:, :, to : to + end - first] = moved

    def update(self, k_val: Tensor, v_val: Tensor) -> tuple[Tensor, Tensor]:
        """Append positions and return the whole cache.

        Args:
            k_val: keys ``[b', n_kv, s, h]`` with b' at most the cache's batch size.
            v_val: values of the same shape.

        Returns:
            Keys and values ``[b', n_kv, max_seq_len, h]``; unfilled positions are zero. With a :class:`Place`, only
            its rows and columns.

        Raises:
            ValueError: more rows than the cache has.
            AssertionError: more positions than the cache's capacity.
        """
        if self.place is not None:
            return self._update_at(self.place, k_val, v_val)
        batch_size, _, seq_len, _ = k_val.shape
        max_batch_size, _, max_seq_len, _ = self.k_cache.shape
        if batch_size > max_batch_size:
            raise ValueError(f"The cache holds {max_batch_size} rows, but got a batch of {batch_size}: make it larger.")
        assert self.cache_pos[0] + seq_len <= max_seq_len, (
            f"The cache holds {max_seq_len} positions, too few for {seq_len} more: make it larger."
        )
        columns = self.cache_pos[:seq_len]  # a tensor, so that a compiled step serves all positions
        keys = self.k_cache[:batch_size]  # views [b', n_kv, max_seq_len, h]
        values = self.v_cache[:batch_size]
        keys.index_copy_(2, columns, k_val.to(keys.dtype))
        values.index_copy_(2, columns, v_val.to(values.dtype))
        self.cache_pos.add_(seq_len)
        return keys, values  # with unfilled positions, which the caller masks: the shape is the same at every step

    def _update_at(self, place: Place, k_val: Tensor, v_val: Tensor) -> tuple[Tensor, Tensor]:
        """Write keys and values ``[b', n_kv, s, h]`` at a place, and return those that attention reads."""
        if place.column is not None:  # a step of decoding, one token for every row
            self.k_cache.index_copy_(2, place.column, k_val.to(self.k_cache.dtype))
            self.v_cache.index_copy_(2, place.column, v_val.to(self.v_cache.dtype))
            return self.k_cache, self.v_cache
        if place.rows is not None:
            # Prompts without padding: each position has a row and a column of its own. Indexing does not cast.
            keys = k_val[0].transpose(0, 1)  # [n, n_kv, h]
            values = v_val[0].transpose(0, 1)
            self.k_cache[place.rows, :, place.columns] = keys.to(self.k_cache.dtype)
            self.v_cache[place.rows, :, place.columns] = values.to(self.v_cache.dtype)
            return k_val, v_val  # nothing was cached before: prompts attend to themselves
        # Consecutive rows, whose new positions begin in one column.
        rows = slice(place.row, place.row + k_val.shape[0])
        end = place.end + k_val.shape[2]
        self.k_cache[rows, :, place.end : end] = k_val
        self.v_cache[rows, :, place.end : end] = v_val
        if place.first == place.end:  # nothing was cached before
            return k_val, v_val
        columns = slice(place.first, end)
        return self.k_cache[rows, :, columns], self.v_cache[rows, :, columns]


class EncoderCache:
    """Cache of a cross-attention layer: keys and values of an encoder's output, which do not grow with the text.

    Attributes:
        keys_and_values: ``[b, t, n_kv, h]`` each, or None if the cache is empty.
    """

    def __init__(self) -> None:
        self.keys_and_values: tuple[Tensor, Tensor] | None = None

    @property
    def size(self) -> int:
        """Number of positions filled."""
        if self.keys_and_values is None:
            return 0
        keys, _ = self.keys_and_values
        return keys.shape[1]

    def reset(self) -> None:
        """Empty the cache."""
        self.keys_and_values = None

    def update(self, k_val: Tensor, v_val: Tensor) -> tuple[Tensor, Tensor]:
        """Replace the cached keys and values by ``[b, n_kv, t, h]`` and return these."""
        self.keys_and_values = k_val.transpose(1, 2), v_val.transpose(1, 2)
        return k_val, v_val


def attention_modules(model: nn.Module) -> list[nn.Module]:
    """Return the modules that may have a key-value cache."""
    attentions = []
    for module in model.modules():
        # Not by class: mixers and layers of users have caches as well.
        if hasattr(module, "kv_cache") and hasattr(module, "cache_enabled"):
            attentions.append(module)
    return attentions


def _require_caches(model: nn.Module, action: str) -> list[nn.Module]:
    """Return :func:`attention_modules`. Raises ``ValueError`` if none has a cache."""
    attentions = attention_modules(model)
    if not any(module.kv_cache is not None for module in attentions):
        raise ValueError(f"The model has no key-value caches to {action}: call setup_caches() first.")
    return attentions


@contextlib.contextmanager
def local_kv_cache(
    model: nn.Module,
    *,
    batch_size: int,
    device: torch.device,
    dtype: torch.dtype,
    encoder_max_seq_len: int | None = None,
    decoder_max_seq_len: int | None = None,
) -> Generator[None, None, None]:
    """Set up the model's key-value caches inside the block and delete them after it.

    Args:
        model: model with ``setup_caches``.
        batch_size: size of the largest batch.
        device: device of the caches.
        dtype: dtype of the caches.
        encoder_max_seq_len: length of the encoder's cache.
        decoder_max_seq_len: length of the decoder's cache; by default the model's ``max_seq_len``.

    Raises:
        ValueError: the model has caches already.

    Example:
        >>> with torchtune.modules.local_kv_cache(model, batch_size=1, device=torch.device("cpu"), dtype=torch.float32):
        ...     model.caches_are_enabled()
        True
        >>> model.caches_are_enabled()
        False
    """
    if model.caches_are_setup():
        raise ValueError("The model has key-value caches already: call delete_kv_caches() before making local ones.")
    with torch.device(device):
        model.setup_caches(
            batch_size, dtype, encoder_max_seq_len=encoder_max_seq_len, decoder_max_seq_len=decoder_max_seq_len
        )
    try:
        yield
    finally:
        delete_kv_caches(model)


@contextlib.contextmanager
def disable_kv_cache(model: nn.Module) -> Generator[None, None, None]:
    """Disable the model's key-value caches inside the block, without changing their contents.

    Raises:
        ValueError: the model has no caches, or they are disabled already.

    Example:
        >>> model.setup_caches(1, torch.float32, decoder_max_seq_len=8)
        >>> with torchtune.modules.disable_kv_cache(model):
        ...     model.caches_are_enabled()
        False
    """
    attentions = _require_caches(model, "disable")
    if not any(module.cache_enabled for module in attentions):
        raise ValueError("The model's key-value caches are disabled already.")
    enabled = [module.cache_enabled for module in attentions]
    for module in attentions:
        module.cache_enabled = False
    try:
        yield
    finally:
        for module, state in zip(attentions, enabled, strict=True):
            module.cache_enabled = state


def delete_kv_caches(model: nn.Module) -> None:
    """Remove the model's key-value caches. Raises ``ValueError`` if it has none.

    Example:
        >>> model.setup_caches(1, torch.float32, decoder_max_seq_len=8)
        >>> torchtune.modules.delete_kv_caches(model)
        >>> model.caches_are_setup()
        False
    """
    for module in _require_caches(model, "delete"):
        module.kv_cache = None
        module.cache_enabled = False

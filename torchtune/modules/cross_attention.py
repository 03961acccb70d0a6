"""Cross-attention of text to the output of an encoder."""

from typing import Any

import torch
from torch import Tensor, nn

from torchtune.modules.attention import MultiHeadAttention
from torchtune.modules.kernels.onednn import fast_products
from torchtune.modules.kv_cache import EncoderCache


class TransformerCrossAttentionLayer(nn.Module):
    """Pre-norm layer of cross-attention and feed-forward, each with a residual connection.

    Positions that attend to no encoder output are unchanged, and so is text without encoder output.

    Args:
        attn: attention with ``pos_embeddings=None`` and ``is_causal=False``.
        mlp: feed-forward ``[b, s, d] -> [b, s, d]``.
        ca_norm: norm before attention; by default none.
        mlp_norm: norm before the feed-forward; by default none.
        ca_scale: scale of attention's output before the residual addition; by default none.
        mlp_scale: scale of the feed-forward's output before the residual addition; by default none.

    Raises:
        ValueError: ``attn`` has position embeddings.

    Example:
        >>> projections = {name: torch.nn.Linear(8, 8) for name in ("q_proj", "k_proj", "v_proj", "output_proj")}
        >>> sizes = {"embed_dim": 8, "num_heads": 2, "num_kv_heads": 2, "head_dim": 4}
        >>> attn = torchtune.modules.MultiHeadAttention(**sizes, **projections, is_causal=False)
        >>> layer = torchtune.modules.TransformerCrossAttentionLayer(attn, torch.nn.Linear(8, 8))
        >>> layer(torch.ones(1, 3, 8), encoder_input=torch.ones(1, 5, 8)).shape
        torch.Size([1, 3, 8])
    """

    def __init__(
        self,
        attn: MultiHeadAttention,
        mlp: nn.Module,
        *,
        ca_norm: nn.Module | None = None,
        mlp_norm: nn.Module | None = None,
        ca_scale: nn.Module | None = None,
        mlp_scale: nn.Module | None = None,
    ) -> None:
        super().__init__()
        if attn.pos_embeddings is not None:
            raise ValueError("Cross-attention has no positions: build its attention with pos_embeddings=None.")
        self.attn = attn
        self.mlp = mlp
        self.ca_norm = ca_norm or nn.Identity()
        self.mlp_norm = mlp_norm or nn.Identity()
        self.ca_scale = ca_scale or nn.Identity()
        self.mlp_scale = mlp_scale or nn.Identity()

    def setup_caches(
        self, batch_size: int, dtype: torch.dtype, *, encoder_max_seq_len: int | None, decoder_max_seq_len: int | None
    ) -> None:
        """Set up the cache of the encoder's keys and values, which takes its size from the encoder's output."""
        if self.attn.kv_cache is None:
            self.attn.kv_cache = EncoderCache()
            self.attn.cache_enabled = True

    def caches_are_setup(self) -> bool:
        """Return whether the layer has a cache."""
        return self.attn.kv_cache is not None

    def caches_are_enabled(self) -> bool:
        """Return whether the cache is enabled."""
        return self.attn.cache_enabled

    def reset_cache(self) -> None:
        """Empty the cache. Raises ``RuntimeError`` if there is none."""
        self.attn.reset_cache()

    def forward(
        self, x: Tensor, *, encoder_input: Tensor | None = None, encoder_mask: Tensor | None = None, **kwargs: Any
    ) -> Tensor:
        """Attend to the output of an encoder.

        Args:
            x: ``[b, s, d]``.
            encoder_input: output of the encoder ``[b, t, d]``. With a cache, ``None`` reads the cached one.
            encoder_mask: bool ``[b, s, t]`` (True: attend); by default every position attends to all.
            kwargs: arguments of self-attention layers; ignored.

        Returns:
            Tensor ``[b, s, d]``.
        """
        keys = None
        if encoder_input is None and self.attn.cache_enabled and self.attn.kv_cache is not None:
            keys = self.attn.kv_cache.held
        if encoder_input is None and keys is None:
            return x
        sees_nothing = None  # [b, s, 1]
        if encoder_mask is not None:
            sees_nothing = ~encoder_mask.any(-1, keepdim=True)
            # A softmax without visible keys is NaN: these positions attend to all, and get nothing of it below.
            encoder_mask = encoder_mask | sees_nothing
        with fast_products(x):
            attended = self.attn(self.ca_norm(x), encoder_input, mask=encoder_mask, keys=keys)
            if sees_nothing is not None:
                attended = attended.masked_fill(sees_nothing, 0.0)
            h = x + self.ca_scale(attended)
            added = self.mlp(self.mlp_norm(h))
            if sees_nothing is not None:
                added = added.masked_fill(sees_nothing, 0.0)
            return h + self.mlp_scale(added)

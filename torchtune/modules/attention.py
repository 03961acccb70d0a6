"""Attention layers, grouped-query and multi-head latent attention, and masks of packed documents."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torchtune._lazy import former_names
from torchtune.data import Documents
from torchtune.modules.kernels.attention import MaskType, attention
from torchtune.modules.kernels.documents import Boundaries
from torchtune.modules.kv_cache import KVCache
from torchtune.modules.position_embeddings import apply_rope
from torchtune.modules.rms_norm import rms_norm
from torchtune.utils import hooks_of_all_modules

Keys = tuple[Tensor, Tensor]  # keys and values [b, t, n_kv, h]
Block = tuple[int, int, int]  # first position of a document, and first and end of a block in it


class MultiHeadAttention(nn.Module):
    """Grouped-query attention (Ainslie et al. 2023, arXiv:2305.13245); multi-head if ``num_kv_heads`` is ``num_heads``.

    Args:
        embed_dim: d, size of the input.
        num_heads: n, query heads.
        num_kv_heads: n_kv, key and value heads.
        head_dim: h.
        q_proj: ``d -> n * h``.
        k_proj: ``d -> n_kv * h``; without it, :meth:`forward` takes the keys and values of another layer.
        v_proj: ``d -> n_kv * h``; without it, values are the projected keys, before norm and rotation.
        output_proj: ``n * h -> d``.
        pos_embeddings: rotary embedding of queries and keys ``[b, s, n, h]``, called with ``input_pos=``.
        q_norm: norm of each query head.
        k_norm: norm of each key head; required with ``q_norm`` and ``k_proj``.
        v_norm_eps: eps of an RMSNorm without weight on each value head; by default there is none.
        kv_cache: KV cache that every call extends and reads.
        max_seq_len: informational.
        is_causal: whether attention is causal without mask and documents.
        attn_dropout: dropout probability of attention weights in training.
        qk_norm_before_rope: whether the norms come before RoPE.
        qk_norm_whole: apply the norms to the whole projection of width ``n * h`` instead of to each head; before RoPE.
        scale: scale of the scores; by default ``h ** -0.5``.
        softcap: soft cap of the scores, ``softcap * tanh(score / softcap)``.
        window: sliding window in positions, the query's own included.
        gated: ``q_proj`` maps ``d -> n * 2h``: for each head the query, then a gate. The gate's sigmoid scales the
            output of the head.
        growth: (beta, span, first): queries are scaled by ``1 + beta * ln(1 + (position + first) // span)`` (Llama 4,
            Ministral 3).
        chunk: chunk size in positions of a document; attention stays within a chunk.
        qk_norm_eps: eps of an RMSNorm without weight on each query and key head, after RoPE; by default there is none.
        sinks: add attention sinks: a parameter ``sinks`` ``[n]``, a logit per head in the softmax's denominator.

    Raises:
        ValueError: arguments are inconsistent.

    Example:
        >>> attention = model.layers[0].attn
        >>> attention(torch.ones(1, 3, 32)).shape
        torch.Size([1, 3, 32])
    """

    def __init__(
        self,
        *,
        embed_dim: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        q_proj: nn.Module,
        k_proj: nn.Module | None,
        v_proj: nn.Module | None,
        output_proj: nn.Module,
        pos_embeddings: nn.Module | None = None,
        q_norm: nn.Module | None = None,
        k_norm: nn.Module | None = None,
        kv_cache: KVCache | None = None,
        max_seq_len: int = 4096,
        is_causal: bool = True,
        attn_dropout: float = 0.0,
        qk_norm_before_rope: bool = False,
        qk_norm_whole: bool = False,
        scale: float | None = None,
        softcap: float | None = None,
        window: int | None = None,
        sinks: bool = False,
        gated: bool = False,
        growth: tuple[float, int, int] | None = None,
        v_norm_eps: float | None = None,
        chunk: int | None = None,
        qk_norm_eps: float | None = None,
    ) -> None:
        super().__init__()
        if num_heads % num_kv_heads != 0:
            raise ValueError(f"num_heads ({num_heads}) must be a multiple of num_kv_heads ({num_kv_heads}).")
        if not 0.0 <= attn_dropout <= 1.0:
            raise ValueError(f"attn_dropout must lie in [0, 1], got {attn_dropout}.")
        # Without k_proj, the keys come from another layer, which has normalized them.
        if k_proj is not None and (q_norm is None) != (k_norm is None):
            raise ValueError("q_norm and k_norm must be given together.")
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.embed_dim = embed_dim
        self.head_dim = head_dim
        self.max_seq_len = max_seq_len
        self.is_causal = is_causal
        self.attn_dropout = attn_dropout
        self.qk_norm_before_rope = qk_norm_before_rope
        self.qk_norm_whole = qk_norm_whole
        # Kernels scale scores by h ** -0.5: another scale multiplies the queries.
        self.query_factor = 1.0 if scale is None else scale * head_dim**0.5
        self.softcap = softcap
        self.window = window
        self.gated = gated
        self.growth = growth
        self.v_norm_eps = v_norm_eps
        self.chunk = chunk
        self.qk_norm_eps = qk_norm_eps
        self.kv_cache = kv_cache
        self.cache_enabled = kv_cache is not None  # disable_kv_cache clears it, and keeps the cache
        self.q_proj = q_proj
        self.k_proj = k_proj
        self.v_proj = v_proj
        self.output_proj = output_proj
        self.q_norm = q_norm
        self.k_norm = k_norm
        self.pos_embeddings = pos_embeddings
        self.sinks = nn.Parameter(torch.zeros(num_heads)) if sinks else None
        # Context parallelism replaces it by a function with the same signature.
        self.attention = attention

    def setup_cache(self, batch_size: int, dtype: torch.dtype, max_seq_len: int) -> None:
        """Make a KV cache for ``batch_size`` rows of ``max_seq_len`` positions, on the default device."""
        if self.kv_cache is None and self._has_keys():
            self.kv_cache = self._new_cache(batch_size, dtype, max_seq_len)
            self.cache_enabled = True

    def _has_keys(self) -> bool:
        """Whether this layer computes keys, instead of reusing an earlier layer's."""
        return self.k_proj is not None

    def _new_cache(self, batch_size: int, dtype: torch.dtype, max_seq_len: int) -> KVCache:
        return KVCache(batch_size, max_seq_len, self.num_kv_heads, self.head_dim, dtype)

    def reset_cache(self) -> None:
        """Empty the cache. Raises ``RuntimeError`` if there is none."""
        if not self._has_keys():
            return
        if self.kv_cache is None:
            raise RuntimeError("There is no key-value cache to reset: call setup_cache() first.")
        self.kv_cache.reset()

    def forward(
        self,
        x: Tensor,
        y: Tensor | None = None,
        *,
        mask: MaskType | None = None,
        input_pos: Tensor | None = None,
        documents: Documents | Boundaries | None = None,
        rope: tuple[Tensor, Tensor] | None = None,
        keys: Keys | None = None,
        returns_keys: bool = False,
        blocks: Sequence[Block] = (),
    ) -> Tensor | tuple[Tensor, Keys]:
        """Compute attention.

        Args:
            x: ``[b, s, d]``, input of the query projection.
            y: ``[b, t, d]``, input of the key and value projections; by default ``x``.
            mask: bool ``[b, s, t]`` (True: attend) or a ``BlockMask``. With a KV cache, t is the cache's length.
            input_pos: positions ``[b, s]``, for ``pos_embeddings``.
            documents: document boundaries, instead of a mask.
            rope: precomputed cosine and sine of the positions' angles.
            keys: keys and values of another layer, for a layer without ``k_proj``.
            returns_keys: also return the keys and values, for other layers.
            blocks: ranges of the flattened ``b * s`` positions, such as images, within which causal attention also sees
                later positions, up to the window. With a KV cache, the call must begin at the first position.

        Returns:
            Tensor ``[b, s, d]``; with ``returns_keys``, a tuple of it and of keys and values ``[b, t, n_kv, h]``.
        """
        y = x if y is None else y
        q = self.q_proj(x)  # [b, s, n * h]
        gate = None  # applied to the output of attention
        if self.gated:
            q = q.unflatten(-1, (-1, 2 * self.head_dim))  # [b, s, n, 2h]: for each head the query, then its gate
            q, gate = q.chunk(2, dim=-1)  # [b, s, n, h]
            q = q.flatten(-2)
            gate = gate.flatten(-2)
        q = self._project_heads(q, self.q_norm, input_pos, rope)  # [b, s, n, h]
        if self.query_factor != 1.0:
            q = q * self.query_factor
        if self.growth is not None:
            q = self._scale_queries(q, input_pos)
        if keys is None:
            keys = self._project_keys(y, input_pos, rope)
        k, v = keys  # [b, t, n_kv, h]
        q = q.to(k.dtype)  # a cache, or the layer that shares its keys, may have another dtype
        dropout_p = 0.0
        if self.training:
            dropout_p = self.attn_dropout
        # Arguments that only some layers have are left out elsewhere: a function that replaces attention may lack them.
        options: dict[str, Any] = {}
        if self.sinks is not None:
            sinks = self.sinks  # [n]
            if hasattr(sinks, "to_local"):  # sharded by head, with tensor parallelism
                sinks = sinks.to_local()
            options["sinks"] = sinks
        if self.chunk is not None:
            options["chunk"] = self.chunk
        out = self.attention(
            q,
            k,
            v,
            documents=documents,
            mask=mask,
            is_causal=self.is_causal,
            dropout_p=dropout_p,
            window=self.window,
            softcap=self.softcap,
            **options,
        )
        if blocks:  # attention above is causal, also in these blocks, whose outputs are computed again
            out = self._attend_in_blocks(out, q, k, v, blocks, dropout_p)
        out = out.flatten(-2).to(x.dtype)  # [b, s, n * h], until here in the dtype of the keys
        if gate is not None:
            out = out * gate.sigmoid()
        out = self.output_proj(out)  # [b, s, d]
        if returns_keys:
            return out, (k, v)
        return out

    def _attend_in_blocks(
        self, out: Tensor, q: Tensor, k: Tensor, v: Tensor, blocks: Sequence[Block], dropout_p: float
    ) -> Tensor:
        """Replace outputs in blocks of image tokens, whose queries see all keys of their block, later ones too.

        Args:
            out: outputs of causal attention ``[b, s, n, h]``.
            q: queries ``[b, s, n, h]``.
            k: keys ``[b, t, n_kv, h]``; the first s are those of the queries' positions.
            v: values ``[b, t, n_kv, h]``.
            blocks: (start of the document, start, end) of each block, in positions of the flattened batch.
            dropout_p: dropout probability of attention weights.
        """
        window = self.window or q.shape[1]  # without a window, one as wide as the row
        # A cache may have room for further positions, t > s, but blocks count those of the input.
        num_positions = q.shape[1]
        q_flat = q.flatten(0, 1)  # [b * s, n, h]
        k_flat = k[:, :num_positions].flatten(0, 1)  # [b * s, n_kv, h]
        v_flat = v[:, :num_positions].flatten(0, 1)
        block_outputs = []
        block_positions = []
        for document_start, start, end in blocks:
            # Keys from the window of the block's first query, within its document, to the end of the block.
            first_key = max(document_start, start - window + 1)
            query_positions = torch.arange(start, end, device=q.device)
            key_positions = torch.arange(first_key, end, device=q.device)
            # The window limits earlier keys alone: later keys up to the end of the block are visible.
            mask = key_positions > query_positions[:, None] - window  # [queries, keys]
            # Not `self.attention`: context parallelism, which replaces it, is not for models with blocks.
            block_output = attention(
                q_flat[None, start:end],
                k_flat[None, first_key:end],
                v_flat[None, first_key:end],
                mask=mask[None],
                dropout_p=dropout_p,
                softcap=self.softcap,
            )
            block_outputs.append(block_output[0])
            block_positions.append(query_positions)
        outputs = torch.cat(block_outputs).to(out.dtype)  # of all blocks, [positions, n, h]
        positions = torch.cat(block_positions)
        out_flat = out.flatten(0, 1)  # [b * s, n, h]
        return out_flat.index_copy(0, positions, outputs).view_as(out)

    def _project_keys(self, y: Tensor, input_pos: Tensor | None, rope: tuple[Tensor, Tensor] | None) -> Keys:
        """Keys and values ``[b, t, n_kv, h]``: from the cache, then from the input.

        The cache is extended by the input, and may also return positions that are not filled yet; the mask hides them.
        """
        if self.k_proj is None:
            raise ValueError("This layer has no keys and values: give it those of another layer as keys=.")
        projected_keys = self.k_proj(y)  # [b, t, n_kv * h]
        k = self._project_heads(projected_keys, self.k_norm, input_pos, rope)  # [b, t, n_kv, h]
        projected_values = projected_keys
        if self.v_proj is not None:
            projected_values = self.v_proj(y)
        v = projected_values.unflatten(-1, (-1, self.head_dim))  # [b, t, n_kv, h]
        if self.v_norm_eps is not None:
            v = rms_norm(v, self.v_norm_eps)
        if self.kv_cache is not None and self.cache_enabled:
            # The cache has heads before positions: [b, n_kv, t, h].
            k, v = self.kv_cache.update(k.transpose(1, 2), v.transpose(1, 2))
            k = k.transpose(1, 2)
            v = v.transpose(1, 2)
        return k, v

    def _scale_queries(self, q: Tensor, input_pos: Tensor | None) -> Tensor:
        """Scale queries ``[b, s, n, h]`` by ``growth``."""
        beta, span, first = self.growth
        positions = input_pos
        if positions is None:
            positions = torch.arange(q.shape[1], device=q.device)
        num_spans = (positions + first) // span  # [b, s] or [s]
        factors = 1 + beta * num_spans.float().log1p()
        return q * factors[..., None, None].to(q.dtype)

    def _project_heads(
        self, x: Tensor, norm: nn.Module | None, input_pos: Tensor | None, rope: tuple[Tensor, Tensor] | None
    ) -> Tensor:
        """Normalize and rotate projected queries or keys, in the order of the model family.

        ``[b, s, n * h]`` to ``[b, s, n, h]``.
        """
        if norm is not None and self.qk_norm_whole:
            x = norm(x)
            norm = None  # applied
        x = x.unflatten(-1, (-1, self.head_dim))  # [b, s, n, h]
        if norm is not None and self.qk_norm_before_rope:
            x = norm(x)
        if rope is not None:
            x = apply_rope(x, *rope, self.pos_embeddings.layout)
        elif self.pos_embeddings is not None:
            x = self.pos_embeddings(x, input_pos=input_pos)
        if norm is not None and not self.qk_norm_before_rope:
            x = norm(x)
        if self.qk_norm_eps is not None:
            x = rms_norm(x, self.qk_norm_eps)
        return x


class LatentAttention(MultiHeadAttention):
    """Multi-head latent attention (DeepSeek-AI 2024, arXiv:2405.04434, section 2.1).

    A key has ``key_dim`` channels: the first ones are projected from the latent for each head; the last ``rope_dim``
    channels are rotated and shared by all heads. The KV cache holds latents and shared channels, ``kv_dim + rope_dim``
    numbers per position and layer. In decoding of a single position, queries are projected to the latent space instead
    of all cached latents to keys and values, if ``kv_proj`` has no bias and no hooks.

    Args:
        embed_dim: d, size of the input.
        num_heads: n.
        key_dim: h, size of a query and of a key.
        rope_dim: r, number of rotated channels of queries and keys, the last ones.
        value_dim: v, size of a value.
        kv_dim: c, size of the latent.
        q_proj: ``d -> n * h``, or from the width of ``q_down_norm``.
        kv_down_proj: ``d -> c + r``.
        kv_down_norm: norm of the latent.
        kv_proj: ``c -> n * (h - r + v)``, for each head the unrotated channels of its key, then its value.
        output_proj: ``n * v -> d``.
        q_down_proj: projection of the input to a latent of queries; by default there is none.
        q_down_norm: norm of the latent of queries; required with ``q_down_proj``.
        pos_embeddings: rotary embedding of ``rope_dim`` channels.
        max_seq_len: informational.
        attn_dropout: dropout probability of attention weights in training.
        scale: scale of the scores; by default ``h ** -0.5``.
        growth: as in :class:`MultiHeadAttention`.

    Raises:
        ValueError: arguments are inconsistent.

    Example:
        >>> from torchtune.modules import LatentAttention
        >>> linear = torch.nn.Linear
        >>> attention = LatentAttention(
        ...     embed_dim=8, num_heads=2, key_dim=6, rope_dim=2, value_dim=4, kv_dim=3, q_proj=linear(8, 12),
        ...     kv_down_proj=linear(8, 5), kv_down_norm=torchtune.modules.RMSNorm(3), kv_proj=linear(3, 16),
        ...     output_proj=linear(8, 8)
        ... )
        >>> attention(torch.ones(1, 3, 8)).shape
        torch.Size([1, 3, 8])
    """

    def __init__(
        self,
        *,
        embed_dim: int,
        num_heads: int,
        key_dim: int,
        rope_dim: int,
        value_dim: int,
        kv_dim: int,
        q_proj: nn.Module,
        kv_down_proj: nn.Module,
        kv_down_norm: nn.Module,
        kv_proj: nn.Module,
        output_proj: nn.Module,
        q_down_proj: nn.Module | None = None,
        q_down_norm: nn.Module | None = None,
        pos_embeddings: nn.Module | None = None,
        max_seq_len: int = 4096,
        attn_dropout: float = 0.0,
        is_causal: bool = True,
        scale: float | None = None,
        growth: tuple[float, int, int] | None = None,
    ) -> None:
        if (q_down_proj is None) != (q_down_norm is None):
            raise ValueError("q_down_proj and q_down_norm must be given together.")
        super().__init__(
            embed_dim=embed_dim,
            num_heads=num_heads,
            num_kv_heads=num_heads,  # every head has its own key and value, projected from the shared latent
            head_dim=max(key_dim, value_dim),  # kernels take queries, keys and values of one size
            q_proj=q_proj,
            k_proj=None,  # kv_down_proj and kv_proj make keys and values
            v_proj=None,
            output_proj=output_proj,
            pos_embeddings=pos_embeddings,
            max_seq_len=max_seq_len,
            attn_dropout=attn_dropout,
            is_causal=is_causal,
            scale=key_dim**-0.5 if scale is None else scale,  # the default of the base class is of head_dim
            growth=growth,
        )
        self.key_dim = key_dim
        self.rope_dim = rope_dim
        self.value_dim = value_dim
        self.kv_dim = kv_dim
        self.q_down_proj = q_down_proj
        self.q_down_norm = q_down_norm
        self.kv_down_proj = kv_down_proj
        self.kv_down_norm = kv_down_norm
        self.kv_proj = kv_proj

    def _has_keys(self) -> bool:
        return True

    def _new_cache(self, batch_size: int, dtype: torch.dtype, max_seq_len: int) -> KVCache:
        """Make the cache of latents and of the rotated channels of keys."""
        return KVCache(batch_size, max_seq_len, 1, self.kv_dim + self.rope_dim, dtype, value_dim=0)

    def forward(
        self,
        x: Tensor,
        y: Tensor | None = None,
        *,
        mask: MaskType | None = None,
        input_pos: Tensor | None = None,
        documents: Documents | Boundaries | None = None,
        rope: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """Compute attention ``[b, s, d]``; see :meth:`MultiHeadAttention.forward` for the arguments."""
        y = x if y is None else y
        q = self._queries(x, input_pos, rope)  # [b, s, n, h]
        latent, shared_channels = self.kv_down_proj(y).split([self.kv_dim, self.rope_dim], dim=-1)
        latent = self.kv_down_norm(latent)  # [b, t, c]
        # Rotation takes heads, [b, t, 1, r]: all heads share these channels.
        shared_channels = self._apply_rope(shared_channels.unsqueeze(2), input_pos, rope).squeeze(2)
        latents = torch.cat((latent, shared_channels), dim=-1)  # [b, t, c + r]
        if self.kv_cache is not None and self.cache_enabled:
            keys = latents[:, None]  # [b, 1, t, c + r]: the cache has one key head
            no_values = keys[..., :0]  # values are projected from the cached latents as well
            cached_keys, _ = self.kv_cache.update(keys, no_values)
            latents = cached_keys[:, 0].to(x.dtype)
            # Decoding, see the class. The mask alone says which latents a single query sees.
            if x.shape[1] == 1 and self._is_matrix_product(self.kv_proj):
                attended = self._attend_to_latents(q, latents, mask)  # [b, 1, n, v]
                return self.output_proj(attended.flatten(-2))

        latent, shared_channels = latents.split([self.kv_dim, self.rope_dim], dim=-1)
        unrotated_dim = self.key_dim - self.rope_dim
        heads = self.kv_proj(latent).unflatten(-1, (-1, unrotated_dim + self.value_dim))  # [b, t, n, h - r + v]
        unrotated, v = heads.split([unrotated_dim, self.value_dim], dim=-1)
        rotated = shared_channels.unsqueeze(2).expand(-1, -1, heads.shape[2], -1)  # [b, t, n, r]
        k = torch.cat((unrotated, rotated), dim=-1)  # [b, t, n, h]
        out = self.attention(
            _pad_channels(q, self.head_dim),
            _pad_channels(k, self.head_dim),
            _pad_channels(v, self.head_dim),
            documents=documents,
            mask=mask,
            is_causal=self.is_causal,
            dropout_p=self.attn_dropout if self.training else 0.0,
        )
        out = out[..., : self.value_dim]  # without the padding of values
        return self.output_proj(out.flatten(-2).to(x.dtype))

    def _queries(self, x: Tensor, input_pos: Tensor | None, rope: tuple[Tensor, Tensor] | None) -> Tensor:
        """Queries ``[b, s, n, h]``, rotated and scaled for kernels that scale by ``head_dim ** -0.5``.

        A function of its own, so that the projection before its rotation is freed before attention.
        """
        if self.q_down_proj is not None:
            x = self.q_down_norm(self.q_down_proj(x))
        q = self.q_proj(x).unflatten(-1, (-1, self.key_dim))  # [b, s, n, h]
        unrotated, rotated = q.split([self.key_dim - self.rope_dim, self.rope_dim], dim=-1)
        rotated = self._apply_rope(rotated, input_pos, rope)
        q = torch.cat((unrotated, rotated), dim=-1) * self.query_factor
        if self.growth is not None:
            q = self._scale_queries(q, input_pos)
        return q

    def _apply_rope(self, x: Tensor, input_pos: Tensor | None, rope: tuple[Tensor, Tensor] | None) -> Tensor:
        """Rotate ``[b, s, n, r]``: by the angles ``rope`` if they are computed already."""
        if rope is not None:
            return apply_rope(x, *rope, self.pos_embeddings.layout)
        if self.pos_embeddings is not None:
            return self.pos_embeddings(x, input_pos=input_pos)
        return x

    @staticmethod
    def _is_matrix_product(projection: nn.Module) -> bool:
        """Whether a projection only multiplies by its matrix: it has no bias, and nothing hooks into its calls."""
        hooks = (projection._forward_pre_hooks, projection._forward_hooks, *hooks_of_all_modules())
        return getattr(projection, "bias", None) is None and not any(hooks)

    def _attend_to_latents(self, q: Tensor, latents: Tensor, mask: MaskType | None) -> Tensor:
        """Attention of one position ``[b, 1, n, h]`` to latents ``[b, t, c + r]``: values ``[b, 1, n, v]``.

        ``q · (W k) = (Wᵀ q) · k``, so the latents are the single key head of all query heads. The value projection is
        applied to the weighted sum of latents.
        """
        weight = getattr(self.kv_proj, "weight", None)
        if type(self.kv_proj) is nn.Linear and type(weight) in (nn.Parameter, Tensor):
            matrix = weight
        else:  # an adapter, a quantized weight, or one that is split over ranks
            identity = torch.eye(self.kv_dim, dtype=latents.dtype, device=latents.device)
            matrix = self.kv_proj(identity).t()  # [n * (h - r + v), c]
        unrotated_dim = self.key_dim - self.rope_dim
        head_matrices = matrix.unflatten(0, (-1, unrotated_dim + self.value_dim))  # [n, h - r + v, c]
        key_matrices, value_matrices = head_matrices.split([unrotated_dim, self.value_dim], dim=1)
        unrotated, rotated = q.split([unrotated_dim, self.rope_dim], dim=-1)
        projected = torch.einsum("bsnh,nhc->bsnc", unrotated, key_matrices)
        queries = torch.cat((projected, rotated), dim=-1)  # [b, 1, n, c + r]
        # Kernels scale by the size of their heads, c + r here; query_factor is made for head_dim.
        queries = queries * (latents.shape[-1] / self.head_dim) ** 0.5
        keys = latents.unsqueeze(2)  # [b, t, 1, c + r], which are the values as well
        attended = self.attention(queries, keys, keys, mask=mask)
        attended = attended[..., : self.kv_dim]  # [b, 1, n, c]: the rotated channels belong to keys alone
        return torch.einsum("bsnc,nvc->bsnv", attended, value_matrices)


def _pad_channels(x: Tensor, width: int) -> Tensor:
    """Pad the channels of ``[b, s, n, h]`` with zeros; they change neither scores nor values."""
    num_missing = width - x.shape[-1]
    if num_missing == 0:
        return x
    return F.pad(x, (0, num_missing))


def create_block_causal_mask(seq_lens: list[Tensor]) -> Tensor:
    """Return the bool mask ``[b, s, s]`` of causal attention within each packed document.

    Args:
        seq_lens: for each row of the batch, the lengths of its documents; they sum to s.

    Example:
        >>> torchtune.modules.create_block_causal_mask([torch.tensor([1, 2])]).int()
        tensor([[[1, 0, 0],
                 [0, 1, 0],
                 [0, 1, 1]]], dtype=torch.int32)
    """
    masks = []
    for lengths in seq_lens:
        blocks = []
        for length in lengths.tolist():
            sees_all = torch.ones(length, length, dtype=torch.bool, device=lengths.device)
            blocks.append(sees_all.tril())
        masks.append(torch.block_diag(*blocks))  # [s, s]
    return torch.stack(masks)


def packed_block_causal_mask(seq_lens: list[Tensor]) -> MaskType:
    """Return the mask of :func:`create_block_causal_mask`, on CUDA as a ``BlockMask`` that is never materialized.

    Batches with :class:`torchtune.data.Documents` need no mask.

    Args:
        seq_lens: for each row of the batch, the lengths of its documents; they sum to s.

    Example:
        >>> torchtune.modules.packed_block_causal_mask([torch.tensor([1, 2])]).int()
        tensor([[[1, 0, 0],
                 [0, 1, 0],
                 [0, 1, 1]]], dtype=torch.int32)
    """
    # Flex attention is compiled on CUDA alone. Elsewhere it would materialize all scores, beside which a bool mask is
    # small.
    if seq_lens[0].device.type != "cuda":
        return create_block_causal_mask(seq_lens)
    from torch.nn.attention.flex_attention import create_block_mask

    device = seq_lens[0].device
    rows = []  # the number of each position's document, [s]
    for lengths in seq_lens:
        documents = torch.arange(len(lengths), device=device)
        rows.append(documents.repeat_interleave(lengths.to(torch.int64)))
    document_ids = torch.stack(rows)  # [b, s]
    batch_size, num_positions = document_ids.shape

    def sees(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        is_same_document = document_ids[b, q_idx] == document_ids[b, kv_idx]
        return (q_idx >= kv_idx) & is_same_document

    return create_block_mask(sees, batch_size, None, num_positions, num_positions, device=device)


__getattr__ = former_names(__name__)

"""Multi-head latent attention (MLA): keys and values of all heads are projections of one latent per position."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torchtune.data import Documents
from torchtune.modules.attention import MultiHeadAttention
from torchtune.modules.kernels.attention import MaskType
from torchtune.modules.kernels.documents import Boundaries
from torchtune.modules.kv_cache import KVCache
from torchtune.modules.position_embeddings import apply_rope
from torchtune.utils import hooks_of_all_modules


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
            num_kv_heads=num_heads,
            head_dim=max(key_dim, value_dim),  # kernels take queries, keys and values of one size
            q_proj=q_proj,
            k_proj=None,
            v_proj=None,
            output_proj=output_proj,
            pos_embeddings=pos_embeddings,
            max_seq_len=max_seq_len,
            attn_dropout=attn_dropout,
            is_causal=is_causal,
            scale=key_dim**-0.5 if scale is None else scale,
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
        q = self._queries(x, input_pos, rope)  # [b, s, n, h]
        latents = self._latents(x if y is None else y, input_pos, rope)  # [b, t, c + r]
        if self.kv_cache is not None and self.cache_enabled:
            # The cache has one key head, the latents, and values without channels.
            cached_keys, _ = self.kv_cache.update(latents[:, None], latents[:, None, :, :0])
            latents = cached_keys[:, 0].to(x.dtype)
            if x.shape[1] == 1 and self._is_plain_matmul(self.kv_proj):
                attended = self._attend_to_latents(q, latents, mask)  # [b, 1, n, v]
                return self.output_proj(attended.flatten(-2))
        k, v = self._expand_latents(latents)
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
        """Queries ``[b, s, n, h]``, rotated and scaled for kernels that scale by ``head_dim ** -0.5``."""
        if self.q_down_proj is not None:
            x = self.q_down_norm(self.q_down_proj(x))
        q = self.q_proj(x).unflatten(-1, (-1, self.key_dim))  # [b, s, n, h]
        unrotated, rotated = q.split([self.key_dim - self.rope_dim, self.rope_dim], dim=-1)
        q = torch.cat((unrotated, self._apply_rope(rotated, input_pos, rope)), dim=-1) * self.query_factor
        return q if self.growth is None else self._scale_queries(q, input_pos)

    def _latents(self, y: Tensor, input_pos: Tensor | None, rope: tuple[Tensor, Tensor] | None) -> Tensor:
        """Normalized latents, then the rotated channels of keys: ``[b, t, c + r]``."""
        latent, shared_channels = self.kv_down_proj(y).split([self.kv_dim, self.rope_dim], dim=-1)
        # Rotation takes heads, [b, t, 1, r]: all heads share these channels.
        shared_channels = self._apply_rope(shared_channels.unsqueeze(2), input_pos, rope).squeeze(2)
        return torch.cat((self.kv_down_norm(latent), shared_channels), dim=-1)

    def _apply_rope(self, x: Tensor, input_pos: Tensor | None, rope: tuple[Tensor, Tensor] | None) -> Tensor:
        if rope is not None:
            return apply_rope(x, *rope, self.pos_embeddings.layout)
        return x if self.pos_embeddings is None else self.pos_embeddings(x, input_pos=input_pos)

    def _expand_latents(self, latents: Tensor) -> tuple[Tensor, Tensor]:
        """Keys ``[b, t, n, h]`` and values ``[b, t, n, v]``."""
        latent, shared_channels = latents.split([self.kv_dim, self.rope_dim], dim=-1)
        unrotated_dim = self.key_dim - self.rope_dim
        heads = self.kv_proj(latent).unflatten(-1, (-1, unrotated_dim + self.value_dim))  # [b, t, n, h - r + v]
        unrotated, v = heads.split([unrotated_dim, self.value_dim], dim=-1)
        rotated = shared_channels.unsqueeze(2).expand(-1, -1, heads.shape[2], -1)  # [b, t, n, r]
        return torch.cat((unrotated, rotated), dim=-1), v

    @staticmethod
    def _is_plain_matmul(projection: nn.Module) -> bool:
        """Whether the layer is only a matrix product: no bias and no hooks."""
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
            matrix = self.kv_proj(torch.eye(self.kv_dim, dtype=latents.dtype, device=latents.device)).t()
        unrotated_dim = self.key_dim - self.rope_dim
        head_matrices = matrix.unflatten(0, (-1, unrotated_dim + self.value_dim))  # [n, h - r + v, c]
        key_matrices, value_matrices = head_matrices.split([unrotated_dim, self.value_dim], dim=1)
        unrotated, rotated = q.split([unrotated_dim, self.rope_dim], dim=-1)
        projected = torch.einsum("bsnh,nhc->bsnc", unrotated, key_matrices)
        queries = torch.cat((projected, rotated), dim=-1)  # [b, 1, n, c + r]
        # Kernels scale by the size of their heads, c + r here; query_factor is made for head_dim.
        queries = queries * (latents.shape[-1] / self.head_dim) ** 0.5
        keys = latents.unsqueeze(2)  # [b, t, 1, c + r]
        attended = self.attention(queries, keys, keys, mask=mask)[..., : self.kv_dim]  # [b, 1, n, c]
        return torch.einsum("bsnc,nvc->bsnv", attended, value_matrices)


def _pad_channels(x: Tensor, width: int) -> Tensor:
    """Pad the channels of ``[b, s, n, h]`` with zeros; they change neither scores nor values."""
    return x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1]))

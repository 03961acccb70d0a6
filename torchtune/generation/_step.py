"""A step of decoding through a layer: one position per row, in as few operators as the layer allows.

Between the products of a step, PyTorch's operators and Python's calls take as long as the products of a small model do.
Here queries and keys are rotated as one tensor, and products follow one another without the modules around them.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from torchtune.generation._packed import Packed
from torchtune.modules.attention import MultiHeadAttention
from torchtune.modules.attention_utils import _dense_attention, attention
from torchtune.modules.feed_forward import FeedForward, swiglu
from torchtune.modules.kv_cache import KVCache
from torchtune.modules.position_embeddings import apply_rope
from torchtune.modules.transformer import TransformerSelfAttentionLayer
from torchtune.utils import hooks_of_all_modules

_UNUSUAL = ("documents", "keys", "returns_keys")


def step_of(layer: nn.Module, packs: Sequence[Packed]) -> Callable[..., Tensor] | None:
    """What computes :meth:`TransformerSelfAttentionLayer.forward` with packed layers; None: it does more than this.

    Args:
        layer: any module.
        packs: of the model's linear layers.
    """
    if not _is_as_written(layer, TransformerSelfAttentionLayer):
        return None
    attn, mlp = layer.attn, layer.mlp
    extras = (layer.mixer, layer.mask_mod, layer.layer_embed, layer.layer_scale)
    if any(extra is not None for extra in extras) or not _is_plain_attention(attn) or not _is_plain_feed_forward(mlp):
        return None
    wanted = ([attn.q_proj, attn.k_proj, attn.v_proj], [attn.output_proj], [mlp.w1, mlp.w3], [mlp.w2])
    found = {tuple(map(id, pack.layers)): pack for pack in packs}
    chosen = [found.get(tuple(map(id, layers))) for layers in wanted]
    return None if None in chosen else _Step(layer, *chosen)


def _is_as_written(module: nn.Module | None, cls: type[nn.Module]) -> bool:
    """Whether it is of this very class, without methods of its own."""
    return type(module) is cls and not vars(module).keys() & vars(cls).keys()


def _is_plain_attention(attn: nn.Module | None) -> bool:
    """Whether it is causal attention to all earlier positions, of projected and rotated heads."""
    if not _is_as_written(attn, MultiHeadAttention) or attn.attention is not attention:
        return False
    late_norm = attn.q_norm is not None and (attn.qk_norm_whole or not attn.qk_norm_before_rope)
    norms = late_norm or attn.v_norm_eps is not None or attn.qk_norm_eps is not None
    scores = attn.softcap or attn.window or attn.chunk or attn.sinks is not None or attn.query_factor != 1.0
    return attn.is_causal and not (norms or scores or attn.gated or attn.growth)


def _is_plain_feed_forward(mlp: nn.Module | None) -> bool:
    is_own = _is_as_written(mlp, FeedForward)
    return is_own and mlp.w3 is not None and type(mlp.activation) is nn.SiLU and mlp.gate_scale == 1.0


class _Step:
    """Computes a layer on one position per row after those in its cache; anything else is left to the layer.

    So is a layer with hooks on modules that are not called here.
    """

    def __init__(self, layer: TransformerSelfAttentionLayer, heads: Packed, out: Packed, up: Packed, down: Packed):
        self._layer, self._attn = layer, layer.attn
        self._heads, self._out, self._up, self._down = heads, out, up, down
        left_out = [layer.attn, layer.mlp, *(one for pack in (heads, out, up, down) for one in pack.layers)]
        # The modules' own dictionaries: they change where a hook is registered later.
        self._hooks = [hooks for one in left_out for hooks in (one._forward_hooks, one._forward_pre_hooks)]
        self._hooks += hooks_of_all_modules()

    def __call__(
        self,
        x: Tensor,
        *,
        mask: Tensor | None = None,
        input_pos: Tensor | None = None,
        rope: tuple[Tensor, Tensor] | None = None,
        **more: Any,
    ) -> Any:
        cache = self._attn.kv_cache
        placed = cache is not None and cache.place is not None
        unusual = any(more.get(name) is not None for name in _UNUSUAL) or any(self._hooks)
        if not placed or rope is None or x.shape[1] != 1 or unusual:
            return TransformerSelfAttentionLayer.forward(
                self._layer, x, mask=mask, input_pos=input_pos, rope=rope, **more
            )
        layer = self._layer
        h = layer.sa_scale(self._out.product(self._attended(layer.sa_norm(x), mask, rope, cache))) + x
        return layer.mlp_scale(self._down.product(swiglu(*self._up.outputs(layer.mlp_norm(h))))) + h

    def _attended(self, x: Tensor, mask: Tensor | None, rope: tuple[Tensor, Tensor], cache: KVCache) -> Tensor:
        """Values ``[m, 1, n * h]`` of the attention heads."""
        m, n, n_kv = len(x), self._attn.num_heads, self._attn.num_kv_heads
        heads = self._heads.product(x).view(m, 1, n + 2 * n_kv, -1)
        turning = heads[:, :, : n + n_kv]
        if self._attn.q_norm is not None:
            turning = torch.cat((self._attn.q_norm(turning[:, :, :n]), self._attn.k_norm(turning[:, :, n:])), dim=2)
        turned = apply_rope(turning, *rope, self._attn.pos_embeddings.layout)
        k, v = cache.update(turned[:, :, n:].transpose(1, 2), heads[:, :, n + n_kv :].transpose(1, 2))
        # Keys have the dtype of the embeddings, and under autocast the output has that of autocast.
        q, k, v = turned[:, :, :n].to(k.dtype), k.transpose(1, 2), v.transpose(1, 2)
        return _dense_attention(q, k, v, mask, is_causal=False, dropout_p=0.0).flatten(-2).to(x.dtype)

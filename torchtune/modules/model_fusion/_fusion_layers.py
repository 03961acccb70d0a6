"""Decoder layer with cross-attention, and token embedding with additional tokens."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torchtune.modules.transformer import TransformerSelfAttentionLayer


class FusionLayer(TransformerSelfAttentionLayer):
    """Decoder layer combined with a layer that fuses it with an encoder.

    The modules of ``layer`` become modules of the new layer, so their parameter names do not change. The names of the
    parameters of ``fusion_layer`` begin with ``fusion_layer.``.

    Args:
        layer: a self-attention layer.
        fusion_layer: usually a :class:`torchtune.modules.TransformerCrossAttentionLayer`.
        fusion_first: whether ``fusion_layer`` comes before ``layer``.

    Raises:
        TypeError: ``layer`` is not a self-attention layer.

    Example:
        >>> sizes = {"num_heads": 2, "num_kv_heads": 1, "embed_dim": 8, "max_seq_len": 16, "encoder_max_seq_len": 40}
        >>> layers = {"num_layers": 2, "fusion_interval": 2}
        >>> decoder = torchtune.models.llama3_2_vision.llama3_2_vision_decoder(
        ...     vocab_size=20, num_special_tokens=1, **layers, **sizes
        ... )
        >>> [isinstance(layer, torchtune.modules.model_fusion.FusionLayer) for layer in decoder.layers]
        [False, True]
    """

    def __init__(self, layer: nn.Module, fusion_layer: nn.Module, fusion_first: bool = True) -> None:
        if type(layer) is not TransformerSelfAttentionLayer:
            raise TypeError(f"FusionLayer takes a TransformerSelfAttentionLayer, not a {type(layer).__name__}.")
        super().__init__(
            layer.attn,
            layer.mlp,
            sa_norm=layer.sa_norm,
            mlp_norm=layer.mlp_norm,
            sa_scale=layer.sa_scale,
            mlp_scale=layer.mlp_scale,
            mask_mod=layer.mask_mod,
            layer_embed=layer.layer_embed,
            layer_scale=layer.layer_scale,
            mixer=layer.mixer,
        )
        self.fusion_layer = fusion_layer
        self.fusion_first = fusion_first

    def setup_caches(
        self, batch_size: int, dtype: torch.dtype, *, encoder_max_seq_len: int | None, decoder_max_seq_len: int
    ) -> None:
        """Set up the caches of both layers."""
        sizes = {"encoder_max_seq_len": encoder_max_seq_len, "decoder_max_seq_len": decoder_max_seq_len}
        super().setup_caches(batch_size, dtype, **sizes)
        self.fusion_layer.setup_caches(batch_size, dtype, **sizes)

    def reset_cache(self) -> None:
        """Empty the caches of both layers."""
        super().reset_cache()
        self.fusion_layer.reset_cache()

    def fusion_params(self) -> list[str]:
        """Return the names of the parameters of ``fusion_layer``."""
        return [f"fusion_layer.{name}" for name, _ in self.fusion_layer.named_parameters()]

    def forward(
        self, x: Tensor, *, encoder_input: Tensor | None = None, encoder_mask: Tensor | None = None, **kwargs: Any
    ) -> Tensor:
        """Apply both layers, one after the other, to ``[b, s, d]``."""
        encoder = {"encoder_input": encoder_input, "encoder_mask": encoder_mask}
        if self.fusion_first:
            x = self.fusion_layer(x, **encoder, **kwargs)
        x = super().forward(x, **kwargs)
        return x if self.fusion_first else self.fusion_layer(x, **encoder, **kwargs)


class FusionEmbedding(nn.Embedding):
    """Token embedding ``weight`` with additional, separately trained tokens ``fusion_embedding.weight``.

    Args:
        vocab_size: v, number of tokens in ``weight``.
        fusion_vocab_size: number of additional tokens; their ids are v, v + 1 …
        embed_dim: width d of the embeddings.

    Example:
        >>> torchtune.modules.model_fusion.FusionEmbedding(10, 2, 4)(torch.tensor([[0, 11]])).shape
        torch.Size([1, 2, 4])
    """

    def __init__(self, vocab_size: int, fusion_vocab_size: int, embed_dim: int) -> None:
        super().__init__(vocab_size, embed_dim)
        self.fusion_embedding = nn.Embedding(fusion_vocab_size, embed_dim)

    @property
    def num_tokens(self) -> int:
        """Number of tokens in both embeddings."""
        return self.num_embeddings + self.fusion_embedding.num_embeddings

    def fusion_params(self) -> list[str]:
        """Return the name of the weight of the additional tokens."""
        return ["fusion_embedding.weight"]

    def forward(self, input: Tensor) -> Tensor:
        """Embed tokens ``[b, s]`` to ``[b, s, d]``."""
        last = self.num_embeddings - 1
        first = F.embedding(input.clamp(max=last), self.weight)
        more = self.fusion_embedding((input - last - 1).clamp(min=0))
        return torch.where((input > last).unsqueeze(-1), more, first)

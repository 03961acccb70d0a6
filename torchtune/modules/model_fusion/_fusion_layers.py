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
        layer: a :class:`torchtune.modules.TransformerSelfAttentionLayer`, or a layer of your own; that one must have
            the methods of a layer which are called, such as ``setup_caches`` for generation.
        fusion_layer: usually a :class:`torchtune.modules.TransformerCrossAttentionLayer`.
        fusion_first: whether ``fusion_layer`` comes before ``layer``.

    Example:
        >>> sizes = {"num_heads": 2, "num_kv_heads": 1, "embed_dim": 8, "max_seq_len": 16, "encoder_max_seq_len": 40}
        >>> layers = {"num_layers": 2, "fusion_interval": 2}
        >>> decoder = torchtune.models.llama3_2_vision.llama3_2_vision_decoder(
        ...     vocab_size=20, num_special_tokens=1, **layers, **sizes
        ... )
        >>> [isinstance(layer, torchtune.modules.model_fusion.FusionLayer) for layer in decoder.layers]
        [False, True]
    """

    def __new__(cls, layer: nn.Module | None = None, *args: Any, **kwargs: Any) -> "FusionLayer":
        """Create the class for ``layer``; copies of a module are created without arguments."""
        is_own = layer is not None and type(layer) is not TransformerSelfAttentionLayer
        return super().__new__(_OwnFusionLayer if is_own else cls)

    def __init__(self, layer: nn.Module, fusion_layer: nn.Module, fusion_first: bool = True) -> None:
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

    @property
    def layer(self) -> nn.Module:
        """The layer that is fused with ``fusion_layer``; the modules of a self-attention layer are modules of this."""
        return self

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


class _OwnFusionLayer(FusionLayer):
    """:class:`FusionLayer` of a layer of another class.

    Modules, parameters and buffers are the layer's own dicts. So their names do not change, as those of other layers,
    and whatever replaces one of them here replaces it in the layer, which computes with it.
    """

    def __init__(self, layer: nn.Module, fusion_layer: nn.Module, fusion_first: bool = True) -> None:
        nn.Module.__init__(self)
        vars(self)["own_layer"] = layer  # registered as a module, it would have names of its own
        for name in ("_modules", "_parameters", "_buffers", "_non_persistent_buffers_set"):
            vars(self)[name] = vars(layer)[name]
        self.fusion_layer = fusion_layer
        self.fusion_first = fusion_first

    @property
    def layer(self) -> nn.Module:
        """The layer that is fused with ``fusion_layer``."""
        return self.own_layer

    def train(self, mode: bool = True) -> "_OwnFusionLayer":
        """Set the mode of both layers."""
        self.own_layer.training = mode
        return super().train(mode)

    def setup_caches(
        self, batch_size: int, dtype: torch.dtype, *, encoder_max_seq_len: int | None, decoder_max_seq_len: int
    ) -> None:
        """Set up the caches of both layers."""
        for layer in (self.own_layer, self.fusion_layer):
            layer.setup_caches(
                batch_size, dtype, encoder_max_seq_len=encoder_max_seq_len, decoder_max_seq_len=decoder_max_seq_len
            )

    def caches_are_setup(self) -> bool:
        """Return whether the layer has caches."""
        return self.own_layer.caches_are_setup()

    def caches_are_enabled(self) -> bool:
        """Return whether the layer uses its caches."""
        return self.own_layer.caches_are_enabled()

    def reset_cache(self) -> None:
        """Empty the caches of both layers."""
        self.own_layer.reset_cache()
        self.fusion_layer.reset_cache()

    def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
        """Apply both layers, one after the other, with the same arguments."""
        layers = (self.fusion_layer, self.own_layer) if self.fusion_first else (self.own_layer, self.fusion_layer)
        for layer in layers:
            x = layer(x, **kwargs)
        return x


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
    def embedding(self) -> nn.Embedding:
        """The embedding of the first tokens: this one."""
        return self

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

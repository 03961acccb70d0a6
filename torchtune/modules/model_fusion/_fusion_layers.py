"""Fusion parameters, which fuse a text decoder with an encoder, and the layers that have them.

:class:`FusionLayer` is a decoder layer with cross-attention, :class:`FusionEmbedding` a token embedding with additional
tokens.
"""

from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torchtune.modules.transformer import TransformerSelfAttentionLayer


def register_fusion_module(module: nn.Module) -> None:
    """Register all parameters of a module as fusion parameters, which ``fusion_trainable`` controls.

    Example:
        >>> layer = torch.nn.Linear(2, 3)
        >>> torchtune.modules.model_fusion.register_fusion_module(layer)
        >>> sorted(torchtune.modules.model_fusion.get_fusion_params(layer))
        ['bias', 'weight']
    """
    # A bound method, because deepcopy binds it to the copied module.
    module.fusion_params = MethodType(_parameter_names, module)


def _parameter_names(module: nn.Module) -> list[str]:
    return [name for name, _ in module.named_parameters()]


def get_fusion_params(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the fusion parameters by name, as listed by ``fusion_params()`` of the model's modules."""
    fusion_params = {}
    for path, module in model.named_modules():
        if not callable(getattr(module, "fusion_params", None)):
            continue
        prefix = f"{path}." if path else ""
        for name in module.fusion_params():
            fusion_params[prefix + name] = module.get_parameter(name)
    return fusion_params


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
        layer_class = cls
        if layer is not None and type(layer) is not TransformerSelfAttentionLayer:  # a layer of the user
            layer_class = _UserFusionLayer
        return super().__new__(layer_class)

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
        return [f"fusion_layer.{name}" for name in _parameter_names(self.fusion_layer)]

    def forward(
        self, x: Tensor, *, encoder_input: Tensor | None = None, encoder_mask: Tensor | None = None, **kwargs: Any
    ) -> Tensor:
        """Apply both layers, one after the other, to ``[b, s, d]``."""
        encoder = {"encoder_input": encoder_input, "encoder_mask": encoder_mask}
        if self.fusion_first:
            fused = self.fusion_layer(x, **encoder, **kwargs)
            return super().forward(fused, **kwargs)
        h = super().forward(x, **kwargs)
        return self.fusion_layer(h, **encoder, **kwargs)


class _UserFusionLayer(FusionLayer):
    """:class:`FusionLayer` of a layer of a user's class.

    Modules, parameters and buffers are the layer's own dicts. So their names do not change, as those of other layers,
    and whatever replaces one of them here replaces it in the layer, which computes with it.
    """

    def __init__(self, layer: nn.Module, fusion_layer: nn.Module, fusion_first: bool = True) -> None:
        nn.Module.__init__(self)
        vars(self)["user_layer"] = layer  # registered as a module, it would have names of its own
        for name in ("_modules", "_parameters", "_buffers", "_non_persistent_buffers_set"):
            vars(self)[name] = vars(layer)[name]
        self.fusion_layer = fusion_layer
        self.fusion_first = fusion_first

    @property
    def layer(self) -> nn.Module:
        """The layer that is fused with ``fusion_layer``."""
        return self.user_layer

    def train(self, mode: bool = True) -> "_UserFusionLayer":
        """Set the mode of both layers."""
        self.user_layer.training = mode
        return super().train(mode)

    def setup_caches(
        self, batch_size: int, dtype: torch.dtype, *, encoder_max_seq_len: int | None, decoder_max_seq_len: int
    ) -> None:
        """Set up the caches of both layers."""
        for layer in (self.user_layer, self.fusion_layer):
            layer.setup_caches(
                batch_size, dtype, encoder_max_seq_len=encoder_max_seq_len, decoder_max_seq_len=decoder_max_seq_len
            )

    def caches_are_setup(self) -> bool:
        """Return whether the layer has caches."""
        return self.user_layer.caches_are_setup()

    def caches_are_enabled(self) -> bool:
        """Return whether the layer uses its caches."""
        return self.user_layer.caches_are_enabled()

    def reset_cache(self) -> None:
        """Empty the caches of both layers."""
        self.user_layer.reset_cache()
        self.fusion_layer.reset_cache()

    def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
        """Apply both layers, one after the other, with the same arguments."""
        layers = (self.fusion_layer, self.user_layer)
        if not self.fusion_first:
            layers = (self.user_layer, self.fusion_layer)
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
        num_first = self.num_embeddings
        # Both tables are read at all positions, so that shapes do not depend on the tokens.
        first_tokens = input.clamp(max=num_first - 1)
        embedded = F.embedding(first_tokens, self.weight)  # [b, s, d]
        additional_tokens = (input - num_first).clamp(min=0)
        additional = self.fusion_embedding(additional_tokens)
        is_additional = (input >= num_first).unsqueeze(-1)  # [b, s, 1]
        return torch.where(is_additional, additional, embedded)

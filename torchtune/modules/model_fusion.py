"""Multimodal models: a text decoder and an image encoder, fused by cross-attention or by tokens in the text.

:class:`DeepFusionModel` attends to the features of images in layers of its own (Llama 3.2 Vision), each a
:class:`FusionLayer`; :class:`ImageTextModel` embeds an image as tokens of the text (all newer models).
:class:`EarlyFusionModel` is an :class:`ImageTextModel` with the arguments and inputs of earlier releases, and serves
those alone. Fusion parameters are those that fuse decoder and encoder, and can be trained apart from both.
"""

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from types import MethodType
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torchtune._lazy import former_package
from torchtune.data import Documents, Images, check_placeholders, grid_positions
from torchtune.modules.attention import Block
from torchtune.modules.kernels.attention import MaskType
from torchtune.modules.transformer import TransformerDecoder, TransformerSelfAttentionLayer
from torchtune.modules.vision_transformer import VisionTower, is_sharded
from torchtune.utils import UserError, get_logger, log_once

__all__ = [
    "DeepFusionModel",
    "EarlyFusionModel",
    "FusionEmbedding",
    "FusionLayer",
    "ImageTextModel",
    "get_fusion_params",
    "register_fusion_module",
]


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


class FusionModel(nn.Module):
    """Base class of models with a text decoder and an image encoder.

    Args:
        decoder: text decoder.
        encoder: image encoder.

    Attributes:
        description: the description of the model, set by its builder.
        spec: the model family, set by its builder.
    """

    def __init__(self, decoder: TransformerDecoder, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder
        self.decoder = decoder
        self.description = None
        self.spec = None

    @property
    def text(self) -> TransformerDecoder:
        """The text decoder."""
        return self.decoder

    @property
    def output(self) -> nn.Module:
        """The output projection."""
        return self.decoder.output

    @property
    def tok_embeddings(self) -> nn.Embedding:
        """The token embedding."""
        return self.decoder.tok_embeddings

    @property
    def decoder_max_cache_seq_len(self) -> int | None:
        """Capacity of the text KV caches in positions; None without caches."""
        return self.decoder.decoder_max_cache_seq_len

    @property
    def max_seq_len(self) -> int:
        """Maximum text length in tokens."""
        return self.decoder.max_seq_len

    @property
    def skip_output_layer(self) -> bool:
        """Whether :meth:`forward` without ``output=`` returns hidden states. For older recipes only."""
        return self.decoder.skip_output_layer

    @skip_output_layer.setter
    def skip_output_layer(self, skip: bool) -> None:
        self.decoder.skip_output_layer = skip

    def set_num_output_chunks(self, num_output_chunks: int) -> None:
        """See :meth:`torchtune.modules.TransformerDecoder.set_num_output_chunks`."""
        self.decoder.set_num_output_chunks(num_output_chunks)

    def setup_caches(
        self,
        batch_size: int,
        dtype: torch.dtype,
        *,
        encoder_max_seq_len: int | None = None,
        decoder_max_seq_len: int | None = None,
    ) -> None:
        """Set up caches, see :meth:`torchtune.modules.TransformerDecoder.setup_caches`.

        With caches, only the first forward pass encodes images.
        """
        self.decoder.setup_caches(
            batch_size, dtype, encoder_max_seq_len=encoder_max_seq_len, decoder_max_seq_len=decoder_max_seq_len
        )

    def caches_are_setup(self) -> bool:
        """Return whether the layers have caches."""
        return self.decoder.caches_are_setup()

    def caches_are_enabled(self) -> bool:
        """Return whether the caches are enabled."""
        return self.decoder.caches_are_enabled()

    def reset_caches(self) -> None:
        """Empty the caches of text and images. Raises ``RuntimeError`` if there are none."""
        self.decoder.reset_caches()

    def invalidates_caches(self, input_pos: Tensor) -> bool:
        """See :meth:`torchtune.modules.TransformerDecoder.invalidates_caches`."""
        return self.decoder.invalidates_caches(input_pos)

    def has_frozen_text(self) -> bool:
        """Return whether all parameters of the text decoder except fusion parameters are frozen."""
        # By identity, as tensors compare element by element.
        fusion_params = {id(parameter) for parameter in get_fusion_params(self.decoder).values()}
        for parameter in self.decoder.parameters():
            if parameter.requires_grad and id(parameter) not in fusion_params:
                return False
        return True

    def needs_blank_image(self) -> bool:
        """Return whether a batch without images must encode a blank image.

        With FSDP, every rank must run the encoder, forward and backward, or the other ranks would hang in a collective.
        If the text decoder is frozen, the blank image connects the loss to trained parameters, with zero gradients; a
        warning is logged.
        """
        trains_nothing = self.training and torch.is_grad_enabled() and self.has_frozen_text()
        if trains_nothing:
            log_once(
                get_logger(),
                "A batch without images trains nothing: the text decoder is frozen, and only images reach the rest.",
                logging.WARNING,
            )
        return trains_nothing or is_sharded(self)


class DeepFusionModel(FusionModel):
    """Text decoder with cross-attention layers to the output of an encoder (Flamingo, arXiv:2204.14198).

    Args:
        decoder: text decoder in which some layers are a :class:`FusionLayer`.
        encoder: module that is called with the entries of ``encoder_input`` and returns ``[b, t, d]``. Its method
            ``blank(device)`` returns the entries for a blank image, for text batches that must run the encoder.
        decoder_trainable: whether to train the parameters of the decoder, except the fusion parameters.
        encoder_trainable: whether to train the parameters of the encoder.
        fusion_trainable: whether to train the fusion parameters (:func:`get_fusion_params`).

    Attributes:
        description: the description of the model, set by its builder.
        spec: the model family, set by its builder.

    Example:
        >>> sizes = {"num_heads": 2, "num_kv_heads": 1, "embed_dim": 8, "max_seq_len": 16, "encoder_max_seq_len": 40}
        >>> layers = {"num_layers": 2, "fusion_interval": 2}
        >>> decoder = torchtune.models.llama3_2_vision.llama3_2_vision_decoder(
        ...     vocab_size=20, num_special_tokens=1, **layers, **sizes
        ... )
        >>> clip = {"clip_embed_dim": 8, "clip_num_layers": 2, "clip_hidden_states": [1], "num_heads": 2}
        >>> tiles = {"tile_size": 4, "patch_size": 2, "num_layers_projection": 1, "decoder_embed_dim": 8}
        >>> encoder = torchtune.models.llama3_2_vision.llama3_2_vision_encoder(**clip, **tiles)
        >>> model = torchtune.modules.model_fusion.DeepFusionModel(decoder, encoder)
        >>> image = {"images": torch.ones(1, 1, 1, 3, 4, 4), "aspect_ratio": torch.tensor([[[1, 1]]])}
        >>> model(torch.tensor([[20, 3]]), encoder_input=image).shape
        torch.Size([1, 2, 20])
    """

    def __init__(
        self,
        decoder: TransformerDecoder,
        encoder: nn.Module,
        *,
        decoder_trainable: bool = False,
        encoder_trainable: bool = False,
        fusion_trainable: bool = True,
    ) -> None:
        super().__init__(decoder, encoder)
        self.decoder.requires_grad_(decoder_trainable)
        self.encoder.requires_grad_(encoder_trainable)
        # Fusion parameters are parameters of the decoder or of the encoder, too: they come last.
        for parameter in get_fusion_params(self).values():
            parameter.requires_grad_(fusion_trainable)

    def prefix_obstacle(self) -> str:
        """Return why documents cannot share a prefix in this model."""
        return "it has cross-attention to images, which goes on from no other document"

    def forward(
        self,
        tokens: Tensor | None,
        *,
        mask: MaskType | None = None,
        documents: Documents | None = None,
        input_pos: Tensor | None = None,
        encoder_input: Mapping[str, Any] | None = None,
        encoder_mask: Tensor | None = None,
        input_embeds: Tensor | None = None,
        output: Literal["logits", "hidden"] | None = None,
    ) -> Tensor | list[Tensor]:
        """Predict the next token at every position.

        A batch without images skips the encoder and the cross-attention layers.

        Args:
            tokens: see :meth:`torchtune.modules.TransformerDecoder.forward`.
            mask: see :meth:`torchtune.modules.TransformerDecoder.forward`.
            documents: see :meth:`torchtune.modules.TransformerDecoder.forward`.
            input_pos: see :meth:`torchtune.modules.TransformerDecoder.forward`.
            encoder_input: arguments of the encoder, for example ``images`` and ``aspect_ratio``. With caches, ``None``
                reads the cached images.
            encoder_mask: bool ``[b, s, t]``, True where a token attends to a position of the encoder's output; by
                default, tokens attend to all positions in their row.
            input_embeds: see :meth:`torchtune.modules.TransformerDecoder.forward`.
            output: see :meth:`torchtune.modules.TransformerDecoder.forward`.

        Returns:
            See :meth:`torchtune.modules.TransformerDecoder.forward`.

        Raises:
            ValueError: ``encoder_mask`` has a wrong shape or dtype, or is passed without ``encoder_input``; further
                cases in :meth:`torchtune.modules.TransformerDecoder.forward`.
        """
        x = input_embeds if tokens is None else tokens  # [b, s] or [b, s, d], for its batch size and length
        if encoder_input is not None:
            # An encoder may name its input otherwise: arguments without `images` are never an empty batch.
            images = encoder_input.get("images", encoder_input)
            is_empty = isinstance(images, Tensor) and images.numel() == 0
            if images is None or is_empty:  # a batch without images, which may come with a mask of no columns
                encoder_input = None
                encoder_mask = None

        features = None  # [b, t, d]
        if encoder_input is not None:
            features = self.encoder(**encoder_input)
        elif not self.caches_are_enabled():  # else the layers read the cached images
            if encoder_mask is not None:
                raise ValueError(
                    "encoder_mask says which images a token sees: give encoder_input, the images, as well."
                )
            if self.needs_blank_image():  # ranks of FSDP run the encoder together, and a frozen decoder needs a graph
                features, encoder_mask = self._encode_blank_image(x)

        if encoder_mask is not None:
            # The number of cached features is not known here: a mask of them may have any number of columns.
            num_features = encoder_mask.shape[-1] if features is None else features.shape[1]
            mask_shape = (*x.shape[:2], num_features)
            if encoder_mask.dtype != torch.bool or tuple(encoder_mask.shape) != mask_shape:
                raise ValueError(
                    f"encoder_mask is {encoder_mask.dtype} {list(encoder_mask.shape)}, but it must be torch.bool "
                    f"{list(mask_shape)}: a row for every token, a column for every position of the encoder's output."
                )
        return self.decoder(
            tokens,
            mask=mask,
            documents=documents,
            input_pos=input_pos,
            input_embeds=input_embeds,
            encoder_input=features,
            encoder_mask=encoder_mask,
            output=output,
        )

    def _encode_blank_image(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the encoder's output for a blank image, and a mask that hides it from all tokens."""
        batch_size, num_tokens = x.shape[:2]
        features = self.encoder(**self.encoder.blank(x.device))  # [1, t, d]
        features = features.expand(batch_size, -1, -1)
        sees_nothing = torch.zeros(1, 1, 1, dtype=torch.bool, device=x.device)
        mask = sees_nothing.expand(batch_size, num_tokens, features.shape[1])
        return features, mask


class ImageTextModel(FusionModel):
    """Text decoder in which tokens of a vision tower replace the embeddings of placeholder tokens.

    Args:
        decoder: text decoder.
        encoder: vision tower.
        image_tokens: ids of the placeholder tokens.
        grid_positions: whether tokens have positions in time, rows and columns (M-RoPE), instead of one position.
        pad_token: token that is embedded instead of placeholders; None embeds the placeholders.
        image_blocks: whether the tokens of an image attend to each other in both directions in sliding-window layers.

    Example:
        >>> tower = torchtune.models.VisionDescription(
        ...     patch_size=2, merge=2, num_layers=1, embed_dim=8, intermediate_dim=8, num_heads=2, output_dim=8
        ... )
        >>> text = {"vocab_size": 9, "num_layers": 1, "embed_dim": 8, "intermediate_dim": 8, "max_seq_len": 99}
        >>> description = torchtune.models.ImageTextDescription(
        ...     **text, num_heads=2, num_kv_heads=2, vision=tower, image_tokens=(7,)
        ... )
        >>> model = torchtune.models.build(description, torchtune.models.qwen3_vl.SPEC)
        >>> images = torchtune.data.Images(torch.ones(8, 12), ((1, 2, 4),))  # 8 patches become 2 tokens
        >>> model(torch.tensor([[1, 7, 7, 3]]), encoder_input={"images": images}).shape
        torch.Size([1, 4, 9])
    """

    def __init__(
        self,
        decoder: TransformerDecoder,
        encoder: VisionTower,
        image_tokens: Collection[int],
        *,
        grid_positions: bool = False,
        pad_token: int | None = None,
        image_blocks: bool = False,
    ) -> None:
        super().__init__(decoder, encoder)
        self.image_tokens = tuple(image_tokens)
        self.grid_positions = grid_positions
        self.pad_token = pad_token
        self.image_blocks = image_blocks

    def prefix_obstacle(self) -> str:
        """Return why documents cannot share a prefix in this model."""
        return "it has images among its tokens, whose positions depend on the document"

    def forward(
        self,
        tokens: Tensor,
        *,
        mask: MaskType | None = None,
        documents: Documents | None = None,
        input_pos: Tensor | None = None,
        encoder_input: Mapping[str, Any] | None = None,
        output: Literal["logits", "hidden"] | None = None,
    ) -> Tensor | list[Tensor]:
        """Predict the next token at every position.

        Args:
            tokens: int64 ``[b, s]``, with a placeholder for each token of an image.
            mask: see :meth:`torchtune.modules.TransformerDecoder.forward`.
            documents: see :meth:`torchtune.modules.TransformerDecoder.forward`.
            input_pos: see :meth:`torchtune.modules.TransformerDecoder.forward`.
            encoder_input: ``images``, the :class:`torchtune.data.Images` of all rows in order. With caches, pass images
                in the first call only; in later calls, ``input_pos`` continues after the images' positions
                (:attr:`torchtune.data.Images.offset`).
            output: see :meth:`torchtune.modules.TransformerDecoder.forward`.

        Returns:
            See :meth:`torchtune.modules.TransformerDecoder.forward`.

        Raises:
            DataError: the placeholders do not match the images.
        """
        images = None if encoder_input is None else encoder_input["images"]
        text = tokens
        if self.pad_token is not None:
            text = tokens.masked_fill(self._is_placeholder(tokens), self.pad_token)
        h = self.decoder.embed(text)  # [b, s, d]

        positions = None
        deep_features = None  # that the decoder adds after its first layers (DeepStack)
        blocks = []
        if images is not None and images.grids:
            images = self._with_places(images, tokens, documents)
            features, *further_features = self.encoder(images)  # each [n, d], for n image tokens
            # Documents with the same images share features, and a rank of context parallelism has some of their tokens.
            if images.features is not None:
                features = features[images.features]
                further_features = [layer_features[images.features] for layer_features in further_features]
            shape = h.shape
            h = h.flatten(0, 1).index_copy(0, images.places, features.to(h.dtype))  # [b * s, d]
            h = h.view(shape)
            if further_features:
                deep_features = (images.places, further_features)
            positions = images.positions
            if self.image_blocks:
                blocks = _image_blocks(images.places, _document_lengths(tokens, documents))
        elif self.needs_blank_image():
            # Ranks of FSDP run the tower together, and with a frozen decoder the loss needs a graph.
            blank_features = self.encoder(self.encoder.blank(h.device))
            sum_of_features = sum(layer_features.sum() for layer_features in blank_features)
            # A product with zero connects the tower to the loss without changing it.
            h = h + sum_of_features.to(h.dtype) * 0
        return self.decoder(
            None,
            input_embeds=h,
            mask=mask,
            documents=documents,
            input_pos=input_pos,
            rope_pos=positions,
            added=deep_features,
            layer_tokens=text,
            blocks=blocks,
            output=output,
        )

    def _is_placeholder(self, tokens: Tensor) -> Tensor:
        image_tokens = torch.tensor(self.image_tokens, device=tokens.device)
        return torch.isin(tokens, image_tokens)

    def _with_places(self, images: Images, tokens: Tensor, documents: Documents | None) -> Images:
        """Return the images with ``places`` and, for M-RoPE, ``positions``; computing them reads tokens on the host.

        Args:
            images: images of all rows.
            tokens: int64 ``[b, s]``.
            documents: documents in the ``b * s`` tokens; by default every row is a document.
        """
        all_tokens = tokens.flatten()  # [b * s]
        merge = self.encoder.merge
        if images.places is None:  # collation may have computed places and positions already
            check_placeholders(all_tokens.tolist(), self.image_tokens, images.grids, merge)
            places = self._is_placeholder(all_tokens).nonzero()[:, 0]  # [n]
            images = replace(images, places=places)
        if self.grid_positions and images.positions is None:
            positions_of_batch = grid_positions(all_tokens.tolist(), self.image_tokens, images.grids, merge)
            positions = torch.from_numpy(positions_of_batch)  # [3, b * s], on the host
            # Every document has positions of its own, which start at 0.
            lengths = _document_lengths(tokens, documents)
            first_tokens = [0, *accumulate(lengths[:-1])]
            first_positions = positions[:, first_tokens]  # [3, documents]
            offsets = first_positions.repeat_interleave(torch.tensor(lengths), dim=1)  # [3, b * s]
            positions = (positions - offsets).view(3, *tokens.shape).to(tokens.device)
            images = replace(images, positions=positions)
        return images


def _document_lengths(tokens: Tensor, documents: Documents | None) -> list[int]:
    """Return the lengths of the documents in tokens ``[b, s]``; without documents, every row is one."""
    if documents is not None:
        return list(documents.lengths)
    batch_size, num_tokens = tokens.shape
    return [num_tokens] * batch_size


def _image_blocks(places: Tensor, lengths: Sequence[int]) -> list[Block]:
    """Return (start of the document, start, end) of each run of image tokens; reads ``places`` on the host.

    Args:
        places: int64 ``[n]``, indices of the image tokens in all tokens of the batch, in ascending order.
        lengths: lengths of the documents.
    """
    if not len(places):
        return []
    places = places.cpu()
    document_starts = torch.tensor([0, *accumulate(lengths)])
    documents = torch.bucketize(places, document_starts, right=True) - 1  # [n]
    starts = document_starts[documents]
    # A run ends where a token is missing, or where another document begins.
    is_cut = (places.diff() != 1) | (starts.diff() != 0)  # [n - 1]
    inner_cuts = is_cut.nonzero()[:, 0] + 1
    cuts = [0, *inner_cuts.tolist(), len(places)]
    blocks = []
    for first, end in pairwise(cuts):
        last_place = int(places[end - 1])
        blocks.append((int(starts[first]), int(places[first]), last_place + 1))
    return blocks


class EarlyFusionModel(ImageTextModel):
    """:class:`ImageTextModel` with the arguments and inputs of earlier releases, for their recipes alone.

    Args:
        decoder: text decoder.
        encoders: the vision tower by name, for example ``{"vision": tower}``; exactly one.
        encoder_tokens: id of the placeholder token, by the same name.
        decoder_trainable: whether to train the text decoder.
        encoders_trainable: whether to train the vision tower, except its projector; also by name.
        fusion_trainable: whether to train the projector.

    Raises:
        UserError: the names differ, or ``encoders`` is not exactly one vision tower.

    Example:
        >>> isinstance(model, torchtune.modules.model_fusion.EarlyFusionModel)
        False
    """

    def __init__(
        self,
        decoder: TransformerDecoder,
        encoders: Mapping[str, VisionTower],
        encoder_tokens: Mapping[str, int],
        decoder_trainable: bool = False,
        encoders_trainable: bool | Mapping[str, bool] = False,
        fusion_trainable: bool = True,
    ) -> None:
        if not isinstance(encoders_trainable, Mapping):
            encoders_trainable = dict.fromkeys(encoders, encoders_trainable)
        if not encoders.keys() == encoder_tokens.keys() == encoders_trainable.keys():
            raise UserError(
                f"EarlyFusionModel: encoders ({', '.join(encoders)}), encoder_tokens ({', '.join(encoder_tokens)}) and "
                f"encoders_trainable ({', '.join(encoders_trainable)}) must have the same names."
            )
        if [type(encoder) for encoder in encoders.values()] != [VisionTower]:
            raise UserError("EarlyFusionModel: encoders must be one VisionTower with a name, such as 'vision'.")
        name = next(iter(encoders))
        super().__init__(decoder, encoders[name], encoder_tokens.values())
        self.encoder_name = name
        register_fusion_module(self.encoder.projector)
        self.decoder.requires_grad_(decoder_trainable)
        self.encoder.requires_grad_(encoders_trainable[name])
        # The projector is a part of the tower: it comes last.
        for parameter in get_fusion_params(self).values():
            parameter.requires_grad_(fusion_trainable)

    def forward(
        self, tokens: Tensor, *, encoder_input: Mapping[str, Any] | None = None, **options: Any
    ) -> Tensor | list[Tensor]:
        """Predict the next token at every position.

        Args:
            tokens: int64 ``[b, s]``, with a placeholder for each token of an image.
            encoder_input: see :meth:`ImageTextModel.forward`; or a mapping from the encoder's name to a dict with
                ``images``, the tiles of all rows: ``[tiles, channels, height, width]`` or a list of such tensors.
            **options: see :meth:`ImageTextModel.forward`.
        """
        if encoder_input and self.encoder_name in encoder_input:
            images = encoder_input[self.encoder_name]["images"]
            if not isinstance(images, Images):
                images = self._cut_patches(images)
            encoder_input = {"images": images}
        return super().forward(tokens, encoder_input=encoder_input, **options)

    def _cut_patches(self, tiles: Tensor | list[Tensor]) -> Images:
        """Cut tiles into patches, ordered by tile and by block."""
        if not isinstance(tiles, Tensor):
            tiles = torch.cat(tiles)
        num_tiles, channels, height, width = tiles.shape
        merge = self.encoder.merge
        pixels_per_patch = self.encoder.patch_embed.in_features / channels
        patch_size = round(pixels_per_patch**0.5)
        # A tile is rows and columns of blocks, a block merge x merge patches, a patch patch_size x patch_size pixels:
        # [tiles, c, block row, patch row, pixel row, block column, patch column, pixel column]
        side = (-1, merge, patch_size)
        blocks = tiles.unflatten(3, side).unflatten(2, side)
        # [tiles, block row, block column, patch row, patch column, c, pixel row, pixel column]
        patches = blocks.permute(0, 2, 5, 3, 6, 1, 4, 7)
        patches = patches.reshape(-1, channels * patch_size**2)  # [p, patch values]
        grid = (1, height // patch_size, width // patch_size)
        return Images(patches, (grid,) * num_tiles)


__getattr__, __path__ = former_package(__name__)

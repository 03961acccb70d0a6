"""Multimodal model with cross-attention to the output of an encoder."""

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from torchtune.data import Documents
from torchtune.modules.kernels.attention import MaskType
from torchtune.modules.model_fusion._fusion_model import FusionModel
from torchtune.modules.model_fusion._fusion_utils import get_fusion_params
from torchtune.modules.transformer import TransformerDecoder


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
        x = tokens if tokens is not None else input_embeds
        if encoder_input is not None and not _has_images(encoder_input):
            encoder_input = encoder_mask = None
        encoded = None if encoder_input is None else self.encoder(**encoder_input)
        if encoded is None and not self.caches_are_enabled():
            if encoder_mask is not None:
                raise ValueError(
                    "encoder_mask says which images a token sees: give encoder_input, the images, as well."
                )
            if self.needs_blank_image():
                encoded, encoder_mask = self._encode_blank_image(x)
        if encoder_mask is not None:
            wanted = (*x.shape[:2], encoder_mask.shape[-1] if encoded is None else encoded.shape[1])
            if encoder_mask.dtype != torch.bool or tuple(encoder_mask.shape) != wanted:
                raise ValueError(
                    f"encoder_mask is {encoder_mask.dtype} {list(encoder_mask.shape)}, but it must be torch.bool "
                    f"{list(wanted)}: a row for every token, a column for every position of the encoder's output."
                )
        return self.decoder(
            tokens,
            mask=mask,
            documents=documents,
            input_pos=input_pos,
            input_embeds=input_embeds,
            encoder_input=encoded,
            encoder_mask=encoder_mask,
            output=output,
        )

    def _encode_blank_image(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the encoder's output for a blank image, and a mask that hides it from all tokens."""
        encoded = self.encoder(**self.encoder.blank(x.device)).expand(x.shape[0], -1, -1)
        mask = torch.zeros(1, 1, 1, dtype=torch.bool, device=x.device)
        return encoded, mask.expand(*x.shape[:2], encoded.shape[1])


def _has_images(encoder_input: Mapping[str, Any]) -> bool:
    images = encoder_input.get("images", encoder_input)
    return images is not None and not (isinstance(images, Tensor) and images.numel() == 0)

"""Early-fusion model with the arguments and inputs of older recipes."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from torchtune.data import Images
from torchtune.modules.model_fusion._fusion_utils import get_fusion_params, register_fusion_module
from torchtune.modules.model_fusion._image_text import ImageTextModel
from torchtune.modules.transformer import TransformerDecoder
from torchtune.modules.vision_tower import VisionTower
from torchtune.utils import UserError


class EarlyFusionModel(ImageTextModel):
    """Text decoder in which tokens of a vision tower replace the embeddings of a placeholder token.

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
        by_name = isinstance(encoders_trainable, Mapping)
        trains = encoders_trainable if by_name else dict.fromkeys(encoders, encoders_trainable)
        if not encoders.keys() == encoder_tokens.keys() == trains.keys():
            raise UserError(
                f"EarlyFusionModel: encoders ({', '.join(encoders)}), encoder_tokens ({', '.join(encoder_tokens)}) and "
                f"encoders_trainable ({', '.join(trains)}) must have the same names."
            )
        if [type(encoder) for encoder in encoders.values()] != [VisionTower]:
            raise UserError("EarlyFusionModel: encoders must be one VisionTower with a name, such as 'vision'.")
        ((self.encoder_name, encoder),) = encoders.items()
        super().__init__(decoder, encoder, encoder_tokens.values())
        register_fusion_module(encoder.projector)
        fusion = get_fusion_params(self)
        for name, parameter in self.named_parameters():
            part = decoder_trainable if name.startswith("decoder.") else trains[self.encoder_name]
            parameter.requires_grad_(fusion_trainable if name in fusion else part)

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
            tiles = encoder_input[self.encoder_name]["images"]
            encoder_input = {"images": tiles if isinstance(tiles, Images) else self._images(tiles)}
        return super().forward(tokens, encoder_input=encoder_input, **options)

    def _images(self, tiles: Tensor | list[Tensor]) -> Images:
        """Cut tiles into patches, ordered by tile and by block."""
        tiles = tiles if isinstance(tiles, Tensor) else torch.cat(tiles)
        count, channels, height, width = tiles.shape
        side, merge = round((self.encoder.patch_embed.in_features / channels) ** 0.5), self.encoder.merge
        blocks = tiles.unflatten(3, (-1, merge, side)).unflatten(2, (-1, merge, side))
        patches = blocks.permute(0, 2, 5, 3, 6, 1, 4, 7).reshape(-1, channels * side * side)
        return Images(patches, ((1, height // side, width // side),) * count)

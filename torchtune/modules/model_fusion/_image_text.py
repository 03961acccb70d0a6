"""Model with image tokens among those of the text."""

from bisect import bisect_right
from collections.abc import Collection, Mapping
from dataclasses import replace
from itertools import accumulate
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from torchtune.data import DataError, Documents, Images, check_placeholders, grid_positions, token_counts
from torchtune.modules.attention import Block
from torchtune.modules.attention_utils import _MaskType
from torchtune.modules.model_fusion._fusion_model import FusionModel
from torchtune.modules.transformer import TransformerDecoder
from torchtune.modules.vision_tower import VisionTower


class ImageTextModel(FusionModel):
    """Text decoder in which tokens of a vision tower replace the embeddings of placeholder tokens.

    Args:
        decoder: text decoder.
        encoder: vision tower.
        image_tokens: ids of the placeholder tokens.
        grid_positions: whether tokens have positions in time, rows and columns (M-RoPE), instead of one position.
        pad_token: token that is embedded in the place of placeholders; by default they are embedded.
        image_blocks: whether a token of an image sees the later ones, too, in layers with a window.

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
        mask: _MaskType | None = None,
        documents: Documents | None = None,
        input_pos: Tensor | None = None,
        encoder_input: Mapping[str, Any] | None = None,
        output: Literal["logits", "hidden"] | None = None,
    ) -> Tensor | list[Tensor]:
        """Predict the next token at every position.

        Args:
            tokens: int64 ``[b, s]``, with a placeholder for each token of an image.
            mask: see :meth:`torchtune.modules.TransformerDecoder.forward`.
            documents: see there.
            input_pos: see there.
            encoder_input: ``images``, the :class:`torchtune.data.Images` of all rows in order. With caches, the first
                call has the images; ``input_pos`` of later ones continues after their positions
                (:attr:`torchtune.data.Images.offset`).
            output: see there.

        Returns:
            See :meth:`torchtune.modules.TransformerDecoder.forward`.

        Raises:
            DataError: the placeholders do not fit the images.
        """
        images = None if encoder_input is None else encoder_input["images"]
        text = tokens
        if self.pad_token is not None:
            placeholders = torch.tensor(self.image_tokens, device=tokens.device)
            text = tokens.masked_fill(torch.isin(tokens, placeholders), self.pad_token)
        h = self.decoder.embed(text)
        positions = deep = None
        blocks = []
        if images is None or not images.grids:
            if self.needs_blank_image():
                h = h + self._blank(h)
        else:
            images = self._placed(images, tokens, documents)
            features, *deep = self.encoder(images)
            if images.features is not None:
                features, *deep = (each[images.features] for each in (features, *deep))
            h = h.flatten(0, 1).index_copy(0, images.places, features.to(h.dtype)).view_as(h)
            deep = (images.places, deep) if deep else None
            positions = images.positions
            if self.image_blocks:
                blocks = self._blocks(images.places, tokens, documents)
        return self.decoder(
            None,
            input_embeds=h,
            mask=mask,
            documents=documents,
            input_pos=input_pos,
            rope_pos=positions,
            added=deep,
            layer_tokens=text,
            blocks=blocks,
            output=output,
        )

    def _blocks(self, places: Tensor, tokens: Tensor, documents: Documents | None) -> list[Block]:
        """Return the runs of image tokens, with the first position of their document; reads places on the host."""
        lengths = [tokens.shape[1]] * tokens.shape[0] if documents is None else documents.lengths
        starts, found = [0, *accumulate(lengths)], []
        for place in places.tolist():
            document = starts[bisect_right(starts, place) - 1]
            if found and found[-1][0] == document and found[-1][2] == place:
                found[-1] = (*found[-1][:2], place + 1)
            else:
                found.append((document, place, place + 1))
        return found

    def _placed(self, images: Images, tokens: Tensor, documents: Documents | None) -> Images:
        """Return the images with places, and with positions if the model needs them."""
        if images.places is None:
            check_placeholders(tokens.flatten().tolist(), self.image_tokens, images.grids, self.encoder.merge)
            found = torch.isin(tokens.flatten(), torch.tensor(self.image_tokens, device=tokens.device))
            images = replace(images, places=found.nonzero()[:, 0])
        if self.grid_positions and images.positions is None:
            images = replace(images, positions=self._positions(images, tokens, documents).to(tokens.device))
        return images

    def _positions(self, images: Images, tokens: Tensor, documents: Documents | None) -> Tensor:
        """Compute the positions ``[3, b, s]`` of every document; reads the tokens on the host."""
        lengths = [tokens.shape[1]] * tokens.shape[0] if documents is None else documents.lengths
        rows, merge = tokens.flatten().cpu().split(list(lengths)), self.encoder.merge
        grids, parts = list(images.grids), []
        for row in rows:
            own, missing = 0, int(np.isin(row.numpy(), self.image_tokens).sum())
            while missing > 0 and own < len(grids):
                missing -= token_counts(grids[own : own + 1], merge)[0]
                own += 1
            parts.append(torch.from_numpy(grid_positions(row.numpy(), self.image_tokens, grids[:own], merge)))
            grids = grids[own:]
        if grids:
            raise DataError(f"The batch has {len(grids)} image(s) more than its placeholders.")
        return torch.cat(parts, dim=1).view(3, *tokens.shape)

    def _blank(self, h: Tensor) -> Tensor:
        """Return zero that depends on the tower's output for a blank image."""
        return sum(part.sum() for part in self.encoder(self.encoder.blank(h.device))).to(h.dtype) * 0

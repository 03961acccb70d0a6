"""Vision-language model with image tokens in the text sequence."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any, Literal

import torch
from torch import Tensor

from torchtune.data import Documents, Images, check_placeholders, grid_positions
from torchtune.modules.attention import Block
from torchtune.modules.kernels.attention import MaskType
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
            text = tokens.masked_fill(self._placeholders(tokens), self.pad_token)
        h = self.decoder.embed(text)
        positions = deep = None
        blocks = []
        if images is not None and images.grids:
            images = self._placed(images, tokens, documents)
            features, *deep = self.encoder(images)
            if images.features is not None:
                features, *deep = (each[images.features] for each in (features, *deep))
            h = h.flatten(0, 1).index_copy(0, images.places, features.to(h.dtype)).view_as(h)
            deep = (images.places, deep) if deep else None
            positions = images.positions
            if self.image_blocks:
                blocks = _blocks(images.places, _lengths(tokens, documents))
        elif self.needs_blank_image():
            h = h + sum(part.sum() for part in self.encoder(self.encoder.blank(h.device))).to(h.dtype) * 0
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

    def _placeholders(self, tokens: Tensor) -> Tensor:
        return torch.isin(tokens, torch.tensor(self.image_tokens, device=tokens.device))

    def _placed(self, images: Images, tokens: Tensor, documents: Documents | None) -> Images:
        """Return the images with ``places`` and, for M-RoPE, ``positions``; computing them reads tokens on the host."""
        row, merge = tokens.flatten(), self.encoder.merge
        if images.places is None:
            check_placeholders(row.tolist(), self.image_tokens, images.grids, merge)
            images = replace(images, places=self._placeholders(row).nonzero()[:, 0])
        if self.grid_positions and images.positions is None:
            found = torch.from_numpy(grid_positions(row.tolist(), self.image_tokens, images.grids, merge))
            lengths = _lengths(tokens, documents)
            starts = found[:, [0, *accumulate(lengths[:-1])]]  # every document has its own positions
            found = found - starts.repeat_interleave(torch.tensor(lengths), dim=1)
            images = replace(images, positions=found.view(3, *tokens.shape).to(tokens.device))
        return images


def _lengths(tokens: Tensor, documents: Documents | None) -> list[int]:
    return [tokens.shape[1]] * tokens.shape[0] if documents is None else list(documents.lengths)


def _blocks(places: Tensor, lengths: Sequence[int]) -> list[Block]:
    """Return (start of the document, start, end) of each run of image tokens; reads ``places`` on the host."""
    at = places.cpu()
    starts = torch.tensor([0, *accumulate(lengths)])
    documents = starts[torch.bucketize(at, starts, right=True) - 1]
    cuts = (at.diff() != 1) | (documents.diff() != 0)
    runs = zip(*(each.tensor_split(cuts.nonzero()[:, 0] + 1) for each in (documents, at)), strict=True)
    return [(int(document[0]), int(run[0]), int(run[-1]) + 1) for document, run in runs]

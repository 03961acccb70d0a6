"""Image encoder of Llama 3.2 Vision: CLIP and a projection head."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from torchtune.modules import Tiles
from torchtune.modules.model_fusion import register_fusion_module
from torchtune.modules.vision_transformer import VisionTransformer


class Llama3VisionProjectionHead(nn.Module):
    """Self-attention layers over CLIP's features, and a projection of their output and CLIP's hidden states.

    Args:
        layers: self-attention layers.
        output: projection ``d * (1 + num_hidden_inputs) -> width of the decoder``.
        num_hidden_inputs: number of hidden states.
    """

    def __init__(self, layers: Sequence[nn.Module], output: nn.Module, num_hidden_inputs: int = 0) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.output = output
        self.num_hidden = num_hidden_inputs

    def forward(self, x: Tensor, hidden_states: list[Tensor] | None = None, tiles: Tiles | None = None) -> Tensor:
        """Project features.

        Args:
            x: ``[b, images, tiles, tokens, d]``; with ``tiles``, sequences ``[n, s, d]``.
            hidden_states: ``num_hidden_inputs`` tensors of the shape of ``x``.
            tiles: layout of the images in the sequences.

        Returns:
            Tensor ``[b, images * tiles * tokens, width of the decoder]``.

        Raises:
            ValueError: the number of hidden states is wrong.
        """
        hidden = hidden_states or []
        if len(hidden) != self.num_hidden:
            raise ValueError(f"The projection head needs {self.num_hidden} hidden states, got {len(hidden)}.")
        shape, mask = x.shape, None if tiles is None else tiles.mask
        x = x.flatten(2, 3).flatten(0, 1) if tiles is None else x
        for layer in self.layers:
            x = layer(x, mask=mask)
        if tiles is None:
            x = x.view(shape)
        else:
            x, hidden = tiles.unpad(x), [tiles.unpad(state) for state in hidden]
        if hidden:
            x = torch.cat([x, torch.stack(hidden, dim=-1).flatten(-2)], dim=-1)
        return self.output(x.flatten(1, 3))


class Llama3VisionEncoder(nn.Module):
    """Image encoder, which computes the features that the decoder attends to.

    The parameters of the projection head are fusion parameters.

    Args:
        clip: vision transformer.
        projection_head: projection of its features.
    """

    def __init__(self, clip: VisionTransformer, projection_head: Llama3VisionProjectionHead) -> None:
        super().__init__()
        self.clip = clip
        self.projection = projection_head
        register_fusion_module(self.projection)

    def forward(self, images: Tensor, aspect_ratio: Tensor | None = None) -> Tensor:
        """Encode images.

        Args:
            images: ``[b, images, tiles, c, tile_size, tile_size]``.
            aspect_ratio: int64 ``[b, images, 2]``: (height, width) of each image in tiles; by default one tile.

        Returns:
            Tensor ``[b, images * tiles * tokens, width of the decoder]``.
        """
        return self.projection(*self.clip.encode(images, aspect_ratio))

    def blank(self, device: torch.device) -> dict[str, Tensor]:
        """Return the arguments of :meth:`forward` for one blank image."""
        conv = self.clip.conv
        side = round(self.clip.patches_per_tile**0.5) * conv.kernel_size[0]
        return {"images": torch.zeros(1, 1, 1, conv.in_channels, side, side, device=device, dtype=conv.weight.dtype)}

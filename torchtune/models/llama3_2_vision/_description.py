"""Description of Llama 3.2 Vision."""

from dataclasses import dataclass

from torchtune.models._description import Description, ModelError


@dataclass(frozen=True, kw_only=True)
class VisionDescription(Description):
    """Description of the text decoder, the fusion layers and the image encoder.

    Raises:
        ModelError: a field is invalid, or fields are inconsistent.
    """

    # Fusion
    fusion_layers: tuple[int, ...]  # decoder layers with a cross-attention layer before them
    num_special_tokens: int = 8  # additional tokens, which are trained with the fusion

    # Encoder: CLIP ...
    tile_size: int
    clip_dim: int
    num_clip_layers: int
    num_clip_heads: int
    clip_hidden_states: tuple[int, ...]  # layers whose inputs are also projected
    patch_size: int = 14
    max_num_tiles: int = 4
    in_channels: int = 3
    clip_norm_eps: float = 1e-5
    # ... and the layers of the projection head
    num_projection_layers: int

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.fusion_layers or not all(0 <= layer < self.num_layers for layer in self.fusion_layers):
            raise ModelError(
                f"fusion_layers must be layers of the decoder, 0 to {self.num_layers - 1}, got "
                f"{list(self.fusion_layers)}."
            )
        sizes = ("tile_size", "patch_size", "clip_dim", "num_clip_layers", "num_clip_heads", "max_num_tiles")
        for name in (*sizes, "in_channels", "num_special_tokens", "num_projection_layers"):
            if not 1 <= getattr(self, name) < 2**16:
                raise ModelError(f"{name} must be from 1 to {2**16 - 1:,}, got {getattr(self, name)}.")
        if self.tile_size % self.patch_size:
            raise ModelError(f"tile_size ({self.tile_size}) must be a multiple of patch_size ({self.patch_size}).")
        if self.clip_dim % self.num_clip_heads:
            raise ModelError(
                f"clip_dim ({self.clip_dim}) must be a multiple of num_clip_heads ({self.num_clip_heads})."
            )
        wrong = [layer for layer in self.clip_hidden_states if not 0 <= layer < self.num_clip_layers]
        if wrong or list(self.clip_hidden_states) != sorted(set(self.clip_hidden_states)):
            raise ModelError(
                f"clip_hidden_states must be layers of the encoder, 0 to {self.num_clip_layers - 1}, in ascending "
                f"order, got {list(self.clip_hidden_states)}."
            )

    def other_numbers(self, layer: int) -> dict[str, int]:
        """Return the indices of a decoder layer and of the cross-attention before it in checkpoints.

        ``numbered`` and ``cross`` count both kinds of layers, ``fusion`` counts cross-attention layers.
        """
        before = sum(other < layer for other in self.fusion_layers)
        return {
            "numbered": layer + before + (layer in self.fusion_layers),
            "cross": layer + before,
            "fusion": before,
        }

    @property
    def aspect_ratios(self) -> list[tuple[int, int]]:
        """All (height, width) of images in tiles, in the order of checkpoints, which number them from 1."""
        most = range(1, self.max_num_tiles + 1)
        return [(height, width) for height in most for width in most if height * width <= self.max_num_tiles]

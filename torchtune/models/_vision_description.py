"""Descriptions of vision towers and vision-language models."""

from dataclasses import dataclass
from typing import Literal

from torchtune.models._description import Description, ModelError

_SIZES = ("patch_size", "embed_dim", "output_dim", "merge")
_LAYER_SIZES = ("num_layers", "intermediate_dim", "num_heads")  # of a tower with layers
_LARGEST = 2**20


@dataclass(frozen=True, kw_only=True)
class VisionDescription:
    """Complete description of a vision tower and its projector.

    The meaning of fields does not depend on the model family, as in :class:`Description`.

    Raises:
        ModelError: a field is invalid, or fields are inconsistent.

    Example:
        >>> tower = torchtune.models.VisionDescription(
        ...     patch_size=14, num_layers=2, embed_dim=32, intermediate_dim=64, num_heads=4, output_dim=48
        ... )
        >>> tower.head_dim, tower.patch_values
        (8, 588)
    """

    # Patches
    patch_size: int
    frames_per_patch: int = 1
    num_channels: int = 3
    patch_bias: bool = True
    patch_norms: bool = False  # norms before and after the embedding of patches

    # Layers
    num_layers: int = 0  # 0: patches are only embedded and projected
    embed_dim: int
    intermediate_dim: int = 0
    num_heads: int = 0
    attn_bias: bool = True  # biases of the query, key and value projections
    attn_output_bias: bool = True
    mlp_bias: bool = True
    mlp_gated: bool = False
    activation: Literal["silu", "gelu", "gelu_tanh"] = "gelu_tanh"
    norm: Literal["layer", "rms"] = "layer"
    norm_eps: float = 1e-6
    post_norms: bool = False  # norms of the outputs of attention and feed-forward
    head_norms: bool = False  # RMSNorms of queries and keys, and an RMSNorm without weight of values
    attn_scale: float | None = None
    clipped: bool = False  # linear layers clip their input and output
    first_norm: bool = False  # norm before the layers
    last_norm: bool = False  # norm after the layers
    window: int = 0  # rows and columns of tokens in an attention window; 0: none
    full_layers: tuple[int, ...] = ()  # layers with attention to the whole frame

    # Positions
    positions: Literal["none", "interpolated", "classed", "axes"] = "none"  # kind of learned position embeddings
    positions_side: int = 0  # rows and columns of the embedding table
    rope: Literal["none", "axial", "alternating", "halves", "neighbors"] = "none"  # see GridRotaryPositionalEmbeddings
    rope_base: float = 10_000.0

    # Projector
    merge: int = 1  # rows and columns of patches that become one token
    output_dim: int  # width of the text decoder
    merge_channels_first: bool = False
    merge_pools: bool = False  # a token is the mean of its patches
    merge_standardized: bool = False  # merged patches are shifted and scaled, without training
    merge_norm: Literal["none", "layer", "rms", "plain"] = "none"  # of patches or pooled tokens; plain: no weight
    merge_norm_eps: float = 1e-6
    merge_reduces: bool = False  # merged patches are projected to the width of one patch
    projector_dim: int = 0  # intermediate width; 0: the projector is one linear layer
    projector_first: bool = False  # the projector has a further first layer of width projector_dim
    projector_bias: bool = True
    deep_layers: tuple[int, ...] = ()  # layers with outputs that are added in the decoder's first layers (DeepStack)

    def __post_init__(self) -> None:
        sizes = _SIZES
        if self.num_layers:
            sizes = (*_SIZES, *_LAYER_SIZES)
        for field in sizes:
            if not 1 <= getattr(self, field) <= _LARGEST:
                raise ModelError(f"vision: {field} must be from 1 to {_LARGEST:,}, got {getattr(self, field):,}.")
        if self.num_layers:
            if self.embed_dim % self.num_heads:
                raise ModelError(
                    f"vision: embed_dim ({self.embed_dim}) must be a multiple of num_heads ({self.num_heads})."
                )
            if self.rope != "none" and self.head_dim % 4:  # rows and columns rotate half of the pairs of channels each
                raise ModelError(
                    f"vision: embed_dim ({self.embed_dim}) must be num_heads ({self.num_heads}) times a multiple of 4."
                )
        for field in ("deep_layers", "full_layers"):
            if not all(0 <= layer < self.num_layers for layer in getattr(self, field)):
                raise ModelError(f"vision: {field} must be layers of the tower, got {list(getattr(self, field))}.")
        if bool(self.positions_side) != (self.positions != "none"):
            raise ModelError(f"vision: positions ('{self.positions}') and positions_side go together.")
        if self.full_layers and not self.window:
            raise ModelError("vision: full_layers needs window.")
        if self.positions == "classed" and (self.window or self.deep_layers):
            raise ModelError("vision: positions 'classed' do not go with window or deep_layers.")
        if self.projector_first and (self.merge_reduces or not self.projector_dim):
            raise ModelError("vision: projector_first needs projector_dim, and no merge_reduces.")

    @property
    def head_dim(self) -> int:
        """Size of a head."""
        return self.embed_dim // self.num_heads

    @property
    def patch_values(self) -> int:
        """Number of values of a patch."""
        return self.num_channels * self.frames_per_patch * self.patch_size**2

    @property
    def patch_shape(self) -> tuple[int, ...]:
        """Shape of a patch in the convolution of a checkpoint: channels, frames (unless 1), rows, columns."""
        frames = (self.frames_per_patch,) if self.frames_per_patch > 1 else ()
        return (self.num_channels, *frames, self.patch_size, self.patch_size)

    @property
    def num_deep_layers(self) -> int:
        """Number of ``deep_layers``."""
        return len(self.deep_layers)


@dataclass(frozen=True, kw_only=True)
class ImageTextDescription(Description):
    """Description of a vision-language model: a text decoder with image tokens in the text sequence.

    Raises:
        ModelError: a field is invalid, or fields are inconsistent.

    Example:
        >>> isinstance(model.description, torchtune.models.ImageTextDescription)
        False
    """

    vision: VisionDescription
    image_tokens: tuple[int, ...]  # ids of the placeholder tokens of images and videos
    pad_token: int | None = None  # token that is embedded instead of placeholders; None: they are embedded
    image_blocks: bool = False  # tokens of an image attend to each other in both directions in sliding-window layers

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.vision.output_dim != self.embed_dim:
            raise ModelError(
                f"vision: output_dim ({self.vision.output_dim}) must be embed_dim of the text ({self.embed_dim})."
            )
        if len(self.vision.deep_layers) > self.num_layers:
            raise ModelError(f"vision: the text has fewer layers ({self.num_layers}) than deep_layers.")
        if not self.image_tokens or not all(0 <= token < self.vocab_size for token in self.image_tokens):
            raise ModelError(f"image_tokens {list(self.image_tokens)} must be tokens of the vocabulary.")

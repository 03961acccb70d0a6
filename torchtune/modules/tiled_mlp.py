"""Feed-forward layers that compute long rows in tiles, to bound the memory of their activations."""

from typing import TYPE_CHECKING, ClassVar

from torch import nn

from torchtune.modules.conversion import Conversion, ConversionError, ConversionReport, Phase
from torchtune.modules.feed_forward import FeedForward
from torchtune.modules.transformer import text_decoder

if TYPE_CHECKING:  # DTensor is slow to import
    from torch.distributed.tensor.parallel import ParallelStyle


class TiledMLP(Conversion):
    """Conversion that computes the feed-forward layers of a decoder in tiles of the sequence.

    A feed-forward layer is independent for each token, and its hidden activations are several times as wide as its
    input. Each tile saves only its input and recomputes the rest in the backward pass, so that the hidden activations
    of one tile exist at a time (Bekman et al., "Arctic Long Sequence Training", 2025, arXiv:2506.13996). Outputs and
    gradients are those of the layer, except that the gradients of its weights are summed over the tiles in their dtype.
    It changes no weight. Experts of a mixture are not tiled: they are already computed expert by expert.

    Args:
        tile_size: number of tokens of a tile; shorter rows are computed as before.

    Raises:
        ConversionError: ``tile_size`` is below 1.

    Example:
        >>> from torchtune.modules import TiledMLP
        >>> from torchtune.modules.conversion import apply_conversions
        >>> (report,) = apply_conversions(model, [TiledMLP(tile_size=8192)])
        >>> print(report)
        TiledMLP: 2 modules converted (mlp); tiles of 8,192 tokens
    """

    phase: ClassVar[Phase] = Phase.KERNEL

    def __init__(self, tile_size: int = 16_384) -> None:
        if isinstance(tile_size, bool) or not isinstance(tile_size, int) or tile_size < 1:
            raise ConversionError(f"TiledMLP: tile_size is {tile_size}: give a number of tokens, such as 16384.")
        self.tile_size = tile_size

    def convert(self, model: nn.Module) -> ConversionReport:
        """Set ``tile_size`` of the feed-forward layers.

        Raises:
            ConversionError: the decoder has no feed-forward layer.
        """
        paths = []
        for name, module in text_decoder(model).named_modules():
            if isinstance(module, FeedForward):
                module.tile_size = self.tile_size
                paths.append(name)
        if not paths:
            raise ConversionError(
                f"TiledMLP: {type(model).__name__} has no feed-forward layers to tile: remove it from model_converters."
            )
        return ConversionReport("TiledMLP", paths, note=f"tiles of {self.tile_size:,} tokens")

    def revert(self, model: nn.Module) -> None:
        """Compute whole rows again."""
        for module in text_decoder(model).modules():
            if isinstance(module, FeedForward):
                module.tile_size = None

    def parallel_style(self, module: nn.Module, style: "ParallelStyle") -> "ParallelStyle":
        """Refuse tensor parallelism, which divides the hidden activations by itself."""
        raise ConversionError(
            "TiledMLP: remove it, or set tensor_parallel_dim to 1: tensor parallelism divides the hidden activations "
            "already."
        )

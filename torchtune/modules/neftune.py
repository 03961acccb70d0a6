"""Noise on token embeddings in training (NEFTune)."""

import math
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor, nn

from torchtune.data import Documents
from torchtune.modules.conversion import Conversion, ConversionError, ConversionReport, Phase
from torchtune.modules.transformer import TransformerDecoder

if TYPE_CHECKING:  # DTensor is slow to import
    from torch.distributed.tensor.parallel import ParallelStyle


class NEFTune(Conversion):
    """Conversion that adds noise to the token embeddings in training: U(-1, 1) · alpha / sqrt(L · d).

    L is the number of tokens of the document and d the width of the embedding (Jain et al., "NEFTune: Noisy Embeddings
    Improve Instruction Finetuning", 2023). Without boundaries of documents, L is the length of the rows. In evaluation
    there is no noise. It changes no weight, and works with and without adapters.

    Args:
        alpha: scale of the noise; the paper uses 5, 10 and 15.

    Raises:
        ConversionError: ``alpha`` is not above 0.

    Example:
        >>> from torchtune.modules import NEFTune
        >>> from torchtune.modules.conversion import apply_conversions
        >>> (report,) = apply_conversions(model, [NEFTune(alpha=5)])
        >>> print(report)
        NEFTune: 1 modules converted (tok_embeddings); noise of scale 5 in training
    """

    phase: ClassVar[Phase] = Phase.OBJECTIVE

    def __init__(self, alpha: float = 5.0) -> None:
        if not 0 < alpha < math.inf:
            raise ConversionError(f"NEFTune: alpha is {alpha}: give a number above 0, such as 5.")
        self.alpha = alpha

    def convert(self, model: nn.Module) -> ConversionReport:
        """Set ``embedding_noise`` of the decoder.

        Raises:
            ConversionError: the model is no text decoder.
        """
        if not isinstance(model, TransformerDecoder):
            raise ConversionError(
                f"NEFTune: a {type(model).__name__} is no text decoder, whose embeddings get the noise: remove it from "
                "model_converters."
            )
        model.embedding_noise = self.add_noise
        return ConversionReport("NEFTune", ["tok_embeddings"], note=f"noise of scale {self.alpha:g} in training")

    def revert(self, model: nn.Module) -> None:
        """Remove the noise."""
        model.embedding_noise = None

    def parallel_style(self, module: nn.Module, style: "ParallelStyle") -> "ParallelStyle":
        """Refuse tensor parallelism, whose ranks would add different noise to the same embeddings."""
        if isinstance(module, nn.Embedding):
            raise ConversionError("NEFTune: set tensor_parallel_dim to 1: its ranks would add different noise.")
        return style

    def add_noise(self, h: Tensor, documents: Documents | None) -> Tensor:
        """Add noise to embeddings ``[b, s, d]``.

        Raises:
            ConversionError: the documents continue on other ranks.
        """
        batch_size, seq_len, width = h.shape
        noise = torch.empty_like(h).uniform_(-1, 1)
        if documents is None:
            return h + noise * (self.alpha / math.sqrt(seq_len * width))
        if documents.num_tokens != batch_size * seq_len:
            raise ConversionError("NEFTune: set context_parallel_dim to 1: a rank has a part of each document.")
        lengths = documents.cu_seqlens.diff().to(h.device)
        lengths = lengths.repeat_interleave(lengths, output_size=documents.num_tokens)  # [b * s]
        scale = self.alpha * (lengths * width).rsqrt()
        return h + noise * scale.view(batch_size, seq_len, 1).to(h.dtype)

"""Base class of models that combine a text decoder with an image encoder."""

import logging

import torch
from torch import Tensor, nn

from torchtune.modules.common_utils import is_sharded
from torchtune.modules.model_fusion._fusion_utils import get_fusion_params
from torchtune.modules.transformer import TransformerDecoder
from torchtune.utils import get_logger, log_once


class FusionModel(nn.Module):
    """Text decoder and image encoder.

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
        fusion = {id(parameter) for parameter in get_fusion_params(self.decoder).values()}
        return not any(
            parameter.requires_grad for parameter in self.decoder.parameters() if id(parameter) not in fusion
        )

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

"""Conversion of a decoder to attention in both directions."""

from dataclasses import replace
from typing import ClassVar

from torch import nn

from torchtune.modules.attention import MultiHeadAttention
from torchtune.modules.conversion import Conversion, ConversionError, ConversionReport, Phase
from torchtune.modules.transformer import TransformerDecoder


class BidirectionalAttention(Conversion):
    """Conversion that lets positions attend to all of their document, for embedding models and classifiers.

    Without documents and masks, a position attends to its whole row: padded rows need either. Checkpoints have
    ``is_causal: false`` in ``config.json``, which ``transformers`` 5 and this library read. An adapter alone cannot say
    it.

    Raises:
        ConversionError: see :meth:`convert`.

    Example:
        >>> from torchtune.modules import BidirectionalAttention
        >>> from torchtune.modules.conversion import apply_conversions
        >>> (report,) = apply_conversions(model, [BidirectionalAttention()])
        >>> print(report)
        BidirectionalAttention: 2 modules converted (...); each position sees its whole document
    """

    phase: ClassVar[Phase] = Phase.OBJECTIVE

    def convert(self, model: nn.Module) -> ConversionReport:
        """Clear ``is_causal`` of all attention layers, and of the model's description.

        Raises:
            ConversionError: the model is no text decoder that this library has built, or has parts that cannot see
                later positions, such as Mamba layers or sliding windows; it is then unchanged.
        """
        description = getattr(model, "description", None)
        if not isinstance(model, TransformerDecoder) or description is None:
            raise ConversionError(
                f"BidirectionalAttention: a {type(model).__name__} is no text decoder of torchtune.models, so that its "
                "checkpoints could not say it: remove it from model_converters."
            )
        causal_part = description.causal_part()
        if causal_part is not None:
            raise ConversionError(
                f"BidirectionalAttention: the model has {causal_part}, which cannot see later positions: remove it "
                "from model_converters, or choose another model."
            )
        names = self._set_causal(model, is_causal=False)
        return ConversionReport("BidirectionalAttention", names, note="each position sees its whole document")

    def revert(self, model: nn.Module) -> None:
        """Make attention causal again."""
        self._set_causal(model, is_causal=True)

    @staticmethod
    def _set_causal(model: nn.Module, *, is_causal: bool) -> list[str]:
        """Set whether attention is causal; return the names of the layers."""
        names = []
        for name, module in model.named_modules():
            if isinstance(module, MultiHeadAttention):
                module.is_causal = is_causal
                names.append(name)
        model.description = replace(model.description, is_causal=is_causal)
        return names


def is_causal(model: nn.Module) -> bool:
    """Return whether no position of a model sees later ones, as a model that predicts tokens needs it."""
    description = getattr(getattr(model, "text", model), "description", None)
    return description is None or description.is_causal

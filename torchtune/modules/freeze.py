"""Conversion that trains a part of a model and freezes the other weights."""

import re
from collections.abc import Sequence
from typing import ClassVar

from torch import nn

from torchtune.modules.conversion import (
    Conversion,
    ConversionError,
    ConversionReport,
    Phase,
    get_conversions,
    nearest_module_names,
)
from torchtune.modules.output_projection import TiedLinear


class Freeze(Conversion):
    """Conversion that freezes weights by pattern: they get no gradient and no optimizer state, and are saved unchanged.

    A pattern is a regular expression of one or several whole components of the names of weights: ``layers.(2[0-9])``
    means layers 20 to 29, ``norm`` the final norm, ``attn`` the attention of every layer, ``q_proj.bias`` biases.

    Args:
        train: patterns of the weights to train; all others are frozen.
        freeze: patterns of the weights to freeze; all others are trained. Give either ``train`` or ``freeze``.

    Raises:
        ConversionError: both or none are given, or a pattern is no regular expression.

    Example:
        >>> from torchtune.modules import Freeze
        >>> from torchtune.modules.conversion import apply_conversions
        >>> (report,) = apply_conversions(model, [Freeze(train=["layers.1", "norm"])])
        >>> print(report)
        Freeze: 10 modules converted (...); of 28,704 parameters 9,312 are trained...
    """

    phase: ClassVar[Phase] = Phase.OBJECTIVE  # after all others, which may replace layers

    def __init__(self, train: Sequence[str] | None = None, freeze: Sequence[str] | None = None) -> None:
        if (train is None) == (freeze is None):
            raise ConversionError("Freeze: give the patterns of weights either in train or in freeze.")
        self.setting = "train" if freeze is None else "freeze"
        patterns = train if freeze is None else freeze
        if isinstance(patterns, str) or not patterns:
            raise ConversionError(
                f"Freeze: {self.setting} is {patterns!r}: give a list of patterns, for example "
                "['layers.(2[0-9])', norm]."
            )
        self.patterns = list(patterns)
        for pattern in self.patterns:
            try:
                re.compile(pattern)
            except re.error as error:
                raise ConversionError(
                    f"Freeze: {self.setting} has '{pattern}', which is no regular expression ({error}): write it like "
                    "'layers.(2[0-9])' or 'attn.*'."
                ) from error

    def convert(self, model: nn.Module) -> ConversionReport:
        """Clear ``requires_grad`` of the weights to freeze.

        Raises:
            ConversionError: the model has adapters, a pattern matches nothing, or nothing is left to train; the model
                is then unchanged.
        """
        for conversion in get_conversions(model):
            if conversion.owned_parameters(model):
                raise ConversionError(
                    "Freeze: the model has adapters, beside which all weights are frozen already: choose layers with "
                    "target_modules and train_modules of torchtune.modules.peft.LoRA."
                )
        trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        matching: set[str] = set()
        for pattern in self.patterns:
            names = [name for name in trained if re.fullmatch(rf"(.*\.)?({pattern})(\..*)?", name)]
            if not names:
                self._raise_unmatched(model, pattern, list(trained))
            matching.update(names)
        frozen = matching if self.setting == "freeze" else trained.keys() - matching
        if len(frozen) == len(trained):
            raise ConversionError(
                f"Freeze: {self.setting} = {self.patterns} freezes all {len(trained)} weights, so nothing would be "
                "trained: leave some out."
            )
        for name in frozen:
            trained[name].requires_grad_(False)
        # In the order of the model, each module once.
        modules = dict.fromkeys(name.rpartition(".")[0] for name in trained if name in frozen)
        count = sum(parameter.numel() for parameter in trained.values())
        left = sum(parameter.numel() for parameter in trained.values() if parameter.requires_grad)
        note = f"of {count:,} parameters {left:,} are trained"
        tied = isinstance(getattr(model, "output", None), TiedLinear)
        if tied and "tok_embeddings.weight" in frozen:
            note += ", the output is tied to the embedding and frozen with it"
        return ConversionReport("Freeze", list(modules), note=note)

    def revert(self, model: nn.Module) -> None:
        """Train all weights again, except those that another conversion stores in a format of its own."""
        stored: set[str] = set()
        for conversion in get_conversions(model):
            for weight in conversion.stored_weights(model).values():
                stored.update(weight.names)
        for name, parameter in model.named_parameters():
            if name not in stored:
                parameter.requires_grad_(True)

    @staticmethod
    def _raise_unmatched(model: nn.Module, pattern: str, names: list[str]) -> None:
        if pattern == "output" and isinstance(getattr(model, "output", None), TiedLinear):
            raise ConversionError(
                "Freeze: 'output' is tied to the token embedding of this model: name tok_embeddings, which stands for "
                "both."
            )
        paths = dict.fromkeys(name.rpartition(".")[0] for name in names)
        nearest = ", ".join(nearest_module_names(pattern, [*paths, *names]))
        raise ConversionError(f"Freeze: no weight of the model matches '{pattern}', the nearest names are {nearest}.")

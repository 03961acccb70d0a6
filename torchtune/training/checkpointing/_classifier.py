"""Weights of a language model for a classifier."""

from collections.abc import Iterable

import torch
from torch import nn

from torchtune.training.checkpointing._errors import CheckpointError


def update_state_dict_for_classifier(
    state_dict: dict[str, torch.Tensor],
    model_named_parameters: Iterable[tuple[str, nn.Parameter]],
    force_override: bool = False,
) -> None:
    """Make the output layer of ``state_dict`` that of a classifier, in place.

    A language model's projection to its vocabulary has no meaning for classes: where its shape differs from the
    model's, the model's own (freshly initialised) one takes its place. A bias of the output goes, unless the model
    has one.

    Args:
        state_dict: of the checkpoint, this library's names.
        model_named_parameters: of the model that will load it.
        force_override: replace the projection even if the shapes agree.

    Raises:
        CheckpointError: the model has no ``output.weight``.
    """
    parameters = dict(model_named_parameters)
    if "output.weight" not in parameters:
        raise CheckpointError("The model has no output.weight, so it is no classifier: use a classifier's builder.")
    ours = parameters["output.weight"]
    theirs = state_dict.get("output.weight")
    if force_override or theirs is None or theirs.shape != ours.shape:
        state_dict["output.weight"] = ours
    if "output.bias" in state_dict and "output.bias" not in parameters:
        del state_dict["output.bias"]

"""Load the weights of a language model into a classifier."""

from collections.abc import Iterable

import torch
from torch import nn

from torchtune.checkpoints._checkpoint_error import CheckpointError


def update_state_dict_for_classifier(
    state_dict: dict[str, torch.Tensor],
    model_named_parameters: Iterable[tuple[str, nn.Parameter]],
    force_override: bool = False,
) -> None:
    """Replace the output layer of ``state_dict`` by that of a classifier, in place.

    If the shape of the output projection differs from the model's, the model's (newly initialized) projection replaces
    it. An output bias is removed unless the model has one.

    Args:
        state_dict: state dict of the checkpoint, with this library's names.
        model_named_parameters: named parameters of the model to load.
        force_override: replace the projection even if the shapes match.

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

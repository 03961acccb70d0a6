"""In-place changes to a whole model."""

import torch

from torchtune.utils import get_logger, log_once


def disable_dropout(model: torch.nn.Module) -> None:
    """Set every dropout of ``model`` to 0 in place and log it, as preference losses compare two forward passes.

    Covers ``torch.nn.Dropout`` and modules with a probability in ``attn_dropout``.

    Example:
        >>> layer = torch.nn.Dropout(0.5)
        >>> torchtune.training.disable_dropout(layer)
        >>> layer(torch.ones(3))
        tensor([1., 1., 1.])
    """
    for name, module in model.named_modules():
        attributes = ["attn_dropout"]
        if isinstance(module, torch.nn.modules.dropout._DropoutNd):  # "p" has another meaning in other modules
            attributes = ["p", "attn_dropout"]
        for attribute in attributes:
            probability = getattr(module, attribute, None)
            if isinstance(probability, float) and probability > 0.0:
                log_once(get_logger(), f"Dropout of {name or type(module).__name__} is set from {probability} to 0.")
                setattr(module, attribute, 0.0)

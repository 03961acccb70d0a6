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
        for attribute in ("p", "attn_dropout"):
            if attribute == "p" and not isinstance(module, torch.nn.modules.dropout._DropoutNd):
                continue
            value = getattr(module, attribute, None)
            if isinstance(value, float) and value > 0.0:
                log_once(get_logger(), f"Dropout of {name or type(module).__name__} is set from {value} to 0.")
                setattr(module, attribute, 0.0)

"""Fusion parameters of a model: parameters that fuse its text decoder with an encoder."""

from types import MethodType

from torch import nn


def register_fusion_module(module: nn.Module) -> None:
    """Register all parameters of a module as fusion parameters, which ``fusion_trainable`` controls.

    Example:
        >>> layer = torch.nn.Linear(2, 3)
        >>> torchtune.modules.model_fusion.register_fusion_module(layer)
        >>> sorted(torchtune.modules.model_fusion.get_fusion_params(layer))
        ['bias', 'weight']
    """
    module.fusion_params = MethodType(_names, module)  # deepcopy rebinds a bound method to the copied module


def _names(module: nn.Module) -> list[str]:
    return [name for name, _ in module.named_parameters()]


def get_fusion_params(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the fusion parameters by name, as listed by ``fusion_params()`` of the model's modules."""
    found = {}
    for path, module in model.named_modules():
        if callable(getattr(module, "fusion_params", None)):
            start = f"{path}." if path else ""
            found |= {start + name: module.get_parameter(name) for name in module.fusion_params()}
    return found

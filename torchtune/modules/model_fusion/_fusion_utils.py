"""Which parameters of a model fuse its text decoder with an encoder."""

from types import MethodType

from torch import nn


def register_fusion_module(module: nn.Module) -> None:
    """Count all parameters of a module among those of the fusion: ``fusion_trainable`` decides about them.

    Example:
        >>> layer = torch.nn.Linear(2, 3)
        >>> torchtune.modules.model_fusion.register_fusion_module(layer)
        >>> sorted(torchtune.modules.model_fusion.get_fusion_params(layer))
        ['bias', 'weight']
    """
    module.fusion_params = MethodType(_names, module)  # a copy of the module rebinds it


def _names(module: nn.Module) -> list[str]:
    return [name for name, _ in module.named_parameters()]


def get_fusion_params(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters of the fusion, by name: those that ``fusion_params()`` of the modules of ``model`` lists."""
    found = {}
    for path, module in model.named_modules():
        if callable(getattr(module, "fusion_params", None)):
            start = f"{path}." if path else ""
            found |= {start + name: module.get_parameter(name) for name in module.fusion_params()}
    return found

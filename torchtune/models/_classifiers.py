"""Compatibility: classifier builders for configs of earlier releases, which already deprecated these builders."""

import inspect
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from torchtune.models._builders import Builder, dress, exported
from torchtune.modules.classifier import classifier_model

_NEW = "Use torchtune.modules.classifier_model instead."


def classifier_builders(module: str, bases: Mapping[str, Builder]) -> dict[str, Callable[..., nn.Module]]:
    """Make the classifier variants ``x_classifier`` of builders ``x``, as attributes of a module."""
    names = {f"{name}_classifier": base for name, base in bases.items()}
    return exported(module, {name: _classifier_builder(base, name, module) for name, base in names.items()})


def _classifier_builder(base: Builder, name: str, module: str) -> Callable[..., nn.Module]:
    """Make the classifier variant of a builder, with the additional argument ``num_classes``.

    Args:
        base: builder of the language model, with or without LoRA.
        name: name of the new function.
        module: ``__name__`` of the module that exports it.
    """
    own = inspect.signature(base)
    path = f"{base.__module__}.{base.__name__}"
    kind = inspect.Parameter.KEYWORD_ONLY if "lora_attn_modules" in own.parameters else None
    classes = inspect.Parameter("num_classes", kind or inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=int)
    rest = [
        parameter if kind else parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for parameter in own.parameters.values()
    ]
    at = next((i for i, parameter in enumerate(rest) if parameter.kind is kind), len(rest)) if kind else 0
    signature = own.replace(parameters=[*rest[:at], classes, *rest[at:]], return_annotation=nn.Module)

    def builder(*args: Any, **kwargs: Any) -> nn.Module:
        warnings.warn(f"{name} is deprecated. {_NEW}", FutureWarning, stacklevel=2)
        values = dict(signature.bind(*args, **kwargs).arguments)
        return classifier_model(values.pop("num_classes"), path, **values)

    builder.__signature__ = signature
    return dress(builder, name, module, f"Build :func:`{base.__name__}` with ``num_classes`` outputs. {_NEW}")

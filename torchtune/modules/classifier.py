"""Models with a classification or reward head instead of the vocabulary's output projection."""

import importlib
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn

from torchtune.utils import UserError, fill_from_cpu


class ClassifierHead(nn.Linear):
    """Classification head without a bias, ``[..., d]`` to ``[..., num_classes]``.

    Args:
        width: d.
        num_classes: number of classes.
    """

    def __init__(self, width: int, num_classes: int) -> None:
        super().__init__(width, num_classes, bias=False)

    def initialize_parameters(self) -> None:
        """Draw the weight from a normal distribution of variance 1 / (d + 1) (Stiennon et al. 2020, 2009.01325)."""
        std = (self.in_features + 1) ** -0.5
        fill_from_cpu(self.weight, partial(nn.init.normal_, std=std))


def classifier_model(num_classes: int, base_model_path: str, **base_model_kwargs: Any) -> nn.Module:
    """Build a model with a classification head, ``nn.Linear(d, num_classes)`` without a bias, as its output layer.

    Args:
        num_classes: number of classes; 1 for a reward model.
        base_model_path: dotted path of a builder, for example ``"torchtune.models.llama3_2.llama3_2_1b"``.
        **base_model_kwargs: arguments of the builder.

    Returns:
        The model, on the default device and in the default dtype.

    Raises:
        UserError: there is no such builder, or ``num_classes`` is below 1.
    """
    if num_classes < 1:
        raise UserError(f"num_classes is {num_classes}: it must be at least 1.")
    module, _, name = base_model_path.rpartition(".")
    try:
        builder = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise UserError(
            f"base_model_path: there is no builder '{base_model_path}' ({error}): write it like "
            "torchtune.models.llama3_2.llama3_2_1b."
        ) from error
    model = builder(**base_model_kwargs)
    width = model.tok_embeddings.weight.shape[1]
    output = model.output
    if hasattr(output, "adapter_params"):  # an adapter of the output becomes one of the head
        model.output = type(output)(width, num_classes, rank=output.rank, alpha=output.alpha, dropout=output.dropout.p)
    else:
        model.output = ClassifierHead(width, num_classes)
    description = getattr(model, "description", None)
    if description is not None:
        is_same_head = description.num_classes == num_classes
        class_names = description.class_names if is_same_head else ()
        problem_type = description.problem_type if is_same_head else None
        model.description = replace(
            description, num_classes=num_classes, class_names=class_names, problem_type=problem_type
        )
    return model

"""Compatibility: names of quantisation that recipes copied from earlier releases import.

Full fine-tuning recipes import the float8 functions, generation and evaluation recipes :func:`get_quantizer_mode`;
neither quantises unless its config asks for it. The quantizers themselves are not in this release.
"""

from typing import Any

from torch import nn

from torchtune.utils import UserError

__all__ = ["convert_to_float8_training", "get_quantizer_mode", "is_fp8_tensorwise_scaling"]

_MODES = {
    "Int4WeightOnlyQuantizer": "4w",
    "Int4WeightOnlyQATQuantizer": "4w-qat",
    "Int4WeightOnlyQATQuantizerModuleSwap": "4w-qat-module-swap",
    "Int8DynActInt4WeightQuantizer": "8da4w",
    "Int8DynActInt4WeightQATQuantizer": "8da4w-qat",
    "Int8DynActInt4WeightQATQuantizerModuleSwap": "8da4w-qat-module-swap",
}


def get_quantizer_mode(quantizer: Any | None) -> str | None:
    """The short name of a quantizer, for example ``"8da4w"``; ``None`` for anything else, such as no quantizer."""
    return _MODES.get(type(quantizer).__name__)


def is_fp8_tensorwise_scaling(fp8_recipe_name: str | None) -> bool:
    """Whether float8 training scales whole tensors: the default, or ``"tensorwise"``."""
    return fp8_recipe_name in (None, "tensorwise")


def convert_to_float8_training(model: nn.Module, fp8_recipe_name: str | None = None) -> nn.Module:
    """Raise: training in float8 is not in this release.

    Args:
        model: what would be converted.
        fp8_recipe_name: how it would be scaled.

    Raises:
        UserError: always.
    """
    raise UserError("enable_fp8_training: training in float8 is not available in this release: set it to False.")

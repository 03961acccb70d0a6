"""Optimizers: setup for a model, low precision, step in the backward pass, gradient norms."""

from torchtune._lazy import attach

__getattr__, __dir__, __all__ = attach(
    __name__,
    {},
    between_rooms={
        "GroupedOptimizer": "_grouped_optimizer",
        "HALF": "_low_precision_optimizer",
        "LowPrecisionOptimizer": "_low_precision_optimizer",
        "OptimizerStateError": "_low_precision_optimizer",
        "check_state_format": "_low_precision_optimizer",
        "prepare_optimizer": "_prepare_optimizer",
        "require_trained": "_prepare_optimizer",
    },
)

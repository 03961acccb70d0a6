"""Setup of a run's optimizer: precision, parameter groups and step in the backward pass."""

from collections.abc import Callable
from typing import Any, Literal, get_args

import torch
from torch import nn
from torch.optim import Optimizer

from torchtune.modules.conversion import Phase, get_conversions
from torchtune.modules.low_precision.torchao_interface import low_bit_format
from torchtune.modules.optim import OptimizerInBackward, OptimizerMap
from torchtune.training.optim._grouped_optimizer import GroupedOptimizer
from torchtune.training.optim._low_precision_optimizer import (
    HALF,
    LowPrecisionOptimizer,
    adopt_masters,
    needs_full_matrices,
)
from torchtune.training.parallel._ranks import broadcast_object
from torchtune.utils import UserError, get_logger, log_rank_zero

OptimizerPrecision = Literal["stochastic_rounding", "fp32_master", "param_dtype"]

# What recipes and schedules call.
_REQUIRED_ATTRIBUTES = ("param_groups", "step", "zero_grad", "state_dict", "load_state_dict")
# Classes that no recipe can use -> the reason.
_UNSUPPORTED = {
    torch.optim.LBFGS: "evaluates the loss many times a step",
    torch.optim.SparseAdam: "takes sparse gradients only",
}


def prepare_optimizer(
    optimizer: Optimizer,
    model: nn.Module,
    precision: OptimizerPrecision = "stochastic_rounding",
    seed: int | None = None,
) -> Optimizer:
    """Return an optimizer for bfloat16 weights that does not lose small updates to rounding.

    bfloat16 has 8 significant bits: rounding to nearest loses every update below 1/512 of a weight, and most updates
    are smaller at a learning rate of 2e-5. For the same reason, ``exp_avg_sq`` does not change with ``beta2=0.999``.

    - ``stochastic_rounding``: steps are computed in float32, a bounded number of elements at a time; weights and states
      are rounded stochastically to bfloat16, so that the mean is exact. The memory is the same as in plain bfloat16
      training (6 bytes per parameter with Adam, including the weight).
    - ``fp32_master``: float32 weights and states next to the bfloat16 weights (14 bytes per parameter). float16
      weights always have them.
    - ``param_dtype``: plain torch.

    An optimizer of only float32 weights is returned unchanged, except for torchao's low-bit optimizers (``AdamW8bit``
    …) and torch's optimizers of full matrices, which may be sharded: both need the float32 step. Attach schedules to
    the returned optimizer.

    Args:
        optimizer: new optimizer of parameters of ``model``; do not use it afterward.
        model: model with the parameters; their names are the keys of the state dict.
        precision: see above.
        seed: seed of the rounding, equal on all ranks; by default torch's seed (``set_seed``) on rank 0.

    Raises:
        UserError: the precision is unknown, or does not support the optimizer or the dtype of the weights.
        ValueError: the optimizer has a parameter that ``model`` lacks.

    Example:
        >>> optimizer = torch.optim.AdamW(model.to(torch.bfloat16).parameters(), lr=1e-5)
        >>> optimizer = torchtune.training.prepare_optimizer(optimizer, model, "stochastic_rounding")
    """
    if precision not in get_args(OptimizerPrecision):
        raise UserError(
            f"optimizer_precision: '{precision}' is not known: use one of {', '.join(get_args(OptimizerPrecision))}."
        )
    if isinstance(optimizer, OptimizerMap):
        prepared = {}
        for member_name, member in optimizer.optim_map.items():
            prepared[member_name] = prepare_optimizer(member, model, precision, seed)
        return OptimizerMap(prepared)
    _check_usable(optimizer)
    name = type(optimizer).__name__

    low_bit = None
    format_and_class = low_bit_format(optimizer)
    if format_and_class is not None:
        low_bit, torch_class = format_and_class
        optimizer = torch_class(_with_decimal_rates(optimizer.param_groups))
    if precision == "param_dtype" and low_bit is None:
        return optimizer
    if not isinstance(optimizer, Optimizer):
        raise UserError(f"optimizer: {name} is not a torch.optim.Optimizer: set optimizer_precision=param_dtype.")

    parameters: list[nn.Parameter] = []
    for group in optimizer.param_groups:
        parameters += group["params"]
    dtypes = {parameter.dtype for parameter in parameters}
    has_half_weights = not dtypes.isdisjoint(HALF)
    if not has_half_weights and low_bit is None and not needs_full_matrices(optimizer):
        optimizer.register_load_state_dict_post_hook(adopt_masters)  # states saved with bf16 weights have masters
        return optimizer
    if has_half_weights and precision == "param_dtype":
        raise UserError(
            f"optimizer_precision: {name} takes its steps in float32: use stochastic_rounding or fp32_master."
        )
    if not has_half_weights:
        precision = "fp32_master"  # float32 weights are their own master weights
    if precision == "stochastic_rounding" and torch.float16 in dtypes:
        precision = "fp32_master"  # the rounding is bfloat16's, and squares of gradients are below float16's range
        log_rank_zero(get_logger(), "optimizer_precision: fp16 weights have float32 masters and states (fp32_master).")

    names = {parameter: parameter_name for parameter_name, parameter in model.named_parameters()}
    unknown_shapes = [tuple(parameter.shape) for parameter in parameters if parameter not in names]
    if unknown_shapes:
        raise ValueError(f"{name} has parameters that the model lacks, of shapes {unknown_shapes[:3]}.")
    if seed is None:
        seed = _shared_seed()
    return LowPrecisionOptimizer(optimizer, names, precision, seed, low_bit)


def _check_usable(optimizer: Optimizer) -> None:
    """Raise for an optimizer of the user's that lacks a method, and for one of torch's that recipes cannot step."""
    name = type(optimizer).__name__
    for attribute in _REQUIRED_ATTRIBUTES:
        if not hasattr(optimizer, attribute):
            raise UserError(
                f"optimizer: {name} has no {attribute}: make it a torch.optim.Optimizer whose __init__ calls "
                "super().__init__(params, defaults)."
            )
    for unsupported_class, reason in _UNSUPPORTED.items():
        if isinstance(optimizer, unsupported_class):
            raise UserError(f"optimizer: {name} {reason}: use another optimizer.")


def _with_decimal_rates(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the parameter groups of a torchao optimizer with learning rates as numbers.

    torchao stores a rate as a float32 tensor: seven digits are the decimal number that the user wrote.
    """
    decimal_groups = []
    for group in groups:
        rate = float(group["lr"])
        decimal_rate = float(f"{rate:.7g}")
        decimal_groups.append({**group, "lr": decimal_rate})
    return decimal_groups


def _shared_seed() -> int:
    """Return torch's seed on rank 0: ranks with the same weights must round them alike."""
    return broadcast_object(torch.initial_seed())


def require_trained(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return the parameters that require a gradient, with their names.

    Raises:
        UserError: there are none.
    """
    trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    if trained:
        return trained
    if any(conversion.phase is Phase.QUANTIZED_BASE for conversion in get_conversions(model)):
        raise UserError(
            "model: its base is quantized, so it is frozen and only an adapter can be trained: use a LoRA recipe "
            "(lora_finetune_single_device or lora_finetune_distributed), or leave the conversion out."
        )
    raise UserError("model: none of its parameters requires a gradient, so there is nothing to train.")


def setup_optimizer(
    factory: Callable[[list[nn.Parameter]], Optimizer],
    model: nn.Module,
    precision: OptimizerPrecision = "stochastic_rounding",
    in_backward: bool = False,
) -> Optimizer:
    """Build the optimizer of all parameters of ``model`` that require a gradient.

    Args:
        factory: builds an optimizer from a list of parameters, or describes one (``GroupedOptimizer``).
        model: the model to train.
        precision: see ``prepare_optimizer``.
        in_backward: step every parameter during the backward pass and free its gradient; one optimizer per parameter.

    Raises:
        UserError: nothing requires a gradient, the optimizer omits parameters, or see ``prepare_optimizer``.

    Example:
        >>> optimizer = torchtune.training.setup_optimizer(lambda params: torch.optim.AdamW(params, lr=1e-4), model)
        >>> optimizer.param_groups[0]["lr"]
        0.0001
    """
    if isinstance(factory, Optimizer):
        name = type(factory).__name__
        raise UserError(
            f"factory: it must be a function that builds an optimizer, and is an optimizer: give lambda params: "
            f"{name}(params, …), or call prepare_optimizer with the optimizer that you have."
        )
    trained = require_trained(model)
    parameters = [parameter for _, parameter in trained]
    if in_backward:  # an optimizer per parameter: the first one tells whether the factory describes groups
        optimizer = factory(parameters[:1])
    else:
        optimizer = factory(parameters)
    if isinstance(optimizer, GroupedOptimizer):
        optimizer.assign(trained, model)
        factory = optimizer.make
        optimizer = factory(parameters)
    if not in_backward:
        _check_complete(optimizer, trained)
        return prepare_optimizer(optimizer, model, precision)

    seed = _shared_seed()  # once: a broadcast per parameter would be slow

    def build(parameters: list[nn.Parameter]) -> Optimizer:
        return prepare_optimizer(factory(parameters), model, precision, seed)

    return OptimizerInBackward(trained, build)


def _check_complete(optimizer: Optimizer, trained: list[tuple[str, nn.Parameter]]) -> None:
    """Raise if an optimizer lacks trained parameters."""
    optimized: set[nn.Parameter] = set()
    for group in getattr(optimizer, "param_groups", ()):  # prepare_optimizer says that an optimizer has no groups
        optimized.update(group["params"])
    missing = [name for name, parameter in trained if parameter not in optimized]
    if not optimized or not missing:
        return
    names = f"'{missing[0]}'"
    if len(missing) > 1:
        names += f" and {len(missing) - 1:,} more"
    raise UserError(
        f"optimizer: {type(optimizer).__name__} leaves out {names}, which would never change: let it take all "
        "parameters, or freeze these."
    )

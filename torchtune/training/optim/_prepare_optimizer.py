"""Setup of a run's optimizer: precision, parameter groups and step in the backward pass."""

from collections.abc import Callable
from typing import Literal, get_args

import torch
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

_NEEDED = ("param_groups", "step", "zero_grad", "state_dict", "load_state_dict")
_UNSUPPORTED = {
    torch.optim.LBFGS: "evaluates the loss many times a step",
    torch.optim.SparseAdam: "takes sparse gradients only",
}


def prepare_optimizer(
    optimizer: Optimizer,
    model: torch.nn.Module,
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
        parts = optimizer.optim_map.items()
        return OptimizerMap({name: prepare_optimizer(part, model, precision, seed) for name, part in parts})
    name = type(optimizer).__name__
    if missing := [needed for needed in _NEEDED if not hasattr(optimizer, needed)]:
        raise UserError(
            f"optimizer: {name} has no {missing[0]}: make it a torch.optim.Optimizer whose __init__ calls "
            "super().__init__(params, defaults)."
        )
    for kind, reason in _UNSUPPORTED.items():
        if isinstance(optimizer, kind):
            raise UserError(f"optimizer: {name} {reason}: use another optimizer.")
    low_bit, cls = low_bit_format(optimizer) or (None, None)
    if low_bit is not None:
        # torchao stores the learning rate as a float32 tensor: recover the decimal with seven digits.
        optimizer = cls([{**group, "lr": float(f"{float(group['lr']):.7g}")} for group in optimizer.param_groups])
    if precision == "param_dtype" and low_bit is None:
        return optimizer
    if not isinstance(optimizer, Optimizer):
        raise UserError(f"optimizer: {name} is no torch.optim.Optimizer: set optimizer_precision=param_dtype.")
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    dtypes = {parameter.dtype for parameter in parameters}
    if not dtypes.isdisjoint(HALF):
        if precision == "param_dtype":
            raise UserError(
                f"optimizer_precision: {name} takes its steps in float32: use stochastic_rounding or fp32_master."
            )
    elif low_bit is not None or needs_full_matrices(optimizer):
        precision = "fp32_master"  # float32 weights are their own master weights
    else:
        optimizer.register_load_state_dict_post_hook(adopt_masters)  # states saved with bf16 weights have masters
        return optimizer
    if precision == "stochastic_rounding" and torch.float16 in dtypes:
        precision = "fp32_master"  # the rounding is bfloat16's, and squares of gradients are below float16's range
        log_rank_zero(get_logger(), "optimizer_precision: fp16 weights have float32 masters and states (fp32_master).")
    names = {parameter: name for name, parameter in model.named_parameters()}
    unknown = [tuple(parameter.shape) for parameter in parameters if parameter not in names]
    if unknown:
        raise ValueError(f"{name} has parameters that the model lacks, of shapes {unknown[:3]}.")
    seed = _shared_seed() if seed is None else seed
    return LowPrecisionOptimizer(optimizer, names, precision, seed, low_bit)


def _shared_seed() -> int:
    """Return torch's seed on rank 0: ranks with the same weights must round them alike."""
    return broadcast_object(torch.initial_seed())


def require_trained(model: torch.nn.Module) -> list[tuple[str, torch.nn.Parameter]]:
    """Return the parameters that require a gradient, with their names.

    Raises:
        UserError: there are none.
    """
    trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    if not trained:
        quantized = any(conversion.phase is Phase.QUANTIZED_BASE for conversion in get_conversions(model))
        raise UserError(
            "model: its base is quantized, so it is frozen and only an adapter can be trained: use a LoRA recipe "
            "(lora_finetune_single_device or lora_finetune_distributed), or leave the conversion out."
            if quantized
            else "model: none of its parameters requires a gradient, so there is nothing to train."
        )
    return trained


def setup_optimizer(
    factory: Callable[[list[torch.nn.Parameter]], Optimizer],
    model: torch.nn.Module,
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
        raise UserError(
            f"factory: a {type(factory).__name__} is no function that makes one: give lambda params: "
            f"{type(factory).__name__}(params, …), or prepare_optimizer the optimizer that you have."
        )
    trained = require_trained(model)
    parameters = [parameter for _, parameter in trained]
    described = factory(parameters[:1] if in_backward else parameters)
    if isinstance(described, GroupedOptimizer):
        described.assign(trained, model)
        factory, described = described.make, described.make(parameters)
    if not in_backward:
        _check_all(described, trained)
        return prepare_optimizer(described, model, precision)
    seed = _shared_seed()
    return OptimizerInBackward(
        trained, lambda parameters: prepare_optimizer(factory(parameters), model, precision, seed)
    )


def _check_all(optimizer: Optimizer, trained: list[tuple[str, torch.nn.Parameter]]) -> None:
    """Raise if an optimizer lacks trained parameters."""
    there = {parameter for group in getattr(optimizer, "param_groups", ()) for parameter in group["params"]}
    if there and (left := [name for name, parameter in trained if parameter not in there]):
        more = f" and {len(left) - 1:,} more" if len(left) > 1 else ""
        raise UserError(
            f"optimizer: {type(optimizer).__name__} leaves out '{left[0]}'{more}, which would never change: let it "
            "take all parameters, or freeze these."
        )

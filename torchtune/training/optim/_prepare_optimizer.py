"""The optimizer of a run: how it takes small updates, and when it steps."""

from collections.abc import Callable
from typing import Literal, get_args

import torch
from torch.optim import Optimizer

from torchtune.modules._torchao import StateFormat, low_bit_format
from torchtune.modules.conversion import Phase, get_conversions
from torchtune.modules.optim import OptimizerInBackward, OptimizerMap
from torchtune.training.optim._grouped_optimizer import GroupedOptimizer
from torchtune.training.optim._low_precision_optimizer import looks_at_matrices
from torchtune.training.optim._precisions import MasterWeightsOptimizer, StochasticRoundingOptimizer, adopt_masters
from torchtune.training.parallel._ranks import broadcast_object
from torchtune.utils import UserError

OptimizerPrecision = Literal["stochastic_rounding", "fp32_master", "param_dtype"]

_NEEDED = ("param_groups", "step", "zero_grad", "state_dict", "load_state_dict")
_UNSUPPORTED = {torch.optim.LBFGS: "evaluates the loss many times a step", torch.optim.SparseAdam: "is for sparse ones"}


def prepare_optimizer(
    optimizer: Optimizer,
    model: torch.nn.Module,
    precision: OptimizerPrecision = "stochastic_rounding",
    seed: int | None = None,
) -> Optimizer:
    """Make an optimizer over bfloat16 weights learn from updates that bfloat16 would round away.

    bfloat16 has 8 significant bits: an update below 1/512 of a weight is lost when the sum is rounded to nearest,
    and at a learning rate of 2e-5 most are. Likewise ``exp_avg_sq`` with ``beta2=0.999`` stands still.

    - ``stochastic_rounding``: the step is computed in float32, a bounded number of elements at a time, and weights and
      states are rounded back to bfloat16 at random, so that they are right in the mean. Needs no memory beyond plain
      bfloat16 training (6 bytes a parameter with Adam and its weight).
    - ``fp32_master``: weights and states are kept in float32 beside the bfloat16 weights (14 bytes a parameter).
    - ``param_dtype``: as torch does it.

    An optimizer over float32 weights only is returned as it is, but for two that are run in one of these ways there,
    too: torchao's with states of few bits (``AdamW8bit`` …), and torch's that look at whole matrices, of which a rank
    may have a shard. Attach schedules to what this returns.

    Args:
        optimizer: fresh, over parameters of ``model``; not to be used by itself afterwards.
        model: names the parameters; the state dict of the result is keyed by them.
        precision: see above.
        seed: of what is random in it, the same on all ranks; torch's own seed (``set_seed``) on rank 0 by default.

    Raises:
        UserError: the precision is unknown, or the optimizer or the type of the weights cannot be had with it.
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
        seed = _shared_seed() if seed is None else seed
        parts = optimizer.optim_map.items()
        return OptimizerMap({name: prepare_optimizer(part, model, precision, seed) for name, part in parts})
    name = type(optimizer).__name__
    if missing := [needed for needed in _NEEDED if not hasattr(optimizer, needed)]:
        raise UserError(
            f"optimizer: {name} has no {missing[0]}: make it a torch.optim.Optimizer whose __init__ calls "
            "super().__init__(params, defaults)."
        )
    optimizer, low_bit = _without_torchao(optimizer)
    if precision == "param_dtype" and low_bit is None:
        return optimizer
    if not isinstance(optimizer, Optimizer):
        raise UserError(f"optimizer: {name} is no torch.optim.Optimizer: set optimizer_precision=param_dtype.")
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    dtypes = {parameter.dtype for parameter in parameters}
    if dtypes & {torch.bfloat16, torch.float16}:
        if precision == "param_dtype":
            raise UserError(
                f"optimizer_precision: {name} takes its steps in float32: use stochastic_rounding or fp32_master."
            )
    elif low_bit is not None or looks_at_matrices(optimizer):
        precision = "fp32_master"  # of float32 weights that is the weights themselves
    else:
        optimizer.register_load_state_dict_post_hook(adopt_masters)  # a state saved with bf16 weights has them
        return optimizer
    for kind, reason in _UNSUPPORTED.items():
        if isinstance(optimizer, kind):
            raise UserError(
                f"optimizer: {name} {reason}: set optimizer_precision=param_dtype, or use another optimizer."
            )
    names = {parameter: name for name, parameter in model.named_parameters()}
    unknown = [tuple(parameter.shape) for parameter in parameters if parameter not in names]
    if unknown:
        raise ValueError(f"{name} has parameters that the model lacks, of shapes {unknown[:3]}.")
    seed = _shared_seed() if seed is None else seed
    if precision == "fp32_master":
        return MasterWeightsOptimizer(optimizer, names, seed, low_bit)
    if torch.float16 in dtypes:
        raise UserError("optimizer_precision: stochastic_rounding is for bf16 weights: use fp32_master with fp16.")
    return StochasticRoundingOptimizer(optimizer, names, seed, low_bit)


def _without_torchao(optimizer: Optimizer) -> tuple[Optimizer, StateFormat | None]:
    """torch's optimizer with the groups of one of torchao, and the format of its states; others as they are."""
    found = low_bit_format(optimizer)
    if found is None:
        return optimizer, None
    low_bit, cls = found
    # torchao keeps the learning rate as a float32 tensor: seven digits of what was written
    return cls([{**group, "lr": float(f"{float(group['lr']):.7g}")} for group in optimizer.param_groups]), low_bit


def _shared_seed() -> int:
    """torch's seed on rank 0: ranks that hold the same weights must round them alike."""
    return broadcast_object(torch.initial_seed())


def require_trained(model: torch.nn.Module) -> list[tuple[str, torch.nn.Parameter]]:
    """The parameters that require a gradient, by name.

    Raises:
        UserError: there are none.
    """
    trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    if not trained:
        quantized = any(conversion.phase is Phase.QUANTIZED_BASE for conversion in get_conversions(model))
        raise UserError(
            "model: its base is quantised, so it is frozen and only an adapter can be trained: use a LoRA recipe "
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
        factory: makes an optimizer of a list of parameters, or describes one (``GroupedOptimizer``).
        model: whose parameters are trained.
        precision: see ``prepare_optimizer``.
        in_backward: step every parameter during the backward pass and free its gradient; one optimizer a parameter.

    Raises:
        UserError: nothing requires a gradient, the optimizer leaves out parameters, or see ``prepare_optimizer``.

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
    """Raise if an optimizer lacks parameters that are trained."""
    there = {id(parameter) for group in getattr(optimizer, "param_groups", ()) for parameter in group["params"]}
    if there and (left := [name for name, parameter in trained if id(parameter) not in there]):
        more = f" and {len(left) - 1:,} more" if len(left) > 1 else ""
        raise UserError(
            f"optimizer: {type(optimizer).__name__} leaves out '{left[0]}'{more}, which would never change: let it "
            "take all parameters, or freeze these."
        )

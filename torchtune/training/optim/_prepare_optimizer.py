"""Setup of a run's optimizer: precision, step in the backward pass, and parameter groups by patterns of names."""

import inspect
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torchtune.config import did_you_mean, locate
from torchtune.modules.conversion import Phase, get_conversions, nearest_module_names
from torchtune.modules.low_precision.torchao_interface import low_bit_format
from torchtune.modules.optim import OptimizerInBackward, OptimizerMap
from torchtune.modules.transformer import text_decoder
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
# Index of the outer settings, which apply to parameters without a group.
_OUTER = -1
# Keys of a group that are not settings of its optimizer.
_GROUP_KEYS = ("pattern", "optimizer", "lr_ratio")


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
        # torchao stores a rate as a float32 tensor: seven digits are the decimal number that the user wrote.
        decimal_groups = []
        for group in optimizer.param_groups:
            decimal_rate = float(f"{float(group['lr']):.7g}")
            decimal_groups.append({**group, "lr": decimal_rate})
        optimizer = torch_class(decimal_groups)
    if precision == "param_dtype" and low_bit is None:  # low-bit states are stepped in float32, see below
        return optimizer
    # With param_dtype, a class with the methods of an optimizer is enough; the wrapper needs torch's groups and hooks.
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

    Returns:
        The prepared optimizer; several behind the interface of one for groups with optimizers of their own, or with
        ``in_backward``.

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
    if in_backward:
        return _setup_in_backward(factory, trained, model, precision)
    parameters = [parameter for _, parameter in trained]
    optimizer = factory(parameters)
    if isinstance(optimizer, GroupedOptimizer):  # a description: its groups need the names of the parameters
        optimizer.assign(trained, model)
        optimizer = optimizer.make(parameters)
    _check_complete(optimizer, trained)
    return prepare_optimizer(optimizer, model, precision)


def _setup_in_backward(
    factory: Callable[[list[nn.Parameter]], Optimizer],
    trained: list[tuple[str, nn.Parameter]],
    model: nn.Module,
    precision: OptimizerPrecision,
) -> OptimizerInBackward:
    """Build an optimizer per parameter, which steps it during the backward pass."""
    # The factory is called for each parameter below; before, only to see whether it describes groups, which are
    # assigned once, by the names of all parameters.
    _, first_parameter = trained[0]
    description = factory([first_parameter])
    if isinstance(description, GroupedOptimizer):
        description.assign(trained, model)
        factory = description.make
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


@dataclass(frozen=True)
class _ParameterGroup:
    """Parameters with settings or an optimizer of their own.

    Attributes:
        pattern: pattern of the names, as messages show it.
        matches: (name, parameter) -> whether the group takes the parameter.
        optimizer_class: class of the group's own optimizer; None if the outer one has the group.
        settings: settings of the group.
    """

    pattern: str
    matches: Callable[[str, Tensor], bool]
    optimizer_class: type[Optimizer] | None
    settings: dict[str, Any]


class GroupedOptimizer:
    """An optimizer with parameter groups by patterns of parameter names::

        optimizer:
          _component_: torchtune.training.GroupedOptimizer
          optimizer: torch.optim.AdamW
          lr: 2e-5
          weight_decay: 0.1
          groups:
            - {pattern: norm, weight_decay: 0.0}
            - {pattern: lora_b, lr_ratio: 16}

    A parameter belongs to the first group with a pattern that matches its name (``re.search``); without a match, the
    outer settings apply. A schedule scales the learning rates of all groups alike. This object only describes the
    optimizer: :func:`~torchtune.training.setup_optimizer` builds it with the parameter names of the model.

    Args:
        params: the trained parameters.
        groups: mappings with ``pattern`` and settings that differ, such as ``lr`` and ``weight_decay``; ``lr_ratio``
            multiplies the learning rate instead; ``optimizer`` selects another optimizer for the group, which inherits
            only ``lr`` and ``weight_decay`` from the outer settings.
        optimizer: dotted path of the optimizer of all other parameters.
        settings: settings of that optimizer.

    Raises:
        UserError: a group has no pattern, or a setting that its optimizer does not support.

    Example:
        >>> grouped = lambda params: torchtune.training.GroupedOptimizer(
        ...     params, groups=[{"pattern": "norm", "weight_decay": 0.0}], lr=1e-4, weight_decay=0.1
        ... )
        >>> optimizer = torchtune.training.setup_optimizer(grouped, model)
        >>> sorted(group["weight_decay"] for group in optimizer.param_groups)
        [0.0, 0.1]
    """

    def __init__(
        self,
        params: Sequence[nn.Parameter],
        groups: Sequence[Mapping[str, Any]],
        optimizer: str = "torch.optim.AdamW",
        **settings: Any,
    ) -> None:
        del params  # `assign` takes them with their names
        self._settings = settings
        self._class = _optimizer_class(optimizer, "optimizer.optimizer")
        _check_settings(self._class, settings, "optimizer", other_keys=("groups", "optimizer"))
        self._groups: list[_ParameterGroup] = []
        for number, group in enumerate(groups):
            self._groups.append(self._read_group(f"optimizer.groups[{number}]", group))
        self._group_of: dict[nn.Parameter, int] = {}

    def _read_group(self, key: str, group: Mapping[str, Any]) -> _ParameterGroup:
        """Check the mapping of a group, whose path in the config is ``key``."""
        pattern = group.get("pattern")
        if not isinstance(pattern, str) or not pattern:
            raise UserError(f"{key}: needs a pattern, for example pattern: norm.")
        try:
            expression = re.compile(pattern)
        except re.error as error:
            raise UserError(f"{key}.pattern: '{pattern}' is not a regular expression ({error}).") from error

        settings = {name: value for name, value in group.items() if name not in _GROUP_KEYS}
        if group.get("lr_ratio") is not None:
            # The rate of the group, or else of the outer settings, or else of the optimizer's signature.
            if "lr" in settings:
                base_lr = settings["lr"]
            elif "lr" in self._settings:
                base_lr = self._settings["lr"]
            else:
                lr = inspect.signature(self._class).parameters.get("lr")
                if lr is None or lr.default is inspect.Parameter.empty:
                    raise UserError(
                        f"{key}.lr_ratio: {self._class.__name__} has no default learning rate: set {key}.lr."
                    )
                base_lr = lr.default
            settings["lr"] = base_lr * group["lr_ratio"]  # a ratio is no setting of an optimizer
        optimizer_class = None
        if group.get("optimizer") is not None:
            optimizer_class = _optimizer_class(group["optimizer"], f"{key}.optimizer")
            # All optimizers have these two, with the same meaning.
            for name in ("lr", "weight_decay"):
                if name in self._settings:
                    settings.setdefault(name, self._settings[name])
        _check_settings(optimizer_class or self._class, settings, key, other_keys=_GROUP_KEYS)

        def matches(name: str, parameter: Tensor) -> bool:
            return expression.search(name) is not None

        return _ParameterGroup(pattern, matches, optimizer_class, settings)

    def assign(self, named: Sequence[tuple[str, nn.Parameter]], model: nn.Module, *, quiet: bool = False) -> None:
        """Assign every trained parameter to a group.

        Args:
            named: names and parameters.
            model: model of the parameters, at which subclasses look.
            quiet: do not log the groups.

        Raises:
            UserError: a pattern matches no parameter.
        """
        for name, parameter in named:
            self._group_of[parameter] = _OUTER
            for number, group in enumerate(self._groups):
                if group.matches(name, parameter):
                    self._group_of[parameter] = number
                    break
        counts = Counter(self._group_of.values())
        descriptions = []
        for number, group in enumerate(self._groups):
            if counts[number] == 0:
                self._raise_unmatched(number, named)
            optimizer_class = group.optimizer_class or self._class
            descriptions.append(f"{optimizer_class.__name__} for {counts[number]} with {group.pattern}")
        descriptions.append(f"{self._class.__name__} for {counts[_OUTER]} others")
        if not quiet:
            log_rank_zero(get_logger(), f"Optimizer of {len(named)} parameters: {', '.join(descriptions)}.")

    def _raise_unmatched(self, number: int, named: Sequence[tuple[str, nn.Parameter]]) -> None:
        """Raise for a group without parameters."""
        group = self._groups[number]
        reason = "no trained parameter"
        if any(group.matches(name, parameter) for name, parameter in named):
            reason = "only parameters that an earlier group has"
        names = [name for name, _ in named]
        nearest = ", ".join(nearest_module_names(group.pattern, names))
        raise UserError(
            f"optimizer.groups[{number}]: the pattern '{group.pattern}' matches {reason}; nearest are {nearest}."
        )

    def check(self, named: Sequence[tuple[str, nn.Parameter]], model: nn.Module) -> None:
        """Check that every pattern matches and that all optimizers accept their settings, before a run.

        Args:
            named: names and trained parameters, for example on the meta device.
            model: model of the parameters.

        Raises:
            UserError: see :meth:`assign` and :meth:`make`.
        """
        self.assign(named, model, quiet=True)
        # A small matrix stands for the parameters of each group.
        matrix = nn.Parameter(torch.zeros(8, 8))
        for number in set(self._group_of.values()):
            self._group_of[matrix] = number
            self.make([matrix])
        del self._group_of[matrix]

    def make(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        """Build the optimizer of some of the assigned parameters.

        Raises:
            KeyError: a parameter was not assigned.
            UserError: an optimizer refuses its parameters or settings.
        """
        members_by_group: dict[int, list[nn.Parameter]] = {}
        for parameter in parameters:
            members_by_group.setdefault(self._group_of[parameter], []).append(parameter)
        outer_groups: list[dict[str, Any]] = []
        optimizers: dict[str, Optimizer | None] = {}
        outer_name = self._class.__name__
        for number in sorted(members_by_group):
            members = members_by_group[number]
            if number == _OUTER:
                outer_groups.append({"params": members})
                optimizers[outer_name] = None  # its place in the order: it is built below, with all of its groups
                continue
            group = self._groups[number]
            if group.optimizer_class is None:
                outer_groups.append({"params": members, **group.settings})
                optimizers.setdefault(outer_name, None)
                continue
            name = group.optimizer_class.__name__
            if name == outer_name or name in optimizers:  # the names are keys of the state dict
                name = f"{name} {number}"
            subject = f"optimizer, group '{group.pattern}'"
            optimizers[name] = _build(group.optimizer_class, members, group.settings, subject)
        if outer_groups:
            optimizers[outer_name] = _build(self._class, outer_groups, self._settings, "optimizer")
        if len(optimizers) == 1:
            return next(iter(optimizers.values()))
        return OptimizerMap(optimizers)


class MuonWithAdamW(GroupedOptimizer):
    """``torch.optim.Muon`` for the matrices inside the layers, ``torch.optim.AdamW`` for all other parameters.

    AdamW trains embeddings, the output projection, norms, biases, and tensors that are not 2D, such as stacked weights
    of experts. With ``adjust_lr_fn="match_rms_adamw"`` Muon's updates have the size of AdamW's, so that both can use
    one learning rate (arXiv 2502.16982).

    Args:
        params: the trained parameters.
        lr: learning rate of both.
        weight_decay: weight decay of both.
        momentum: Muon's momentum.
        nesterov: whether Muon uses Nesterov momentum.
        ns_steps: Muon's number of Newton-Schulz iterations.
        adjust_lr_fn: Muon's ``match_rms_adamw`` or ``original``.
        betas: AdamW's betas.
        eps: AdamW's epsilon.
        groups: see :class:`GroupedOptimizer`; groups take precedence over the choice between Muon and AdamW.

    Example:
        >>> muon = lambda params: torchtune.training.MuonWithAdamW(params, lr=1e-4)
        >>> optimizer = torchtune.training.setup_optimizer(muon, model)
    """

    def __init__(
        self,
        params: Sequence[nn.Parameter],
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        adjust_lr_fn: str = "match_rms_adamw",
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        groups: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        super().__init__(
            params, groups, "torch.optim.AdamW", lr=lr, weight_decay=weight_decay, betas=tuple(betas), eps=eps
        )
        muon_settings = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
        }
        self._not_for_muon: set[nn.Parameter] = set()  # filled by `assign`, which has the model

        def is_matrix(name: str, parameter: Tensor) -> bool:
            return parameter.dim() == 2 and parameter not in self._not_for_muon

        # The last group: a parameter belongs to the first one that matches, which may be one of the user's.
        self._groups.append(_ParameterGroup("matrices", is_matrix, torch.optim.Muon, muon_settings))

    def assign(self, named: Sequence[tuple[str, nn.Parameter]], model: nn.Module, *, quiet: bool = False) -> None:
        """Assign every trained parameter to a group; see the base class."""
        # Embeddings and the output projection are matrices, too, but not maps between hidden states.
        modules = [module for module in model.modules() if isinstance(module, nn.Embedding)]
        output = getattr(text_decoder(model), "output", None)
        if isinstance(output, nn.Module):
            modules.append(output)
        for module in modules:
            self._not_for_muon.update(module.parameters())
        super().assign(named, model, quiet=quiet)


def _optimizer_class(path: Any, key: str) -> type[Optimizer]:
    """Return the optimizer at a dotted path, which is the value of ``key`` in the config."""
    optimizer_class = path
    if isinstance(path, str):
        optimizer_class = locate(path)
    if not isinstance(optimizer_class, type) or not issubclass(optimizer_class, Optimizer):
        raise UserError(f"{key}: '{path}' is not an optimizer: name a class such as torch.optim.AdamW.")
    return optimizer_class


def _build(
    optimizer_class: type[Optimizer], parameters: Sequence[Any], settings: Mapping[str, Any], subject: str
) -> Optimizer:
    """Build an optimizer; ``subject`` says in messages which one."""
    try:
        return optimizer_class(parameters, **settings)
    except (TypeError, ValueError) as error:
        raise UserError(f"{subject}: {optimizer_class.__name__}: {error}") from error


def _check_settings(
    optimizer_class: type[Optimizer], settings: Mapping[str, Any], key: str, *, other_keys: Sequence[str]
) -> None:
    """Raise for a setting that an optimizer does not have; ``other_keys`` may stand beside its settings."""
    supported = [name for name in inspect.signature(optimizer_class).parameters if name not in ("self", "params")]
    for name in settings:
        if name not in supported:
            hint = did_you_mean(name, [*supported, *other_keys])
            raise UserError(f"{key}.{name}: {optimizer_class.__name__} has no such setting{hint or '.'}")

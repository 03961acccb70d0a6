"""Parameter groups by patterns of names, each with its own settings or optimizer."""

import inspect
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torchtune.config import did_you_mean, locate
from torchtune.modules.conversion import nearest_module_names
from torchtune.modules.optim import OptimizerMap
from torchtune.modules.transformer import text_decoder
from torchtune.utils import UserError, get_logger, log_rank_zero

# Index of the outer settings, which apply to parameters without a group.
_OUTER = -1
# Keys of a group that are not settings of its optimizer.
_GROUP_KEYS = ("pattern", "optimizer", "lr_ratio")


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
                base_lr = _default_lr(self._class, key)
            settings["lr"] = base_lr * group["lr_ratio"]
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
            model: model of the parameters.
            quiet: do not log the groups.

        Raises:
            UserError: a pattern matches no parameter.
        """
        for name, parameter in named:
            self._group_of[parameter] = self._first_match(name, parameter)
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

    def _first_match(self, name: str, parameter: nn.Parameter) -> int:
        """Return the number of the first group that takes a parameter."""
        for number, group in enumerate(self._groups):
            if group.matches(name, parameter):
                return number
        return _OUTER

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
        self._not_for_muon: set[nn.Parameter] = set()
        self._groups.append(_ParameterGroup("matrices", self._is_matrix, torch.optim.Muon, muon_settings))

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

    def _is_matrix(self, name: str, parameter: Tensor) -> bool:
        """Return whether Muon takes a parameter."""
        return parameter.dim() == 2 and parameter not in self._not_for_muon


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


def _default_lr(optimizer_class: type[Optimizer], key: str) -> float:
    """Return the learning rate in an optimizer's signature, for the ``lr_ratio`` of the group at ``key``."""
    lr = inspect.signature(optimizer_class).parameters.get("lr")
    if lr is None or lr.default is inspect.Parameter.empty:
        raise UserError(f"{key}.lr_ratio: {optimizer_class.__name__} has no default learning rate: set {key}.lr.")
    return lr.default


def _check_settings(
    optimizer_class: type[Optimizer], settings: Mapping[str, Any], key: str, *, other_keys: Sequence[str]
) -> None:
    """Raise for a setting that an optimizer does not have; ``other_keys`` may stand beside its settings."""
    supported = [name for name in inspect.signature(optimizer_class).parameters if name not in ("self", "params")]
    for name in settings:
        if name not in supported:
            hint = did_you_mean(name, [*supported, *other_keys])
            raise UserError(f"{key}.{name}: {optimizer_class.__name__} has no such setting{hint or '.'}")

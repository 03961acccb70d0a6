"""Parameter groups by patterns of names, each with its own settings or optimizer."""

import inspect
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from torchtune.config import did_you_mean, locate
from torchtune.modules.conversion import nearest_module_names
from torchtune.modules.optim import OptimizerMap
from torchtune.modules.transformer import text_decoder
from torchtune.utils import UserError, get_logger, log_rank_zero

_Rule = Callable[[str, torch.Tensor], bool]


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
        params: Sequence[torch.nn.Parameter],
        groups: Sequence[Mapping[str, Any]],
        optimizer: str = "torch.optim.AdamW",
        **settings: Any,
    ) -> None:
        del params  # `assign` assigns them with their names
        self._settings = settings
        self._class = _optimizer_class(optimizer, "optimizer.optimizer")
        _check_keys(self._class, settings, "optimizer")
        others = ("others", lambda *_: True, None, {})
        self._groups = [*(self._read(number, dict(group)) for number, group in enumerate(groups)), others]
        self._group_of: dict[torch.nn.Parameter, int] = {}

    def _read(self, number: int, group: dict[str, Any]) -> tuple[str, _Rule, type[Optimizer] | None, dict[str, Any]]:
        where = f"optimizer.groups[{number}]"
        pattern, path, ratio = (group.pop(key, None) for key in ("pattern", "optimizer", "lr_ratio"))
        if not isinstance(pattern, str) or not pattern:
            raise UserError(f"{where}: needs a pattern, for example pattern: norm.")
        try:
            found = re.compile(pattern).search
        except re.error as error:
            raise UserError(f"{where}.pattern: '{pattern}' is no regular expression ({error}).") from error
        cls = None if path is None else _optimizer_class(path, f"{where}.optimizer")
        if ratio is not None:
            outer = self._settings.get("lr", inspect.signature(self._class).parameters["lr"].default)
            group["lr"] = group.get("lr", outer) * ratio
        if cls is not None:
            known = {key: self._settings[key] for key in ("lr", "weight_decay") if key in self._settings}
            group = known | group
        _check_keys(cls or self._class, group, where)
        return pattern, lambda name, _: found(name) is not None, cls, group

    def assign(
        self, named: Sequence[tuple[str, torch.nn.Parameter]], model: torch.nn.Module, *, quiet: bool = False
    ) -> None:
        """Assign every trained parameter to a group.

        Args:
            named: names and parameters.
            model: model of the parameters.
            quiet: do not log the groups.

        Raises:
            UserError: a pattern matches no parameter.
        """
        groups = self._groups[:-1]
        for name, parameter in named:
            matching = (number for number, (_, rule, *_) in enumerate(groups) if rule(name, parameter))
            self._group_of[parameter] = next(matching, -1)
        counts, told = Counter(self._group_of.values()), []
        for number, (pattern, rule, cls, _) in enumerate(groups):
            if not counts[number]:
                earlier = any(rule(name, parameter) for name, parameter in named)
                why = "only parameters that an earlier group has" if earlier else "no trained parameter"
                near = ", ".join(nearest_module_names(pattern, [name for name, _ in named]))
                raise UserError(
                    f"optimizer.groups[{number}]: the pattern '{pattern}' matches {why}; nearest are {near}."
                )
            told.append(f"{(cls or self._class).__name__} for {counts[number]} with {pattern}")
        if not quiet:
            text = ", ".join([*told, f"{self._class.__name__} for {counts[-1]} others"])
            log_rank_zero(get_logger(), f"Optimizer of {len(named)} parameters: {text}.")

    def members(self, parameters: Iterable[torch.nn.Parameter]) -> dict[int, list[torch.nn.Parameter]]:
        """Return assigned parameters by index of their group; -1 for the outer settings.

        Raises:
            KeyError: a parameter was not assigned.
        """
        found: dict[int, list[torch.nn.Parameter]] = {}
        for parameter in parameters:
            found.setdefault(self._group_of[parameter], []).append(parameter)
        return found

    def adopt(self, parameter: torch.nn.Parameter, like: torch.nn.Parameter) -> None:
        """Put a parameter into the group of the assigned parameter ``like``."""
        self._group_of[parameter] = self._group_of[like]

    def make(self, parameters: Sequence[torch.nn.Parameter]) -> Optimizer:
        """Build the optimizer of some of the assigned parameters.

        Raises:
            KeyError: a parameter was not assigned.
            UserError: an optimizer refuses its parameters or settings.
        """
        base, made = [], {}
        for number, members in sorted(self.members(parameters).items()):
            pattern, _, cls, settings = self._groups[number]
            if cls is None:
                base.append({"params": members, **settings})
                made.setdefault(self._class.__name__, None)
            else:
                taken = cls is self._class or cls.__name__ in made
                name = f"{cls.__name__} {number}" if taken else cls.__name__
                made[name] = _build(cls, members, settings, f"optimizer, group '{pattern}'")
        if base:
            made[self._class.__name__] = _build(self._class, base, self._settings, "optimizer")
        return next(iter(made.values())) if len(made) == 1 else OptimizerMap(made)


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
        params: Sequence[torch.nn.Parameter],
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
        shared = {"lr": lr, "weight_decay": weight_decay}
        super().__init__(params, groups, "torch.optim.AdamW", **shared, betas=tuple(betas), eps=eps)
        own = {"momentum": momentum, "nesterov": nesterov, "ns_steps": ns_steps, "adjust_lr_fn": adjust_lr_fn}
        self._outside: set[torch.Tensor] = set()
        self._groups.insert(-1, ("matrices", self._is_matrix, torch.optim.Muon, shared | own))

    def assign(
        self, named: Sequence[tuple[str, torch.nn.Parameter]], model: torch.nn.Module, *, quiet: bool = False
    ) -> None:
        """Assign every trained parameter to a group; see the base class."""
        outside = [module for module in model.modules() if isinstance(module, torch.nn.Embedding)]
        outside += [getattr(text_decoder(model), "output", None)]
        self._outside = {p for module in outside if isinstance(module, torch.nn.Module) for p in module.parameters()}
        super().assign(named, model, quiet=quiet)

    def _is_matrix(self, name: str, parameter: torch.Tensor) -> bool:
        return parameter.dim() == 2 and parameter not in self._outside


def _optimizer_class(path: Any, where: str) -> type[Optimizer]:
    cls = locate(path) if isinstance(path, str) else path
    if not isinstance(cls, type) or not issubclass(cls, Optimizer):
        raise UserError(f"{where}: '{path}' is no optimizer: name a class such as torch.optim.AdamW.")
    return cls


def _build(cls: type[Optimizer], parameters: Sequence[Any], settings: Mapping[str, Any], where: str) -> Optimizer:
    try:
        return cls(parameters, **settings)
    except (TypeError, ValueError) as error:
        raise UserError(f"{where}: {cls.__name__}: {error}") from error


def _check_keys(cls: type[Optimizer], settings: Mapping[str, Any], where: str) -> None:
    known = [name for name in inspect.signature(cls).parameters if name not in ("self", "params")]
    extra = ["pattern", "optimizer", "lr_ratio"] if where.startswith("optimizer.groups") else ["groups", "optimizer"]
    for key in settings:
        if key not in known:
            raise UserError(
                f"{where}.{key}: {cls.__name__} has no such setting{did_you_mean(key, known + extra) or '.'}"
            )

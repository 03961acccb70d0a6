"""Groups of parameters by the pattern of their names, each with settings or an optimizer of its own."""

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from torchtune.config._errors import did_you_mean
from torchtune.config._locate import locate
from torchtune.modules.conversion import nearest_module_names
from torchtune.modules.optim import OptimizerMap
from torchtune.modules.transformer import text_decoder
from torchtune.utils import UserError, get_logger, log_rank_zero

_Rule = Callable[[str, torch.Tensor], bool]


class GroupedOptimizer:
    """An optimizer whose parameters are in groups, by patterns on their names::

        optimizer:
          _component_: torchtune.training.GroupedOptimizer
          optimizer: torch.optim.AdamW
          lr: 2e-5
          weight_decay: 0.1
          groups:
            - {pattern: norm, weight_decay: 0.0}
            - {pattern: lora_b, lr_ratio: 16}

    A parameter belongs to the first group whose pattern is found in its name (``re.search``), or else to the group of
    the settings outside. A schedule scales the learning rates of all groups alike. The recipe hands over the model,
    which knows the names: :func:`~torchtune.training.setup_optimizer` makes the optimizer of this description.

    Args:
        params: the trained parameters.
        groups: each a mapping with ``pattern`` and settings that differ, such as ``lr`` and ``weight_decay``;
            ``lr_ratio`` multiplies the learning rate instead; ``optimizer`` names an optimizer of the group's own, that
            takes over ``lr`` and ``weight_decay`` from outside, nothing else.
        optimizer: dotted path of the optimizer of all other parameters.
        settings: of that optimizer.

    Raises:
        UserError: a group has no pattern, or a setting that its optimizer does not have.

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
        del params  # assigned with their names, by `assign`
        self._settings = settings
        self._class = _optimizer_class(optimizer, "optimizer.optimizer")
        _check_keys(self._class, settings, "optimizer")
        self._groups = [self._read(number, dict(group)) for number, group in enumerate(groups)]
        self._group_of: dict[torch.nn.Parameter, int] = {}

    def _read(self, number: int, group: dict[str, Any]) -> tuple[str, _Rule, type[Optimizer] | None, dict[str, Any]]:
        where = f"optimizer.groups[{number}]"
        pattern, path = group.pop("pattern", None), group.pop("optimizer", None)
        if not isinstance(pattern, str) or not pattern:
            raise UserError(f"{where}: needs a pattern, for example pattern: norm.")
        try:
            found = re.compile(pattern).search
        except re.error as error:
            raise UserError(f"{where}.pattern: '{pattern}' is no regular expression ({error}).") from error
        ratio = group.pop("lr_ratio", None)
        cls = None if path is None else _optimizer_class(path, f"{where}.optimizer")
        if ratio is not None:
            group["lr"] = group.get("lr", self._default("lr", self._class)) * ratio
        if cls is not None:
            known = {key: self._settings[key] for key in ("lr", "weight_decay") if key in self._settings}
            group = known | group
        _check_keys(cls or self._class, group, where)
        return pattern, lambda name, _: found(name) is not None, cls, group

    def _default(self, key: str, cls: type[Optimizer]) -> Any:
        return self._settings.get(key, inspect.signature(cls).parameters[key].default)

    def assign(
        self, named: Sequence[tuple[str, torch.nn.Parameter]], model: torch.nn.Module, *, quiet: bool = False
    ) -> None:
        """Find the group of every trained parameter.

        Args:
            named: names and parameters.
            model: whose parameters they are.
            quiet: do not log what was found.

        Raises:
            UserError: a pattern matches none of them.
        """
        counts = [0] * (len(self._groups) + 1)
        for name, parameter in named:
            matching = (number for number, (_, rule, *_) in enumerate(self._groups) if rule(name, parameter))
            self._group_of[parameter] = number = next(matching, -1)
            counts[number] += 1
        names = [name for name, _ in named]
        for number, (pattern, rule, *_) in enumerate(self._groups):
            if counts[number]:
                continue
            earlier = any(rule(name, parameter) for name, parameter in named)
            why = "only parameters that an earlier group has" if earlier else "no trained parameter"
            near = ", ".join(nearest_module_names(pattern, names))
            raise UserError(f"optimizer.groups[{number}]: the pattern '{pattern}' matches {why}; nearest are {near}.")
        if quiet:
            return
        told = [
            f"{(cls or self._class).__name__} for {count} with {pattern}"
            for count, (pattern, _, cls, _) in zip(counts, self._groups, strict=False)
        ]
        text = ", ".join([*told, f"{self._class.__name__} for {counts[-1]} others"])
        log_rank_zero(get_logger(), f"Optimizer of {len(named)} parameters: {text}.")

    def members(self) -> dict[int, list[torch.nn.Parameter]]:
        """The assigned parameters by the number of their group; -1 for the settings outside."""
        found: dict[int, list[torch.nn.Parameter]] = {}
        for parameter, number in self._group_of.items():
            found.setdefault(number, []).append(parameter)
        return found

    def adopt(self, parameter: torch.nn.Parameter, like: torch.nn.Parameter) -> None:
        """Put a parameter into the group of an assigned one."""
        self._group_of[parameter] = self._group_of[like]

    def make(self, parameters: Sequence[torch.nn.Parameter]) -> Optimizer:
        """The optimizer of some of the assigned parameters.

        Raises:
            KeyError: a parameter was not assigned.
        """
        members: dict[int, list[torch.nn.Parameter]] = {}
        for parameter in parameters:
            members.setdefault(self._group_of[parameter], []).append(parameter)
        base, made = [], {}
        for number in sorted(members):
            _, _, cls, settings = self._groups[number] if number >= 0 else ("", None, None, {})
            if cls is None:
                base.append({"params": members[number], **settings})
                made.setdefault(self._class.__name__, None)
            else:
                name = (
                    cls.__name__ if cls.__name__ not in made and cls is not self._class else f"{cls.__name__} {number}"
                )
                made[name] = cls(members[number], **settings)
        if base:
            made[self._class.__name__] = self._class(base, **self._settings)
        return next(iter(made.values())) if len(made) == 1 else OptimizerMap(made)


class MuonWithAdamW(GroupedOptimizer):
    """``torch.optim.Muon`` for the matrices inside the layers, ``torch.optim.AdamW`` for everything else.

    Everything else: embeddings, the output projection, norms, biases, and tensors that are no matrices, such as the
    weights of all experts together. With ``adjust_lr_fn="match_rms_adamw"`` an update has the size of AdamW's, so that
    both take one learning rate (arXiv 2502.16982).

    Args:
        params: the trained parameters.
        lr: learning rate of both.
        weight_decay: of both.
        momentum: of Muon.
        nesterov: of Muon.
        ns_steps: of Muon: steps of the Newton-Schulz iteration.
        adjust_lr_fn: of Muon: ``match_rms_adamw`` or ``original``.
        betas: of AdamW.
        eps: of AdamW.
        groups: see :class:`GroupedOptimizer`; they come before the choice between the two.

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
        self._groups.append(("matrices", self._is_matrix, torch.optim.Muon, shared | own))

    def assign(
        self, named: Sequence[tuple[str, torch.nn.Parameter]], model: torch.nn.Module, *, quiet: bool = False
    ) -> None:
        """As in the base class."""
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


def _check_keys(cls: type[Optimizer], settings: Mapping[str, Any], where: str) -> None:
    known = [name for name in inspect.signature(cls).parameters if name not in ("self", "params")]
    extra = ["pattern", "optimizer", "lr_ratio"] if where.startswith("optimizer.groups") else ["groups", "optimizer"]
    for key in settings:
        if key not in known:
            raise UserError(
                f"{where}.{key}: {cls.__name__} has no such setting{did_you_mean(key, known + extra) or '.'}"
            )

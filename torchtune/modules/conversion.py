"""Conversions: everything that is done to a described model before its weights exist.

A conversion takes a model whose parameters may lie on the meta device, replaces modules in place and says what it
did. LoRA is one, quantised bases, fake quantisation and kernel swaps are others; a class from outside the library
needs nothing but ``phase`` and ``convert``.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from enum import IntEnum
from typing import Protocol, runtime_checkable

from torch import nn

from torchtune.utils import UserError, get_logger, log_rank_zero

__all__ = [
    "Conversion",
    "ConversionError",
    "ConversionReport",
    "Phase",
    "apply_conversions",
    "get_conversions",
    "nearest_module_names",
    "run_post_optimizer_hooks",
    "run_pre_optimizer_hooks",
]


class ConversionError(UserError, ValueError):
    """A conversion that does not fit the model, or conversions that do not fit each other."""


class Phase(IntEnum):
    """When a conversion runs: lower phases first."""

    KERNEL = 0
    QUANTIZED_BASE = 1
    ADAPTER = 2
    FAKE_QUANT = 3
    OBJECTIVE = 4  # changes no weight: what a model is trained for besides its loss


# Pairs of phases that may not meet on one model, with the reason. A phase paired with itself: at most one of its kind.
_FORBIDDEN: dict[tuple[Phase, Phase], str] = {
    (Phase.QUANTIZED_BASE, Phase.QUANTIZED_BASE): "a base weight is quantised once",
    (Phase.ADAPTER, Phase.ADAPTER): "a model has one adapter",
    (Phase.FAKE_QUANT, Phase.FAKE_QUANT): "a weight is fake-quantised once",
    (Phase.QUANTIZED_BASE, Phase.FAKE_QUANT): "fake quantisation needs a base weight that is not quantised yet",
}


@dataclass(frozen=True)
class ConversionReport:
    """What a conversion did.

    Attributes:
        name: what the log line calls it, for example ``"LoRA"``.
        replaced: paths of the modules that were replaced or changed.
        num_parameters: number of parameters that it added.
        note: anything else worth a few words.
    """

    name: str
    replaced: list[str] = field(default_factory=list)
    num_parameters: int = 0
    note: str = ""

    def __str__(self) -> str:
        kinds = sorted({path.rpartition(".")[2] for path in self.replaced})
        text = f"{self.name}: {len(self.replaced)} modules converted"
        text += f" ({', '.join(kinds)})" if kinds else ""
        text += f", {self.num_parameters:,} parameters added" if self.num_parameters else ""
        return text + (f"; {self.note}" if self.note else "")


@runtime_checkable
class Conversion(Protocol):
    """What ``apply_conversions`` asks of a conversion.

    It may also have ``pre_optimizer_hook(model)`` and ``post_optimizer_hook(model)``, called around every optimizer
    step, and, if it adds parameters that are saved apart from the model, ``is_own_key(key) -> bool``,
    ``merged(name, weight, model) -> Tensor`` and ``peft_config(model) -> dict``. With ``revert(model)``, which undoes
    ``convert`` as long as the parameters are on the meta device, it may be applied before conversions of an earlier
    phase, as builders do (see :class:`torchtune.modules.peft.LoRA`). If its hooks change parameters that require no
    gradient, ``moves(key) -> bool`` says which, so that no save loses them.
    """

    phase: Phase

    def convert(self, model: nn.Module) -> ConversionReport:
        """Rewrite ``model`` in place; its parameters may lie on the meta device."""
        ...


def _name(conversion: object) -> str:
    return type(conversion).__name__


def _check_members(conversion: object) -> None:
    if not callable(getattr(conversion, "convert", None)):
        raise ConversionError(
            f"model_converters: {_name(conversion)} has no method convert(model), so it is no conversion."
        )
    if not isinstance(getattr(conversion, "phase", None), Phase):
        raise ConversionError(
            f"model_converters: {_name(conversion)} must set `phase` to a member of torchtune.modules.conversion.Phase."
        )


def _check_pairs(conversions: Sequence[Conversion]) -> None:
    """Refuse conversions that exclude each other; they are sorted by phase."""
    for position, first in enumerate(conversions):
        for second in conversions[position + 1 :]:
            reason = _FORBIDDEN.get((first.phase, second.phase))
            if reason is not None:
                raise ConversionError(
                    f"model_converters: {_name(first)} and {_name(second)} cannot be combined on one model "
                    f"({reason}): remove one of them."
                )


def _undo_later(done: Sequence[Conversion], conversions: Sequence[Conversion], model: nn.Module) -> list[Conversion]:
    """Undo the conversions in ``done`` that belong after one of ``conversions``; return them, to be applied again."""
    earliest = min((conversion.phase for conversion in conversions), default=max(Phase))
    later = [conversion for conversion in done if conversion.phase > earliest]
    first = next((conversion for conversion in conversions if conversion.phase == earliest), None)
    for conversion in reversed(later):
        if not callable(getattr(conversion, "revert", None)):
            raise ConversionError(
                f"model_converters: {_name(first)} must come before {_name(conversion)}, which the model already has "
                "and which cannot be undone: apply both in one call, or list both in model_converters."
            )
        conversion.revert(model)
    model.conversions = [conversion for conversion in done if conversion not in later]
    return later


def apply_conversions(model: nn.Module, conversions: Sequence[Conversion]) -> list[ConversionReport]:
    """Apply conversions in the order of their phases, log one line each and record them as ``model.conversions``.

    A conversion that was applied before and belongs after a new one, such as the LoRA of a ``lora_*`` builder beside
    a kernel swap, is undone and applied again.

    Args:
        model: the model, usually on the meta device.
        conversions: what to apply, in any order; within a phase the given order holds. May be empty.

    Returns:
        one report per conversion that was applied, in order of application.

    Raises:
        ConversionError: a forbidden pair, an object that is no conversion, a conversion that would have to be undone
            and cannot be, or a target that the model does not have; all but the last before anything is changed.
    """
    for conversion in conversions:
        _check_members(conversion)
    done = get_conversions(model)
    _check_pairs(sorted([*done, *conversions], key=lambda conversion: conversion.phase))
    again = _undo_later(done, conversions, model)
    done, reports = get_conversions(model), []
    for conversion in sorted([*again, *conversions], key=lambda conversion: conversion.phase):
        report = conversion.convert(model)
        if not isinstance(report, ConversionReport):
            raise ConversionError(
                f"model_converters: {_name(conversion)}.convert returned {type(report).__name__}, "
                "it must return a ConversionReport."
            )
        done = [*done, conversion]
        model.conversions = done
        log_rank_zero(get_logger(), str(report))
        reports.append(report)
    model.conversions = done
    return reports


def get_conversions(model: nn.Module) -> list[Conversion]:
    """The conversions that were applied to ``model``, in order."""
    return list(getattr(model, "conversions", ()))


def _run_hooks(model: nn.Module, hook: str) -> None:
    for conversion in get_conversions(model):
        function = getattr(conversion, hook, None)
        if function is not None:
            function(model)


def run_pre_optimizer_hooks(model: nn.Module) -> None:
    """Call ``pre_optimizer_hook(model)`` of every conversion that has one, in order of application.

    It is called for every step, also for one that turns out to be skipped, for which no post hook follows.
    """
    _run_hooks(model, "pre_optimizer_hook")


def run_post_optimizer_hooks(model: nn.Module) -> None:
    """Call ``post_optimizer_hook(model)`` of every conversion that has one, in order of application."""
    _run_hooks(model, "post_optimizer_hook")


def nearest_module_names(wanted: str, paths: Sequence[str], count: int = 3) -> list[str]:
    """The module names most like ``wanted``, for an error message; layer numbers are shown as ``*``.

    Args:
        wanted: a module name or a pattern that matched nothing.
        paths: paths of the modules that could have been meant.
        count: how many to return at most.
    """
    templates = list(
        dict.fromkeys(".".join("*" if part.isdigit() else part for part in path.split(".")) for path in paths)
    )
    by_leaf = {template.rpartition(".")[2]: template for template in templates}
    leaf = wanted.rpartition(".")[2]
    close = [by_leaf[name] for name in get_close_matches(leaf, by_leaf, n=count, cutoff=0.5)]
    close += [name for name in get_close_matches(wanted, templates, n=count, cutoff=0.3) if name not in close]
    return (close or templates)[:count]

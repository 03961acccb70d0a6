"""Keeping a function out of compiled graphs, without loading the compiler for it."""

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def outside_graphs(function: Callable[P, R]) -> Callable[P, R]:
    """``torch.compiler.disable`` at the first call: as a decorator, that one costs the import of the compiler.

    Optimizers load the compiler too, so that the first step of a run pays nothing for this; what is only described
    or checked never does.
    """
    disabled: Callable[P, R] | None = None

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        nonlocal disabled
        if disabled is None:
            disabled = torch.compiler.disable(function)
        return disabled(*args, **kwargs)

    return call

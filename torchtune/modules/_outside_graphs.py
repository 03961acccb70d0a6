"""Exclude a function from compiled graphs without importing the compiler."""

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def outside_graphs(function: Callable[P, R]) -> Callable[P, R]:
    """Apply ``torch.compiler.disable`` at the first call, because applying it at import time imports the compiler.

    Optimizers import the compiler as well, so a training run pays nothing extra; a dry run never imports it.
    """
    disabled: Callable[P, R] | None = None

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        nonlocal disabled
        if disabled is None:
            disabled = torch.compiler.disable(function)
        return disabled(*args, **kwargs)

    return call

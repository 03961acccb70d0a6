"""Seeds of everything random."""

import os
import random

import numpy as np
import torch

from torchtune.training.parallel._ranks import broadcast_object
from torchtune.utils import UserError, get_world_size_and_rank


class SeedError(UserError, ValueError):
    """A seed that the generators do not take."""


def _draw_shared_seed(world_size: int, limit: int) -> int:
    drawn = int(torch.randint(0, limit + 1, (1,), generator=_entropy()))
    return broadcast_object(drawn) if world_size > 1 else drawn


def _entropy() -> torch.Generator:
    """A generator seeded by the operating system, so that a draw does not depend on the global one."""
    generator = torch.Generator()
    generator.seed()
    return generator


def set_seed(seed: int | None = None, debug_mode: str | int | None = None) -> int:
    """Seed torch, numpy and ``random`` with ``seed`` + rank.

    Args:
        seed: the same on every rank; ``None`` draws one on rank 0 and hands it to the others.
        debug_mode: for ``torch.set_deterministic_debug_mode``; above 0 (``"default"``) also makes cuDNN
            deterministic and sets ``CUBLAS_WORKSPACE_CONFIG=:4096:8``.

    Returns:
        The seed without the rank, to be recorded.

    Raises:
        SeedError: the seed (plus rank) does not fit 32 bits; a ``ValueError`` too.

    Example:
        >>> torchtune.training.set_seed(7)
        7
    """
    world_size, rank = get_world_size_and_rank()
    limit = np.iinfo(np.uint32).max - world_size + 1
    if seed is None:
        seed = _draw_shared_seed(world_size, int(limit))
    if not 0 <= seed <= limit:
        raise SeedError(f"seed: {seed} is not between 0 and {limit}: choose one that is.")

    local_seed = seed + rank
    torch.manual_seed(local_seed)
    np.random.seed(local_seed)
    random.seed(local_seed)

    if debug_mode is not None:
        torch.set_deterministic_debug_mode(debug_mode)
        deterministic = torch.get_deterministic_debug_mode() > 0
        torch.backends.cudnn.deterministic = deterministic
        torch.backends.cudnn.benchmark = not deterministic
        if deterministic:
            os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    return seed

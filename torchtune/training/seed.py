"""Seeding of all random number generators."""

import os
import random
import secrets

import numpy as np
import torch

from torchtune.training.parallel._ranks import broadcast_object
from torchtune.utils import UserError, first_line, get_world_size_and_rank


class SeedError(UserError, ValueError):
    """Seed that the random number generators do not accept."""


def set_seed(seed: int | None = None, debug_mode: str | int | None = None) -> int:
    """Seed torch, numpy and ``random`` with ``seed`` + rank.

    Args:
        seed: equal on every rank; None draws a seed on rank 0 and broadcasts it.
        debug_mode: for ``torch.set_deterministic_debug_mode``; above 0 (``"default"``) also makes cuDNN
            deterministic and sets ``CUBLAS_WORKSPACE_CONFIG=:4096:8``.

    Returns:
        The seed without the rank, to log it.

    Raises:
        SeedError: the seed (plus rank) does not fit in 32 bits, or torch does not know the mode.

    Example:
        >>> torchtune.training.set_seed(7)
        7
    """
    world_size, rank = get_world_size_and_rank()
    limit = 2**32 - world_size
    if seed is None:
        seed = broadcast_object(secrets.randbelow(limit + 1))
    if not 0 <= seed <= limit:
        raise SeedError(f"seed: {seed} is not between 0 and {limit}: choose one that is.")

    local_seed = seed + rank
    torch.manual_seed(local_seed)
    np.random.seed(local_seed)
    random.seed(local_seed)

    if debug_mode is not None:
        try:
            torch.set_deterministic_debug_mode(debug_mode)
        except RuntimeError as error:
            raise SeedError(f"cudnn_deterministic_mode: {first_line(error)}: choose one of them.") from error
        deterministic = torch.get_deterministic_debug_mode() > 0
        torch.backends.cudnn.deterministic = deterministic
        torch.backends.cudnn.benchmark = not deterministic
        if deterministic:
            os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    return seed

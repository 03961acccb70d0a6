"""Random number generators of a process: seeds, and their state as one state dict."""

import os
import random
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from torchtune.training.parallel._ranks import Ranks, broadcast_object
from torchtune.utils import UserError, first_line, get_world_size_and_rank

_ACCELERATORS = ("cuda", "xpu", "npu", "mps")


class SeedError(UserError, ValueError):
    """Seed that the random number generators do not accept."""


def set_seed(seed: int | None = None, debug_mode: str | int | None = None) -> int:
    """Seed torch, numpy and ``random`` with ``seed`` + rank.

    Args:
        seed: equal on every rank; None draws a seed on rank 0 and broadcasts it.
        debug_mode: for ``torch.set_deterministic_debug_mode``; above 0 (``"default"``) also makes cuDNN
            deterministic and sets ``CUBLAS_WORKSPACE_CONFIG=:4096:8``. None leaves torch's settings.

    Returns:
        The seed without the rank, to log it.

    Raises:
        SeedError: the seed (plus rank) does not fit in 32 bits, or torch does not know the mode.

    Example:
        >>> torchtune.training.set_seed(7)
        7
    """
    world_size, rank = get_world_size_and_rank()
    limit = 2**32 - world_size  # numpy takes 32 bits, of the seed plus the rank
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
        if deterministic:  # cuBLAS is deterministic with a fixed workspace alone, and torch raises an error without
            os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    return seed


class RNGState:
    """State of the global generators of Python, NumPy, torch and the accelerator that this process uses.

    The object itself is stateless: ``state_dict`` reads the generators, ``load_state_dict`` sets them. Values are
    tensors, numbers or ``None``, which every checkpoint format supports.

    Example:
        >>> state = torchtune.training.RNGState().state_dict()
        >>> first = torch.rand(1)
        >>> torchtune.training.RNGState().load_state_dict(state)
        >>> torch.equal(first, torch.rand(1))
        True
    """

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the generators."""
        version, internal, gauss = random.getstate()
        algorithm, keys, position, has_gauss, cached = np.random.get_state()
        if algorithm != "MT19937":
            raise RuntimeError(f"numpy's global generator is {algorithm}, not MT19937.")
        python_state = [version, *internal]
        numpy_state = [*keys.tolist(), position, has_gauss]
        state = {
            "python": torch.tensor(python_state, dtype=torch.int64),
            "python_gauss": gauss,
            "numpy": torch.tensor(numpy_state, dtype=torch.int64),
            "numpy_gauss": float(cached),
            "torch": torch.get_rng_state(),
        }
        for device_type in _ACCELERATORS:
            if _is_used(device_type):
                namespace = getattr(torch, device_type)
                state[device_type] = namespace.get_rng_state()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Set the generators; states of accelerators that are not used are ignored."""
        version, *internal = state_dict["python"].tolist()
        random.setstate((version, tuple(internal), state_dict["python_gauss"]))
        *keys, position, has_gauss = state_dict["numpy"].tolist()
        key_array = np.array(keys, dtype=np.uint32)
        np.random.set_state(("MT19937", key_array, position, has_gauss, state_dict["numpy_gauss"]))
        torch.set_rng_state(state_dict["torch"].cpu())
        for device_type in _ACCELERATORS:
            if device_type in state_dict and _is_used(device_type):
                namespace = getattr(torch, device_type)
                namespace.set_rng_state(state_dict[device_type].cpu())

    def derive(self, rank: int) -> None:
        """Reseed the generators from their current state and ``rank``."""
        seed = f"{random.getrandbits(64)}/{rank}"
        random.seed(seed)
        # The seeds of the others come from Python's generator, which differs from rank to rank now.
        np.random.seed(random.getrandbits(32))
        torch.manual_seed(random.getrandbits(62))


def _is_used(device_type: str) -> bool:
    """Return whether this process has used an accelerator: to ask one for its state would make it start up.

    A run on the CPU need not hold memory of a GPU, and a process forked from one that has used CUDA cannot.
    """
    if device_type == "mps":
        return torch.backends.mps.is_available()
    namespace = getattr(torch, device_type, None)
    return namespace is not None and namespace.is_initialized()


@contextmanager
def share_rng_state(ranks: Ranks) -> Iterator[None]:
    """Context manager in which all ranks use rank 0's random numbers."""
    if ranks.size == 1:
        yield
        return
    local_state = RNGState().state_dict()
    RNGState().load_state_dict(ranks.broadcast(local_state))
    yield
    if ranks.rank != 0:  # rank 0 goes on with the numbers that it has drawn
        RNGState().load_state_dict(local_state)


@contextmanager
def undisturbed_random_state() -> Iterator[None]:
    """Context manager that restores the random state of all devices, so that a run draws the same numbers."""
    state = RNGState().state_dict()
    try:
        yield
    finally:
        RNGState().load_state_dict(state)

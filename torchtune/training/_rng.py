"""The state of all random number generators as one state dict."""

import random
from typing import Any

import numpy as np
import torch

_ACCELERATORS = ("cuda", "xpu", "npu", "mps")


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
        state = {
            "python": torch.tensor([version, *internal], dtype=torch.int64),
            "python_gauss": gauss,
            "numpy": torch.tensor([*keys.tolist(), position, has_gauss], dtype=torch.int64),
            "numpy_gauss": float(cached),
            "torch": torch.get_rng_state(),
        }
        for device_type in _ACCELERATORS:
            if _is_used(device_type):
                state[device_type] = getattr(torch, device_type).get_rng_state()
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
                getattr(torch, device_type).set_rng_state(state_dict[device_type].cpu())

    def derive(self, rank: int) -> None:
        """Reseed the generators from their current state and ``rank``."""
        seed = f"{random.getrandbits(64)}/{rank}"
        random.seed(seed)
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

"""Steps that an optimizer leaves out by a decision of the device, before the host knows it."""

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch.optim import Optimizer

from torchtune.modules.conversion import Conversion, get_conversions
from torchtune.modules.optim import OptimizerInBackward, OptimizerMap
from torchtune.training.optim._low_precision_optimizer import LowPrecisionOptimizer

# Devices whose kernels are launched before they are decided on.
_DEVICES = {"cuda"}
# Optimizers of torch whose fused kernel changes nothing where `found_inf` is not zero.
_SKIPPING = {torch.optim.Adagrad, torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD}


class DeviceSkips:
    """Lets an optimizer leave out bad steps by itself, so that the host does not wait to decide on them.

    A scalar on the device says whether a step is bad. The kernels of the optimizer read it, and change neither weights
    nor states then, as those of torch do for its ``GradScaler``. The host calls ``optimizer.step()`` in any case, and
    learns later what became of it: :meth:`finish` then restores what the optimizer counts on the host.

    Args:
        optimizer: from :func:`~torchtune.training.setup_optimizer`.
        model: model of its parameters.

    Example:
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> torchtune.training.DeviceSkips(optimizer, model).is_supported  # on a CPU
        False
    """

    def __init__(self, optimizer: Optimizer, model: torch.nn.Module) -> None:
        self._optimizer = optimizer
        self._model = model
        self._optimizers = list(single_optimizers(optimizer))
        self._states_before: dict[Optimizer, dict[torch.Tensor, dict[str, Any]]] = {}
        self._num_steps_before: dict[LowPrecisionOptimizer, int] = {}

    @functools.cached_property
    def is_supported(self) -> bool:
        """Whether all parameters are on a CUDA device and all of their kernels can leave out a step.

        Those of torch's fused optimizers can, and this library's steps of bfloat16 weights. A conversion with a
        ``post_optimizer_hook`` must know on the host whether there was a step, and excludes it. Asked first at a step,
        because a resumed optimizer has the settings of its saved groups.
        """
        if isinstance(self._optimizer, OptimizerInBackward) or _has_post_hook(self._model):
            return False
        return all(map(_can_skip, self._optimizers))

    def prepare(self, is_bad: torch.Tensor) -> None:
        """Make the next ``optimizer.step()`` change nothing where ``is_bad``.

        Args:
            is_bad: bool scalar on the device.
        """
        found_inf = is_bad.float()  # as torch's kernels read it
        for optimizer in self._optimizers:
            optimizer.found_inf = found_inf
            # A bad step changes no tensor on the device, but it makes new states, and counts on the host.
            states = {parameter: dict(state) for parameter, state in optimizer.state.items()}
            self._states_before[optimizer] = states
            if isinstance(optimizer, LowPrecisionOptimizer):
                self._num_steps_before[optimizer] = optimizer.num_steps

    def finish(self, *, was_bad: bool) -> None:
        """Undo what the host has counted since :meth:`prepare` if the step was bad.

        Args:
            was_bad: value of ``is_bad``.
        """
        if was_bad:
            for optimizer, states in self._states_before.items():
                optimizer.state.clear()
                optimizer.state.update(states)
            for optimizer, num_steps in self._num_steps_before.items():
                optimizer.num_steps = num_steps
        for optimizer in self._optimizers:
            optimizer.found_inf = None
        self._states_before = {}
        self._num_steps_before = {}


def single_optimizers(optimizer: Optimizer) -> Iterator[Optimizer]:
    """Yield the optimizers of a combined one, or the optimizer itself."""
    if not isinstance(optimizer, OptimizerMap):
        yield optimizer
        return
    for member in optimizer.optim_map.values():
        yield from single_optimizers(member)


def _can_skip(optimizer: Optimizer) -> bool:
    """Return whether all kernels of an optimizer can leave out a step."""
    for group in optimizer.param_groups:
        if any(parameter.device.type not in _DEVICES for parameter in group["params"]):
            return False
    if isinstance(optimizer, LowPrecisionOptimizer):
        return optimizer.can_skip_on_device
    has_kernel = type(optimizer) in _SKIPPING
    return has_kernel and all(group.get("fused") for group in optimizer.param_groups)


def _has_post_hook(model: torch.nn.Module) -> bool:
    """Return whether a conversion of a model, or of a part of it, does something after each step."""
    for part in model.modules():
        for conversion in get_conversions(part):
            if type(conversion).post_optimizer_hook is not Conversion.post_optimizer_hook:
                return True
    return False

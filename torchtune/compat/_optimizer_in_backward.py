"""Compatibility: optimizers that step in the backward pass, with the names that copied recipes use.

Recipes of this library use :class:`torchtune.modules.optim.OptimizerInBackward`.
"""

from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from torchtune.modules.optim import load_by_name


class OptimizerInBackwardWrapper:
    """Wrapper of one optimizer per parameter, which saves, loads and schedules them together.

    Args:
        optim_map: optimizer of every parameter, by parameter name.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> optimizers = torchtune.training.OptimizerInBackwardWrapper({"weight": torch.optim.SGD([weight], lr=0.1)})
        >>> optimizers.get_optim_key("lr")
        0.1
    """

    def __init__(self, optim_map: dict[str, Optimizer]) -> None:
        if not optim_map:
            raise ValueError("OptimizerInBackwardWrapper needs at least one optimizer.")
        self.optim_map = optim_map
        self.lr_scheduler: LRScheduler | None = None

    def state_dict(self) -> dict[str, Any]:
        """Return the state dict of every optimizer, by parameter name."""
        return {name: optimizer.state_dict() for name, optimizer in self.optim_map.items()}

    def load_state_dict(self, optim_ckpt_map: dict[str, Any]) -> None:
        """Load the result of ``state_dict``. Raises ``ValueError`` if the names differ."""
        load_by_name(self.optim_map, optim_ckpt_map)

    def get_optim_key(self, key: str) -> Any:
        """Return a setting (``"lr"`` …) of the first optimizer; all have the same settings."""
        return next(iter(self.optim_map.values())).param_groups[0][key]

    def set_lr_scheduler(self, lr_scheduler: LRScheduler) -> None:
        """Use a schedule attached to one of the optimizers for all of them."""
        self.lr_scheduler = lr_scheduler
        self._copy_lr_to_all()

    def step_lr_scheduler(self, epoch: int | None = None) -> None:
        """Step the schedule and set its rate in every optimizer.

        Raises:
            RuntimeError: no schedule was set.
        """
        self.get_last_lr()  # raises
        if epoch is None:
            self.lr_scheduler.step()
        else:
            self.lr_scheduler.step(epoch)
        self._copy_lr_to_all()

    def _copy_lr_to_all(self) -> None:
        rate = self.get_last_lr()
        for optimizer in self.optim_map.values():
            for group in optimizer.param_groups:
                group["lr"] = rate

    def get_last_lr(self) -> float:
        """Return the rate of the schedule's last step.

        Raises:
            RuntimeError: no schedule was set.
        """
        if self.lr_scheduler is None:
            raise RuntimeError("The optimizer needs a schedule: call set_lr_scheduler first.")
        return self.lr_scheduler.get_last_lr()[0]


def create_optim_in_bwd_wrapper(
    model: torch.nn.Module, optim_dict: dict[torch.nn.Parameter, Optimizer]
) -> OptimizerInBackwardWrapper:
    """Wrap optimizers by the parameter names of ``model``.

    Args:
        model: model of the parameters.
        optim_dict: optimizer of every trained parameter.
    """
    optim_map = {}
    for name, parameter in model.named_parameters():
        if parameter in optim_dict:
            optim_map[name] = optim_dict[parameter]
    return OptimizerInBackwardWrapper(optim_map)


def register_optim_in_bwd_hooks(model: torch.nn.Module, optim_dict: dict[torch.nn.Parameter, Optimizer]) -> None:
    """Register hooks that step every parameter when its gradient is accumulated, and then free the gradient.

    Args:
        model: model that gets the hooks.
        optim_dict: optimizer of every trained parameter.
    """

    def step(parameter: torch.Tensor) -> None:
        optim_dict[parameter].step()
        optim_dict[parameter].zero_grad(set_to_none=True)

    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(step)

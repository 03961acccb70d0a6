"""Compatibility: optimizers that step in the backward pass, under the names that copied recipes call.

Recipes of this library use :class:`torchtune.modules.optim.OptimizerInBackward`.
"""

from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from torchtune.modules.optim import load_by_name


class OptimizerInBackwardWrapper:
    """One face for many optimizers: saving, loading and scheduling them together.

    Args:
        optim_map: optimizer of every parameter, by the parameter's name.

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
        """State dict of every optimizer, by the parameter's name."""
        return {name: optimizer.state_dict() for name, optimizer in self.optim_map.items()}

    def load_state_dict(self, optim_ckpt_map: dict[str, Any]) -> None:
        """Take over what ``state_dict`` returned. Raises ``ValueError`` if a name is on one side only."""
        load_by_name(self.optim_map, optim_ckpt_map)

    def get_optim_key(self, key: str) -> Any:
        """A setting (``"lr"`` …) of the first optimizer; they all have the same."""
        return next(iter(self.optim_map.values())).param_groups[0][key]

    def set_lr_scheduler(self, lr_scheduler: LRScheduler) -> None:
        """Let a schedule that is attached to one of the optimizers drive them all."""
        self.lr_scheduler = lr_scheduler
        self._spread_lr()

    def step_lr_scheduler(self, epoch: int | None = None) -> None:
        """Step the schedule and hand its rate to every optimizer.

        Raises:
            RuntimeError: no schedule was set.
        """
        if self.lr_scheduler is None:
            raise RuntimeError("step_lr_scheduler needs a schedule: call set_lr_scheduler first.")
        if epoch is None:
            self.lr_scheduler.step()
        else:
            self.lr_scheduler.step(epoch)
        self._spread_lr()

    def _spread_lr(self) -> None:
        rate = self.get_last_lr()
        for optimizer in self.optim_map.values():
            for group in optimizer.param_groups:
                group["lr"] = rate

    def get_last_lr(self) -> float:
        """The rate of the schedule's last step.

        Raises:
            RuntimeError: no schedule was set.
        """
        if self.lr_scheduler is None:
            raise RuntimeError("get_last_lr needs a schedule: call set_lr_scheduler first.")
        return self.lr_scheduler.get_last_lr()[0]


def create_optim_in_bwd_wrapper(
    model: torch.nn.Module, optim_dict: dict[torch.nn.Parameter, Optimizer]
) -> OptimizerInBackwardWrapper:
    """Name the optimizers after the parameters of ``model`` and put one face on them.

    Args:
        model: whose parameters they step.
        optim_dict: optimizer of every trained parameter.
    """
    return OptimizerInBackwardWrapper(
        {name: optim_dict[parameter] for name, parameter in model.named_parameters() if parameter in optim_dict}
    )


def register_optim_in_bwd_hooks(model: torch.nn.Module, optim_dict: dict[torch.nn.Parameter, Optimizer]) -> None:
    """Step every parameter as soon as its gradient is complete, and free that gradient.

    Args:
        model: its parameters get the hooks.
        optim_dict: optimizer of every trained parameter.
    """

    def step(parameter: torch.Tensor) -> None:
        optim_dict[parameter].step()
        optim_dict[parameter].zero_grad(set_to_none=True)

    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(step)

"""Optimizers of several optimizers: one for each kind of parameter, or one a parameter that steps in backward."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim import Optimizer


class OptimizerMap(Optimizer):
    """Several optimizers under one face, which share their groups with it: schedules attach to it as to any other.

    Args:
        optim_map: the optimizers by name; the state dict is keyed by it.
    """

    def __init__(self, optim_map: dict[str, Optimizer]) -> None:
        self.optim_map = optim_map
        groups = [group for optimizer in optim_map.values() for group in optimizer.param_groups]
        super().__init__(groups, {})

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step all of them.

        Args:
            closure: computes the loss again and returns it; called once, before the steps.
        """
        with torch.enable_grad():
            loss = None if closure is None else closure()
        for optimizer in self.optim_map.values():
            optimizer.step()
        return loss

    def state_dict(self) -> dict[str, Any]:
        """State dict of every optimizer, by name."""
        return {name: optimizer.state_dict() for name, optimizer in self.optim_map.items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what ``state_dict`` returned.

        Raises:
            ValueError: a name is missing or unknown.
        """
        load_by_name(self.optim_map, state_dict)
        for mine, theirs in zip(
            self.param_groups,
            (group for optimizer in self.optim_map.values() for group in optimizer.param_groups),
            strict=True,
        ):
            # torch replaces the dicts of the groups on loading: share the new values again
            mine.update({key: value for key, value in theirs.items() if key != "params"})
        self._share_groups()

    def _share_groups(self) -> None:
        groups = iter(self.param_groups)
        for optimizer in self.optim_map.values():
            optimizer.param_groups = [next(groups) for _ in optimizer.param_groups]


class OptimizerInBackward(OptimizerMap):
    """Steps every parameter as soon as its gradient is complete and frees that gradient at once.

    All gradients never exist together, which saves their memory; it excludes accumulating them and clipping them
    by a common norm. There is one optimizer per parameter.

    Attributes:
        skip_step: gradients are freed without a step as long as it is True.

    Args:
        params: parameters, or pairs of name and parameter; without names they are called by their number.
        optimizer_cls: class (or function) that makes an optimizer of a list of parameters.
        optimizer_kwargs: for ``optimizer_cls``.
    """

    def __init__(
        self,
        params: Iterable[torch.nn.Parameter] | Iterable[tuple[str, torch.nn.Parameter]],
        optimizer_cls: Callable[..., Optimizer],
        **optimizer_kwargs: Any,
    ) -> None:
        items = list(params)
        named = [item if isinstance(item, tuple) else (str(index), item) for index, item in enumerate(items)]
        named = [(name, parameter) for name, parameter in named if parameter.requires_grad]
        optim_map = {name: optimizer_cls([parameter], **optimizer_kwargs) for name, parameter in named}
        if not optim_map:
            raise ValueError("OptimizerInBackward got no parameter that requires a gradient.")
        self.skip_step = False
        super().__init__(optim_map)
        self._handles = [
            parameter.register_post_accumulate_grad_hook(self._make_hook(optim_map[name])) for name, parameter in named
        ]

    def _make_hook(self, optimizer: Optimizer) -> Callable[[torch.Tensor], None]:
        def step(_: torch.Tensor) -> None:
            if not self.skip_step:
                optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            self._opt_called = True  # what schedules look at to warn of a step that never came

        return step

    def remove_hooks(self) -> None:
        """Let go of the parameters: the backward pass no longer steps them."""
        for handle in self._handles:
            handle.remove()

    def step(self, closure: Callable[[], Any] | None = None) -> None:
        """Do nothing: the steps were taken in the backward pass."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Do nothing: every gradient was freed after its step."""


def load_by_name(optim_map: dict[str, Optimizer], state_dict: dict[str, Any]) -> None:
    """Load one state dict per optimizer.

    Raises:
        ValueError: a name is on one side only; nothing was loaded then.
    """
    missing, unknown = sorted(optim_map.keys() - state_dict.keys()), sorted(state_dict.keys() - optim_map.keys())
    if missing or unknown:
        raise ValueError(f"The optimizer state does not fit: missing {missing[:5]}, unknown {unknown[:5]}.")
    for name, optimizer in optim_map.items():
        optimizer.load_state_dict(state_dict[name])

"""Optimizers that combine several optimizers: by kind of parameter, or one per parameter stepping in backward."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim import Optimizer


class OptimizerMap(Optimizer):
    """Several optimizers combined into one, which shares their parameter groups so that LR schedulers work with it.

    Args:
        optim_map: the optimizers by name; the state dict has these names as keys.
    """

    def __init__(self, optim_map: dict[str, Optimizer]) -> None:
        self.optim_map = optim_map
        super().__init__(_groups(optim_map), {})

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step all optimizers.

        Args:
            closure: recomputes and returns the loss; called once, before the steps.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for optimizer in self.optim_map.values():
            optimizer.step()
        return loss

    def state_dict(self) -> dict[str, Any]:
        """Return the state dict of every optimizer, by name."""
        return {name: optimizer.state_dict() for name, optimizer in self.optim_map.items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of this class.

        Raises:
            ValueError: a name is missing or unknown.
        """
        load_by_name(self.optim_map, state_dict)
        self.param_groups = _groups(self.optim_map)  # torch replaces groups on loading


class OptimizerInBackward(OptimizerMap):
    """Optimizer that steps every parameter in the backward pass and frees its gradient at once.

    This saves the memory of gradients, which never exist all together, and excludes gradient accumulation and clipping
    by the global norm. There is one optimizer per parameter.

    Attributes:
        skip_step: if True, gradients are freed without a step.

    Args:
        params: parameters, or pairs of name and parameter; unnamed parameters are named by their index.
        optimizer_cls: class (or function) that makes an optimizer from a list of parameters.
        optimizer_kwargs: keyword arguments of ``optimizer_cls``.
    """

    def __init__(
        self,
        params: Iterable[torch.nn.Parameter] | Iterable[tuple[str, torch.nn.Parameter]],
        optimizer_cls: Callable[..., Optimizer],
        **optimizer_kwargs: Any,
    ) -> None:
        named: list[tuple[str, torch.nn.Parameter]] = []
        for index, item in enumerate(params):
            if isinstance(item, tuple):
                name, parameter = item
            else:
                name = str(index)  # among all parameters, frozen ones included
                parameter = item
            if parameter.requires_grad:
                named.append((name, parameter))
        if not named:
            raise ValueError("OptimizerInBackward got no parameter that requires a gradient.")
        optim_map = {name: optimizer_cls([parameter], **optimizer_kwargs) for name, parameter in named}
        self.skip_step = False
        super().__init__(optim_map)
        self._handles = []  # for remove_hooks
        for name, parameter in named:
            hook = self._make_hook(optim_map[name])
            handle = parameter.register_post_accumulate_grad_hook(hook)
            self._handles.append(handle)

    def _make_hook(self, optimizer: Optimizer) -> Callable[[torch.Tensor], None]:
        """Return a hook that steps one parameter as soon as its gradient is complete."""

        def step(_: torch.Tensor) -> None:
            if not self.skip_step:
                optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            self._opt_called = True  # LR schedulers warn if no step was called

        return step

    def remove_hooks(self) -> None:
        """Remove the hooks from the parameters, so that the backward pass does not step them."""
        for handle in self._handles:
            handle.remove()

    def step(self, closure: Callable[[], Any] | None = None) -> None:
        """Do nothing: the steps were taken in the backward pass."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Do nothing: every gradient was freed after its step."""


def _groups(optim_map: dict[str, Optimizer]) -> list[dict[str, Any]]:
    """The parameter groups of all optimizers, the same dicts: LR schedulers write to them."""
    groups: list[dict[str, Any]] = []
    for optimizer in optim_map.values():
        groups += optimizer.param_groups
    return groups


def load_by_name(optim_map: dict[str, Optimizer], state_dict: dict[str, Any]) -> None:
    """Load one state dict per optimizer.

    Raises:
        ValueError: a name is missing or unknown; nothing is loaded then.
    """
    missing = sorted(optim_map.keys() - state_dict.keys())
    unknown = sorted(state_dict.keys() - optim_map.keys())
    if missing or unknown:
        raise ValueError(f"The optimizer state does not fit: missing {missing[:5]}, unknown {unknown[:5]}.")
    for name, optimizer in optim_map.items():
        optimizer.load_state_dict(state_dict[name])

"""Gradients of a step: their norm and clipping with any sharding, the loss scale of float16, and steps to leave out.

A step is left out if its gradients are not finite; on a CUDA device, the device decides so before the host knows it.
"""

import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from torchtune.modules.conversion import Conversion, get_conversions
from torchtune.modules.optim import OptimizerInBackward, OptimizerMap
from torchtune.training.optim._low_precision_optimizer import LowPrecisionOptimizer
from torchtune.training.parallel._shards import own_part, reduce_partial
from torchtune.utils import UserError

# Devices whose kernels are launched before the host decides on a step.
_DEVICES_AHEAD = {"cuda"}
# Optimizers of torch whose fused kernel changes nothing where `found_inf` is not zero.
_SKIPPING = {torch.optim.Adagrad, torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD}


def _norm_of_norms(norms: Sequence[Tensor]) -> Tensor:
    """Return the norm of tensors together, from their norms, which may be on different devices."""
    if len(norms) == 1:
        return norms[0]
    device = norms[0].device
    stacked = torch.stack([norm.to(device) for norm in norms])  # [number of norms]
    return torch.linalg.vector_norm(stacked)


def _norm_over_ranks(grads: list[Tensor]) -> Tensor:
    """Return the norm over all ranks of gradients of one dtype, device and sharding."""
    layout = grads[0]
    dtype = torch.promote_types(layout.dtype, torch.float32)  # a 16-bit norm has only 8 or 11 significant bits
    shards = [own_part(grad) for grad in grads]
    norm = _norm_of_norms(torch._foreach_norm(shards, 2, dtype=dtype))
    if not isinstance(layout, DTensor):
        return norm
    # Shards are disjoint, so their squared norms add up; replicas have the same gradient, and count once.
    squared = norm**2
    for dim, placement in enumerate(layout.placements):
        if not placement.is_replicate():
            dist.all_reduce(squared, group=layout.device_mesh.get_group(dim))
    return squared.sqrt()


@torch.no_grad()
def clip_grad_norm_(parameters: Iterable[Tensor], max_norm: float | None, loss_scale: float | Tensor = 1.0) -> Tensor:
    """Scale gradients in place so that their norm over all parameters and ranks is at most ``max_norm``.

    The norm is computed in float32 or wider. Gradients may be sharded over different mesh dimensions; replicas count
    once. A collective if gradients are sharded.

    Args:
        parameters: parameters; parameters without a gradient are skipped.
        max_norm: maximum norm; None only computes the norm.
        loss_scale: factor of all gradients, see :class:`~torchtune.training.LossScaler`: a number, or a scalar on the
            device of the gradients. It is taken out of the norm and of gradients that are not float16; those of float16
            keep it, because small ones would round to zero.

    Returns:
        Scalar tensor: the norm before clipping, without the loss scale.

    Example:
        >>> weight = torch.nn.Parameter(torch.zeros(2))
        >>> weight.grad = torch.tensor([3.0, 4.0])
        >>> norm = torchtune.training.clip_grad_norm_([weight], 1.0)
        >>> round(float(norm), 3), round(weight.grad.norm().item(), 3)
        (5.0, 1.0)
    """
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    # Gradients of one sharding need one all-reduce per mesh dimension, not one each.
    grads_by_layout: dict[object, list[Tensor]] = {}
    for grad in grads:
        reduced = reduce_partial(grad)
        sharding = None
        if isinstance(reduced, DTensor):
            sharding = (reduced.device_mesh, reduced.placements)
        grads_by_layout.setdefault((sharding, reduced.device, reduced.dtype), []).append(reduced)
    norms = [_norm_over_ranks(same_layout) for same_layout in grads_by_layout.values()]
    norm = _norm_of_norms(norms or [torch.zeros(())])  # 0 without any gradient
    # Of a scale on the device, the host does not know whether it is 1.
    is_scaled = isinstance(loss_scale, Tensor) or loss_scale != 1.0
    if is_scaled:
        norm = norm / loss_scale
    if max_norm is None and not is_scaled:
        return norm

    if max_norm is None:
        clip = torch.ones_like(norm)
    else:
        clip = (max_norm / (norm + 1e-6)).clamp(max=1.0)  # as torch: 1e-6 is for a norm of 0
    for (device, dtype), same_kind in _by_device_and_dtype(grads).items():
        factor = clip
        if is_scaled and dtype != torch.float16:
            factor = clip / loss_scale
        shards = [own_part(grad) for grad in same_kind]  # partial sums, too: their sum is scaled alike
        torch._foreach_mul_(shards, factor.to(device))
    return norm


def _by_device_and_dtype(
    tensors: Iterable[Tensor],
) -> dict[tuple[torch.device, torch.dtype], list[Tensor]]:
    """Group tensors for fused calls, which take tensors of one device and dtype."""
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    return groups


class _DeviceScale(NamedTuple):
    """Factor of the loss, float32, and number of steps since it changed, int32: scalars on the device."""

    factor: Tensor
    good_steps: Tensor


class LossScaler:
    """Scales the loss of a float16 model, so that small gradients do not round to zero.

    float16 ends at 6e-8 and at 65504. The loss is multiplied by a power of two. Gradients in float16 keep this factor
    until the optimizer has them in float32; :func:`~torchtune.training.clip_grad_norm_` takes it out of all others. A
    step whose gradients overflow is skipped by :class:`~torchtune.supervision.StepGuard`, and halves the factor; 2,000
    steps without an overflow double it. With other dtypes the factor is 1 and stays 1.

    Where the device decides on steps (:class:`~torchtune.training.DeviceSkips`), the factor is a scalar on the device,
    which follows the same rule. The host follows it when it learns of the step, with the same result.

    Args:
        optimizer: from :func:`~torchtune.training.setup_optimizer`.
        dtype: dtype of the model.

    Attributes:
        decided_factor: factor after the last step of which the host knows the outcome.

    Raises:
        UserError: float16 with an optimizer that steps in the backward pass, or in float16.

    Example:
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> torchtune.training.LossScaler(optimizer, torch.float32).factor
        1.0
    """

    START = 2.0**16
    STEPS_TO_DOUBLE = 2000

    def __init__(self, optimizer: Optimizer, dtype: torch.dtype) -> None:
        self.is_enabled = dtype == torch.float16
        self.decided_factor = 1.0
        self._good_steps = 0
        self._on_device: _DeviceScale | None = None  # while the device decides
        self._optimizers: list[LowPrecisionOptimizer] = []
        if not self.is_enabled:
            return
        if isinstance(optimizer, OptimizerInBackward):
            raise UserError(
                "optimizer_in_bwd: dtype fp16 must see all gradients before the first weight changes, because they may "
                "overflow: set optimizer_in_bwd=False."
            )
        for single_optimizer in single_optimizers(optimizer):
            if isinstance(single_optimizer, LowPrecisionOptimizer):  # it steps in float32
                self._optimizers.append(single_optimizer)
                continue
            for group in single_optimizer.param_groups:
                if any(parameter.dtype == torch.float16 for parameter in group["params"]):
                    raise UserError(
                        "optimizer_precision: param_dtype would step in fp16, in which updates are lost: set "
                        "optimizer_precision=fp32_master for dtype fp16."
                    )
        self.decided_factor = self.START
        self._tell_optimizers()

    @property
    def factor(self) -> float | Tensor:
        """Factor of the loss: a number, or a scalar on the device that decides on steps."""
        if self._on_device is None:
            return self.decided_factor
        return self._on_device.factor

    def _tell_optimizers(self) -> None:
        """Set the factor that optimizers take out of the next gradients."""
        for optimizer in self._optimizers:
            optimizer.loss_scale = self.factor

    def scale(self, loss: Tensor) -> Tensor:
        """Return the loss, scaled if the model is in float16."""
        if not self.is_enabled:
            return loss
        # Only now: until its optimizer step, the gradients of the step before have the factor before its update.
        self._tell_optimizers()
        return loss * self.factor

    @property
    def can_shrink(self) -> bool:
        """Whether an overflow can be avoided by a smaller factor."""
        return self.is_enabled and self.decided_factor > 1.0

    def update(self, *, has_overflowed: bool, was_decided_by_device: bool = False) -> None:
        """Adapt the factor after a step; equal on all ranks, as the norm of the gradients is.

        Args:
            has_overflowed: whether the gradients are not finite, although the loss is.
            was_decided_by_device: whether :meth:`update_on_device` has adapted it already, on the device.
        """
        if not self.is_enabled:
            return
        if not was_decided_by_device:
            self._on_device = None
        if has_overflowed:
            self._good_steps = 0
            self.decided_factor = max(1.0, self.decided_factor / 2)
            return
        self._good_steps += 1
        if self._good_steps == self.STEPS_TO_DOUBLE:
            self._good_steps = 0
            self.decided_factor *= 2

    def update_on_device(self, *, is_bad: Tensor, loss_is_finite: Tensor) -> None:
        """Adapt the factor as :meth:`update` will, before the host knows the outcome of the step.

        Args:
            is_bad: bool scalar, whether loss or gradients are not finite.
            loss_is_finite: bool scalar.
        """
        if not self.is_enabled:
            return
        current = self._on_device
        if current is None:  # the first step on which the device decides
            current = _DeviceScale(
                factor=torch.full((), self.decided_factor, dtype=torch.float32, device=is_bad.device),
                good_steps=torch.full((), self._good_steps, dtype=torch.int32, device=is_bad.device),
            )
        # A loss that is not finite changes neither of them.
        has_overflowed = is_bad & loss_is_finite
        good_steps = (current.good_steps + ~is_bad).masked_fill(has_overflowed, 0)
        doubles = good_steps == self.STEPS_TO_DOUBLE
        larger = torch.where(doubles, current.factor * 2, current.factor)
        smaller = (current.factor / 2).clamp(min=1.0)
        self._on_device = _DeviceScale(
            factor=torch.where(has_overflowed, smaller, larger), good_steps=good_steps.masked_fill(doubles, 0)
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the factor and the number of steps since it changed; empty if the model is not in float16."""
        if not self.is_enabled:
            return {}
        return {"factor": self.decided_factor, "good_steps": self._good_steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the result of :meth:`state_dict`; a run that was not in float16 begins anew."""
        if self.is_enabled and state:
            self._good_steps = int(state["good_steps"])
            self.decided_factor = float(state["factor"])
            self._on_device = None
            self._tell_optimizers()


@torch.no_grad()
def scale_grads_(parameters: Tensor | Iterable[Tensor], scaler: Tensor, foreach: bool | None = None) -> None:
    """Multiply the gradients of ``parameters`` by ``scaler`` in place, each in its own dtype.

    Args:
        parameters: one tensor or several; tensors without a gradient are skipped.
        scaler: a scalar tensor.
        foreach: False scales tensor by tensor; otherwise one fused call per device and dtype.

    Example:
        >>> weight = torch.nn.Parameter(torch.zeros(2))
        >>> weight.grad = torch.tensor([2.0, 4.0])
        >>> torchtune.training.scale_grads_([weight], torch.tensor(0.5))
        >>> weight.grad
        tensor([1., 2.])
    """
    if isinstance(parameters, Tensor):
        parameters = [parameters]
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    for (device, dtype), same_kind in _by_device_and_dtype(grads).items():
        factor = scaler.to(device=device, dtype=dtype)
        if foreach is False:
            for grad in same_kind:
                grad.mul_(factor)
        else:
            torch._foreach_mul_(same_kind, factor)


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

    def __init__(self, optimizer: Optimizer, model: nn.Module) -> None:
        self._optimizer = optimizer
        self._model = model
        self._optimizers = list(single_optimizers(optimizer))
        self._states_before: dict[Optimizer, dict[Tensor, dict[str, Any]]] = {}
        self._num_steps_before: dict[LowPrecisionOptimizer, int] = {}

    @functools.cached_property
    def is_supported(self) -> bool:
        """Whether all parameters are on a CUDA device and all of their kernels can leave out a step.

        Those of torch's fused optimizers can, and this library's steps of bfloat16 weights. A conversion with a
        ``post_optimizer_hook`` must know on the host whether there was a step, and excludes it. Asked first at a step,
        because a resumed optimizer has the settings of its saved groups.
        """
        if isinstance(self._optimizer, OptimizerInBackward):
            return False
        for module in self._model.modules():  # a part of a model may have conversions of its own
            for conversion in get_conversions(module):
                if type(conversion).post_optimizer_hook is not Conversion.post_optimizer_hook:
                    return False
        return all(map(_can_skip, self._optimizers))

    def prepare(self, is_bad: Tensor) -> None:
        """Make the next ``optimizer.step()`` change nothing where ``is_bad``.

        Args:
            is_bad: bool scalar on the device.
        """
        found_inf = is_bad.float()  # as torch's kernels read it
        for optimizer in self._optimizers:
            optimizer.found_inf = found_inf
            # A bad step changes no tensor on the device, but it makes new states, and counts on the host. So copies of
            # the dicts are enough, without the tensors in them.
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
    for member in optimizer.optim_map.values():  # may be combined, too
        yield from single_optimizers(member)


def _can_skip(optimizer: Optimizer) -> bool:
    """Return whether all kernels of an optimizer can leave out a step."""
    for group in optimizer.param_groups:
        if any(parameter.device.type not in _DEVICES_AHEAD for parameter in group["params"]):
            return False
    if isinstance(optimizer, LowPrecisionOptimizer):
        return optimizer.can_skip_on_device
    if type(optimizer) not in _SKIPPING:
        return False
    return all(group.get("fused") for group in optimizer.param_groups)

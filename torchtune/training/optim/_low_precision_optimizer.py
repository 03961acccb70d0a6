"""Optimizer steps in float32 for 16-bit weights.

With stochastic rounding, Adam, AdamW and SGD have updates of their own, which read, round and write the storage in one
pass. Any other optimizer of ``torch.optim`` runs, unchanged, on float32 stand-ins of a parameter, its gradient and its
states, a bounded number of elements at a time; the results are rounded back into the stored weights and states.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from torchtune.modules.low_precision.torchao_interface import StateFormat
from torchtune.training.optim._rounded_step import (
    GroupStep,
    Piece,
    UpdateRule,
    find_update_rule,
    piece_size,
    rounded_piece_size,
    step_piece,
    step_pieces,
)
from torchtune.training.optim._stochastic_rounding import (
    ElementIds,
    random_bits,
    round_to_bfloat16,
    rounding_key,
    rounding_noise,
    spread_within_rounding,
)
from torchtune.training.parallel._shards import ShardGrid, own_part
from torchtune.utils import UserError, get_logger, is_simulated, log_once

# The update of an element depends only on that element and on scalars, so a parameter can be split into pieces.
_ELEMENTWISE = {
    torch.optim.ASGD,
    torch.optim.Adadelta,
    torch.optim.Adagrad,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.SGD,
}
# Optimizers whose fused kernel takes float32 tensors on the CPU and on CUDA.
_FUSABLE = {torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD}
HALF = (torch.bfloat16, torch.float16)
# States of parameters with fewer elements are not low-bit: norms and biases gain nothing.
MIN_LOW_BIT_ELEMENTS = 4096
# Suffixes in a state dict for the two tensors of a low-bit state.
_CODES_SUFFIX = " codes"
_SCALE_SUFFIX = " scale"
# Key of the float32 weight among the states of a parameter.
_MASTER = "master"
# Marks a state dict whose run drew its rounding from the counter-based generator.
_ROUNDING = "counter"


def needs_full_matrices(optimizer: Optimizer) -> bool:
    """Return whether the optimizer is one of torch's that are not elementwise, such as Muon."""
    return type(optimizer).__module__.startswith("torch.optim.") and type(optimizer) not in _ELEMENTWISE


class OptimizerStateError(UserError, ValueError):
    """An optimizer state does not fit the optimizer that loads it."""


class LowPrecisionOptimizer(Optimizer):
    """Optimizer that wraps another one and lets it step float32 stand-ins of the parameters.

    An elementwise optimizer steps each rank's shards. Any other, such as Muon, steps full matrices, one at a time, and
    every rank stores its shard of the result.

    ``stochastic_rounding`` needs no more memory between steps than plain bfloat16 training. The rounding of an element
    depends only on the seed, the step, the parameter's name, and the element's position in the full tensor, so a
    resumed run continues bit for bit, and every mesh rounds alike. States are rounded stochastically, too: with
    rounding to nearest, even the fast moving average of a constant gradient stays 2 to 15 % too small.

    ``fp32_master`` keeps the float32 weight as the state ``master``. A bfloat16 weight only determines an interval of
    float32 values. The master weight starts at a random point of this interval. If it started in the middle, no rounded
    weight would change until its updates add up to half a spacing, and at a small learning rate the model would not
    change for tens of steps.

    Attributes:
        precision: ``stochastic_rounding`` or ``fp32_master``.
        loss_scale: factor of float16 gradients, which are divided by it in float32: a number, or a scalar on the
            device.
        state_format: ``8bit``, ``4bit`` or ``fp8`` if states of large parameters are low-bit; otherwise None.
        num_steps: number of steps, on which the rounding depends.
        found_inf: float32 scalar on the device of the parameters; a step changes nothing where it is not zero. None
            takes every step. See :class:`~torchtune.training.DeviceSkips`.

    Args:
        optimizer: new optimizer of 16-bit (and possibly float32) parameters; do not use it elsewhere.
        names: name of every parameter; the names are the keys of the state dict.
        precision: see above.
        seed: seed of the rounding.
        low_bit: format of low-bit states, for elementwise optimizers; by default the precision's dtype.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        names: dict[nn.Parameter, str],
        precision: str,
        seed: int,
        low_bit: StateFormat | None = None,
    ) -> None:
        self._base_optimizer = optimizer
        self._elementwise = type(optimizer) in _ELEMENTWISE
        self._names = names
        self._low_bit = low_bit
        self._seed = seed
        self.num_steps = 0
        self._element_ids: dict[nn.Parameter, ElementIds] = {}
        self.precision = precision
        self.state_format: str | None = None
        if low_bit is not None:
            self.state_format = low_bit.name
        self.loss_scale: float | Tensor = 1.0
        self.found_inf: Tensor | None = None
        # Calls add_param_group, which makes master weights and reads the attributes above.
        super().__init__(optimizer.param_groups, optimizer.defaults)
        # Some optimizers, such as Adagrad, make their states when they are built.
        for parameter, state in optimizer.state.items():
            self._load_parameter(parameter, state, counts_on_device=False)
        optimizer.state.clear()
        # Hooks run once per step of this optimizer, not at every step of the base optimizer.
        for hooks in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
            getattr(self, hooks).update(getattr(optimizer, hooks))
            getattr(optimizer, hooks).clear()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group as in torch, with master weights of its parameters."""
        super().add_param_group(param_group)
        for parameter in self.param_groups[-1]["params"]:
            self._make_master(parameter)

    def _make_master(self, parameter: nn.Parameter) -> None:
        """Make the master weights of a parameter if it has any: see the class for where they start."""
        if self.precision != "fp32_master" or parameter.dtype not in HALF:
            return
        master = own_part(parameter).detach().float().contiguous()
        if parameter.dtype == torch.bfloat16 and not parameter.is_meta:
            for piece in self._pieces(master):
                values = _cut(master, piece)
                noise = self._noise(parameter, values, piece, step=0, draw=0)
                values.copy_(spread_within_rounding(values, noise))
        self.state[parameter][_MASTER] = master

    def _is_low_bit(self, parameter: nn.Parameter) -> bool:
        """Return whether states are low-bit: as in torchao, for large full parameters that consist of full blocks."""
        if self._low_bit is None or parameter.numel() < MIN_LOW_BIT_ELEMENTS:
            return False
        return parameter.numel() % self._low_bit.block_size == 0

    @property
    def can_skip_on_device(self) -> bool:
        """Whether all kernels of a step on CUDA read :attr:`found_inf`.

        Low-bit states are written by functions of torch, as are all states of optimizers without a fused kernel.
        """
        if self._low_bit is not None:
            return False
        for group in self.param_groups:
            rule = find_update_rule(type(self._base_optimizer), group)
            has_rule = rule is not None and all(map(self._is_rounded_stochastically, group["params"]))
            if not has_rule and not self._is_fused(group):
                return False
        return True

    # Rounding.

    def _is_rounded_stochastically(self, stored: Tensor) -> bool:
        """Return whether new values of a stored tensor, a parameter or one of its states, are rounded so."""
        return self.precision == "stochastic_rounding" and stored.dtype == torch.bfloat16

    def _ids_of(self, parameter: nn.Parameter) -> ElementIds:
        """Return the ids of the elements of a parameter, made at the first use: its layout never changes."""
        if parameter not in self._element_ids:
            self._element_ids[parameter] = ElementIds(parameter, self._names[parameter])
        return self._element_ids[parameter]

    def _noise(self, parameter: nn.Parameter, values: Tensor, piece: slice | None, *, step: int, draw: int) -> Tensor:
        """Return the rounding noise of the elements of a piece, int32 in the shape of ``values``."""
        first = 0
        if piece is not None:
            first = piece.start
        ids = self._ids_of(parameter).of(first, values.numel(), values.device)  # [n]
        bits = random_bits(ids, rounding_key(self._seed, step))
        noise = rounding_noise(bits, draw)
        return noise.view(values.shape)

    # Steps.

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step.

        Args:
            closure: recomputes and returns the loss; called once, before the step.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.num_steps += 1
        for group in self.param_groups:
            self._step_group(group)
        return loss

    def _step_group(self, group: dict[str, Any]) -> None:
        """Step the parameters of a group: by this library's update where there is one, else by the base optimizer."""
        rule = find_update_rule(type(self._base_optimizer), group)
        with_rule: dict[torch.device, list[nn.Parameter]] = {}  # by device, to which a step's scalars are copied once
        without_rule: list[nn.Parameter] = []
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            if parameter.grad.is_sparse:
                raise UserError(
                    f"optimizer: the gradient of {self._names[parameter]} is sparse: set "
                    "optimizer_precision=param_dtype, or sparse=False in the embedding."
                )
            if rule is not None and self._is_rounded_stochastically(parameter):
                with_rule.setdefault(parameter.device, []).append(parameter)
            else:
                without_rule.append(parameter)
        for device, parameters in with_rule.items():
            self._step_with_rule(parameters, group, rule, device)
        settings = group
        if self._is_fused(group):
            settings = {**group, "fused": True}
        # An optimizer may count in its settings: every parameter starts from the same count, and the group moves on
        # once, with the count after the last parameter.
        settings_after: dict[str, Any] = {}
        for parameter in without_rule:
            settings_after = self._step_parameter(parameter, settings)
        for key, value in settings_after.items():
            if key not in ("params", "fused"):  # those of the stand-ins
                group[key] = value

    # Steps with an update of this library's.

    def _step_with_rule(
        self, parameters: list[nn.Parameter], group: dict[str, Any], rule: UpdateRule, device: torch.device
    ) -> None:
        """Step parameters on ``device``, a piece at a time, so that temporary tensors stay small."""
        size = rounded_piece_size(device)  # once, because it depends on whether the step is compiled
        is_skipped: Tensor | None = None
        if self.found_inf is not None:
            is_skipped = self.found_inf != 0
        key = _on_device(rounding_key(self._seed, self.num_steps), torch.int32, device)
        # Parameters of the same age have the same scalars, and can share a launch.
        parameters_by_step: dict[int, list[nn.Parameter]] = {}
        for parameter in parameters:
            step = self._count_step(parameter, rule)
            parameters_by_step.setdefault(step, []).append(parameter)
        for step, same_age in parameters_by_step.items():
            scalars = _on_device(rule.scalars(group, step), torch.float32, device)
            group_step = GroupStep(rule.function, scalars, key, is_skipped)
            pieces: list[Piece] = []
            in_place: list[nn.Parameter] = []
            copied: list[nn.Parameter] = []
            for parameter in same_age:
                if self._is_stepped_in_place(parameter, rule):
                    in_place.append(parameter)
                    pieces += self._storage_pieces(parameter, rule, size)
                else:
                    copied.append(parameter)
            origins = self._origins(in_place, size, device)
            step_pieces(group_step, pieces, origins)

            copied_size = size
            if is_simulated():
                # Its pieces in place are whole shards, but its memory of copies must be that of a run.
                copied_size = piece_size(device)
            copied_origins = iter(self._origins(copied, copied_size, device).unbind())
            for parameter in copied:
                self._step_copies(parameter, rule, group_step, copied_origins, copied_size)

    def _is_stepped_in_place(self, parameter: nn.Parameter, rule: UpdateRule) -> bool:
        """Return whether the stored tensors of a parameter are runs of its elements, which an update can change."""
        if self._is_low_bit(parameter) or not self._ids_of(parameter).is_run:
            return False
        # torch.compile compiles again for a tensor of one element, because it broadcasts.
        if own_part(parameter).numel() == 1:
            return False
        grad = parameter.grad
        if isinstance(grad, DTensor) and grad.placements != parameter.placements:
            return False
        stored = [own_part(parameter), own_part(grad)]
        stored += [self.state[parameter][name] for name in rule.states]
        return all(tensor.is_contiguous() for tensor in stored)

    def _storage_pieces(self, parameter: nn.Parameter, rule: UpdateRule, size: int) -> list[Piece]:
        """Return the pieces of a parameter that is stepped in place."""
        weights = own_part(parameter).detach().view(-1)
        grads = own_part(parameter.grad).view(-1)
        states = [self.state[parameter][name].view(-1) for name in rule.states]
        pieces = []
        for first in range(0, weights.numel(), size):
            piece = slice(first, first + size)
            states_of_piece = [state[piece] for state in states]
            pieces.append(Piece(weights[piece], grads[piece], states_of_piece))
        return pieces

    def _origins(self, parameters: list[nn.Parameter], size: int, device: torch.device) -> Tensor:
        """Return the origins of the pieces of parameters, int32 ``[pieces, 4]``, in one copy to the device."""
        origins = []
        for parameter in parameters:
            ids = self._ids_of(parameter)
            for first in range(0, own_part(parameter).numel(), size):
                position, name_hash = ids.origin(first)
                origins.append([position, name_hash, 0, 0])
        return _on_device(origins, torch.int32, device).view(-1, 4)

    def _count_step(self, parameter: nn.Parameter, rule: UpdateRule) -> int:
        """Create missing states, and return the number of this step of a parameter, as the rule counts."""
        state = self.state[parameter]
        # torch's SGD stores None for a buffer that it does not have.
        missing = [name for name in rule.states if state.get(name) is None]
        for name in missing:
            state.pop(name, None)  # a None, which `_stored_state` would take for the state
            if self._is_low_bit(parameter):
                self._stored_state(parameter, name)
            else:
                state[name] = torch.zeros_like(own_part(parameter), dtype=self._storage_dtype(parameter))
        if not rule.counts_steps:
            is_first = bool(missing)
            return 1 if is_first else 2  # only the first step has other scalars
        # The count stays in host memory: a scalar on the device would have to be read back.
        steps_before = torch.as_tensor(state.get("step", 0.0), dtype=torch.float32).cpu()
        state["step"] = steps_before + 1
        return int(state["step"])

    def _step_copies(
        self,
        parameter: nn.Parameter,
        rule: UpdateRule,
        group_step: GroupStep,
        origins: Iterator[Tensor],
        size: int,
    ) -> None:
        """Step a shard whose tensors are low-bit, not contiguous, or not consecutive elements of the full tensor.

        The noise of stochastic rounding follows from the origin of a piece (the place of its first element in the full
        tensor), or from the ids of its elements, where they are not consecutive. Every piece takes the next origin.
        """
        weights = own_part(parameter).detach()
        states = [self.state[parameter][name] for name in rule.states]
        # A tensor that is not contiguous is copied here, and written back at the end; a contiguous one shares memory.
        flat_weights = weights.reshape(-1)
        flat_grads = _own_grad(parameter).reshape(-1)
        is_low_bit = self._is_low_bit(parameter)
        if is_low_bit:  # always a view: a low-bit state is written in pieces, and not copied back at the end
            flat_states = [state.view(-1) for state in states]
        else:
            flat_states = [state.reshape(-1) for state in states]

        ids = self._ids_of(parameter)
        for first in range(0, weights.numel(), size):
            piece = slice(first, first + size)
            weight = flat_weights[piece]
            stored_states = [state[piece] for state in flat_states]
            step_states = stored_states
            if is_low_bit:
                # A shard may end within a block, whose other elements are padding.
                step_states = [state.dequantize()[: weight.numel()] for state in stored_states]
            piece_ids = None  # those of consecutive elements follow from the origin
            if not ids.is_run:
                piece_ids = ids.of(first, weight.numel(), weight.device)
            step_piece(group_step, Piece(weight, flat_grads[piece], step_states), next(origins), piece_ids)
            if is_low_bit:
                for stored, values in zip(stored_states, step_states, strict=True):
                    _write_low_bit(stored, values)

        if not weights.is_contiguous():
            weights.copy_(flat_weights.view(weights.shape))
        for state, flat_state in zip(states, flat_states, strict=True):
            if not is_low_bit and not state.is_contiguous():
                state.copy_(flat_state.view(state.shape))

    # Steps of the base optimizer.

    def _is_fused(self, group: dict[str, Any]) -> bool:
        """Return whether torch's fused kernel takes the step: it can, and the user has not disabled it."""
        if type(self._base_optimizer) not in _FUSABLE or group.get("fused") is False:
            return False
        return not (group.get("foreach") or group.get("capturable") or group.get("differentiable"))

    def _step_parameter(self, parameter: nn.Parameter, settings: dict[str, Any]) -> dict[str, Any]:
        """Step a parameter, a piece at a time; return the settings of its group after the step."""
        weights = own_part(parameter).detach()
        grads = _own_grad(parameter)
        state = self.state[parameter]
        state_before = dict(state)  # every piece starts from the same scalars
        masters = state_before.pop(_MASTER, weights)
        # Of a scale on the device, the host does not know whether it is 1.
        is_scaled = isinstance(self.loss_scale, Tensor) or self.loss_scale != 1.0
        for piece in self._pieces(weights):
            weight = _cut(weights, piece)
            master = _cut(masters, piece)
            grad = _cut(grads, piece)

            # What the base optimizer steps: stand-ins of the elements of this piece, and copies of the scalars.
            stored_states: dict[str, Tensor] = {}
            step_state: dict[str, Any] = {}
            for key, value in state_before.items():
                if _is_low_bit_state(value) or _is_per_element(value, weights):
                    stored_states[key] = _cut(value, piece)
                    step_state[key] = self._stand_in(parameter, stored_states[key], weight)
                elif isinstance(value, Tensor):
                    step_state[key] = value.clone()
                else:
                    step_state[key] = value
            step_weight = self._stand_in(parameter, master, weight)
            step_grad = self._stand_in(parameter, grad, weight)
            if grad.dtype == torch.float16 and is_scaled:
                step_grad = step_grad / self.loss_scale

            settings_after, step_state = self._run_base_optimizer(settings, step_weight, step_grad, step_state)

            self._store(parameter, master, step_weight, piece, draw=0)
            if masters is not weights:  # the 16-bit weight is the master, rounded to nearest
                weight.copy_(master)
            # Sorted: a state takes the same draw in every run, in whichever order the optimizer makes its states.
            for draw, (key, value) in enumerate(sorted(step_state.items()), start=1):
                if not _is_per_element(value, step_weight):
                    state[key] = value
                    continue
                if key not in stored_states:
                    stored_states[key] = _cut(self._stored_state(parameter, key), piece)
                self._store(parameter, stored_states[key], value, piece, draw)
        return settings_after

    def _pieces(self, weights: Tensor) -> list[slice | None]:
        """Return the slices to step one after another; None stands for the whole tensor in its own shape."""
        size = piece_size(weights.device)
        if not self._elementwise or not weights.is_contiguous() or weights.numel() <= size:
            return [None]
        return [slice(start, start + size) for start in range(0, weights.numel(), size)]

    def _stand_in(self, parameter: nn.Parameter, stored: Tensor, like: Tensor) -> Tensor:
        """Return a stored tensor in float32, in the shape of ``like``: itself if float32 and contiguous, or a copy.

        For an optimizer that is not elementwise, the full tensor is gathered from all ranks.
        """
        if _is_low_bit_state(stored):
            dequantized = stored.dequantize()[: like.numel()]  # without the padding of the last block
            return dequantized.view(like.shape)
        stand_in = stored
        if stored.dtype in HALF:
            stand_in = stored.float()
        stand_in = stand_in.contiguous()  # one layout for all: a state that the optimizer makes has that of its weight
        if not self._elementwise and isinstance(parameter, DTensor):
            sharded = DTensor.from_local(
                stand_in,
                parameter.device_mesh,
                parameter.placements,
                run_check=False,
                shape=parameter.shape,
                stride=parameter.stride(),
            )
            stand_in = sharded.full_tensor()
        return stand_in

    def _run_base_optimizer(
        self, settings: dict[str, Any], weight: Tensor, grad: Tensor, state: dict[str, Any]
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Step ``weight`` in place; return the settings and the state after the step."""
        group = {**settings, "params": [weight]}
        weight.grad = grad
        self._base_optimizer.param_groups = [group]
        self._base_optimizer.state[weight] = state
        self._base_optimizer.found_inf = self.found_inf
        self._base_optimizer.step()
        # It must not keep the stand-in, nor its gradient, alive.
        self._base_optimizer.param_groups = []
        weight.grad = None
        return group, self._base_optimizer.state.pop(weight)

    def _store(self, parameter: nn.Parameter, stored: Tensor, values: Tensor, piece: slice | None, draw: int) -> None:
        """Write the values of a stand-in after the step back to the stored tensor; see :func:`rounding_noise`."""
        if values is stored:
            return
        if _is_low_bit_state(stored):
            _write_low_bit(stored, values)
            return
        if not self._elementwise and isinstance(parameter, DTensor):
            # Every rank has the full result, and keeps its shard, without communication.
            values = distribute_tensor(values, parameter.device_mesh, parameter.placements, src_data_rank=None)
            values = values.to_local()
        if self._is_rounded_stochastically(stored):
            noise = self._noise(parameter, values, piece, step=self.num_steps, draw=draw)
            values = round_to_bfloat16(values.contiguous(), noise)
        stored.copy_(values)

    # States and state dicts.

    def _storage_dtype(self, parameter: nn.Parameter) -> torch.dtype:
        """Return the dtype of the states of a parameter that are not low-bit."""
        if self.precision == "fp32_master" and parameter.dtype in HALF:
            return torch.float32
        return parameter.dtype

    def _stored_state(self, parameter: nn.Parameter, key: str) -> Tensor:
        """Return the stored state ``key`` of a parameter; a new one is uninitialized, or zeros if it is low-bit."""
        state = self.state[parameter]
        if key not in state:
            shard = own_part(parameter)
            if self._is_low_bit(parameter):
                has_sign = key == "exp_avg"  # Adam's first moment; the second is a mean of squares
                state[key] = self._low_bit.zeros(shard.numel(), shard.device, signed=has_sign)
            else:
                state[key] = torch.empty_like(shard, dtype=self._storage_dtype(parameter), requires_grad=False)
        return state[key]

    def state_dict(self) -> dict[str, Any]:
        """Return all values besides the weights that the next step depends on.

        Returns:
            ``state``: states by parameter name; ``param_groups``: settings, with names as ``params``;
            ``precision``: mode, format of the stored states, seed of the rounding and number of steps.
        """
        states = {}
        for parameter, state in self.state.items():
            states[self._names[parameter]] = _plain_tensors(parameter, state)
        groups = []
        for group in self.param_groups:
            names = [self._names[parameter] for parameter in group["params"]]
            groups.append({**group, "params": names})
        precision = {"mode": self.precision, "seed": self._seed, "step": self.num_steps, "rounding": _ROUNDING}
        if self.state_format is not None:
            precision["states"] = self.state_format
        return {"state": states, "param_groups": groups, "precision": precision}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a ``state_dict`` of this class, of another precision or of a plain optimizer.

        Raises:
            OptimizerStateError: groups or names do not fit. Nothing is loaded then.
        """
        # Both raise before anything is changed.
        check_state_format(self, state_dict)
        saved_states = self._match_states(state_dict)
        self.state.clear()
        for group, saved_group in zip(self.param_groups, state_dict["param_groups"], strict=True):
            for key, value in saved_group.items():
                if key != "params":
                    group[key] = value
            rule = find_update_rule(type(self._base_optimizer), group)
            for parameter in group["params"]:
                takes_rule = rule is not None and self._is_rounded_stochastically(parameter)
                # torch's fused kernel counts steps on the device.
                counts_on_device = self._is_fused(group) and not takes_rule
                self._load_parameter(parameter, saved_states[parameter], counts_on_device)
        precision = state_dict.get("precision", {})
        self._seed = int(precision.get("seed", self._seed))
        self.num_steps = int(precision.get("step", self.num_steps))
        # The run may go on in another way than the run that saved the state.
        saved_mode = precision.get("mode", "param_dtype")  # a plain optimizer states none
        if saved_mode != self.precision:
            get_logger().warning(
                f"The optimizer state was saved with precision {saved_mode} and goes on with {self.precision}."
            )
        elif self.precision == "stochastic_rounding" and precision.get("rounding") != _ROUNDING:
            log_once(
                get_logger(),
                "The optimizer state was saved by a release with another random generator for stochastic rounding: the "
                "run continues with other draws, which are as valid.",
            )

    def _match_states(self, state_dict: dict[str, Any]) -> dict[nn.Parameter, dict[str, Any]]:
        """Return the saved state of every parameter.

        Raises:
            OptimizerStateError: groups or names do not fit.
        """
        num_parameters = [len(group["params"]) for group in self.param_groups]
        num_saved = [len(group["params"]) for group in state_dict["param_groups"]]
        if num_saved != num_parameters:
            raise OptimizerStateError(
                f"The saved optimizer state has groups of {num_saved} parameters and this optimizer of "
                f"{num_parameters}: resume with the optimizer and the trained parameters of the saved run."
            )
        states: dict[nn.Parameter, dict[str, Any]] = {}
        for group, saved_group in zip(self.param_groups, state_dict["param_groups"], strict=True):
            parameters_by_name = {self._names[parameter]: parameter for parameter in group["params"]}
            for parameter, key in zip(group["params"], saved_group["params"], strict=True):
                if isinstance(key, str):  # a plain optimizer has numbers instead, in the order of its parameters
                    if key not in parameters_by_name:
                        raise OptimizerStateError(
                            f"The saved optimizer state is about {key}, which this run does not train: resume with the "
                            "trained parameters of the saved run."
                        )
                    parameter = parameters_by_name[key]
                states[parameter] = state_dict["state"].get(key, {})
        return states

    def _load_parameter(self, parameter: nn.Parameter, saved_state: dict[str, Any], counts_on_device: bool) -> None:
        """Load the state of a parameter, in the dtypes and on the devices of this optimizer's states."""
        self._make_master(parameter)  # stays if the state has none, otherwise the saved one is copied into it
        state = self.state[parameter]
        shard = own_part(parameter)
        for key, value in saved_state.items():
            value = own_part(value)
            if key == _MASTER:
                # Float32 weights are their own master weights.
                state.get(_MASTER, shard.detach()).copy_(value)
            elif key.endswith(_CODES_SUFFIX):
                stored = self._stored_state(parameter, key.removesuffix(_CODES_SUFFIX))
                _copy_stacked_row(stored.codes.view(torch.uint8), value)
            elif key.endswith(_SCALE_SUFFIX):
                stored = self._stored_state(parameter, key.removesuffix(_SCALE_SUFFIX))
                _copy_stacked_row(stored.scale, value)
            elif not isinstance(value, Tensor):
                state[key] = value
            else:
                if key != "step" or counts_on_device:
                    value = value.to(parameter.device)
                if _is_per_element(value, shard):
                    value = value.to(self._storage_dtype(parameter))
                state[key] = value


def _on_device(values: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Copy numbers to a device. From pinned memory, the host does not wait for the copy."""
    tensor = torch.tensor(values, dtype=dtype)
    if device.type == "cuda" and not is_simulated():
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def _cut(tensor: Tensor, piece: slice | None) -> Tensor:
    """Return the elements of a piece, ``[n]``, or the whole tensor in its own shape."""
    if piece is None:
        return tensor
    return tensor.view(-1)[piece]


def _is_per_element(value: Any, like: Tensor) -> bool:
    """Return whether ``value`` has one number per element; quantized states and factors are stored unchanged."""
    if not isinstance(value, Tensor) or hasattr(value, "__tensor_flatten__"):
        return False
    if value.dim() == 0:  # a count of steps, as far as can be told if the parameter is a scalar
        return False
    return value.shape == like.shape and value.is_floating_point()


def _own_grad(parameter: nn.Parameter) -> Tensor:
    """Return the gradient of this rank's shard."""
    grad = parameter.grad
    if isinstance(grad, DTensor) and grad.placements != parameter.placements:
        grad = grad.redistribute(placements=parameter.placements)  # reduces partial sums
    return own_part(grad).contiguous()


# Low-bit states: torchao's tensors, written here in pieces.


def _is_low_bit_state(state: object) -> bool:
    """Return whether a state is a low-bit tensor of torchao, which need not be installed."""
    return hasattr(state, "codes")


def _write_low_bit(state: Tensor, values: Tensor) -> None:
    """Store float32 ``values`` in ``state``, which may be longer: its last block is padded with zeros.

    torchao finds the nearest code by a search that needs compilation to be fast; ``bucketize`` is one fused kernel.
    """
    padding = state.numel() - values.numel()
    values = nn.functional.pad(values.reshape(-1), (0, padding))
    if not hasattr(state, "qmap"):  # fp8: a cast
        state.copy_(values)
        return
    blocks = values.view(len(state.scale), -1)  # [blocks, block_size]
    scale = blocks.abs().amax(-1).clamp_(min=1e-12)  # [blocks]; a block of zeros is not divided by 0
    normalized = (blocks / scale[:, None]).view(-1)  # from -1 to 1
    # A value has the nearest code: the borders are in the middle between the values of neighboring codes.
    lower_values = state.qmap[:-1]
    upper_values = state.qmap[1:]
    borders = (upper_values - lower_values) * 0.5 + lower_values
    codes = torch.bucketize(normalized, borders, right=True, out_int32=True).to(torch.uint8)
    if len(state.codes) < len(codes):  # 4 bits: two codes in a byte, the first one in its upper half, as in torchao
        codes = codes[::2] << 4 | codes[1::2]
    state.codes.copy_(codes)
    state.scale.copy_(scale)


def _plain_tensors(parameter: nn.Parameter, state: dict[str, Any]) -> dict[str, Any]:
    """Return a state with low-bit tensors as plain tensors; tensors of shards are stacked."""
    grid = ShardGrid.of(parameter)
    plain = {}
    for key, value in state.items():
        if not _is_low_bit_state(value):
            plain[key] = value
            continue
        blocks = math.ceil(grid.largest_size(parameter) / value.block_size)
        codes = value.codes.view(torch.uint8)
        codes_per_block = codes.numel() // value.scale.numel()
        plain[key + _CODES_SUFFIX] = grid.stack(codes, parameter, blocks * codes_per_block)
        plain[key + _SCALE_SUFFIX] = grid.stack(value.scale, parameter, blocks)
    return plain


def _copy_stacked_row(stored: Tensor, row: Tensor) -> None:
    """Copy this rank's row of stacked codes or scales, which may be padded to the longest row."""
    flat_row = row.reshape(-1)  # [1, ..., 1, max_length] -> [max_length]
    stored.copy_(flat_row[: stored.numel()])


def adopt_masters(optimizer: Optimizer) -> None:
    """Move ``master`` of a loaded state into the float32 parameters, which need no separate master weights."""
    for parameter, state in optimizer.state.items():
        master = state.pop(_MASTER, None)
        if master is not None:
            parameter.detach().copy_(master)


def check_state_format(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
    """Raise ``OptimizerStateError`` if the states of a state dict have another format than ``optimizer``'s."""
    saved_format = state_dict.get("precision", {}).get("states")
    state_format = getattr(optimizer, "state_format", None)
    if saved_format != state_format and state_dict.get("state"):
        raise OptimizerStateError(
            f"The saved optimizer has {saved_format or 'plain'} states and this run's has {state_format or 'plain'} "
            "ones: resume with the optimizer of the saved run."
        )

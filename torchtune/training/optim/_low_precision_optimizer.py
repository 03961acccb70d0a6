"""Optimizer steps in float32 for 16-bit weights.

With stochastic rounding, Adam, AdamW and SGD have updates of their own, which read, round and write the storage in one
pass. Any other optimizer of ``torch.optim`` runs, unchanged, on float32 stand-ins of a parameter, its gradient and its
states, a bounded number of elements at a time; the results are rounded back into the stored weights and states.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from torchtune.modules.torchao_formats import StateFormat
from torchtune.training.optim._rounded_step import (
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
    getattr(torch.optim, name)
    for name in "ASGD Adadelta Adagrad Adam AdamW Adamax NAdam RAdam RMSprop Rprop SGD".split()
}
_FUSABLE = {torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD}
HALF = (torch.bfloat16, torch.float16)
# Smaller states are not quantized: norms and biases gain nothing.
SMALLEST = 4096
# Suffixes in a state dict for the two tensors of a low-bit state.
_CODES, _SCALE = " codes", " scale"
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
        loss_scale: factor of float16 gradients, which are divided by it in float32.
        state_format: ``8bit``, ``4bit`` or ``fp8`` if states of large parameters are low-bit; otherwise None.

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
        names: dict[torch.nn.Parameter, str],
        precision: str,
        seed: int,
        low_bit: StateFormat | None = None,
    ) -> None:
        self._worker, self._names, self._low_bit = optimizer, names, low_bit
        self._elementwise = type(optimizer) in _ELEMENTWISE
        self._seed, self._num_steps = seed, 0
        self._ids: dict[torch.nn.Parameter, ElementIds] = {}
        self.precision, self.state_format = precision, low_bit and low_bit.name
        self.loss_scale = 1.0
        super().__init__(optimizer.param_groups, optimizer.defaults)
        for parameter, state in optimizer.state.items():
            self._load_parameter(parameter, state, counts_on_device=False)
        optimizer.state.clear()
        for hooks in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
            getattr(self, hooks).update(getattr(optimizer, hooks))
            getattr(optimizer, hooks).clear()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group as in torch, with master weights of its parameters."""
        super().add_param_group(param_group)
        for parameter in self.param_groups[-1]["params"]:
            self._make_master(parameter)

    def _make_master(self, parameter: torch.nn.Parameter) -> None:
        if self.precision != "fp32_master" or parameter.dtype not in HALF:
            return
        master = own_part(parameter).detach().float().contiguous()
        if parameter.dtype == torch.bfloat16 and not parameter.is_meta:
            for piece in self._pieces(master):
                cut = _cut(master, piece)
                cut.copy_(spread_within_rounding(cut, self._noise(parameter, cut, piece, step=0, draw=0)))
        self.state[parameter][_MASTER] = master

    def _ids_of(self, parameter: torch.nn.Parameter) -> ElementIds:
        if parameter not in self._ids:
            self._ids[parameter] = ElementIds(parameter, self._names[parameter])
        return self._ids[parameter]

    def _noise(
        self, parameter: torch.nn.Parameter, values: torch.Tensor, piece: slice | None, *, step: int, draw: int
    ) -> torch.Tensor:
        """Return the rounding noise of the elements of a piece, int32 in the shape of ``values``."""
        first = 0 if piece is None else piece.start
        ids = self._ids_of(parameter).of(first, values.numel(), values.device)
        bits = random_bits(ids, rounding_key(self._seed, step))
        return rounding_noise(bits, draw).view(values.shape)

    def _is_low_bit(self, parameter: torch.nn.Parameter) -> bool:
        """Return whether states are low-bit: as in torchao, for large full parameters that consist of full blocks."""
        numel = parameter.numel()
        return self._low_bit is not None and numel >= SMALLEST and numel % self._low_bit.block_size == 0

    # Steps.

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step.

        Args:
            closure: recomputes and returns the loss; called once, before the step.
        """
        with torch.enable_grad():
            loss = None if closure is None else closure()
        self._num_steps += 1
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            self._check_gradients(parameters)
            rule = find_update_rule(type(self._worker), group)
            with_rule = [parameter for parameter in parameters if self._has_rule(parameter, group)]
            for device in {parameter.device for parameter in with_rule}:
                on_device = [parameter for parameter in with_rule if parameter.device == device]
                self._step_with_rule(on_device, group, rule, device)
            parameters = [parameter for parameter in parameters if not self._has_rule(parameter, group)]
            self._step_with_worker(parameters, group)
        return loss

    def _has_rule(self, parameter: torch.nn.Parameter, group: dict[str, Any]) -> bool:
        """Return whether an update of this library's takes the steps: weights and states are rounded stochastically."""
        is_rounded = self.precision == "stochastic_rounding" and parameter.dtype == torch.bfloat16
        return is_rounded and find_update_rule(type(self._worker), group) is not None

    def _check_gradients(self, parameters: list[torch.nn.Parameter]) -> None:
        for parameter in parameters:
            if parameter.grad.is_sparse:
                raise UserError(
                    f"optimizer: the gradient of {self._names[parameter]} is sparse: set "
                    "optimizer_precision=param_dtype, or sparse=False in the embedding."
                )

    # Steps with an update of this library's.

    def _step_with_rule(
        self, parameters: list[torch.nn.Parameter], group: dict[str, Any], rule: UpdateRule, device: torch.device
    ) -> None:
        """Step parameters on ``device``, a piece at a time, so that temporary tensors stay small."""
        size = rounded_piece_size(device)  # once, because it depends on whether the step is compiled
        key = _on_device(rounding_key(self._seed, self._num_steps), torch.int32, device)
        # Parameters of the same age have the same scalars.
        by_step: dict[int, list[torch.nn.Parameter]] = {}
        for parameter in parameters:
            by_step.setdefault(self._count_step(parameter, rule), []).append(parameter)
        for step, members in by_step.items():
            scalars = _on_device(rule.scalars(group, step), torch.float32, device)
            in_place = [parameter for parameter in members if self._is_stepped_in_place(parameter, rule)]
            pieces = [piece for parameter in in_place for piece in self._storage_pieces(parameter, rule, size)]
            step_pieces(rule.function, pieces, scalars, self._origins(in_place, size, device), key)
            copied = [parameter for parameter in members if not self._is_stepped_in_place(parameter, rule)]
            origins = iter(self._origins(copied, size, device).unbind())
            for parameter in copied:
                self._step_copies(parameter, rule, scalars, key, origins, size)

    def _is_stepped_in_place(self, parameter: torch.nn.Parameter, rule: UpdateRule) -> bool:
        """Return whether the stored tensors of a parameter are runs of its elements, which an update can change."""
        if self._is_low_bit(parameter) or not self._ids_of(parameter).is_run:
            return False
        if own_part(parameter).numel() == 1:  # would be compiled for: one element is broadcast, more are not
            return False
        grad = parameter.grad
        if isinstance(grad, DTensor) and grad.placements != parameter.placements:
            return False
        stored = [own_part(parameter), own_part(grad), *(self.state[parameter][name] for name in rule.states)]
        return all(tensor.is_contiguous() for tensor in stored)

    def _storage_pieces(self, parameter: torch.nn.Parameter, rule: UpdateRule, size: int) -> list[Piece]:
        """Return the pieces of a parameter that is stepped in place."""
        weights = own_part(parameter).detach().view(-1)
        grads = own_part(parameter.grad).view(-1)
        states = [self.state[parameter][name].view(-1) for name in rule.states]
        pieces = []
        for first in range(0, weights.numel(), size):
            piece = slice(first, first + size)
            pieces.append(Piece(weights[piece], grads[piece], [state[piece] for state in states]))
        return pieces

    def _origins(self, parameters: list[torch.nn.Parameter], size: int, device: torch.device) -> torch.Tensor:
        """Return the origins of the pieces of parameters, int32 ``[pieces, 4]``, in one copy to the device."""
        origins = []
        for parameter in parameters:
            ids = self._ids_of(parameter)
            for first in range(0, own_part(parameter).numel(), size):
                origins.append([*ids.origin(first), 0, 0])
        return _on_device(origins, torch.int32, device).view(-1, 4)

    def _count_step(self, parameter: torch.nn.Parameter, rule: UpdateRule) -> int:
        """Create missing states, and return the number of this step of a parameter, as the rule counts."""
        state = self.state[parameter]
        # torch's SGD stores None for a buffer that it does not have.
        missing = [name for name in rule.states if state.get(name) is None]
        is_first = bool(missing)
        for name in missing:
            state.pop(name, None)
            if self._is_low_bit(parameter):
                self._room(parameter, name)
            else:
                state[name] = torch.zeros_like(own_part(parameter), dtype=self._storage_dtype(parameter))
        if not rule.counts_steps:
            return 1 if is_first else 2
        # The count stays in host memory: a scalar on the device would have to be read back.
        step = torch.as_tensor(state.get("step", 0.0), dtype=torch.float32).cpu() + 1
        state["step"] = step
        return int(step)

    def _step_copies(
        self,
        parameter: torch.nn.Parameter,
        rule: UpdateRule,
        scalars: torch.Tensor,
        key: torch.Tensor,
        origins: Iterator[torch.Tensor],
        size: int,
    ) -> None:
        """Step a shard whose tensors are low-bit, not contiguous, or no run; every piece takes the next origin."""
        weights = own_part(parameter).detach()
        changed = [weights]
        low_bit = [self.state[parameter][name] for name in rule.states if self._is_low_bit(parameter)]
        if not low_bit:
            changed += [self.state[parameter][name] for name in rule.states]
        # A tensor that is not contiguous is copied here, and written back at the end.
        flat = [tensor.reshape(-1) for tensor in changed]
        grads = _own_grad(parameter).reshape(-1)

        ids = self._ids_of(parameter)
        for first in range(0, weights.numel(), size):
            piece = slice(first, first + size)
            weight, *others = [tensor[piece] for tensor in flat]
            stored = [state.view(-1)[piece] for state in low_bit]
            states = others + [state.dequantize()[: weight.numel()] for state in stored]
            own_ids = None if ids.is_run else ids.of(first, weight.numel(), weight.device)
            step_piece(rule.function, Piece(weight, grads[piece], states), scalars, own_ids, next(origins), key)
            for state, values in zip(stored, states[len(others) :], strict=True):
                write_low_bit(state, values)
        for tensor, values in zip(changed, flat, strict=True):
            if not tensor.is_contiguous():
                tensor.copy_(values.view(tensor.shape))

    # Steps of any other optimizer.

    def _step_with_worker(self, parameters: list[torch.nn.Parameter], group: dict[str, Any]) -> None:
        settings = result = {**group, "fused": True} if self._is_fused(group) else group
        for parameter in parameters:
            result = self._step_parameter(parameter, settings)
        group.update({key: value for key, value in result.items() if key not in ("params", "fused")})

    def _is_fused(self, group: dict[str, Any]) -> bool:
        """Return whether torch's fused kernel takes the step: it can, and the user has not disabled it."""
        others = any(map(group.get, ("foreach", "capturable", "differentiable")))
        return type(self._worker) in _FUSABLE and group.get("fused") is not False and not others

    def _step_parameter(self, parameter: torch.nn.Parameter, settings: dict[str, Any]) -> dict[str, Any]:
        """Step a parameter; return the settings of its group after the step."""
        weights, grads, states = own_part(parameter).detach(), _own_grad(parameter), self.state[parameter]
        before = dict(states)  # every piece starts from the same scalars
        masters = before.pop(_MASTER, weights)
        for piece in self._pieces(weights):
            weight, master, grad = _cut(weights, piece), _cut(masters, piece), _cut(grads, piece)
            stored, state = {}, {}
            for key, item in before.items():
                if is_low_bit(item) or _per_element(item, weights):
                    stored[key] = _cut(item, piece)
                    state[key] = self._stand_in(parameter, stored[key], weight)
                else:
                    state[key] = item.clone() if isinstance(item, torch.Tensor) else item
            value, has_scale = self._stand_in(parameter, master, weight), grad.dtype == torch.float16
            grad = self._stand_in(parameter, grad, weight)
            if has_scale and self.loss_scale != 1.0:
                grad = grad / self.loss_scale
            result, state = self._run(dict(settings), value, grad, state)
            self._store(parameter, master, value, piece, draw=0)
            if masters is not weights:
                weight.copy_(master)
            for draw, (key, item) in enumerate(sorted(state.items()), start=1):
                if not _per_element(item, value):
                    states[key] = item
                else:
                    into = stored[key] if key in stored else _cut(self._room(parameter, key), piece)
                    self._store(parameter, into, item, piece, draw)
        return result

    def _pieces(self, weights: torch.Tensor) -> list[slice | None]:
        """Return the slices to step one after another; None stands for the whole tensor in its own shape."""
        size = piece_size(weights.device)
        if not self._elementwise or not weights.is_contiguous() or weights.numel() <= size:
            return [None]
        return [slice(start, start + size) for start in range(0, weights.numel(), size)]

    def _stand_in(self, parameter: torch.nn.Parameter, stored: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """Return a stored tensor in float32, in the shape of ``like``: itself if it is float32, or a copy."""
        if is_low_bit(stored):
            return stored.dequantize()[: like.numel()].view(like.shape)
        wide = (stored.float() if stored.dtype in HALF else stored).contiguous()
        return wide if self._elementwise else _gathered(wide, parameter)

    def _store(
        self, parameter: torch.nn.Parameter, stored: torch.Tensor, new: torch.Tensor, piece: slice | None, draw: int
    ) -> None:
        """Write the values of a stand-in after the step back to the stored tensor; see :func:`rounding_noise`."""
        if new is stored:
            return
        if is_low_bit(stored):
            write_low_bit(stored, new)
            return
        if not self._elementwise and isinstance(parameter, DTensor):
            new = distribute_tensor(new, parameter.device_mesh, parameter.placements, src_data_rank=None).to_local()
        if self.precision == "stochastic_rounding" and stored.dtype == torch.bfloat16:
            noise = self._noise(parameter, new, piece, step=self._num_steps, draw=draw)
            new = round_to_bfloat16(new.contiguous(), noise)
        stored.copy_(new)

    def _run(
        self, settings: dict[str, Any], value: torch.Tensor, grad: torch.Tensor, state: dict[str, Any]
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Step ``value`` in place; return the settings and the state after the step."""
        value.grad = grad
        settings["params"] = [value]
        self._worker.param_groups = [settings]
        self._worker.state[value] = state
        self._worker.step()
        self._worker.param_groups, value.grad = [], None
        return settings, self._worker.state.pop(value)

    # State dicts.

    def _storage_dtype(self, parameter: torch.nn.Parameter) -> torch.dtype:
        in_float32 = self.precision == "fp32_master" and parameter.dtype in HALF
        return torch.float32 if in_float32 else parameter.dtype

    def _room(self, parameter: torch.nn.Parameter, key: str) -> torch.Tensor:
        """Return the stored state; a new one is uninitialized."""
        state, own = self.state[parameter], own_part(parameter)
        if key not in state and self._is_low_bit(parameter):
            state[key] = self._low_bit.zeros(own.numel(), own.device, signed=key == "exp_avg")
        elif key not in state:
            state[key] = torch.empty_like(own, dtype=self._storage_dtype(parameter), requires_grad=False)
        return state[key]

    def state_dict(self) -> dict[str, Any]:
        """Return all values besides the weights that the next step depends on.

        Returns:
            ``state``: states by parameter name; ``param_groups``: settings, with names as ``params``;
            ``precision``: mode, format of the stored states, seed of the rounding and number of steps.
        """
        return {
            "state": {self._names[p]: _plain_tensors(p, state) for p, state in self.state.items()},
            "param_groups": [
                {**group, "params": [self._names[p] for p in group["params"]]} for group in self.param_groups
            ],
            "precision": {
                "mode": self.precision,
                "seed": self._seed,
                "step": self._num_steps,
                "rounding": _ROUNDING,
                **({"states": self.state_format} if self.state_format else {}),
            },
        }

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a ``state_dict`` of this class, of another precision or of a plain optimizer.

        Raises:
            OptimizerStateError: groups or names do not fit. Nothing is loaded then.
        """
        check_state_format(self, state_dict)
        groups, states = state_dict["param_groups"], state_dict["state"]
        mine = [len(group["params"]) for group in self.param_groups]
        theirs = [len(group["params"]) for group in groups]
        if mine != theirs:
            raise OptimizerStateError(
                f"The saved optimizer state has groups of {theirs} parameters and this optimizer of {mine}: resume "
                "with the optimizer and the trained parameters of the saved run."
            )
        found: dict[torch.nn.Parameter, dict[str, Any]] = {}
        for group, saved in zip(self.param_groups, groups, strict=True):
            by_name = {self._names[p]: p for p in group["params"]}
            for parameter, key in zip(group["params"], saved["params"], strict=True):
                if isinstance(key, str) and key not in by_name:
                    raise OptimizerStateError(
                        f"The saved optimizer state is about {key}, which this run does not train: resume with the "
                        "trained parameters of the saved run."
                    )
                found[by_name.get(key, parameter)] = dict(states.get(key, {}))
        self.state.clear()
        for group, saved in zip(self.param_groups, groups, strict=True):
            group.update({key: value for key, value in saved.items() if key != "params"})
            for parameter in group["params"]:
                counts_on_device = self._is_fused(group) and not self._has_rule(parameter, group)
                self._load_parameter(parameter, found[parameter], counts_on_device)
        precision = state_dict.get("precision", {})
        self._seed = int(precision.get("seed", self._seed))
        self._num_steps = int(precision.get("step", self._num_steps))
        if precision.get("mode") == "stochastic_rounding" == self.precision and precision.get("rounding") != _ROUNDING:
            log_once(
                get_logger(),
                "The optimizer state was saved by a release with another random generator for stochastic rounding: the "
                "run continues with other draws, which are as valid.",
            )
        if (mode := precision.get("mode", "param_dtype")) != self.precision:
            get_logger().warning(
                f"The optimizer state was saved with precision {mode} and goes on with {self.precision}."
            )

    def _load_parameter(self, parameter: torch.nn.Parameter, saved: dict[str, Any], counts_on_device: bool) -> None:
        self._make_master(parameter)
        state = self.state[parameter]
        if (master := saved.pop(_MASTER, None)) is not None:
            own_part(state.get(_MASTER, parameter.detach())).copy_(own_part(master))
        for key in [name.removesuffix(_CODES) for name in saved if name.endswith(_CODES)]:
            stored = self._room(parameter, key)
            for name, own in ((key + _CODES, stored.codes.view(torch.uint8)), (key + _SCALE, stored.scale)):
                own.copy_(own_part(saved.pop(name)).reshape(-1)[: own.numel()])
        for key, value in saved.items():
            value = own_part(value)
            if isinstance(value, torch.Tensor) and (key != "step" or counts_on_device):
                value = value.to(parameter.device)
            is_kept = _per_element(value, own_part(parameter))
            state[key] = value.to(self._storage_dtype(parameter)) if is_kept else value


def is_low_bit(state: object) -> bool:
    """Return whether a state is a low-bit tensor of torchao."""
    return hasattr(state, "codes")


def write_low_bit(state: torch.Tensor, values: torch.Tensor) -> None:
    """Store float32 ``values`` in ``state``, which may be longer: its last block is padded with zeros."""
    values = torch.nn.functional.pad(values.reshape(-1), (0, state.numel() - values.numel()))
    if not hasattr(state, "qmap"):  # fp8: a cast
        state.copy_(values)
        return
    blocks = values.view(len(state.scale), -1)
    scale = blocks.abs().amax(-1).clamp_(min=1e-12)
    middles = (state.qmap[1:] - state.qmap[:-1]) * 0.5 + state.qmap[:-1]
    codes = torch.bucketize((blocks / scale[:, None]).view(-1), middles, right=True, out_int32=True).to(torch.uint8)
    state.codes.copy_(codes if len(state.codes) == len(codes) else codes[::2] << 4 | codes[1::2])
    state.scale.copy_(scale)


def _on_device(values: Any, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Copy numbers to a device. From pinned memory, the host does not wait for the copy."""
    tensor = torch.tensor(values, dtype=dtype)
    if device.type == "cuda" and not is_simulated():
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def _cut(tensor: torch.Tensor, piece: slice | None) -> torch.Tensor:
    return tensor if piece is None else tensor.view(-1)[piece]


def _per_element(value: Any, like: torch.Tensor) -> bool:
    """Return whether ``value`` has one number per element; quantized states and factors are stored unchanged."""
    return (
        isinstance(value, torch.Tensor)
        and not hasattr(value, "__tensor_flatten__")
        and value.shape == like.shape
        and value.dim() > 0
        and value.is_floating_point()
    )


def _own_grad(parameter: torch.nn.Parameter) -> torch.Tensor:
    """Return the gradient of this rank's shard."""
    grad = parameter.grad
    if isinstance(grad, DTensor) and grad.placements != parameter.placements:
        grad = grad.redistribute(placements=parameter.placements)  # reduces partial sums
    return own_part(grad).contiguous()


def _gathered(shard: torch.Tensor, parameter: torch.nn.Parameter) -> torch.Tensor:
    """All-gather a shard of a tensor sharded like ``parameter``."""
    if not isinstance(parameter, DTensor):
        return shard
    shape, stride = parameter.shape, parameter.stride()
    mesh, placements = parameter.device_mesh, parameter.placements
    return DTensor.from_local(shard, mesh, placements, run_check=False, shape=shape, stride=stride).full_tensor()


def _plain_tensors(parameter: torch.nn.Parameter, state: dict[str, Any]) -> dict[str, Any]:
    """Return a state with low-bit tensors as plain tensors; tensors of shards are stacked."""
    grid, found = ShardGrid.of(parameter), {}
    for key, value in state.items():
        if not is_low_bit(value):
            found[key] = value
            continue
        blocks = -(-grid.longest(parameter) // value.block_size)
        codes = value.codes.view(torch.uint8)
        found[key + _CODES] = grid.stack(codes, parameter, blocks * codes.numel() // value.scale.numel())
        found[key + _SCALE] = grid.stack(value.scale, parameter, blocks)
    return found


def adopt_masters(optimizer: Optimizer) -> None:
    """Move ``master`` of a loaded state into the float32 parameters, which need no separate master weights."""
    for parameter, state in optimizer.state.items():
        if (master := state.pop(_MASTER, None)) is not None:
            parameter.detach().copy_(master)


def check_state_format(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
    """Raise ``OptimizerStateError`` if the states of a state dict have another format than ``optimizer``'s."""
    saved = state_dict.get("precision", {}).get("states")
    own = getattr(optimizer, "state_format", None)
    if saved != own and state_dict.get("state"):
        raise OptimizerStateError(
            f"The saved optimizer has {saved or 'plain'} states and this run's has {own or 'plain'} ones: resume with "
            "the optimizer of the saved run."
        )

"""Optimizer steps computed in float32 for weights that are kept in 16 bits.

Any optimizer of ``torch.optim`` is run, unchanged, on float32 stand-ins of a bounded number of parameters at a
time; what it leaves in them goes back into the stored weights and states. The two classes here differ in what is
stored between steps.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from torchtune.training.optim._stochastic_rounding import (
    RandomBits,
    chunk_size,
    merge_neighbours,
    round_stochastically_,
    shares_storage,
    spread_within_rounding_,
)
from torchtune.training.parallel._shards import own_part, shard_key
from torchtune.utils import UserError, get_logger

# Their update of an element depends on that element and on scalars alone, so a parameter may be cut into pieces.
_ELEMENTWISE = {
    getattr(torch.optim, name)
    for name in "ASGD Adadelta Adagrad Adam AdamW Adamax NAdam RAdam RMSprop Rprop SGD".split()
}
_FUSABLE = {torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD}
_HALF = (torch.bfloat16, torch.float16)
_ABSENT = object()


class OptimizerStateError(UserError, ValueError):
    """The state of an optimizer that does not fit the optimizer that it is loaded into."""


@dataclass(frozen=True, eq=False)
class _Piece:
    """Elements ``start`` to ``stop`` of a parameter; ``stop`` is None for the whole one, in its own shape."""

    parameter: torch.nn.Parameter
    start: int = 0
    stop: int | None = None

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same elements of a tensor that is shaped like the parameter, or like its shard on this rank."""
        return own_part(tensor) if self.stop is None else own_part(tensor).view(-1)[self.start : self.stop]

    @property
    def numel(self) -> int:
        return own_part(self.parameter).numel() if self.stop is None else self.stop - self.start


class _Scratch:
    """float32 memory for the stand-ins of one batch, used again for the next one."""

    def __init__(self, device: torch.device, numel: int) -> None:
        self._block = torch.empty(numel, dtype=torch.float32, device=device)
        self._used = 0

    def reset(self) -> None:
        self._used = 0

    def copy(self, source: torch.Tensor) -> torch.Tensor:
        """A contiguous float32 copy of ``source``."""
        start, self._used = self._used, self._used + source.numel()
        if self._used > self._block.numel():
            return torch.empty(source.shape, dtype=torch.float32, device=source.device).copy_(source)
        return self._block[start : self._used].view(source.shape).copy_(source)


class LowPrecisionOptimizer(Optimizer, ABC):
    """Base of the optimizers below: has the groups of ``optimizer`` and steps with its class.

    Of sharded parameters each rank steps its own shards, which only an elementwise optimizer may do.

    Args:
        optimizer: a fresh optimizer over 16-bit (and perhaps float32) parameters; it belongs to this one from now on.
        names: name of every parameter; the state dict is keyed by it.
    """

    precision: str

    def __init__(self, optimizer: Optimizer, names: dict[torch.nn.Parameter, str]) -> None:
        self._names = names
        self._worker = optimizer
        self._elementwise = type(optimizer) in _ELEMENTWISE
        if not self._elementwise and any(own_part(parameter) is not parameter for parameter in names):
            raise UserError(
                f"optimizer: {type(optimizer).__name__} looks at whole matrices, of which a rank has shards: use an "
                "elementwise one such as torch.optim.AdamW, or set optimizer_precision=param_dtype."
            )
        super().__init__(optimizer.param_groups, optimizer.defaults)
        for parameter, state in optimizer.state.items():
            for key, value in state.items():
                self.state[parameter][key] = self._to_storage(parameter, value)
        optimizer.state.clear()
        for hooks in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
            getattr(self, hooks).update(getattr(optimizer, hooks))
            getattr(optimizer, hooks).clear()

    # What is stored, and how it is read and written: the two classes below.

    @abstractmethod
    def _storage_dtype(self, parameter: torch.nn.Parameter) -> torch.dtype:
        """Type in which states of ``parameter`` are stored."""

    @abstractmethod
    def _read_parameter(self, piece: _Piece, scratch: _Scratch) -> torch.Tensor:
        """float32 stand-in of the weights."""

    @abstractmethod
    def _read_state(self, stored: torch.Tensor, scratch: _Scratch) -> torch.Tensor:
        """float32 stand-in of a state."""

    def _settle(self, values: list[torch.Tensor]) -> list[torch.Tensor]:
        """Make float32 values fit to be cast to what is stored; they may be overwritten."""
        return values

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step.

        Args:
            closure: computes the loss again and returns it; called once, before the step.
        """
        with torch.enable_grad():
            loss = None if closure is None else closure()
        self._begin_step()
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            for parameter in parameters:
                if parameter.grad.is_sparse:
                    raise UserError(
                        f"optimizer: the gradient of {self._names[parameter]} is sparse: set "
                        "optimizer_precision=param_dtype, or sparse=False in the embedding."
                    )
            self._step_group(group, parameters)
        return loss

    def _begin_step(self) -> None:
        """Called at the start of every step."""

    def _begin_shard(self, shard: str) -> None:
        """Called before this rank's shards of that key are stepped."""

    def _step_group(self, group: dict[str, Any], parameters: list[torch.nn.Parameter]) -> None:
        settings = {**group, "fused": True} if self._is_fused(group) else group
        result = settings
        full = [p for p in parameters if p.dtype not in _HALF]
        if full:
            result = self._run(dict(settings), full, [p.grad for p in full], [self.state[p] for p in full])
        # All pieces of a parameter start from the same scalars, so these are stored when the last one is done
        updated = {p: {} for p in parameters if p.dtype in _HALF}
        before = {p: dict(self.state[p]) if p in self.state else {} for p in updated}
        kinds: dict[tuple[torch.device, str], list[torch.nn.Parameter]] = {}
        for parameter in updated:
            kinds.setdefault((parameter.device, shard_key(parameter)), []).append(parameter)
        for (device, shard), halves in kinds.items():
            self._begin_shard(shard)
            self._make_room([p for p in halves if not before[p]], settings)
            # A parameter, its gradient and two states of a chunk at a time
            scratch = _Scratch(device, 4 * min(chunk_size(device), sum(own_part(p).numel() for p in halves)))
            for batch in self._batches(halves, chunk_size(device)):
                result = self._step_batch(dict(settings), batch, scratch, before, updated)
        for parameter, scalars in updated.items():
            self.state[parameter].update(scalars)
        own = {"params", "fused"}
        group.update({key: value for key, value in result.items() if key not in own})

    def _make_room(self, fresh: list[torch.nn.Parameter], settings: dict[str, Any]) -> None:
        """Allocate the states of parameters that step for the first time before the temporaries of that step.

        Lasting tensors among these would leave holes. Which states there will be, a step on a single number tells.
        """
        if not fresh or not self._elementwise:
            return
        probe, state = torch.zeros(1, device=fresh[0].device), {}
        self._run(dict(settings), [probe], [torch.zeros_like(probe)], [state])
        keys = [key for key, value in state.items() if self._per_element(probe, value)]
        for parameter in fresh:
            for key in keys:
                self.state[parameter][key] = self._empty_state(parameter)

    def _is_fused(self, group: dict[str, Any]) -> bool:
        """Whether torch's fused kernel takes the step: where it can, unless the user said otherwise."""
        if type(self._worker) not in _FUSABLE or group.get("fused") is False or group.get("foreach"):
            return False
        return not group.get("capturable") and not group.get("differentiable")

    def _batches(self, parameters: list[torch.nn.Parameter], limit: int) -> Iterator[list[_Piece]]:
        """Batches of at most ``limit`` elements; a parameter that cannot be cut makes a batch of its own if larger."""
        batch: list[_Piece] = []
        room = limit
        for parameter in parameters:
            own = own_part(parameter)
            cut = self._elementwise and own.is_contiguous() and own.numel() > limit
            starts = range(0, own.numel(), limit)
            cuts = [_Piece(parameter, start, min(start + limit, own.numel())) for start in starts]
            pieces = cuts if cut else [_Piece(parameter)]
            for piece in pieces:
                if piece.numel > room and batch:
                    yield batch
                    batch, room = [], limit
                batch.append(piece)
                room -= piece.numel
        if batch:
            yield batch

    def _step_batch(
        self,
        settings: dict[str, Any],
        batch: list[_Piece],
        scratch: _Scratch,
        before: dict[torch.nn.Parameter, dict[str, Any]],
        updated: dict[torch.nn.Parameter, dict[str, Any]],
    ) -> dict[str, Any]:
        scratch.reset()
        values = [self._read_parameter(piece, scratch) for piece in batch]
        grads = [scratch.copy(piece.of(_like(piece.parameter.grad, piece.parameter))) for piece in batch]
        states = self._stand_in_states(batch, before, scratch)
        settings = self._run(settings, values, grads, states)
        for piece, value in zip(batch, self._settle(values), strict=True):
            piece.of(piece.parameter.detach()).copy_(value)
        for key in {key: None for state in states for key in state}:
            per_element = []
            for piece, value, state in zip(batch, values, states, strict=True):
                if key in state and self._per_element(value, state[key]):
                    per_element.append((piece, state[key]))
                elif key in state:
                    updated[piece.parameter][key] = state[key]
            self._store_states(key, per_element)
        return settings

    def _stand_in_states(
        self, batch: list[_Piece], before: dict[torch.nn.Parameter, dict[str, Any]], scratch: _Scratch
    ) -> list[dict[str, Any]]:
        states: list[dict[str, Any]] = [{} for _ in batch]
        for key in {key: None for piece in batch for key in before[piece.parameter]}:
            for piece, state in zip(batch, states, strict=True):
                stored = before[piece.parameter].get(key, _ABSENT)
                if stored is _ABSENT:
                    continue
                if self._per_element(piece.parameter, stored):
                    state[key] = self._read_state(piece.of(stored), scratch)
                else:
                    cut = isinstance(stored, torch.Tensor) and piece.stop is not None
                    state[key] = stored.clone() if cut else stored
        return states

    def _store_states(self, key: str, new: list[tuple[_Piece, torch.Tensor]]) -> None:
        values = self._settle([value for _, value in new])
        for (piece, _), value in zip(new, values, strict=True):
            state = self.state[piece.parameter]
            if key not in state:
                state[key] = self._empty_state(piece.parameter)
            stored = piece.of(state[key])
            if not shares_storage(stored, value):
                stored.copy_(value)

    @staticmethod
    def _per_element(parameter: torch.Tensor, value: Any) -> bool:
        """Whether ``value`` holds one number per element; quantised states and factors are kept as they come."""
        return (
            isinstance(value, torch.Tensor)
            and not hasattr(value, "__tensor_flatten__")
            and value.shape == own_part(parameter).shape
            and value.dim() > 0
            and value.is_floating_point()
        )

    def _run(
        self,
        settings: dict[str, Any],
        values: list[torch.Tensor],
        grads: list[torch.Tensor],
        states: list[dict[str, Any]],
    ) -> dict[str, Any]:
        """Let the optimizer step ``values`` in place, with their states; returns the group as it left it."""
        for value, grad in zip(values, grads, strict=True):
            value.grad = grad
        settings["params"] = values
        self._worker.param_groups = [settings]
        self._worker.state.clear()
        self._worker.state.update(zip(values, states, strict=True))
        self._worker.step()
        for value, state in zip(values, states, strict=True):
            if (made := self._worker.state[value]) is not state:
                state.update(made)
            if not isinstance(value, torch.nn.Parameter):
                value.grad = None
        self._worker.state.clear()
        self._worker.param_groups = []
        return settings

    # State dicts.

    def _empty_state(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        return torch.empty_like(own_part(parameter), dtype=self._storage_dtype(parameter), requires_grad=False)

    def _to_storage(self, parameter: torch.nn.Parameter, value: Any) -> Any:
        value = own_part(value) if isinstance(value, torch.Tensor) and parameter.dtype in _HALF else value
        if parameter.dtype in _HALF and self._per_element(parameter, value):
            return value.to(self._storage_dtype(parameter))
        return value

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next step depends on besides the weights.

        Returns:
            ``state``: states by parameter name; ``param_groups``: settings, with names as ``params``;
            ``precision``: what was stored and how.
        """
        return {
            "state": {self._names[p]: dict(state) for p, state in self.state.items()},
            "param_groups": [
                {**group, "params": [self._names[p] for p in group["params"]]} for group in self.param_groups
            ],
            "precision": {"mode": self.precision},
        }

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what ``state_dict`` of this class, of another precision or of a plain optimizer returned.

        Raises:
            OptimizerStateError: groups or names do not fit; nothing was loaded then.
        """
        groups = state_dict["param_groups"]
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
                if isinstance(key, str):
                    if key not in by_name:
                        raise OptimizerStateError(
                            f"The saved optimizer state is about {key}, which this run does not train: resume with the "
                            "trained parameters of the saved run."
                        )
                    parameter = by_name[key]
                found[parameter] = dict(state_dict["state"].get(key, {}))
        for group, saved in zip(self.param_groups, groups, strict=True):
            group.update({key: value for key, value in saved.items() if key != "params"})
        self.state.clear()
        for group in self.param_groups:
            for parameter in group["params"]:
                self._load_parameter(parameter, found[parameter], self._is_fused(group))
        mode = state_dict.get("precision", {}).get("mode", "param_dtype")
        if mode != self.precision:
            get_logger().warning(
                f"The optimizer state was saved with precision {mode} and goes on with {self.precision}."
            )

    def _load_parameter(self, parameter: torch.nn.Parameter, state: dict[str, Any], fused: bool) -> None:
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and (key != "step" or fused):
                value = value.to(parameter.device)
            self.state[parameter][key] = self._to_storage(parameter, value)


def _like(grad: torch.Tensor, parameter: torch.nn.Parameter) -> torch.Tensor:
    """``grad`` laid out as ``parameter`` is, so that a piece of one is a piece of the other."""
    if hasattr(grad, "device_mesh") and grad.placements != parameter.placements:
        grad = grad.redistribute(placements=parameter.placements)  # ranks may hold summands of it
    grad, parameter = own_part(grad), own_part(parameter)
    return grad if grad.is_contiguous() or not parameter.is_contiguous() else grad.contiguous()


class StochasticRoundingOptimizer(LowPrecisionOptimizer):
    """Weights and states stay bfloat16; what is written back is rounded stochastically.

    Between steps nothing is kept beyond plain bfloat16 training. The rounding depends on (seed, step) alone, so a
    run that resumes continues bit for bit. Different shards are rounded with independent numbers and replicas of a
    shard with the same ones: another mesh rounds otherwise, and as well.

    All states are: to nearest, even the fast mean of a constant gradient stops 2 to 15 % short.

    Args:
        optimizer: a fresh optimizer.
        names: name of every parameter.
        seed: of the rounding.
    """

    precision = "stochastic_rounding"

    def __init__(self, optimizer: Optimizer, names: dict[torch.nn.Parameter, str], seed: int) -> None:
        super().__init__(optimizer, names)
        self._seed = seed
        self._num_steps = 0
        self._stream = names[self.param_groups[0]["params"][0]]
        self._bits_of: dict[str, RandomBits] = {}  # of this step, by shard
        self._bits = RandomBits(seed, self._stream, 0)

    def _begin_step(self) -> None:
        self._num_steps += 1
        self._bits_of.clear()

    def _begin_shard(self, shard: str) -> None:
        # Replicas of a shard must draw the same, so nothing else is drawn from its source.
        if shard not in self._bits_of:
            self._bits_of[shard] = RandomBits(self._seed, f"{self._stream} {shard}", self._num_steps)
        self._bits = self._bits_of[shard]

    def _storage_dtype(self, parameter: torch.nn.Parameter) -> torch.dtype:
        return parameter.dtype

    def _read_parameter(self, piece: _Piece, scratch: _Scratch) -> torch.Tensor:
        return scratch.copy(piece.of(piece.parameter.detach()))

    def _read_state(self, stored: torch.Tensor, scratch: _Scratch) -> torch.Tensor:
        return scratch.copy(stored)

    def _settle(self, values: list[torch.Tensor]) -> list[torch.Tensor]:
        values = [value.contiguous() for value in values]
        for run in merge_neighbours(values):
            round_stochastically_(run, self._bits)
        return values

    def state_dict(self) -> dict[str, Any]:
        """As in the base class; ``precision`` also holds the seed and the number of steps."""
        state = super().state_dict()
        return state | {"precision": {**state["precision"], "seed": self._seed, "step": self._num_steps}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As in the base class; the rounding goes on where it was."""
        super().load_state_dict(state_dict)
        saved = state_dict.get("precision", {})
        self._seed = int(saved.get("seed", self._seed))
        self._num_steps = int(saved.get("step", self._num_steps))


class MasterWeightsOptimizer(LowPrecisionOptimizer):
    """Keeps weights and states in float32 beside the 16-bit weights of the model: 12 more bytes a parameter with Adam
    than its 2 bytes of weight, but every update counts in full.

    A bfloat16 weight says no more than that the weight lies between two bounds. The float32 weight starts at a random
    place between them, not in the middle: from the middle, no rounded weight would change until its updates add up
    to half a spacing, and the model would stand still for the first tens of steps of a small learning rate.

    Args:
        optimizer: a fresh optimizer.
        names: name of every parameter.
        seed: of those places.
    """

    precision = "fp32_master"

    def __init__(self, optimizer: Optimizer, names: dict[torch.nn.Parameter, str], seed: int) -> None:
        self._masters: dict[torch.nn.Parameter, torch.Tensor] = {}
        self._seed = seed
        super().__init__(optimizer, names)

    def _make_master(self, parameter: torch.nn.Parameter) -> None:
        if parameter.dtype not in _HALF:
            return
        master = own_part(parameter).detach().float().contiguous()
        if parameter.dtype == torch.bfloat16 and not parameter.is_meta:
            stream = f"{self._names[parameter]} {shard_key(parameter)}"
            spread_within_rounding_(master, RandomBits(self._seed, stream, 0))
        self._masters[parameter] = master

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in torch; the new parameters get float32 weights too."""
        super().add_param_group(param_group)
        for parameter in self.param_groups[-1]["params"]:
            self._make_master(parameter)

    def _storage_dtype(self, parameter: torch.nn.Parameter) -> torch.dtype:
        return torch.float32

    def _read_parameter(self, piece: _Piece, scratch: _Scratch) -> torch.Tensor:
        return piece.of(self._masters[piece.parameter])

    def _read_state(self, stored: torch.Tensor, scratch: _Scratch) -> torch.Tensor:
        return stored

    def state_dict(self) -> dict[str, Any]:
        """As in the base class; every state also holds the float32 weight as ``master``."""
        state = super().state_dict()
        for parameter, master in self._masters.items():
            state["state"].setdefault(self._names[parameter], {})["master"] = master
        return state

    def _load_parameter(self, parameter: torch.nn.Parameter, state: dict[str, Any], fused: bool) -> None:
        master = state.pop("master", None)
        self._make_master(parameter)
        if master is not None and parameter in self._masters:
            self._masters[parameter].copy_(own_part(master))
        super()._load_parameter(parameter, state, fused)

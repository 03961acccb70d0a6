"""Optimizer steps computed in float32 for weights that are kept in 16 bits.

Any optimizer of ``torch.optim`` is run, unchanged, on float32 stand-ins of a bounded number of parameters at a
time; what it leaves in them goes back into the stored weights and states. The classes in ``_precisions`` differ in what
is stored between steps.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.optim import Optimizer

from torchtune.modules._torchao import StateFormat
from torchtune.training.optim._low_bit_states import SMALLEST, LowBitState
from torchtune.training.optim._stand_ins import Piece, Scratch, grad_like, own_slice, whole
from torchtune.training.optim._stochastic_rounding import chunk_size, shares_storage
from torchtune.training.parallel._shards import ShardGrid, own_part, shard_key
from torchtune.utils import UserError, get_logger, log_rank_zero

# Their update of an element depends on that element and on scalars alone, so a parameter may be cut into pieces.
_ELEMENTWISE = {
    getattr(torch.optim, name)
    for name in "ASGD Adadelta Adagrad Adam AdamW Adamax NAdam RAdam RMSprop Rprop SGD".split()
}
_FUSABLE = {torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD}
HALF = (torch.bfloat16, torch.float16)
_ABSENT = object()
# Names in a state dict of the two tensors of a low-bit state.
_CODES, _SCALE = " codes", " scale"


def is_elementwise(optimizer: Optimizer) -> bool:
    """Whether a step of an element is known to depend on that element and on scalars alone."""
    return type(optimizer) in _ELEMENTWISE


def looks_at_matrices(optimizer: Optimizer) -> bool:
    """Whether it is one of torch's that is not elementwise, such as Muon."""
    return type(optimizer).__module__.startswith("torch.optim.") and not is_elementwise(optimizer)


class OptimizerStateError(UserError, ValueError):
    """The state of an optimizer that does not fit the optimizer that it is loaded into."""


class LowPrecisionOptimizer(Optimizer, ABC):
    """Base of the optimizers below: has the groups of ``optimizer`` and steps with its class.

    Of sharded parameters each rank steps its own shards if the optimizer is elementwise. Any other, such as Muon, is
    given whole matrices, one at a time, and every rank keeps its shard of the result.

    Attributes:
        state_format: ``8bit``, ``4bit``, ``fp8`` where states of large parameters are stored so, else None.

    Args:
        optimizer: a fresh optimizer over 16-bit (and perhaps float32) parameters; it belongs to this one from now on.
        names: name of every parameter; the state dict is keyed by it.
        low_bit: how states are stored, if not in the precision of the class; for elementwise optimizers.
    """

    precision: str

    def __init__(
        self, optimizer: Optimizer, names: dict[torch.nn.Parameter, str], low_bit: StateFormat | None = None
    ) -> None:
        self._names = names
        self._worker = optimizer
        self._elementwise = is_elementwise(optimizer)
        self._low_bit = low_bit
        self.state_format = low_bit and low_bit.name
        super().__init__(optimizer.param_groups, optimizer.defaults)
        for parameter, state in optimizer.state.items():
            for key, value in state.items():
                self.state[parameter][key] = self._to_storage(parameter, value)
        optimizer.state.clear()
        if low_bit is not None:
            self._say_what_stays()
        for hooks in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
            getattr(self, hooks).update(getattr(optimizer, hooks))
            getattr(optimizer, hooks).clear()

    # What is stored, and how it is read and written: the two classes below.

    @abstractmethod
    def _storage_dtype(self, parameter: torch.nn.Parameter) -> torch.dtype:
        """Type in which states of ``parameter`` are stored."""

    @abstractmethod
    def _read_parameter(self, piece: Piece, scratch: Scratch) -> torch.Tensor:
        """float32 stand-in of the weights."""

    @abstractmethod
    def _read_state(self, stored: torch.Tensor, scratch: Scratch) -> torch.Tensor:
        """float32 stand-in of a state."""

    def _settle(self, values: list[torch.Tensor]) -> list[torch.Tensor]:
        """Make float32 values fit to be cast to what is stored; they may be overwritten."""
        return values

    def _has_stand_ins(self, parameter: torch.nn.Parameter) -> bool:
        """Whether the optimizer is given stand-ins of a parameter, its shard or its states; else it steps in place."""
        if parameter.dtype in HALF or self._is_low_bit(parameter):
            return True
        return not self._elementwise and own_part(parameter) is not parameter

    def _is_low_bit(self, parameter: torch.nn.Parameter) -> bool:
        """Whether states are stored in few bits: as in torchao, where the whole parameter is large, in full blocks."""
        numel = parameter.numel()
        return self._low_bit is not None and numel >= SMALLEST and numel % self._low_bit.block_size == 0

    def _say_what_stays(self) -> None:
        """Say which states are not stored in few bits, as a setting promised."""
        all_of = [parameter for group in self.param_groups for parameter in group["params"]]
        stay = [parameter for parameter in all_of if not self._is_low_bit(parameter)]
        if stay:
            # Two states of an element, as those optimizers have that torchao offers.
            size = sum(2 * p.numel() * self._storage_dtype(p).itemsize for p in stay)
            log_rank_zero(
                get_logger(),
                f"Optimizer: states of {len(stay)} of {len(all_of)} parameters are not stored as "
                f"{self._low_bit.name} ({size / 2**20:.1f} MiB over all ranks): these have fewer than {SMALLEST:,} "
                f"elements, or no multiple of {self._low_bit.block_size}.",
            )

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
        self._end_step()
        return loss

    def _begin_step(self) -> None:
        """Called at the start of every step."""

    def _end_step(self) -> None:
        """Called at the end of every step: what only a step needs does not outlive it."""

    def _begin_shard(self, shard: str, dtype: torch.dtype) -> None:
        """Called before this rank's shards of that key and dtype are stepped."""

    def _step_group(self, group: dict[str, Any], parameters: list[torch.nn.Parameter]) -> None:
        settings = {**group, "fused": True} if self._is_fused(group) else group
        result = settings
        full = [p for p in parameters if not self._has_stand_ins(p)]
        if full:
            result = self._run(dict(settings), full, [p.grad for p in full], [self.state[p] for p in full])
        # All pieces of a parameter start from the same scalars, so these are stored when the last one is done
        updated = {p: {} for p in parameters if self._has_stand_ins(p)}
        before = {p: dict(self.state[p]) if p in self.state else {} for p in updated}
        kinds: dict[tuple[torch.device, str, torch.dtype], list[torch.nn.Parameter]] = {}
        for parameter in updated:
            kinds.setdefault((parameter.device, shard_key(parameter), parameter.dtype), []).append(parameter)
        for (device, shard, dtype), halves in kinds.items():
            self._begin_shard(shard, dtype)
            self._make_room([p for p in halves if not before[p]], settings)
            # A parameter, its gradient and two states of a chunk at a time
            scratch = Scratch(device, 4 * min(chunk_size(device), sum(own_part(p).numel() for p in halves)))
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
                self.state[parameter][key] = self._empty_state(parameter, key)

    def _is_fused(self, group: dict[str, Any]) -> bool:
        """Whether torch's fused kernel takes the step: where it can, unless the user said otherwise."""
        if type(self._worker) not in _FUSABLE or group.get("fused") is False or group.get("foreach"):
            return False
        return not group.get("capturable") and not group.get("differentiable")

    def _batches(self, parameters: list[torch.nn.Parameter], limit: int) -> Iterator[list[Piece]]:
        """Batches of at most ``limit`` elements; a parameter that cannot be cut makes a batch of its own if larger."""
        batch: list[Piece] = []
        room = limit
        for parameter in parameters:
            own = own_part(parameter)
            cut = self._elementwise and own.is_contiguous() and own.numel() > limit
            starts = range(0, own.numel(), limit)
            cuts = [Piece(parameter, start, min(start + limit, own.numel())) for start in starts]
            pieces = cuts if cut else [Piece(parameter)]
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
        batch: list[Piece],
        scratch: Scratch,
        before: dict[torch.nn.Parameter, dict[str, Any]],
        updated: dict[torch.nn.Parameter, dict[str, Any]],
    ) -> dict[str, Any]:
        scratch.reset()
        values = [self._read_parameter(piece, scratch) for piece in batch]
        grads = [scratch.copy(piece.of(grad_like(piece.parameter.grad, piece.parameter))) for piece in batch]
        states = self._stand_in_states(batch, before, scratch)
        if not self._elementwise and any(own_part(piece.parameter) is not piece.parameter for piece in batch):
            settings, values, states = self._run_whole(settings, batch, values, grads, states)
        else:
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

    def _run_whole(
        self,
        settings: dict[str, Any],
        batch: list[Piece],
        values: list[torch.Tensor],
        grads: list[torch.Tensor],
        states: list[dict[str, Any]],
    ) -> tuple[dict[str, Any], list[torch.Tensor], list[dict[str, Any]]]:
        """Run on whole parameters, one at a time; returns the settings, and this rank's shards of values and states."""
        result, new_values, new_states = settings, [], []
        for piece, value, grad, state in zip(batch, values, grads, states, strict=True):
            like, own = piece.parameter, value.shape
            gathered = {
                key: whole(item, like) if self._per_element(like, item) else item for key, item in state.items()
            }
            value = whole(value, like)
            result = self._run(dict(settings), [value], [whole(grad, like)], [gathered])
            new_values.append(own_slice(value, like).view(own))
            new_states.append(
                {
                    key: own_slice(item, like) if isinstance(item, torch.Tensor) and item.shape == like.shape else item
                    for key, item in gathered.items()
                }
            )
        return result, new_values, new_states

    def _stand_in_states(
        self, batch: list[Piece], before: dict[torch.nn.Parameter, dict[str, Any]], scratch: Scratch
    ) -> list[dict[str, Any]]:
        states: list[dict[str, Any]] = [{} for _ in batch]
        for key in {key: None for piece in batch for key in before[piece.parameter]}:
            for piece, state in zip(batch, states, strict=True):
                stored = before[piece.parameter].get(key, _ABSENT)
                if stored is _ABSENT:
                    continue
                if isinstance(stored, LowBitState):
                    shape = own_part(piece.parameter).shape if piece.stop is None else (-1,)
                    state[key] = stored.read(piece.start, piece.numel).view(shape)
                elif self._per_element(piece.parameter, stored):
                    state[key] = self._read_state(piece.of(stored), scratch)
                else:
                    cut = isinstance(stored, torch.Tensor) and piece.stop is not None
                    state[key] = stored.clone() if cut else stored
        return states

    def _store_states(self, key: str, new: list[tuple[Piece, torch.Tensor]]) -> None:
        for piece, value in new:
            if self._is_low_bit(piece.parameter):
                self.state[piece.parameter][key].write(piece.start, value.reshape(-1))
        new = [(piece, value) for piece, value in new if not self._is_low_bit(piece.parameter)]
        values = self._settle([value for _, value in new])
        for (piece, _), value in zip(new, values, strict=True):
            state = self.state[piece.parameter]
            if key not in state:
                state[key] = self._empty_state(piece.parameter, key)
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

    def _empty_state(self, parameter: torch.nn.Parameter, key: str) -> torch.Tensor | LowBitState:
        if self._is_low_bit(parameter):
            own = own_part(parameter)
            return LowBitState.zeros(own.numel(), self._low_bit, signed=key == "exp_avg", device=own.device)
        return torch.empty_like(own_part(parameter), dtype=self._storage_dtype(parameter), requires_grad=False)

    def _to_storage(self, parameter: torch.nn.Parameter, value: Any) -> Any:
        if not self._has_stand_ins(parameter):
            return value
        value = own_part(value) if isinstance(value, torch.Tensor) else value
        if self._per_element(parameter, value):
            return value.to(self._storage_dtype(parameter))
        return value

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next step depends on besides the weights.

        Returns:
            ``state``: states by parameter name; ``param_groups``: settings, with names as ``params``;
            ``precision``: what was stored and how.
        """
        return {
            "state": {self._names[p]: _plain_tensors(p, state) for p, state in self.state.items()},
            "param_groups": [
                {**group, "params": [self._names[p] for p in group["params"]]} for group in self.param_groups
            ],
            "precision": {"mode": self.precision} | ({"states": self.state_format} if self.state_format else {}),
        }

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what ``state_dict`` of this class, of another precision or of a plain optimizer returned.

        Raises:
            OptimizerStateError: groups or names do not fit; nothing was loaded then.
        """
        check_state_format(self, state_dict)
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
        if self._is_low_bit(parameter):
            state = self._join_low_bit(parameter, state)
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and (key != "step" or fused):
                value = value.to(parameter.device)
            self.state[parameter][key] = self._to_storage(parameter, value)

    def _join_low_bit(self, parameter: torch.nn.Parameter, state: dict[str, Any]) -> dict[str, Any]:
        joined = {key: value for key, value in state.items() if not key.endswith((_CODES, _SCALE))}
        for key in [name.removesuffix(_CODES) for name in state if name.endswith(_CODES)]:
            stored = self._empty_state(parameter, key)
            for own, name in ((stored.codes, key + _CODES), (stored.scale, key + _SCALE)):
                own.copy_(own_part(state[name]).reshape(-1)[: own.numel()])
            joined[key] = stored
        return joined


def _plain_tensors(parameter: torch.nn.Parameter, state: dict[str, Any]) -> dict[str, Any]:
    """A state with its low-bit tensors as plain ones, named after what they hold; those of shards are stacked."""
    grid, found = ShardGrid.of(parameter), {}
    for key, value in state.items():
        if not isinstance(value, LowBitState):
            found[key] = value
            continue
        blocks = -(-grid.longest(parameter) // value.format.block_size)
        bytes_ = blocks * value.format.block_size * value.format.bits // 8
        found[key + _CODES] = grid.stack(value.codes, parameter, bytes_)
        found[key + _SCALE] = grid.stack(value.scale, parameter, blocks)
    return found


def check_state_format(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
    """Raise ``OptimizerStateError`` if the states of a state dict are stored in other bits than ``optimizer``'s."""
    saved = state_dict.get("precision", {}).get("states")
    own = getattr(optimizer, "state_format", None)
    if saved != own and state_dict.get("state"):
        raise OptimizerStateError(
            f"The saved optimizer has {saved or 'plain'} states and this run's has {own or 'plain'} ones: resume with "
            "the optimizer of the saved run."
        )

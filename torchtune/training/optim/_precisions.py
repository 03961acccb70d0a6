"""What an optimizer over 16-bit weights keeps between steps: rounded weights alone, or float32 ones beside them."""

from typing import Any

import torch
from torch.optim import Optimizer

from torchtune.modules._torchao import StateFormat
from torchtune.training.optim._low_precision_optimizer import HALF, LowPrecisionOptimizer
from torchtune.training.optim._stand_ins import Piece, Scratch
from torchtune.training.optim._stochastic_rounding import (
    RandomBits,
    merge_neighbours,
    round_stochastically_,
    spread_within_rounding_,
)
from torchtune.training.parallel._shards import own_part, shard_key


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

    def __init__(
        self,
        optimizer: Optimizer,
        names: dict[torch.nn.Parameter, str],
        seed: int,
        low_bit: StateFormat | None = None,
    ) -> None:
        super().__init__(optimizer, names, low_bit)
        self._seed = seed
        self._is_rounding = True
        self._num_steps = 0
        self._stream = names[self.param_groups[0]["params"][0]]
        self._bits_of: dict[str, RandomBits] = {}  # of this step, by shard
        self._bits: RandomBits | None = None

    def _begin_step(self) -> None:
        self._num_steps += 1
        self._bits_of.clear()

    def _end_step(self) -> None:
        # In the backward pass there is an optimizer a parameter: their buffers add up
        self._bits_of.clear()
        self._bits = None

    def _begin_shard(self, shard: str, dtype: torch.dtype) -> None:
        self._is_rounding = dtype == torch.bfloat16
        # Replicas of a shard must draw the same, so nothing else is drawn from its source.
        if shard not in self._bits_of:
            self._bits_of[shard] = RandomBits(self._seed, f"{self._stream} {shard}", self._num_steps)
        self._bits = self._bits_of[shard]

    def _storage_dtype(self, parameter: torch.nn.Parameter) -> torch.dtype:
        return parameter.dtype

    def _read_parameter(self, piece: Piece, scratch: Scratch) -> torch.Tensor:
        return scratch.copy(piece.of(piece.parameter.detach()))

    def _read_state(self, stored: torch.Tensor, scratch: Scratch) -> torch.Tensor:
        return scratch.copy(stored)

    def _settle(self, values: list[torch.Tensor]) -> list[torch.Tensor]:
        if not self._is_rounding:
            return values
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

    def __init__(
        self,
        optimizer: Optimizer,
        names: dict[torch.nn.Parameter, str],
        seed: int,
        low_bit: StateFormat | None = None,
    ) -> None:
        self._masters: dict[torch.nn.Parameter, torch.Tensor] = {}
        self._seed = seed
        super().__init__(optimizer, names, low_bit)

    def _make_master(self, parameter: torch.nn.Parameter) -> None:
        if parameter.dtype not in HALF:
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

    def _read_parameter(self, piece: Piece, scratch: Scratch) -> torch.Tensor:
        return piece.of(self._masters.get(piece.parameter, piece.parameter.detach()))

    def _read_state(self, stored: torch.Tensor, scratch: Scratch) -> torch.Tensor:
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
        if master is not None:
            own_part(self._masters.get(parameter, parameter.detach())).copy_(own_part(master))
        super()._load_parameter(parameter, state, fused)


def adopt_masters(optimizer: Optimizer) -> None:
    """Move ``master`` of a loaded state into the float32 parameters, which need no second copy of themselves."""
    for parameter, state in optimizer.state.items():
        if (master := state.pop("master", None)) is not None:
            parameter.detach().copy_(master)

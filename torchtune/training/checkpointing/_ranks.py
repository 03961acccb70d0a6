"""The processes of a run: which part of a tensor each holds, and what they do as one."""

import math
import pickle
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from torchtune.models import Box
from torchtune.training._rng import RNGState
from torchtune.training.checkpointing._errors import CheckpointError
from torchtune.training.parallel._shards import ShardGrid
from torchtune.utils import UserError

T = TypeVar("T")
# How long one waits for another that writes; one that dies is noticed at once.
_PATIENCE = timedelta(hours=3)


class Ranks:
    """All processes, where they must agree; a process that is alone agrees with itself.

    Every method is called by all of them, in the same order. They talk over a group of their own, so that a thread may
    do so while training goes on.

    Attributes:
        rank: number of this one.
        size: how many there are.
    """

    def __init__(self) -> None:
        together = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        self.rank, self.size = (dist.get_rank(), dist.get_world_size()) if together else (0, 1)
        self._group = dist.new_group(backend="gloo", timeout=_PATIENCE) if together else None

    def gather(self, value: T) -> list[T]:
        """The value of every rank."""
        found: list[Any] = [value] * self.size
        if self._group is not None:
            dist.all_gather_object(found, value, group=self._group)
        return found

    def deliver(self, packets: Mapping[int, bytearray], *, expects: bool) -> list[memoryview]:
        """Send packets to some ranks, while all of them may do so.

        Args:
            packets: what each of them gets.
            expects: whether this rank gets one from every other.

        Returns:
            these.
        """
        others = [rank for rank in range(self.size) if rank != self.rank] if expects else []
        sizes = {rank: torch.zeros(1, dtype=torch.int64) for rank in others}
        self._exchange({rank: torch.tensor([len(packet)]) for rank, packet in packets.items()}, sizes)
        found = {rank: torch.empty(int(size), dtype=torch.uint8) for rank, size in sizes.items()}
        self._exchange(
            {rank: torch.frombuffer(packet, dtype=torch.uint8) for rank, packet in packets.items() if packet},
            {rank: room for rank, room in found.items() if room.numel()},
        )
        return [memoryview(room.numpy()) for room in found.values()]

    def _exchange(self, out: Mapping[int, torch.Tensor], into: Mapping[int, torch.Tensor]) -> None:
        """All at once, so that nobody waits for one who waits in turn."""
        work = [dist.irecv(room, rank, group=self._group) for rank, room in into.items()]
        work += [dist.isend(values, rank, group=self._group) for rank, values in out.items()]
        for one in work:
            one.wait()

    def any(self, flag: bool) -> bool:
        """Whether ``flag`` is True on any rank."""
        if self._group is None:
            return flag
        found = torch.tensor(int(flag))
        dist.all_reduce(found, dist.ReduceOp.MAX, group=self._group)
        return bool(found)

    def from_first(self, value: T | None) -> T:
        """Rank 0's value; what others give is ignored. What it costs a rank does not grow with their number."""
        if self._group is None:
            return value
        data = bytearray(pickle.dumps(value)) if self.rank == 0 else bytearray()
        size = torch.tensor(len(data))
        dist.all_reduce(size, group=self._group)  # the others' is 0; a ring, where a broadcast's tree grows
        room = torch.frombuffer(data, dtype=torch.uint8) if data else torch.zeros(int(size), dtype=torch.uint8)
        dist.all_reduce(room, group=self._group)
        return pickle.loads(room.numpy().tobytes())

    @contextmanager
    def together(self) -> Iterator[None]:
        """A block that fails on all ranks if it fails on one: none waits for another in vain.

        Nothing in it may wait for other ranks.

        Raises:
            CheckpointError: on the ranks where nothing went wrong; the message is that of the first where it did.
        """
        failure: Exception | None = None
        try:
            yield
        except Exception as error:
            if self.size == 1:
                raise
            failure = error  # raised below, when the others know
        if not self.any(failure is not None):
            return
        known = isinstance(failure, UserError | OSError)
        text = str(failure) if known else f"{type(failure).__name__}: {failure}"
        error = self._verdict(self.gather(None if failure is None else (known, text)), failure)
        try:
            if error is not None:
                raise error from failure
        finally:
            del error, failure  # they hold this frame, and what its callers hold, through their tracebacks

    @staticmethod
    def _verdict(failures: list[tuple[bool, str] | None], own: Exception | None) -> Exception | None:
        """What this rank raises: its own mistake if that is none of the user's, else what the first rank says."""
        rank, first = next(((rank, found) for rank, found in enumerate(failures) if found is not None), (0, None))
        if first is None:
            return None
        known, text = first
        if own is not None and (not known or not isinstance(own, UserError | OSError)):
            return own
        if rank > 0 and None in failures and known:
            text = f"Rank {rank}: {text}"
        error = CheckpointError(text) if known else RuntimeError(f"Rank {rank} failed ({text}).")
        error.told_by_rank_0 = True
        return error

    def first(self, make: Callable[[], T]) -> T:
        """What ``make`` returns on rank 0, where alone it is called; if it fails there, it fails everywhere."""
        made: T | None = None
        with self.together():
            if self.rank == 0:
                made = make()
        return self.from_first(made)

    @contextmanager
    def same_randomness(self) -> Iterator[None]:
        """A block in which all ranks draw the same random numbers: those that rank 0 draws."""
        if self.size == 1:
            yield
            return
        own = RNGState().state_dict()
        RNGState().load_state_dict(self.from_first(own))
        yield
        if self.rank != 0:
            RNGState().load_state_dict(own)


def local_part(tensor: torch.Tensor) -> tuple[Box, torch.Tensor]:
    """The part of a tensor that this rank holds: which it is of the whole, and its values, in the same memory."""
    if not isinstance(tensor, DTensor):
        return tuple(slice(0, size) for size in tensor.shape), tensor.detach()
    (chunk,) = tensor.__create_chunk_list__()
    box = tuple(slice(start, start + size) for start, size in zip(chunk.offsets, chunk.sizes, strict=True))
    return box, tensor.detach().to_local()


@dataclass(frozen=True)
class Held:
    """A tensor to be saved, of which this rank holds a part.

    Attributes:
        outline: the whole, on the meta device.
        box: which part.
        data: its values.
        writes: whether this rank writes it, of those that hold the same.
    """

    outline: torch.Tensor
    box: Box
    data: torch.Tensor
    writes: bool

    @staticmethod
    def of(tensor: torch.Tensor, ranks: Ranks, turn: int, like: torch.Tensor | None = None) -> "Held":
        """See the class.

        Args:
            tensor: whole, and the same on all ranks; or sharded.
            ranks: all of them.
            turn: which rank writes what several hold; with a running number they take turns.
            like: a sharded tensor whose shard ``tensor`` is one of, if it is shaped like that.
        """
        sharded, plain = tensor, not isinstance(tensor, DTensor)
        if plain and isinstance(like, DTensor) and tensor.dim() > 0 and tensor.shape == like.to_local().shape:
            sharded = like
        box, data = local_part(sharded)
        data = data if sharded is tensor else tensor.detach()
        outline = torch.empty(sharded.shape, dtype=tensor.dtype, device="meta")
        return Held(outline, box, data, _writes(sharded, ranks, turn))


def _writes(tensor: torch.Tensor, ranks: Ranks, turn: int) -> bool:
    if not isinstance(tensor, DTensor):
        return ranks.rank == turn % ranks.size
    mesh = tensor.device_mesh
    if mesh.size() < ranks.size and not bool((mesh.mesh == 0).any()):
        return False  # what is replicated outside of its mesh is written by the ranks beside rank 0
    return all(
        place == turn % mesh.size(dim)
        for dim, (placement, place) in enumerate(zip(tensor.placements, mesh.get_coordinate(), strict=True))
        if placement.is_replicate()
    )


def reshard(model: nn.Module) -> None:
    """Let the modules that FSDP still holds whole, after a forward pass alone, go back to their shards."""
    for module in model.modules():
        if hasattr(module, "reshard") and hasattr(module, "unshard"):
            module.reshard()


def full(tensor: torch.Tensor) -> torch.Tensor:
    """The whole tensor, on every rank; all of them call it."""
    return tensor.detach().full_tensor() if isinstance(tensor, DTensor) else tensor.detach()


def whole_where_partial(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself; its sum where ranks hold summands."""
    if isinstance(tensor, DTensor) and any(placement.is_partial() for placement in tensor.placements):
        return tensor.redistribute(placements=[Replicate() if p.is_partial() else p for p in tensor.placements])
    return tensor


def read_like(
    like: DTensor, shape: tuple[int, ...], dtype: torch.dtype, read: Callable[[Box], torch.Tensor]
) -> DTensor:
    """A tensor that belongs to a parameter, on its device: sharded as it is if they have the same shape, else whole.

    Args:
        like: the parameter.
        shape: of the whole tensor.
        dtype: of the tensor.
        read: gives a part of it.
    """
    if shape == tuple(like.shape):
        box, local = local_part(like)
        new = torch.empty_like(like, dtype=dtype, requires_grad=False)
        if local.numel():
            local_part(new)[1].copy_(read(box))
        return new
    value = read(tuple(slice(0, size) for size in shape)).to(like.device, copy=True)
    return DTensor.from_local(value, like.device_mesh, [Replicate()] * like.device_mesh.ndim, run_check=False)


def own_row(
    like: torch.Tensor, node: Mapping[str, Any], shape: tuple[int, ...], source: Any, folder: Path
) -> torch.Tensor:
    """What belongs to this rank's shard and is laid out otherwise, such as low-bit states: its row of the stack."""
    grid, saved = ShardGrid.of(like), tuple(node.get("shards", ()))
    if grid.sizes != saved:
        raise CheckpointError(
            f"{folder}: its optimizer has low-bit states of {math.prod(saved)} shards and this run has "
            f"{math.prod(grid.sizes)}: resume with as many, or from the weights alone."
        )
    box = (*(slice(place, place + 1) for place in grid.place), *(slice(0, size) for size in shape[len(saved) :]))
    return source.read(node, box)

"""All ranks: objects they exchange, and what they decide or fail at together."""

import pickle
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from torchtune.training._rng import RNGState
from torchtune.utils import UserError

T = TypeVar("T")
# How long a rank waits for another one that writes; the death of a rank is noticed at once.
_TIMEOUT = timedelta(hours=3)


def all_gather_object(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """The value of every rank, pickled; without distributed training ``[value]``. All ranks call it."""
    if not (dist.is_available() and dist.is_initialized()):
        return [value]
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, value, group=group)
    return found


def broadcast_object(value: T | None, group: dist.ProcessGroup | None = None) -> T:
    """The value of rank 0, pickled; without distributed training ``value``. All ranks call it.

    An all-reduce, in which other ranks contribute zeros, needs two neighbours of each rank; a broadcast's tree needs
    more connections with more ranks.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return value
    device = _device(group)
    data = bytearray(pickle.dumps(value)) if dist.get_rank(group) == 0 else bytearray()
    size = torch.tensor(len(data), device=device)
    dist.all_reduce(size, group=group)
    buffer = torch.frombuffer(data, dtype=torch.uint8) if data else torch.zeros(int(size), dtype=torch.uint8)
    buffer = buffer.to(device)
    dist.all_reduce(buffer, group=group)
    return pickle.loads(buffer.cpu().numpy().tobytes())


def any_rank(flag: bool, group: dist.ProcessGroup | None = None) -> bool:
    """Whether ``flag`` is True on any rank, by an all-reduce. All ranks call it."""
    if not (dist.is_available() and dist.is_initialized()):
        return flag
    found = torch.tensor(int(flag), device=_device(group))
    dist.all_reduce(found, dist.ReduceOp.MAX, group=group)
    return bool(found)


def _device(group: dist.ProcessGroup | None) -> torch.device:
    """Device of the tensors that a process group communicates."""
    on_host = dist.get_backend(group) in ("gloo", "fake")  # fake: a simulation, whose tensors are on the CPU
    return torch.device("cpu") if on_host else torch.accelerator.current_accelerator()


class Ranks:
    """All ranks, where they act as one; a single process is a world of one.

    All ranks call every method, in the same order. The methods communicate over a gloo group of their own, so that a
    background thread can call them during training.

    Args:
        error: raised by :meth:`together` for a user error on another rank.

    Attributes:
        rank: of this process.
        size: number of ranks.
    """

    def __init__(self, error: type[UserError] = UserError) -> None:
        is_distributed = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        self.rank, self.size = (dist.get_rank(), dist.get_world_size()) if is_distributed else (0, 1)
        self._error = error
        self._group = dist.new_group(backend="gloo", timeout=_TIMEOUT) if is_distributed else None

    def gather(self, value: T) -> list[T]:
        """The value of every rank."""
        return [value] if self._group is None else all_gather_object(value, self._group)

    def all_to_some(self, packets: Mapping[int, bytearray], *, receives: bool) -> list[memoryview]:
        """Send packets to some ranks; all ranks may send at the same time.

        Args:
            packets: one for each receiving rank other than this one.
            receives: whether this rank receives a packet from every other rank.

        Returns:
            The received packets.
        """
        others = [rank for rank in range(self.size) if rank != self.rank] if receives else []
        sizes = {rank: torch.zeros(1, dtype=torch.int64) for rank in others}
        self._exchange({rank: torch.tensor([len(packet)]) for rank, packet in packets.items()}, sizes)
        found = {rank: torch.empty(int(size), dtype=torch.uint8) for rank, size in sizes.items()}
        self._exchange(
            {rank: torch.frombuffer(packet, dtype=torch.uint8) for rank, packet in packets.items() if packet},
            {rank: buffer for rank, buffer in found.items() if buffer.numel()},
        )
        return [memoryview(buffer.numpy()) for buffer in found.values()]

    def _exchange(self, out: Mapping[int, torch.Tensor], into: Mapping[int, torch.Tensor]) -> None:
        """Send and receive asynchronously, so that ranks do not wait for each other in a circle."""
        work = [dist.irecv(buffer, rank, group=self._group) for rank, buffer in into.items()]
        work += [dist.isend(values, rank, group=self._group) for rank, values in out.items()]
        for one in work:
            one.wait()

    def any(self, flag: bool) -> bool:
        """Whether ``flag`` is True on any rank."""
        return flag if self._group is None else any_rank(flag, self._group)

    def from_first(self, value: T | None) -> T:
        """Rank 0's value; the values of other ranks are ignored. The cost per rank does not grow with their number."""
        return value if self._group is None else broadcast_object(value, self._group)

    @contextmanager
    def together(self) -> Iterator[None]:
        """A block that raises on all ranks if it raises on one, so that no rank waits for another one forever.

        The block must not communicate.

        Raises:
            UserError: of the class ``error``, on ranks without an exception of their own, with the message of the
                first rank that has one.
        """
        failure: Exception | None = None
        try:
            yield
        except Exception as error:
            if self.size == 1:
                raise
            failure = error  # raised below, when the other ranks know
        if not self.any(failure is not None):
            return
        is_user_error = isinstance(failure, UserError | OSError)
        text = str(failure) if is_user_error else f"{type(failure).__name__}: {failure}"
        error = self._verdict(self.gather(None if failure is None else (is_user_error, text)), failure)
        try:
            if error is not None:
                raise error from failure
        finally:
            del error, failure  # their tracebacks reference this frame and the objects of its callers

    def _verdict(self, failures: list[tuple[bool, str] | None], own: Exception | None) -> Exception | None:
        """What this rank raises: its own exception if that is a bug, else the message of the first failed rank."""
        rank, first = next(((rank, found) for rank, found in enumerate(failures) if found is not None), (0, None))
        if first is None:
            return None
        is_user_error, text = first
        if own is not None and (not is_user_error or not isinstance(own, UserError | OSError)):
            return own
        if rank > 0 and None in failures and is_user_error:
            text = f"Rank {rank}: {text}"
        error = self._error(text) if is_user_error else RuntimeError(f"Rank {rank} failed ({text}).")
        error.told_by_rank_0 = True
        return error

    def first(self, make: Callable[[], T]) -> T:
        """The result of ``make``, which rank 0 alone calls; an exception there is raised on all ranks."""
        made: T | None = None
        with self.together():
            if self.rank == 0:
                made = make()
        return self.from_first(made)

    @contextmanager
    def same_randomness(self) -> Iterator[None]:
        """A block in which all ranks draw the random numbers of rank 0."""
        if self.size == 1:
            yield
            return
        own = RNGState().state_dict()
        RNGState().load_state_dict(self.from_first(own))
        yield
        if self.rank != 0:
            RNGState().load_state_dict(own)

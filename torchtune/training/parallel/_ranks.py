"""Collectives over all ranks: exchange of objects, and joint errors."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from torchtune.training._rng import RNGState
from torchtune.utils import UserError, get_world_size_and_rank

T = TypeVar("T")
# Timeout for a rank that waits while another one writes; a dead rank is noticed immediately.
_TIMEOUT = timedelta(hours=3)


def all_gather_object(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Return the value of every rank (pickled); ``[value]`` without distributed training. A collective."""
    if get_world_size_and_rank()[0] == 1:
        return [value]
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, value, group=group)
    return found


def broadcast_object(value: T | None, group: dist.ProcessGroup | None = None) -> T:
    """Return rank 0's value (pickled); ``value`` without distributed training. A collective."""
    if get_world_size_and_rank()[0] == 1:
        return value
    found = [value]
    dist.broadcast_object_list(found, src=0, group=group)
    return found[0]


def any_rank(flag: bool, group: dist.ProcessGroup | None = None) -> bool:
    """Return whether ``flag`` is True on any rank, by an all-reduce. A collective."""
    if get_world_size_and_rank()[0] == 1:
        return flag
    found = torch.tensor(int(flag), device=_device(group))
    dist.all_reduce(found, dist.ReduceOp.MAX, group=group)
    return bool(found)


def lowest_of_ranks(count: int, group: dist.ProcessGroup | None = None) -> int:
    """Return the lowest ``count`` of all ranks, by an all-reduce. A collective."""
    if get_world_size_and_rank()[0] == 1:
        return count
    found = torch.tensor(count, device=_device(group))
    dist.all_reduce(found, dist.ReduceOp.MIN, group=group)
    return int(found)


def _device(group: dist.ProcessGroup | None) -> torch.device:
    on_host = dist.get_backend(group) in ("gloo", "fake")  # fake: a simulation, with tensors on the CPU
    return torch.device("cpu") if on_host else torch.accelerator.current_accelerator()


class Ranks:
    """Collectives over all ranks; trivial for a single process.

    All ranks call every method, in the same order. The methods use a separate gloo group, so that a background thread
    can call them during training.

    Args:
        error: exception that :meth:`raise_on_all` raises for a user error on another rank.

    Attributes:
        rank: rank of this process.
        size: number of ranks.
    """

    def __init__(self, error: type[UserError] = UserError) -> None:
        self.size, self.rank = get_world_size_and_rank()
        self._error = error
        self._group = dist.new_group(backend="gloo", timeout=_TIMEOUT) if self.size > 1 else None

    def gather(self, value: T) -> list[T]:
        """Return the value of every rank."""
        return [value] if self._group is None else all_gather_object(value, self._group)

    def exchange_packets(self, packets: Mapping[int, bytearray], *, receives: bool) -> list[memoryview]:
        """Send packets to some ranks; all ranks may send at the same time.

        Args:
            packets: packet for each receiving rank, except for this rank.
            receives: whether this rank receives a packet from every other rank.

        Returns:
            The received packets.
        """
        others = [rank for rank in range(self.size) if rank != self.rank] if receives else []
        sizes = {rank: torch.zeros(1, dtype=torch.int64) for rank in others}
        self._send_and_receive({rank: torch.tensor([len(packet)]) for rank, packet in packets.items()}, sizes)
        found = {rank: torch.empty(int(size), dtype=torch.uint8) for rank, size in sizes.items()}
        self._send_and_receive(
            {rank: torch.frombuffer(packet, dtype=torch.uint8) for rank, packet in packets.items() if packet},
            {rank: buffer for rank, buffer in found.items() if buffer.numel()},
        )
        return [memoryview(buffer.numpy()) for buffer in found.values()]

    def _send_and_receive(self, out: Mapping[int, torch.Tensor], into: Mapping[int, torch.Tensor]) -> None:
        """Send and receive asynchronously, to avoid a deadlock."""
        work = [dist.irecv(buffer, rank, group=self._group) for rank, buffer in into.items()]
        work += [dist.isend(values, rank, group=self._group) for rank, values in out.items()]
        for one in work:
            one.wait()

    def any(self, flag: bool) -> bool:
        """Return whether ``flag`` is True on any rank."""
        return flag if self._group is None else any_rank(flag, self._group)

    def broadcast(self, value: T | None) -> T:
        """Return rank 0's value; other values are ignored. The cost per rank does not grow with the number of ranks."""
        return value if self._group is None else broadcast_object(value, self._group)

    @contextmanager
    def raise_on_all(self) -> Iterator[None]:
        """Context manager that raises on all ranks if the block raises on any, so that no rank waits forever.

        The block must not communicate.

        Raises:
            UserError: on ranks without an exception, an instance of the class ``error`` with the message of the first
                rank that raised.
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
        error = self._choose_error(self.gather(None if failure is None else (is_user_error, text)), failure)
        try:
            if error is not None:
                raise error from failure
        finally:
            del error, failure  # their tracebacks reference this frame and the objects of its callers

    def _choose_error(self, failures: list[tuple[bool, str] | None], own: Exception | None) -> Exception | None:
        """Return this rank's own exception if it is a bug, otherwise the exception of the first failed rank."""
        rank, first = next(((rank, found) for rank, found in enumerate(failures) if found is not None), (0, None))
        if first is None:
            return None
        is_user_error, text = first
        if own is not None and (not is_user_error or not isinstance(own, UserError | OSError)):
            return own
        if rank > 0 and None in failures and is_user_error:
            text = f"Rank {rank}: {text}"
        error = self._error(text) if is_user_error else RuntimeError(f"Rank {rank} failed ({text}).")
        error.raised_on_all = True
        return error

    def run_on_rank_0(self, make: Callable[[], T]) -> T:
        """Call ``make`` on rank 0 and return its result on all ranks; an exception is raised on all ranks."""
        made: T | None = None
        with self.raise_on_all():
            if self.rank == 0:
                made = make()
        return self.broadcast(made)

    @contextmanager
    def share_rng_state(self) -> Iterator[None]:
        """Context manager in which all ranks use rank 0's random numbers."""
        if self.size == 1:
            yield
            return
        own = RNGState().state_dict()
        RNGState().load_state_dict(self.broadcast(own))
        yield
        if self.rank != 0:
            RNGState().load_state_dict(own)

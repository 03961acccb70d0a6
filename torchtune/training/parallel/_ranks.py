"""The ranks of a run: their process group, CPU threads, exchange of objects, and joint errors."""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from torchtune.utils import DeviceSupport, UserError, get_logger, get_world_size_and_rank

T = TypeVar("T")
# Timeout for a rank that waits while another one writes; a dead rank is noticed immediately.
_TIMEOUT = timedelta(hours=3)
# For ranks that wait for a user or a request.
NO_TIMEOUT = timedelta(days=3650)


def is_distributed() -> bool:
    """Return whether torchrun started this process and ``torch.distributed`` is available.

    Example:
        >>> torchtune.training.is_distributed()
        False
    """
    return dist.is_available() and {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys()


def is_restart() -> bool:
    """Return whether torchrun restarted a worker of this run after a failure, so that the run resumes automatically.

    A collective: torchrun counts restarts per machine, and all ranks return the same value. A change in the number of
    machines (``--nnodes 1:4``) is not a restart: set ``resume_from_checkpoint=True`` for it.

    Example:
        >>> torchtune.training.is_restart()
        False
    """
    is_local_restart = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
    return any_rank(is_local_restart)


def join_process_group(backend: str, **options: Any) -> None:
    """Call ``init_process_group`` with the environment set by torchrun.

    torchrun keeps its store across restarts. A rank that reads another rank's address from before a restart cannot
    connect, so keys get a new prefix after each restart.

    gloo connects two ranks at their first message instead of all pairs at once: an all-reduce needs only two
    neighbors. ``TORCH_GLOO_LAZY_INIT=0`` in the environment restores torch's default.
    """
    os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    uses_agent_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if restarts != "0" and uses_agent_store:
        world_size = int(os.environ["WORLD_SIZE"])
        host = os.environ["MASTER_ADDR"]
        port = int(os.environ["MASTER_PORT"])
        store = dist.TCPStore(host, port, world_size, is_master=False)
        options["store"] = dist.PrefixStore(f"life {restarts}", store)
        options["rank"] = int(os.environ["RANK"])
        options["world_size"] = world_size
    dist.init_process_group(backend, **options)


def get_distributed_backend(device_type: str, offload_ops_to_cpu: bool = False) -> str:
    """Return the backend of ``init_process_group``, e.g. ``"nccl"``, or ``"cuda:nccl,cpu:gloo"`` for CPU offload.

    Example:
        >>> torchtune.training.get_distributed_backend("cpu")
        'gloo'
    """
    backend = DeviceSupport.from_type(device_type).communication_backend
    if offload_ops_to_cpu and device_type != "cpu":
        return f"{device_type}:{backend},cpu:gloo"
    return backend


def set_torch_num_threads() -> None:
    """Divide the machine's CPU cores among its local ranks."""
    cores = os.cpu_count() or 1
    threads = max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    torch.set_num_threads(threads)
    get_logger().info(f"torch uses {threads} threads on this rank.")


def all_gather_object(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Return the value of every rank (pickled); ``[value]`` without distributed training. A collective."""
    if get_world_size_and_rank()[0] == 1:
        return [value]
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def broadcast_object(value: T | None, group: dist.ProcessGroup | None = None) -> T:
    """Return rank 0's value (pickled); ``value`` without distributed training. A collective."""
    if get_world_size_and_rank()[0] == 1:
        return value
    values = [value]  # rank 0's value replaces those of the other ranks
    dist.broadcast_object_list(values, src=0, group=group)
    return values[0]


def any_rank(flag: bool, group: dist.ProcessGroup | None = None) -> bool:
    """Return whether ``flag`` is True on any rank, by an all-reduce. A collective."""
    if get_world_size_and_rank()[0] == 1:
        return flag
    message = torch.tensor(int(flag), device=message_device(group))
    dist.all_reduce(message, dist.ReduceOp.MAX, group=group)
    return bool(message)


def lowest_of_ranks(count: int, group: dist.ProcessGroup | None = None) -> int:
    """Return the lowest ``count`` of all ranks, by an all-reduce. A collective."""
    if get_world_size_and_rank()[0] == 1:
        return count
    message = torch.tensor(count, device=message_device(group))
    dist.all_reduce(message, dist.ReduceOp.MIN, group=group)
    return int(message)


def message_device(group: dist.ProcessGroup | None = None) -> torch.device:
    """Return the device of a group's messages."""
    if dist.get_backend(group) in ("gloo", "fake"):  # fake: a simulation, with tensors on the CPU
        return torch.device("cpu")
    return torch.accelerator.current_accelerator()


class Ranks:
    """Collectives over all ranks; trivial for a single process.

    All ranks call every method, in the same order. The methods use a separate gloo group, so that a background thread
    can call them during training.

    Args:
        error: exception that :meth:`raise_on_all` raises for a user error on another rank.
        timeout: the longest that a rank waits for another one.

    Attributes:
        rank: rank of this process.
        size: number of ranks.
    """

    def __init__(self, error: type[UserError] = UserError, *, timeout: timedelta = _TIMEOUT) -> None:
        self.size, self.rank = get_world_size_and_rank()
        self._error = error
        self._group: dist.ProcessGroup | None = None
        if self.size > 1:
            self._group = dist.new_group(backend="gloo", timeout=timeout)

    def gather(self, value: T) -> list[T]:
        """Return the value of every rank."""
        if self._group is None:
            return [value]
        return all_gather_object(value, self._group)

    def exchange_packets(self, packets: Mapping[int, bytearray], *, receives: bool) -> list[memoryview]:
        """Send packets to some ranks; all ranks may send at the same time.

        Args:
            packets: packet for each receiving rank, except for this rank.
            receives: whether this rank receives a packet from every other rank.

        Returns:
            The received packets.
        """
        # The sizes first, because a receiver must allocate the packet before it arrives.
        sent_sizes = {rank: torch.tensor([len(packet)]) for rank, packet in packets.items()}
        received_sizes: dict[int, Tensor] = {}
        if receives:
            for rank in range(self.size):
                if rank != self.rank:
                    received_sizes[rank] = torch.zeros(1, dtype=torch.int64)
        self._send_and_receive(sent_sizes, received_sizes)

        # An empty packet is not sent: both sides know its size.
        sent: dict[int, Tensor] = {}
        for rank, packet in packets.items():
            if packet:
                sent[rank] = torch.frombuffer(packet, dtype=torch.uint8)
        buffers: list[Tensor] = []
        received: dict[int, Tensor] = {}
        for rank, size in received_sizes.items():
            buffer = torch.empty(int(size), dtype=torch.uint8)
            buffers.append(buffer)
            if buffer.numel():
                received[rank] = buffer
        self._send_and_receive(sent, received)
        return [memoryview(buffer.numpy()) for buffer in buffers]

    def _send_and_receive(self, sent: Mapping[int, Tensor], received: Mapping[int, Tensor]) -> None:
        """Send tensors to ranks and receive others from ranks, all asynchronously, to avoid a deadlock."""
        operations = []
        for rank, buffer in received.items():
            operations.append(dist.irecv(buffer, rank, group=self._group))
        for rank, tensor in sent.items():
            operations.append(dist.isend(tensor, rank, group=self._group))
        for operation in operations:
            operation.wait()

    def any(self, flag: bool) -> bool:
        """Return whether ``flag`` is True on any rank."""
        if self._group is None:
            return flag
        return any_rank(flag, self._group)

    def broadcast(self, value: T | None) -> T:
        """Return rank 0's value; other values are ignored. The cost per rank does not grow with the number of ranks."""
        if self._group is None:
            return value
        return broadcast_object(value, self._group)

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
        if not self.any(failure is not None):  # one number per rank; the texts are gathered only after a failure
            return
        report = None
        if failure is not None:
            is_user_error = isinstance(failure, UserError | OSError)
            text = str(failure)
            if not is_user_error:
                text = f"{type(failure).__name__}: {failure}"
            report = (is_user_error, text)
        error = self._choose_error(self.gather(report), failure)
        try:
            if error is not None:
                raise error from failure
        finally:
            del error, failure  # their tracebacks reference this frame and the objects of its callers

    def _choose_error(
        self, reports: list[tuple[bool, str] | None], local_failure: Exception | None
    ) -> Exception | None:
        """Return the exception of this rank; None if no rank failed.

        This is its own exception if that or the one of the first failed rank is a bug, otherwise the latter.

        Args:
            reports: for each rank, whether its exception is a user error, and its text; None for a rank without one.
            local_failure: this rank's exception.
        """
        failed_ranks = [rank for rank, report in enumerate(reports) if report is not None]
        if not failed_ranks:
            return None
        first = failed_ranks[0]
        is_user_error, text = reports[first]
        # User errors, such as a missing file, become one error of the run. A bug keeps its traceback.
        if local_failure is not None:
            is_local_user_error = isinstance(local_failure, UserError | OSError)
            if not (is_user_error and is_local_user_error):
                return local_failure
        if is_user_error:
            # An error of all ranks, or of rank 0, which speaks for all, is that of the run; another rank is named.
            if first > 0 and len(failed_ranks) < len(reports):
                text = f"Rank {first}: {text}"
            error = self._error(text)
        else:
            error = RuntimeError(f"Rank {first} failed ({text}).")
        error.raised_on_all = True  # so that one rank prints it
        return error

    def run_on_rank_0(self, make: Callable[[], T]) -> T:
        """Call ``make`` on rank 0 and return its result on all ranks; an exception is raised on all ranks."""
        result: T | None = None
        with self.raise_on_all():
            if self.rank == 0:
                result = make()
        return self.broadcast(result)

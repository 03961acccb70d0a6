"""Parallel dimensions of a run's processes, and their collectives."""

import os
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torchtune.data import Batch
from torchtune.training.parallel._ranks import (
    all_gather_object,
    get_distributed_backend,
    is_distributed,
    join_process_group,
    message_device,
)
from torchtune.utils import MACHINES_VARIABLE, UserError, flatten_mesh

Collate = Callable[[list[Any]], Mapping[str, Any]]

# Setting of each mesh dimension, from outermost to innermost; neighboring ranks differ in the last one.
_SETTINGS = {
    "pp": "pipeline_parallel_dim",
    "dp_replicate": "data_parallel_replicate_dim",
    "dp_shard": "data_parallel_shard_dim",
    "cp": "context_parallel_dim",
    "ep": "expert_parallel_dim",
    "tp": "tensor_parallel_dim",
}
_MESH = ("dp_replicate", "dp_shard", "cp", "tp")


class ParallelDimsError(UserError, ValueError):
    """Sizes of parallel dimensions that do not fit together."""

    raised_on_all = True


@dataclass(eq=False)
class ParallelDims:
    """Parallel dimensions of a run; without arguments, one process.

    The data-parallel size is ``dp_replicate * dp_shard``. Parameters, gradients and optimizer states are sharded over
    ``dp_shard * cp`` and replicated over ``dp_replicate`` (HSDP). Within a data-parallel rank, ``cp`` ranks shard every
    sequence and ``tp`` ranks every layer. Experts have a separate mesh: the ``dp_shard * cp * tp`` ranks, which have
    different tokens, form groups of ``ep`` neighbors with different experts, and ranks with the same experts shard
    their parameters.

    Args:
        dp_replicate: number of replicas of the model.
        dp_shard: shards of a replica; -1 takes all remaining processes.
        tp: tensor-parallel size.
        cp: context-parallel size.
        world_size: number of processes.
        ep: expert-parallel size; a divisor of ``dp_shard * cp * tp``.
        pp: pipeline-parallel size; must be 1.

    Raises:
        ParallelDimsError: the product is not the number of processes, or a dimension is not available.

    Example:
        >>> torchtune.training.ParallelDims().world_size
        1
    """

    dp_replicate: int = 1
    dp_shard: int = 1
    tp: int = 1
    cp: int = 1
    world_size: int = 1
    ep: int = 1
    pp: int = 1
    mesh: Any = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if self.pp != 1:
            raise ParallelDimsError(
                f"{_SETTINGS['pp']}: pipeline parallelism is not available in this release: set it to 1."
            )
        for name in (*_MESH, "ep"):
            size = getattr(self, name)
            if size >= 1:
                continue
            if name != "dp_shard":
                raise ParallelDimsError(f"{_SETTINGS[name]} is {size}: it must be at least 1.")
            if size != -1:
                raise ParallelDimsError(
                    f"{_SETTINGS[name]} is {size}: it must be at least 1, or -1 for all that are left."
                )
        # Processes of one shard: the product of all mesh dimensions but dp_shard.
        shard_processes = self.dp_replicate * self.cp * self.tp
        if self.dp_shard == -1:
            if self.world_size % shard_processes:
                raise ParallelDimsError(
                    f"data_parallel_shard_dim=-1: {self.world_size} processes cannot be divided by {self._product()}"
                    f" = {shard_processes}: start a multiple of {shard_processes}, or change one of them."
                )
            self.dp_shard = self.world_size // shard_processes
        processes = shard_processes * self.dp_shard
        if processes != self.world_size:
            raise ParallelDimsError(
                f"{self._product()} = {processes}, but there are {self.world_size} processes: set "
                f"data_parallel_shard_dim=-1, or start {processes} with tune run --nproc-per-node {processes}."
            )
        self._check_experts()
        self._device = torch.device("cpu")  # device of the default group's messages
        self.waited = 0.0  # seconds spent in collectives, mostly waiting for slower processes

    def _check_experts(self) -> None:
        """Raise unless ``ep`` divides the ranks with different tokens."""
        shards = self.dp_shard * self.cp * self.tp
        if shards % self.ep:
            factors = f"data_parallel_shard_dim {self.dp_shard} x context_parallel_dim {self.cp}"
            if self.tp > 1:
                factors += f" x tensor_parallel_dim {self.tp}"
            raise ParallelDimsError(
                f"expert_parallel_dim is {self.ep}: it must divide the shards, {factors} = {shards}, whose processes "
                "share the experts."
            )

    @classmethod
    def start(cls, device: torch.device, **sizes: int) -> "ParallelDims":
        """Initialize torchrun's process group and build the mesh; without torchrun, return a single process.

        Args:
            device: device of this process.
            sizes: arguments of the class, without ``world_size``.

        Raises:
            ParallelDimsError: see the class; raised before any communication, unless the sizes differ between ranks.
        """
        # --nnodes of this machine's command line, and the number of machines that torchrun counts.
        requested_machines = os.environ.get(MACHINES_VARIABLE, "")
        machines = os.environ.get("GROUP_WORLD_SIZE", "")
        are_known = requested_machines.isdigit() and machines.isdigit()  # not with a range, --nnodes 1:4
        if are_known and int(requested_machines) != int(machines):
            raise ParallelDimsError(
                f"This machine was started with --nnodes {requested_machines}, but the run has {machines}: give all "
                "machines the same --nnodes."
            )
        if not is_distributed():
            return cls(**sizes, world_size=1)
        dims = cls(**sizes, world_size=int(os.environ["WORLD_SIZE"]))
        if not dist.is_initialized():
            # device_id is not passed: with it, torch splits the default group for the groups of the mesh, and gloo's
            # two split groups share a listener. With connections at the first message (see join_process_group), they
            # then wait for each other forever. gloo joins the device's backend for messages from host to host.
            join_process_group(get_distributed_backend(device.type, offload_ops_to_cpu=True))
        # Each machine has a command line of its own, and ranks with different sizes would wait for each other forever.
        # One all-reduce gives the maxima of the sizes and, as maxima of the negative sizes, the negative minima.
        sizes_of_rank = [dims.dp_replicate, dims.dp_shard, dims.cp, dims.tp, dims.ep]
        negative_sizes = [-size for size in sizes_of_rank]
        bounds = torch.tensor([sizes_of_rank, negative_sizes], device=message_device())
        dist.all_reduce(bounds, dist.ReduceOp.MAX)
        all_largest, all_negative_smallest = bounds.tolist()
        for name, largest, negative_smallest in zip((*_MESH, "ep"), all_largest, all_negative_smallest, strict=True):
            if largest != -negative_smallest:
                raise ParallelDimsError(
                    f"{_SETTINGS[name]} is {-negative_smallest} on one rank and {largest} on another: give all "
                    "machines the same config and the same command line."
                )
        dims._make_mesh(device.type)
        return dims

    def _product(self) -> str:
        """Return the product of the known sizes in words, for messages; -1 is not known yet."""
        factors = []
        for name in _MESH:
            size = getattr(self, name)
            if size != -1:
                factors.append(f"{_SETTINGS[name]} {size}")
        return " x ".join(factors)

    def __str__(self) -> str:
        if self.world_size == 1:
            return "1 process"
        text = (
            f"{self.world_size} processes = {self.dp_replicate} copies x {self.dp_shard} shards of data x "
            f"{self.cp} context-parallel ranks x {self.tp} tensor-parallel ranks"
        )
        if self.ep > 1:
            text += f", experts over {self.ep} of the shards"
        return text

    def build_mesh(self, device_type: str) -> Any:
        """Build the device mesh with joined dimensions, for recipes copied from earlier releases.

        The joined dimensions are ``dp`` (data), ``dp_shard_cp`` (for sharding parameters) and ``dp_cp`` (for reducing
        losses). A collective.
        """
        mesh = self._make_mesh(device_type)
        flatten_mesh(mesh["dp_replicate", "dp_shard"], "dp")
        flatten_mesh(mesh["dp_shard", "cp"], "dp_shard_cp")
        flatten_mesh(mesh["dp_replicate", "dp_shard", "cp"], "dp_cp")
        return mesh

    def _make_mesh(self, device_type: str) -> Any:
        """Build the device mesh ``dp_replicate x dp_shard x cp x tp``; all processes call it."""
        sizes = [self.dp_replicate, self.dp_shard, self.cp, self.tp]
        self.mesh = dist.device_mesh.init_device_mesh(device_type, sizes, mesh_dim_names=_MESH)
        # A process group costs every rank memory and connections, so dimensions are joined only if needed.
        self._sharded = self.mesh["dp_shard"]
        if self.cp > 1:
            self._sharded = flatten_mesh(self.mesh["dp_shard", "cp"], "dp_shard_cp")
        # Messages need no separate group: NCCL sends them from the device, which is in sync at the end of a step.
        if device_type == "cuda":
            self._device = torch.device("cuda", torch.cuda.current_device())
        return self.mesh

    @property
    def dp_replicate_enabled(self) -> bool:
        """Whether the model is replicated."""
        return self.dp_replicate > 1

    @property
    def dp_shard_enabled(self) -> bool:
        """Whether parameters are sharded over data-parallel ranks."""
        return self.dp_shard > 1

    @property
    def dp_enabled(self) -> bool:
        """Whether there is more than one data-parallel rank."""
        return self.data_size > 1

    @property
    def cp_enabled(self) -> bool:
        """Whether sequences are sharded."""
        return self.cp > 1

    @property
    def tp_enabled(self) -> bool:
        """Whether layers are sharded."""
        return self.tp > 1

    @property
    def ep_enabled(self) -> bool:
        """Whether experts are distributed."""
        return self.ep > 1

    @property
    def non_data_parallel_size(self) -> int:
        """Number of processes with the same examples."""
        return self.cp * self.tp

    @property
    def min_seq_len_divisor(self) -> int:
        """Number by which the padded sequence length of a batch must be divisible."""
        return self.cp * self.tp

    @property
    def data_size(self) -> int:
        """Data-parallel size: groups of processes with different examples."""
        return self.dp_replicate * self.dp_shard

    @property
    def data_rank(self) -> int:
        """Data-parallel rank of this process."""
        if self.mesh is None:
            return 0
        replica = self.mesh["dp_replicate"].get_local_rank()
        shard = self.mesh["dp_shard"].get_local_rank()
        return replica * self.dp_shard + shard

    @property
    def fsdp_mesh(self) -> Any:
        """Mesh for FSDP: ``dp_shard * cp``, preceded by ``dp_replicate`` for HSDP."""
        if self.dp_replicate == 1:
            return self._sharded
        if self.cp == 1:
            return self.mesh["dp_replicate", "dp_shard"]
        with warnings.catch_warnings():  # torch warns about joined dimensions, but has no other way to join the two
            warnings.filterwarnings("ignore", "Slicing a flattened dim", UserWarning)
            return self.mesh["dp_replicate", "dp_shard_cp"]

    @cached_property
    def _experts(self) -> Any:
        """Mesh of the experts, with the same ranks; all processes build it at their first use."""
        # ep is innermost: neighbors, usually on one machine, exchange the tokens.
        shards = self.dp_shard * self.cp * self.tp
        sizes = [self.dp_replicate, shards // self.ep, self.ep]
        names = ("dp_replicate", "dp_shard_of_experts", "ep")
        return dist.device_mesh.init_device_mesh(self.mesh.device_type, sizes, mesh_dim_names=names)

    @property
    def expert_mesh(self) -> Any:
        """Mesh dimension of expert parallelism, with different experts on each rank."""
        return self._experts["ep"]

    @property
    def expert_fsdp_mesh(self) -> Any:
        """Mesh for FSDP of a rank's experts, preceded by ``dp_replicate`` for HSDP."""
        if self.dp_replicate == 1:
            return self._experts["dp_shard_of_experts"]
        return self._experts["dp_replicate", "dp_shard_of_experts"]

    @property
    def is_main(self) -> bool:
        """Whether this is the main process, global rank 0."""
        return self.mesh is None or dist.get_rank() == 0

    def sum(self, *numbers: float) -> list[Any]:
        """Sum over all processes with different tokens; tensor-parallel ranks count once.

        Integers stay integers. The message goes from host to host, so that nobody waits for a device.
        """
        if self.world_size == 1:
            return list(numbers)
        sums, _ = self.exchange(numbers, on_host=True)
        return sums

    def any(self, flag: bool) -> bool:
        """Return whether ``flag`` is True on any process. A collective."""
        _, flags = self.exchange((), [flag])
        return flags[0]

    def exchange(
        self,
        numbers: Sequence["float | Tensor"],
        flags: Sequence["bool | Tensor"] = (),
        *,
        on_host: bool = False,
    ) -> tuple[list[Any], list[bool]]:
        """All-reduce numbers and flags in one message. A collective.

        Scalar tensors stay on their device; the host waits for the device once, for the result.

        Args:
            numbers: summed as in :meth:`sum`, in float64; sums of int are int.
            flags: each becomes True if it is True on any process.
            on_host: send the message from host to host, without a wait for the device; the numbers are no tensors.

        Returns:
            The sums, and the flags.
        """
        if self.world_size == 1:
            values = _copy_to_host([*numbers, *flags])
            own_flags = [bool(value) for value in values[len(numbers) :]]
            return values[: len(numbers)], own_flags
        device = self._device
        if on_host and "cpu:" in dist.get_backend_config():  # older recipes may have made a group of the device alone
            device = torch.device("cpu")
        message = self._write_message(numbers, flags, device)
        totals = self._reduce(message, dist.ReduceOp.SUM)
        sums = []
        for number, total in zip(numbers, totals[: len(numbers)], strict=True):
            if isinstance(number, int):
                total = round(total)  # back from float64, the dtype of the message
            sums.append(total)
        joint_flags = [count > 0 for count in totals[len(numbers) :]]
        return sums, joint_flags

    def sends_from_device(self, numbers: Sequence["float | Tensor"]) -> bool:
        """Return whether the host would wait for a device in :meth:`exchange`; the same on all processes."""
        if self.world_size > 1:
            return self._device.type == "cuda"
        return any(isinstance(number, Tensor) and number.is_cuda for number in numbers)

    def start_exchange(
        self, numbers: Sequence["float | Tensor"], flags: Sequence["bool | Tensor"] = ()
    ) -> "LateExchange":
        """Begin what :meth:`exchange` does on a CUDA device; the host goes on at once. A collective.

        Args:
            numbers: see :meth:`exchange`; all sums are float.
            flags: see :meth:`exchange`.
        """
        device = self._device
        if self.world_size == 1:  # without a mesh, the device of messages is the CPU
            device = torch.device("cuda", torch.cuda.current_device())
        message = self._write_message(numbers, flags, device)
        start_event = torch.cuda.Event(enable_timing=True)
        end_event = torch.cuda.Event(enable_timing=True)
        start_event.record()
        if self.world_size > 1:
            dist.all_reduce(message)
        end_event.record()

        def count_waiting() -> None:
            if self.world_size > 1:
                self.waited += start_event.elapsed_time(end_event) / 1000  # elapsed_time is in milliseconds

        return LateExchange(message, len(numbers), count_waiting)

    def _write_message(
        self,
        numbers: Sequence["float | Tensor"],
        flags: Sequence["bool | Tensor"],
        device: torch.device,
    ) -> Tensor:
        """Return the part of this process in the sums of numbers, then of flags, float64 ``[n]``."""
        # [numbers, flags]: one all-reduce, because each costs every rank a wait for the slowest.
        message = torch.zeros(len(numbers) + len(flags), dtype=torch.float64, device=device)
        # Tensor-parallel ranks have the same tokens: only the first of them adds its numbers, the others add zeros.
        if self.tp == 1 or self.mesh["tp"].get_local_rank() == 0:
            for index, number in enumerate(numbers):
                _write_scalar(message[index], number)
        for index, flag in enumerate(flags, start=len(numbers)):
            _write_scalar(message[index], flag)
        return message

    def sum_over_sequence(self, values: Tensor) -> Tensor:
        """Sum over the context-parallel ranks of a sequence. A collective.

        Every rank then computes the same loss from the sums. Divide this loss by ``cp``, because losses and gradients
        are summed over ranks.

        Args:
            values: for example log-probs of documents, from :meth:`Batch.sum_per_document
                <torchtune.data.Batch.sum_per_document>` ``[n]``.
        """
        if self.cp == 1:
            return values
        total = values.detach().clone()
        dist.all_reduce(total, group=self.mesh["cp"].get_group())
        # The value is the total and the gradient that of cp * values, without a collective in the backward pass:
        # each rank sends gradients to its own values alone, and the caller divides the loss by cp.
        scaled = self.cp * values
        return total + (scaled - scaled.detach())

    def gather_over_data(self, rows: Tensor) -> tuple[Tensor, int]:
        """Concatenate the rows of all data-parallel ranks, in the order of the ranks, with gradients. A collective.

        Args:
            rows: ``[n, ...]``; the number of rows may differ between ranks.

        Returns:
            The rows of all ranks ``[m, ...]``, and the index of this rank's first row. In the backward pass, a rank
            receives the gradients of its rows from all ranks.
        """
        first = 0
        for name in ("dp_shard", "dp_replicate"):  # a data-parallel rank is replica * dp_shard + shard
            if getattr(self, name) > 1:
                rows, num_before = _gather_rows(rows, self.mesh[name].get_group())
                first += num_before
        return rows, first

    def max(self, number: int) -> int:
        """Return the largest ``number`` of any process. A collective."""
        if self.world_size == 1:
            return number
        message = torch.full((1,), number, device=self._device)  # filled there: a copy would be a wait
        return self._reduce(message, dist.ReduceOp.MAX)[0]

    def _reduce(self, message: Tensor, operation: Any) -> list[Any]:
        """All-reduce over all processes, add the time to ``waited``, and return the values ``[n]`` on the host."""
        if message.is_cuda:  # the host does not wait, the stream does
            start_event = torch.cuda.Event(enable_timing=True)
            end_event = torch.cuda.Event(enable_timing=True)
            start_event.record()
            dist.all_reduce(message, operation)
            end_event.record()
            values = message.tolist()  # the host waits, after which both events are over
            self.waited += start_event.elapsed_time(end_event) / 1000  # elapsed_time is in milliseconds
            return values
        start = time.perf_counter()
        dist.all_reduce(message, operation)
        self.waited += time.perf_counter() - start
        return message.tolist()

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all processes by rank. A collective; slow, as values are pickled."""
        if self.world_size == 1:
            return [value]
        return all_gather_object(value)

    def close(self) -> None:
        """Destroy the process group."""
        if self.mesh is not None:
            dist.destroy_process_group()

    def collate(self, collate_fn: Collate) -> Collate:
        """Wrap ``collate_fn`` to return this rank's shard of every batch.

        Sequences are padded to a multiple of :attr:`min_seq_len_divisor` and sharded over the context-parallel ranks:
        see :meth:`Batch.pad_to_multiple <torchtune.data.Batch.pad_to_multiple>` and
        :meth:`Batch.split <torchtune.data.Batch.split>`.
        """
        if self.non_data_parallel_size == 1:
            return collate_fn
        return _ShardedCollate(collate_fn, self)

    @staticmethod
    def unsharded_collate(collate_fn: Collate) -> Collate:
        """Return the collate function that :meth:`collate` wrapped, for code that reads or extends whole batches.

        A function that is not wrapped is returned unchanged.
        """
        if isinstance(collate_fn, _ShardedCollate):
            return collate_fn.collate_fn
        return collate_fn


class _ShardedCollate:
    """Collate function that returns this rank's shard of every batch, see :meth:`ParallelDims.collate`."""

    def __init__(self, collate_fn: Collate, dims: ParallelDims) -> None:
        self.collate_fn = collate_fn
        self._dims = dims

    def __call__(self, examples: list[Any]) -> Batch:
        batch = Batch.from_dict(self.collate_fn(examples))
        batch = batch.pad_to_multiple(self._dims.min_seq_len_divisor)
        if self._dims.cp == 1:
            return batch
        return batch.split(self._dims.mesh["cp"].get_local_rank(), self._dims.cp)


class LateExchange:
    """All-reduced numbers and flags on their way from a CUDA device to the host.

    Args:
        message: sums of the numbers, then of the flags, float64 ``[n]``.
        num_numbers: number of the numbers.
        on_arrival: called once, when they are there.

    Attributes:
        message: see above; on the device.
    """

    def __init__(self, message: Tensor, num_numbers: int, on_arrival: Callable[[], None]) -> None:
        self.message = message
        self._num_numbers = num_numbers
        self._on_arrival = on_arrival
        # A copy to pinned memory is one that the host does not wait for.
        self._on_host = torch.empty(message.shape, dtype=message.dtype, pin_memory=True)
        self._on_host.copy_(message, non_blocking=True)
        self._arrival = torch.cuda.Event()
        self._arrival.record()

    @property
    def has_arrived(self) -> bool:
        """Whether :meth:`wait` returns at once."""
        return self._arrival.query()

    def wait(self) -> tuple[list[float], list[bool]]:
        """Wait for the device; return the sums, and the flags. Call it once."""
        self._arrival.synchronize()
        self._on_arrival()
        totals = self._on_host.tolist()
        flags = [count > 0 for count in totals[self._num_numbers :]]
        return totals[: self._num_numbers], flags


def _gather_rows(rows: Tensor, group: Any) -> tuple[Tensor, int]:
    """Concatenate the rows of the ranks of a group; return them and the number of rows of the ranks before this one."""
    size = dist.get_world_size(group)
    own_count = torch.tensor([len(rows)], device=rows.device)
    counts = torch.empty(size, dtype=torch.int64, device=rows.device)
    dist.all_gather_into_tensor(counts, own_count, group)
    num_rows = counts.tolist()
    # A collective needs equal shapes: shorter parts are padded, and the padding is cut off.
    zeros = rows.new_zeros(max(num_rows), *rows.shape[1:])
    padded = torch.cat([rows, zeros[len(rows) :]])  # [most rows, ...]
    parts = _GatherParts.apply(padded, group)  # [size, most rows, ...]
    gathered = torch.cat([part[:number] for part, number in zip(parts, num_rows, strict=True)])
    num_before = sum(num_rows[: dist.get_rank(group)])
    return gathered, num_before


class _GatherParts(torch.autograd.Function):
    """Stack the tensors of the ranks of a group; the gradient is summed over the ranks."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: Any) -> Tensor:
        ctx.group = group
        parts = part.new_empty(dist.get_world_size(group), *part.shape)
        # As bytes, because gloo has no collectives of bools.
        received = parts.flatten(0, 1).view(torch.uint8)
        sent = part.contiguous().view(torch.uint8)
        dist.all_gather_into_tensor(received, sent, group)
        return parts

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        grad = grad.contiguous()
        dist.all_reduce(grad, group=ctx.group)
        return grad[dist.get_rank(ctx.group)], None


def _copy_to_host(scalars: "Sequence[float | Tensor]") -> list[Any]:
    """Return Python numbers. Those of a CUDA device come in one copy, because the host waits for every copy."""
    on_device = []
    for scalar in scalars:
        if isinstance(scalar, Tensor) and scalar.is_cuda:
            on_device.append(scalar.to(torch.float64))
    values_from_device: list[float] = []
    if on_device:
        values_from_device = torch.stack(on_device).tolist()
    remaining_values = iter(values_from_device)
    numbers = []
    for scalar in scalars:
        if not isinstance(scalar, Tensor):
            numbers.append(scalar)
        elif scalar.is_cuda:
            numbers.append(next(remaining_values))
        else:
            numbers.append(scalar.item())
    return numbers


def _write_scalar(element: Tensor, value: "float | Tensor") -> None:
    """Write a scalar into a message's element; a tensor's value stays on its device, without a wait of the host."""
    if isinstance(value, Tensor):
        element.copy_(value)
    else:
        element.fill_(value)

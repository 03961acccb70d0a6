"""Parallel dimensions of a run's processes, and their collectives."""

import os
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from torchtune.data import Batch
from torchtune.training._distributed import get_distributed_backend, is_distributed, join_process_group
from torchtune.training.parallel._ranks import all_gather_object
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
    sequence and ``tp`` ranks every layer. Experts have a separate mesh: the ``dp_shard * cp`` ranks form groups of
    ``ep`` neighbors with different experts, and ranks with the same experts shard their parameters.

    Args:
        dp_replicate: number of replicas of the model.
        dp_shard: shards of a replica; -1 takes all remaining processes.
        tp: tensor-parallel size.
        cp: context-parallel size.
        world_size: number of processes.
        ep: expert-parallel size; a divisor of ``dp_shard * cp``.
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
            if size < 1 and not (name == "dp_shard" and size == -1):
                allowed = "at least 1, or -1 for all that are left" if name == "dp_shard" else "at least 1"
                raise ParallelDimsError(f"{_SETTINGS[name]} is {size}: it must be {allowed}.")
        others = self.dp_replicate * self.cp * self.tp
        if self.dp_shard == -1:
            if self.world_size % others:
                raise ParallelDimsError(
                    f"data_parallel_shard_dim=-1: {self.world_size} processes cannot be divided by {self._product()}"
                    f" = {others}: start a multiple of {others}, or change one of them."
                )
            self.dp_shard = self.world_size // others
        if others * self.dp_shard != self.world_size:
            raise ParallelDimsError(
                f"{self._product()} = {others * self.dp_shard}, but there are {self.world_size} processes: set "
                f"data_parallel_shard_dim=-1, or start {others * self.dp_shard} with "
                f"tune run --nproc-per-node {others * self.dp_shard}."
            )
        self._check_experts()
        self._device = torch.device("cpu")  # device of the default group's messages
        self.waited = 0.0  # seconds spent in collectives, mostly waiting for slower processes

    def _check_experts(self) -> None:
        shards = self.dp_shard * self.cp
        if self.ep > 1 and self.tp > 1:
            raise ParallelDimsError(
                f"expert_parallel_dim is {self.ep} and tensor_parallel_dim {self.tp}: layers with experts are not "
                "split any further: set tensor_parallel_dim to 1."
            )
        if shards % self.ep:
            raise ParallelDimsError(
                f"expert_parallel_dim is {self.ep}: it must divide the shards, data_parallel_shard_dim {self.dp_shard} "
                f"x context_parallel_dim {self.cp} = {shards}, of which it takes its processes."
            )

    @classmethod
    def start(cls, device: torch.device, **sizes: int) -> "ParallelDims":
        """Initialize torchrun's process group and build the mesh; without torchrun, return a single process.

        Args:
            device: device of this process.
            sizes: arguments of the class, without ``world_size``.

        Raises:
            ParallelDimsError: see the class; raised before any communication.
        """
        world_size = int(os.environ["WORLD_SIZE"]) if is_distributed() else 1
        wanted, found = os.environ.get(MACHINES_VARIABLE, ""), os.environ.get("GROUP_WORLD_SIZE", "")
        if wanted.isdigit() and found.isdigit() and int(wanted) != int(found):
            raise ParallelDimsError(
                f"This machine was started with --nnodes {wanted}, but the run has {found}: give all machines the same "
                "--nnodes."
            )
        dims = cls(**sizes, world_size=world_size)
        if is_distributed():
            if not dist.is_initialized():
                # Without device_id, torch makes the groups of the mesh anew instead of splitting the default group:
                # gloo's halves of split groups share a listener, and with connections made at the first message
                # (see join_process_group) wait for ever for each other's.
                join_process_group(get_distributed_backend(device.type, offload_ops_to_cpu=True))
            dims._make_mesh(device.type)
        return dims

    def _product(self) -> str:
        return " x ".join(f"{_SETTINGS[name]} {size}" for name in _MESH if (size := getattr(self, name)) != -1)

    def __str__(self) -> str:
        if self.world_size == 1:
            return "1 process"
        kinds = ("copies", "shards of data", "context-parallel ranks", "tensor-parallel ranks")
        split = " x ".join(f"{getattr(self, name)} {kind}" for name, kind in zip(_MESH, kinds, strict=True))
        experts = f", experts over {self.ep} of the shards" if self.ep > 1 else ""
        return f"{self.world_size} processes = {split}{experts}"

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
        sizes = [getattr(self, name) for name in _MESH]
        self.mesh = dist.device_mesh.init_device_mesh(device_type, sizes, mesh_dim_names=_MESH)
        # A process group costs every rank memory and connections, so dimensions are joined only if needed.
        self._sharded = self.mesh["dp_shard"]
        if self.cp > 1:
            self._sharded = flatten_mesh(self.mesh["dp_shard", "cp"], "dp_shard_cp")
        if self.ep > 1:
            sizes = [self.dp_replicate, self.dp_shard * self.cp // self.ep, self.ep]
            names = ("dp_replicate", "dp_shard_of_experts", "ep")
            self._experts = dist.device_mesh.init_device_mesh(device_type, sizes, mesh_dim_names=names)
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
        return self.mesh["dp_replicate"].get_local_rank() * self.dp_shard + self.mesh["dp_shard"].get_local_rank()

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

    @property
    def expert_mesh(self) -> Any:
        """Mesh dimension of expert parallelism, with different experts on each rank."""
        return self._experts["ep"]

    @property
    def expert_fsdp_mesh(self) -> Any:
        """Mesh for FSDP of a rank's experts, preceded by ``dp_replicate`` for HSDP."""
        names = ("dp_shard_of_experts",) if self.dp_replicate == 1 else ("dp_replicate", "dp_shard_of_experts")
        return self._experts[names]

    @property
    def is_main(self) -> bool:
        """Whether this is the main process, global rank 0."""
        return self.mesh is None or dist.get_rank() == 0

    def sum(self, *numbers: float) -> list[Any]:
        """Sum over all processes with different tokens; tensor-parallel ranks count once.

        Integers stay integers. A single process returns its numbers without a device sync.
        """
        return list(numbers) if self.world_size == 1 else self.exchange(numbers)[0]

    def any(self, flag: bool) -> bool:
        """Return whether ``flag`` is True on any process. A collective."""
        return self.exchange((), [flag])[1][0]

    def exchange(
        self, numbers: Sequence["float | torch.Tensor"], flags: Sequence["bool | torch.Tensor"] = ()
    ) -> tuple[list[Any], list[bool]]:
        """All-reduce numbers and flags in one message. A collective.

        Scalar tensors stay on their device; the host waits for the device once, for the result.

        Args:
            numbers: summed as in :meth:`sum`, in float64; sums of int are int.
            flags: each becomes True if it is True on any process.

        Returns:
            The sums, and the flags.
        """
        if self.world_size == 1:
            return [_to_number(number) for number in numbers], [bool(flag) for flag in flags]
        counts = self.tp == 1 or self.mesh["tp"].get_local_rank() == 0
        message = torch.zeros(len(numbers) + len(flags), dtype=torch.float64, device=self._device)
        for place, value in enumerate([*numbers, *flags]):
            if counts or place >= len(numbers):
                message[place].copy_(value) if isinstance(value, torch.Tensor) else message[place].fill_(value)
        totals = self._reduce(message, dist.ReduceOp.SUM).tolist()
        sums = [
            round(found) if isinstance(number, int) else found
            for number, found in zip(numbers, totals[: len(numbers)], strict=True)
        ]
        return sums, [found > 0 for found in totals[len(numbers) :]]

    def sum_over_sequence(self, values: torch.Tensor) -> torch.Tensor:
        """Sum over the context-parallel ranks of a sequence. A collective.

        Every rank then computes the same loss from the sums. Divide this loss by ``cp``, because losses and gradients
        are summed over ranks.

        Args:
            values: for example log-probs of documents, from :meth:`Batch.sum_per_document
                <torchtune.data.Batch.sum_per_document>` ``[n]``.
        """
        if self.cp == 1:
            return values
        whole = values.detach().clone()
        dist.all_reduce(whole, group=self.mesh["cp"].get_group())
        scaled = self.cp * values
        return whole + (scaled - scaled.detach())

    def max(self, number: int) -> int:
        """Return the largest ``number`` of any process. A collective."""
        if self.world_size == 1:
            return number
        return int(self._reduce(torch.tensor(number, device=self._device), dist.ReduceOp.MAX))

    def _reduce(self, message: torch.Tensor, how: Any) -> torch.Tensor:
        """All-reduce over all processes, and add the time to ``waited``."""
        if message.is_cuda:  # the host does not wait, the stream does
            before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            before.record()
            dist.all_reduce(message, how)
            after.record()
            after.synchronize()
            self.waited += before.elapsed_time(after) / 1000
            return message
        start = time.perf_counter()
        dist.all_reduce(message, how)
        self.waited += time.perf_counter() - start
        return message

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all processes by rank. A collective; slow, as values are pickled."""
        return all_gather_object(value) if self.world_size > 1 else [value]

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

        def collate(examples: list[Any]) -> Batch:
            batch = Batch.from_dict(collate_fn(examples)).pad_to_multiple(self.min_seq_len_divisor)
            return batch.split(self.mesh["cp"].get_local_rank(), self.cp) if self.cp > 1 else batch

        collate.unsplit = collate_fn  # for functions that extend the batch before it is sharded
        return collate


def _to_number(number: "float | torch.Tensor") -> Any:
    return number.item() if isinstance(number, torch.Tensor) else number

"""This rank's shard of a tensor: its slice of the full tensor, its values, and their checksum."""

import hashlib
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from torchtune.models import Slices
from torchtune.training.parallel._ranks import Ranks, all_gather_object
from torchtune.utils import is_simulated

if TYPE_CHECKING:
    from torchtune.training.parallel._parallel_dims import ParallelDims


def own_part(tensor: Tensor) -> Tensor:
    """Return the values of this rank's shard, sharing memory; a plain tensor is returned unchanged."""
    if hasattr(tensor, "device_mesh"):
        return tensor.detach().to_local()
    return tensor


@dataclass(frozen=True)
class ShardGrid:
    """Grid of a parameter's shards over the mesh dimensions that shard it, and this rank's coordinates in it.

    Data of shards without the parameter's layout, such as quantized states, is stacked as a tensor [*sizes, max_length]
    with one row per shard.
    """

    sizes: tuple[int, ...]
    coordinates: tuple[int, ...]

    @staticmethod
    def of(parameter: Tensor) -> "ShardGrid":
        """Return the grid of a parameter; the grid has no dimensions if the parameter is not sharded."""
        if not hasattr(parameter, "device_mesh"):
            return ShardGrid((), ())
        mesh = parameter.device_mesh
        mesh_coordinates = mesh.get_coordinate()
        sizes = []
        coordinates = []
        for dim, placement in enumerate(parameter.placements):
            if not placement.is_replicate():
                sizes.append(mesh.shape[dim])
                coordinates.append(mesh_coordinates[dim])
        return ShardGrid(tuple(sizes), tuple(coordinates))

    def largest_size(self, parameter: Tensor) -> int:
        """Return the number of elements of the largest shard."""
        if not self.sizes:
            return parameter.numel()
        shape = list(parameter.shape)
        for placement, size in zip(parameter.placements, parameter.device_mesh.shape, strict=True):
            if not placement.is_replicate():
                shape[placement.dim] = math.ceil(shape[placement.dim] / size)  # as the first chunk of torch.chunk
        return math.prod(shape)

    def stack(self, shard: Tensor, parameter: Tensor, max_length: int) -> Tensor:
        """Wrap this rank's data as its row of a DTensor with a row for each shard, without communication.

        Codes of quantized states are stored in this way. Rows are padded to ``max_length``, because shards differ in
        length. If nothing is sharded, the data themselves are returned.
        """
        if not self.sizes:
            return shard
        if shard.numel() < max_length:
            padding = max_length - shard.numel()
            shard = nn.functional.pad(shard, (0, padding))
        # The i-th mesh dimension that shards the parameter shards dimension i of the stack.
        placements = []
        num_sharded = 0
        for placement in parameter.placements:
            if placement.is_replicate():
                placements.append(Replicate())
            else:
                placements.append(Shard(num_sharded))
                num_sharded += 1
        ones = [1] * len(self.sizes)  # every rank has one row of the grid
        row = shard.view(*ones, max_length)  # [1, ..., 1, max_length]
        return DTensor.from_local(row, parameter.device_mesh, placements, run_check=False)


def full_slices(shape: torch.Size | tuple[int, ...]) -> Slices:
    """Return the slices that cover a tensor."""
    return tuple(slice(0, size) for size in shape)


def my_shard(tensor: Tensor) -> tuple[Slices, Tensor]:
    """Return this rank's slice of the full tensor, and its values, sharing memory."""
    if not isinstance(tensor, DTensor):
        return full_slices(tensor.shape), tensor.detach()
    (chunk,) = tensor.__create_chunk_list__()
    slices = []
    for start, size in zip(chunk.offsets, chunk.sizes, strict=True):
        slices.append(slice(start, start + size))
    return tuple(slices), tensor.detach().to_local()


@dataclass(frozen=True)
class LocalShard:
    """This rank's shard of a tensor to save.

    Attributes:
        spec: the full tensor, on the meta device.
        slices: this rank's slice of the full tensor.
        data: the values of the slice.
        is_writer: whether this rank writes it, among the ranks with the same slice.
    """

    spec: Tensor
    slices: Slices
    data: Tensor
    is_writer: bool

    @staticmethod
    def of(tensor: Tensor, ranks: Ranks, turn: int, parameter: Tensor | None = None) -> "LocalShard":
        """Return this rank's shard of ``tensor``.

        Args:
            tensor: sharded, or full and equal on all ranks.
            ranks: all ranks.
            turn: selects the writer among replicas: with consecutive numbers, ranks take turns.
            parameter: a sharded parameter. A plain ``tensor`` with the shape of the parameter's shard counts as a
                shard, too.
        """
        layout = tensor
        slices, data = my_shard(tensor)
        # A scalar is a count of steps, also beside a parameter of no dimensions.
        may_be_shard = not isinstance(tensor, DTensor) and isinstance(parameter, DTensor) and tensor.dim() > 0
        if may_be_shard and tensor.shape == parameter.to_local().shape:
            layout = parameter
            slices, _ = my_shard(parameter)
        spec = torch.empty(layout.shape, dtype=tensor.dtype, device="meta")
        return LocalShard(spec, slices, data, _is_writer(layout, ranks, turn))


def _is_writer(tensor: Tensor, ranks: Ranks, turn: int) -> bool:
    """Return whether this rank writes its shard, see :meth:`LocalShard.of`."""
    if not isinstance(tensor, DTensor):
        return ranks.rank == turn % ranks.size
    mesh = tensor.device_mesh
    if mesh.size() < ranks.size:
        # Replicated outside its mesh: the ranks of rank 0's mesh write it.
        has_rank_0 = bool((mesh.mesh == 0).any())
        if not has_rank_0:
            return False
    # Of the replicas, which differ in the replicated mesh dimensions alone, one writes.
    coordinates = mesh.get_coordinate()
    for dim, placement in enumerate(tensor.placements):
        if placement.is_replicate() and coordinates[dim] != turn % mesh.size(dim):
            return False
    return True


def reshard(model: nn.Module) -> None:
    """Free the all-gathered parameters that FSDP modules keep after a forward pass without a backward pass."""
    for module in model.modules():
        if hasattr(module, "reshard") and hasattr(module, "unshard"):
            module.reshard()


def full_tensor(tensor: Tensor) -> Tensor:
    """All-gather the full tensor onto every rank; a plain tensor is full already."""
    detached = tensor.detach()
    if isinstance(detached, DTensor):
        return detached.full_tensor()
    return detached


def reduce_partial(tensor: Tensor) -> Tensor:
    """All-reduce the tensor over the mesh dimensions with partial sums."""
    if not isinstance(tensor, DTensor):
        return tensor
    placements = list(tensor.placements)
    for dim, placement in enumerate(placements):
        if placement.is_partial():
            placements[dim] = Replicate()
    if placements == list(tensor.placements):
        return tensor
    return tensor.redistribute(placements=placements)


def read_shard(
    parameter: DTensor, shape: tuple[int, ...], dtype: torch.dtype, read: Callable[[Slices], Tensor]
) -> DTensor:
    """Return a tensor of optimizer state, sharded like its parameter if the shapes are equal, otherwise replicated.

    Args:
        parameter: sharded parameter; the tensor is created on its device.
        shape: shape of the full tensor.
        dtype: dtype of the tensor.
        read: returns a slice of the full tensor.
    """
    if shape == tuple(parameter.shape):
        slices, local = my_shard(parameter)
        state = torch.empty_like(parameter, dtype=dtype, requires_grad=False)
        if local.numel():  # the last ranks of a short tensor have nothing to read
            state.to_local().copy_(read(slices))
        return state
    value = read(full_slices(shape)).to(parameter.device, copy=True)
    mesh = parameter.device_mesh
    return DTensor.from_local(value, mesh, [Replicate()] * mesh.ndim, run_check=False)


def checksum_bits(tensor: Tensor) -> Iterator[Tensor]:
    """Yield sums, modulo 2**64, of the bits of this rank's shard of a tensor."""
    if hasattr(tensor, "__tensor_flatten__"):  # sharded or quantized
        names, _ = tensor.__tensor_flatten__()
        for name in names:
            inner = getattr(tensor, name)
            if isinstance(inner, Tensor):  # other attributes, such as the device mesh, have no bits
                yield from checksum_bits(inner)
        return
    data = tensor.detach().contiguous().view(-1).view(torch.uint8)  # [bytes]
    if data.storage_offset() % 8:  # a view as int64 must begin at a multiple of 8 bytes
        data = data.clone()
    # Words of 8 bytes are summed many times faster than bytes; the last bytes may be less than a word.
    end_of_words = data.numel() // 8 * 8
    yield data[:end_of_words].view(torch.int64).sum()
    yield data[end_of_words:].sum()


def is_sharded(model: nn.Module) -> bool:
    """Return whether ranks share the weights of a model."""
    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


def type_before_fsdp(module: nn.Module) -> type:
    """Return the class of a module; FSDP derives one of its own from it."""
    from torch.distributed.fsdp import FSDPModule

    for cls in type(module).__mro__:
        if not issubclass(cls, FSDPModule):
            return cls
    return type(module)


@torch.no_grad()
def checksum_parameters(model: nn.Module) -> dict[str, list[int]]:
    """Return sums of the bits of every parameter, by name: the same for a sharded model as for one on one device.

    A collective for a sharded model. The sums differ if shards do not begin at multiples of 8 bytes.
    """
    checksums = {}
    for name, parameter in model.named_parameters():
        checksums[name] = [int(checksum) for checksum in checksum_bits(parameter)]
    if not is_sharded(model):
        return checksums
    sums_of_shards: list[int] = []
    for name, parameter in model.named_parameters():
        is_counted = dist.get_rank() == 0  # a plain parameter is equal on all ranks
        if isinstance(parameter, DTensor):
            # Of equal copies, the first one counts.
            coordinates = parameter.device_mesh.get_coordinate()
            is_counted = True
            for coordinate, placement in zip(coordinates, parameter.placements, strict=True):
                if placement.is_replicate() and coordinate > 0:
                    is_counted = False
        for checksum in checksums[name]:
            sums_of_shards.append(checksum if is_counted else 0)
    gathered = all_gather_object(torch.tensor(sums_of_shards, dtype=torch.int64))
    total_sums = torch.stack(gathered).sum(0)  # [ranks, sums] -> [sums], modulo 2**64 as the sums of words
    sums = iter(total_sums.tolist())
    totals = {}
    for name, checksums_of_parameter in checksums.items():
        totals[name] = list(itertools.islice(sums, len(checksums_of_parameter)))
    return totals


@torch.no_grad()
def checksum_trained(model: nn.Module) -> list[int]:
    """Return sums of the bits of this rank's shards of all trained parameters; none in a simulation."""
    if is_simulated():
        return []
    sums: list[Tensor] = []
    for parameter in model.parameters():
        if parameter.requires_grad:
            sums += checksum_bits(parameter)
    if not sums:
        return []
    return torch.stack([total.cpu() for total in sums]).tolist()


@torch.no_grad()
def fingerprint_weights(parameters: Sequence[tuple[str, nn.Parameter]], dims: "ParallelDims") -> tuple[str, int]:
    """Return a fingerprint of names, dtypes and bits of (name, parameter) pairs. A collective."""
    names = repr([(name, parameter.dtype) for name, parameter in parameters])
    total = 0
    # The factor tells two parameters apart whose values were exchanged.
    for factor, (_, parameter) in enumerate(parameters, start=1):
        checksum = sum(map(int, checksum_bits(parameter)))
        total += factor * checksum
    (total_of_ranks,) = dims.sum(total % 2**40)  # below 2**40, the float64 sum over the ranks is exact
    return hashlib.sha256(names.encode()).hexdigest(), total_of_ranks

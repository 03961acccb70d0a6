"""The full weights of a model, as checkpoints hold them, however its conversions store them."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from torchtune.models import Slices
from torchtune.modules.conversion import Conversion, ConversionError, StoredWeight, complete_conversions
from torchtune.modules.peft import LoRALinear, owned_parameters
from torchtune.modules.peft._functional import start_from_weight
from torchtune.training.parallel._ranks import Ranks
from torchtune.training.parallel._shards import LocalShard, full_slices, full_tensor, my_shard, spec_of

# Fills a tensor with a slice of a full weight.
Read = Callable[[Slices, torch.Tensor], None]


def materialize(model: nn.Module, name: str, device: torch.device, dtype: torch.dtype | None = None) -> nn.Parameter:
    """Make a parameter on the meta device real, uninitialized; a real one is returned itself."""
    parameter = model.get_parameter(name)
    if not parameter.is_meta:
        return parameter
    data = torch.empty_like(parameter, dtype=dtype or parameter.dtype, device=device)
    return _set_parameter(model, name, nn.Parameter(data, requires_grad=parameter.requires_grad))


def _set_parameter(model: nn.Module, name: str, new: nn.Parameter) -> nn.Parameter:
    path, _, leaf = name.rpartition(".")
    model.get_submodule(path).register_parameter(leaf, new)
    return new


@contextmanager
def replaced_parameters(model: nn.Module, tensors: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """A block in which parameters of the model are replaced by these tensors."""
    kept = {name: model.get_parameter(name) for name in tensors}
    for name, tensor in tensors.items():
        _set_parameter(model, name, nn.Parameter(tensor, requires_grad=False))
    try:
        yield
    finally:
        for name, parameter in kept.items():
            _set_parameter(model, name, parameter)


class FullWeights:
    """Reads and writes the full weights of a model, one at a time.

    A full weight has a name of the weight map. Most are stored as a parameter of that name; a conversion may store a
    weight in another form (:meth:`torchtune.modules.conversion.Conversion.stored_weights`).

    Args:
        model: on the meta device or real, sharded or not. Its present parameters are read and written: during a
            training step FSDP replaces them.

    Attributes:
        owned: names of the parameters that conversions save apart from the base weights.
        base: names of the base weights.
        stored: names of the base weights that a conversion stores in another form.
        starts: adapted layers, by name of the weight that :meth:`fill` splits into initial adapter and rest.
        inside: names of the parameters that store these.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model, self._conversions = model, complete_conversions(model)
        self._parameters: dict[str, nn.Parameter] = dict(model.named_parameters())
        self.owned = owned_parameters(model)
        self._stored: dict[str, tuple[Conversion, StoredWeight]] = {}
        for conversion in self._conversions:
            self._stored |= {name: (conversion, form) for name, form in conversion.stored_weights(model).items()}
        self.stored = set(self._stored)
        self.starts: dict[str, LoRALinear] = {}
        self.inside = {name for _, form in self._stored.values() for name in form.names}
        self.base = {name for name in self._parameters if name not in self.owned | self.inside} | self.stored
        layers = {name.rpartition(".")[0] for name in self.base}
        self._apart = {name for name in self.owned if not layers.intersection(_parents(name))}

    def parameters(self, name: str) -> tuple[str, ...]:
        """Names of the parameters that store a full weight."""
        return self._stored[name][1].names if name in self._stored else (name,)

    def spec(self, name: str) -> torch.Tensor:
        """A full weight on the meta device: its shape, and its dtype in files."""
        if name in self._stored:
            form = self._stored[name][1]
            return torch.empty(form.shape, dtype=form.dtype, device="meta")
        return spec_of(self._parameters[name])

    def fill(self, name: str, read: Read, device: torch.device, dtype: torch.dtype | None = None) -> None:
        """Fill this rank's shard of a full weight, in the form in which it is stored.

        Args:
            name: of the full weight.
            read: fills a tensor with a slice of the full weight; called at most once, for the slice of this rank.
            device: where parameters on the meta device become real.
            dtype: of these, if the weight is stored as it is; their own by default.

        Raises:
            ConversionError: ``from_full`` returns tensors that do not fit the parameters.
        """
        if name in self.starts:
            self._fill_started(name, read, device, dtype)
            return
        if name in self._stored:
            self._fill_stored(name, read, device)
            return
        self._parameters[name] = materialize(self._model, name, device, dtype)
        slices, local = my_shard(self._parameters[name])
        if local.numel():
            read(slices, local)

    def _fill_stored(self, name: str, read: Read, device: torch.device) -> None:
        """Read the rows of a full weight that this rank needs, convert them, and keep this rank's shards."""
        form = self._stored[name][1]
        self._parameters |= {part: materialize(self._model, part, device) for part in form.names}
        shards = {part: my_shard(self._parameters[part]) for part in form.names}
        rows = _rows(form, [slices for slices, _ in shards.values()])
        if rows.start == rows.stop:
            return
        slices = (rows, *full_slices(form.shape[1:]))
        value = torch.empty(_size(slices), dtype=form.dtype, device=device)
        read(slices, value)
        for part, tensor in self._from_full(name, value).items():
            place, local = shards[part]
            local.copy_(tensor[_relative(place, rows) if form.by_rows else place])

    def _fill_started(self, name: str, read: Read, device: torch.device, dtype: torch.dtype | None) -> None:
        """Read a full weight; fill the adapter with its initial value, and the weight with the rest."""
        layer, path = self.starts.pop(name), name.rpartition(".")[0]
        value = torch.empty_like(self.spec(name), dtype=dtype, device=device)
        read(full_slices(value.shape), value)
        parts = start_from_weight(value.float(), layer.start, layer.rank, layer.scaling)
        for part, tensor in zip((name, f"{path}.lora_a.weight", f"{path}.lora_b.weight"), parts, strict=True):
            self.fill(part, lambda slices, target, tensor=tensor: target.copy_(tensor[slices]), device, dtype)

    def put(self, name: str, value: torch.Tensor) -> None:
        """Copy this rank's shard of ``value``, a full weight, into a real model."""
        self.fill(name, lambda slices, target: target.copy_(value[slices]), value.device)

    def equals(self, name: str, value: torch.Tensor) -> bool:
        """Whether this rank's shard equals that of ``value``, a full weight of the same shape, as it is stored."""
        tensors = {name: value}
        if name in self._stored:
            tensors = self._from_full(name, value.to(self.spec(name).dtype))
        shards = {part: my_shard(self._parameters[part]) for part in tensors}
        return all(torch.equal(tensors[part][slices].to(local), local) for part, (slices, local) in shards.items())

    def shard(self, name: str, ranks: Ranks, turn: int) -> LocalShard:
        """This rank's shard of a full weight, to be saved. All ranks call it: some conversions need an all-gather.

        Args:
            name: of the full weight.
            ranks: all ranks.
            turn: chooses the writer among replicas, see :meth:`LocalShard.of`.
        """
        if name not in self._stored:
            return LocalShard.of(self._parameters[name], ranks, turn)
        slices, is_writer = self._convertible_rows(name, ranks, turn)
        if slices is None:
            return self._replicated(name, self.full(name), ranks, turn)
        tensors = {part: my_shard(self._parameters[part])[1] for part in self.parameters(name)}
        return LocalShard(self.spec(name), slices, self._to_full(name, tensors, _size(slices)), is_writer)

    def _convertible_rows(self, name: str, ranks: Ranks, turn: int) -> tuple[Slices | None, bool]:
        """Rows of a stored weight that this rank converts without other ranks, if any, and whether it writes them."""
        form = self._stored[name][1]
        shards = [LocalShard.of(self._parameters[part], ranks, turn) for part in form.names]
        if not any(isinstance(self._parameters[part], DTensor) for part in form.names):
            return full_slices(form.shape), shards[0].is_writer
        rows = shards[0].slices[0]
        if not form.by_rows or any(not _has_full_rows(shard) or shard.slices[0] != rows for shard in shards):
            return None, False
        return (rows, *full_slices(form.shape[1:])), shards[0].is_writer

    def _replicated(self, name: str, weight: torch.Tensor, ranks: Ranks, turn: int) -> LocalShard:
        """A weight that all ranks hold in full; ``turn`` chooses the one that writes it."""
        return LocalShard(self.spec(name), full_slices(weight.shape), weight, ranks.rank == turn % ranks.size)

    def full(self, name: str) -> torch.Tensor:
        """The full weight on every rank, by an all-gather; all ranks call it."""
        return self._full(name, {})

    def _full(self, name: str, gathered: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The full weight; ``gathered`` holds full parameters that need no all-gather."""
        tensors = {
            part: gathered[part] if part in gathered else full_tensor(self._parameters[part])
            for part in self.parameters(name)
        }
        return self._to_full(name, tensors, self.spec(name).shape) if name in self._stored else tensors[name]

    def merged_shard(self, name: str, ranks: Ranks, turn: int) -> LocalShard:
        """As :meth:`shard`, with the owned parameters of conversions merged in; this needs an all-gather."""
        path = name.rpartition(".")[0]
        inside = {f"{path}.{leaf}" for leaf, _ in self._model.get_submodule(path).named_parameters()} | self._apart
        if not inside & self.owned:
            return self.shard(name, ranks, turn)
        sharded = [key for key in sorted(inside) if isinstance(self._parameters[key], DTensor)]
        gathered = {key: full_tensor(self._parameters[key]) for key in sharded}
        with replaced_parameters(self._model, gathered):
            weight = self._full(name, gathered)
            for conversion in self._conversions:
                weight = _same_kind(conversion, name, conversion.merged(name, weight, self._model), weight)
        if name in self._stored:
            return self._replicated(name, weight, ranks, turn)
        shard = LocalShard.of(self._parameters[name], ranks, turn)
        weight = weight[shard.slices].clone() if sharded else weight[shard.slices]  # a view would keep the full weight
        return LocalShard(shard.spec, shard.slices, weight, shard.is_writer)

    def _from_full(self, name: str, value: torch.Tensor) -> dict[str, torch.Tensor]:
        conversion, form = self._stored[name]
        tensors, wanted = conversion.from_full(name, value), {}
        for part in form.names:
            parameter = self._parameters[part]
            shape = (value.shape[0], *parameter.shape[1:]) if form.by_rows else tuple(parameter.shape)
            wanted[part] = (shape, parameter.dtype)
        found = {part: (tuple(tensor.shape), tensor.dtype) for part, tensor in tensors.items()}
        if found != wanted:
            raise ConversionError(
                f"model_converters: from_full('{name}') of {type(conversion).__name__} returned {_listed(found)}, but "
                f"the weight is stored as {_listed(wanted)}: make them equal."
            )
        return tensors

    def _to_full(self, name: str, tensors: Mapping[str, torch.Tensor], shape: Sequence[int]) -> torch.Tensor:
        conversion, form = self._stored[name]
        weight = conversion.to_full(name, tensors)
        if tuple(weight.shape) != tuple(shape):
            raise ConversionError(
                f"model_converters: to_full('{name}') of {type(conversion).__name__} returned a tensor of the shape "
                f"{list(weight.shape)}, but the full weight has the shape {list(shape)}: make them equal."
            )
        return weight.to(form.dtype)


def _parents(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:end]) for end in range(1, len(parts))]


def _same_kind(conversion: Conversion, name: str, merged: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    if merged.shape != weight.shape or merged.dtype != weight.dtype:
        found, wanted = (_listed({name: (tensor.shape, tensor.dtype)}) for tensor in (merged, weight))
        raise ConversionError(
            f"model_converters: merged('{name}', …) of {type(conversion).__name__} returned {found}, but the weight is "
            f"{wanted}: make them equal."
        )
    return merged


def _size(slices: Slices) -> tuple[int, ...]:
    return tuple(part.stop - part.start for part in slices)


def _rows(form: StoredWeight, shards: Sequence[Slices]) -> slice:
    """The rows of a full weight that are needed to fill these shards of its stored tensors."""
    if not form.by_rows:
        return slice(0, form.shape[0])
    return slice(min(slices[0].start for slices in shards), max(slices[0].stop for slices in shards))


def _relative(slices: Slices, rows: slice) -> Slices:
    return slice(slices[0].start - rows.start, slices[0].stop - rows.start), *slices[1:]


def _has_full_rows(shard: LocalShard) -> bool:
    """Whether a tensor is sharded in no other dimension than the first."""
    return shard.slices[1:] == full_slices(shard.spec.shape[1:])


def _listed(tensors: Mapping[str, tuple[Sequence[int], torch.dtype]]) -> str:
    return ", ".join(f"{name} {dtype} {list(shape)}" for name, (shape, dtype) in tensors.items()) or "nothing"

"""View of a model for checkpoints: its full weights, independent of conversions, and other saved tensors."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from torchtune.checkpoints._checkpoint_error import CheckpointError
from torchtune.checkpoints._safetensors_file import Entry, TensorSlice
from torchtune.models import Description, Group, Identity, ModelSpec, Slices
from torchtune.modules.conversion import (
    Conversion,
    ConversionError,
    StoredWeight,
    complete_conversions,
    get_conversions,
)
from torchtune.modules.peft import LoRALinear, init_from_weight
from torchtune.training.parallel import LocalShard, Ranks, full_slices, full_tensor, my_shard

# Fills a tensor with a slice of a full weight.
Read = Callable[[Slices, torch.Tensor], None]


def identity(model: nn.Module) -> tuple[ModelSpec, Description]:
    """Spec and description of a model.

    Raises:
        CheckpointError: no builder of this library attached them.
    """
    spec, description = getattr(model, "spec", None), getattr(model, "description", None)
    if spec is None or description is None:
        raise CheckpointError(
            f"{type(model).__name__} carries no ModelSpec, so the names of its weights in other formats are not known: "
            "build it with a builder of torchtune.models."
        )
    return spec, description


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


def check_shape(where: Path, name: str, found: Sequence[int], wanted: Sequence[int]) -> None:
    """Raise ``CheckpointError`` with file, tensor and both shapes if they differ."""
    if tuple(found) == tuple(wanted):
        return
    hint = "the checkpoint is of another model than the one in the config, or of other sizes"
    if len(found) == 2 and found[1:] == wanted[1:] and ("emb" in name or "lm_head" in name or "output" in name):
        hint = f"the checkpoint has a vocabulary of {found[0]} tokens, build the model with that vocab_size"
    raise CheckpointError(
        f"{where}: the tensor '{name}' has the shape {list(found)} where the model needs {list(wanted)}: {hint}."
    )


class ModelWeights:
    """Reads and writes the weights of a model, one at a time; built once for a load or a save.

    A full weight has a name of the weight map. Most are stored as a parameter of that name; a conversion may store a
    weight in another form (:meth:`torchtune.modules.conversion.Conversion.stored_weights`).

    Args:
        model: the model, on the meta device or real, sharded or not. Its current parameters are read and written;
            during a training step FSDP replaces them.

    Attributes:
        model: the model.
        conversions: conversions of the model.
        parameters: parameters of the model, by name.
        owned: names of the parameters that conversions save apart from the base weights.
        stored: base weights that a conversion stores in another form, by name.
        inside: names of the parameters that store these.
        base: names of the base weights.
        starts: adapted layers, by name of the weight that :meth:`fill` splits into initial adapter and rest.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model, self.conversions = model, complete_conversions(model)
        self.parameters: dict[str, nn.Parameter] = dict(model.named_parameters())
        self._owned_by = [conversion.owned_parameters(model) for conversion in self.conversions]
        self.owned: set[str] = set().union(*self._owned_by)
        self.stored: dict[str, tuple[Conversion, StoredWeight]] = {
            name: (one, form) for one in self.conversions for name, form in one.stored_weights(model).items()
        }
        self.inside = {name for _, form in self.stored.values() for name in form.names}
        self.base = (self.parameters.keys() - self.owned - self.inside) | self.stored.keys()
        self.starts: dict[str, LoRALinear] = {}

    @cached_property
    def identity(self) -> tuple[ModelSpec, Description]:
        """See :func:`identity`."""
        return identity(self.model)

    @cached_property
    def trained(self) -> list[str]:
        """Names of the parameters that require a gradient, or that a hook of a conversion changes."""
        moved = set().union(*(conversion.moved_parameters(self.model) for conversion in self.conversions))
        return [name for name, parameter in self.parameters.items() if parameter.requires_grad or name in moved]

    @cached_property
    def peft_settings(self) -> dict[str, Any]:
        """``peft_config`` of all conversions."""
        return {key: value for one in self.conversions for key, value in one.peft_config(self.model).items()}

    @cached_property
    def new_rows(self) -> dict[str, tuple[str, list[int]]]:
        """Name of a weight -> name of the parameter with its trained rows, and their token ids."""
        return {name: rows for one in self.conversions for name, rows in one.new_rows(self.model).items()}

    @cached_property
    def owned_files(self) -> dict[str, list[str]]:
        """Files of owned parameters that PEFT's layout has no names for, one for each class of conversions."""
        placed, files = {rows for rows, _ in self.new_rows.values()}, {}
        for conversion, owned in zip(self.conversions, self._owned_by, strict=True):
            placed |= owned if conversion.peft_config(self.model) else set()
        for given, owned in zip(get_conversions(self.model), self._owned_by, strict=True):
            if names := sorted(owned - placed):
                files.setdefault(f"adapter_{type(given).__name__}.safetensors", []).extend(names)
                placed.update(names)
        return files

    def adapter_names(self, *, merge: bool) -> set[str]:
        """Names of the owned parameters that a save preserves in the adapter or, to ``merge``, in the weights too."""
        spec, description = self.identity
        found = {name for group in spec.weight_map("hf").peft().groups(description) for name in group.tune}
        found.update(rows for rows, _ in self.new_rows.values())
        found.update(*self.owned_files.values())
        pairs = zip(self.conversions, self._owned_by, strict=True)
        return found & set().union(*(owned for conversion, owned in pairs if conversion.can_merge or not merge))

    def check_names(self, *, exported: bool = False) -> None:
        """Check that the parameters have the names that the family's weights have.

        Args:
            exported: whether weights are exported, so that every parameter that no conversion owns needs a name in
                files.

        Raises:
            CheckpointError: a conversion took a weight away, or added a parameter.
        """
        spec, description = self.identity
        known = {name for group in spec.weight_map("hf").groups(description) for name in group.tune}
        modules = {path for path, _ in self.model.named_modules()}  # a simulated model lacks whole layers
        lost = sorted(n for n in known - self.base if ".".join(n.rpartition(".")[0].split(".")[:2]) in modules)
        if lost:
            leaf = lost[0].rpartition(".")[2]
            moved = [name for name in self.base - known if name.startswith(f"{lost[0].rpartition('.')[0]}.")]
            where = f" (but '{next((name for name in moved if name.endswith(leaf)), moved[0])}')" if moved else ""
            raise CheckpointError(
                f"model: it has no parameter '{lost[0]}'{where}: a conversion must keep the names of weights, so "
                "replace a layer by one of a subclass instead of wrapping it."
            )
        if exported and (unknown := self.base - known):
            raise CheckpointError(
                f"model: '{min(unknown)}' has no name in Hugging Face's format, so it cannot be saved: name it in "
                "owned_parameters(model) of the conversion that adds it."
            )

    def spec(self, name: str) -> torch.Tensor:
        """A full weight on the meta device: its shape, and its dtype in files."""
        form = self.stored[name][1] if name in self.stored else self.parameters[name]
        return torch.empty(form.shape, dtype=form.dtype, device="meta")

    def load(
        self, name: str, value: torch.Tensor, where: Path, device: torch.device, dtype: torch.dtype | None = None
    ) -> None:
        """Copy this rank's shard of ``value`` into a parameter, which becomes real on ``device`` if it is on meta.

        Raises:
            CheckpointError: the shapes differ.
        """
        check_shape(where, name, value.shape, self.parameters[name].shape)
        self.parameters[name] = materialize(self.model, name, device, dtype)
        slices, local = my_shard(self.parameters[name])
        local.copy_(value[slices])

    def fill(self, name: str, read: Read, device: torch.device, dtype: torch.dtype | None = None) -> None:
        """Fill this rank's shard of a full weight, in the form in which it is stored.

        Args:
            name: name of the full weight.
            read: fills a tensor with a slice of the full weight; called at most once, for the slice of this rank.
            device: device for parameters on the meta device.
            dtype: dtype for parameters on the meta device, unless a conversion stores the weight in another form; by
                default they keep theirs.

        Raises:
            ConversionError: ``from_full`` returns tensors that do not fit the parameters.
        """
        if name in self.starts:
            self._fill_started(name, read, device, dtype)
            return
        if name in self.stored:
            self._fill_stored(name, read, device)
            return
        self.parameters[name] = materialize(self.model, name, device, dtype)
        slices, local = my_shard(self.parameters[name])
        if local.numel():
            read(slices, local)

    def _fill_stored(self, name: str, read: Read, device: torch.device) -> None:
        """Read the rows of a full weight that this rank needs, convert them, and keep this rank's shards."""
        form = self.stored[name][1]
        self.parameters |= {part: materialize(self.model, part, device) for part in form.names}
        shards = {part: my_shard(self.parameters[part]) for part in form.names}
        rows = slice(0, form.shape[0])
        if form.by_rows:
            first = [slices[0] for slices, _ in shards.values()]
            rows = slice(min(part.start for part in first), max(part.stop for part in first))
        if rows.start == rows.stop:
            return
        slices = (rows, *full_slices(form.shape[1:]))
        value = torch.empty(_size(slices), dtype=form.dtype, device=device)
        read(slices, value)
        for part, tensor in self._from_full(name, value).items():
            place, local = shards[part]
            if form.by_rows:
                place = slice(place[0].start - rows.start, place[0].stop - rows.start), *place[1:]
            local.copy_(tensor[place])

    def _fill_started(self, name: str, read: Read, device: torch.device, dtype: torch.dtype | None) -> None:
        """Read a full weight; fill the adapter with its initial value, and the weight with the rest."""
        layer, path = self.starts.pop(name), name.rpartition(".")[0]
        value = torch.empty_like(self.spec(name), dtype=dtype, device=device)
        read(full_slices(value.shape), value)
        parts = init_from_weight(value.float(), layer.start, layer.rank, layer.scaling)
        for part, tensor in zip((name, f"{path}.lora_a.weight", f"{path}.lora_b.weight"), parts, strict=True):
            self.fill(part, lambda slices, target, tensor=tensor: target.copy_(tensor[slices]), device, dtype)

    def put(self, name: str, value: torch.Tensor) -> None:
        """Copy this rank's shard of ``value``, a full weight, into a real model."""
        self.fill(name, lambda slices, target: target.copy_(value[slices]), value.device)

    def equals(self, name: str, value: torch.Tensor) -> bool:
        """Whether this rank's shard equals that of ``value``, a full weight of the same shape, as it is stored."""
        tensors = {name: value}
        if name in self.stored:
            tensors = self._from_full(name, value.to(self.spec(name).dtype))
        shards = {part: my_shard(self.parameters[part]) for part in tensors}
        return all(torch.equal(tensors[part][slices].to(local), local) for part, (slices, local) in shards.items())

    def entry(self, group: Group, ranks: Ranks, turn: int, *, merge: bool = False) -> Entry:
        """The tensors of one group, under their external names.

        Making them needs memory for one tensor. To merge into a sharded model, all ranks make an entry together.

        Args:
            group: group of a weight map.
            ranks: every rank makes its own shard.
            turn: chooses the writer among replicas, see :meth:`LocalShard.of`.
            merge: merge owned parameters into the weights, in float32, then round.
        """
        specs = group.to_external([self.spec(name) for name in group.tune])
        shapes = [spec.shape for spec in specs]

        def make() -> list[TensorSlice]:
            made = []
            for name in group.tune:
                shard = self.shard(name, ranks, turn, merge=merge)
                for part in group.external_slices(name, shard.slices, shapes) if shard.is_writer else ():
                    data, start = part.of(shard.data), tuple(dim.start for dim in part.slices)
                    made.append(TensorSlice(group.external[part.external], start, tuple(data.shape), data))
            return made

        return Entry(dict(zip(group.external, specs, strict=True)), make)

    def entry_of(self, name: str, external: str, ranks: Ranks, turn: int) -> Entry:
        """A parameter as it is, under another name; see :meth:`entry`."""
        return self.entry(Group((external,), (name,), Identity(), self.identity[1]), ranks, turn)

    def shard(self, name: str, ranks: Ranks, turn: int, *, merge: bool = False) -> LocalShard:
        """This rank's shard of a full weight, to be saved; see :meth:`entry`.

        All ranks call it: some conversions, and merging, need an all-gather.
        """
        if merge and (inside := self._merged_into(name)):
            return self._merged_shard(name, inside, ranks, turn)
        if name not in self.stored:
            return LocalShard.of(self.parameters[name], ranks, turn)
        form = self.stored[name][1]
        shards = {part: LocalShard.of(self.parameters[part], ranks, turn) for part in form.names}
        first, slices = shards[form.names[0]], full_slices(form.shape)
        if any(isinstance(self.parameters[part], DTensor) for part in form.names):
            rows = first.slices[0]
            same_rows = all(shard.slices == (rows, *full_slices(shard.spec.shape[1:])) for shard in shards.values())
            if not form.by_rows or not same_rows:
                return self._replicated(name, self.full(name), ranks, turn)
            slices = rows, *slices[1:]
        tensors = {part: shard.data for part, shard in shards.items()}
        return LocalShard(self.spec(name), slices, self._to_full(name, tensors, _size(slices)), first.is_writer)

    def _replicated(self, name: str, weight: torch.Tensor, ranks: Ranks, turn: int) -> LocalShard:
        return LocalShard(self.spec(name), full_slices(weight.shape), weight, ranks.rank == turn % ranks.size)

    def full(self, name: str, gathered: Mapping[str, torch.Tensor] | None = None) -> torch.Tensor:
        """The full weight on every rank, by an all-gather; all ranks call it.

        Args:
            name: name of the weight.
            gathered: full parameters that need no all-gather, by name.
        """
        tensors = {
            part: full_tensor(self.parameters[part]) if gathered is None or part not in gathered else gathered[part]
            for part in (self.stored[name][1].names if name in self.stored else (name,))
        }
        return self._to_full(name, tensors, self.spec(name).shape) if name in self.stored else tensors[name]

    @cached_property
    def _apart(self) -> set[str]:
        """Owned parameters of modules without a base weight: they may change any weight."""
        layers = {name.rpartition(".")[0] for name in self.base}
        return {name for name in self.owned if not layers.intersection(_parents(name))}

    def _merged_into(self, name: str) -> set[str]:
        """The parameters that make a weight with owned ones merged into it; empty if no owned one is among them."""
        path = name.rpartition(".")[0]
        inside = {f"{path}.{leaf}" for leaf, _ in self.model.get_submodule(path).named_parameters()} | self._apart
        return inside if inside & self.owned else set()

    def _merged_shard(self, name: str, inside: set[str], ranks: Ranks, turn: int) -> LocalShard:
        sharded = [key for key in sorted(inside) if isinstance(self.parameters[key], DTensor)]
        gathered = {key: full_tensor(self.parameters[key]) for key in sharded}
        with replaced_parameters(self.model, gathered):
            weight = self.full(name, gathered)
            for conversion in self.conversions:
                merged = conversion.merged(name, weight, self.model)
                if merged.shape != weight.shape or merged.dtype != weight.dtype:
                    found, wanted = _listed({name: merged}), f"the weight is {_listed({name: weight})}"
                    raise _wrong(conversion, f"merged('{name}', …)", found, wanted)
                weight = merged
        if name in self.stored:
            return self._replicated(name, weight, ranks, turn)
        shard = LocalShard.of(self.parameters[name], ranks, turn)
        weight = weight[shard.slices].clone() if sharded else weight[shard.slices]  # a view would keep the full weight
        return LocalShard(shard.spec, shard.slices, weight, shard.is_writer)

    def _from_full(self, name: str, value: torch.Tensor) -> dict[str, torch.Tensor]:
        conversion, form = self.stored[name]
        tensors, wanted = conversion.from_full(name, value), {}
        for part in form.names:
            parameter = self.parameters[part]
            shape = (value.shape[0], *parameter.shape[1:]) if form.by_rows else tuple(parameter.shape)
            wanted[part] = torch.empty(shape, dtype=parameter.dtype, device="meta")
        if (found := _listed(tensors)) != (stored := _listed(wanted)):
            raise _wrong(conversion, f"from_full('{name}')", found, f"the weight is stored as {stored}")
        return tensors

    def _to_full(self, name: str, tensors: Mapping[str, torch.Tensor], shape: Sequence[int]) -> torch.Tensor:
        conversion, form = self.stored[name]
        weight = conversion.to_full(name, tensors)
        if tuple(weight.shape) != tuple(shape):
            found = f"a tensor of the shape {list(weight.shape)}"
            raise _wrong(conversion, f"to_full('{name}')", found, f"the full weight has the shape {list(shape)}")
        return weight.to(form.dtype)


def _parents(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:end]) for end in range(1, len(parts))]


def _size(slices: Slices) -> tuple[int, ...]:
    return tuple(part.stop - part.start for part in slices)


def _wrong(conversion: Conversion, call: str, found: str, wanted: str) -> ConversionError:
    name = type(conversion).__name__
    return ConversionError(f"model_converters: {call} of {name} returned {found}, but {wanted}: make them equal.")


def _listed(tensors: Mapping[str, torch.Tensor]) -> str:
    tensors = sorted(tensors.items())
    return ", ".join(f"{name} {tensor.dtype} {list(tensor.shape)}" for name, tensor in tensors) or "nothing"

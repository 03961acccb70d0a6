"""Views of a model's weights, to load them and to save them, independent of conversions."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from torchtune.checkpoints._save import Entry, TensorSlice
from torchtune.checkpoints._weight_files import CheckpointError
from torchtune.models import Description, Group, Identity, ModelSpec, Slices
from torchtune.modules.conversion import Conversion, ConversionError, StoredWeight, get_conversions
from torchtune.modules.peft import LoRALinear, has_adapters, init_from_weight
from torchtune.training.parallel import LocalShard, Ranks, full_slices, full_tensor, my_shard

# Fills a tensor with a slice of a full weight.
Read = Callable[[Slices, torch.Tensor], None]


def identity(model: nn.Module) -> tuple[ModelSpec, Description]:
    """Return the spec and description of a model.

    Raises:
        CheckpointError: the model was not built by :mod:`torchtune.models`.
    """
    spec, description = getattr(model, "spec", None), getattr(model, "description", None)
    if spec is None or description is None:
        raise CheckpointError(
            f"{type(model).__name__} carries no ModelSpec, so the names of its weights in other formats are not known: "
            "build it with a builder of torchtune.models."
        )
    return spec, description


def materialize(model: nn.Module, name: str, device: torch.device, dtype: torch.dtype | None = None) -> nn.Parameter:
    """Materialize a parameter on the meta device, uninitialized; return any other parameter unchanged."""
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
    """Context manager that replaces parameters of the model by ``tensors``."""
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
    """View of a model's weights, one at a time, independent of conversions; built once for a load or a save.

    Full weights have the names of the weight map. Most are parameters with the same name; a conversion may store a
    weight in another form (:meth:`torchtune.modules.conversion.Conversion.stored_weights`).

    Args:
        model: the model, on the meta device or materialized, sharded or not. Its parameters are looked up on each
            access, because FSDP replaces them during a training step.

    Attributes:
        model: the model.
        conversions: conversions of the model.
        parameters: parameters of the model, by name.
        owned: names of the parameters that conversions save apart from the base weights.
        stored: base weights that a conversion stores in another form, by name.
        inside: names of the parameters that store the weights in :attr:`stored`.
        base: names of the base weights.
        starts: adapted layers with weights that :meth:`fill` splits into the initial adapter and the rest, by name of
            the weight.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model, self.conversions = model, get_conversions(model)
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
    def groups(self) -> dict[str, Group]:
        """Group of each base weight in the weight map, which has its Hugging Face name, by this library's name."""
        spec, description = self.identity
        return {name: group for group in spec.weight_map("hf").groups(description) for name in group.tune}

    @cached_property
    def adapter_groups(self) -> dict[str, Group]:
        """Group of each possible adapter in the weight map, which has its PEFT name, by this library's name."""
        spec, description = self.identity
        return {name: group for group in spec.weight_map("hf").peft().groups(description) for name in group.tune}

    @cached_property
    def specs(self) -> dict[str, torch.Tensor]:
        """Full weights on the meta device, by name: shape, and dtype in files."""
        forms = self.parameters | {name: form for name, (_, form) in self.stored.items()}
        return {name: torch.empty(form.shape, dtype=form.dtype, device="meta") for name, form in forms.items()}

    @cached_property
    def _peft_configs(self) -> list[dict[str, Any]]:
        return [conversion.peft_config(self.model) for conversion in self.conversions]

    @cached_property
    def peft_settings(self) -> dict[str, Any]:
        """``peft_config`` of all conversions."""
        return {key: value for settings in self._peft_configs for key, value in settings.items()}

    @cached_property
    def new_rows(self) -> dict[str, tuple[str, list[int]]]:
        """Name of a weight -> name of the parameter with its trained rows, and the token ids of these rows."""
        return {name: rows for one in self.conversions for name, rows in one.new_rows(self.model).items()}

    @cached_property
    def owned_files(self) -> dict[str, list[str]]:
        """Files for owned parameters without a name in PEFT's layout, one for each class of conversions."""
        placed, files = {rows for rows, _ in self.new_rows.values()}, {}
        for settings, owned in zip(self._peft_configs, self._owned_by, strict=True):
            placed |= owned if settings else set()
        for given, owned in zip(get_conversions(self.model), self._owned_by, strict=True):
            if names := sorted(owned - placed):
                files.setdefault(f"adapter_{type(given).__name__}.safetensors", []).extend(names)
                placed.update(names)
        return files

    def check_names(self, *, exported: bool = False) -> None:
        """Check that the parameters have the names of the family's weight map.

        Args:
            exported: whether the weights are exported; every parameter that no conversion owns then needs a name in
                files.

        Raises:
            CheckpointError: a conversion removed a weight, or added a parameter that it does not own, or the output is
                tied to an embedding that was replaced.
        """
        known = set(self.groups)
        modules = {path for path, _ in self.model.named_modules()}  # a simulated model lacks whole layers
        lost = sorted(n for n in known - self.base if ".".join(n.rpartition(".")[0].split(".")[:2]) in modules)
        if lost:
            path, _, leaf = lost[0].rpartition(".")
            moved = [name for name in self.base - known if name.startswith(f"{path}.")]
            where = f" (but '{next((name for name in moved if name.endswith(leaf)), moved[0])}')" if moved else ""
            raise CheckpointError(
                f"model: it has no parameter '{lost[0]}'{where}: a conversion must keep the names of weights, so "
                "replace a layer by one of a subclass instead of wrapping it."
            )
        tied = getattr(getattr(self.model, "output", None), "tied_module", None)
        if tied is not None and tied is not getattr(self.model, "tok_embeddings", tied):
            raise CheckpointError(
                "model: its output is tied to another embedding than tok_embeddings, which no file would hold: change "
                "its size with torchtune.modules.resize_token_embeddings, and values in place."
            )
        if exported and (unknown := self.base - known):
            raise CheckpointError(
                f"model: '{min(unknown)}' has no name in Hugging Face's format, so it cannot be saved: name it in "
                "owned_parameters(model) of the conversion that adds it."
            )

    def load(
        self, name: str, value: torch.Tensor, where: Path, device: torch.device, dtype: torch.dtype | None = None
    ) -> None:
        """Copy this rank's shard of ``value`` into a parameter; one on the meta device is materialized on ``device``.

        Raises:
            CheckpointError: the shapes differ.
        """
        check_shape(where, name, value.shape, self.parameters[name].shape)
        slices, local = self._materialized(name, device, dtype)
        local.copy_(value[slices])

    def _materialized(
        self, name: str, device: torch.device, dtype: torch.dtype | None = None
    ) -> tuple[Slices, torch.Tensor]:
        """Materialize a parameter; return this rank's slice of it, and the values of the slice."""
        self.parameters[name] = materialize(self.model, name, device, dtype)
        return my_shard(self.parameters[name])

    def fill(self, name: str, read: Read, device: torch.device, dtype: torch.dtype | None = None) -> None:
        """Fill this rank's shard of a full weight, in the form in which it is stored.

        Args:
            name: name of the full weight.
            read: fills a tensor with a slice of the full weight; called at most once, for the slice of this rank.
            device: device for parameters on the meta device.
            dtype: dtype for parameters on the meta device, unless a conversion stores the weight in another form;
                unchanged by default.

        Raises:
            ConversionError: ``from_full`` returns tensors that do not fit the parameters.
        """
        if name in self.starts:
            self._fill_started(name, read, device, dtype)
        elif name in self.stored:
            self._fill_stored(name, read, device)
        else:
            slices, local = self._materialized(name, device, dtype)
            if local.numel():
                read(slices, local)

    def _fill_stored(self, name: str, read: Read, device: torch.device) -> None:
        """Read the rows of a full weight that this rank needs, convert them, and keep this rank's shards."""
        form = self.stored[name][1]
        shards = {part: self._materialized(part, device) for part in form.names}
        rows = slice(0, form.shape[0])
        if form.by_rows:
            first = [slices[0] for slices, _ in shards.values()]
            rows = slice(min(part.start for part in first), max(part.stop for part in first))
        if rows.start == rows.stop:
            return
        value = torch.empty(rows.stop - rows.start, *form.shape[1:], dtype=form.dtype, device=device)
        read((rows, *full_slices(form.shape[1:])), value)
        for part, tensor in self._from_full(name, value).items():
            place, local = shards[part]
            if form.by_rows:
                place = slice(place[0].start - rows.start, place[0].stop - rows.start), *place[1:]
            local.copy_(tensor[place])

    def _fill_started(self, name: str, read: Read, device: torch.device, dtype: torch.dtype | None) -> None:
        """Read a full weight; fill the adapter with its initial value, and the weight with the rest."""
        layer, path = self.starts.pop(name), name.rpartition(".")[0]
        value = torch.empty_like(self.specs[name], dtype=dtype, device=device)
        read(full_slices(value.shape), value)
        parts = init_from_weight(value.float(), layer.start, layer.rank, layer.scaling)
        for part, tensor in zip((name, f"{path}.lora_a.weight", f"{path}.lora_b.weight"), parts, strict=True):
            self.put(part, tensor, device, dtype)

    def put(self, name: str, value: torch.Tensor, device: torch.device, dtype: torch.dtype | None = None) -> None:
        """Copy this rank's shard of ``value``, a full weight, into the model; see :meth:`fill`."""
        self.fill(name, lambda slices, target: target.copy_(value[slices]), device, dtype)

    def equals(self, name: str, value: torch.Tensor) -> bool:
        """Return whether this rank's shard equals its shard of the full weight ``value`` in the stored form."""
        tensors = {name: value}
        if name in self.stored:
            tensors = self._from_full(name, value.to(self.specs[name].dtype))
        shards = {part: my_shard(self.parameters[part]) for part in tensors}
        return all(torch.equal(tensors[part][slices].to(local), local) for part, (slices, local) in shards.items())

    def full(self, name: str, gathered: Mapping[str, torch.Tensor] | None = None) -> torch.Tensor:
        """Return the full weight on every rank, by an all-gather. A collective.

        Args:
            name: name of the weight.
            gathered: full parameters that need no all-gather, by name.

        Raises:
            ConversionError: ``to_full`` returns a tensor of another shape.
        """
        names = self.stored[name][1].names if name in self.stored else (name,)
        tensors = {part: full_tensor((gathered or {}).get(part, self.parameters[part])) for part in names}
        if name not in self.stored:
            return tensors[name]
        conversion, form = self.stored[name]
        weight = conversion.to_full(name, tensors)
        if tuple(weight.shape) != tuple(form.shape):
            found = f"a tensor of the shape {list(weight.shape)}"
            raise wrong(conversion, f"to_full('{name}')", found, f"the full weight has the shape {list(form.shape)}")
        return weight.to(form.dtype)

    def _from_full(self, name: str, value: torch.Tensor) -> dict[str, torch.Tensor]:
        conversion, form = self.stored[name]
        tensors, wanted = conversion.from_full(name, value), {}
        for part in form.names:
            parameter = self.parameters[part]
            shape = (value.shape[0], *parameter.shape[1:]) if form.by_rows else tuple(parameter.shape)
            wanted[part] = torch.empty(shape, dtype=parameter.dtype, device="meta")
        if (found := listed(tensors)) != (stored := listed(wanted)):
            raise wrong(conversion, f"from_full('{name}')", found, f"the weight is stored as {stored}")
        return tensors


def wrong(conversion: Conversion, call: str, found: str, wanted: str) -> ConversionError:
    """Return the error for a conversion's method that returned wrong tensors."""
    name = type(conversion).__name__
    return ConversionError(f"model_converters: {call} of {name} returned {found}, but {wanted}: make them equal.")


def listed(tensors: Mapping[str, torch.Tensor]) -> str:
    """Return names, dtypes and shapes of tensors as text."""
    tensors = sorted(tensors.items())
    return ", ".join(f"{name} {tensor.dtype} {list(tensor.shape)}" for name, tensor in tensors) or "nothing"


Content = Literal["model", "adapter", "merged"]
# Contents for one model, or for several by name.
Contents = Content | Sequence[Content] | Mapping[str, Content | Sequence[Content]]
_CHOICES = ({"model"}, {"adapter"}, {"merged"}, {"adapter", "merged"})
_WITH_ADAPTER = 'save with contents="adapter" or ("adapter", "merged")'


def checkpoint_contents(models: nn.Module, *, merge: bool) -> Contents:
    """Return the contents of a run's checkpoints: adapters, or all weights of a model without adapters.

    Args:
        models: the model, or several by name (``torch.nn.ModuleDict``).
        merge: for models with adapters, also save all weights with the adapters merged.

    Returns:
        The argument ``contents`` of :meth:`CheckpointStore.save`.

    Example:
        >>> torchtune.training.checkpoint_contents(model, merge=True)
        'model'
    """
    if isinstance(models, nn.ModuleDict):
        return {name: checkpoint_contents(model, merge=merge) for name, model in models.items()}
    if not has_adapters(models):
        return "model"
    return ("adapter", "merged") if merge else "adapter"


def contents_of(contents: Contents, name: str) -> frozenset[str]:
    """Return the contents for the model ``name``; see :meth:`CheckpointStore.save`.

    Raises:
        CheckpointError: ``contents`` lacks the model, or is not a valid choice.
    """
    if isinstance(contents, Mapping):
        if name not in contents:
            raise CheckpointError(f"contents: nothing is said of the model '{name}': name it.")
        contents = contents[name]
    chosen = frozenset([contents] if isinstance(contents, str) else contents)
    if chosen not in _CHOICES:
        raise CheckpointError(
            f'contents: {contents!r} cannot be saved: choose "model", "adapter", "merged" or ("adapter", "merged").'
        )
    return chosen


class SaveView(ModelWeights):
    """View of the weights of one model for one save.

    Args:
        model: the model; on any device for :meth:`check`, materialized for all other methods.
        contents: from :func:`contents_of`.
        ranks: all ranks; not needed for :meth:`check`.

    Attributes:
        contents: see Args.
        has_weights: whether all weights are written.
        merges: whether adapters are merged into the weights, in float32, then rounded.
        has_adapter: whether the adapter is written.
        ranks: see Args.
    """

    def __init__(self, model: nn.Module, contents: frozenset[str], ranks: Ranks | None = None) -> None:
        super().__init__(model)
        self.contents, self.ranks = contents, ranks
        self.has_adapter, self.merges = "adapter" in contents, "merged" in contents
        self.has_weights = contents != {"adapter"}

    @cached_property
    def trained(self) -> list[str]:
        """Names of the parameters that require a gradient, or that a hook of a conversion changes."""
        moved = set().union(*(conversion.moved_parameters(self.model) for conversion in self.conversions))
        return [name for name, parameter in self.parameters.items() if parameter.requires_grad or name in moved]

    def _in_adapter(self, *, merge: bool = False) -> set[str]:
        """Return owned parameters that an adapter file preserves; with ``merge``, only of mergeable conversions."""
        pairs = zip(self.conversions, self._owned_by, strict=True)
        kept = set().union(*(owned for conversion, owned in pairs if conversion.can_merge or not merge))
        rows = (rows for rows, _ in self.new_rows.values())
        return kept & {*self.adapter_groups, *rows, *(name for names in self.owned_files.values() for name in names)}

    def check(self, *, resumable: bool = True) -> None:
        """Check that the save writes all trained parameters.

        Args:
            resumable: whether a resume reads the checkpoint; for a model with an adapter it reads only the adapter.

        Raises:
            CheckpointError: a trained parameter would not be written, or a weight is not found under its name.
        """
        self.check_names(exported=self.has_weights)
        if (init := getattr(self.model, "adapter_init", None)) and self.contents == {"model"}:
            raise CheckpointError(
                f"model: its base lacks what the adapter started with (init_lora_weights = '{init}'), so it is not "
                f"saved without the adapter: {_WITH_ADAPTER}."
            )
        if resumable and self.merges and not self.has_adapter:
            raise CheckpointError(f"contents: a resume needs the adapter beside the merged weights: {_WITH_ADAPTER}.")
        adapter, weights = self._in_adapter(), self.base.intersection(self.groups) | self.inside
        written = weights if self.has_weights and not (resumable and self.has_adapter) else set()
        if self.has_adapter or self.merges:
            written = written | self._in_adapter(merge=self.merges)
        lost = [name for name in self.trained if name not in written]
        if not lost:
            return
        if lost[0] in adapter:
            what = "merged weights" if self.merges else "the base weights alone"
            advice = (
                'give its conversion a method merged(name, weight, model), or save with contents="adapter" '
                "(save_adapter_weights_only=True)"
                if self.merges
                else "train adapters with lora_finetune_single_device or lora_finetune_distributed (in code of your "
                f"own: {_WITH_ADAPTER}), or take the adapter out of the model"
            )
        elif lost[0] in weights:
            what = "the adapter alone"
            advice = (
                "freeze it, or train it with full_finetune_single_device or full_finetune_distributed without adapters"
            )
        else:
            what = "only what has a name in Hugging Face's or PEFT's format, and it has none"
            advice = "name it in owned_parameters(model) of the conversion that adds it, freeze it, or leave that out"
        more = f" (and {len(lost) - 1} more)" if lost[1:] else ""
        raise CheckpointError(f"model: '{lost[0]}'{more} is trained, but checkpoints would hold {what}: {advice}.")

    def entry(self, group: Group, turn: int) -> Entry:
        """Return the tensors of one group, under their external names.

        Computing them needs memory for one full tensor. If the entry merges into a sharded model, it is a collective.

        Args:
            group: group of a weight map.
            turn: chooses the writer among replicas, see :meth:`LocalShard.of`.
        """
        op, description = group.op, group.description
        specs = op.to_external([self.specs[name] for name in group.tune], description)
        shapes = [spec.shape for spec in specs]

        def make() -> list[TensorSlice]:
            made = []
            for index, name in enumerate(group.tune):
                shard = self.shard(name, turn)
                for part in op.external_slices(index, shard.slices, shapes, description) if shard.is_writer else ():
                    data, start = part.of(shard.data), tuple(dim.start for dim in part.slices)
                    made.append(TensorSlice(group.external[part.external], start, tuple(data.shape), data))
            return made

        return Entry(dict(zip(group.external, specs, strict=True)), make, specs[0].itemsize)

    def entry_of(self, name: str, external: str, turn: int) -> Entry:
        """Return an unchanged parameter under the name ``external``; see :meth:`entry`."""
        return self.entry(Group((external,), (name,), Identity(), self.identity[1]), turn)

    def shard(self, name: str, turn: int) -> LocalShard:
        """Return this rank's shard of a full weight to save; see :meth:`entry`.

        A collective: conversions and merging need an all-gather.
        """
        weight = parameter = self.parameters.get(name)
        if self.merges and name in self.base and (inside := self._merged_into(name)):
            weight = self._merged(name, inside)
        elif name in self.stored:
            weight = self.full(name)
        if name in self.stored or not isinstance(parameter, DTensor):
            is_writer = self.ranks.rank == turn % self.ranks.size
            return LocalShard(self.specs[name], full_slices(weight.shape), weight.detach(), is_writer)
        shard = LocalShard.of(parameter, self.ranks, turn)
        # A view would keep the full weight in memory.
        return shard if weight is parameter else replace(shard, data=weight[shard.slices].clone())

    @cached_property
    def _apart(self) -> set[str]:
        """Owned parameters of modules without a base weight: they may change any weight."""
        layers = {name.rpartition(".")[0] for name in self.base}
        return {name for name in self.owned if not layers.intersection(_parents(name))}

    def _merged_into(self, name: str) -> set[str]:
        """Return the parameters from which a merged weight is computed; empty if no conversion owns any of them."""
        path = name.rpartition(".")[0]
        inside = {f"{path}.{leaf}" for leaf, _ in self.model.get_submodule(path).named_parameters()} | self._apart
        return inside if inside & self.owned else set()

    def _merged(self, name: str, inside: set[str]) -> torch.Tensor:
        sharded = [key for key in sorted(inside) if isinstance(self.parameters[key], DTensor)]
        gathered = {key: full_tensor(self.parameters[key]) for key in sharded}
        with replaced_parameters(self.model, gathered):
            weight = self.full(name, gathered)
            for conversion in self.conversions:
                merged = conversion.merged(name, weight, self.model)
                if merged.shape != weight.shape or merged.dtype != weight.dtype:
                    found, wanted = listed({name: merged}), f"the weight is {listed({name: weight})}"
                    raise wrong(conversion, f"merged('{name}', …)", found, wanted)
                weight = merged
        return weight


def _parents(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:end]) for end in range(1, len(parts))]

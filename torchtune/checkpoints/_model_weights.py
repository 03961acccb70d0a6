"""View of a model for checkpoints: its full weights, independent of conversions."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

from torchtune.checkpoints._checkpoint_error import CheckpointError
from torchtune.models import Description, Group, ModelSpec, Slices
from torchtune.modules.conversion import (
    Conversion,
    ConversionError,
    StoredWeight,
    get_conversions,
)
from torchtune.modules.peft import LoRALinear, init_from_weight
from torchtune.training.parallel import full_slices, full_tensor, my_shard

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

"""View of a model's weights, independent of conversions: their names in files, their shards, and how they are filled.

The weight map of the model's family (:mod:`torchtune.models`) defines a weight's name in files:
:attr:`ModelWeights.groups` for base weights, :attr:`ModelWeights.adapter_groups` for adapters, ``_adapter.py`` for the
rest of PEFT's layout.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

from torchtune.checkpoints._weight_files import CheckpointError
from torchtune.models import Description, Group, ModelSpec, Slices, WeightMap
from torchtune.modules.conversion import (
    Conversion,
    ConversionError,
    StoredWeight,
    get_conversions,
)
from torchtune.modules.peft import LoRALinear, init_from_weight
from torchtune.training.parallel import full_slices, full_tensor, my_shard


def spec_and_description(model: nn.Module) -> tuple[ModelSpec, Description]:
    """Return the spec and description of a model.

    Raises:
        CheckpointError: the model was not built by :mod:`torchtune.models`.
    """
    spec = getattr(model, "spec", None)
    description = getattr(model, "description", None)
    if spec is None or description is None:
        raise CheckpointError(
            f"{type(model).__name__} carries no ModelSpec, so the names of its weights in other formats are not known: "
            "build it with a builder of torchtune.models."
        )
    return spec, description


def groups_by_weight(weight_map: WeightMap, description: Description) -> dict[str, Group]:
    """Return the group of each weight, by this library's name, in the order of the weight map."""
    groups = {}
    for group in weight_map.groups(description):
        groups.update(dict.fromkeys(group.tune, group))
    return groups


def groups_by_external_name(weight_map: WeightMap, description: Description) -> dict[str, Group]:
    """Return the group of each external tensor, by its name, in the order of the weight map."""
    groups = {}
    for group in weight_map.groups(description):
        groups.update(dict.fromkeys(group.external, group))
    return groups


def materialize(model: nn.Module, name: str, device: torch.device, dtype: torch.dtype | None) -> nn.Parameter:
    """Materialize a parameter on the meta device, uninitialized; return any other parameter unchanged."""
    parameter = model.get_parameter(name)
    if not parameter.is_meta:
        return parameter
    data = torch.empty_like(parameter, dtype=dtype or parameter.dtype, device=device)  # of a DTensor, a shard
    return set_parameter(model, name, nn.Parameter(data, requires_grad=parameter.requires_grad))


def set_parameter(model: nn.Module, name: str, parameter: nn.Parameter) -> nn.Parameter:
    """Put a parameter into the model under a dotted name, and return it."""
    path, _, leaf = name.rpartition(".")
    model.get_submodule(path).register_parameter(leaf, parameter)
    return parameter


@contextmanager
def replaced_parameters(model: nn.Module, tensors: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Context manager that replaces parameters of the model by ``tensors``."""
    originals = {name: model.get_parameter(name) for name in tensors}
    for name, tensor in tensors.items():
        set_parameter(model, name, nn.Parameter(tensor, requires_grad=False))
    try:
        yield
    finally:
        for name, parameter in originals.items():
            set_parameter(model, name, parameter)


def parent_modules(path: str) -> list[str]:
    """Return the paths of the modules around a parameter or a module, outermost first."""
    components = path.split(".")
    return [".".join(components[:end]) for end in range(1, len(components))]


def check_shape(path: Path, name: str, shape: Sequence[int], expected: Sequence[int]) -> None:
    """Raise ``CheckpointError`` with file, tensor and both shapes if they differ."""
    if tuple(shape) == tuple(expected):
        return
    hint = "the checkpoint is of another model than the one in the config, or of other sizes"
    has_vocabulary = "emb" in name or "lm_head" in name or "output" in name
    if has_vocabulary and len(shape) == 2 and shape[1:] == expected[1:]:
        hint = f"the checkpoint has a vocabulary of {shape[0]} tokens, build the model with that vocab_size"
    raise CheckpointError(
        f"{path}: the tensor '{name}' has the shape {list(shape)} where the model needs {list(expected)}: {hint}."
    )


class ModelWeights:
    """View of a model's weights, one at a time, independent of conversions; built once for a load or a save.

    Full weights have the names of the weight map. Most are parameters with the same name; a conversion may store a
    weight in other parameters (:meth:`torchtune.modules.conversion.Conversion.stored_weights`).

    Args:
        model: the model, on the meta device or materialized, sharded or not. Its parameters are looked up on each
            access, because FSDP replaces them during a training step.

    Attributes:
        model: the model.
        conversions: conversions of the model.
        parameters: parameters of the model, by name.
        owned: names of the parameters that conversions save apart from the base weights.
        trained_whole: names of the base weights that are trained beside an adapter and saved with it, in the order of
            the model.
        stored_weights: base weights that a conversion stores in other parameters, by name: the conversion, and the
            parameters.
        storage: names of the parameters that store the weights in :attr:`stored_weights`.
        base: names of the base weights.
        split_layers: adapted layers with weights that :meth:`store_converted` splits into the initial adapter and the
            remainder, by name of the weight.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.conversions = get_conversions(model)
        self.parameters: dict[str, nn.Parameter] = dict(model.named_parameters())
        self._owned_by = [conversion.owned_parameters(model) for conversion in self.conversions]
        self.owned: set[str] = set().union(*self._owned_by)
        trained: set[str] = set()
        for conversion in self.conversions:
            trained.update(conversion.trained_weights(model))
        self.trained_whole = [name for name in self.parameters if name in trained]
        self.stored_weights: dict[str, tuple[Conversion, StoredWeight]] = {}
        self.storage: set[str] = set()
        # Of two conversions that store a weight, the last one does.
        for conversion in self.conversions:
            for name, stored_weight in conversion.stored_weights(model).items():
                self.stored_weights[name] = conversion, stored_weight
        for _, stored_weight in self.stored_weights.values():
            self.storage.update(stored_weight.names)
        plain = self.parameters.keys() - self.owned - self.storage
        self.base = plain | self.stored_weights.keys()
        self.split_layers: dict[str, LoRALinear] = {}

    @cached_property
    def spec_and_description(self) -> tuple[ModelSpec, Description]:
        """See :func:`spec_and_description`."""
        return spec_and_description(self.model)

    @cached_property
    def groups(self) -> dict[str, Group]:
        """Group of each base weight in the weight map, which has its Hugging Face name, by this library's name."""
        spec, description = self.spec_and_description
        return groups_by_weight(spec.weight_map("hf"), description)

    @cached_property
    def module_map(self) -> WeightMap:
        """Weight map with the names of modules in ``transformers``, which ``peft`` uses, instead of names in files."""
        weight_map = self.spec_and_description[0].weight_map("hf")
        return weight_map.prefixed(dict(weight_map.modules))

    @cached_property
    def module_groups(self) -> dict[str, Group]:
        """Group of each base weight in :attr:`module_map`, by its name in ``transformers``."""
        return groups_by_external_name(self.module_map, self.spec_and_description[1])

    def storage_of(self, name: str) -> Sequence[str]:
        """Return the names of the parameters that store a weight: usually its own."""
        if name not in self.stored_weights:
            return [name]
        _, stored_weight = self.stored_weights[name]
        return stored_weight.names

    def trained_groups(self, groups: Mapping[str, Group] | None = None) -> list[Group]:
        """Return the groups of the weights that are trained whole.

        Args:
            groups: group of each base weight, by name; the groups of :attr:`module_map` by default.

        Raises:
            CheckpointError: a weight has no name in files, or shares a tensor in files or a module with a frozen one.
        """
        if not self.trained_whole:
            return []
        if groups is None:
            groups = groups_by_weight(self.module_map, self.spec_and_description[1])
        trained = set(self.trained_whole)
        trained_groups: dict[Group, None] = {}  # a set that keeps the order
        for name in self.trained_whole:
            if name not in groups:
                raise CheckpointError(
                    f"train_modules: '{name}' has no name in Hugging Face's format, so no adapter can hold it: leave "
                    "its module out."
                )
            for grouped_name in groups[name].tune:
                if grouped_name not in trained:
                    raise CheckpointError(
                        f"train_modules: '{name}' is one weight with '{grouped_name}' in files, which would stay "
                        "frozen: name both or none."
                    )
            trained_groups[groups[name]] = None
        self._check_modules_are_whole(groups, trained_groups)
        return list(trained_groups)

    def _check_modules_are_whole(self, groups: Mapping[str, Group], trained: Mapping[Group, None]) -> None:
        """Raise ``CheckpointError`` if a module has trained and frozen weights: ``peft`` would save all of them."""
        modules = set()
        for group in trained:
            modules.update(name.rpartition(".")[0] for name in group.external)
        for group in dict.fromkeys(groups.values()):
            if group in trained:
                continue
            for name in group.external:
                shared = sorted(modules.intersection(parent_modules(name)))
                if shared:
                    raise CheckpointError(
                        f"train_modules: peft saves '{shared[-1]}' whole, with '{group.tune[0]}', which would stay "
                        "frozen: name it, too, or leave out the rest of the module."
                    )

    @cached_property
    def adapter_groups(self) -> dict[str, Group]:
        """Group of each possible adapter in the weight map, which has its PEFT name, by this library's name."""
        spec, description = self.spec_and_description
        return groups_by_weight(spec.weight_map("hf").peft(), description)

    @cached_property
    def specs(self) -> dict[str, torch.Tensor]:
        """Full weights on the meta device, by name: shape, and dtype in files."""
        weights: dict[str, nn.Parameter | StoredWeight] = dict(self.parameters)
        for name, (_, stored_weight) in self.stored_weights.items():
            weights[name] = stored_weight
        specs = {}
        for name, weight in weights.items():
            specs[name] = torch.empty(weight.shape, dtype=weight.dtype, device="meta")
        return specs

    @cached_property
    def _peft_configs(self) -> list[dict[str, Any]]:
        return [conversion.peft_config(self.model) for conversion in self.conversions]

    @cached_property
    def peft_settings(self) -> dict[str, Any]:
        """``peft_config`` of all conversions."""
        settings: dict[str, Any] = {}
        for peft_config in self._peft_configs:
            settings.update(peft_config)
        return settings

    @cached_property
    def new_rows(self) -> dict[str, tuple[str, list[int]]]:
        """Name of a weight -> name of the parameter with its trained rows, and the token ids of these rows."""
        rows: dict[str, tuple[str, list[int]]] = {}
        for conversion in self.conversions:
            rows.update(conversion.new_rows(self.model))
        return rows

    @cached_property
    def owned_files(self) -> dict[str, list[str]]:
        """Files for owned parameters without a name in PEFT's layout, one for each class of conversions."""
        named_by_peft = {parameter for parameter, _ in self.new_rows.values()}
        for settings, owned in zip(self._peft_configs, self._owned_by, strict=True):
            if settings:
                named_by_peft |= owned
        files: dict[str, list[str]] = {}
        in_a_file = set(named_by_peft)
        for conversion, owned in zip(self.conversions, self._owned_by, strict=True):
            names = sorted(owned - in_a_file)
            if names:
                files.setdefault(f"adapter_{type(conversion).__name__}.safetensors", []).extend(names)
                in_a_file.update(names)
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
        mapped = set(self.groups)
        self._check_no_weight_is_missing(mapped)
        output = getattr(self.model, "output", None)
        tied_module = getattr(output, "tied_module", None)
        if tied_module is not None and tied_module is not getattr(self.model, "tok_embeddings", tied_module):
            raise CheckpointError(
                "model: its output is tied to another embedding than tok_embeddings, which no file would hold: change "
                "its size with torchtune.modules.resize_token_embeddings, and values in place."
            )
        unmapped = self.base - mapped
        if exported and unmapped:
            raise CheckpointError(
                f"model: '{min(unmapped)}' has no name in Hugging Face's format, so it cannot be saved: name it in "
                "owned_parameters(model) of the conversion that adds it."
            )

    def _check_no_weight_is_missing(self, mapped: set[str]) -> None:
        """Raise ``CheckpointError`` if the model lacks a weight of the weight map, in a layer that it has."""
        modules = {path for path, _ in self.model.named_modules()}
        missing = []
        for name in sorted(mapped - self.base):
            module_path = name.rpartition(".")[0]
            layer = ".".join(module_path.split(".")[:2])  # such as layers.0
            if layer in modules:  # a simulated model lacks whole layers
                missing.append(name)
        if not missing:
            return
        path, _, leaf = missing[0].rpartition(".")
        # A layer that is wrapped by another module has its weight below: q_proj.weight becomes q_proj.inner.weight.
        renamed = [name for name in self.base - mapped if name.startswith(f"{path}.")]
        hint = ""
        if renamed:
            same_leaf = [name for name in renamed if name.endswith(leaf)]
            hint = f" (but '{(same_leaf or renamed)[0]}')"
        raise CheckpointError(
            f"model: it has no parameter '{missing[0]}'{hint}: a conversion must keep the names of weights, so "
            "replace a layer by one of a subclass instead of wrapping it."
        )

    def allocate(
        self, name: str, device: torch.device, dtype: torch.dtype | None = None
    ) -> tuple[Slices, torch.Tensor]:
        """Return the slice of a full weight that this rank needs, and the tensor to read it into.

        For most weights, that tensor is this rank's shard of the parameter. For a weight of :meth:`is_converted`, it is
        a temporary one, from which :meth:`store_converted` computes the parameters.

        Args:
            name: name of the full weight.
            device: device for parameters on the meta device.
            dtype: dtype for parameters on the meta device, unless a conversion stores the weight in other parameters;
                unchanged by default.
        """
        if name in self.split_layers:  # the initial adapter is computed from the full weight
            spec = self.specs[name]
            return full_slices(spec.shape), torch.empty_like(spec, dtype=dtype, device=device)
        if name not in self.stored_weights:
            return self._local_shard(name, device, dtype)
        _, stored_weight = self.stored_weights[name]
        rows = slice(0, stored_weight.shape[0])  # of a conversion that needs the full weight
        if stored_weight.by_rows:
            # From the first row to the last that any of the parameters needs.
            row_slices = []
            for parameter_name in stored_weight.names:  # their dtypes are the conversion's
                slices, _ = self._local_shard(parameter_name, device)
                row_slices.append(slices[0])
            start = min(row_slice.start for row_slice in row_slices)
            stop = max(row_slice.stop for row_slice in row_slices)
            rows = slice(start, stop)
        columns = stored_weight.shape[1:]
        num_rows = rows.stop - rows.start
        weight = torch.empty(num_rows, *columns, dtype=stored_weight.dtype, device=device)
        return (rows, *full_slices(columns)), weight

    def is_converted(self, name: str) -> bool:
        """Return whether a weight that was read must be converted to the parameters that store it."""
        return name in self.split_layers or name in self.stored_weights

    def store_converted(
        self,
        name: str,
        slices: Slices,
        values: torch.Tensor,
        device: torch.device,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Convert a slice of a weight to the parameters that store it, and keep this rank's shards of them.

        Args:
            name: name of a weight of :meth:`is_converted`.
            slices: the slice from :meth:`allocate`.
            values: the tensor from :meth:`allocate`, with the values of the slice.
            device: see :meth:`allocate`.
            dtype: see :meth:`allocate`.

        Raises:
            ConversionError: ``from_full`` returns tensors that do not fit the parameters.
        """
        if name in self.split_layers:
            # The adapter gets its initial value, computed from the full weight, and the weight the remainder.
            layer = self.split_layers.pop(name)
            path = name.rpartition(".")[0]
            remainder, lora_a, lora_b = init_from_weight(values.float(), layer.start, layer.rank, layer.scaling)
            self.put(name, remainder, device, dtype)
            self.put(f"{path}.lora_a.weight", lora_a, device, dtype)
            self.put(f"{path}.lora_b.weight", lora_b, device, dtype)
            return
        if not values.numel():  # the last ranks have no rows of a short weight
            return
        _, stored_weight = self.stored_weights[name]
        for parameter_name, tensor in self._from_full(name, values).items():
            shard_slices, shard = self._local_shard(parameter_name, device)
            if stored_weight.by_rows:  # the converted tensor begins with the first row that was read
                rows, *columns = shard_slices
                first = slices[0].start
                shard_slices = (slice(rows.start - first, rows.stop - first), *columns)
            shard.copy_(tensor[shard_slices])

    def _local_shard(
        self, name: str, device: torch.device, dtype: torch.dtype | None = None
    ) -> tuple[Slices, torch.Tensor]:
        """Materialize a parameter; return this rank's slice of it, and the values of the slice."""
        self.parameters[name] = materialize(self.model, name, device, dtype)
        return my_shard(self.parameters[name])

    def put(self, name: str, value: torch.Tensor, device: torch.device, dtype: torch.dtype | None = None) -> None:
        """Copy this rank's slice of ``value``, a full weight, into the model; see :meth:`allocate`."""
        slices, target = self.allocate(name, device, dtype)
        target.copy_(value[slices])
        if self.is_converted(name):
            self.store_converted(name, slices, target, device, dtype)

    def load_value(
        self, name: str, value: torch.Tensor, path: Path, device: torch.device, dtype: torch.dtype | None = None
    ) -> None:
        """Copy this rank's shard of ``value`` into a parameter; one on the meta device is materialized on ``device``.

        Raises:
            CheckpointError: the shapes differ; ``path`` names the file.
        """
        check_shape(path, name, value.shape, self.parameters[name].shape)
        slices, shard = self._local_shard(name, device, dtype)
        shard.copy_(value[slices])

    def equals(self, name: str, value: torch.Tensor) -> bool:
        """Return whether this rank's shard equals its shard of the full weight ``value``, as it is stored.

        Rows of new tokens, which are trained in another parameter, are not compared.
        """
        num_rows = value.shape[0]
        if name in self.new_rows:  # the last rows
            _, token_ids = self.new_rows[name]
            num_rows -= len(token_ids)
        tensors = {name: value}
        if name in self.stored_weights:
            tensors = self._from_full(name, value.to(self.specs[name].dtype))
        for parameter, tensor in tensors.items():
            slices, local = my_shard(self.parameters[parameter])
            shard = tensor[slices].to(local)
            if name in self.new_rows:  # an embedding or output projection, which no conversion stores otherwise
                num_compared = max(0, num_rows - slices[0].start)
                shard = shard[:num_compared]
                local = local[:num_compared]
            if not torch.equal(shard, local):
                return False
        return True

    def full(self, name: str, gathered: Mapping[str, torch.Tensor] | None = None) -> torch.Tensor:
        """Return the full weight on every rank, by an all-gather. A collective.

        Args:
            name: name of the weight.
            gathered: full parameters that need no all-gather, by name.

        Raises:
            ConversionError: ``to_full`` returns a tensor of another shape.
        """
        gathered = gathered or {}
        if name not in self.stored_weights:
            return full_tensor(gathered.get(name, self.parameters[name]))
        conversion, stored_weight = self.stored_weights[name]
        tensors = {}
        for parameter in stored_weight.names:  # in the same order on all ranks
            tensors[parameter] = full_tensor(gathered.get(parameter, self.parameters[parameter]))
        weight = conversion.to_full(name, tensors)
        if tuple(weight.shape) != tuple(stored_weight.shape):
            raise wrong_tensors(
                conversion,
                f"to_full('{name}')",
                f"a tensor of the shape {list(weight.shape)}",
                f"the full weight has the shape {list(stored_weight.shape)}",
            )
        return weight.to(stored_weight.dtype)

    def _from_full(self, name: str, value: torch.Tensor) -> dict[str, torch.Tensor]:
        """Convert a full weight, or rows of it, to the tensors that store it."""
        conversion, stored_weight = self.stored_weights[name]
        tensors = conversion.from_full(name, value)
        expected = {}
        for parameter_name in stored_weight.names:
            parameter = self.parameters[parameter_name]
            shape = tuple(parameter.shape)
            if stored_weight.by_rows:  # value may be only the rows that this rank needs
                shape = (value.shape[0], *shape[1:])
            expected[parameter_name] = torch.empty(shape, dtype=parameter.dtype, device="meta")
        if describe_tensors(tensors) != describe_tensors(expected):  # names, dtypes and shapes
            raise wrong_tensors(
                conversion,
                f"from_full('{name}')",
                describe_tensors(tensors),
                f"the weight is stored as {describe_tensors(expected)}",
            )
        return tensors


def wrong_tensors(conversion: Conversion, call: str, returned: str, expected: str) -> ConversionError:
    """Return the error for a conversion's method that returned wrong tensors."""
    name = type(conversion).__name__
    return ConversionError(f"model_converters: {call} of {name} returned {returned}, but {expected}: make them equal.")


def describe_tensors(tensors: Mapping[str, torch.Tensor]) -> str:
    """Return names, dtypes and shapes of tensors as text."""
    descriptions = [f"{name} {tensor.dtype} {list(tensor.shape)}" for name, tensor in sorted(tensors.items())]
    return ", ".join(descriptions) or "nothing"

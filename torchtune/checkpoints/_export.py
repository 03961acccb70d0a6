"""Export of a model to a checkpoint: the tensor files that other libraries load, and the settings of its adapter.

:class:`SaveView` decides which weights are written, and merges adapters into them; :func:`export_model` distributes
them among files; :class:`WeightGroup` computes the slices of this rank when a file is written.
"""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from torchtune.checkpoints._adapter import ADAPTER_DIR, ADAPTER_FILE, OWNED_INDEX, token_tensors
from torchtune.checkpoints._adapter_settings import (
    ADAPTER_CONFIG_FILE,
    adapted_modules,
    adapter_settings,
    modules_to_save,
    token_indices,
)
from torchtune.checkpoints._load import ModelSource, UnreadWeights
from torchtune.checkpoints._model_weights import (
    ModelWeights,
    describe_tensors,
    groups_by_weight,
    parent_modules,
    replaced_parameters,
    wrong_tensors,
)
from torchtune.checkpoints._save import TensorFile, TensorGroup, TensorSlice, aligned, spec_of, write_file
from torchtune.checkpoints._small_files import add_pad_token, add_stop_tokens, config_of_model, save_tokenizer
from torchtune.checkpoints._weight_files import SAFETENSORS_INDEX, CheckpointError, TextDecoderFiles
from torchtune.models import (
    PEFT_PREFIX,
    Group,
    Identity,
    WeightMap,
    module_prefixes,
    rename_prefix,
)
from torchtune.modules.peft import has_adapters
from torchtune.training.parallel import LocalShard, Ranks, full_slices, full_tensor
from torchtune.utils import write_json

MAX_SHARD_BYTES = 5 * 10**9

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
        >>> torchtune.checkpoints.checkpoint_contents(model, merge=True)
        'model'
    """
    if isinstance(models, nn.ModuleDict):
        return {name: checkpoint_contents(model, merge=merge) for name, model in models.items()}
    if not has_adapters(models):
        return "model"
    if merge:
        return ("adapter", "merged")
    return "adapter"


def contents_of(contents: Contents, name: str) -> frozenset[str]:
    """Return the contents for the model ``name``; see :meth:`CheckpointStore.save`.

    Raises:
        CheckpointError: ``contents`` lacks the model, or is not a valid choice.
    """
    if isinstance(contents, Mapping):
        if name not in contents:
            raise CheckpointError(f"contents: the model '{name}' is missing: say what to save of it.")
        contents = contents[name]
    contents_of_model = frozenset([contents] if isinstance(contents, str) else contents)
    if contents_of_model not in _CHOICES:
        raise CheckpointError(
            f'contents: {contents!r} cannot be saved: choose "model", "adapter", "merged" or ("adapter", "merged").'
        )
    return contents_of_model


class SaveView(ModelWeights):
    """View of the weights of one model for one save: trained and merged weights, and shards to write.

    Args:
        model: the model; on any device for :meth:`check`, materialized for all other methods.
        contents: from :func:`contents_of`.
        ranks: all ranks; not needed for :meth:`check`.
        unread: weights that are read when they are written; None if the model has all of them.

    Attributes:
        contents: see Args.
        has_weights: whether all weights are written.
        merges: whether adapters are merged into the weights, in float32, then rounded.
        has_adapter: whether the adapter is written.
        ranks: see Args.
    """

    def __init__(
        self,
        model: nn.Module,
        contents: frozenset[str],
        ranks: Ranks | None = None,
        unread: UnreadWeights | None = None,
    ) -> None:
        super().__init__(model)
        self._unread = unread
        self.contents = contents
        self.ranks = ranks
        self.has_adapter = "adapter" in contents
        self.merges = "merged" in contents
        self.has_weights = contents != {"adapter"}

    @cached_property
    def trained(self) -> list[str]:
        """Names of the parameters that require a gradient, or that a hook of a conversion changes."""
        moved = set()
        for conversion in self.conversions:
            moved |= conversion.moved_parameters(self.model)
        names = []
        for name, parameter in self.parameters.items():
            if parameter.requires_grad or name in moved:
                names.append(name)
        return names

    def _in_adapter(self, *, merge: bool = False) -> set[str]:
        """Return owned parameters that an adapter file preserves; with ``merge``, only of mergeable conversions."""
        preserved: set[str] = set()
        for conversion, owned in zip(self.conversions, self._owned_by, strict=True):
            if conversion.can_merge or not merge:
                preserved |= owned
        named_in_files = set(self.adapter_groups)
        named_in_files.update(parameter for parameter, _ in self.new_rows.values())
        for names in self.owned_files.values():
            named_in_files.update(names)
        return preserved & named_in_files

    def check(self, *, resumable: bool = True) -> None:
        """Check that the save writes all trained parameters.

        Args:
            resumable: whether a resume reads the checkpoint; for a model with an adapter it reads only the adapter.

        Raises:
            CheckpointError: a trained parameter would not be written, or a weight is not found under its name.
        """
        self.check_names(exported=self.has_weights)
        init = getattr(self.model, "adapter_init", None)
        if init and self.contents == {"model"}:
            raise CheckpointError(
                f"model: its base lacks what the adapter started with (init_lora_weights = '{init}'), so it is not "
                f"saved without the adapter: {_WITH_ADAPTER}."
            )
        if resumable and self.merges and not self.has_adapter:
            raise CheckpointError(f"contents: a resume needs the adapter beside the merged weights: {_WITH_ADAPTER}.")
        # Names of parameters: a weight that a conversion stores in others counts by these.
        weights = self.base.intersection(self.groups) | self.storage
        written: set[str] = set()
        # A resume reads the adapter and not the merged weights.
        if self.has_weights and not (resumable and self.has_adapter):
            written |= weights
        if self.has_adapter or self.merges:
            written |= self._in_adapter(merge=self.merges)
            # Weights that are trained whole are in both, adapter and merged weights.
            for group in self.trained_groups():
                written.update(group.tune)
        unsaved = [name for name in self.trained if name not in written]
        if unsaved:
            self._refuse_unsaved(unsaved, weights)

    def _refuse_unsaved(self, unsaved: list[str], weights: set[str]) -> None:
        """Raise ``CheckpointError`` for trained parameters that the save does not write."""
        name = unsaved[0]
        if name in self._in_adapter():
            if self.merges:  # its conversion cannot merge it
                saved = "merged weights"
                advice = (
                    'give its conversion a method merged(name, weight, model), or save with contents="adapter" '
                    "(save_adapter_weights_only=True)"
                )
            else:
                saved = "the base weights alone"
                advice = (
                    "train adapters with lora_finetune_single_device or lora_finetune_distributed (in code of your "
                    f"own: {_WITH_ADAPTER}), or take the adapter out of the model"
                )
        elif name in weights:
            saved = "the adapter alone"
            advice = (
                "freeze it, or train it with full_finetune_single_device or full_finetune_distributed without adapters"
            )
        else:
            saved = "only what has a name in Hugging Face's or PEFT's format, and it has none"
            advice = "name it in owned_parameters(model) of the conversion that adds it, freeze it, or leave that out"
        omitted = f" (and {len(unsaved) - 1} more)" if len(unsaved) > 1 else ""
        raise CheckpointError(f"model: '{name}'{omitted} is trained, but checkpoints would hold {saved}: {advice}.")

    def renamed_parameter(self, name: str, external: str, turn: int) -> "WeightGroup":
        """Return an unchanged parameter under the name ``external``, to write."""
        _, description = self.spec_and_description
        return WeightGroup(self, Group((external,), (name,), Identity(), description), turn)

    def shard(self, name: str, turn: int) -> LocalShard:
        """Return this rank's shard of a full weight to save.

        Weights that are not read yet are read for the time of the call. A collective: conversions and merging need an
        all-gather.

        Args:
            name: name of the full weight.
            turn: chooses the rank that writes a replicated weight, see :meth:`LocalShard.of`.
        """
        merge_inputs = set()
        if self.merges and name in self.base:
            merge_inputs = self._merge_inputs(name)
        present = nullcontext()
        if self._unread is not None:
            present = self._unread.present(self, {name, *merge_inputs})
        with present:
            parameter = self.parameters.get(name)  # inside the block: reading replaces the parameter
            if merge_inputs:
                weight = self._merged(name, merge_inputs)
            elif name in self.stored_weights:
                weight = self.full(name)
            else:
                weight = parameter
        if name in self.stored_weights or not isinstance(parameter, DTensor):
            # Every rank has the full weight.
            slices = full_slices(weight.shape)
            is_writer = self.ranks.rank == turn % self.ranks.size
            return LocalShard(self.specs[name], slices, weight.detach(), is_writer)
        shard = LocalShard.of(parameter, self.ranks, turn)
        if weight is parameter:
            return shard
        # A copy, because a view would keep the full weight in memory.
        return replace(shard, data=weight[shard.slices].clone())

    @cached_property
    def _model_wide(self) -> set[str]:
        """Owned parameters of modules without a base weight: they may change any weight."""
        layers = {name.rpartition(".")[0] for name in self.base}
        return {name for name in self.owned if layers.isdisjoint(parent_modules(name))}

    def _merge_inputs(self, name: str) -> set[str]:
        """Return the parameters from which a merged weight is computed; empty if no conversion owns any of them."""
        path = name.rpartition(".")[0]
        module = self.model.get_submodule(path)
        inputs = {parameter for parameter, _ in module.named_parameters(prefix=path)} | self._model_wide
        if inputs.isdisjoint(self.owned):
            return set()
        return inputs

    def _merged(self, name: str, merge_inputs: set[str]) -> torch.Tensor:
        """Return the full weight with all adapters merged. A collective: all ranks gather in the same order."""
        gathered = {}
        for parameter_name in sorted(merge_inputs):
            parameter = self.parameters[parameter_name]
            if isinstance(parameter, DTensor):
                gathered[parameter_name] = full_tensor(parameter)
        # Conversions compute merged weights from the parameters of the layer: give them full ones.
        with replaced_parameters(self.model, gathered):
            weight = self.full(name, gathered)  # without gathering its parameters once more
            for conversion in self.conversions:
                merged = conversion.merged(name, weight, self.model)  # the weight itself, if it changes none of it
                if merged.shape != weight.shape or merged.dtype != weight.dtype:
                    raise wrong_tensors(
                        conversion,
                        f"merged('{name}', …)",
                        describe_tensors({name: merged}),
                        f"the weight is {describe_tensors({name: weight})}",
                    )
                weight = merged
        return weight


class WeightGroup(TensorGroup):
    """The external tensors of one group of a weight map, to write.

    Args:
        view: weights of the model.
        group: the group.
        turn: chooses the writer among replicas, see :meth:`LocalShard.of`.
    """

    def __init__(self, view: SaveView, group: Group, turn: int) -> None:
        # Conversions of names only rearrange tensors, so that they also convert shapes and dtypes on the meta device.
        specs = group.op.to_external([view.specs[name] for name in group.tune], group.description)
        self.specs = dict(zip(group.external, specs, strict=True))
        self.itemsize = specs[0].itemsize
        self.view = view
        self.group = group
        self.turn = turn

    def compute_slices(self) -> list[TensorSlice]:
        """Compute the slices of the external tensors from this rank's shards of the weights.

        They need memory for one full tensor. If weights are merged or converted, it is a collective.
        """
        group = self.group
        shapes = [spec.shape for spec in self.specs.values()]
        slices = []
        for index, name in enumerate(group.tune):
            shard = self.view.shard(name, self.turn)
            if not shard.is_writer:
                continue
            # A shard of a weight may lie in several external tensors, or in several slices of one.
            for external_slice in group.op.external_slices(index, shard.slices, shapes, group.description):
                data = external_slice.of(shard.data)
                start = tuple(dim.start for dim in external_slice.slices)
                external_name = group.external[external_slice.external]
                slices.append(TensorSlice(external_name, start, tuple(data.shape), data))
        return slices


@dataclass(frozen=True)
class Export:
    """One model in a checkpoint.

    Attributes:
        source: source of the model.
        folder: subfolder of the model with a trailing slash; ``""`` for the checkpoint itself.
        files: tensor files.
        json_files: contents of JSON files by their path.
        generates: whether the model generates text, and is not a classifier.
    """

    source: ModelSource
    folder: str
    files: list[TensorFile]
    json_files: Mapping[str, Any]
    generates: bool

    def write_small_files(self, checkpoint: Path, tokenizer: Any = None) -> None:
        """Write the files without tensors, on one rank.

        Args:
            checkpoint: folder of the checkpoint.
            tokenizer: tokenizer that trained; None copies the files of the source's tokenizer.
        """
        for path, content in self.json_files.items():
            (checkpoint / path).parent.mkdir(parents=True, exist_ok=True)
            write_json(checkpoint / path, content)
        folder = checkpoint / self.folder
        self.source.carry_files(folder, tokenizer=tokenizer is None)
        if tokenizer is None:
            return
        folders = [folder]
        if (folder / ADAPTER_DIR).is_dir():  # users of peft load the tokenizer from the adapter's folder
            folders.append(folder / ADAPTER_DIR)
        save_tokenizer(tokenizer, folders, self.source.checkpoint_dir)
        if self.generates:
            add_stop_tokens(tokenizer, folder)
        else:
            add_pad_token(tokenizer, folder)


def export_model(view: SaveView, source: ModelSource, max_shard_bytes: int, folder: str) -> Export:
    """Describe the files of a model in a checkpoint; every rank computes its slices when the files are written.

    Args:
        view: weights of the model, and the choice of weights to write.
        source: source of the model. Its tokenizer and other small files are exported too. If the model is the text
            decoder of a multimodal checkpoint, the export has that checkpoint's names and its other towers, unchanged.
        max_shard_bytes: larger models are split into several files.
        folder: subfolder of the checkpoint with a trailing slash; ``""`` for the checkpoint itself.

    Raises:
        CheckpointError: a parameter has no name in Hugging Face's or PEFT's format.
    """
    spec, description = view.spec_and_description
    files: list[TensorFile] = []
    json_files: dict[str, Any] = {}
    adapter_dir = folder
    # A classifier is exported as a model of its own, without the other towers of its source.
    enclosing = None if description.is_classifier else source.enclosing_checkpoint(view.model)
    is_text_decoder = enclosing is not None and enclosing.is_multimodal
    if view.has_weights:
        weight_map = spec.weight_map("hf")
        if enclosing is not None:
            weight_map = weight_map.prefixed(enclosing.prefixes)
        # Replicas take turns with the groups, so that all ranks write about as many bytes.
        tensors: list[TensorGroup] = []
        for turn, group in enumerate(weight_map.groups(description)):
            tensors.append(WeightGroup(view, group, turn))
        if enclosing is not None:
            tensors += _other_tensors(enclosing, view.ranks)
        files, index = shard_files(tensors, max_shard_bytes, folder)
        if index is not None:
            json_files[folder + SAFETENSORS_INDEX] = index
        adapter_dir = f"{folder}{ADAPTER_DIR}/"  # transformers would apply an adapter next to merged weights again
    if view.has_adapter:
        base_name = source.base_name()
        composite = enclosing if is_text_decoder else None
        tensors, settings = adapter_tensors(view, base_name, composite)
        if tensors:  # else all parameters are in files of their conversions
            files.append(TensorFile(adapter_dir + ADAPTER_FILE, tensors))
            json_files[adapter_dir + ADAPTER_CONFIG_FILE] = settings
        for file, names in view.owned_files.items():
            tensors = [view.renamed_parameter(name, name, turn) for turn, name in enumerate(names)]
            files.append(TensorFile(adapter_dir + file, tensors))
        if view.owned_files:
            conversions = {}  # the class of the conversion of each file
            for conversion in view.conversions:
                cls = type(conversion)
                file = f"adapter_{cls.__name__}.safetensors"
                if file in view.owned_files:
                    conversions[file] = f"{cls.__module__}.{cls.__qualname__}"
            index = {"base_model_name_or_path": base_name, "conversions": conversions}
            json_files[adapter_dir + OWNED_INDEX] = index
    json_files[f"{folder}config.json"] = config_of_model(view, source.checkpoint_dir, is_text_decoder=is_text_decoder)
    return Export(source, folder, files, json_files, generates=not description.is_classifier)


def _other_tensors(enclosing: TextDecoderFiles, ranks: Ranks) -> list[TensorGroup]:
    """Return copies of the tensors that are not the model's: of other towers, and not trained; ranks take turns."""
    groups = []
    for turn, name in enumerate(enclosing.other_names()):
        is_writer = ranks.rank == turn % ranks.size
        groups.append(_OtherTensor(enclosing, name, is_writer))
    return groups


class _OtherTensor(TensorGroup):
    """A tensor of an enclosing checkpoint that is not the model's, to write unchanged."""

    def __init__(self, enclosing: TextDecoderFiles, name: str, is_writer: bool) -> None:
        spec = spec_of(enclosing.read_other(name))
        self.specs = {name: spec}
        self.itemsize = spec.itemsize
        self.enclosing = enclosing
        self.name = name
        self.is_writer = is_writer

    def compute_slices(self) -> list[TensorSlice]:
        """Read the tensor on the rank that writes it."""
        if not self.is_writer:
            return []
        return [TensorSlice.of(self.name, self.enclosing.read_other(self.name))]


def adapter_tensors(
    view: SaveView, base_name: str, enclosing: TextDecoderFiles | None
) -> tuple[list[TensorGroup], dict[str, Any]]:
    """Return the adapter in PEFT's layout: its tensors to write, and the contents of ``adapter_config.json``.

    Args:
        view: view of a model that has a conversion with a ``peft_config``.
        base_name: ``base_model_name_or_path``: the repository or folder of the base weights.
        enclosing: multimodal checkpoint, if the model is its text decoder; the adapter then has peft's names for the
            modules of the composite model. None for any other model.

    Raises:
        CheckpointError: there is no adapter, or a layer has no name in Hugging Face's format.
    """
    if not view.owned:
        raise CheckpointError("The model has no adapter to save: use a lora_* builder or a converter.")
    spec, description = view.spec_and_description
    prefixes = {}
    if enclosing is not None:
        # Those of most families follow from the prefixes of the tensors in files.
        prefixes = spec.module_prefixes or module_prefixes(enclosing.prefixes)
    weight_map = spec.weight_map("hf")
    adapter_groups = view.adapter_groups
    if prefixes or spec.builder is not None:  # peft looks for one tensor per expert in text models only
        weight_map = spec.weight_maps.get("hf_fused", weight_map)
        if prefixes:
            # The prefixes are of modules, which may have other names than the tensors in files.
            weight_map = weight_map.prefixed(dict(weight_map.modules)).prefixed(prefixes)
        adapter_groups = groups_by_weight(weight_map.peft(), description)
    new_rows = {}  # parameter with rows of new tokens -> name in the file
    for external, name in token_tensors(view).items():
        new_rows[name] = PEFT_PREFIX + rename_prefix(external.removeprefix(PEFT_PREFIX), prefixes)
    adapter_names = view.owned - new_rows.keys()
    for names in view.owned_files.values():  # of other conversions, in separate files
        adapter_names.difference_update(names)
    adapters = [name for name in view.parameters if name in adapter_names]  # in the order of the model
    unnamed = [name for name in adapters if name not in adapter_groups]
    if unnamed:
        raise CheckpointError(
            f"The adapter cannot be saved for peft: the parameter '{unnamed[0]}' has no name in its format."
        )
    groups = dict.fromkeys(adapter_groups[name] for name in adapters)  # once each
    # Replicas take turns with the groups, so that all ranks write about as many bytes.
    tensors = [WeightGroup(view, group, turn) for turn, group in enumerate(groups)]
    for turn, (name, external) in enumerate(new_rows.items()):
        tensors.append(view.renamed_parameter(name, external, turn))
    settings = dict(view.peft_settings)
    fields = adapted_modules(groups, weight_map, description, settings, in_full=bool(prefixes))
    for key in ("rank_pattern", "alpha_pattern"):  # with this library's names
        settings.pop(key, None)
    settings |= fields
    settings["trainable_token_indices"] = token_indices(view)
    # With "pissa" or "olora", peft subtracts the initial adapter from the base, too; True leaves the base unchanged.
    settings["init_lora_weights"] = getattr(view.model, "adapter_init", None) or True
    if view.trained_whole:
        trained_tensors, external_names, has_tied = _trained_tensors(view, weight_map)
        tensors += trained_tensors
        if has_tied:
            settings["ensure_weight_tying"] = True
        is_composite = bool(prefixes) or spec.builder is not None
        settings["modules_to_save"] = modules_to_save(external_names, weight_map, description, in_full=is_composite)
    return tensors, adapter_settings(base_name, settings)


def _trained_tensors(view: SaveView, weight_map: WeightMap) -> tuple[list[TensorGroup], list[str], bool]:
    """Return the weights that are trained whole, to write, and their names in ``transformers``.

    And whether any of them is tied: it is written under both names, because ``peft`` unties a weight that it trains
    alone, unless it is told to tie them.
    """
    _, description = view.spec_and_description
    module_map = weight_map.prefixed(dict(weight_map.modules))
    tensors = []
    external_names = []
    for turn, group in enumerate(view.trained_groups(groups_by_weight(module_map, description))):
        external_names += group.external
        peft_names = tuple(f"{PEFT_PREFIX}{name}" for name in group.external)
        tensors.append(WeightGroup(view, replace(group, external=peft_names), turn))
    has_tied = False
    for tie in module_map.tied:
        if getattr(description, tie.when) and tie.source in view.trained_whole:
            has_tied = True
            external_names.append(tie.external)
            tensors.append(view.renamed_parameter(tie.source, f"{PEFT_PREFIX}{tie.external}", 0))
    return tensors, external_names, has_tied


def shard_files(
    tensors: Iterable[TensorGroup], max_shard_bytes: int, folder: str = ""
) -> tuple[list[TensorFile], dict | None]:
    """Return ``model.safetensors``, or shard files and the contents of their index.

    Args:
        tensors: the tensors of the model, in groups that stay in one file.
        max_shard_bytes: larger models are split into several files.
        folder: subfolder of the checkpoint, with a trailing slash.
    """
    shards: list[list[TensorGroup]] = [[]]
    shard_size = 0
    for group in aligned(tensors):
        size = sum(spec.nbytes for spec in group.specs.values())
        if shards[-1] and shard_size + size > max_shard_bytes:  # a larger group has a file of its own
            shards.append([])
            shard_size = 0
        shards[-1].append(group)
        shard_size += size
    if len(shards) == 1:
        return [TensorFile(f"{folder}model.safetensors", shards[0])], None
    files = []
    weight_map = {}
    for number, shard in enumerate(shards, 1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"  # as transformers names them
        file = TensorFile(f"{folder}{name}", shard)
        files.append(file)
        weight_map.update(dict.fromkeys(file.specs, name))
    total_size = sum(file.size for file in files)
    return files, {"metadata": {"total_size": total_size}, "weight_map": weight_map}


def write_tensors(tensors: Iterable[TensorGroup], folder: Path, max_shard_bytes: int) -> None:
    """Write the tensors of a model on this rank alone, one group at a time."""
    files, index = shard_files(tensors, max_shard_bytes)
    for file in files:
        write_file(file, folder)
    if index is not None:
        write_json(folder / SAFETENSORS_INDEX, index)

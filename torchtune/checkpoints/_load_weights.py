"""Load weights from files into the parameters of a model."""

import logging
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from torchtune import utils
from torchtune.checkpoints._checkpoint_error import CheckpointError
from torchtune.checkpoints._model_weights import ModelWeights, check_shape, identity, materialize, replaced_parameters
from torchtune.checkpoints._sources import Source
from torchtune.models import (
    Description,
    Group,
    Identity,
    ModelError,
    ModelSpec,
    WeightMap,
    WeightMapError,
    spec_for_architecture,
    text_config,
)
from torchtune.modules.peft import LoRALinear
from torchtune.training.parallel import full_tensor, my_shard
from torchtune.utils import get_logger, log_once, log_rank_zero, sign_of_life

# Fields that the shapes of tensors do not determine.
_UNSEEN = ("rope_base", "rope_scaling", "norm_eps", "activation", "chunk")


def detect_format(source: Source, spec: ModelSpec, description: Description) -> str:
    """Return the format of a source's tensor names: a key of ``spec.weight_maps``, or ``"tune"`` for this library's.

    Raises:
        CheckpointError: the format is unknown for this family.
    """
    if source.kind is not None:
        return source.kind
    names, matches = set(source.names()), {}
    for kind, weight_map in spec.weight_maps.items():
        groups = weight_map.groups(description)
        matches[kind] = len(names.intersection(name for group in groups for name in group.external))
        own = len(names.intersection(name for group in groups for name in group.tune))
        matches["tune"] = max(own, matches.get("tune", 0))
    best = max(matches, key=matches.__getitem__, default=None)
    if not names or best is None or matches[best] == 0:
        example = f"its first tensor is '{source.names()[0]}'" if names else "it holds no tensor"
        raise CheckpointError(
            f"{_folder(source)}: no tensor belongs to a model of the family '{spec.name}' ({example}): "
            "check checkpoint_dir and checkpoint_files against the model in the config."
        )
    return best


def _folder(source: Source) -> Path | str:
    if not (names := source.names()):
        return "checkpoint_files"
    first = source.where(names[0])
    return first if source.kind == "gguf" else first.parent


def load_base(
    weights: ModelWeights,
    source: Source,
    device: torch.device,
    dtype: torch.dtype | None = None,
    starts: Mapping[str, LoRALinear] | None = None,
) -> set[str]:
    """Fill the base weights of a model from a source, one tensor at a time; every rank reads its own shard.

    Args:
        weights: the model's weights.
        source: weights in any format of the model's spec.
        device: device for parameters on the meta device.
        dtype: dtype for parameters on the meta device; unchanged by default.
        starts: adapted layers with weights that are split into the initial adapter and the rest, by name of the weight.

    Returns:
        Names of base weights to initialize: the output layer of a classifier, if the source is a language model.

    Raises:
        CheckpointError: names or shapes do not fit; the message names file, tensor and shapes.
    """
    filled: set[str] = set()
    weights.starts = dict(starts or {})
    for group, shapes in _groups(weights, source, compare_tied=True):
        for name in group.tune:
            read = partial(group.read, name, shapes=shapes, source=source.read)
            weights.fill(name, read, device, dtype)
            sign_of_life()
        filled.update(group.tune)
    new_head = weights.base & {_HEAD} - filled
    if new_head:
        log_rank_zero(get_logger(), f"{_folder(source)} is of a language model: the classifier's output layer is new.")
    return new_head


def check_base(weights: ModelWeights, source: Source) -> None:
    """Check that a source has the names and shapes that :func:`load_base` needs, without reading tensor data.

    Args:
        weights: the model's weights, on the meta device, not sharded.
        source: see :func:`load_base`.

    Raises:
        CheckpointError: see :func:`load_base`.
    """
    for _ in _groups(weights, source, compare_tied=False):
        pass


def _groups(
    weights: ModelWeights, source: Source, *, compare_tied: bool
) -> Iterator[tuple[Group, list[tuple[int, ...]]]]:
    """Yield the groups of tensors to read, in file order, with the shapes of their external tensors.

    Args:
        weights: the model's weights.
        source: see :func:`load_base`.
        compare_tied: also read and compare tensors that the model ties and the source stores twice.
    """
    weights.check_names()
    spec, description = weights.identity
    kind = detect_format(source, spec, description)
    if kind == "tune":
        groups = _own_groups(weights, source, description)
    else:
        weight_map = spec.weight_map(kind)
        if compare_tied:
            _check_tied(weights, weight_map, description, source)
        names, lacks_head = source.names(), _lacks_head(weight_map, description, source)
        if lacks_head and not weights.parameters[_HEAD].requires_grad:
            raise CheckpointError(
                f"{_folder(source)} is of a language model: the classifier's output layer would be new and, under an "
                "adapter, never trained: train all weights, without adapters, or start from a classifier's checkpoint."
            )
        if lacks_head:  # a classifier has no projection to the vocabulary
            names = [name for name in names if name not in _head(weight_map, replace(description, num_classes=0))]
        try:
            groups = weight_map.select(names, description, lambda name: name != _HEAD or not lacks_head)
        except WeightMapError as error:
            raise CheckpointError(f"{_folder(source)}: {str(error).rstrip('.')}: {_OTHER_MODEL}.") from error
    for group in groups:
        shapes = [source.shape(name) for name in group.external]
        group = group.for_shapes(shapes)
        specs = group.to_external([weights.specs[name] for name in group.tune])
        for name, shape, wanted in zip(group.external, shapes, specs, strict=True):
            check_shape(source.where(name), name, shape, wanted.shape)
        yield group, shapes


_HEAD = "output.weight"
_OTHER_MODEL = "check checkpoint_dir and checkpoint_files against the model in the config"


def _head(weight_map: WeightMap, description: Description) -> set[str]:
    """Return the external names of the output layer."""
    groups = weight_map.groups(description)
    return {name for group in groups if _HEAD in group.tune for name in group.external}


def _lacks_head(weight_map: WeightMap, description: Description, source: Source) -> bool:
    """Return whether the model is a classifier and the source a language model."""
    return description.is_classifier and not _head(weight_map, description) & set(source.names())


def _own_groups(weights: ModelWeights, source: Source, description: Description) -> list[Group]:
    """Return one group per base weight of a source with this library's names."""
    names = set(source.names())
    for name in sorted(weights.base - names):
        raise CheckpointError(f"{_folder(source)} lacks the tensor '{name}', which the model needs: {_OTHER_MODEL}.")
    for name in sorted(names - weights.base - weights.owned):
        raise CheckpointError(f"{source.where(name)}: the tensor '{name}' has no place in the model: {_OTHER_MODEL}.")
    return [Group((n,), (n,), Identity(), description) for n in source.names() if n in weights.base]


def _check_tied(weights: ModelWeights, weight_map: WeightMap, description: Description, source: Source) -> None:
    """Raise if the source stores a tied tensor twice with different values; every rank compares its own shard."""
    names = set(source.names())
    originals = {name: group.external[0] for group in weight_map.groups(description) for name in group.tune}
    for tie in weight_map.tied:
        original = originals[tie.source]
        if not getattr(description, tie.when) or tie.external not in names or original not in names:
            continue
        parameter, shapes = weights.parameters[tie.source], {source.shape(tie.external), source.shape(original)}
        slices, local = my_shard(parameter)
        differs = shapes == {tuple(parameter.shape)} and local.numel() > 0
        if differs:
            differs = not torch.equal(source.read(tie.external, slices), source.read(original, slices))
        if differs or len(shapes) > 1:
            raise CheckpointError(
                f"{source.where(tie.external)}: '{tie.external}' differs from '{original}', but the model "
                "shares them: build it with tie_word_embeddings=False."
            )


def check_config(model: nn.Module, config_file: Path) -> None:
    """Check a checkpoint's ``config.json`` against the model, including fields that shapes do not determine.

    Raises:
        CheckpointError: the family has other weight names or another layout, or the numbers of heads differ.
    """
    if not config_file.is_file():
        return
    spec, _ = identity(model)
    try:
        config = text_config(read_json(config_file), spec.builder is not None)
    except ModelError as error:
        raise CheckpointError(f"{config_file}: {error}") from error
    architecture = next(iter(config.get("architectures") or ()), None)
    if architecture is not None and architecture not in spec.architectures:
        try:
            other = spec_for_architecture(architecture)
        except ModelError:
            other = None
        if other is None or other.weight_maps.get("hf") != spec.weight_maps.get("hf"):
            raise CheckpointError(
                f"{config_file}: the checkpoint is a {architecture}, the model in the config is of the family "
                f"'{spec.name}' ({', '.join(spec.architectures)}): use a builder of the checkpoint's family."
            )
        spec = other
    try:
        described = spec.from_hf_config(config)
    except ModelError as error:
        get_logger().warning(f"{config_file} is not compared with the model: {error}")
        return
    check_description(model, described, config_file)


def check_description(model: nn.Module, theirs: Description, where: Path) -> None:
    """Compare the fields of descriptions that shapes do not determine; log a warning if the model may differ.

    Raises:
        CheckpointError: the numbers of heads differ.
    """
    _, ours = identity(model)
    if (theirs.num_heads, theirs.num_kv_heads) != (ours.num_heads, ours.num_kv_heads):
        raise CheckpointError(
            f"{where}: the checkpoint has {theirs.num_heads} heads ({theirs.num_kv_heads} of keys and values), the "
            f"model in the config {ours.num_heads} ({ours.num_kv_heads}): use the builder of this checkpoint."
        )
    for name in _UNSEEN:
        if getattr(theirs, name) != getattr(ours, name):
            log_once(
                get_logger(),
                f"{where} says {name} = {getattr(theirs, name)}, the model in the config is built with "
                f"{getattr(ours, name)}: the latter holds.",
                level=logging.WARNING,
            )


def read_json(path: Path) -> dict:
    """Read a JSON object from a file.

    Raises:
        CheckpointError: the file cannot be read, or is not a JSON object.
    """
    return utils.read_json(path, CheckpointError)


def initialize_rest(model: nn.Module, loaded: set[str], device: torch.device, dtype: torch.dtype | None = None) -> None:
    """Initialize parameters that are not in the checkpoint with their modules' ``initialize_parameters()``.

    Args:
        model: model after :func:`load_base`.
        loaded: names of the loaded parameters.
        device: device on which parameters on the meta device are materialized.
        dtype: dtype of these parameters; unchanged by default.

    Raises:
        CheckpointError: no module initializes a parameter, or a buffer is on the meta device.
    """
    left = [name for name, _ in model.named_parameters() if name not in loaded]
    for path, module in model.named_modules():
        inside = [name for name in left if name.startswith(f"{path}." if path else "")]
        if inside and hasattr(module, "initialize_parameters"):
            for name in inside:
                materialize(model, name, device, dtype)
            _initialize(model, path, module, inside)
            left = [name for name in left if name not in inside]
    left = [name for name in left if model.get_parameter(name).is_meta]
    if left:
        raise CheckpointError(
            f"The checkpoint holds no value for '{left[0]}'{f' and {len(left) - 1} more' if left[1:] else ''}, and its "
            "module has no initialize_parameters() to make one."
        )
    for name, buffer in model.named_buffers():
        if buffer.is_meta:
            raise CheckpointError(
                f"The buffer '{name}' is on the meta device: checkpoints hold no buffers, so its module must make it "
                "when it is used."
            )


def _initialize(model: nn.Module, path: str, module: nn.Module, names: list[str]) -> None:
    """Initialize parameters of a module as full tensors; each rank keeps its shard."""
    inside = {f"{path}.{name}" if path else name: parameter for name, parameter in module.named_parameters()}
    reads_base = getattr(module, "initialize_reads_base", True)
    sharded = {
        name: parameter
        for name, parameter in inside.items()
        if isinstance(parameter, DTensor) and (name in names or reads_base)
    }
    full = {
        name: torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)
        if name in names
        else full_tensor(parameter)
        for name, parameter in sharded.items()
    }
    with replaced_parameters(model, full):
        module.initialize_parameters()
    for name in names:
        if name in full:
            slices, local = my_shard(sharded[name])
            local.copy_(full[name][slices])

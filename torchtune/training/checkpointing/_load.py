"""Loading weights from files into the parameters of a model."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from torchtune import utils
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
from torchtune.training.checkpointing._errors import CheckpointError
from torchtune.training.checkpointing._full_weights import FullWeights, materialize, replaced_parameters
from torchtune.training.checkpointing._open_source import without_untrained
from torchtune.training.checkpointing._sources import Source
from torchtune.training.parallel._shards import full_tensor, my_shard
from torchtune.utils import get_logger, log_once, log_rank_zero, sign_of_life

# Fields that no shape of a tensor tells.
_UNSEEN = ("rope_base", "rope_scaling", "norm_eps", "activation", "chunk")


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


def check_names(model: nn.Module, *, exported: bool = False) -> None:
    """Check that the parameters have the names that the family's weights have.

    Args:
        model: on any device.
        exported: whether weights are exported, so that every parameter that no conversion owns needs a name in files.

    Raises:
        CheckpointError: a conversion took a weight away, or added a parameter.
    """
    spec, description = identity(model)
    base = FullWeights(model).base
    known = {name for group in spec.weight_map("hf").groups(description) for name in group.tune}
    modules = {path for path, _ in model.named_modules()}  # a simulated model lacks whole layers
    lost = sorted(name for name in known - base if ".".join(name.rpartition(".")[0].split(".")[:2]) in modules)
    if lost:
        leaf = lost[0].rpartition(".")[2]
        moved = [name for name in base - known if name.startswith(f"{lost[0].rpartition('.')[0]}.")]
        where = f" (but '{next((name for name in moved if name.endswith(leaf)), moved[0])}')" if moved else ""
        raise CheckpointError(
            f"model: it has no parameter '{lost[0]}'{where}: a conversion must keep the names of weights, so replace a "
            "layer by one of a subclass instead of wrapping it."
        )
    if exported and (unknown := base - known):
        raise CheckpointError(
            f"model: '{min(unknown)}' has no name in Hugging Face's format, so it cannot be saved: name it in "
            "owned_parameters(model) of the conversion that adds it."
        )


def detect_format(source: Source, spec: ModelSpec, description: Description) -> str:
    """Format of the tensor names of a source: a key of ``spec.weight_maps``, or ``"tune"`` for this library's own.

    Raises:
        CheckpointError: no format that this family knows.
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
    names = source.names()
    return source.where(names[0]).parent if names else "checkpoint_files"


def load_base(
    model: nn.Module,
    source: Source,
    device: torch.device,
    dtype: torch.dtype | None = None,
    starts: Mapping[str, LoRALinear] | None = None,
) -> set[str]:
    """Fill the base weights of ``model`` from a source, one tensor at a time; every rank reads its own shard.

    Args:
        model: on the meta device or real, sharded or not.
        source: in any format of the model's spec.
        device: where parameters on the meta device become real.
        dtype: of these; their own by default.
        starts: adapted layers, by name of the weight that is split into the initial adapter and the rest.

    Returns:
        Names of base weights to be initialized: the output layer of a classifier, if the source is a language model.

    Raises:
        CheckpointError: names or shapes do not fit; the message names file, tensor and shapes.
    """
    check_names(model)
    source = without_untrained(source, *identity(model))
    weights, filled = FullWeights(model), set()
    weights.starts = dict(starts or {})
    for group, shapes in _groups(model, weights, source, compare_tied=True):
        for name in group.tune:
            read = partial(group.read, name, shapes=shapes, source=source.read)
            weights.fill(name, read, device, dtype)
            sign_of_life()
        filled.update(group.tune)
    new_head = weights.base & {_HEAD} - filled
    if new_head:
        log_rank_zero(get_logger(), f"{_folder(source)} is of a language model: the classifier's output layer is new.")
    return new_head


def check_base(model: nn.Module, source: Source) -> None:
    """Compare the names and shapes of a source with those that :func:`load_base` needs; no tensor data is read.

    Args:
        model: on the meta device, not sharded.
        source: see :func:`load_base`.

    Raises:
        CheckpointError: see :func:`load_base`.
    """
    check_names(model)
    source = without_untrained(source, *identity(model))
    for _ in _groups(model, FullWeights(model), source, compare_tied=False):
        pass


def _groups(
    model: nn.Module, weights: FullWeights, source: Source, *, compare_tied: bool
) -> Iterator[tuple[Group, list[tuple[int, ...]]]]:
    """The groups of tensors to read, in the order of the files, with the shapes of their external tensors.

    Args:
        model: see :func:`load_base`.
        weights: of the model.
        source: see :func:`load_base`.
        compare_tied: also read the tensors that the model ties and the source repeats, and compare them.
    """
    spec, description = identity(model)
    kind = detect_format(source, spec, description)
    if kind == "tune":
        groups = _own_groups(weights, source, description)
    else:
        weight_map = spec.weight_map(kind)
        if compare_tied:
            _check_tied(model, weight_map, description, source)
        names, lacks_head = source.names(), _lacks_head(weight_map, description, source)
        if lacks_head and not model.get_parameter(_HEAD).requires_grad:
            raise CheckpointError(
                f"{_folder(source)} is of a language model: the classifier's output layer would be new and, under an "
                "adapter, never trained: train all weights, without adapters, or start from a classifier's checkpoint."
            )
        if lacks_head:  # a classifier has no place for the projection to the vocabulary
            names = [name for name in names if name not in _head(weight_map, replace(description, num_classes=0))]
        try:
            groups = weight_map.select(names, description, lambda name: name != _HEAD or not lacks_head)
        except WeightMapError as error:
            raise CheckpointError(f"{_folder(source)}: {str(error).rstrip('.')}: {_OTHER_MODEL}.") from error
    for group in groups:
        shapes = [source.shape(name) for name in group.external]
        specs = group.to_external([weights.spec(name) for name in group.tune])
        for name, shape, wanted in zip(group.external, shapes, specs, strict=True):
            check_shape(source.where(name), name, shape, wanted.shape)
        yield group, shapes


_HEAD = "output.weight"
_OTHER_MODEL = "check checkpoint_dir and checkpoint_files against the model in the config"


def _head(weight_map: WeightMap, description: Description) -> set[str]:
    """External names of the output layer."""
    groups = weight_map.groups(description)
    return {name for group in groups if _HEAD in group.tune for name in group.external}


def _lacks_head(weight_map: WeightMap, description: Description, source: Source) -> bool:
    """Whether the model is a classifier and the source a language model."""
    return description.is_classifier and not _head(weight_map, description) & set(source.names())


def _own_groups(weights: FullWeights, source: Source, description: Description) -> list[Group]:
    """The base weights in a source with this library's names, each a group of its own."""
    names = set(source.names())
    for name in sorted(weights.base - names):
        raise CheckpointError(f"{_folder(source)} lacks the tensor '{name}', which the model needs: {_OTHER_MODEL}.")
    for name in sorted(names - weights.base - weights.owned):
        raise CheckpointError(f"{source.where(name)}: the tensor '{name}' has no place in the model: {_OTHER_MODEL}.")
    return [Group((n,), (n,), Identity(), description) for n in source.names() if n in weights.base]


def _check_tied(model: nn.Module, weight_map: WeightMap, description: Description, source: Source) -> None:
    """Raise if a tensor that the model ties and the source repeats differs; every rank compares its own shard."""
    names = set(source.names())
    originals = {name: group.external[0] for group in weight_map.groups(description) for name in group.tune}
    for tie in weight_map.tied:
        original = originals[tie.source]
        if not getattr(description, tie.when) or tie.external not in names or original not in names:
            continue
        parameter, shapes = model.get_parameter(tie.source), {source.shape(tie.external), source.shape(original)}
        slices, local = my_shard(parameter)
        differs = shapes == {tuple(parameter.shape)} and local.numel() > 0
        if differs:
            differs = not torch.equal(source.read(tie.external, slices), source.read(original, slices))
        if differs or len(shapes) > 1:
            raise CheckpointError(
                f"{source.where(tie.external)}: '{tie.external}' differs from '{original}', but the model "
                "shares them: build it with tie_word_embeddings=False."
            )


def load_tensor(
    model: nn.Module,
    name: str,
    value: torch.Tensor,
    where: Path,
    device: torch.device,
    dtype: torch.dtype | None = None,
) -> None:
    """Copy this rank's shard of ``value`` into a parameter, which becomes real on ``device`` if it is on meta.

    Raises:
        CheckpointError: the shapes differ.
    """
    check_shape(where, name, value.shape, model.get_parameter(name).shape)
    slices, local = my_shard(materialize(model, name, device, dtype))
    local.copy_(value[slices])


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


def check_config(model: nn.Module, config_file: Path) -> None:
    """Compare a checkpoint's ``config.json`` with the model, also in what the shapes of weights do not tell.

    Raises:
        CheckpointError: the file is of a family with other weight names or another layout, or the numbers of heads
            differ.
    """
    if not config_file.is_file():
        return
    spec, _ = identity(model)
    try:
        config = text_config(read_json(config_file))
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
    """Compare the fields of descriptions that no shape of a tensor tells; where the model may differ, log a warning.

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
    """A JSON object from a file.

    Raises:
        CheckpointError: it cannot be read, or holds something else.
    """
    return utils.read_json(path, CheckpointError)


def initialize_rest(model: nn.Module, loaded: set[str], device: torch.device, dtype: torch.dtype | None = None) -> None:
    """Initialize the parameters that no checkpoint holds, by ``initialize_parameters()`` of their modules.

    Args:
        model: after :func:`load_base`.
        loaded: names of the parameters that have been filled.
        device: where parameters on the meta device become real.
        dtype: of these; their own by default.

    Raises:
        CheckpointError: no module initializes a parameter.
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
    """Let a module initialize parameters; it gets full tensors for sharded ones, and each rank keeps its shard."""
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

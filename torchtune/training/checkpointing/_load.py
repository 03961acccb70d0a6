"""Weights from files straight into the parameters of a model."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from torchtune import utils
from torchtune.models import (
    Box,
    Description,
    Group,
    ModelError,
    ModelSpec,
    WeightMap,
    WeightMapError,
    spec_for_architecture,
    text_config,
)
from torchtune.modules.peft import LoRALinear
from torchtune.training.checkpointing._errors import CheckpointError
from torchtune.training.checkpointing._full_weights import FullWeights, materialize, parameter_at, whole_parameters
from torchtune.training.checkpointing._ranks import full, local_part
from torchtune.training.checkpointing._sources import Source
from torchtune.utils import get_logger, log_once, log_rank_zero, sign_of_life

# Fields that decide the arithmetic and that no shape of a tensor shows.
_UNSEEN = ("rope_base", "rope_scaling", "norm_eps", "activation")


def identity(model: nn.Module) -> tuple[ModelSpec, Description]:
    """What the model says that it is.

    Raises:
        CheckpointError: it does not say so.
    """
    spec, description = getattr(model, "spec", None), getattr(model, "description", None)
    if spec is None or description is None:
        raise CheckpointError(
            f"{type(model).__name__} carries no ModelSpec, so the names of its weights in other formats are not known: "
            "build it with a builder of torchtune.models."
        )
    return spec, description


def recognise(source: Source, spec: ModelSpec, description: Description) -> str:
    """Whose names a source bears: a key of ``spec.weight_maps``, or ``"tune"`` for this library's own.

    Raises:
        CheckpointError: nobody's that this family knows.
    """
    if source.kind is not None:
        return source.kind
    names, known = set(source.names()), {}
    for kind, weight_map in spec.weight_maps.items():
        groups = weight_map.groups(description)
        known[kind] = len(names.intersection(name for group in groups for name in group.external))
        own = len(names.intersection(name for group in groups for name in group.tune))
        known["tune"] = max(own, known.get("tune", 0))
    best = max(known, key=known.__getitem__, default=None)
    if not names or best is None or known[best] == 0:
        example = f"its first tensor is '{source.names()[0]}'" if names else "it holds no tensor"
        raise CheckpointError(
            f"{_folder(source)}: no tensor belongs to a model of the family '{spec.name}' ({example}): "
            "check checkpoint_dir and checkpoint_files against the model in the config."
        )
    return best


def _folder(source: Source) -> Path | str:
    names = source.names()
    return source.where(names[0]).parent if names else "checkpoint_files"


def put(
    model: nn.Module,
    name: str,
    value: torch.Tensor,
    where: Path,
    device: torch.device,
    dtype: torch.dtype | None = None,
) -> None:
    """Copy what this rank holds of ``value`` into a parameter, which becomes real on ``device`` if it is on meta.

    Raises:
        CheckpointError: the shapes differ.
    """
    check_shape(where, name, value.shape, parameter_at(model, name).shape)
    box, local = local_part(materialize(model, name, device, dtype))
    local.copy_(value[box])


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


def _load_external(
    model: nn.Module,
    weights: FullWeights,
    source: Source,
    kind: str,
    device: torch.device,
    dtype: torch.dtype | None,
) -> None:
    spec, description = identity(model)
    weight_map = spec.weight_map(kind)
    _check_tied(model, weight_map, description, source)
    for group, shapes in _fitting_groups(model, weights, source, kind):
        for name in group.tune:
            weights.fill(name, partial(_read_pieces, source, group, shapes, name), device, dtype)
            sign_of_life()


def _read_pieces(
    source: Source, group: Group, shapes: list[tuple[int, ...]], name: str, box: Box, target: torch.Tensor
) -> None:
    """Fill ``target`` with the part of the weight called ``name`` that is in ``box``."""
    for piece in group.pieces(name, box, shapes):
        piece.fill(target, source.read(group.external[piece.external], piece.box))


def _fitting_groups(
    model: nn.Module, weights: FullWeights, source: Source, kind: str
) -> Iterator[tuple[Any, list[tuple[int, ...]]]]:
    """The groups of the weight map and the shapes of their tensors in the source, found to be those of the model."""
    spec, description = identity(model)
    weight_map, names = spec.weight_map(kind), list(source.names())
    left_out = _missing_head(weight_map, description, names)
    if left_out:  # the projection to the vocabulary has no place in a classifier
        names = [name for name in names if name not in _head(weight_map, replace(description, num_classes=0))]
    try:
        groups = weight_map.select(names, description, lambda name: name not in left_out)
    except WeightMapError as error:
        raise CheckpointError(f"{_folder(source)}: {str(error).rstrip('.')}: {_OTHER_MODEL}.") from error
    for group in groups:
        shapes = [source.shape(name) for name in group.external]
        outline = group.to_external([weights.outline(name) for name in group.tune])
        for name, shape, like in zip(group.external, shapes, outline, strict=True):
            check_shape(source.where(name), name, shape, like.shape)
        yield group, shapes


def _head(weight_map: WeightMap, description: Description) -> set[str]:
    """Names of the output layer in a checkpoint of this description."""
    groups = weight_map.groups(description)
    return {name for group in groups if _HEAD in group.tune for name in group.external}


def _missing_head(weight_map: WeightMap, description: Description, names: Sequence[str]) -> set[str]:
    """The output layer of a classifier, where the checkpoint is of a language model."""
    is_new = description.is_classifier and not _head(weight_map, description) & set(names)
    return {_HEAD} if is_new else set()


_HEAD = "output.weight"
_OTHER_MODEL = "check checkpoint_dir and checkpoint_files against the model in the config"


def _check_tied(model: nn.Module, weight_map: WeightMap, description: Description, source: Source) -> None:
    """A shared tensor that the file repeats must be what the model shares; every rank looks at its own part."""
    names = set(source.names())
    originals = {name: group.external[0] for group in weight_map.groups(description) for name in group.tune}
    for tie in weight_map.tied:
        original = originals[tie.source]
        if not getattr(description, tie.when) or tie.external not in names or original not in names:
            continue
        parameter, shapes = parameter_at(model, tie.source), {source.shape(tie.external), source.shape(original)}
        box, local = local_part(parameter)
        unlike = shapes == {tuple(parameter.shape)} and local.numel() > 0
        if unlike:
            unlike = not torch.equal(source.read(tie.external, box), source.read(original, box))
        if unlike or len(shapes) > 1:
            raise CheckpointError(
                f"{source.where(tie.external)}: '{tie.external}' differs from '{original}', but the model "
                "shares them: build it with tie_word_embeddings=False."
            )


def _own_names(weights: FullWeights, source: Source) -> set[str]:
    """Names of the base weights, found to be those of a source that bears our names."""
    wanted, names = weights.base, set(source.names())
    for name in sorted(wanted - names):
        raise CheckpointError(f"{_folder(source)} lacks the tensor '{name}', which the model needs: {_OTHER_MODEL}.")
    for name in sorted(names - wanted):
        if name not in weights.owned:
            raise CheckpointError(
                f"{source.where(name)}: the tensor '{name}' has no place in the model: {_OTHER_MODEL}."
            )
    for name in wanted:
        check_shape(source.where(name), name, source.shape(name), weights.outline(name).shape)
    return wanted


def _load_own(weights: FullWeights, source: Source, device: torch.device, dtype: torch.dtype | None) -> None:
    wanted = _own_names(weights, source)
    for name in source.names():
        if name in wanted:
            weights.fill(name, lambda box, target, name=name: target.copy_(source.read(name, box)), device, dtype)


def load_base(
    model: nn.Module,
    source: Source,
    device: torch.device,
    dtype: torch.dtype | None = None,
    starts: Mapping[str, LoRALinear] | None = None,
) -> set[str]:
    """Fill the base parameters of ``model`` from a source, one tensor at a time; of it, what this rank holds.

    Args:
        model: on the meta device, or real; sharded or whole.
        source: any format that the model's spec knows.
        device: where parameters of the meta device become real.
        dtype: of these; theirs by default.
        starts: adapted layers, by the names of weights that are split into what the adapter starts with and the rest.

    Returns:
        names of base parameters that begin anew: the output layer of a classifier made from a language model.

    Raises:
        CheckpointError: names or shapes do not fit; the message names file, tensor and shapes.
    """
    spec, description = identity(model)
    kind, weights = recognise(source, spec, description), FullWeights(model)
    weights.starts = dict(starts or {})
    if kind == "tune":
        _load_own(weights, source, device, dtype)
        return set()
    _load_external(model, weights, source, kind, device, dtype)
    left_out = _missing_head(spec.weight_map(kind), description, source.names())
    if left_out:
        log_rank_zero(get_logger(), f"{_folder(source)} is of a language model: the classifier's output layer is new.")
    return left_out


def check_base(model: nn.Module, source: Source) -> None:
    """Compare names and shapes of a source with what :func:`load_base` would need; no data are read.

    Args:
        model: on the meta device, not split.
        source: see :func:`load_base`.

    Raises:
        CheckpointError: see :func:`load_base`.
    """
    spec, description = identity(model)
    kind = recognise(source, spec, description)
    if kind == "tune":
        _own_names(FullWeights(model), source)
    else:
        for _ in _fitting_groups(model, FullWeights(model), source, kind):
            pass


def check_config(model: nn.Module, config_file: Path) -> None:
    """Compare what a checkpoint's ``config.json`` says with what the model is, where weights would fit either way.

    Raises:
        CheckpointError: the file is of a family whose weights have other names or another layout, or its heads are
            of another number.
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
    """Compare fields of descriptions that no shape of a tensor shows; warn where the model may differ.

    Raises:
        CheckpointError: the heads are of another number.
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
        CheckpointError: it is no such thing.
    """
    return utils.read_json(path, CheckpointError)


def initialize_rest(model: nn.Module, loaded: set[str], device: torch.device, dtype: torch.dtype | None = None) -> None:
    """Give parameters that no checkpoint holds their first values: their modules know how.

    Args:
        model: after :func:`load_base`.
        loaded: names of parameters that have their values.
        device: where parameters of the meta device become real.
        dtype: of these; theirs by default.

    Raises:
        CheckpointError: parameters are left that no module initialises.
    """
    left = [name for name, _ in model.named_parameters() if name not in loaded]
    for path, module in model.named_modules():
        inside = [name for name in left if name.startswith(f"{path}." if path else "")]
        if inside and hasattr(module, "initialize_parameters"):
            for name in inside:
                materialize(model, name, device, dtype)
            _initialize(model, path, module, inside)
            left = [name for name in left if name not in inside]
    left = [name for name in left if parameter_at(model, name).is_meta]
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
    """Let a module fill parameters; in place of sharded ones it gets whole ones, of which each rank keeps its part."""
    inside = {f"{path}.{name}" if path else name: parameter for name, parameter in module.named_parameters()}
    reads_base = getattr(module, "initialize_reads_base", True)
    sharded = {
        name: parameter
        for name, parameter in inside.items()
        if isinstance(parameter, DTensor) and (name in names or reads_base)
    }
    whole = {
        name: torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)
        if name in names
        else full(parameter)
        for name, parameter in sharded.items()
    }
    with whole_parameters(model, whole):
        module.initialize_parameters()
    for name in names:
        if name in whole:
            box, local = local_part(sharded[name])
            local.copy_(whole[name][box])

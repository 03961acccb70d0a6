"""Weights from files straight into the parameters of a model."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import nn

from torchtune.models import Description, WeightMap, WeightMapError
from torchtune.modules.conversion import get_conversions
from torchtune.training.checkpointing._errors import CheckpointError
from torchtune.training.checkpointing._sources import SafetensorsFiles, Source, stream

ADAPTER_FILE = "adapter_model.safetensors"
ADAPTER_CONFIG_FILE = "adapter_config.json"


def is_adapter_key(model: nn.Module) -> Callable[[str], bool]:
    """Tells whether a parameter's name belongs to a conversion and not to the base."""
    tests = [conversion.is_own_key for conversion in get_conversions(model) if hasattr(conversion, "is_own_key")]
    return lambda name: any(test(name) for test in tests)


def spec_map(model: nn.Module, kind: str) -> tuple[WeightMap, Description]:
    """The weight map of one format, and the description that it expands for.

    Raises:
        CheckpointError: the model does not say what it is.
    """
    if getattr(model, "spec", None) is None or getattr(model, "description", None) is None:
        raise CheckpointError(
            f"{type(model).__name__} carries no ModelSpec, so names of the format '{kind}' cannot be mapped: build it "
            "with a builder of torchtune.models."
        )
    return model.spec.weight_map(kind), model.description


def _put(model: nn.Module, name: str, value: torch.Tensor, device: torch.device, where: Path) -> None:
    """Copy ``value`` into a parameter, which becomes real on ``device`` if it is on the meta device."""
    path, _, leaf = name.rpartition(".")
    module = model.get_submodule(path)
    parameter = getattr(module, leaf)
    if parameter.shape != value.shape:
        raise CheckpointError(
            f"{where}: the tensor of '{name}' has the shape {tuple(value.shape)}, the model's is "
            f"{tuple(parameter.shape)}: this checkpoint is of another model than the one in `model`."
        )
    if parameter.is_meta:
        data = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
        parameter = nn.Parameter(data, requires_grad=parameter.requires_grad)
        module.register_parameter(leaf, parameter)
    with torch.no_grad():
        parameter.copy_(value)


def _from_external(model: nn.Module, source: Source) -> Iterator[tuple[str, torch.Tensor, Path]]:
    weight_map, description = spec_map(model, source.kind)
    try:
        groups = weight_map.select(source.names(), description)
    except WeightMapError as error:
        raise CheckpointError(f"{source.where(source.names()[0]).parent}: {error}") from error
    _check_tied(weight_map, description, source)
    for group in groups:
        tensors = group.to_tune([source.read(name) for name in group.external])
        yield from (
            (name, tensor, source.where(group.external[0])) for name, tensor in zip(group.tune, tensors, strict=True)
        )


def _check_tied(weight_map: WeightMap, description: Description, source: Source) -> None:
    """A shared tensor that the file repeats must be what the model shares."""
    names = set(source.names())
    originals = {name: group.external[0] for group in weight_map.groups(description) for name in group.tune}
    for tie in weight_map.tied:
        if not getattr(description, tie.when) or tie.external not in names:
            continue
        if not torch.equal(source.read(tie.external), source.read(originals[tie.source])):
            raise CheckpointError(
                f"{source.where(tie.external)}: '{tie.external}' differs from '{originals[tie.source]}', but the model "
                "shares them: build it with tie_word_embeddings=False."
            )


def _from_tune(model: nn.Module, source: Source) -> Iterator[tuple[str, torch.Tensor, Path]]:
    own = is_adapter_key(model)
    wanted = {name for name, _ in model.named_parameters() if not own(name)}
    names = set(source.names())
    for name in sorted(wanted - names):
        raise CheckpointError(f"{source.where(source.names()[0])} lacks the tensor '{name}', which the model needs.")
    for name in sorted(names - wanted):
        if not own(name):
            raise CheckpointError(f"{source.where(name)}: the tensor '{name}' has no place in the model.")
    yield from ((name, source.read(name), source.where(name)) for name in source.names() if name in wanted)


def load_base(model: nn.Module, source: Source, device: torch.device) -> None:
    """Fill the base parameters of ``model`` from a source, one tensor at a time.

    Args:
        model: on the meta device, or real.
        source: any format that the model's spec knows.
        device: where parameters of the meta device become real.

    Raises:
        CheckpointError: names or shapes do not fit; the message names file, tensor and shapes.
    """
    tensors = _from_tune(model, source) if source.kind == "tune" else _from_external(model, source)
    for name, tensor, where in tensors:
        _put(model, name, tensor, device, where)


def load_adapter(model: nn.Module, folder: Path, device: torch.device) -> None:
    """Fill the adapter parameters of ``model`` from a PEFT folder.

    Raises:
        CheckpointError: the adapter is of other layers, another rank, or another scale.
    """
    weight_map, description = spec_map(model, "hf")
    source = SafetensorsFiles([folder / ADAPTER_FILE])
    own = is_adapter_key(model)
    wanted = {name for name, _ in model.named_parameters() if own(name)}
    _check_adapter_config(model, folder / ADAPTER_CONFIG_FILE)
    found = set()
    try:
        for name, tensor in weight_map.peft().to_tune(stream(source), description, partial=True):
            if name not in wanted:
                raise CheckpointError(
                    f"{folder / ADAPTER_FILE}: it adapts '{name.rpartition('.lora')[0]}', which the model does not: "
                    "ask for the layers that its adapter_config.json lists."
                )
            _put(model, name, tensor, device, folder / ADAPTER_FILE)
            found.add(name)
    except WeightMapError as error:
        raise CheckpointError(f"{folder / ADAPTER_FILE}: {error}") from error
    if missing := sorted(wanted - found):
        raise CheckpointError(
            f"{folder / ADAPTER_FILE} lacks '{missing[0]}' and {len(missing) - 1} more that the model adapts: ask for "
            "the layers that its adapter_config.json lists."
        )


def _check_adapter_config(model: nn.Module, path: Path) -> None:
    if not path.is_file():
        return
    saved = json.loads(path.read_text())
    for conversion in get_conversions(model):
        rank, alpha = getattr(conversion, "rank", None), getattr(conversion, "alpha", None)
        if rank is not None and (saved.get("r"), float(saved.get("lora_alpha", 0))) != (rank, float(alpha)):
            raise CheckpointError(
                f"{path}: the adapter has rank {saved.get('r')} and alpha {saved.get('lora_alpha')}, the model is "
                f"built with {rank} and {alpha}: make them equal."
            )


def initialize_rest(model: nn.Module, device: torch.device) -> None:
    """Make what no checkpoint holds real: every module with such parameters initialises them itself.

    Raises:
        CheckpointError: parameters are left that no module initialises.
    """
    for module in model.modules():
        lacking = [name for name, parameter in module.named_parameters() if parameter.is_meta]
        if lacking and hasattr(module, "initialize_parameters"):
            for name in lacking:
                path, _, leaf = name.rpartition(".")
                owner = module.get_submodule(path)
                old = getattr(owner, leaf)
                data = torch.empty(old.shape, dtype=old.dtype, device=device)
                owner.register_parameter(leaf, nn.Parameter(data, requires_grad=old.requires_grad))
            module.initialize_parameters()
    left = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if left:
        raise CheckpointError(f"The checkpoint holds no value for '{left[0]}' and {len(left) - 1} more parameters.")
    for name, buffer in list(model.named_buffers()):
        if buffer.is_meta:
            raise CheckpointError(
                f"The buffer '{name}' is on the meta device: it must be made from numbers, not loaded."
            )

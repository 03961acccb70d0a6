"""Adapter files: PEFT's layout, read and written, and the layout of older checkpoints, read."""

import re
from collections.abc import Collection, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from torchtune.models import (
    Description,
    FusedAdapter,
    Group,
    ModelError,
    ModelSpec,
    WeightMap,
    WeightMapError,
    module_prefixes,
    rename_prefix,
    text_prefixes,
)
from torchtune.modules.peft import LoRA, owned_parameters
from torchtune.training.checkpointing._errors import CheckpointError
from torchtune.training.checkpointing._export import group_entry
from torchtune.training.checkpointing._full_weights import FullWeights
from torchtune.training.checkpointing._load import identity, load_tensor
from torchtune.training.checkpointing._open_source import TextTower, open_source
from torchtune.training.checkpointing._owned_files import OWNED_INDEX, load_owned, owned_files, slices_of
from torchtune.training.checkpointing._peft_settings import (
    check_settings,
    peft_settings,
    read_settings,
    take_from_base,
    token_indices,
    token_tensors,
)
from torchtune.training.checkpointing._safetensors_file import Entry
from torchtune.training.checkpointing._sources import Source, must_exist
from torchtune.training.parallel._ranks import Ranks
from torchtune.training.parallel._shards import LocalShard
from torchtune.utils import get_logger

# Folder of the adapter in a checkpoint of merged weights.
ADAPTER_DIR = "adapter"
ADAPTER_FILE = "adapter_model.safetensors"
ADAPTER_CONFIG_FILE = "adapter_config.json"
# The first of these in a folder is read: older checkpoints have the adapter under this library's names in .pt, and in
# .safetensors with the rows of Qwen in the wrong order.
_OLDER_FILE = "adapter_model.pt"
_FILES = (_OLDER_FILE, ADAPTER_FILE, "adapter_model.bin")
_PEFT_PREFIX = "base_model.model."
# Parameters of stacked experts in transformers: an adapter's tensors have one of each expert, which peft puts together.
_EXPERTS = ("experts.gate_up_proj", "experts.down_proj")


def find_adapter(path: Path, model: nn.Module) -> Path:
    """A file of an adapter: ``path`` itself, or the first one in the folder ``path`` that ``model`` may have.

    Raises:
        CheckpointError: there is none.
    """
    if not path.is_dir():
        must_exist(path)
        return path
    names = (*_FILES, *owned_files(model), OWNED_INDEX)
    for name in names:
        if (path / name).is_file():
            return path / name
    raise CheckpointError(f"{path} holds no adapter ({', '.join(names[:-1])}): name the folder that does.")


def adapter_beside_base(folder: Path, model: nn.Module) -> Path | None:
    """The adapter in a folder of base weights, as in ``peft``; None if there is none.

    Args:
        folder: see above.
        model: to be filled; if it has no adapter, an adapter file is ignored with a warning.

    Raises:
        CheckpointError: the checkpoint of an older release, with an adapter that may be merged into the weights.
    """
    names = (*_FILES, *owned_files(model), OWNED_INDEX)
    found = [folder / name for name in names if (folder / name).is_file()]
    if not found:
        return None
    if not owned_parameters(model):
        get_logger().warning(f"{found[0]} is not used: the model has no adapter.")
        return None
    if found[0].name == _OLDER_FILE:
        raise CheckpointError(
            f"checkpoint_dir: {folder} holds {_OLDER_FILE} beside weights, as older releases wrote it after they had "
            f"merged it into them: set adapter_checkpoint to {_OLDER_FILE} if the weights are those of the base model, "
            "or move the adapter's files away to train a new one on the merged weights."
        )
    get_logger().info(f"The adapter starts from {found[0]}.")
    return found[0]


def load_adapter(model: nn.Module, file: Path, device: torch.device, dtype: torch.dtype | None = None) -> None:
    """Fill the adapter parameters of ``model``.

    Args:
        model: with adapters, on the meta device or real.
        file: with PEFT's names, of the text model or of a composite model around it, or this library's; or a file of
            :func:`owned_files`, which are all read from its folder.
        device: where parameters on the meta device become real.
        dtype: of these; their own by default.

    Raises:
        CheckpointError: the adapter has other target modules, another rank or another alpha.
    """
    wanted = owned_parameters(model) - load_owned(model, file.parent, device, dtype)
    if not owned_parameters(model):
        raise CheckpointError(f"{file}: the model has no adapter to put it into: use a lora_* builder or a converter.")
    if file.name in (*owned_files(model), OWNED_INDEX):
        if not wanted:
            return
        file = file.with_name(ADAPTER_FILE)
    source = open_source([file])
    spec, description = identity(model)
    patterns = _patterns(spec.weight_map("hf").peft().groups(description), peft_settings(model))
    settings = check_settings(model, file.with_name(ADAPTER_CONFIG_FILE), patterns)
    found = set()
    for name, tensor in _our_names(model, source, file):
        if name not in wanted:
            raise CheckpointError(
                f"{file}: it holds '{name}', which the model in the config does not adapt: adapt the layers that its "
                f"{ADAPTER_CONFIG_FILE} lists."
            )
        load_tensor(model, name, tensor, file, device, dtype)
        found.add(name)
    if missing := sorted(wanted - found):
        raise CheckpointError(
            f"{file} lacks '{missing[0]}'{f' and {len(missing) - 1} more' if missing[1:] else ''}, which the model in "
            f"the config adapts: adapt the layers that its {ADAPTER_CONFIG_FILE} lists."
        )
    take_from_base(model, settings, file.with_name(ADAPTER_CONFIG_FILE))


def _our_names(model: nn.Module, source: Source, file: Path) -> list[tuple[str, torch.Tensor]]:
    """The tensors with this library's names and order of rows."""
    tensors = [(name, source.read(name)) for name in source.names()]
    if not any(name.startswith(_PEFT_PREFIX) for name, _ in tensors):
        return tensors
    spec, description = identity(model)
    prefixes = _prefixes_of_text(spec, [name for name, _ in tensors])
    tensors = [(rename_prefix(name, prefixes), tensor) for name, tensor in tensors]
    weight_map = spec.weight_map("hf").peft()
    rows = token_tensors(model)
    tokens = [(rows[name], tensor) for name, tensor in tensors if name in rows]
    try:
        tensors = [pair for pair in tensors if pair[0] not in rows and not _is_of_base(model, *pair, file)]
        ours = {name: weight_map.tune_name(name, description) for name, _ in tensors}
        groups = {group.tune[0]: group for group in weight_map.groups(description)}
        tensors = _spread(model, dict(tensors), {groups[ours[name]] for name, _ in tensors})
        for name, tensor in tensors:
            _check_rank(model, groups[ours[name]], name, tensor, file)
        return [*tokens, *weight_map.to_tune(tensors, description, partial=True)]
    except (WeightMapError, ModelError) as error:
        raise CheckpointError(f"{file}: {str(error).rstrip('.')}: it is an adapter of another model.") from error


def _prefixes_of_text(spec: ModelSpec, names: Collection[str]) -> dict[str, str]:
    """Prefixes in the adapter of a composite model -> those in one of its text decoder, if that alone is the model."""
    if spec.builder is not None:
        return {}
    composite = text_prefixes(name.removeprefix(_PEFT_PREFIX) for name in names)
    return {_PEFT_PREFIX + theirs: _PEFT_PREFIX + ours for ours, theirs in composite.items()}


def _spread(
    model: nn.Module, tensors: dict[str, torch.Tensor], groups: Collection[Group]
) -> list[tuple[str, torch.Tensor]]:
    """Split an adapter of a fused projection that has the model's rank into one for each of its projections."""
    adapted = {name for name, _ in model.named_parameters()}
    for group in groups:
        if isinstance(group.op, FusedAdapter) and group.tune[0] in adapted and tensors.keys() >= set(group.external):
            both = [tensors[name] for name in group.external]
            if both[0].shape[0] == both[1].shape[1] == model.get_parameter(group.tune[0]).shape[0]:
                tensors |= zip(group.external, group.op.spread(both, group.description), strict=True)
    return list(tensors.items())


def _is_of_base(model: nn.Module, name: str, tensor: torch.Tensor, file: Path) -> bool:
    """Whether a tensor of an adapter file is a base weight; ``peft`` adds those of an adapted output layer.

    Raises:
        CheckpointError: it is a base weight, and differs from the model's.
    """
    spec, description = identity(model)
    external, weight_map = name.removeprefix(_PEFT_PREFIX).replace(".base_layer.", "."), spec.weight_map("hf")
    if not any(external in group.external for group in weight_map.groups(description)):
        return external in {tie.external for tie in weight_map.tied}
    weights = FullWeights(model)
    for ours, value in weight_map.to_tune([(external, tensor)], description, partial=True):
        if value.shape != weights.spec(ours).shape or not weights.equals(ours, value):
            raise CheckpointError(
                f"{file}: it brings '{name}', which differs from the model's: it was trained together with a changed "
                "base, so merge it into that base with peft and start from the merged model."
            )
    return True


def _check_rank(model: nn.Module, group: Group, name: str, tensor: torch.Tensor, file: Path) -> None:
    """Raise on a shape that does not fit, before rows are reordered."""
    try:
        shapes = [model.get_parameter(ours).shape for ours in group.tune]
    except AttributeError:
        return  # not adapted here: refused with the list of layers
    specs = group.to_external([torch.empty(shape, device="meta") for shape in shapes])
    wanted = specs[group.external.index(name)].shape
    if tensor.shape != wanted:
        raise CheckpointError(
            f"{file}: the tensor '{name}' has the shape {list(tensor.shape)} where the model needs {list(wanted)}: the "
            "adapter is of another rank or of another model."
        )


def adapter_entries(
    model: nn.Module, ranks: Ranks, base_name: str, whole: TextTower | None = None
) -> tuple[list[Entry], dict[str, Any]]:
    """The adapter in PEFT's layout: its tensors, and the contents of ``adapter_config.json``.

    Args:
        model: has a conversion with a ``peft_config``.
        ranks: every rank makes its own shard.
        base_name: ``base_model_name_or_path``: the repository or folder of the base weights.
        whole: the multimodal checkpoint that the model is the text decoder of: the adapter uses the names that peft
            gives the modules of the composite model.

    Raises:
        CheckpointError: there is no adapter, or a layer has no name in Hugging Face's format.
    """
    spec, description = identity(model)
    prefixes = {} if whole is None else module_prefixes(whole.prefixes)
    spec, weights = spec.as_part(prefixes) if prefixes else spec, FullWeights(model)
    weight_map = spec.weight_map("hf")
    parameters = {name: parameter for name, parameter in model.named_parameters() if name in weights.owned}
    apart = {name for names in owned_files(model).values() for name in names}
    if not parameters:
        raise CheckpointError("The model has no adapter to save: use a lora_* builder or a converter.")
    groups = {ours: group for group in weight_map.peft().groups(description) for ours in group.tune}
    rows = {
        ours: _PEFT_PREFIX + rename_prefix(theirs.removeprefix(_PEFT_PREFIX), prefixes)
        for theirs, ours in token_tensors(model).items()
    }
    tokens = {name: parameters.pop(name) for name in rows}
    parameters = {name: parameter for name, parameter in parameters.items() if name not in apart}
    if unknown := [name for name in parameters if name not in groups]:
        raise CheckpointError(
            f"The adapter cannot be saved for peft: the parameter '{unknown[0]}' has no name in its format."
        )
    chosen = dict.fromkeys(groups[name] for name in parameters)
    entries = [group_entry(group, weights, ranks, turn) for turn, group in enumerate(chosen)]
    for turn, (name, parameter) in enumerate(tokens.items()):
        shard = LocalShard.of(parameter, ranks, turn)
        entries.append(Entry({rows[name]: shard.spec}, partial(slices_of, rows[name], shard)))
    settings = peft_settings(model) | {"trainable_token_indices": token_indices(model)}
    settings |= {"init_lora_weights": getattr(model, "adapter_init", None) or True}
    settings |= adapted_modules(chosen, weight_map, description, settings, in_full=bool(prefixes))
    return entries, adapter_settings(base_name, settings)


def adapted_modules(
    groups: Collection[Group],
    weight_map: WeightMap,
    description: Description,
    settings: Mapping[str, Any],
    *,
    in_full: bool = False,
) -> dict[str, Any]:
    """The fields of ``adapter_config.json`` for target modules and parameters, and for their ranks and alphas.

    Args:
        groups: of the adapter's parameters.
        weight_map: of the model, in Hugging Face's format.
        description: of the model.
        settings: rank and alpha of one adapter.
        in_full: name modules by their paths: in a composite model, shorter names would also select modules of the other
            towers.
    """
    modules = dict.fromkeys(module for group in groups for module in map(_adapted, group.external))
    parameters = {
        _adapted(group.external[0])
        for group in groups
        if weight_map.named_like_experts(group.tune[0].removesuffix(".lora_a.weight"), description)
    }
    targets, linears = (
        sorted(names) if in_full else _shortest(names, weight_map, description)
        for names in (modules.keys() - parameters, parameters)
    )
    target_parameters = [f"{name}.weight" for name in linears]
    target_parameters += _EXPERTS if any(map(_is_of_experts, groups)) else ()
    found = {"target_modules": targets} | _patterns(groups, settings)
    return found | ({"target_parameters": target_parameters} if target_parameters else {})


def _is_of_experts(group: Group) -> bool:
    """Whether adapters of stacked experts are in the group."""
    return not group.tune[0].endswith((".weight", ".magnitude"))


def _patterns(groups: Iterable[Group], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Rank and alpha of the adapters of fused projections: the sums over their projections."""
    counts = {}
    for group in groups:
        if _is_of_experts(group):
            counts[_EXPERTS[0]] = 2
        if isinstance(group.op, FusedAdapter):
            counts[_adapted(group.external[0]).rpartition(".")[2]] = len(group.op.sizes)
    if not counts:
        return {}
    power = 0.5 if settings.get("use_rslora") else 1  # so that peft's scale is that of the parts
    return {
        "rank_pattern": {name: count * settings["r"] for name, count in counts.items()},
        "alpha_pattern": {name: count**power * settings["lora_alpha"] for name, count in counts.items()},
    }


def _adapted(name: str) -> str:
    """Name of the module that a tensor in PEFT's layout adapts."""
    return name.removeprefix(_PEFT_PREFIX).rpartition(".lora_")[0]


def adapter_settings(base_name: str, settings: dict[str, Any]) -> dict[str, Any]:
    """The contents of ``adapter_config.json``."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "modules_to_save": None,
        **settings,
        "base_model_name_or_path": base_name,
    }


def _shortest(names: Collection[str], weight_map: WeightMap, description: Description) -> list[str]:
    """The shortest names that select these modules alone: last component (``q_proj``), path in a layer, full name."""
    modules = {
        name.removesuffix(".weight")
        for group in weight_map.prefixed(dict(weight_map.modules)).groups(description)
        for name in group.external
        if name.endswith(".weight")
    }
    others = {end for name in modules.difference(names) for end in _ends(name)}
    return sorted({next(end for end in (*_ends(name), name) if end not in others) for name in names})


def _ends(name: str) -> tuple[str, str]:
    return name.rpartition(".")[2], re.sub(r".*\.layers\.\d+\.", "", name)


def adapter_folder(folder: Path) -> Path:
    """The folder with the adapter's files: ``folder``, or ``adapter`` in a checkpoint of merged weights.

    Raises:
        CheckpointError: neither has an adapter in PEFT's layout.
    """
    for candidate in (folder, folder / ADAPTER_DIR):
        if (candidate / ADAPTER_FILE).is_file() and (candidate / ADAPTER_CONFIG_FILE).is_file():
            return candidate
        if (candidate / OWNED_INDEX).is_file():
            return candidate
    raise CheckpointError(
        f"{folder}: there is no {ADAPTER_FILE} with an {ADAPTER_CONFIG_FILE}: give an adapter's folder."
    )


def adapter_conversion(model: nn.Module, folder: Path) -> LoRA:
    """The conversion that gives ``model`` the adapter layers of a PEFT folder.

    Args:
        model: without adapters, on the meta device or real.
        folder: with ``adapter_config.json`` and ``adapter_model.safetensors``.

    Raises:
        CheckpointError: a file is missing, or the adapter is of another model.
    """
    file, settings = folder / ADAPTER_FILE, read_settings(folder / ADAPTER_CONFIG_FILE)
    names = [name for name in open_source([file]).names() if ".lora_A." in name]
    spec, description = identity(model)
    prefixes = _prefixes_of_text(spec, names)
    names = [rename_prefix(name, prefixes) for name in names]
    found = {name: group for group in spec.weight_map("hf").peft().groups(description) for name in group.external}
    if unknown := [name for name in names if name not in found]:
        raise CheckpointError(
            f"{file}: it holds '{unknown[0]}', for which the model has no layer: it is of another one."
        )
    if not names or "r" not in settings:
        raise CheckpointError(f"{folder}: there is no LoRA adapter in it: give the folder that a recipe or peft wrote.")
    layers = sorted({tune.partition(".lora_")[0] for name in names for tune in found[name].tune})
    return LoRA(
        rank=settings["r"],
        alpha=settings.get("lora_alpha", 8),
        target_modules=layers,
        use_dora=bool(settings.get("use_dora")),
        use_rslora=bool(settings.get("use_rslora")),
    )

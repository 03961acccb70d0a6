"""Adapter files: PEFT's layout (read and written) and the layout of older checkpoints (read)."""

import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from torchtune.checkpoints._model_weights import ModelWeights, SaveView, identity
from torchtune.checkpoints._save import Entry
from torchtune.checkpoints._weight_files import CheckpointError, Source, TextTower, must_exist, open_source, read_json
from torchtune.models import (
    PEFT_PREFIX,
    Description,
    ExpertAdapter,
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
from torchtune.modules.conversion import ConversionError
from torchtune.modules.peft import LoRA, LoRALinear, NewTokens, adapter_modules, init_from_weight
from torchtune.modules.transformer import text_decoder
from torchtune.utils import get_logger

# Settings that are compared with the model, or handled elsewhere.
_COMPARED = (
    "peft_type r lora_alpha use_dora use_rslora rank_pattern alpha_pattern init_lora_weights bias "
    "trainable_token_indices"
).split()
# Maximum of alpha and rank; NaN fails the comparison with it, too.
_LARGEST = 1e30
# Settings that may have any value: origin and training of the adapter, options of other settings, and target modules,
# which follow from the tensors.
_ANY = (
    "auto_mapping base_model_name_or_path revision peft_version task_type inference_mode lora_dropout loftq_config "
    "eva_config corda_config lora_ga_config megatron_core qalora_group_size target_modules target_parameters "
    "exclude_modules layers_to_transform layers_pattern ensure_weight_tying"
).split()
# Values of init_lora_weights that leave the base weights unchanged, and values with which peft subtracts the initial
# adapter from them.
_PLAIN_INITS = (True, False, None, "gaussian", "eva", "orthogonal")
_INITS_FROM_BASE = ("pissa", "olora")


def read_settings(path: Path) -> dict[str, Any]:
    """Read the settings in an ``adapter_config.json``.

    Raises:
        CheckpointError: it is not a JSON object, or rank, alpha or a flag has the wrong type.
    """
    saved = read_json(path)
    for key, kinds, wanted in (
        ("r", (int,), "a whole number from 1"),
        ("lora_alpha", (int, float), "a number"),
        ("use_dora", (bool,), "true or false"),
        ("use_rslora", (bool,), "true or false"),
    ):
        if key not in saved:
            continue
        value = saved[key]
        fits = type(value) in kinds and abs(value) < _LARGEST
        if not fits or (key == "r" and value < 1):
            raise CheckpointError(f"{path}: {key} is {value!r}, where {wanted} is expected: correct it.")
    return saved


def check_settings(weights: ModelWeights, path: Path, patterns: Mapping[str, Any]) -> dict[str, Any]:
    """Compare an ``adapter_config.json`` with the model; return its settings.

    An unknown setting raises unless it is off, because it may change how the same tensors are used.

    Args:
        weights: weights of a model with adapters.
        path: the file; if it is missing, the model's settings are assumed, with a warning.
        patterns: ``rank_pattern`` and ``alpha_pattern`` of this model.

    Raises:
        CheckpointError: a setting is unknown, not supported, or differs from the model's.
    """
    if not path.is_file():
        get_logger().warning(f"There is no {path}: that the adapter has the model's alpha is taken for granted.")
        return {}
    saved, ours = read_settings(path), weights.peft_settings
    if saved.get("peft_type", "LORA") != "LORA":
        raise CheckpointError(f"{path}: an adapter of type {saved['peft_type']} cannot be read, only LORA.")
    for key, value in saved.items():
        known = key in _ANY or key in _COMPARED
        if key in ("rank_pattern", "alpha_pattern"):
            known = not value or (isinstance(value, Mapping) and value.items() <= patterns.get(key, {}).items())
        elif key == "init_lora_weights":
            known = any(value is plain or value == plain for plain in _PLAIN_INITS) or init_from_base(saved) is not None
        elif key == "bias":
            known = value == "none"
        elif key == "trainable_token_indices":
            known = value == token_indices(weights) or (isinstance(value, list) and value == new_token_ids(weights))
        if not known and value:
            raise CheckpointError(
                f"{path}: {key} = {value!r} cannot be expressed: use an adapter without it, or merge it into its base "
                "with peft and start from the merged model."
            )
    for key, default in (("r", None), ("lora_alpha", None), ("use_dora", False), ("use_rslora", False)):
        if key in ours and saved.get(key, default) != ours[key]:
            raise CheckpointError(
                f"{path}: the adapter has {key} = {saved.get(key, default)}, the model in the config {ours[key]}: "
                "make them equal."
            )
    return saved


def token_indices(weights: ModelWeights) -> dict[str, list[int]] | None:
    """Return the ``trainable_token_indices`` of the model's adapter."""
    return {_module(weights, name).rpartition(".")[2]: ids for name, (_, ids) in weights.new_rows.items()} or None


def new_token_ids(weights: ModelWeights) -> list[int]:
    """Return the ids of the new tokens whose rows are trained; all weights have the same ones."""
    return next((ids for _, ids in weights.new_rows.values()), [])


def token_tensors(weights: ModelWeights) -> dict[str, str]:
    """Map the name of trained rows in an adapter file to the name of the parameter."""
    return {
        f"base_model.model.{_module(weights, name)}.token_adapter.trainable_tokens_delta": parameter
        for name, (parameter, _) in weights.new_rows.items()
    }


def _module(weights: ModelWeights, name: str) -> str:
    """Return the path in ``transformers`` of the module with the weight ``name``."""
    return weights.groups[name].external[0].removesuffix(".weight")


def init_from_base(settings: Mapping[str, Any]) -> str | None:
    """Return ``"pissa"`` or ``"olora"`` if peft subtracts the initial adapter from the base weights, else None."""
    init = settings.get("init_lora_weights")
    name = init.lower() if isinstance(init, str) and init.lower() == "olora" else init
    return name if name in _INITS_FROM_BASE else None


@torch.no_grad()
def take_from_base(weights: ModelWeights, settings: Mapping[str, Any], path: Path) -> None:
    """Subtract the initial adapter of PiSSA or OLoRA from the base weights: W becomes W - scale · B0 A0, as in peft.

    B0 and A0 are computed from W: the first ``r`` singular vectors for PiSSA, the QR decomposition for OLoRA.
    ``model.adapter_init`` records it, so that a resume does not repeat it and a save writes it.

    Args:
        weights: the model's loaded weights.
        settings: settings of the adapter.
        path: file of the settings.

    Raises:
        CheckpointError: another initial adapter was subtracted before, or a layer does not support it.
    """
    init, done = init_from_base(settings), getattr(weights.model, "adapter_init", None)
    if init == done:
        return
    if done is not None:
        raise CheckpointError(f"{path}: the base was changed for an adapter of the kind {done} already: start anew.")
    for name, module in startable(weights, init, path).items():
        weight = weights.full(name).float()
        weights.put(name, init_from_weight(weight, init, module.rank, module.scaling)[0], weight.device)
    weights.model.adapter_init = init


def wanted_start(model: nn.Module) -> str | None:
    """Return ``"pissa"`` or ``"olora"`` if the model's adapters are initialized from their base weights, else None."""
    layers = (module for module in model.modules() if isinstance(module, LoRALinear))
    return next((layer.start for layer in layers if layer.start is not None), None)


def startable(weights: ModelWeights, init: str, path: Path | str) -> dict[str, LoRALinear]:
    """Return weight name -> adapted layer, for layers with adapters that may be initialized from the weight.

    Args:
        weights: weights of a model with adapters.
        init: ``"pissa"`` or ``"olora"``.
        path: prefix of error messages.

    Raises:
        CheckpointError: the weight of a layer is stacked, or fused with others in checkpoints.
    """
    adapted, groups = dict(adapter_modules(weights.model)), weights.adapter_groups
    others = [
        f"{path}.{module.adapter_params()[0]}"
        for path, module in adapted.items()
        if not isinstance(module, LoRALinear) or isinstance(groups[f"{path}.lora_a.weight"].op, FusedAdapter)
    ]
    if others:
        raise CheckpointError(
            f"{path}: init_lora_weights = '{init}' cannot be expressed for '{others[0]}', whose base weight has other "
            "parts here: merge the adapter into its base with peft and start from the merged model."
        )
    return {f"{name}.weight": module for name, module in adapted.items()}


# JSON file with the base model's name and the conversion of each file of :attr:`ModelWeights.owned_files`.
OWNED_INDEX = "adapter_conversions.json"
# Folder of the adapter in a checkpoint of merged weights.
ADAPTER_DIR = "adapter"
ADAPTER_FILE = "adapter_model.safetensors"
ADAPTER_CONFIG_FILE = "adapter_config.json"
# In order of preference. Older checkpoints hold the adapter twice: as .pt, with this library's names, and as
# .safetensors, in which the rows of Qwen models are in the wrong order.
_OLDER_FILE = "adapter_model.pt"
_FILES = (_OLDER_FILE, ADAPTER_FILE, "adapter_model.bin")
# Names in transformers of the stacked weights of gated experts. If checkpoints hold one tensor per expert, adapter
# files do too, and peft stacks them.
_EXPERTS = ("experts.gate_up_proj", "experts.down_proj")
# Suffixes of this library's adapter names for linear layers; other adapters belong to experts.
_OF_LINEAR = (".weight", ".magnitude")
_LORA_A = ".lora_a.weight"
_LAYER = re.compile(r".*\.layers\.\d+\.")  # prefix of a path within a layer


def find_adapter(path: Path, weights: ModelWeights) -> Path:
    """Return an adapter file: ``path`` itself, or the preferred adapter file in the folder ``path``.

    Raises:
        CheckpointError: there is no adapter.
    """
    if not path.is_dir():
        must_exist(path)
        return path
    if not (found := _files_in(path, weights)):
        names = ", ".join((*_FILES, *weights.owned_files))
        raise CheckpointError(f"{path} holds no adapter ({names}): name the folder that does.")
    return found[0]


def _files_in(folder: Path, weights: ModelWeights) -> list[Path]:
    paths = [folder / name for name in (*_FILES, *weights.owned_files, OWNED_INDEX)]
    return [path for path in paths if path.is_file()]


def adapter_beside_base(folder: Path, weights: ModelWeights) -> Path | None:
    """Return the adapter file in a folder of base weights, as ``peft`` does; None if there is none.

    Args:
        folder: folder of base weights.
        weights: the model's weights. If the model has no adapter, an adapter file is ignored with a warning.

    Raises:
        CheckpointError: an older release wrote the folder, so the adapter may be merged into the weights.
    """
    if not (found := _files_in(folder, weights)):
        return None
    if not weights.owned:
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


def load_adapter(weights: ModelWeights, file: Path, device: torch.device, dtype: torch.dtype | None = None) -> None:
    """Fill the adapter parameters of a model.

    Args:
        weights: the model's weights, with base weights filled.
        file: adapter file with this library's names or PEFT's (for the text model or for a composite model that
            contains it). For one of :attr:`ModelWeights.owned_files`, all of them are read from its folder.
        device: device for parameters on the meta device.
        dtype: dtype for parameters on the meta device; unchanged by default.

    Raises:
        CheckpointError: the adapter has other target modules, another rank or another alpha.
    """
    wanted = weights.owned - _load_owned(weights, file.parent, device, dtype)
    if not weights.owned:
        raise CheckpointError(f"{file}: the model has no adapter to put it into: use a lora_* builder or a converter.")
    if file.name in (*weights.owned_files, OWNED_INDEX):
        if not wanted:
            return
        file = file.with_name(ADAPTER_FILE)
    patterns = _patterns(weights.adapter_groups.values(), weights.peft_settings)
    settings = check_settings(weights, file.with_name(ADAPTER_CONFIG_FILE), patterns)
    found = set()
    for name, tensor in _our_names(weights, open_source([file]), file):
        if name not in wanted:
            raise CheckpointError(
                f"{file}: it holds '{name}', which the model in the config does not adapt: adapt the layers that its "
                f"{ADAPTER_CONFIG_FILE} lists."
            )
        weights.load(name, tensor, file, device, dtype)
        found.add(name)
    if missing := sorted(wanted - found):
        raise CheckpointError(
            f"{file} lacks '{missing[0]}'{f' and {len(missing) - 1} more' if missing[1:] else ''}, which the model in "
            f"the config adapts: adapt the layers that its {ADAPTER_CONFIG_FILE} lists."
        )
    take_from_base(weights, settings, file.with_name(ADAPTER_CONFIG_FILE))


def add_new_tokens(model: nn.Module, file: Path) -> None:
    """Enlarge the vocabulary of a model for an adapter that was trained together with the rows of new tokens.

    Args:
        model: model with loaded base weights. Unchanged if it has the rows already, or if the adapter trains none.
        file: file of the adapter.

    Raises:
        CheckpointError: the rows are not the next ones of the model's vocabulary, or the model cannot train rows
            separately.
    """
    settings = file.with_name(ADAPTER_CONFIG_FILE)
    trained = read_settings(settings).get("trainable_token_indices") if settings.is_file() else None
    if not trained or ModelWeights(model).new_rows:
        return
    ids = next(iter(trained.values())) if isinstance(trained, dict) else trained
    source = open_source([file])
    tensors = [name for name in source.names() if name.endswith(".trainable_tokens_delta")]
    if not isinstance(ids, list) or not all(type(token_id) is int for token_id in ids) or not tensors:
        return  # load_adapter raises
    decoder = text_decoder(model)
    rows, needed = decoder.tok_embeddings.weight.shape[0], max(ids) + 1
    first = needed - len(ids)
    if ids != list(range(first, needed)) or source.shape(tensors[0])[0] != len(ids) or needed < rows or first > rows:
        raise CheckpointError(
            f"{settings}: trainable_token_indices are the {len(ids)} rows from {min(ids)} to {max(ids)}, which do not "
            f"continue the vocabulary of the base with its {rows} rows: use the base that the adapter was trained on, "
            "or merge the adapter into its base with peft and start from the merged model."
        )
    try:
        NewTokens.grow(decoder, needed, len(ids))
    except ConversionError as error:
        raise CheckpointError(f"{settings} has {len(ids)} new tokens, which this model cannot get; {error}") from error


def _load_owned(
    weights: ModelWeights, folder: Path, device: torch.device, dtype: torch.dtype | None = None
) -> set[str]:
    """Fill the parameters of :attr:`ModelWeights.owned_files` from a folder; return their names.

    Args:
        weights: weights of a model with conversions.
        folder: folder of the files.
        device: device for parameters on the meta device.
        dtype: dtype for parameters on the meta device; unchanged by default.

    Raises:
        CheckpointError: a file is missing, holds other parameters, or belongs to a conversion that the model lacks.
    """
    files, loaded = weights.owned_files, set()
    index = read_json(folder / OWNED_INDEX) if (folder / OWNED_INDEX).is_file() else {}
    saved = index.get("conversions", {})
    if not isinstance(saved, dict):
        raise CheckpointError(f"{folder / OWNED_INDEX}: 'conversions' is no object: save the checkpoint again.")
    if unused := sorted(saved.keys() - files.keys()):
        raise CheckpointError(
            f"{folder / unused[0]} holds parameters of the conversion {saved[unused[0]]}, which the model does not "
            "have: add it to model_converters, or give it to torchtune.load as adapter."
        )
    for file, names in files.items():
        path = folder / file
        if not path.is_file():
            raise CheckpointError(
                f"{folder} lacks {file}, the parameters of a conversion of this model: give a folder that was saved "
                "with it, or leave the conversion out."
            )
        source = open_source([path])
        if other := sorted(set(source.names()).symmetric_difference(names)):
            how = "lacks" if other[0] in names else "holds"
            raise CheckpointError(
                f"{path} {how} '{other[0]}', unlike the model: make the conversion's settings those that it was saved "
                "with."
            )
        for name in names:
            weights.load(name, source.read(name), path, device, dtype)
        loaded.update(names)
    return loaded


def _our_names(weights: ModelWeights, source: Source, file: Path) -> list[tuple[str, torch.Tensor]]:
    """Return the tensors with this library's names and row order."""
    tensors = [(name, source.read(name)) for name in source.names()]
    spec, description = weights.identity
    if not any(name.startswith(PEFT_PREFIX) for name, _ in tensors):
        earlier = spec.weight_maps.get("earlier", WeightMap(())).groups(description)
        modules = {group.external[0].removesuffix("weight"): group.tune[0].removesuffix("weight") for group in earlier}
        return [(rename_prefix(name, modules), tensor) for name, tensor in tensors]
    prefixes = _prefixes_of_text(spec, [name for name, _ in tensors])
    tensors = [(rename_prefix(name, prefixes), tensor) for name, tensor in tensors]
    weight_map = _map_of(spec, [name for name, _ in tensors])
    rows = token_tensors(weights)
    tokens = [(rows[name], tensor) for name, tensor in tensors if name in rows]
    groups = {name: group for group in weight_map.groups(description) for name in group.external}
    try:
        kept = {
            name: value for name, value in tensors if name not in rows and not _is_of_base(weights, name, value, file)
        }
        for name, tensor in _spread(weights, kept, groups).items():
            if name in groups:
                _check_rank(weights, groups[name], name, tensor, file)
        return [*tokens, *weight_map.to_tune(kept.items(), description, partial=True)]
    except (WeightMapError, ModelError) as error:
        raise CheckpointError(f"{file}: {str(error).rstrip('.')}: it is an adapter of another model.") from error


def _map_of(spec: ModelSpec, names: Collection[str]) -> WeightMap:
    """Return the weight map for an adapter's names; experts have one tensor each, or one tensor for all."""
    is_fused = any(".experts.lora_" in name for name in names) and "hf_fused" in spec.weight_maps
    return spec.weight_map("hf_fused" if is_fused else "hf").peft()


def _prefixes_of_text(spec: ModelSpec, names: Collection[str]) -> dict[str, str]:
    """Map adapter prefixes of a composite model to prefixes of its text decoder; empty if the model is composite."""
    if spec.builder is not None:
        return {}
    composite = text_prefixes(name.removeprefix(PEFT_PREFIX) for name in names)
    return {PEFT_PREFIX + theirs: PEFT_PREFIX + ours for ours, theirs in composite.items()}


def _spread(
    weights: ModelWeights, tensors: dict[str, torch.Tensor], groups: Mapping[str, Group]
) -> dict[str, torch.Tensor]:
    """Split adapters of fused projections, if they have the model's rank, into one adapter per projection."""
    for name in list(tensors):
        group = groups.get(name)
        if group is None or name != group.external[0] or not isinstance(group.op, FusedAdapter | ExpertAdapter):
            continue
        parts, both = len(group.tune) // 2, [tensors[name] for name in group.external if name in tensors]
        if parts > 1 and len(both) == 2 and all(name in weights.parameters for name in group.tune):
            first, second = group.to_external([weights.specs[name] for name in group.tune])
            if (both[0].shape[0] * parts, both[1].shape[1] * parts) == (first.shape[0], second.shape[1]):
                tensors |= zip(group.external, group.op.spread(both, group.description), strict=True)
    return tensors


def _is_of_base(weights: ModelWeights, name: str, tensor: torch.Tensor, file: Path) -> bool:
    """Return whether a tensor of an adapter file is a base weight: ``peft`` saves that of an adapted output layer.

    Raises:
        CheckpointError: it is a base weight that differs from the model's.
    """
    spec, description = weights.identity
    external, weight_map = name.removeprefix(PEFT_PREFIX).replace(".base_layer.", "."), spec.weight_map("hf")
    if not any(external in group.external for group in weights.groups.values()):
        return external in {tie.external for tie in weight_map.tied}
    for ours, value in weight_map.to_tune([(external, tensor)], description, partial=True):
        if value.shape != weights.specs[ours].shape or not weights.equals(ours, value):
            raise CheckpointError(
                f"{file}: it brings '{name}', which differs from the model's: it was trained together with a changed "
                "base, so merge it into that base with peft and start from the merged model."
            )
    return True


def _check_rank(weights: ModelWeights, group: Group, name: str, tensor: torch.Tensor, file: Path) -> None:
    """Raise on a shape that does not fit, before rows are reordered."""
    if not all(ours in weights.parameters for ours in group.tune):
        return  # the caller raises with the list of layers without adapters
    wanted = group.to_external([weights.specs[ours] for ours in group.tune])[group.external.index(name)].shape
    if tensor.shape != wanted:
        raise CheckpointError(
            f"{file}: the tensor '{name}' has the shape {list(tensor.shape)} where the model needs {list(wanted)}: the "
            "adapter is of another rank or of another model."
        )


def adapter_entries(
    view: SaveView, base_name: str, whole: TextTower | None = None
) -> tuple[list[Entry], dict[str, Any]]:
    """Return the adapter in PEFT's layout: its tensors, and the contents of ``adapter_config.json``.

    Args:
        view: view of a model that has a conversion with a ``peft_config``.
        base_name: ``base_model_name_or_path``: the repository or folder of the base weights.
        whole: multimodal checkpoint, if the model is its text decoder; the adapter then has peft's names for the
            modules of the composite model.

    Raises:
        CheckpointError: there is no adapter, or a layer has no name in Hugging Face's format.
    """
    if not view.owned:
        raise CheckpointError("The model has no adapter to save: use a lora_* builder or a converter.")
    spec, description = view.identity
    prefixes = {} if whole is None else spec.module_prefixes or module_prefixes(whole.prefixes)
    weight_map, groups = spec.weight_map("hf"), view.adapter_groups
    if prefixes or spec.builder is not None:  # peft looks for one tensor per expert in text models only
        weight_map = spec.weight_maps.get("hf_fused", weight_map)
        weight_map = weight_map.prefixed(prefixes) if prefixes else weight_map
        groups = {ours: group for group in weight_map.peft().groups(description) for ours in group.tune}
    rows = {
        ours: PEFT_PREFIX + rename_prefix(theirs.removeprefix(PEFT_PREFIX), prefixes)
        for theirs, ours in token_tensors(view).items()
    }
    ours = view.owned - rows.keys() - {name for names in view.owned_files.values() for name in names}
    adapters = [name for name in view.parameters if name in ours]
    if unknown := [name for name in adapters if name not in groups]:
        raise CheckpointError(
            f"The adapter cannot be saved for peft: the parameter '{unknown[0]}' has no name in its format."
        )
    chosen = dict.fromkeys(groups[name] for name in adapters)
    entries = [view.entry(group, turn) for turn, group in enumerate(chosen)]
    entries += [view.entry_of(name, rows[name], turn) for turn, name in enumerate(rows)]
    settings = view.peft_settings | {"trainable_token_indices": token_indices(view)}
    settings |= {"init_lora_weights": getattr(view.model, "adapter_init", None) or True}
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
    """Return the fields of ``adapter_config.json`` for target modules and parameters, their ranks and alphas.

    Args:
        groups: groups of the adapter's parameters.
        weight_map: the model's weight map for Hugging Face's format.
        description: description of the model.
        settings: rank and alpha of one adapter.
        in_full: use full module paths: in a composite model, shorter names would also select modules of other towers.
    """
    adapted = {
        name: name.removeprefix(PEFT_PREFIX).rpartition(".lora_")[0] for group in groups for name in group.external
    }
    modules = {adapted[name] for group in groups if not isinstance(group.op, ExpertAdapter) for name in group.external}
    linears = {
        adapted[group.external[0]]
        for group in groups
        if group.tune[0].endswith(_LORA_A)
        and weight_map.named_like_experts(group.tune[0].removesuffix(_LORA_A), description)
    }
    modules, linears = (
        sorted(names) if in_full else _shortest(names, weight_map, description)
        for names in (modules - linears, linears)
    )
    parameters = [f"{name}.weight" for name in linears]
    if not all(group.tune[0].endswith(_OF_LINEAR) for group in groups):
        parameters += _EXPERTS if description.mlp_gated else (_EXPERTS[0].replace("gate_", ""), _EXPERTS[1])
    found = {"target_modules": modules} | _patterns(groups, settings)
    return found | ({"target_parameters": parameters} if parameters else {})


def _patterns(groups: Iterable[Group], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return rank and alpha of the adapters of fused projections: the sums over their projections."""
    counts = {}
    for group in groups:
        if not group.tune[0].endswith(_OF_LINEAR) and (parts := getattr(group.op, "parts", 2)) > 1:
            counts[_EXPERTS[0]] = parts
        if isinstance(group.op, FusedAdapter):
            counts[group.external[0].rpartition(".lora_")[0].rpartition(".")[2]] = len(group.op.sizes)
    if not counts:
        return {}
    power = 0.5 if settings.get("use_rslora") else 1  # keeps peft's scale equal to that of the separate projections
    return {
        "rank_pattern": {name: count * settings["r"] for name, count in counts.items()},
        "alpha_pattern": {name: count**power * settings["lora_alpha"] for name, count in counts.items()},
    }


def adapter_settings(base_name: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Return the contents of ``adapter_config.json``."""
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
    """Return the shortest unambiguous name per module: last component (``q_proj``), path in a layer, or full name."""
    if not names:
        return []
    modules = {
        name.removesuffix(".weight")
        for group in weight_map.prefixed(dict(weight_map.modules)).groups(description)
        for name in group.external
        if name.endswith(".weight")
    }
    parts = [name.split(".") for name in modules]
    parents = {".".join(part[:end]) for part in parts for end in range(1, len(part))}  # peft looks at all modules
    ends = {name: (name.rpartition(".")[2], _LAYER.sub("", name)) for name in modules.union(parents, names)}
    others = [name.split(".") for name in ends.keys() - names]
    others = {".".join(part[start:]) for part in others for start in range(len(part))}
    return sorted({next(end for end in (*ends[name], name) if end not in others) for name in names})


def adapter_folder(folder: Path) -> Path:
    """Return the folder of the adapter: ``folder``, or ``adapter`` in a checkpoint of merged weights.

    Raises:
        CheckpointError: neither contains an adapter in PEFT's layout.
    """
    for candidate in (folder, folder / ADAPTER_DIR):
        if (candidate / ADAPTER_FILE).is_file() and (candidate / ADAPTER_CONFIG_FILE).is_file():
            return candidate
        if (candidate / OWNED_INDEX).is_file():
            return candidate
    raise CheckpointError(
        f"{folder}: there is no {ADAPTER_FILE} with an {ADAPTER_CONFIG_FILE}: give an adapter's folder."
    )


def changes_base(folder: Path) -> bool:
    """Return whether loading the adapter of a PEFT folder changes the base weights, as PiSSA and OLoRA do."""
    return init_from_base(read_settings(folder / ADAPTER_CONFIG_FILE)) is not None


def adapter_conversion(model: nn.Module, folder: Path) -> LoRA:
    """Return the conversion that adds the adapter layers of a PEFT folder to ``model``.

    Args:
        model: model without adapters, on the meta device or materialized.
        folder: folder with ``adapter_config.json`` and ``adapter_model.safetensors``.

    Raises:
        CheckpointError: a file is missing, or the adapter belongs to another model.
    """
    file, settings = folder / ADAPTER_FILE, read_settings(folder / ADAPTER_CONFIG_FILE)
    names = [name for name in open_source([file]).names() if ".lora_A." in name]
    spec, description = identity(model)
    prefixes = _prefixes_of_text(spec, names)
    names = [rename_prefix(name, prefixes) for name in names]
    found = {name: group for group in _map_of(spec, names).groups(description) for name in group.external}
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

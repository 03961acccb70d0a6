"""``adapter_config.json``: the settings of an adapter, read, compared with a model, and written as ``peft`` does."""

import math
import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from torchtune.checkpoints._model_weights import ModelWeights
from torchtune.checkpoints._weight_files import CheckpointError, read_json
from torchtune.models import PEFT_PREFIX, Description, ExpertAdapter, FusedAdapter, Group, WeightMap
from torchtune.utils import get_logger

ADAPTER_CONFIG_FILE = "adapter_config.json"
# Settings of adapter_config.json that are compared with the model, or handled elsewhere.
_COMPARED = (
    "peft_type r lora_alpha use_dora use_rslora rank_pattern alpha_pattern init_lora_weights bias "
    "trainable_token_indices"
).split()
# Settings that may have any value: origin and training of the adapter, options of other settings, and target modules,
# which follow from the tensors.
_ANY_VALUE = (
    "auto_mapping base_model_name_or_path revision peft_version task_type inference_mode lora_dropout loftq_config "
    "eva_config corda_config lora_ga_config megatron_core qalora_group_size target_modules target_parameters "
    "exclude_modules layers_to_transform layers_pattern ensure_weight_tying"
).split()
# Rank and alpha of peft for a file without them.
_PEFT_RANK = 8
PEFT_ALPHA = 8
# Maximum of alpha and rank; NaN fails the comparison with it, too.
_LARGEST = 1e30
# Values of init_lora_weights that leave the base weights unchanged.
_PLAIN_INITS = (True, False, None, "gaussian", "eva", "orthogonal")

# Names in transformers of the stacked weights of gated experts. If checkpoints hold one tensor per expert, adapter
# files do too, and peft stacks them.
_EXPERTS = ("experts.gate_up_proj", "experts.down_proj")
# Suffixes of this library's adapter names for linear layers; other adapters belong to experts.
_LINEAR_SUFFIXES = (".weight", ".magnitude")
LORA_A = ".lora_a.weight"
_LAYER_PREFIX = re.compile(r".*\.layers\.\d+\.")  # prefix of a path within a layer


def read_settings(path: Path) -> dict[str, Any]:
    """Read the settings in an ``adapter_config.json``.

    Raises:
        CheckpointError: it is not a JSON object, or rank, alpha or a flag has the wrong type.
    """
    settings = read_json(path)
    # The defaults are any valid values: what a missing setting means is up to the caller.
    rank = settings.get("r", 1)
    if type(rank) is not int or not 1 <= rank < _LARGEST:
        raise CheckpointError(f"{path}: r is {rank!r}, where a whole number from 1 is expected: correct it.")
    alpha = settings.get("lora_alpha", 0)
    if type(alpha) not in (int, float) or not abs(alpha) < _LARGEST:
        raise CheckpointError(f"{path}: lora_alpha is {alpha!r}, where a number is expected: correct it.")
    for key in ("use_dora", "use_rslora"):
        flag = settings.get(key, False)
        if not isinstance(flag, bool):
            raise CheckpointError(f"{path}: {key} is {flag!r}, where true or false is expected: correct it.")
    for key in ("rank_pattern", "alpha_pattern"):
        value = settings.get(key)
        if value and not _is_number_by_pattern(value):  # peft writes {} without patterns
            raise CheckpointError(
                f"{path}: {key} is {value!r}, where numbers by patterns of module names are expected: correct it."
            )
    return settings


def _is_number_by_pattern(value: Any) -> bool:
    """Return whether a setting maps regular expressions to positive numbers."""
    if not isinstance(value, dict):
        return False
    for pattern, number in value.items():
        try:
            re.compile(pattern)
        except re.error:
            return False
        if type(number) not in (int, float) or not 0 < number < _LARGEST:
            return False
    return True


def check_settings(weights: ModelWeights, path: Path) -> dict[str, Any]:
    """Compare an ``adapter_config.json`` with the model; return its settings.

    An unknown setting raises unless it is off, because it may change how the same tensors are used.

    Args:
        weights: weights of a model with adapters.
        path: the file; if it is missing, the model's settings are assumed, with a warning.

    Raises:
        CheckpointError: a setting is unknown, not supported, or differs from the model's.
    """
    if not path.is_file():
        get_logger().warning(f"There is no {path}: the adapter is assumed to have the model's alpha.")
        return {}
    settings = read_settings(path)
    if settings.get("peft_type", "LORA") != "LORA":
        raise CheckpointError(f"{path}: an adapter of type {settings['peft_type']} cannot be read, only LORA.")
    for key, value in settings.items():
        if value and not _is_supported(key, value, settings, weights):
            raise CheckpointError(
                f"{path}: {key} = {value!r} cannot be expressed: use an adapter without it, or merge it into its base "
                "with peft and start from the merged model."
            )
    model_settings = weights.peft_settings
    # Both change the result of the same tensors, so that a difference would not show in a shape.
    for key in ("use_dora", "use_rslora"):
        if key in model_settings and bool(settings.get(key)) != model_settings[key]:
            raise CheckpointError(
                f"{path}: the adapter has {key} = {settings.get(key, False)}, the model in the run's config "
                f"{model_settings[key]}: make them equal."
            )
    if "r" in model_settings:  # a model that trains only new rows has no rank
        _check_ranks_and_alphas(weights, settings, path)
    return settings


def _check_ranks_and_alphas(weights: ModelWeights, settings: Mapping[str, Any], path: Path) -> None:
    """Raise ``CheckpointError`` if rank or alpha of an adapter, by the patterns of the file, is not the model's."""
    names = [name for name in weights.parameters if name in weights.owned and name in weights.adapter_groups]
    for group in dict.fromkeys(weights.adapter_groups[name] for name in names):
        if group.tune[0].endswith((".lora_b.weight", ".magnitude")):
            continue  # of the same layer as a lora_a
        rank, alpha = rank_and_alpha_in_file(group, settings)
        model_rank, model_alpha = _rank_and_alpha_of_model(group, weights.peft_settings)
        for key, value, expected in (("r", rank, model_rank), ("lora_alpha", alpha, model_alpha)):
            if not math.isclose(value, expected):
                raise CheckpointError(
                    f"{path}: the adapter has {key} = {value:g} for {_projection(group)[0]}, the model in the run's "
                    f"config {expected:g}: make them equal."
                )


def _rank_and_alpha_of_model(group: Group, settings: Mapping[str, Any]) -> tuple[int, float]:
    """Return rank and alpha of each of our adapters in a group, from the ``peft_config`` of the model."""
    path = group.tune[0].partition(".lora_")[0]
    rank = settings.get("rank_pattern", {}).get(path, settings["r"])
    alpha = settings.get("alpha_pattern", {}).get(path, settings["lora_alpha"])
    return rank, alpha


def rank_and_alpha_in_file(group: Group, settings: Mapping[str, Any]) -> tuple[float, float]:
    """Return rank and alpha of each of our adapters in a group, from the settings of a file, as ``peft`` reads them."""
    path, count = _projection(group)
    rank = _by_pattern(settings.get("rank_pattern"), path)
    alpha = _by_pattern(settings.get("alpha_pattern"), path)
    if alpha is None:
        alpha = settings.get("lora_alpha", PEFT_ALPHA)
    if rank is None:
        return settings.get("r", _PEFT_RANK), alpha
    return rank / count, alpha / count ** _scaling_power(settings)


def _by_pattern(patterns: Mapping[str, float] | None, path: str) -> float | None:
    """Return the value of the first pattern that matches ``path`` or its end, as ``peft`` does; None without one."""
    for pattern, value in (patterns or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", path):
            return value
    return None


def _projection(group: Group) -> tuple[str, int]:
    """Return the path in ``transformers`` of a module, or parameter of experts, with an adapter in files.

    And the number of our projections in it, each with an adapter.
    """
    path = group.external[0].removeprefix(PEFT_PREFIX).partition(".lora_")[0]
    if isinstance(group.op, FusedAdapter):
        return path, len(group.op.sizes)
    if group.tune[0].endswith(_LINEAR_SUFFIXES):
        return path, 1
    gate_up, down = _EXPERTS
    layer = path.partition(".experts")[0]
    if isinstance(group.op, ExpertAdapter):
        count = group.op.parts
    elif "lora_down" in group.tune[0]:
        count = 1
    else:  # a tensor for each expert; peft stacks their gate and up projections
        count = 2
    projection = gate_up if count > 1 else down
    return f"{layer}.{projection}", count


def _scaling_power(settings: Mapping[str, Any]) -> float:
    """Return the power of the number of projections by which alpha grows with the rank, for the same scale."""
    return 0.5 if settings.get("use_rslora") else 1


def _is_supported(key: str, value: Any, settings: Mapping[str, Any], weights: ModelWeights) -> bool:
    """Return whether a setting of an ``adapter_config.json`` can be expressed; ``value`` is not off."""
    if key == "modules_to_save":
        return isinstance(value, list) and all(isinstance(name, str) for name in value)
    if key == "init_lora_weights":
        return value in _PLAIN_INITS or init_from_base(settings) is not None
    if key == "bias":
        return value == "none"
    if key == "trainable_token_indices":
        # peft takes ids by module, or a list for the embedding; all weights with new rows have the same ids.
        if isinstance(value, list):
            return any(value == ids for _, ids in weights.new_rows.values())
        return value == token_indices(weights)
    return key in _ANY_VALUE or key in _COMPARED


def token_indices(weights: ModelWeights) -> dict[str, list[int]] | None:
    """Return the ``trainable_token_indices`` of the model's adapter."""
    indices = {}
    for name, (_, ids) in weights.new_rows.items():
        indices[module_of(weights, name).rpartition(".")[2]] = ids
    return indices or None


def module_of(weights: ModelWeights, name: str) -> str:
    """Return the path in ``transformers`` of the module with the weight ``name``."""
    spec, description = weights.spec_and_description
    return spec.weight_map("hf").external_module(name.removesuffix(".weight"), description)


def init_from_base(settings: Mapping[str, Any]) -> str | None:
    """Return ``"pissa"`` or ``"olora"`` if peft subtracts the initial adapter from the base weights, else None."""
    init = settings.get("init_lora_weights")
    if init == "pissa":
        return "pissa"
    if isinstance(init, str) and init.lower() == "olora":  # as peft, which takes OLoRA in any case
        return "olora"
    return None


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
    modules: set[str] = set()
    expert_like: set[str] = set()  # linear layers that peft takes for experts, by their names
    for group in groups:
        # base_model.model.X.lora_A.weight -> X
        group_modules = [name.removeprefix(PEFT_PREFIX).rpartition(".lora_")[0] for name in group.external]
        if not isinstance(group.op, ExpertAdapter):  # stacked experts are parameters: see target_parameters below
            modules.update(group_modules)
        tune_module = group.tune[0].removesuffix(LORA_A)
        is_lora_a = tune_module != group.tune[0]  # one per layer; groups of B and of magnitudes repeat the module
        if is_lora_a and weight_map.named_like_experts(tune_module, description):
            expert_like.add(group_modules[0])
    # As target modules, peft would look for stacked experts of these names: their weights are target parameters.
    modules -= expert_like
    if in_full:
        target_modules = sorted(modules)
        linear_names = sorted(expert_like)
    else:
        target_modules = _shortest_names(modules, weight_map, description)
        linear_names = _shortest_names(expert_like, weight_map, description)
    parameters = [f"{name}.weight" for name in linear_names]
    has_experts = not all(group.tune[0].endswith(_LINEAR_SUFFIXES) for group in groups)
    if has_experts:
        gate_up, down = _EXPERTS
        if not description.mlp_gated:  # experts.up_proj
            gate_up = gate_up.replace("gate_", "")
        parameters += [gate_up, down]
    fields = {"target_modules": target_modules, **_rank_patterns(groups, settings)}
    if parameters:
        fields["target_parameters"] = parameters
    return fields


def _rank_patterns(groups: Iterable[Group], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``rank_pattern`` and ``alpha_pattern`` of modules with another rank or alpha than the default.

    These are layers with numbers of their own, and fused projections, which have the sums over their projections.
    """
    default = settings.get("r"), settings.get("lora_alpha")
    has_patterns = bool(settings.get("rank_pattern") or settings.get("alpha_pattern"))
    layers_by_name: dict[str, dict[str, tuple[int, float]]] = {}  # last component of paths -> path -> rank and alpha
    for group in groups:
        if group.tune[0].endswith((".lora_b.weight", ".magnitude")):
            continue  # of the same layer as a lora_a
        path, count = _projection(group)
        rank, alpha = default
        if has_patterns:
            rank, alpha = _rank_and_alpha_of_model(group, settings)
        if count > 1:
            # The scale of the fused adapter, alpha / rank (or its root), is that of each projection.
            rank = count * rank
            alpha = count ** _scaling_power(settings) * alpha
        name = path.rpartition(".")[2]
        if path.endswith(_EXPERTS):  # the names of these parameters have two components
            name = path[path.index("experts.") :]
        layers_by_name.setdefault(name, {})[path] = rank, alpha
    ranks: dict[str, int] = {}
    alphas: dict[str, float] = {}
    for name, layers in layers_by_name.items():
        if len(set(layers.values())) == 1:
            # All layers of this name are alike: one pattern selects them.
            layers = {name: next(iter(layers.values()))}
        for pattern, (rank, alpha) in layers.items():
            if (rank, alpha) != default:
                ranks[pattern] = rank
                alphas[pattern] = alpha
    if not ranks:
        return {}
    return {"rank_pattern": ranks, "alpha_pattern": alphas}


def _shortest_names(names: Collection[str], weight_map: WeightMap, description: Description) -> list[str]:
    """Return the shortest unambiguous name per module: last component (``q_proj``), path in a layer, or full name."""
    if not names:
        return []
    modules = _all_modules(weight_map, description, names)
    ambiguous = set()  # ends of the paths of modules that are not adapted
    for name in modules.difference(names):
        components = name.split(".")
        for start in range(len(components)):
            ambiguous.add(".".join(components[start:]))
    shortest = set()
    for name in names:
        candidates = (name.rpartition(".")[2], _LAYER_PREFIX.sub("", name), name)
        shortest.add(next(candidate for candidate in candidates if candidate not in ambiguous))
    return sorted(shortest)


def modules_to_save(
    external_names: Iterable[str], weight_map: WeightMap, description: Description, *, in_full: bool
) -> list[str]:
    """Return the field of that name: the modules of weights, by the ends of their paths that no other module has."""
    modules = sorted({name.rpartition(".")[0] for name in external_names})
    if in_full:
        return modules
    unsaved = _all_modules(weight_map, description).difference(modules)
    names = set()
    for module in modules:
        leaf = module.rpartition(".")[2]
        # peft compares the ends of paths, also within a component: `norm` would be any norm.
        is_ambiguous = any(path.endswith(leaf) for path in unsaved)
        names.add(module if is_ambiguous else leaf)
    return sorted(names)


def _all_modules(weight_map: WeightMap, description: Description, names: Iterable[str] = ()) -> set[str]:
    """Return the paths in ``transformers`` of all modules with weights, of ``names``, and of their parents."""
    modules = set(names)
    for group in weight_map.prefixed(dict(weight_map.modules)).groups(description):
        for external in group.external:
            if external.endswith(".weight"):
                modules.add(external.removesuffix(".weight"))
    # peft looks at all modules, with or without weights.
    for name in list(modules):
        parent = name.rpartition(".")[0]
        while parent and parent not in modules:
            modules.add(parent)
            parent = parent.rpartition(".")[0]
    return modules

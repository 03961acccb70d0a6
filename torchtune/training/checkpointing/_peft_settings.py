"""``adapter_config.json``: which settings are supported, and those that change the base weights on load."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from torchtune.models import FusedAdapter
from torchtune.modules.conversion import complete_conversions
from torchtune.modules.peft import LoRALinear
from torchtune.modules.peft._functional import start_from_weight
from torchtune.modules.peft._utils import adapter_modules
from torchtune.training.checkpointing._errors import CheckpointError
from torchtune.training.checkpointing._full_weights import FullWeights
from torchtune.training.checkpointing._load import identity, read_json
from torchtune.utils import get_logger

# Settings that are compared with the model, or handled elsewhere.
_COMPARED = (
    *(
        "peft_type",
        "r",
        "lora_alpha",
        "use_dora",
        "use_rslora",
        "rank_pattern",
        "alpha_pattern",
        "init_lora_weights",
        "bias",
    ),
    "trainable_token_indices",
)
# Alpha and rank beyond this are no numbers of an adapter; NaN is not below it either.
_LARGEST = 1e30
# Settings that may have any value: origin and training of the adapter, options of other settings, and its target
# modules, which the tensors tell.
_ANY = (
    *("auto_mapping", "base_model_name_or_path", "revision", "peft_version", "task_type", "inference_mode"),
    *("lora_dropout", "loftq_config", "eva_config", "corda_config", "lora_ga_config"),
    *("megatron_core", "qalora_group_size"),
    *(
        "target_modules",
        "target_parameters",
        "exclude_modules",
        "layers_to_transform",
        "layers_pattern",
        "ensure_weight_tying",
    ),
)
# Values of init_lora_weights that leave the base weights as they are, and those with which peft subtracts the initial
# adapter from them.
_PLAIN_INITS = (True, False, None, "gaussian", "eva", "orthogonal")
_INITS_FROM_BASE = ("pissa", "olora")


def read_settings(path: Path) -> dict[str, Any]:
    """The settings in an ``adapter_config.json``.

    Raises:
        CheckpointError: it is no JSON object, or rank, alpha or a flag is of the wrong type.
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


def check_settings(model: nn.Module, path: Path, patterns: Mapping[str, Any]) -> dict[str, Any]:
    """Compare an ``adapter_config.json`` with the model; return its settings.

    Unknown settings raise unless they are switched off, since they may change what the same tensors compute.

    Args:
        model: with adapters.
        path: the file; if it is missing, the model's settings are assumed, with a warning.
        patterns: ``rank_pattern`` and ``alpha_pattern`` of this model.

    Raises:
        CheckpointError: a setting is unknown, not supported, or differs from the model's.
    """
    if not path.is_file():
        get_logger().warning(f"There is no {path}: that the adapter has the model's alpha is taken for granted.")
        return {}
    saved, ours = read_settings(path), peft_settings(model)
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
            known = value == token_indices(model)
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


def peft_settings(model: nn.Module) -> dict[str, Any]:
    """``peft_config`` of all conversions of ``model``."""
    settings: dict[str, Any] = {}
    for conversion in complete_conversions(model):
        settings |= conversion.peft_config(model)
    return settings


def trained_rows(model: nn.Module) -> dict[str, tuple[str, list[int]]]:
    """Name of a weight -> name of the parameter with its trained rows, and their token ids."""
    found: dict[str, tuple[str, list[int]]] = {}
    for conversion in complete_conversions(model):
        found |= conversion.new_rows(model)
    return found


def token_indices(model: nn.Module) -> dict[str, list[int]] | None:
    """``trainable_token_indices`` of the model's adapter."""
    rows = trained_rows(model)
    return {_module(model, name).rpartition(".")[2]: ids for name, (_, ids) in rows.items()} or None


def token_tensors(model: nn.Module) -> dict[str, str]:
    """Name of the trained rows in an adapter file -> name of the parameter."""
    rows = trained_rows(model)
    return {
        f"base_model.model.{_module(model, name)}.token_adapter.trainable_tokens_delta": parameter
        for name, (parameter, _) in rows.items()
    }


def _module(model: nn.Module, name: str) -> str:
    """Path in ``transformers`` of the module with the weight ``name``."""
    spec, description = identity(model)
    (group,) = [group for group in spec.weight_map("hf").groups(description) if name in group.tune]
    return group.external[0].removesuffix(".weight")


def init_from_base(settings: Mapping[str, Any]) -> str | None:
    """``"pissa"`` or ``"olora"`` if peft subtracts the initial adapter from the base weights, else None."""
    init = settings.get("init_lora_weights")
    name = init.lower() if isinstance(init, str) and init.lower() == "olora" else init
    return name if name in _INITS_FROM_BASE else None


@torch.no_grad()
def take_from_base(model: nn.Module, settings: Mapping[str, Any], path: Path) -> None:
    """Subtract the initial adapter of PiSSA or OLoRA from the base weights: W becomes W - scale · B0 A0, as in peft.

    A0 and B0 are computed from W: for PiSSA its first ``r`` singular vectors, for OLoRA those of its QR decomposition.
    ``model.adapter_init`` records it, so that a resume does it once and a save writes it.

    Args:
        model: with its base weights, sharded or not.
        settings: of the adapter.
        path: their file.

    Raises:
        CheckpointError: another initial adapter was subtracted before, or a layer does not support it.
    """
    init, done = init_from_base(settings), getattr(model, "adapter_init", None)
    if init == done:
        return
    if done is not None:
        raise CheckpointError(f"{path}: the base was changed for an adapter of the kind {done} already: start anew.")
    adapted, weights = startable(model, init, path), FullWeights(model)
    for name, module in adapted.items():
        weight = weights.full(name).float()
        weights.put(name, start_from_weight(weight, init, module.rank, module.scaling)[0])
    model.adapter_init = init


def wanted_start(model: nn.Module) -> str | None:
    """``"pissa"`` or ``"olora"`` if the model's adapters start as a part of their weights."""
    layers = (module for module in model.modules() if isinstance(module, LoRALinear))
    return next((layer.start for layer in layers if layer.start is not None), None)


def startable(model: nn.Module, init: str, path: Path | str) -> dict[str, LoRALinear]:
    """The adapted layers of a model whose adapters may start as a part of their weight, by the names of the weights.

    Args:
        model: has adapters.
        init: ``"pissa"`` or ``"olora"``.
        path: what an error begins with.

    Raises:
        CheckpointError: the weight of a layer is a part of another one in checkpoints, or stacked.
    """
    spec, description = identity(model)
    groups = {name: group for group in spec.weight_map("hf").peft().groups(description) for name in group.tune}
    adapted = dict(adapter_modules(model))
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

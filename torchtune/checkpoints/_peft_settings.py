"""``adapter_config.json``: supported settings, and settings that change the base weights on load."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from torchtune.checkpoints._checkpoint_error import CheckpointError
from torchtune.checkpoints._load_weights import read_json
from torchtune.checkpoints._model_weights import ModelWeights
from torchtune.models import FusedAdapter
from torchtune.modules.peft import LoRALinear, adapter_modules, init_from_weight
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

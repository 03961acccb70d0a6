"""Compatibility: functions that convert complete state dicts.

They use weight maps (:class:`torchtune.models.WeightMap`), which convert tensor by tensor and read the model's
description. New code should use weight maps directly.
"""

import re
from collections.abc import Iterable
from typing import Any

from torch import Tensor

from torchtune._lazy import former_names
from torchtune.models._description import Description
from torchtune.models._weight_map import WeightMap, WeightMapError
from torchtune.models._weight_names import HF_INTERLEAVED, META

__all__ = [
    "convert_by",
    "describe_state_dict",
    "get_mapped_key",
    "hf_to_tune",
    "meta_to_tune",
    "tune_to_hf",
    "tune_to_meta",
    "tune_to_peft_adapter_config",
    "tune_to_peft_adapter_weights",
]

_ADAPTER_SUFFIXES = (".lora_a.weight", ".lora_b.weight", ".magnitude")
_LAYER_NUMBER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


def get_mapped_key(key: str, mapping_dict: dict[str, str]) -> str:
    """Translate a name with a table; ``{}`` in the table stands for the layer number.

    Raises:
        WeightMapError: the name is not in the table.
    """
    number = re.search(r"\.(\d+)\.", key)
    template = key
    if number is not None:
        template = key[: number.start(1)] + "{}" + key[number.end(1) :]
    if template not in mapping_dict:
        raise WeightMapError(f"The table of names has no entry '{template}' for the tensor '{key}'.")
    if number is None:
        return mapping_dict[template]
    return mapping_dict[template].format(number[1])


def describe_state_dict(
    names: Iterable[str],
    num_heads: int = 32,
    num_kv_heads: int = 32,
    dim: int = 4096,
    head_dim: int | None = None,
    tie_word_embeddings: bool = False,
    intermediate_dim: int = 1,
    biases: bool = True,
) -> Description:
    """Make a description for renaming, with the number of layers in ``names``.

    Sizes that affect neither names nor layouts are 1. Norms of queries and keys, and by default biases, are in the
    description whether the model has them or not: :func:`convert_by` accepts that their tensors are missing.
    """
    layers = []
    for name in names:
        match = _LAYER_NUMBER.search(name)
        if match:
            layers.append(int(match[1]))
    return Description(
        vocab_size=1,
        num_layers=max(layers, default=0) + 1,
        embed_dim=dim,
        intermediate_dim=intermediate_dim,
        max_seq_len=1,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim or 0,
        q_bias=biases,
        k_bias=biases,
        v_bias=biases,
        attn_output_bias=biases,
        mlp_bias=biases,
        qk_norm="before_rope",
        tie_word_embeddings=tie_word_embeddings,
    )


def hf_to_tune(
    state_dict: dict[str, Tensor],
    num_heads: int = 32,
    num_kv_heads: int = 32,
    dim: int = 4096,
    head_dim: int | None = None,
) -> dict[str, Tensor]:
    """Convert weights of Llama's architecture from Hugging Face names to ours, with queries and keys reordered."""
    description = describe_state_dict(state_dict, num_heads, num_kv_heads, dim, head_dim)
    return convert_by(HF_INTERLEAVED, state_dict, description, to_tune=True)


def tune_to_hf(
    state_dict: dict[str, Tensor],
    num_heads: int = 32,
    num_kv_heads: int = 32,
    dim: int = 4096,
    head_dim: int | None = None,
) -> dict[str, Tensor]:
    """Convert weights from our names to Hugging Face names; the inverse of :func:`hf_to_tune`."""
    description = describe_state_dict(state_dict, num_heads, num_kv_heads, dim, head_dim)
    return convert_by(HF_INTERLEAVED, state_dict, description, to_tune=False)


def meta_to_tune(state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
    """Convert weights and adapters from Meta's names to ours."""
    return _convert_by_meta(state_dict, to_tune=True)


def tune_to_meta(state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
    """Convert weights and adapters from our names to Meta's; the inverse of :func:`meta_to_tune`."""
    return _convert_by_meta(state_dict, to_tune=False)


def tune_to_peft_adapter_config(
    adapter_config: dict[str, Any], base_model_name_or_path: str | None = None
) -> dict[str, Any]:
    """Convert an adapter config (``r``, ``lora_alpha``, ``target_modules`` with our names) for PEFT.

    Raises:
        ValueError: a field is missing, or a module has no name in PEFT.
    """
    for key in ("target_modules", "r", "lora_alpha"):
        if key not in adapter_config:
            raise ValueError(f"The adapter config lacks '{key}': PEFT needs it.")
    peft_names = {}  # last part of our name of a module -> that of PEFT: w1 -> gate_proj
    for group in HF_INTERLEAVED.groups(describe_state_dict(())):
        tune_module = group.tune[0].removesuffix(".weight").rpartition(".")[2]
        peft_names[tune_module] = group.external[0].split(".")[-2]
    target_modules = []
    for module in adapter_config["target_modules"]:
        if module not in peft_names:
            raise ValueError(
                f"The adapter's module '{module}' has no name in PEFT; known are: {', '.join(peft_names)}."
            )
        target_modules.append(peft_names[module])
    config = {**adapter_config, "target_modules": target_modules, "peft_type": "LORA"}
    if base_model_name_or_path:
        config["base_model_name_or_path"] = base_model_name_or_path
    return config


def tune_to_peft_adapter_weights(
    state_dict: dict[str, Tensor],
    num_heads: int = 32,
    num_kv_heads: int = 32,
    dim: int = 4096,
    head_dim: int | None = None,
) -> dict[str, Tensor]:
    """Convert adapters of a model of Llama's architecture to PEFT's names.

    For models with unchanged query and key layouts (Qwen), use ``spec.weight_map("hf").peft()``.
    """
    description = describe_state_dict(state_dict, num_heads, num_kv_heads, dim, head_dim)
    return convert_by(HF_INTERLEAVED.peft(), state_dict, description, to_tune=False)


def convert_by(
    weight_map: WeightMap, state_dict: dict[str, Tensor], description: Description, *, to_tune: bool
) -> dict[str, Tensor]:
    """Convert a state dict with a weight map, in either direction; tensors may be missing."""
    convert = weight_map.to_tune if to_tune else weight_map.to_external
    return dict(convert(state_dict.items(), description, partial=True))


def _convert_by_meta(state_dict: dict[str, Tensor], *, to_tune: bool) -> dict[str, Tensor]:
    """Convert weights and adapters between Meta's names and ours, in either direction."""
    description = describe_state_dict(state_dict)
    new_names = {}
    for group in META.groups(description):
        if to_tune:
            new_names[group.external[0]] = group.tune[0]
        else:
            new_names[group.tune[0]] = group.external[0]
    weights = {name: tensor for name, tensor in state_dict.items() if not name.endswith(_ADAPTER_SUFFIXES)}
    converted = convert_by(META, weights, description, to_tune=to_tune)
    # Meta's files have no adapters: adapters keep their suffix, after the new name of their module.
    for name, tensor in state_dict.items():
        for suffix in _ADAPTER_SUFFIXES:
            if name.endswith(suffix):
                weight = name.removesuffix(suffix) + ".weight"
                if weight not in new_names:
                    raise WeightMapError(f"The adapter tensor '{name}' belongs to no module of the model.")
                converted[new_names[weight].removesuffix(".weight") + suffix] = tensor
    return converted


__getattr__ = former_names(__name__)

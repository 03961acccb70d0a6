"""Write docs/model_table.txt, which docs/models.rst includes, from families and configs (`make configs`).

``tests/test_repository.py`` compares the file with ``page``.
"""

import functools
import importlib
import inspect
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import torch
import yaml
from composition_table import list_table
from torch import nn

from torchtune._config_templates import models, render, shipped_configs, usual_methods
from torchtune.models import Description, ModelSpec, build, get_spec, list_specs
from torchtune.modules.model_fusion import EarlyFusionModel

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "model_table.txt"
MIXERS = {"DeltaNetMixer": "linear attention", "Mamba2Mixer": "Mamba", "ShortConvMixer": "convolutions"}


@functools.cache
def parameters(d: Description, spec: ModelSpec) -> int:
    """Count the parameters of a model on the meta device; if all layers are alike, on two models of few layers."""

    def count(num_layers: int) -> int:
        """Return the parameters of the model with so many layers."""
        with torch.device("meta"):
            model = build(replace(d, num_layers=num_layers), spec)
        return sum(parameter.numel() for parameter in model.parameters())

    if spec.builder is not None or d.expertless_layers or d.mixer_layers or d.window_layers or d.num_layers < 2:
        return count(d.num_layers)
    first = count(1)
    layer = count(2) - first
    return first + (d.num_layers - 1) * layer


def made_by(builder: Callable[[], nn.Module], d: Description, spec: ModelSpec) -> tuple[Description, ModelSpec]:
    """Return description and family of the model that a builder makes; of a text decoder, those of the table."""
    if inspect.signature(builder).return_annotation is not EarlyFusionModel:
        return d, spec
    with torch.device("meta"):
        model = builder()
    return model.description, model.spec


def features(d: Description) -> list[str]:
    """Return what sets a family's arithmetic apart, in words."""
    scaling = type(d.rope_scaling).__name__.removesuffix("RopeScaling").lower()
    candidates = [
        (d.tie_word_embeddings, "tied output"),
        (d.q_bias, "biases"),
        (d.has_qk_norm, "norms of queries and keys"),
        (d.norm_order != "pre", "norms after"),
        (d.window is not None and len(d.window_layers) == d.num_layers, "windows"),
        (d.window is not None and len(d.window_layers) < d.num_layers, "windows in some layers"),
        (d.rope_scaling is not None, f"{scaling} positions"),
        (d.rope_dim < d.head_dim and not d.kv_latent_dim, "partial rotation"),
        (bool(d.kv_latent_dim), "latent attention"),
        (d.mixer is not None, f"{MIXERS.get(type(d.mixer).__name__)} in some layers"),
        (d.chunk is not None, "attention in chunks"),
        (bool(d.unrotated_layers), "layers without positions"),
        (d.logit_softcap is not None, "soft caps"),
        (d.residual_scale != 1.0, "multipliers"),
        (bool(d.num_experts), "mixture of experts"),
        (d.full_keys_as_values, "keys as values in full attention"),
        (d.shared_kv_layers > 0, "keys of other layers in some"),
        (d.layer_embed_dim > 0, "embeddings in every layer"),
    ]
    return [text for has_feature, text in candidates if has_feature]


def _configs() -> tuple[dict[str, list[str]], dict[str, set[str]]]:
    """Return path of a builder -> its usual configs, with or without an adapter; and module -> tokenizers."""
    names_of_builders: dict[str, list[str]] = defaultdict(list)
    tokenizers: dict[str, set[str]] = defaultdict(set)
    texts = dict(shipped_configs())
    for model in models()["models"]:
        for method in usual_methods(model):
            texts[f"{model}_{method}"] = render(f"{model}_{method}", model, method)
    for name in sorted(texts):
        config = yaml.load(texts[name], yaml.CSafeLoader)
        model = config.get("model") or config["policy_model"]
        module, _, builder = model["_component_"].rpartition(".")
        builder = builder.removeprefix("q").removeprefix("lora_")  # of the model without an adapter
        names_of_builders[f"{module}.{builder}"].append(name)
        tokenizer = config.get("tokenizer", {}).get("_component_")
        if tokenizer is not None:
            tokenizers[module].add(tokenizer.rpartition(".")[2])
    return names_of_builders, tokenizers


def _literals(names: Iterable[str]) -> str:
    """Return names as literals of reStructuredText, with commas between them."""
    return ", ".join(f"``{name}``" for name in names)


def family(name: str, spec: ModelSpec, configs: dict[str, list[str]], tokenizers: dict[str, set[str]]) -> str:
    """Return the section of a family.

    Args:
        name: name of the family's module.
        spec: the family.
        configs: path of a builder -> names of configs.
        tokenizers: module -> names of tokenizers in its configs.
    """
    module = importlib.import_module(f"torchtune.models.{name}")
    sizes = {**getattr(module, "SIZES", {}), **getattr(module, "REWARD_SIZES", {})}
    tokenizer_names = set(tokenizers[module.__name__])
    for public_name in module.__all__:
        if public_name.endswith(("_tokenizer", "_transform")):
            tokenizer_names.add(public_name)
    reads_images = spec.image_processor is not None
    if not tokenizer_names:
        tokenizer_names = {"image_text_transform" if reads_images else "hf_tokenizer"}
    title = (module.__doc__ or name).strip().partition("\n")[0].rstrip(".")
    facts = f"``{module.__name__}``, tokenizer {_literals(sorted(tokenizer_names))}, architecture "
    facts += _literals(spec.architectures)
    if sizes:
        family_features = features(next(iter(sizes.values())))
        if family_features:
            facts += f"; {', '.join(family_features)}"
    lines = [title, "-" * len(title), "", f"{facts}.", ""]
    if not sizes:  # its models are built from a checkpoint alone
        builder = "image_text_model" if reads_images else "from_hf_config"
        text = f"Any size, from its ``config.json``: ``torchtune.models.{builder}``"
        config_names = []
        for names_of_builder in configs.values():
            config_names += [config for config in names_of_builder if config.startswith(f"{name}/")]
        if config_names:
            text += f"; configs {_literals(config_names)}"
        return "\n".join([*lines, f"{text}."]) + "\n"
    rows = [["builder", "parameters", "context", "configs"]]
    for builder, description in sizes.items():
        count = parameters(*made_by(getattr(module, builder), description, spec))
        rows.append(
            [
                f":func:`{builder} <{module.__name__}.{builder}>`",
                f"{count:,}",
                f"{description.max_seq_len:,}",
                _literals(configs.get(f"{module.__name__}.{builder}", ())) or "-",
            ]
        )
    return "\n".join([*lines, *list_table(rows)]) + "\n"


def page() -> str:
    """Return the text of the page."""
    configs, tokenizers = _configs()
    return "\n".join(family(name, get_spec(name), configs, tokenizers) for name in list_specs())


if __name__ == "__main__":
    PAGE.write_text(page())

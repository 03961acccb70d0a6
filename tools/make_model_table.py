"""Write docs/model_table.txt, which docs/models.rst includes, from families and configs (`make configs`).

``--check`` writes nothing and fails if the file differs from what would be written.
"""

import argparse
import functools
import importlib
import inspect
import sys
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
import yaml
from torch import nn

from torchtune._config_templates import models, render, shipped_configs, usual_methods
from torchtune.models import Description, ModelSpec, build, get_spec, list_specs
from torchtune.modules.model_fusion import EarlyFusionModel

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "model_table.txt"
MIXERS = {"DeltaNetMixer": "linear attention", "Mamba2Mixer": "Mamba", "ShortConvMixer": "convolutions"}


@functools.cache
def parameters(d: Description, spec: ModelSpec) -> int:
    """Parameters of a model, counted on the meta device; of layers that are all alike, on two models of few layers."""

    def count(layers: int) -> int:
        with torch.device("meta"):
            return sum(parameter.numel() for parameter in build(replace(d, num_layers=layers), spec).parameters())

    if spec.builder is not None or d.expertless_layers or d.mixer_layers or d.window_layers or d.num_layers < 2:
        return count(d.num_layers)
    one = count(1)
    return one + (d.num_layers - 1) * (count(2) - one)


def made_by(builder: Callable[[], nn.Module], d: Description, spec: ModelSpec) -> tuple[Description, ModelSpec]:
    """Description and family of what a builder makes; of text decoders, those of the table of sizes."""
    if inspect.signature(builder).return_annotation is not EarlyFusionModel:
        return d, spec
    with torch.device("meta"):
        model = builder()
    return model.description, model.spec


def features(d: Description) -> list[str]:
    """What sets a family's arithmetic apart, in words."""
    found = [
        (d.tie_word_embeddings, "tied output"),
        (d.q_bias, "biases"),
        (d.has_qk_norm, "norms of queries and keys"),
        (d.norm_order != "pre", "norms after"),
        (d.window is not None and len(d.window_layers) == d.num_layers, "windows"),
        (d.window is not None and len(d.window_layers) < d.num_layers, "windows in some layers"),
        (d.rope_scaling is not None, type(d.rope_scaling).__name__.removesuffix("RopeScaling").lower() + " positions"),
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
    return [text for holds, text in found if holds]


def _configs() -> tuple[dict[str, list[str]], dict[str, set[str]]]:
    """Builder's path -> names of its usual configs, with or without an adapter; and package -> tokenizers."""
    found: dict[str, list[str]] = defaultdict(list)
    tokenizers: dict[str, set[str]] = defaultdict(set)
    texts = dict(shipped_configs())
    for model in models()["models"]:
        for method in usual_methods(model):
            texts[f"{model}_{method}"] = render(f"{model}_{method}", model, method)
    for name in sorted(texts):
        config = yaml.load(texts[name], yaml.CSafeLoader)
        model = (config.get("model") or config["policy_model"])["_component_"]
        tokenizer = config.get("tokenizer", {}).get("_component_", "")
        module, _, builder = model.rpartition(".")
        found[f"{module}.{builder.removeprefix('q').removeprefix('lora_')}"].append(name)
        tokenizers[module] |= {tokenizer.rpartition(".")[2]} - {""}
    return found, tokenizers


def family(name: str, spec: ModelSpec, configs: dict[str, list[str]], tokenizers: dict[str, set[str]]) -> str:
    """The section of one family."""
    module = importlib.import_module(f"torchtune.models.{name}")
    sizes = getattr(module, "SIZES", {}) | getattr(module, "REWARD_SIZES", {})
    apart = features(next(iter(sizes.values()))) if sizes else []
    known = tokenizers[module.__name__] | {
        name for name in module.__all__ if name.endswith(("_tokenizer", "_transform"))
    }
    known = known or {"hf_tokenizer" if spec.image_processor is None else "image_text_transform"}
    described = (module.__doc__ or name).strip().partition("\n")[0].rstrip(".")
    lines = [
        described,
        "-" * len(described),
        "",
        f"``{module.__name__}``, tokenizer {', '.join(f'``{name}``' for name in sorted(known))}, architecture "
        + ", ".join(f"``{architecture}``" for architecture in spec.architectures)
        + (f"; {', '.join(apart)}." if apart else "."),
        "",
    ]
    if not sizes:
        builder = "from_hf_config" if spec.image_processor is None else "image_text_model"
        used = [config for found in configs.values() for config in found if config.startswith(f"{name}/")]
        listed = f"; configs {', '.join(f'``{config}``' for config in used)}" if used else ""
        return (
            "\n".join([*lines, f"Any size, from its ``config.json``: ``torchtune.models.{builder}``{listed}."]) + "\n"
        )
    lines += [
        ".. list-table::",
        "   :header-rows: 1",
        "",
        "   * - builder",
        "     - parameters",
        "     - context",
        "     - configs",
    ]
    for builder, description in sizes.items():
        used = configs.get(f"{module.__name__}.{builder}", [])
        lines += [
            f"   * - :func:`{builder} <{module.__name__}.{builder}>`",
            f"     - {parameters(*made_by(getattr(module, builder), description, spec)):,}",
            f"     - {description.max_seq_len:,}",
            f"     - {', '.join(f'``{config}``' for config in used) or '-'}",
        ]
    return "\n".join(lines) + "\n"


def page() -> str:
    """The text of the page."""
    configs = _configs()
    return "\n".join(family(name, get_spec(name), *configs) for name in list_specs())


def main() -> int:
    """Write or check; returns 1 if the page differs and was not to be written."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing, fail if the page is not current")
    text, check = page(), parser.parse_args().check
    if PAGE.exists() and PAGE.read_text() == text:
        return 0
    print(f"{'not current' if check else 'written'}: {PAGE.relative_to(ROOT)}")
    if not check:
        PAGE.write_text(text)
    return int(check)


if __name__ == "__main__":
    sys.exit(main())

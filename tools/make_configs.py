"""Write recipes/configs from a template per method, a table of methods and a table of models (`make configs`).

``--check`` writes nothing and fails if a file differs from what would be written. The tables and templates are in
recipes/templates, from which configs are made on demand, too; this also writes the table of sizes there.
"""

import argparse
import importlib
import sys
from pathlib import Path

import torch
from make_model_table import parameters

from torchtune._config_templates import TEMPLATES, builder, models, shipped_configs
from torchtune.models import get_spec
from torchtune.modules.low_precision.quantizers import quantizable_layers

CONFIGS = Path(__file__).parents[1] / "recipes" / "configs"
# Numbers of neighbors that may share a scale when weights are quantized, the usual one first.
GROUPS = (256, 128, 64, 32)


def size_of(model: str) -> dict[str, int | bool]:
    """Return the row of a model in the table of sizes, counted on the meta device."""
    family = model.partition("/")[0]
    row = models()["models"][model]
    if "parameters" in row:
        return {"parameters": int(float(row["parameters"])), "experts": bool(row.get("experts"))}
    module = importlib.import_module(f"torchtune.models.{family}")
    description = getattr(module, "SIZES", {}).get(builder(model))
    if description is not None and description.num_experts:  # thousands of modules, which take long to build
        count = parameters(description, get_spec(family))
        return {"parameters": count, "experts": True, "vocabulary": description.vocab_size}
    build = getattr(module, builder(model))
    with torch.device("meta"):
        built = build(**row.get("arguments", {}))
    size = {"parameters": sum(parameter.numel() for parameter in built.parameters()), "experts": False}
    if "images" in row.get("is", []):
        return size
    size["vocabulary"] = built.tok_embeddings.num_embeddings
    widths = {layer.in_features for layer in quantizable_layers(built).values()}
    for group in GROUPS:
        if all(width % group == 0 for width in widths):
            size["group"] = group
            break
    return size


def sizes_text() -> str:
    """Return the text of the table of sizes."""
    lines = [
        "# Model -> its parameters, whether it is a mixture of experts, its vocabulary, and the group of inputs with\n"
        "# one scale when it is quantized; written by tools/make_configs.py.\n"
    ]
    for model in models()["models"]:
        entries = ", ".join(f"{name}: {value}" for name, value in size_of(model).items())
        lines.append(f"{model}: {{{entries}}}\n")
    return "".join(lines)


def configs() -> dict[str, str]:
    """Return name -> text of every config that is shipped as a file."""
    return dict(shipped_configs())


def main() -> int:
    """Write or check; return the number of files that differ and were not written."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing, fail if a file is not current")
    args = parser.parse_args()
    sizes = TEMPLATES / "sizes.yaml"
    table = sizes_text()
    if not args.check and (not sizes.exists() or sizes.read_text() != table):
        sizes.write_text(table)  # first, because the configs are made with it
    expected = {CONFIGS / f"{name}.yaml": text for name, text in configs().items()}
    expected[sizes] = table
    differing = [path for path, text in expected.items() if not path.exists() or path.read_text() != text]
    surplus = [path for path in CONFIGS.rglob("*.yaml") if path not in expected]
    if args.check:
        for path in differing + surplus:
            print(f"not current: {path.name}")
        return len(differing + surplus)
    for path in differing:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(expected[path])
        print(f"written: {path.name}")
    for path in surplus:
        path.unlink()
        print(f"removed: {path.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

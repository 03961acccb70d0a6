"""Simulate what the usual configs need per GPU; ``docs/tables/memory_per_gpu.yaml`` keeps the results.

``make_tables.py --simulate`` simulates configs without a result, or whose text has changed since. Until then their
cells in the table are empty.
"""

import dataclasses
import hashlib
import itertools
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from composition_table import list_table
from torch import nn

from torchtune._config_templates import models, usual_methods
from torchtune._recipe_registry import find_config, recipe_named_by
from torchtune.config import SettingsView, load_and_check
from torchtune.estimate import build_on_meta, estimate_run
from torchtune.estimate._plan import row_length
from torchtune.estimate._simulate import simulated_cluster
from torchtune.training.parallel import ParallelDimsError

ROOT = Path(__file__).parents[1]
KEPT = ROOT / "docs" / "tables" / "memory_per_gpu.yaml"
# Sizes that may not fit on a GPU, and a small config that a test simulates again.
SIZES = ("8B", "32B", "70B", "72B")
SAMPLE = "smol/135M_full"
# Settings that say where things are, or which values tensors have: a simulation has none.
ELSEWHERE = ("model", "tokenizer", "dataset", "checkpointer", "checkpoint_dir", "output_dir", "metric_logger", "seed")
COUNTS = (1, 2, 4, 8, 16)  # of GPUs
PER_MACHINE = 8
GIB = 2**30
NO_MESH = "—"  # of a recipe that does not run on so many


def chosen() -> list[str]:
    """Return the configs of the table, by name: usual ones, without runs with images, which cannot be simulated."""
    names = []
    for model, row in models()["models"].items():
        reads_images = not {"images", "image_tokens"}.isdisjoint(row.get("is", []))
        if reads_images or model.partition("/")[2] not in SIZES:
            continue
        for method in usual_methods(model):
            if method in ("full", "lora"):
                names.append(f"{model}_{method}")
    return [SAMPLE, *sorted(names)]


def fingerprint(name: str) -> str:
    """Return a digest of a config's text."""
    return hashlib.sha256(find_config(name).read_bytes()).hexdigest()[:12]


def kept() -> dict[str, dict[str, Any]]:
    """Return the results by config: ``{"of": fingerprint, "needs": {GPUs: text}}``."""
    if not KEPT.exists():
        return {}
    return yaml.safe_load(KEPT.read_text()) or {}


def missing(entries: dict[str, dict[str, Any]]) -> list[tuple[str, int]]:
    """Return (config, GPUs) of the cells without a result, or with that of another text of the config."""
    cells = []
    for name in chosen():
        texts = results(entries, name)
        cells += [(name, count) for count in COUNTS if count not in texts]
    return cells


def results(entries: dict[str, dict[str, Any]], name: str) -> dict[int, str]:
    """Return the texts by number of GPUs of a config as it is now."""
    entry = entries.get(name)
    if entry is None or entry["of"] != fingerprint(name):
        return {}
    return entry["needs"]


def cell(name: str, processes: int, texts: dict[str, str] | None = None) -> str:
    """Return the GiB on a GPU, and in host memory if parameters, gradients and optimizer states are kept there.

    Args:
        name: name of the config.
        processes: number of processes.
        texts: cells for this number of processes by what they depend on; the new cell is added.
    """
    path = find_config(name)
    main = recipe_named_by(path).load_main()
    settings = load_and_check(path, [], main)
    model, _, _ = build_on_meta(settings)
    if texts is None:
        texts = {}
    key = _dependencies(settings, model)
    if key not in texts:
        texts[key] = _simulate(main, settings, processes)
    return texts[key]


def _dependencies(settings: Any, model: nn.Module) -> str:
    """Return what a cell depends on: settings, tokens of a row, and the shapes of a model."""
    values = {}
    for setting in dataclasses.fields(settings):
        if setting.name not in ELSEWHERE:
            values[setting.name] = getattr(settings, setting.name)
    shapes = []
    for name, tensor in itertools.chain(model.named_parameters(), model.named_buffers()):
        shapes.append((name, tuple(tensor.shape), tensor.dtype, tensor.requires_grad))
    modules = [(name, type(module)) for name, module in model.named_modules()]
    return repr((values, row_length(SettingsView.of(settings), model), shapes, modules))


def _simulate(main: Any, settings: Any, processes: int) -> str:
    """Simulate a run; return the text of its cell."""
    try:
        estimate = estimate_run(main, settings, processes, per_machine=PER_MACHINE)
    except ParallelDimsError:
        return NO_MESH
    text = f"{estimate.peak / GIB:.1f}"
    if estimate.host >= GIB / 2:
        text += f" + {estimate.host / GIB:.0f} host"
    return text


def write(entries: dict[str, dict[str, Any]]) -> None:
    """Write the results, a line for each config."""
    lines = []
    for name, entry in sorted(entries.items()):
        needs = ", ".join(f"{count}: '{text}'" for count, text in entry["needs"].items())
        lines.append(f"{name}: {{of: '{entry['of']}', needs: {{{needs}}}}}\n")
    KEPT.write_text("".join(lines), encoding="utf-8")


def update(*, anew: bool = False) -> None:
    """Simulate what is missing, or all cells; a result is written as soon as it is there."""
    entries = {}
    if not anew:
        previous = kept()
        entries = {name: previous[name] for name in chosen() if results(previous, name)}
    # Many configs of a size and method need the same: one process simulates them.
    groups: dict[tuple[int, str], list[str]] = {}
    for name, count in missing(entries):
        groups.setdefault((count, name.partition("/")[2]), []).append(name)
    for (count, _), names in groups.items():
        for name, text in _simulate_in_child_process(names, count):
            entry = entries.setdefault(name, {"of": fingerprint(name), "needs": {}})
            entry["needs"] = dict(sorted({**entry["needs"], count: text}.items()))
            print(f"{name} on {count}: {text}", flush=True)
            write(entries)
    write(entries)


def _simulate_in_child_process(names: list[str], processes: int) -> Iterator[tuple[str, str]]:
    """Yield (config, cell) for configs; in a child process, as DTensor remembers groups of another cluster's size."""
    command = [sys.executable, __file__, str(processes), *names]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as worker:
        for line in worker.stdout:
            name, _, text = line.strip().partition(" ")
            yield name, text
    if worker.returncode:
        raise SystemExit(f"simulating {' '.join(names)} on {processes} failed: see above.")


def table() -> str:
    """Return the table as reStructuredText, from the results that are kept."""
    header = ["config"]
    for count in COUNTS:
        header.append("1 GPU" if count == 1 else f"{count} GPUs")
    rows = [header]
    entries = kept()
    for name in chosen():
        texts = results(entries, name)
        rows.append([f"``{name}``", *(texts.get(count, "") for count in COUNTS)])
    return "\n".join(list_table(rows)) + "\n"


if __name__ == "__main__":
    processes = int(sys.argv[1])
    texts: dict[str, str] = {}
    with simulated_cluster(processes, PER_MACHINE):
        for name in sys.argv[2:]:
            print(name, cell(name, processes, texts), flush=True)

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
from torch import nn

from torchtune._cli._find_recipe import recipe_named_by
from torchtune._config_templates import models, usual_methods
from torchtune._recipe_registry import find_config
from torchtune.config import SettingsView, load_and_check
from torchtune.estimate import build_on_meta, estimate_run
from torchtune.estimate._plan import row_length
from torchtune.estimate._simulate import simulated_cluster
from torchtune.training.parallel._parallel_dims import ParallelDimsError

ROOT = Path(__file__).parents[1]
KEPT = ROOT / "docs" / "tables" / "memory_per_gpu.yaml"
# The sizes for which it is a question, a small config that a test simulates again, and numbers of GPUs.
SIZES = ("8B", "32B", "70B", "72B")
SAMPLE = "smol/135M_full"
# Settings that say where things are, or which values tensors have: a simulation has none.
ELSEWHERE = ("model", "tokenizer", "dataset", "checkpointer", "checkpoint_dir", "output_dir", "metric_logger", "seed")
COUNTS = (1, 2, 4, 8, 16)
PER_MACHINE = 8
GIB = 2**30
NO_MESH = "—"


def chosen() -> list[str]:
    """The configs of the table, by name: usual ones; runs with images cannot be simulated."""
    names = []
    for model, row in models()["models"].items():
        is_text = not {"images", "image_tokens"} & {*row.get("is", [])}
        if is_text and model.partition("/")[2] in SIZES:
            names += [f"{model}_{method}" for method in usual_methods(model) if method in ("full", "lora")]
    return [SAMPLE, *sorted(names)]


def fingerprint(name: str) -> str:
    """Of a config's text."""
    return hashlib.sha256(find_config(name).read_bytes()).hexdigest()[:12]


def kept() -> dict[str, dict[str, Any]]:
    """Results by config: ``{"of": fingerprint, "needs": {GPUs: text}}``."""
    return (yaml.safe_load(KEPT.read_text()) or {}) if KEPT.exists() else {}


def missing(found: dict[str, dict[str, Any]]) -> list[tuple[str, int]]:
    """Cells without a result, or with one of another file."""
    return [(name, count) for name in chosen() for count in COUNTS if count not in results(found, name)]


def results(found: dict[str, dict[str, Any]], name: str) -> dict[int, str]:
    """Texts by number of GPUs, of the config as it is."""
    entry = found.get(name)
    return entry["needs"] if entry is not None and entry["of"] == fingerprint(name) else {}


def cell(name: str, processes: int, known: dict[str, str] | None = None) -> str:
    """GiB on a GPU, and in host memory if parameters, gradients and optimizer states are kept there.

    Args:
        name: of the config.
        processes: of the run.
        known: cells for so many processes by what they depend on, and this one from now on.
    """
    path = find_config(name)
    main = recipe_named_by(path).load_main()
    settings = load_and_check(path, [], main)
    model = build_on_meta(settings)[0]
    known = {} if known is None else known
    depends_on = _depends_on(settings, model)
    if depends_on not in known:
        known[depends_on] = _cell(main, settings, processes)
    return known[depends_on]


def _depends_on(settings: Any, model: nn.Module) -> str:
    """What a cell depends on: settings, tokens of a row, and the shapes of a model."""
    given = {
        item.name: getattr(settings, item.name) for item in dataclasses.fields(settings) if item.name not in ELSEWHERE
    }
    tensors = itertools.chain(model.named_parameters(), model.named_buffers())
    shapes = [(name, tuple(one.shape), one.dtype, one.requires_grad) for name, one in tensors]
    modules = [(name, type(module)) for name, module in model.named_modules()]
    return repr((given, row_length(SettingsView.of(settings), model), shapes, modules))


def _cell(main: Any, settings: Any, processes: int) -> str:
    try:
        found = estimate_run(main, settings, processes, per_machine=PER_MACHINE)
    except ParallelDimsError:
        return NO_MESH
    return f"{found.peak / GIB:.1f}" + (f" + {found.host / GIB:.0f} host" if found.host >= GIB / 2 else "")


def write(found: dict[str, dict[str, Any]]) -> None:
    """Keep results, a config a line."""
    lines = [
        f"{name}: {{of: '{entry['of']}', needs: {{"
        + ", ".join(f"{count}: '{text}'" for count, text in entry["needs"].items())
        + "}}\n"
        for name, entry in sorted(found.items())
    ]
    KEPT.write_text("".join(lines), encoding="utf-8")


def update(*, anew: bool = False) -> None:
    """Simulate what is missing, or all; a result is kept as soon as it is there."""
    before = {} if anew else kept()
    found = {name: before[name] for name in chosen() if results(before, name)}
    wanted = missing(found)
    for count, _, names in _alike(wanted):
        for name, text in _simulated(names, count):
            entry = found.setdefault(name, {"of": fingerprint(name), "needs": {}})
            entry["needs"] = dict(sorted({**entry["needs"], count: text}.items()))
            print(f"{name} on {count}: {text}", flush=True)
            write(found)
    write(found)


def _alike(wanted: list[tuple[str, int]]) -> list[tuple[int, str, list[str]]]:
    """(GPUs, size and method, configs): many of these need the same, and one process simulates them."""
    groups: dict[tuple[int, str], list[str]] = {}
    for name, count in wanted:
        groups.setdefault((count, name.partition("/")[2]), []).append(name)
    return [(*group, names) for group, names in groups.items()]


def _simulated(names: list[str], processes: int) -> Iterator[tuple[str, str]]:
    """(config, cell) of configs, in a process of their own: DTensor remembers groups of another cluster's size."""
    command = [sys.executable, __file__, str(processes), *names]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as worker:
        assert worker.stdout is not None
        for line in worker.stdout:
            name, _, text = line.strip().partition(" ")
            yield name, text
    if worker.returncode:
        raise SystemExit(f"simulating {' '.join(names)} on {processes} failed: see above.")


def table() -> str:
    """The table as reStructuredText, from what is kept."""
    rows = [["config", *(f"{count} GPU{'s' * (count > 1)}" for count in COUNTS)]]
    found = kept()
    for name in chosen():
        done = results(found, name)
        rows.append([f"``{name}``", *(done.get(count, "") for count in COUNTS)])
    lines = [".. list-table::", "   :header-rows: 1", ""]
    for row in rows:
        lines += [f"   {'*' if i == 0 else ' '} - {text}" for i, text in enumerate(row)]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    processes = int(sys.argv[1])
    known: dict[str, str] = {}
    with simulated_cluster(processes, PER_MACHINE):
        for name in sys.argv[2:]:
            print(name, cell(name, processes, known), flush=True)

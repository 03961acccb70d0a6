"""Simulate what shipped configs need per GPU; ``docs/tables/memory_per_gpu.yaml`` keeps the results.

``make_tables.py --simulate`` simulates configs without a result, or whose file has changed since. Until then the table
has the closed form of a dry run for them, marked with "~".
"""

import hashlib
from pathlib import Path
from typing import Any

import yaml
from recipe_table import recipes_in

from torchtune._cli._target import recipe_named_by
from torchtune.config import load_and_check
from torchtune.training._recipe_settings import RecipeSettings
from torchtune.training.parallel._parallel_dims import ParallelDimsError
from torchtune.training.plan._plan import MemoryEstimate, build_on_meta, memory_by_processes
from torchtune.training.simulate._cluster import simulated_cluster
from torchtune.training.simulate._depths import extrapolate, peak_of_all, two_depths
from torchtune.training.simulate._report import peak_bytes
from torchtune.training.simulate._simulate import simulate

ROOT = Path(__file__).parents[1]
CONFIGS = ROOT / "recipes" / "configs"
KEPT = ROOT / "docs" / "tables" / "memory_per_gpu.yaml"
# The sizes for which it is a question, and numbers of GPUs.
SIZES = ("8B", "32B", "70B", "72B")
COUNTS = (1, 2, 4, 8, 16)
PER_MACHINE = 8
GIB = 2**30
NO_MESH = "—"


def chosen() -> list[str]:
    """The configs of the table, by name."""
    distributed = recipes_in("distributed")
    return [
        path.relative_to(CONFIGS).with_suffix("").as_posix()
        for path in sorted(path for size in SIZES for path in CONFIGS.glob(f"*/{size}_*.yaml"))
        if recipe_named_by(path).name in distributed and path.stem.partition("_")[2] in ("full", "lora")
    ]


def fingerprint(name: str) -> str:
    """Of a config's file."""
    return hashlib.sha256((CONFIGS / f"{name}.yaml").read_bytes()).hexdigest()[:12]


def kept() -> dict[str, dict[str, Any]]:
    """Results by config: ``{"of": fingerprint, "needs": {GPUs: text}}``."""
    return (yaml.safe_load(KEPT.read_text()) or {}) if KEPT.exists() else {}


def stale(found: dict[str, dict[str, Any]]) -> list[str]:
    """Configs without a result, or with one of another file."""
    return [
        name
        for name in chosen()
        if name not in found or found[name]["of"] != fingerprint(name) or tuple(found[name]["needs"]) != COUNTS
    ]


def cell(name: str, processes: int) -> str:
    """GiB on a GPU, and in host memory if parameters, gradients and optimizer states are kept there."""
    path = CONFIGS / f"{name}.yaml"
    main = recipe_named_by(path).load_main()
    settings = load_and_check(path, [], main)
    depths = two_depths(build_on_meta(RecipeSettings.of(settings))[0])
    try:
        with simulated_cluster(processes, PER_MACHINE):
            runs = [
                simulate(main, settings, processes, per_machine=PER_MACHINE, layers=layers, micro_batches=2)
                for layers in depths or (None,)
            ]
    except ParallelDimsError:
        return NO_MESH
    if depths is None:
        peak, host = peak_bytes(runs[0]), _host(runs[0])
    else:
        peak, host = peak_of_all(runs, depths), extrapolate(runs, depths, _host)
    return f"{peak / GIB:.1f}" + (f" + {host / GIB:.0f} host" if host >= GIB / 2 else "")


def _host(simulation: Any) -> int:
    ledger = simulation.observer.ledger
    return sum(ledger.held(component, on_host=True) for component in ("parameters", "gradients", "optimizer"))


def write(found: dict[str, dict[str, Any]]) -> None:
    """Keep results, a config on a line."""
    lines = [
        f"{name}: {{of: '{entry['of']}', needs: {{"
        + ", ".join(f"{count}: '{text}'" for count, text in entry["needs"].items())
        + "}}\n"
        for name, entry in sorted(found.items())
    ]
    KEPT.write_text("".join(lines), encoding="utf-8")


def update(*, anew: bool = False) -> None:
    """Simulate what is stale, or all; a result is kept as soon as it is there."""
    found = {name: entry for name, entry in kept().items() if name in chosen()}
    for name in chosen() if anew else stale(found):
        found[name] = {"of": fingerprint(name), "needs": {count: cell(name, count) for count in COUNTS}}
        print(f"{name}: {found[name]['needs']}", flush=True)
        write(found)
    write(found)


def closed_form(name: str) -> list[str]:
    """The cells of a config that was not simulated."""
    path = CONFIGS / f"{name}.yaml"
    settings = load_and_check(path, [], recipe_named_by(path).load_main())
    found = memory_by_processes(settings, COUNTS)
    return [f"~{_shown(found[count], settings)}" if count in found else NO_MESH for count in COUNTS]


def _shown(estimate: MemoryEstimate, settings: Any) -> str:
    if not settings.fsdp_cpu_offload:
        return f"{estimate.total / GIB:.1f}"
    host = estimate.weights + estimate.gradients + estimate.optimizer
    return f"{estimate.offloaded.total / GIB:.1f} + {host / GIB:.0f} host"


def table() -> str:
    """The table as reStructuredText, from what is kept and, where nothing is, from the closed form."""
    rows = [["config", *(f"{count} GPU{'s' * (count > 1)}" for count in COUNTS)]]
    found = kept()
    missing = stale(found)
    for name in chosen():
        cells = closed_form(name) if name in missing else found[name]["needs"].values()
        rows.append([f"``{name}``", *map(str, cells)])
    lines = [".. list-table::", "   :header-rows: 1", ""]
    for row in rows:
        lines += [f"   {'*' if i == 0 else ' '} - {text}" for i, text in enumerate(row)]
    return "\n".join(lines) + "\n"

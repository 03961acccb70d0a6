"""Write docs/tables/experts.rst: step time and peak memory of experts under FSDP and distributed, by simulation.

It takes some minutes, so that no test compares the file; run it after a change of how experts are distributed or of
the simulation (``python tools/expert_table.py``).
"""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from composition_table import list_table

from torchtune._recipe_registry import recipe_named_by
from torchtune.config import load_and_check
from torchtune.estimate import estimate_run, parse_cluster
from torchtune.estimate._roofline import step_time
from torchtune.estimate._simulate import simulated_cluster

ROOT = Path(__file__).parents[1]
TABLE = ROOT / "docs" / "tables" / "experts.rst"
# Title -> overrides of Qwen3's configs.
MODELS = {
    "Qwen3-30B-A3B": "model._component_=torchtune.models.qwen3_moe.{}qwen3_30b_a3b_instruct",
    "GLM-4.5-Air": "model._component_=torchtune.models.glm4_moe.{}glm4_5_air",
}
METHODS = {"full": "", "lora": "lora_"}
# GPUs -> sizes of the expert dimension; the first one is FSDP alone.
CLUSTERS = {"8xH100": (1, 8), "64xH100": (1, 8, 64)}
TOKENS = (1024, 8192)  # of a GPU in a step
GIB = 2**30


def simulate(main: Any, config: Path, overrides: list[str], processes: int, device: Any) -> tuple[float, float]:
    """Return the milliseconds of a step, and the GiB at its peak."""
    settings = load_and_check(config, overrides, main)
    estimate = estimate_run(main, settings, processes, per_machine=device.per_machine)
    milliseconds = step_time(estimate.work.values(), device).total * 1e3
    return milliseconds, estimate.peak / GIB


def rows() -> Iterator[list[str]]:
    """Yield the rows of the table: a run for each cluster, model, method and number of tokens."""
    for cluster, sizes in CLUSTERS.items():
        processes, device = parse_cluster(cluster)
        with simulated_cluster(processes, device.per_machine):
            for (title, model), (method, prefix) in itertools.product(MODELS.items(), METHODS.items()):
                config = ROOT / "recipes" / "configs" / "qwen3_moe" / f"30B_A3B_{method}.yaml"
                main = recipe_named_by(config).load_main()
                for tokens in TOKENS:
                    overrides = [model.format(prefix), f"tokenizer.max_seq_len={tokens}", "batch_size=1"]
                    results = {}
                    for size in sizes:
                        sized = [*overrides, f"expert_parallel_dim={size}"]
                        results[size] = simulate(main, config, sized, processes, device)
                    yield [f"{title}, {method}", str(processes), f"{tokens:,}", *cells(results, device.memory)]


def cells(results: dict[int, tuple[float, float]], memory: float) -> Iterator[str]:
    """Yield time and peak for each size of the expert dimension; the fastest time is bold.

    Args:
        results: milliseconds and GiB by size.
        memory: GiB of a device, which a result may exceed.
    """
    fastest = min(time for time, _ in results.values())
    for size in (1, 8, 64):
        if size not in results:
            yield "—"
            continue
        time, peak = results[size]
        text = f"{time:,.0f} ms"
        if time == fastest:
            text = f"**{text}**"
        text += f", {peak:,.1f} GiB"
        if peak > memory:
            text += " (does not fit)"
        yield text


def main() -> None:
    """Write the table."""
    table = [["run", "GPUs", "tokens a GPU", "1 (FSDP)", "8", "64"]]
    for row in rows():
        print(" | ".join(row), flush=True)
        table.append(row)
    TABLE.write_text("\n".join(list_table(table)) + "\n")


if __name__ == "__main__":
    main()

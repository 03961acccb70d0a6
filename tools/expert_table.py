"""Write docs/tables/experts.rst: step time and peak memory of experts under FSDP and distributed, by simulation.

It takes some minutes, so that no test compares the file; run it after a change of how experts are distributed or of
the simulation (``python tools/expert_table.py``).
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torchtune._cli._find_recipe import recipe_named_by
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


def measured(main: Any, config: Path, overrides: list[str], processes: int, device: Any) -> tuple[float, float]:
    """Milliseconds of a step, and GiB at its peak."""
    settings = load_and_check(config, overrides, main)
    found = estimate_run(main, settings, processes, per_machine=device.per_machine)
    return step_time(found.work.values(), device).total * 1e3, found.peak / GIB


def rows() -> Iterator[list[str]]:
    """The cells of every row."""
    for cluster, sizes in CLUSTERS.items():
        processes, device = parse_cluster(cluster)
        with simulated_cluster(processes, device.per_machine):
            for title, model in MODELS.items():
                for method, prefix in METHODS.items():
                    config = ROOT / "recipes" / "configs" / "qwen3_moe" / f"30B_A3B_{method}.yaml"
                    main = recipe_named_by(config).load_main()
                    for tokens in TOKENS:
                        given = [model.format(prefix), f"tokenizer.max_seq_len={tokens}", "batch_size=1"]
                        found = {}
                        for ep in sizes:
                            overrides = [*given, f"expert_parallel_dim={ep}"]
                            found[ep] = measured(main, config, overrides, processes, device)
                        yield [f"{title}, {method}", str(processes), f"{tokens:,}", *cells(found, device.memory)]


def cells(found: dict[int, tuple[float, float]], memory: float) -> Iterator[str]:
    """Time and peak of every size; the fastest is bold, and what needs more than ``memory`` GiB says so."""
    fastest = min(time for time, _ in found.values())
    for size in (1, 8, 64):
        if size not in found:
            yield "—"
            continue
        time, peak = found[size]
        bold = "**" if time == fastest else ""
        yield f"{bold}{time:,.0f} ms{bold}, {peak:,.1f} GiB{' (does not fit)' * (peak > memory)}"


def main() -> None:
    """Write the table."""
    lines = [".. list-table::", "   :header-rows: 1", ""]
    head = ["run", "GPUs", "tokens a GPU", "1 (FSDP)", "8", "64"]
    for row in [head, *rows()]:
        print(" | ".join(row), flush=True)
        lines += [f"   {'*' if index == 0 else ' '} - {text}" for index, text in enumerate(row)]
    TABLE.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()

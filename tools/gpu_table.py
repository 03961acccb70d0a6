"""Tables of GPU measurements, from benchmarks/results, with simulations of the same steps.

``docs/tables/gpu_simulated.yaml`` keeps the simulations; ``python tools/gpu_table.py`` makes them anew, in minutes.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
SIMULATED = ROOT / "docs" / "tables" / "gpu_simulated.yaml"
DEVICE = "H200"  # of the simulated step time; the memory is that of any
NOTHING = "—"
NOT_YET = (
    "Nothing was measured yet. On a machine with a CUDA GPU, ``make gpu`` measures, and ``make configs`` writes the "
    "tables here.\n"
)
Results = dict[str, dict[str, Any]]


def cases() -> dict[str, Any]:
    """The cases of the benchmark, by name."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        from gpu_cases import CASES
    finally:
        sys.path.remove(str(ROOT / "benchmarks"))
    return CASES


def page(results: Path = RESULTS) -> str:
    """All tables as reStructuredText, a section for each device and release of torch."""
    folders = [folder for folder in sorted(results.glob("*")) if any(folder.glob("*.json"))]
    return "\n".join("\n".join(section(folder)) for folder in folders) if folders else NOT_YET


def section(folder: Path) -> Iterator[str]:
    """Lines about a device."""
    found = {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}
    device, _, version = folder.name.rpartition("-torch")
    title = f"{device.replace('-', ' ')}, PyTorch {version}"
    yield from (title, "-" * len(title), "")
    yield from table(list(speed(found)))
    yield from ("Milliseconds of kernels in a step as it is, by kind of layer:", "")
    yield from table(list(kernels(found)))
    yield from notes(found)


def speed(found: Results) -> Iterator[list[str]]:
    """Rows of the table of speed and memory."""
    kept = yaml.safe_load(SIMULATED.read_text()) if SIMULATED.exists() else {}
    yield [
        "case",
        "tokens/s",
        "compiled",
        "share of peak",
        "peak GiB",
        "simulated GiB",
        "simulated tokens/s",
        "host waits",
        "transformers: tokens/s",
        "compiled",
        "peak GiB",
    ]
    for name, case in cases().items():
        ours, theirs = found.get(f"{name}.ours", {}), found.get(f"{name}.transformers", {})
        simulated = kept.get(name, {})
        yield [
            case.title,
            number(ours, "eager", "tokens_per_second"),
            number(ours, "compiled", "tokens_per_second"),
            number(ours, "compiled", "mfu", form="{:.0%}"),
            number(ours, "eager", "peak_gib", form="{:.1f}"),
            f"{simulated['peak_gib']:.1f}" if simulated else NOTHING,
            f"{case.tokens / simulated['seconds']:,.0f}" if simulated else NOTHING,
            str(sum(ours["host_syncs"].values())) if "host_syncs" in ours else NOTHING,
            number(theirs, "eager", "tokens_per_second"),
            number(theirs, "compiled", "tokens_per_second"),
            number(theirs, "eager", "peak_gib", form="{:.1f}"),
        ]


def kernels(found: Results) -> Iterator[list[str]]:
    """Rows of the table of kernels; kinds in the order of their time over all cases."""
    known = {
        name: found[f"{name}.ours"]["kernels_ms"] for name in cases() if "kernels_ms" in found.get(f"{name}.ours", {})
    }
    kinds = {kind for times in known.values() for kind in times}
    order = sorted(kinds, key=lambda kind: (-sum(times.get(kind, 0.0) for times in known.values()), kind))
    yield ["case", *order]
    for name, times in known.items():
        cells = [f"{times[kind]:,.1f}" if kind in times else NOTHING for kind in order]
        yield [cases()[name].title, *cells]


def notes(found: Results) -> Iterator[str]:
    """Lines about sampling, tests and errors."""
    for name, case in cases().items():
        for side in ("ours", "transformers"):
            split = found.get(f"{name}.{side}", {}).get("eager", {})
            if "generate_seconds" in split:
                yield (
                    f"- {case.title}, {side}: {split['generate_seconds']:.2f} s of sampling "
                    f"({split['generated_per_second']:,.0f} tokens/s) and {split['train_seconds']:.2f} s of training."
                )
    tests = [result for name, result in found.items() if name.startswith("tests.")]
    if tests:
        failed = sum(len(result["failed"]) for result in tests)
        yield f"- GPU tests: {sum(result['passed'] for result in tests)} passed, {failed} failed."
    for name, result in found.items():
        if "error" in result:
            yield f"- {name}: ``{' '.join(result['error'].replace('`', ' ').split())}``"
    yield ""


def number(result: dict[str, Any], stage: str, name: str, form: str = "{:,.0f}") -> str:
    """A cell."""
    value = result.get(stage, {}).get(name)
    return NOTHING if value is None else form.format(value)


def table(rows: list[list[str]]) -> Iterator[str]:
    """Lines of a table with a header."""
    yield from (".. list-table::", "   :header-rows: 1", "")
    for row in rows:
        yield from (f"   {'*' if index == 0 else ' '} - {text}" for index, text in enumerate(row))
    yield ""


def simulate_cases() -> dict[str, dict[str, float]]:
    """Peak and step time of each case, by its recipe with the benchmark's settings."""
    from torchtune._cli._find_recipe import recipe_named_by
    from torchtune.config import load_and_check
    from torchtune.estimate import build_on_meta, estimate_run, parse_cluster
    from torchtune.estimate._roofline import step_time
    from torchtune.estimate._simulate import simulate

    found, device = {}, parse_cluster(DEVICE)[1]
    for name, case in cases().items():
        if case.config is None:
            continue
        config = ROOT / "recipes" / "configs" / f"{case.config}.yaml"
        main = recipe_named_by(config).load_main()
        settings = load_and_check(config, overrides(case), main)
        if case.layers is None:
            estimate = estimate_run(main, settings)
            peak, work = estimate.peak, estimate.work.values()
        else:
            models = {"model": build_on_meta(settings)[0]}
            observer = simulate(main, settings, kept={("model", "text"): range(case.layers)}, models=models)
            peak = max(moment.total for moment in observer.ledger.peaks().values())
            work = observer.work.values()
        total = step_time(work, device).total
        found[name] = {"peak_gib": round(peak / 2**30, 2), "seconds": round(total, 3)}
        print(name, found[name], flush=True)
    return found


def overrides(case: Any) -> list[str]:
    """The benchmark's settings, as overrides of a config."""
    given = [
        f"batch_size={case.packs}",
        f"tokenizer.max_seq_len={case.pack}",
        "gradient_accumulation_steps=1",
        f"enable_activation_checkpointing={case.checkpointing}",
        "optimizer._component_=torch.optim.AdamW",
        "optimizer.fused=True",
        "optimizer_in_bwd=False",
        "clip_grad_norm=null",
    ]
    if case.lora:
        given += ["model.lora_attn_modules=[q_proj,k_proj,v_proj,output_proj]", "model.lora_rank=16"]
        given += [f"model.apply_lora_to_mlp={'moe' not in case.builder}"]
    return given


if __name__ == "__main__":
    SIMULATED.write_text(yaml.safe_dump(simulate_cases(), sort_keys=False), encoding="utf-8")

"""Tables of GPU measurements, from benchmarks/results, with simulations of the same steps.

``docs/tables/gpu_simulated.yaml`` keeps the simulations; ``python tools/gpu_table.py`` makes them anew, in minutes.
"""

import json
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from composition_table import list_table

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
    """Return the cases of the benchmark by name."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        from gpu_cases import CASES
    finally:
        sys.path.remove(str(ROOT / "benchmarks"))
    return CASES


def page(results: Path = RESULTS) -> str:
    """Return all tables as reStructuredText, a section for each device and release of torch."""
    sections = []
    for folder in sorted(results.glob("*")):
        if any(folder.glob("*.json")):
            sections.append("\n".join(section(folder)))
    if not sections:
        return NOT_YET
    return "\n".join(sections)


def section(folder: Path) -> Iterator[str]:
    """Yield the lines about a device."""
    results = {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}
    device, _, version = folder.name.rpartition("-torch")
    title = f"{device.replace('-', ' ')}, PyTorch {version}"
    yield from (title, "-" * len(title), "")
    yield from (*list_table(speed(results)), "")
    yield from ("Milliseconds of kernels in a step as it is, by kind of layer:", "")
    yield from (*list_table(kernels(results)), "")
    yield from notes(results)
    yield ""


def speed(results: Results) -> Iterator[list[str]]:
    """Yield the rows of the table of speed and memory."""
    simulations = {}
    if SIMULATED.exists():
        simulations = yaml.safe_load(SIMULATED.read_text())
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
        library = results.get(f"{name}.ours", {})
        transformers = results.get(f"{name}.transformers", {})
        simulated_peak = NOTHING
        simulated_speed = NOTHING
        if name in simulations:
            simulation = simulations[name]
            simulated_peak = f"{simulation['peak_gib']:.1f}"
            simulated_speed = f"{case.tokens / simulation['seconds']:,.0f}"
        host_waits = NOTHING
        if "host_syncs" in library:
            host_waits = str(sum(library["host_syncs"].values()))
        yield [
            case.title,
            number(library, "eager", "tokens_per_second"),
            number(library, "compiled", "tokens_per_second"),
            number(library, "compiled", "mfu", form="{:.0%}"),
            number(library, "eager", "peak_gib", form="{:.1f}"),
            simulated_peak,
            simulated_speed,
            host_waits,
            number(transformers, "eager", "tokens_per_second"),
            number(transformers, "compiled", "tokens_per_second"),
            number(transformers, "eager", "peak_gib", form="{:.1f}"),
        ]


def kernels(results: Results) -> Iterator[list[str]]:
    """Yield the rows of the table of kernels; kinds of layers are in the order of their time over all cases."""
    times_of_cases: dict[str, dict[str, float]] = {}  # name -> kind of layer -> milliseconds
    total_times: Counter[str] = Counter()
    for name in cases():
        times = results.get(f"{name}.ours", {}).get("kernels_ms")
        if times is not None:
            times_of_cases[name] = times
            total_times.update(times)
    kinds = sorted(total_times, key=lambda kind: (-total_times[kind], kind))
    yield ["case", *kinds]
    for name, times in times_of_cases.items():
        row = [cases()[name].title]
        for kind in kinds:
            row.append(f"{times[kind]:,.1f}" if kind in times else NOTHING)
        yield row


def notes(results: Results) -> Iterator[str]:
    """Yield lines about sampling, tests and errors."""
    for name, case in cases().items():
        for side in ("ours", "transformers"):
            split = results.get(f"{name}.{side}", {}).get("eager", {})
            if "generate_seconds" in split:
                yield (
                    f"- {case.title}, {side}: {split['generate_seconds']:.2f} s of sampling "
                    f"({split['generated_per_second']:,.0f} tokens/s) and {split['train_seconds']:.2f} s of training."
                )
    tests = [result for name, result in results.items() if name.startswith("tests.")]
    if tests:
        num_passed = sum(result["passed"] for result in tests)
        num_failed = sum(len(result["failed"]) for result in tests)
        yield f"- GPU tests: {num_passed} passed, {num_failed} failed."
    for name, result in results.items():
        if "error" in result:
            # In one line, without the quotation marks of reStructuredText.
            message = " ".join(result["error"].replace("`", " ").split())
            yield f"- {name}: ``{message}``"


def number(result: dict[str, Any], stage: str, name: str, form: str = "{:,.0f}") -> str:
    """Return a number of a result as the text of a cell; a dash if it was not measured."""
    value = result.get(stage, {}).get(name)
    if value is None:
        return NOTHING
    return form.format(value)


def simulate_cases() -> dict[str, dict[str, float]]:
    """Return peak and step time of each case, simulated by its recipe with the benchmark's settings."""
    from torchtune._recipe_registry import recipe_named_by
    from torchtune.config import load_and_check
    from torchtune.estimate import build_on_meta, estimate_run, parse_cluster
    from torchtune.estimate._roofline import step_time
    from torchtune.estimate._simulate import simulate

    _, device = parse_cluster(DEVICE)
    simulations = {}
    for name, case in cases().items():
        if case.config is None:
            continue
        config = ROOT / "recipes" / "configs" / f"{case.config}.yaml"
        main = recipe_named_by(config).load_main()
        settings = load_and_check(config, overrides(case), main)
        if case.layers is None:
            estimate = estimate_run(main, settings)
            peak = estimate.peak
            work = estimate.work.values()
        else:  # the benchmark has the first layers alone
            model, _, _ = build_on_meta(settings)
            layers = {("model", "text"): range(case.layers)}
            observer = simulate(main, settings, kept=layers, models={"model": model})
            peak = max(moment.total for moment in observer.ledger.peaks().values())
            work = observer.work.values()
        seconds = step_time(work, device).total
        simulations[name] = {"peak_gib": round(peak / 2**30, 2), "seconds": round(seconds, 3)}
        print(name, simulations[name], flush=True)
    return simulations


def overrides(case: Any) -> list[str]:
    """Return the benchmark's settings, as overrides of a config."""
    settings = [
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
        settings += [
            "model.lora_attn_modules=[q_proj,k_proj,v_proj,output_proj]",
            "model.lora_rank=16",
            f"model.apply_lora_to_mlp={'moe' not in case.builder}",  # not to experts
        ]
    return settings


if __name__ == "__main__":
    SIMULATED.write_text(yaml.safe_dump(simulate_cases(), sort_keys=False), encoding="utf-8")

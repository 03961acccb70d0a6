"""The report of a run: ``report.html``, one file without a network, and ``report.json``."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jinja2

from torchtune.config import redact_secrets
from torchtune.reports._charts import HEIGHT, WIDTH, Points, bar_chart, line_chart, short_number, smooth, thin
from torchtune.reports._judge import duration, judge
from torchtune.reports._run_folder import RunFolder
from torchtune.training.metric_logging import flatten_dict
from torchtune.utils import atomic_write, valid_json

# Title -> metrics of one chart; names that end with / or _ are prefixes, and every other metric has its own chart.
_CHARTS = {
    "Loss": ("loss", "val_loss"),
    "Loss by dataset": ("loss/",),
    "Validation by dataset": ("val_loss/",),
    "Reward": ("rewards/total", "val_rewards/total"),
    "Length of answers, tokens": ("answers/tokens", "val_answers/tokens"),
    "Learning rate": ("lr",),
    "Gradient norm before clipping": ("grad_norm",),
    "Tokens per second": ("tokens_per_second_per_gpu", "trained_tokens_per_second"),
    "Peak memory, GiB": ("peak_memory_",),
    "Share of the time lost": ("lost_to_",),
}
_SMOOTHED = ("loss", "rewards/total")
_HIDDEN = ("processed_tokens", "trained_tokens", "elapsed_seconds", "skipped_steps")
_EVENTS = 60
_COLOURS = {"learned": "good", "same within noise": "warning", "diverged": "bad", "nothing trained": "bad"}


def write_report(run: RunFolder, *, price_per_hour: float | None = None) -> Path:
    """Write ``report.html`` and ``report.json`` into the folder of a run, atomically; return the path of the page.

    Args:
        run: the run, finished or not.
        price_per_hour: price of an hour of all its machines, for the cost.

    Raises:
        UserError: the files cannot be written.
    """
    facts = _facts(run, price_per_hour)
    curves = {name: thin(_curve(run, name), 500) for name in _metrics(run)}
    with atomic_write(run.path / "report.json", "w") as file:
        json.dump(valid_json({**facts, "curves": curves}), file, indent=1, ensure_ascii=False, default=str)
    charts = [chart for chart in _charts(run) if chart is not None]
    page = render("report.html", **facts, charts=charts, histogram=_histogram(facts["data"]))
    with atomic_write(run.path / "report.html", "wb") as file:
        file.write(page.encode("utf-8", "replace"))
    return run.path / "report.html"


def render(template: str, **values: Any) -> str:
    """Render a page; every text is escaped, and secrets that settings have read are redacted."""
    folder = jinja2.FileSystemLoader(Path(__file__).parent / "templates")
    environment = jinja2.Environment(loader=folder, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"short": short_number, "duration": duration}
    return redact_secrets(environment.get_template(template).render(width=WIDTH, height=HEIGHT, **values))


def _facts(run: RunFolder, price_per_hour: float | None) -> dict[str, Any]:
    verdict, start = judge(run), run.start
    tokens = {name: run.counted(f"{name}_tokens") for name in ("processed", "trained")}
    return {
        "run": str(run.path),
        "recipe": run.recipe,
        "state": run.state,
        "verdict": {"word": verdict.word, "reason": verdict.reason, "colour": _COLOURS.get(verdict.word, "")},
        "interval": None if verdict.interval is None else vars(verdict.interval),
        "steps": {"done": run.last_step, "total": start.get("total_steps")},
        "seconds": run.seconds,
        "cost": None if price_per_hour is None else price_per_hour * run.seconds / 3600,
        "tokens": tokens,
        "data": start.get("data", {}),
        "left_out": dict(run.rows_left_out),
        "answers": list(_answers(run)),
        "events": list(_events(run)),
        "checkpoints": run.checkpoints,
        "clipped": _clipped_share(run),
        "config": start.get("config"),
        "changed": start.get("changed", {}),
        "settings": flatten_dict(run.settings),
        "parameters": start.get("parameters"),
        "environment": {
            **start.get("machine", {}),
            **start.get("code", {}),
            "processes": start.get("processes"),
            "parallel": start.get("parallel"),
        },
        "metrics_file": run.metrics_file,
        "logger": str((run.settings.get("metric_logger") or {}).get("_component_", "none")).rpartition(".")[2],
    }


def _answers(run: RunFolder) -> Iterator[dict[str, str | None]]:
    """Yield the prompts with their answers before and after training, None where there is none."""
    before, after = ((run.measured(when) or {}).get("answers", []) for when in ("before", "after"))
    found = {answer["prompt"]: answer["answer"] for answer in after}
    for answer in before or after:
        is_first = bool(before)
        yield answer | {"before": answer["answer"] if is_first else None, "after": found.get(answer["prompt"])}


def _events(run: RunFolder) -> Iterator[dict[str, Any]]:
    """Yield what happened, in the order of the steps: starts, skips, saves, slow steps, the end."""
    found: list[tuple[float, str, str]] = []
    for event in run.events:
        step = event.get("step", 0)
        if event["event"] == "start":
            found.append((step, "started" if not step else "resumed", f"by process {event.get('machine', {}).get('host')}"))
        elif event["event"] == "end":
            found.append((step, "failed" if "error" in event else "ended", event.get("sentence", f"exit code {event.get('code')}")))
    for record in run.skipped_steps:
        rows = ", ".join(" ".join(map(str, row.values())) for row in record.get("rows", [])[:8])
        found.append((record["step"], "skipped", f"{record.get('reason')}{f'; rows: {rows}' if rows else ''}"))
    for step, seconds, median in run.slow_steps():
        found.append((step, "slow", f"{seconds:.2g} s, the median is {median:.2g} s"))
    if run.best is not None:
        found.append((run.best.get("step", 0), "best", f"{run.best.get('value')}, saved as {run.best.get('checkpoint')}"))
    found.sort(key=lambda event: event[0])
    for step, kind, text in found[:_EVENTS]:
        yield {"step": step, "kind": kind, "text": text}
    if len(found) > _EVENTS:
        yield {"step": found[_EVENTS][0], "kind": "more", "text": f"{len(found) - _EVENTS:,} more events"}


def _clipped_share(run: RunFolder) -> float | None:
    limit, norms = run.settings.get("clip_grad_norm"), [y for _, y in _curve(run, "grad_norm")]
    return None if limit is None or not norms else sum(norm > limit for norm in norms) / len(norms)


def _metrics(run: RunFolder) -> list[str]:
    names = {name: None for values in run.steps.values() for name in values}
    return [name for name in names if name not in _HIDDEN]


def _curve(run: RunFolder, name: str) -> Points:
    return [(step, values[name]) for step, values in run.steps.items() if name in values]


def _charts(run: RunFolder) -> Iterator[dict[str, Any] | None]:
    rest = _metrics(run)
    groups = {}
    for title, wanted in _CHARTS.items():
        groups[title] = [name for name in rest if name in wanted or (name.startswith(wanted) and wanted[0][-1] in "/_")]
        rest = [name for name in rest if name not in groups[title]]
    limit = run.settings.get("clip_grad_norm")
    memory = run.start.get("machine", {}).get("memory_gib")
    lines = {"Gradient norm before clipping": ("clip_grad_norm", limit), "Peak memory, GiB": ("of the device", memory)}
    for title, names in {**groups, **{name: [name] for name in rest}}.items():
        series: dict[str, Points] = {}
        for name in names:
            points = _curve(run, name)
            if name in _SMOOTHED and len(points) > 40:
                series[f"{name} (raw)"] = points
                points = smooth([point for point in points if math.isfinite(point[1])])
            series[name] = points
        label, value = lines.get(title, ("", None))
        yield line_chart(title, series, line=None if value is None else (label, float(value)))


def _histogram(data: dict[str, Any]) -> dict[str, Any] | None:
    lengths = data.get("dataset", {}).get("lengths")
    return None if lengths is None else bar_chart("Length of rows", lengths["counts"], lengths["edges"], "tokens")

"""The report of a run: ``report.html``, a single file that needs no network, and ``report.json``."""

import functools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jinja2

from torchtune.config import redact_secrets
from torchtune.reports._charts import bar_chart, duration, line_chart, short_number, smooth, thin
from torchtune.reports._verdict import judge
from torchtune.reports._run_folder import RunFolder
from torchtune.training.metric_logging import flatten_dict
from torchtune.utils import atomic_write, valid_json, write_json

# Title -> pattern of the metrics in one chart; any other metric has its own chart.
_CHARTS = {
    "Loss": r"(val_)?loss",
    "Loss by dataset": r"loss/.*",
    "Validation by dataset": r"val_loss/.*",
    "Reward": r"(val_)?rewards/total",
    "Length of answers, tokens": r"(val_)?answers/tokens",
    "Learning rate": r"lr",
    "Gradient norm before clipping": r"grad_norm",
    "Tokens per second": r".*tokens_per_second.*",
    "Peak memory, GiB": r"peak_memory_.*",
    "Share of the time lost": r"lost_to_.*",
}
_SMOOTHED, _MANY = ("loss", "rewards/total"), 40
_HIDDEN = ("processed_tokens", "trained_tokens", "elapsed_seconds", "skipped_steps")
_IN_JSON = "recipe state last_step seconds start end best settings rows_left_out skipped_steps checkpoints".split()


def write_report(run: RunFolder, *, price_per_hour: float | None = None, estimated_gib: float | None = None) -> Path:
    """Write ``report.html`` and ``report.json`` into the folder of a run, atomically; return the path of the page.

    Args:
        run: the run, finished or not.
        price_per_hour: price per hour of all machines of the run, to compute its cost.
        estimated_gib: estimated peak memory of a device, drawn next to the measured peak.

    Raises:
        UserError: the files cannot be written.

    Example:
        >>> torchtune.reports.write_report(torchtune.reports.RunFolder("/tmp/run")).name  # doctest: +SKIP
        'report.html'
    """
    verdict, names = judge(run), {name: None for values in run.steps.values() for name in values}
    before, after = run.measured("before"), run.measured("after")
    answers = {answer["prompt"]: answer["answer"] for answer in after.get("answers", [])}
    shown = [answer | {"after": answers.get(answer["prompt"])} for answer in before.get("answers", [])]
    cost = None if price_per_hour is None else price_per_hour * run.seconds / 3600
    facts = {name: getattr(run, name) for name in _IN_JSON}
    curves = {name: thin(run.curve(name), 500) for name in names}
    facts |= {
        "verdict": vars(verdict),
        "cost": cost,
        "estimated_gib": estimated_gib,
        "before": before,
        "after": after,
        "curves": curves,
    }
    plain = json.loads(redact_secrets(json.dumps(facts, default=vars)))
    write_json(run.path / "report.json", valid_json(plain))
    lengths = run.start.get("data", {}).get("dataset", {}).get("lengths")
    charts = list(_charts(run, [name for name in names if name not in _HIDDEN], estimated_gib))
    values = {"run": run, "verdict": verdict, "cost": cost, "answers": shown, "charts": charts}
    values["estimated_gib"] = estimated_gib
    histogram = lengths and bar_chart("Length of rows", lengths["counts"], lengths["edges"], "tokens")
    write_page("report.html", run.path / "report.html", histogram=histogram, **values)
    return run.path / "report.html"


def write_page(template: str, path: Path, **values: Any) -> None:
    """Render a page, in which every text is escaped and secrets are redacted, and write it atomically."""
    page = redact_secrets(environment(autoescape=True).get_template(template).render(**values))
    with atomic_write(path) as file:
        file.write(page.encode("utf-8", "replace"))


@functools.cache
def environment(*, autoescape: bool) -> jinja2.Environment:
    """Return the Jinja environment of the templates; the filters ``code`` and ``plain`` quote text for Markdown."""
    loader = jinja2.FileSystemLoader(Path(__file__).parent / "templates")
    found = jinja2.Environment(loader=loader, autoescape=autoescape, trim_blocks=True, lstrip_blocks=True)
    found.filters |= {"short": short_number, "duration": duration, "flat": flatten_dict, "code": _code, "plain": _plain}
    return found


def _code(value: Any) -> str:
    text = " ".join(str(value).split()).replace("`", "'").replace("|", "\\|")
    return f"`{text[:300]}`"


def _plain(value: Any) -> str:
    return re.sub(r"([\\`*_\[\]<>|#])", r"\\\1", " ".join(str(value).split()))


def _charts(run: RunFolder, names: list[str], estimated_gib: float | None) -> Iterator[dict[str, Any]]:
    limits = {
        "Gradient norm before clipping": ("clipped above", run.settings.get("clip_grad_norm")),
        "Peak memory, GiB": ("estimate", estimated_gib),
    }
    for title, pattern in {**_CHARTS, **{name: re.escape(name) for name in names}}.items():
        series = {}
        for name in [name for name in names if re.fullmatch(pattern, name)]:
            names.remove(name)
            series[name] = points = run.curve(name)
            if name in _SMOOTHED and len(points) > _MANY:
                series |= {f"{name} (raw)": points, name: smooth(points)}
        chart = line_chart(title, series, limit=limits.get(title, ("", None)))
        if chart["lines"]:
            yield chart

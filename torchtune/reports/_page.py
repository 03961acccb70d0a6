"""The report of a run: ``report.html``, a page without network that draws charts as inline SVG, and ``report.json``."""

import functools
import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2

from torchtune.config import redact_secrets
from torchtune.reports._run_folder import RunFolder
from torchtune.reports._verdict import judge
from torchtune.training.metric_logging import flatten_dict
from torchtune.utils import atomic_write, valid_json, write_json

Points = Sequence[tuple[float, float]]
_MOST_POINTS = 300
_MOST_LINES = 6
_ROUND_FACTORS = (1, 2, 2.5, 5, 10)
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
# Metrics of more points than this are smoothed.
_SMOOTHED = ("loss", "rewards/total")
_FEW_POINTS = 40
_HIDDEN = ("processed_tokens", "trained_tokens", "elapsed_seconds", "skipped_steps")
# Attributes of the run in report.json.
_IN_JSON = (
    "recipe",
    "state",
    "last_step",
    "seconds",
    "start",
    "end",
    "best",
    "settings",
    "rows_left_out",
    "skipped_steps",
    "checkpoints",
)
_POINTS_IN_JSON = 500


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
    verdict = judge(run)
    metrics: dict[str, None] = {}  # in the order of their first values
    for values in run.steps.values():
        metrics |= dict.fromkeys(values)
    cost = None
    if price_per_hour is not None:
        cost = price_per_hour * run.seconds / 3600

    facts = {name: getattr(run, name) for name in _IN_JSON}
    facts["verdict"] = vars(verdict)
    facts["cost"] = cost
    facts["estimated_gib"] = estimated_gib
    facts["before"] = run.measured("before")
    facts["after"] = run.measured("after")
    facts["curves"] = {name: thin(run.curve(name), _POINTS_IN_JSON) for name in metrics}
    # `default` writes the interval of the verdict, a dataclass. Secrets are redacted in the whole text.
    plain_facts = json.loads(redact_secrets(json.dumps(facts, default=vars)))
    write_json(run.path / "report.json", valid_json(plain_facts))

    shown_metrics = [name for name in metrics if name not in _HIDDEN]
    histogram = None
    training_data = run.start.get("data", {}).get("dataset", {})
    lengths = training_data.get("lengths")
    if lengths:
        histogram = bar_chart("Length of rows", lengths["counts"], lengths["edges"], "tokens")
    write_page(
        "report.html",
        run.path / "report.html",
        run=run,
        verdict=verdict,
        cost=cost,
        estimated_gib=estimated_gib,
        answers=_answers_before_and_after(run),
        charts=_charts(run, shown_metrics, estimated_gib),
        histogram=histogram,
    )
    return run.path / "report.html"


def _answers_before_and_after(run: RunFolder) -> list[dict[str, Any]]:
    """Return the answers before training, each with the answer to the same prompt after it."""
    answers_after = {}
    for answer in run.measured("after").get("answers", []):
        answers_after[answer["prompt"]] = answer["answer"]
    answers = []
    for answer in run.measured("before").get("answers", []):
        answers.append({**answer, "after": answers_after.get(answer["prompt"])})
    return answers


def write_page(template: str, path: Path, **values: Any) -> None:
    """Render a page, in which every text is escaped and secrets are redacted, and write it atomically."""
    page = redact_secrets(environment(autoescape=True).get_template(template).render(**values))
    with atomic_write(path) as file:
        file.write(page.encode("utf-8", "replace"))


@functools.cache
def environment(*, autoescape: bool) -> jinja2.Environment:
    """Return the Jinja environment of the templates; the filters ``code`` and ``plain`` quote text for Markdown."""
    loader = jinja2.FileSystemLoader(Path(__file__).parent / "templates")
    templates = jinja2.Environment(loader=loader, autoescape=autoescape, trim_blocks=True, lstrip_blocks=True)
    templates.filters |= {
        "short": short_number,
        "duration": duration,
        "flat": flatten_dict,
        "code": _quote_code,
        "plain": _quote_text,
    }
    return templates


def _quote_code(value: Any) -> str:
    """Return a value as code in a table of Markdown."""
    text = " ".join(str(value).split())  # a line break would end the row
    text = text.replace("`", "'").replace("|", "\\|")
    return f"`{text[:300]}`"


def _quote_text(value: Any) -> str:
    """Return a value as text of Markdown, with the characters escaped that would format it."""
    text = " ".join(str(value).split())
    return re.sub(r"([\\`*_\[\]<>|#])", r"\\\1", text)


def _charts(run: RunFolder, metrics: list[str], estimated_gib: float | None) -> list[dict[str, Any]]:
    """Return the charts of a run: those of ``_CHARTS``, and one for each other metric."""
    limits = {
        "Gradient norm before clipping": ("clipped above", run.settings.get("clip_grad_norm")),
        "Peak memory, GiB": ("estimate", estimated_gib),
    }
    metrics_by_title: dict[str, list[str]] = {title: [] for title in _CHARTS}  # in the order of the page
    for name in metrics:
        title = name  # a metric of no pattern has a chart of its own
        for chart_title, pattern in _CHARTS.items():
            if re.fullmatch(pattern, name):
                title = chart_title
                break
        metrics_by_title.setdefault(title, []).append(name)
    charts = []
    for title, names in metrics_by_title.items():
        series = {}
        for name in names:
            points = run.curve(name)
            if name in _SMOOTHED and len(points) > _FEW_POINTS:
                series[name] = smooth(points)
                series[f"{name} (raw)"] = points
            else:
                series[name] = points
        chart = line_chart(title, series, limit=limits.get(title, ("", None)))
        if chart["lines"]:  # none without metrics of the chart, or without a finite value
            charts.append(chart)
    return charts


def smooth(points: Points) -> Points:
    """Return the exponential moving average of the finite points, over about a twentieth of them."""
    finite = [(x, y) for x, y in points if math.isfinite(y)]
    decay = 1 - 1 / max(len(finite) / 20, 1)  # a mean over about 1 / (1 - decay) points
    total = 0.0
    weight = 0.0
    smoothed = []
    for x, y in finite:
        total = decay * total + y
        weight = decay * weight + 1  # the sum of the weights so far, so that the first points are not pulled to 0
        smoothed.append((x, total / weight))
    return smoothed


def thin(points: Sequence[Any], count: int = _MOST_POINTS) -> list[Any]:
    """Return at most about ``count`` points, the last one among them."""
    if len(points) == 0:
        return []
    stride = math.ceil(len(points) / count)
    return [*points[:-1:stride], points[-1]]


def line_chart(
    title: str, series: Mapping[str, Points], x_label: str = "step", limit: tuple[str, Any] = ("", None)
) -> dict[str, Any]:
    """Return a line chart; ``lines`` is empty without a finite point.

    Args:
        title: title.
        series: label -> points; a label that ends with ``(raw)`` is drawn faintly.
        x_label: name of the x axis.
        limit: label and height of a horizontal line, drawn if the values come near it; None draws none.
    """
    drawn = dict(list(series.items())[:_MOST_LINES])
    lines = {}
    positions = []
    heights = []
    not_finite = []
    for label, points in drawn.items():
        finite = []
        for x, y in points:
            positions.append(x)  # marks of values that are not finite are on the axis, too
            if math.isfinite(y):
                finite.append((x, y))
                heights.append(y)
            else:
                not_finite.append(x)
        if finite:
            lines[label] = thin(finite)
    # A limit far above the values would press them onto the x axis.
    _, limit_height = limit
    drawn_limit = None
    if heights and limit_height is not None and max(heights) / 4 < limit_height < 2 * max(heights):
        drawn_limit = limit
        heights.append(limit_height)
    return {
        "title": title,
        "x": _axis(positions),
        "x_label": x_label,
        "y": _axis(heights, margin=0.06),
        "lines": lines,
        "bad": thin(not_finite),
        "limit": drawn_limit,
        "left_out": len(series) - len(drawn),
    }


def _axis(values: Sequence[float], margin: float = 0.0) -> dict[str, Any]:
    """Return the ends of an axis, and three to six round numbers between them.

    Args:
        values: coordinates of the points.
        margin: share of their range that is left free at both ends; the axis of positive values begins at 0 or above.
    """
    low = min(values, default=0.0)
    high = max(values, default=1.0)
    free = margin * (high - low)
    if high == low:  # an axis must have a length
        free = abs(high) * 0.1 or 1.0
    top = high + free
    bottom = low - free
    if low >= 0:  # the margin must not suggest negative values
        bottom = max(bottom, 0.0)
    # The smallest round step of which four reach from one end to the other; the last factor, 10, always does.
    magnitude = 10 ** math.floor(math.log10((top - bottom) / 4))
    for factor in _ROUND_FACTORS:
        step = magnitude * factor
        if 4 * step >= top - bottom:
            break
    first_tick = math.ceil(bottom / step)
    last_tick = math.floor(top / step)
    ticks = [step * number for number in range(first_tick, last_tick + 1)]
    return {"low": bottom, "high": top, "ticks": ticks}


def bar_chart(title: str, counts: Sequence[int], edges: Sequence[float], x_label: str) -> dict[str, Any]:
    """Return a histogram."""
    bars = list(zip(edges, edges[1:], counts, strict=False))
    return {"title": title, "x": _axis(edges), "x_label": x_label, "y": _axis([0, *counts]), "bars": bars}


def short_number(value: float) -> str:
    """Return a number of few characters: ``1.5k``, ``2e-05``."""
    for size, letter in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.4g}{letter}"
    return f"{value:.4g}"


def duration(seconds: float) -> str:
    """Return text such as ``2 h 5 min``."""
    minutes, seconds = divmod(seconds, 60)
    hours, minutes = divmod(int(minutes), 60)
    if hours:
        return f"{hours} h {minutes} min"
    if minutes:
        return f"{minutes} min {seconds:.0f} s"
    return f"{seconds:.1f} s"

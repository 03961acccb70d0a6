"""Geometry of the charts of a page; the template draws them as inline SVG."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

Points = Sequence[tuple[float, float]]

# Size of a chart and its margins, in SVG units.
WIDTH, HEIGHT = 480, 210
_LEFT, _RIGHT, _TOP, _BOTTOM = 54, 12, 10, 24
_POINTS, _SERIES = 300, 6


def smooth(points: Points) -> Points:
    """Return the exponential moving average over about a twentieth of the points, without the bias of its start."""
    decay, total, weight, found = 1 - 1 / max(len(points) / 20, 1), 0.0, 0.0, []
    for x, y in points:
        total, weight = decay * total + y, decay * weight + 1
        found.append((x, total / weight))
    return found


def thin(points: Points, count: int = _POINTS) -> Points:
    """Return at most about ``count`` points, the last one among them."""
    stride = max(math.ceil(len(points) / count), 1)
    return [*points[:-1][::stride], *points[-1:]]


def line_chart(
    title: str, series: Mapping[str, Points], x_label: str = "step", line: tuple[str, float] | None = None
) -> dict[str, Any] | None:
    """Return the geometry of a line chart, or None without a finite point.

    Args:
        title: title.
        series: label -> points; the raw values of a smoothed series end with ``(raw)`` and are drawn faintly.
        x_label: name of the x axis.
        line: label and value of a horizontal line, drawn if it is within reach of the values.
    """
    kept = {name: [(x, y) for x, y in points if math.isfinite(y)] for name, points in list(series.items())[:_SERIES]}
    kept = {name: points for name, points in kept.items() if points}
    if not kept:
        return None
    xs, ys = zip(*(point for points in kept.values() for point in points), strict=True)
    low, high = min(ys), max(ys)
    if line is not None and low - (high - low) <= line[1] <= 2 * high:
        low, high = min(low, line[1]), max(high, line[1])
    else:
        line = None
    margin = 0.06 * (high - low) or abs(high) * 0.1 or 1.0
    floor = 0.0 if low >= 0 else -math.inf
    x, y = _scale(min(xs), max(xs), _LEFT, WIDTH - _RIGHT), _scale(max(low - margin, floor), high + margin, HEIGHT - _BOTTOM, _TOP)
    bad = [point[0] for points in series.values() for point in points if not math.isfinite(point[1])]
    return {
        "title": title,
        "x_label": x_label,
        "left_out": len(series) - len(series.keys() & set(list(series)[:_SERIES])),
        "lines": [
            {
                "name": name.removesuffix(" (raw)"),
                "raw": name.endswith("(raw)"),
                "points": " ".join(f"{x(a):.1f},{y(b):.1f}" for a, b in thin(points)),
                "dots": [(f"{x(a):.1f}", f"{y(b):.1f}", f"{x_label} {a:,.0f}: {b:.4g}") for a, b in points]
                if len(points) <= 40
                else [],
                "last": f"{points[-1][1]:.4g}",
            }
            for name, points in kept.items()
        ],
        "bad": [f"{x(at):.1f}" for at in bad if min(xs) <= at <= max(xs)][:_POINTS],
        "x_ticks": [(f"{x(at):.1f}", short_number(at)) for at in _ticks(min(xs), max(xs))],
        "y_ticks": [(f"{y(at):.1f}", short_number(at)) for at in _ticks(max(low - margin, floor), high + margin)],
        "line": None if line is None else {"name": line[0], "y": f"{y(line[1]):.1f}"},
    }


def bar_chart(title: str, counts: Sequence[int], edges: Sequence[float], x_label: str) -> dict[str, Any]:
    """Return the geometry of a histogram."""
    x, y = _scale(edges[0], edges[-1], _LEFT, WIDTH - _RIGHT), _scale(0, max([*counts, 1]), HEIGHT - _BOTTOM, _TOP)
    return {
        "title": title,
        "x_label": x_label,
        "bars": [
            {
                "x": f"{x(edges[i]):.1f}",
                "y": f"{y(count):.1f}",
                "width": f"{max(x(edges[i + 1]) - x(edges[i]) - 2, 1):.1f}",
                "height": f"{HEIGHT - _BOTTOM - y(count):.1f}",
                "text": f"{edges[i]:,.0f} to {edges[i + 1]:,.0f} {x_label}: {count:,}",
            }
            for i, count in enumerate(counts)
        ],
        "x_ticks": [(f"{x(at):.1f}", short_number(at)) for at in _ticks(edges[0], edges[-1])],
        "y_ticks": [(f"{y(at):.1f}", short_number(at)) for at in _ticks(0, max([*counts, 1]))],
    }


def short_number(value: float) -> str:
    """Return a number of few characters: ``1.5k``, ``2e-05``."""
    for size, letter in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.4g}{letter}"
    return f"{value:.4g}"


def _scale(low: float, high: float, start: float, end: float) -> Any:
    span = high - low or 1.0
    return lambda value: start + (value - low) / span * (end - start)


def _ticks(low: float, high: float) -> list[float]:
    """Return three to six round numbers within a range."""
    if high <= low:
        return [low]
    raw = (high - low) / 4
    unit = 10 ** math.floor(math.log10(raw))
    step = next(unit * factor for factor in (1, 2, 2.5, 5, 10) if unit * factor >= raw)
    return [step * number for number in range(math.ceil(low / step), math.floor(high / step) + 1)]

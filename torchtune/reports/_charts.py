"""Points and axes of charts; the templates draw them as inline SVG."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

Points = Sequence[tuple[float, float]]
_POINTS, _SERIES = 300, 6


def smooth(points: Points) -> Points:
    """Return the exponential moving average of the finite points, over about a twentieth of them."""
    finite = [(x, y) for x, y in points if math.isfinite(y)]
    decay, total, weight, found = 1 - 1 / max(len(finite) / 20, 1), 0.0, 0.0, []
    for x, y in finite:
        total, weight = decay * total + y, decay * weight + 1
        found.append((x, total / weight))
    return found


def thin(points: Points, count: int = _POINTS) -> Points:
    """Return at most about ``count`` points, the last one among them."""
    return [*points[: -1 : math.ceil(len(points) / count) or 1], *points[-1:]]


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
    shown = dict(list(series.items())[:_SERIES])
    finite = {name: [point for point in points if math.isfinite(point[1])] for name, points in shown.items()}
    finite = {name: points for name, points in finite.items() if points}
    heights = [y for points in finite.values() for _, y in points]
    limit = limit if heights and limit[1] is not None and max(heights) / 4 < limit[1] < 2 * max(heights) else None
    heights += [limit[1]] if limit else []
    bad = [x for points in shown.values() for x, y in points if not math.isfinite(y)]
    return {
        "title": title,
        "x": _axis([x for points in shown.values() for x, _ in points]),
        "x_label": x_label,
        "y": _axis(heights, margin=0.06),
        "lines": {name: thin(points) for name, points in finite.items()},
        "bad": thin(bad),
        "limit": limit,
        "left_out": len(series) - len(shown),
    }


def _axis(values: Sequence[float], margin: float = 0.0) -> dict[str, Any]:
    """Return the ends of an axis, and three to six round numbers between them."""
    low, high = min(values, default=0.0), max(values, default=1.0)
    extra = margin * (high - low) or (abs(high) * 0.1 or 1.0) * (high == low)
    low, high = low - extra if low < 0 else max(low - extra, 0.0), high + extra
    unit = 10 ** math.floor(math.log10((high - low) / 4))
    step = next(unit * factor for factor in (1, 2, 2.5, 5, 10) if 4 * unit * factor >= high - low)
    ticks = [step * number for number in range(math.ceil(low / step), math.floor(high / step) + 1)]
    return {"low": low, "high": high, "ticks": ticks}


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
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {seconds:.0f} s" if minutes else f"{seconds:.1f} s"

"""Points and axes of charts; the templates draw them as inline SVG."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

Points = Sequence[tuple[float, float]]
_MOST_POINTS = 300
_MOST_LINES = 6
_ROUND_FACTORS = (1, 2, 2.5, 5, 10)


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
            positions.append(x)
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
    if high == low:
        free = abs(high) * 0.1 or 1.0
    top = high + free
    bottom = low - free
    if low >= 0:
        bottom = max(bottom, 0.0)
    # The smallest round step of which four reach from one end to the other; the last factor, 10, always does.
    magnitude = 10 ** math.floor(math.log10((top - bottom) / 4))
    step = next(magnitude * factor for factor in _ROUND_FACTORS if 4 * magnitude * factor >= top - bottom)
    ticks = [step * number for number in range(math.ceil(bottom / step), math.floor(top / step) + 1)]
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

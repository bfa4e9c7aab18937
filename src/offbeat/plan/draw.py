"""Draw time against bandwidth, in the terminal or as SVG."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from offbeat.base.units import as_rate, as_time
from offbeat.plan.prediction import Prediction, varied_link
from offbeat.plan.ranking import Plan

_COLOURS = ("#3b6fb6", "#d1603d", "#4f9d69", "#8e6bb5", "#b0892c", "#c2557f", "#4aa3a8", "#7a7a7a")
_MARGIN, _LEAST, _MOST = 11, 24, 120  # columns: left of the curves, fewest for curves, most in all
_WIDTH, _HEIGHT, _LEFT, _TOP, _BOTTOM = 760, 420, 70, 20, 50


class Paper:
    """Logarithmic axes: bandwidth and seconds to places between 0 and 1."""

    def __init__(self, plan: Plan) -> None:
        points = [point for p in plan.predictions for point in p.curve]
        self._x = _range([b for b, _ in points])
        self._y = _range([s for _, s in points])

    def place(self, bandwidth: float, seconds: float) -> tuple[float, float]:
        return _share(bandwidth, self._x), _share(seconds, self._y)

    @property
    def times(self) -> tuple[float, float]:
        return math.exp(self._y[0]), math.exp(self._y[1])


def chart(plan: Plan, *, width: int = 80, height: int = 16) -> str:
    """Draw the curves as letters; `a` is the fastest method. The bar marks the plan's own link.

    No line is wider than `width`, except for long names and for widths too small for a chart.
    """
    curves = [p for p in plan.predictions if p.curve]
    if not curves:
        return "One worker sends nothing: there is no bandwidth to vary."
    paper = Paper(plan)
    width = max(_LEAST, min(width, _MOST) - _MARGIN)
    cells = [[" "] * width for _ in range(height)]
    here = paper.place(varied_link(plan.cluster.network), 1.0)[0]
    if 0 <= here <= 1:
        for row in cells:
            row[round(here * (width - 1))] = "│"
    for index, prediction in reversed(list(enumerate(curves))):
        for x in range(width):
            y = paper.place(1.0, _at(prediction, x / (width - 1)))[1]
            cells[round((1 - y) * (height - 1))][x] = chr(ord("a") + index % 26)
    low, high = paper.times
    links = [b for b, _ in curves[0].curve]
    labels = [as_time(high), *[""] * (height - 2), as_time(low)]
    lines = [f"{label:>9} ┤{''.join(row)}" for label, row in zip(labels, cells, strict=True)]
    ends = as_rate(links[0]), as_rate(links[-1])
    lines.append(f"{'':>10}└{'─' * width}")
    lines.append(f"{'':>11}{ends[0]}{ends[1]:>{width - len(ends[0])}}")
    lines += [f"{chr(ord('a') + i % 26)}  {p.method}" for i, p in enumerate(curves)]
    return "\n".join(lines)


def picture(plan: Plan) -> str:
    """Draw the same as SVG."""
    paper = Paper(plan)
    curves = [p for p in plan.predictions if p.curve]
    inner, deep = _WIDTH - _LEFT - 20, _HEIGHT - _TOP - _BOTTOM
    parts = []

    def at(bandwidth: float, seconds: float) -> str:
        x, y = paper.place(bandwidth, seconds)
        return f"{_LEFT + x * inner:.1f},{_TOP + (1 - y) * deep:.1f}"

    for bandwidth in _decades([b for b, _ in curves[0].curve]) if curves else []:
        x = at(bandwidth, 1.0).split(",")[0]
        parts.append(f'<line x1="{x}" y1="{_TOP}" x2="{x}" y2="{_TOP + deep}" class="grid"/>')
        parts.append(f'<text x="{x}" y="{_TOP + deep + 18}" text-anchor="middle">{as_rate(bandwidth)}</text>')
    for seconds in _decades(list(paper.times)) or list(paper.times):
        y = at(1.0, seconds).split(",")[1]
        parts.append(f'<line x1="{_LEFT}" y1="{y}" x2="{_LEFT + inner}" y2="{y}" class="grid"/>')
        parts.append(f'<text x="{_LEFT - 8}" y="{y}" text-anchor="end" dy="4">{as_time(seconds)}</text>')
    for index, prediction in enumerate(curves):
        colour = _COLOURS[index % len(_COLOURS)]
        dash = "" if index < len(_COLOURS) else ' stroke-dasharray="6 4"'
        points = " ".join(at(b, s) for b, s in prediction.curve)
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"{dash}/>')
        row = _HEIGHT + 8 + 18 * index
        parts.append(
            f'<line x1="{_LEFT}" y1="{row}" x2="{_LEFT + 24}" y2="{row}" stroke="{colour}" stroke-width="3"/>'
        )
        label = f"{escape(prediction.method)}: {as_time(prediction.seconds)} here"
        parts.append(f'<text x="{_LEFT + 32}" y="{row}" dy="4">{label}</text>')
    if curves:
        here = paper.place(varied_link(plan.cluster.network), 1.0)[0]
        if 0 <= here <= 1:
            x = f"{_LEFT + here * inner:.1f}"
            parts.append(f'<line x1="{x}" y1="{_TOP}" x2="{x}" y2="{_TOP + deep}" class="here"/>')
    height = _HEIGHT + 20 + 18 * len(curves)
    return _SVG.format(width=_WIDTH, height=height, title=escape(plan.why), body="\n".join(parts))


_SVG = """<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">
<title>{title}</title>
<style>
text {{ font: 12px system-ui, sans-serif; fill: #666 }}
.grid {{ stroke: #8884; stroke-width: 1 }}
.here {{ stroke: #888; stroke-width: 1.5; stroke-dasharray: 3 3 }}
</style>
{body}
</svg>
"""


def _at(prediction: Prediction, share: float) -> float:
    """Interpolate the seconds between the points of a curve, on logarithmic axes."""
    where = share * (len(prediction.curve) - 1)
    left = min(int(where), len(prediction.curve) - 2)
    (_, before), (_, after) = prediction.curve[left], prediction.curve[left + 1]
    return math.exp(math.log(before) + (where - left) * (math.log(after) - math.log(before)))


def _range(values: Sequence[float]) -> tuple[float, float]:
    if not values:
        return 0.0, 1.0
    low, high = math.log(min(values)), math.log(max(values))
    return (low, high) if high > low else (low - 0.5, high + 0.5)


def _share(value: float, between: tuple[float, float]) -> float:
    if math.isinf(value):
        return math.inf
    return (math.log(value) - between[0]) / (between[1] - between[0])


def _decades(values: Sequence[float]) -> list[float]:
    """The powers of ten within the range of these values."""
    low, high = math.log10(min(values)), math.log10(max(values))
    return [10.0**power for power in range(math.ceil(low), math.floor(high) + 1)]

"""Draw time against bandwidth, in the terminal or as SVG."""

import math
from collections.abc import Iterable
from html import escape
from itertools import cycle, islice
from string import ascii_letters

from offbeat.base.units import as_rate, as_time
from offbeat.plan.prediction import Plan, Prediction, varied_link

_COLOURS = ("#3b6fb6", "#d1603d", "#4f9d69", "#8e6bb5", "#b0892c", "#c2557f", "#4aa3a8", "#7a7a7a")
_MARGIN, _LEAST, _MOST = 11, 24, 120  # columns: left of the curves, fewest for curves, most in all
_WIDTH, _HEIGHT, _LEFT, _TOP = 760, 420, 70, 20
_INNER, _DEEP = _WIDTH - _LEFT - 20, _HEIGHT - _TOP - 50
Axis = tuple[float, float]  # the logarithms of the first and the last value
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


def _make_axis(values: Iterable[float]) -> Axis:
    logs = [math.log(value) for value in values] or [0.0, 1.0]
    low, high = min(logs), max(logs)
    return (low, high) if high > low else (low - 0.5, high + 0.5)


def _place(value: float, axis: Axis) -> float:
    """Between 0 and 1 for a value on the axis."""
    return math.inf if math.isinf(value) else (math.log(value) - axis[0]) / (axis[1] - axis[0])


def chart(plan: Plan, *, width: int = 80, height: int = 16) -> str:
    """Draw the curves as letters, at most `width` wide; `a` is the fastest, the bar the plan's own link."""
    curves = [p for p in plan.predictions if p.curve]
    if not curves:
        return "One worker sends nothing: there is no bandwidth to vary."
    x_axis, y_axis = (_make_axis(point[i] for p in curves for point in p.curve) for i in (0, 1))
    width = max(_LEAST, min(width, _MOST) - _MARGIN)
    cells = [[" "] * width for _ in range(height)]
    here = _place(varied_link(plan.cluster.network), x_axis)
    if 0 <= here <= 1:
        for row in cells:
            row[round(here * (width - 1))] = "│"
    letters = list(islice(cycle(ascii_letters), len(curves)))
    for letter, prediction in reversed(list(zip(letters, curves, strict=True))):
        for x in range(width):
            y = _place(_seconds_at(prediction, x / (width - 1)), y_axis)
            cells[round((1 - y) * (height - 1))][x] = letter
    labels = [as_time(math.exp(y_axis[1])), *[""] * (height - 2), as_time(math.exp(y_axis[0]))]
    first, last = as_rate(curves[0].curve[0][0]), as_rate(curves[0].curve[-1][0])
    lines = [f"{label:>9} ┤{''.join(row)}" for label, row in zip(labels, cells, strict=True)]
    lines += [f"{'':>10}└{'─' * width}", f"{'':>11}{first}{last:>{width - len(first)}}"]
    lines += [f"{letter}  {p.method}" for letter, p in zip(letters, curves, strict=True)]
    return "\n".join(lines)


def _seconds_at(prediction: Prediction, share: float) -> float:
    """Interpolate the seconds between the points of a curve, on logarithmic axes."""
    where = share * (len(prediction.curve) - 1)
    left = min(int(where), len(prediction.curve) - 2)
    (_, before), (_, after) = prediction.curve[left], prediction.curve[left + 1]
    return math.exp(math.log(before) + (where - left) * (math.log(after) - math.log(before)))


def picture(plan: Plan) -> str:
    """Draw the same as SVG."""
    curves = [p for p in plan.predictions if p.curve]
    x_axis, y_axis = (_make_axis(point[i] for p in curves for point in p.curve) for i in (0, 1))
    bottom, right = _TOP + _DEEP, _LEFT + _INNER
    parts = []

    def at_x(bandwidth: float) -> str:
        return f"{_LEFT + _place(bandwidth, x_axis) * _INNER:.1f}"

    def at_y(seconds: float) -> str:
        return f"{_TOP + (1 - _place(seconds, y_axis)) * _DEEP:.1f}"

    for bandwidth in _decades([b for b, _ in curves[0].curve]) if curves else []:
        x = at_x(bandwidth)
        parts.append(f'<line x1="{x}" y1="{_TOP}" x2="{x}" y2="{bottom}" class="grid"/>')
        parts.append(f'<text x="{x}" y="{bottom + 18}" text-anchor="middle">{as_rate(bandwidth)}</text>')
    ends = [math.exp(end) for end in y_axis]
    for seconds in _decades(ends) or ends:
        y = at_y(seconds)
        parts.append(f'<line x1="{_LEFT}" y1="{y}" x2="{right}" y2="{y}" class="grid"/>')
        parts.append(f'<text x="{_LEFT - 8}" y="{y}" text-anchor="end" dy="4">{as_time(seconds)}</text>')
    for index, prediction in enumerate(curves):
        stroke = f'stroke="{_COLOURS[index % len(_COLOURS)]}" stroke-width='
        dash = "" if index < len(_COLOURS) else ' stroke-dasharray="6 4"'
        points = " ".join(f"{at_x(bandwidth)},{at_y(seconds)}" for bandwidth, seconds in prediction.curve)
        parts.append(f'<polyline points="{points}" fill="none" {stroke}"2"{dash}/>')
        row = _HEIGHT + 8 + 18 * index
        parts.append(f'<line x1="{_LEFT}" y1="{row}" x2="{_LEFT + 24}" y2="{row}" {stroke}"3"/>')
        label = f"{escape(prediction.method)}: {as_time(prediction.seconds)} here"
        parts.append(f'<text x="{_LEFT + 32}" y="{row}" dy="4">{label}</text>')
    here = varied_link(plan.cluster.network)
    if curves and 0 <= _place(here, x_axis) <= 1:
        x = at_x(here)
        parts.append(f'<line x1="{x}" y1="{_TOP}" x2="{x}" y2="{bottom}" class="here"/>')
    size = {"width": _WIDTH, "height": _HEIGHT + 20 + 18 * len(curves)}
    return _SVG.format(**size, title=escape(plan.why), body="\n".join(parts))


def _decades(values: Iterable[float]) -> list[float]:
    """The powers of ten within the range of these values."""
    logs = [math.log10(value) for value in values]
    return [10.0**power for power in range(math.ceil(min(logs)), math.floor(max(logs)) + 1)]

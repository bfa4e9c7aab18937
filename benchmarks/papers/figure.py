"""Small charts as SVG, lines with dots and surfaces, legible on light and on dark pages."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM, ENTRY = 640, 300, 64, 16, 40, 48, 20
COLOURS = [  # of a light page, and of a dark one
    ("#0969da", "#58a6ff"),
    ("#bc4c00", "#f0883e"),
    ("#1a7f37", "#3fb950"),
    ("#8250df", "#bc8cff"),
    ("#9a6700", "#d29922"),
    ("#57606a", "#9da7b3"),
    ("#bf3989", "#f778ba"),
]
Points = Sequence[tuple[float, float]]


def style() -> str:
    def theme(text: str, page: str, grid: str, index: int) -> str:
        lines = "".join(
            f".c{n} .line{{stroke:{both[index]}}}.c{n} .dot{{fill:{both[index]}}}"
            for n, both in enumerate(COLOURS)
        )
        return f"text{{fill:{text}}}.page{{fill:{page}}}.grid{{stroke:{grid}}}{lines}"

    light, dark = theme("#1f2328", "#ffffff", "#d1d9e0", 0), theme("#e6edf3", "#0d1117", "#30363d", 1)
    fixed = "text{font:12px sans-serif}.title{font-size:14px;font-weight:600}.line{fill:none;stroke-width:2}"
    return f"<style>{fixed}{light}@media(prefers-color-scheme:dark){{{dark}}}</style>"


def ticks(low: float, high: float) -> list[float]:
    """About five round numbers from low to high."""
    raw = (high - low) / 5
    size = 10 ** math.floor(math.log10(raw))
    step = next(size * n for n in (1, 2, 5, 10) if size * n >= raw)
    return [step * n for n in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def chart(title: str, series: Mapping[str, Points], across: str, down: str) -> str:
    """Lines over a logarithmic axis. Points that are not finite are left out; "" if there are none."""
    shown = {
        name: [(x, y) for x, y in sorted(points) if x > 0 and math.isfinite(y)]
        for name, points in series.items()
    }
    shown = {name: points for name, points in shown.items() if points}
    every = [point for points in shown.values() for point in points]
    if not every:
        return ""
    xs, ys = sorted({x for x, _ in every}), [y for _, y in every]
    first, last = xs[0], max(xs[-1], xs[0] * 1.01)
    margin = 0.06 * ((max(ys) - min(ys)) or abs(ys[0]) or 1.0)
    low, high = min(ys) - margin, max(ys) + margin

    def place(x: float, y: float) -> tuple[float, float]:
        share = math.log(x / first) / math.log(last / first)
        return (
            LEFT + 10 + share * (WIDTH - LEFT - RIGHT - 20),
            TOP + (high - y) / (high - low) * (HEIGHT - TOP - BOTTOM),
        )

    total = HEIGHT + ENTRY * math.ceil(len(shown) / 2) + 4
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {total}" width="{WIDTH}">',
        f"<title>{title}</title>",
        style(),
        f'<rect class="page" width="{WIDTH}" height="{total}" rx="8"/>',
        f'<text class="title" x="{LEFT}" y="22">{title}</text>',
        f'<text x="{(LEFT + WIDTH) / 2:.0f}" y="{HEIGHT - 10}" text-anchor="middle">{across}</text>',
        f'<text transform="translate(14 {(TOP + HEIGHT - BOTTOM) / 2:.0f}) rotate(-90)" '
        f'text-anchor="middle">{down}</text>',
    ]
    for y in ticks(low, high):
        at = place(first, y)[1]
        lines.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>')
        lines.append(f'<text x="{LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{y:.4g}</text>')
    previous = -math.inf
    for x in xs:
        at = place(x, low)[0]
        if at - previous > 34:
            lines.append(f'<text x="{at:.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{x:.3g}</text>')
            previous = at
    for number, (name, points) in enumerate(shown.items()):
        lines += draw(number, name, [place(x, y) for x, y in points])
    return "\n".join([*lines, "</svg>", ""])


def draw(number: int, name: str, places: Points) -> list[str]:
    """A line with dots, and its entry in the legend."""
    left, top = LEFT + 290 * (number % 2), HEIGHT + 10 + ENTRY * (number // 2)
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    dashes = "" if number < len(COLOURS) else ' stroke-dasharray="5 4"'
    return [
        f'<g class="c{number % len(COLOURS)}"><polyline class="line" points="{path}"{dashes}/>',
        *(f'<circle class="dot" cx="{x:.1f}" cy="{y:.1f}" r="3.5"/>' for x, y in places),
        f'<line class="line" x1="{left}" x2="{left + 26}" y1="{top - 4}" y2="{top - 4}"{dashes}/>',
        f'<text x="{left + 32}" y="{top}">{name}</text></g>',
    ]


def surface(title: str, values: Mapping[tuple[str, str], float], across: str, form: str) -> str:
    """A grid of values by row and column, darker where they are higher; "" if there are none."""
    shown = {key: value for key, value in values.items() if math.isfinite(value)}
    if not shown:
        return ""
    rows, columns = list(dict.fromkeys(row for row, _ in shown)), list(dict.fromkeys(c for _, c in shown))
    least, most = min(shown.values()), max(shown.values())
    left, high = LEFT + 40, 44
    wide = (WIDTH - left - RIGHT) / len(columns)
    total = TOP + high * len(rows) + BOTTOM
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {total}" width="{WIDTH}">',
        f"<title>{title}</title>",
        style(),
        f'<rect class="page" width="{WIDTH}" height="{total}" rx="8"/>',
        f'<text class="title" x="{left}" y="22">{title}</text>',
        f'<text x="{(left + WIDTH - RIGHT) / 2:.0f}" y="{total - 10}" text-anchor="middle">{across}</text>',
    ]
    for number, row in enumerate(rows):
        middle = TOP + high * number + high / 2 + 4
        lines.append(f'<text x="{left - 8}" y="{middle:.0f}" text-anchor="end">{row}</text>')
    for number, column in enumerate(columns):
        at = left + wide * (number + 0.5)
        lines.append(f'<text x="{at:.0f}" y="{total - BOTTOM + 16}" text-anchor="middle">{column}</text>')
    for (row, column), value in shown.items():
        x, y = left + wide * columns.index(column), TOP + high * rows.index(row)
        shade = 0.05 + 0.5 * (value - least) / ((most - least) or 1.0)
        lines.append(
            f'<g class="c0"><rect class="dot" x="{x + 1:.1f}" y="{y + 1}" width="{wide - 2:.1f}" '
            f'height="{high - 2}" fill-opacity="{shade:.2f}"/><text x="{x + wide / 2:.0f}" '
            f'y="{y + high / 2 + 4:.0f}" text-anchor="middle">{value:{form}}</text></g>'
        )
    return "\n".join([*lines, "</svg>", ""])

"""The figure, from results.jsonl alone: validation loss against seconds at 50 Mbit/s, for every contender.

Contenders have different seeds, and some seeds are harder. So each loss is shown beside the final one of
torch DDP with the same seeds.
"""

from __future__ import annotations

import math
from pathlib import Path

from contenders import DDP, FLOOR
from report import Result, put_beside

PICTURE = Path(__file__).resolve().parent.parent.parent / "docs/peers.svg"
WIDTH, HEIGHT = 1040, 410  # without the legend
LEFT, RIGHT, TOP, BOTTOM, ENTRY = 52, 24, 64, 56, 21
TIMES = (10, 20, 50, 100, 200, 500)
# Families have a colour for a light page and one for a dark page; members differ in their dashes.
COLOURS = {
    "torch": ("#57606a", "#9da7b3"),
    "torchft": ("#bc4c00", "#f0883e"),
    "Accelerate": ("#9a6700", "#d29922"),
    "ddp": ("#1a7f37", "#3fb950"),
    "local_sgd": ("#0969da", "#58a6ff"),
    "diloco": ("#8250df", "#bc8cff"),
}
DASHES = ("", "7 3", "2 3", "9 3 2 3", "5 5", "1 5", "14 4")


Points = list[tuple[float, float]]


def relative(result: Result, ddp: Result) -> Points:
    """Seconds, and how far the loss is above the final one of torch DDP, as a share of that."""
    beside = put_beside(result, ddp)
    assert beside is not None
    return [(seconds, loss / beside.goal - 1) for seconds, loss in result.points()]


class Scale:
    """Logarithmic seconds to the right, losses downwards."""

    lowest, highest = -0.05, 0.4

    def __init__(self, curves: list[Points]) -> None:
        shown = [seconds for points in curves for seconds, loss in points if loss <= self.highest]
        self.first, self.last = min(shown), max(shown) * 1.05

    def across(self, seconds: float) -> float:
        share = math.log(seconds / self.first) / math.log(self.last / self.first)
        return LEFT + share * (WIDTH - LEFT - RIGHT)

    def down(self, loss: float) -> float:
        return TOP + (self.highest - loss) / (self.highest - self.lowest) * (HEIGHT - TOP - BOTTOM)


def family(result: Result) -> str:
    first = result.contender.name.strip("`").replace("(", " ").split()[0]
    return first if first in COLOURS else "torch"


def style() -> str:
    """Colours of a light page, and of a dark one for readers who have set it."""

    def theme(text: str, page: str, grid: str, index: int) -> str:
        lines = "".join(
            f".{name} .line{{stroke:{both[index]}}}.{name} .dot{{fill:{both[index]}}}"
            for name, both in COLOURS.items()
        )
        return f"text{{fill:{text}}}.page{{fill:{page}}}.grid{{stroke:{grid}}}.mark{{stroke:{text}}}{lines}"

    light, dark = theme("#1f2328", "#ffffff", "#d1d9e0", 0), theme("#e6edf3", "#0d1117", "#30363d", 1)
    return (
        "<style>text{font:12.5px sans-serif}.title{font-size:15px;font-weight:600}.mark{stroke-dasharray:3 3}"
        ".line{fill:none;stroke-width:2;stroke-linejoin:round}"
        f"{light}@media(prefers-color-scheme:dark){{{dark}}}</style>"
    )


def axes(scale: Scale) -> list[str]:
    drawn = []
    for tenth in range(5):
        y = scale.down(tenth / 10)
        drawn.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        drawn.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">+{10 * tenth} %</text>')
    for seconds in TIMES:
        if scale.first <= seconds <= scale.last:
            x, y = scale.across(seconds), HEIGHT - BOTTOM + 18
            drawn.append(f'<text x="{x:.1f}" y="{y}" text-anchor="middle">{seconds}</text>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    words = "seconds of training, on a logarithmic scale"
    drawn.append(f'<text x="{middle:.1f}" y="{HEIGHT - 18}" text-anchor="middle">{words}</text>')
    return drawn


def marks(scale: Scale, found: dict[str, Result]) -> list[str]:
    """DDP's final loss, and the time that the steps take without any communication."""
    floor = found[FLOOR].total()
    x, y = scale.across(floor), scale.down(0)
    return [
        f'<line class="mark" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>',
        f'<text x="{LEFT + 6}" y="{y - 5:.1f}">final loss of torch DDP</text>',
        f'<line class="mark" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>',
        f'<text x="{x:.1f}" y="{TOP - 6}" text-anchor="middle">without communication: {floor:.0f} s</text>',
    ]


def curve(scale: Scale, result: Result, points: Points, entry: tuple[int, int], dash: str) -> list[str]:
    """The line of a contender, a dot where it ends, and its entry in the legend: column and line."""
    path = " ".join(f"{scale.across(s):.1f},{scale.down(loss):.1f}" for s, loss in points)
    x, y = path.split()[-1].split(",")
    left, top = 16 + 405 * entry[0], HEIGHT + 10 + ENTRY * entry[1]
    dashes = f' stroke-dasharray="{dash}"' if dash else ""
    last = f"{points[-1][1]:+.1%}".replace("%", " %").replace("-", "−")
    said = f"{result.contender.name.replace('`', '')}: {result.total():.0f} s, {last}"
    return [
        f'<g class="{family(result)}">',
        f'<polyline class="line" clip-path="url(#plot)" points="{path}"{dashes}/>',
        f'<circle class="dot" cx="{x}" cy="{y}" r="4"/>',
        f'<line class="line" x1="{left}" x2="{left + 28}" y1="{top - 4}" y2="{top - 4}"{dashes}/>',
        f'<text x="{left + 35}" y="{top}">{said}</text>',
        "</g>",
    ]


def picture(found: dict[str, Result]) -> str:
    shown = [result for result in found.values() if put_beside(result, found[DDP])]
    curves = [relative(result, found[DDP]) for result in shown]
    scale = Scale(curves)
    columns = {one: [r for r in shown if (r.contender.kind == "offbeat") is one] for one in (False, True)}
    height = HEIGHT + 16 + ENTRY * max(map(len, columns.values()))
    title = "Validation loss above the final one of torch DDP: GPT, 1.85 M parameters, 50 Mbit/s"
    plot = f'x="{LEFT}" y="{TOP}" width="{WIDTH - LEFT}" height="{HEIGHT - TOP - BOTTOM}"'
    size = f'viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}"'
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size}>',
        style(),
        f'<clipPath id="plot"><rect {plot}/></clipPath>',
        f'<rect class="page" width="{WIDTH}" height="{height}" rx="8"/>',
        f'<text class="title" x="{LEFT}" y="28">{title}</text>',
        *axes(scale),
        *marks(scale, found),
    ]
    members: dict[str, int] = {}
    for result, points in zip(shown, curves, strict=True):
        member = members[family(result)] = members.get(family(result), -1) + 1
        column = columns[result.contender.kind == "offbeat"]
        place = (column is columns[True], column.index(result))
        lines += curve(scale, result, points, place, DASHES[member % len(DASHES)])
    return "\n".join([*lines, "</svg>", ""])

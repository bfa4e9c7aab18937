r"""Held-out loss against training time on a slow link, as a picture.

    offbeat compare torch_ddp 'local_sgd(every=16)' 'cocod(every=16, delay=8)' \
        'diloco(every=16, lr=1.0, momentum=0.3, ramp=0, warmup=75)' \
        'ddp(reduce=ErrorFeedback(Quantized(4, block=256)))' \
        --task bytes --model tiny --steps 300 --batch 8 --lr 0.003 --link 50mbit --evaluations 30 \
        --out runs/curves
    python benchmarks/curves/draw.py runs/curves

The second command copies the evaluations of all runs to results.jsonl beside this file. Without a folder it
uses the results that are there. Either way it draws docs/curves.svg.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

HERE = Path(__file__).parent
RESULTS = HERE / "results.jsonl"
PICTURE = HERE.parent.parent / "docs/curves.svg"

WIDTH, HEIGHT = 760, 380
LEFT, RIGHT, TOP, BOTTOM = 58, 20, 48, 50
SECONDS, LOSSES = (0, 100, 20), (2.0, 3.6, 0.4)  # first, last, distance between grid lines
# One colour for a light page and one for a dark page, per method in the order of the log.
COLOURS = [
    ("#57606a", "#9da7b3"),
    ("#0969da", "#58a6ff"),
    ("#bc4c00", "#f0883e"),
    ("#8250df", "#bc8cff"),
    ("#1a7f37", "#3fb950"),
]

Row = dict[str, float | str]


def collect(folder: Path) -> list[Row]:
    """The evaluations of every run in the folder, from the log of rank 0."""
    rows: list[Row] = []
    for run in sorted(path.parent for path in folder.glob("*/setting.json")):
        method = json.loads((run / "setting.json").read_text())["method"]
        for line in map(json.loads, (run / "rank-0.jsonl").read_text().splitlines()):
            if line["kind"] == "eval":
                seconds, loss = round(line["t"], 3), round(line["loss"], 4)
                rows.append({"method": method, "step": line["step"], "seconds": seconds, "loss": loss})
    return rows


def across(seconds: float) -> float:
    return LEFT + (seconds - SECONDS[0]) / (SECONDS[1] - SECONDS[0]) * (WIDTH - LEFT - RIGHT)


def down(loss: float) -> float:
    return TOP + (LOSSES[1] - loss) / (LOSSES[1] - LOSSES[0]) * (HEIGHT - TOP - BOTTOM)


def ticks(axis: tuple[float, float, float]) -> list[float]:
    first, last, distance = axis
    return [first + i * distance for i in range(round((last - first) / distance) + 1)]


def style() -> str:
    """Colours of a light page, and of a dark one for readers who have set it."""

    def theme(text: str, page: str, grid: str, colours: list[str]) -> str:
        lines = "".join(f".m{i} .line{{stroke:{c}}}.m{i} .dot{{fill:{c}}}" for i, c in enumerate(colours))
        return f"text{{fill:{text}}}.page{{fill:{page}}}.grid{{stroke:{grid}}}{lines}"

    light = theme("#1f2328", "#ffffff", "#d1d9e0", [light for light, _ in COLOURS])
    dark = theme("#e6edf3", "#0d1117", "#30363d", [dark for _, dark in COLOURS])
    return (
        "<style>text{font:13px sans-serif}.title{font-size:15px;font-weight:600}"
        ".line{fill:none;stroke-width:2.5;stroke-linejoin:round}"
        f"{light}@media(prefers-color-scheme:dark){{{dark}}}</style>"
    )


def axes() -> list[str]:
    drawn = []
    for loss in ticks(LOSSES):
        y = down(loss)
        drawn.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        drawn.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{loss:.1f}</text>')
    for seconds in ticks(SECONDS):
        x, y = across(seconds), HEIGHT - BOTTOM + 20
        drawn.append(f'<text x="{x:.1f}" y="{y}" text-anchor="middle">{seconds:.0f}</text>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    drawn.append(f'<text x="{middle:.1f}" y="{HEIGHT - 10}" text-anchor="middle">seconds of training</text>')
    return drawn


def curve(index: int, method: str, rows: list[Row]) -> list[str]:
    """The line of one method, a dot where it ends, and its entry in the legend."""
    path = " ".join(f"{across(float(row['seconds'])):.1f},{down(float(row['loss'])):.1f}" for row in rows)
    x, y = path.split()[-1].split(",")
    name = "torch's DistributedDataParallel" if method == "torch_ddp()" else method
    entry = TOP + 22 + 21 * index
    return [
        f'<g class="m{index}">',
        f'<polyline class="line" clip-path="url(#plot)" points="{path}"/>',
        f'<circle class="dot" cx="{x}" cy="{y}" r="4.5"/>',
        f'<line class="line" x1="270" x2="296" y1="{entry - 4}" y2="{entry - 4}"/>',
        f'<text x="304" y="{entry}">{name}</text>',
        "</g>",
    ]


def picture(rows: list[Row]) -> str:
    methods = list(dict.fromkeys(str(row["method"]) for row in rows))
    title = "Held-out loss of a small GPT: 300 steps, 4 workers, links of 50 Mbit/s"
    plot = f'x="{LEFT}" y="{TOP}" width="{WIDTH - LEFT}" height="{HEIGHT - TOP}"'
    size = f'viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}"'
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size}>',
        style(),
        f'<clipPath id="plot"><rect {plot}/></clipPath>',
        f'<rect class="page" width="{WIDTH}" height="{HEIGHT}" rx="8"/>',
        f'<text class="title" x="{LEFT}" y="26">{title}</text>',
        *axes(),
    ]
    for index, method in enumerate(methods):
        lines += curve(index, method, [row for row in rows if row["method"] == method])
    return "\n".join([*lines, "</svg>", ""])


def read() -> list[Row]:
    return [json.loads(line) for line in RESULTS.read_text().splitlines()]


if __name__ == "__main__":
    if len(sys.argv) > 1:
        found = collect(Path(sys.argv[1]))
        RESULTS.write_text("".join(json.dumps(row) + "\n" for row in found))
    PICTURE.write_text(picture(read()))

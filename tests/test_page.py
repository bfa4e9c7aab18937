"""The page in a real browser, where one is installed: it draws itself, on a desk and on a phone."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import unquote

import pytest
from test_runs import trained, written

from offbeat.app.report.page import render
from offbeat.app.runs.folder import log_path
from offbeat.app.runs.summary import Logged, read

BROWSER = next(
    (found for name in ("chromium", "google-chrome", "chrome") if (found := shutil.which(name))), None
)
pytestmark = [pytest.mark.slow, pytest.mark.skipif(BROWSER is None, reason="needs Chromium")]

PROBE = """<script>
window.onerror = message => { document.title = "error: " + message; };
addEventListener("load", () => {
  for (const button of document.querySelectorAll(".choice button")) button.click();
  for (const button of [...document.querySelectorAll(".legend button")]) { button.click(); button.click(); }
  THEN
  if (!document.title.startsWith("error")) document.title = "wide " + document.documentElement.scrollWidth;
});
</script><style>"""


# What all frames show, as text.
COLLECT = """<script>
addEventListener("load", () => {
  for (const frame of document.querySelectorAll("iframe")) {
    const found = document.createElement("pre");
    found.textContent = encodeURIComponent(frame.contentDocument.documentElement.outerHTML);
    document.body.append(found);
  }
});
</script>"""


@dataclass
class Page:
    """A page in a frame of some width, and a script for it."""

    text: str
    width: int = 1000
    then: str = ""


def draw(place: Path, *pages: Page) -> list[str]:
    """What the browser makes of each page, after a script has clicked every tab, and all that `then` clicks.

    A browser takes long to start, so all pages are frames of one.
    """
    frames = ""
    for number, page in enumerate(pages):
        file = place / f"page-{number}.html"
        file.write_text(page.text.replace("<style>", PROBE.replace("THEN", page.then), 1))
        frames += (
            f'<iframe src="{file.name}" style="border: 0; width: {page.width}px; height: 900px"></iframe>'
        )
    (place / "frames.html").write_text(f"<!doctype html><body>{frames}{COLLECT}")
    assert BROWSER is not None
    command = [
        BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-sync",
        "--disable-background-networking", "--disable-component-update", "--allow-file-access-from-files",
        f"--user-data-dir={place / 'profile'}", "--window-size=1400,1000",
        "--virtual-time-budget=2000", "--dump-dom", (place / "frames.html").as_uri(),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=90)
    found = [unquote(text) for text in re.findall(r"<pre>(.*?)</pre>", done.stdout)]
    assert len(found) == len(pages), done.stderr
    return found


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Logged]:
    place = tmp_path_factory.mktemp("runs")
    methods = ["ddp()", "local_sgd(every=4)", "diloco(every=4, lr=0.5)"]
    return [read(trained(place / str(number), method)) for number, method in enumerate(methods)]


def test_the_page_draws_itself(runs: list[Logged], tmp_path: Path) -> None:
    pages = [Page(render(runs), width) for width in (1280, 500)]
    for page, found in zip(pages, draw(tmp_path, *pages), strict=True):
        (title,) = re.findall(r"<title>(.*?)</title>", found)
        assert title.startswith("wide "), title
        assert int(title.split()[1]) <= page.width, "nothing sticks out"
        body = found.split('<script id="data"')[0]
        assert body.count("<svg") == 6
        assert body.count("<tr>") >= 4
        for word in ("diloco(every=4, lr=0.5)", "rank 1", "speed-up", "seconds", "Drift"):
            assert word in body
        assert "NaN" not in body
        assert "Infinity" not in body


def test_the_page_of_a_study_and_of_a_run_that_diverged(runs: list[Logged], tmp_path: Path) -> None:
    curves = [{"name": "one, 2 workers", "points": [[0.1, 2.0, 0.5, 4], [1.0, 1.0, 0.9, 1]]}]
    broken = written(tmp_path, "ddp()", seed=0, losses=[2.0, float("nan")])
    study, diverged = draw(tmp_path, Page(render(runs, curves=curves)), Page(render([broken])))
    for found in (study, diverged):
        assert re.findall(r"<title>(wide \d+)</title>", found)
    assert "Accuracy against communication" in study
    assert "diverged" in diverged


def test_marks_of_losses_close_to_each_other_are_told_apart(tmp_path: Path) -> None:
    close = written(tmp_path, "ddp()", seed=0, losses=[2.2931, 2.2929, 2.2924])
    (found,) = draw(tmp_path, Page(render([close])))
    first = found.split("<svg")[1].split("</svg>")[0]
    marks = re.findall(r'text-anchor="end"[^>]*>(2\.29\d*)<', first)
    assert len(marks) >= 2
    assert len(set(marks)) == len(marks)


def elements(found: str, name: str, tag: str) -> list[list[dict[str, str]]]:
    """By part of the page, the attributes of these elements in the card."""
    cards = re.findall(rf'data-id="{name}"[^>]*><svg.*?</svg>', found, re.DOTALL)
    return [
        [dict(re.findall(r'([\w-]+)="([^"]*)"', e)) for e in re.findall(f"<{tag} [^>]*>", c)] for c in cards
    ]


def test_error_bars_stay_in_their_card(tmp_path: Path) -> None:
    """Two methods that end alike, with seeds that differ far more than the methods do."""
    finals = {"ddp()": (1.0, 3.0), "local_sgd()": (1.01, 3.01)}
    seeds = [
        written(tmp_path, method, seed=seed, losses=[4.0, loss])
        for method, losses in finals.items()
        for seed, loss in enumerate(losses)
    ]
    (found,) = draw(tmp_path, Page(render(seeds)))
    (lines,) = elements(found, "pareto", "line")
    bars = [line for line in lines if "stroke-opacity" in line]
    assert len(bars) == 2
    for bar in bars:
        assert 0 <= float(bar["y2"]) < float(bar["y1"]) <= 300


def test_unlike_runs_have_parts_of_their_own(tmp_path: Path) -> None:
    runs = [
        written(tmp_path, method, seed=0, losses=[2.0, 1.0], task=task)
        for task in ("digits", "bytes")
        for method in ("ddp()", "local_sgd()")
    ]
    torn = log_path(runs[3].folder, 1)
    torn.write_text(torn.read_text().replace('"end"', '"torn"'))
    runs[3] = read(runs[3].folder)
    runs[2] = replace(runs[2], origin={**runs[2].origin, "unit": "bytes"})
    runs[1].evals[-1]["accuracy"] = 0.5
    (found,) = draw(tmp_path, Page(render(runs)))
    found = found.split('<script id="data"')[0].split('<template id="part">')[0]
    assert found.count('class="part"') == 2
    assert found.count("</svg>") == 12
    digits, texts = re.findall(r"<h1 .*?(?=<h1 |$)", found, re.DOTALL)
    assert "2 methods on digits" in digits
    assert "2 methods on bytes" in texts
    assert "50.0 %" in digits
    assert "0.0 %" not in digits.replace("50.0 %", ""), "no accuracy is not an accuracy of 0"
    assert "accuracy" not in texts
    tabs = [
        re.findall(r'<button type="button" aria-pressed="\w+">(.*?)</button>', part)[:3]
        for part in (digits, texts)
    ]
    assert tabs == [["time", "images seen", "bytes sent"], ["time", "bytes seen", "bytes sent"]]
    assert "local_sgd() (unfinished)" in texts
    assert "Unfinished, and not in the table: local_sgd(), seed 0 (1 of 10 steps)." in texts
    assert "nfinished" not in digits
    assert "local_sgd() reached" in digits or "Nothing reached the loss of ddp()" in digits
    assert 'data-id="verdict" hidden' in texts, "one method alone needs no verdict"


def test_rates_and_a_loss_to_reach_are_on_the_page(tmp_path: Path) -> None:
    runs = [
        written(tmp_path, method, seed=0, losses=[2.0, loss], lr=lr)
        for method, losses in {"ddp()": (1.5, 1.0), "local_sgd()": (1.2, 1.4)}.items()
        for lr, loss in zip((0.1, 0.3), losses, strict=True)
    ]
    (found,) = draw(tmp_path, Page(render(runs, to_loss=1.1)))
    found = found.split('<script id="data"')[0]
    cells = re.findall(r"<td[^>]*>([^<]*)</td>", found)
    heads = re.findall(r"<th .*?>([^<]*)</button></th>", found)
    assert heads[-3:] == ["s to loss 1.1", "MB to loss 1.1", "speed-up"]
    assert cells[:2] == ["0.3", "1.0000"], "the reference at its best rate"
    assert "never" in cells
    assert "Only ddp() reached a loss of 1.1, in 0.90 s; the closest was local_sgd(), with 1.2000." in found
    (dots,) = elements(found, "rates", "circle")
    assert [dot["r"] for dot in dots] == ["3", "5.5", "5.5", "3"], "the best is the larger dot"


def test_columns_can_be_sorted(tmp_path: Path) -> None:
    """The best first, then the worst first, then as they were. A loss that is missing comes last."""
    finals = {"ddp()": 1.0, "local_sgd()": 0.5, "cocod()": float("nan"), "diloco()": 2.0}
    runs = [written(tmp_path, method, seed=0, losses=[4.0, loss]) for method, loss in finals.items()]
    orders, click = [], "document.querySelectorAll('th button')[1].click();"
    pages = [Page(render(runs), then=click * clicks) for clicks in range(4)]
    for clicks, page in enumerate(draw(tmp_path, *pages)):
        found = page.split('<script id="data"')[0]
        orders.append(re.findall(r"<code>(\w+)", found))
        (state,) = re.findall(r'<th aria-sort="(\w+)"><button[^>]*>loss<', found)
        assert state == ["none", "ascending", "descending", "none"][clicks]
    given = ["ddp", "local_sgd", "cocod", "diloco"]
    assert orders == [
        given,
        ["local_sgd", "ddp", "diloco", "cocod"],
        ["diloco", "ddp", "local_sgd", "cocod"],
        given,
    ]


def test_a_method_can_be_hidden_in_all_charts(tmp_path: Path) -> None:
    runs = [
        written(tmp_path, method, seed=0, losses=[4.0, loss])
        for method, loss in {"ddp()": 1.0, "local_sgd()": 3.0}.items()
    ]

    def paths(found: str, name: str) -> list[str]:
        (drawing,) = elements(found, name, "path")
        return [path["stroke"] for path in drawing]

    click = "document.querySelectorAll('.legend button')[0].click();"
    scripts = ["", click, click + click.replace("[0]", "[1]")]
    both, one, none = draw(tmp_path, *[Page(render(runs), then=then) for then in scripts])
    assert paths(both, "loss") == paths(both, "drift") == ["var(--c0)", "var(--c1)"]
    assert paths(one, "loss") == paths(one, "drift") == ["var(--c1)"]
    assert len(elements(both, "pareto", "circle")[0]) == 2
    assert len(elements(one, "pareto", "circle")[0]) == 1
    assert 'aria-pressed="false"' in one.split('data-id="legend"')[1].split("</div>")[0]
    assert paths(none, "loss") == []


def test_a_line_marks_the_loss_to_reach(tmp_path: Path) -> None:
    runs = [
        written(tmp_path, method, seed=0, losses=[3.0, loss])
        for method, loss in {"ddp()": 2.0, "local_sgd()": 2.5}.items()
    ]

    def goal(found: str) -> float:
        (lines,) = elements(found, "loss", "line")
        (line,) = [line for line in lines if line["class"] == "goal"]
        (marks,) = re.findall(r'data-id="loss"[^>]*><svg(.*?)</svg>', found, re.DOTALL)
        places = {
            float(v): float(y) - 4 for y, v in re.findall(r'y="([\d.]+)" text-anchor="end">([\d.]+)<', marks)
        }
        (high, low) = max(places), min(places)
        share = (float(line["y1"]) - places[high]) / (places[low] - places[high])
        return high + share * (low - high)

    pages = [Page(render(runs)), Page(render(runs, to_loss=2.75)), Page(render(runs[:1]))]
    found, given, alone = draw(tmp_path, *pages)
    assert goal(found) == pytest.approx(2.1, abs=0.01)
    assert "5 % above the last loss of ddp()" in found
    assert goal(given) == pytest.approx(2.75, abs=0.01)
    assert 'class="goal"' not in alone


def test_a_table_too_wide_for_a_phone_says_so(tmp_path: Path) -> None:
    runs = [written(tmp_path, method, seed=0, losses=[3.0, 2.0]) for method in ("ddp()", "local_sgd()")]
    wide, narrow = draw(tmp_path, *[Page(render(runs), width) for width in (1280, 500)])
    assert re.search(r'data-id="swipe" hidden', wide.split("<template")[0])
    assert not re.search(r'data-id="swipe" hidden', narrow.split("<template")[0])
    assert 'class="best"' not in wide, "what is equal in all rows is not the best"


def test_the_page_says_how_it_was_made(tmp_path: Path) -> None:
    runs = [written(tmp_path, "ddp()", seed=0, losses=[3.0, 2.0])]
    (found,) = draw(tmp_path, Page(render(runs)))
    facts = dict(re.findall(r"<td>([a-z ]+)</td><td>([^<]*)</td>", found))
    assert facts["batch"] == "4 images per worker and step, 8 in all, 10 steps"
    assert facts["learning rate"].startswith("0.1 at its peak")
    assert facts["optimizer"] == "SGD(momentum=0.9, weight_decay=0.0005)"

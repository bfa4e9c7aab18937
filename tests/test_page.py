"""The page in a real browser, where one is installed: it draws itself, on a desk and on a phone."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from test_runs import trained, written

from offbeat.app.report.page import render
from offbeat.app.runs.summary import Logged, read

BROWSER = next(
    (found for name in ("chromium", "google-chrome", "chrome") if (found := shutil.which(name))), None
)
pytestmark = [pytest.mark.slow, pytest.mark.skipif(BROWSER is None, reason="needs Chromium")]

PROBE = """<script>
window.onerror = message => { document.title = "error: " + message; };
addEventListener("load", () => {
  for (const button of document.querySelectorAll("button")) button.click();
  if (!document.title.startsWith("error")) document.title = "wide " + document.documentElement.scrollWidth;
});
</script><style>"""


def drawn(page: str, place: Path, width: int) -> str:
    """What the browser makes of the page."""
    file = place / "page.html"
    file.write_text(page.replace("<style>", PROBE, 1))
    assert BROWSER is not None
    command = [
        BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-sync",
        "--disable-background-networking", "--disable-component-update",
        f"--user-data-dir={place / 'profile'}", f"--window-size={width},900",
        "--virtual-time-budget=2000", "--dump-dom", file.as_uri(),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=90)
    return done.stdout


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Logged]:
    place = tmp_path_factory.mktemp("runs")
    methods = ["ddp()", "local_sgd(every=4)", "diloco(every=4, lr=0.5)"]
    return [read(trained(place / str(number), method)) for number, method in enumerate(methods)]


@pytest.mark.parametrize("width", [1280, 500])
def test_the_page_draws_itself(runs: list[Logged], tmp_path: Path, width: int) -> None:
    found = drawn(render(runs), tmp_path, width)
    (title,) = re.findall(r"<title>(.*?)</title>", found)
    assert title.startswith("wide "), title
    assert int(title.split()[1]) <= width, "nothing sticks out"
    body = found.split('<script id="data"')[0]
    assert body.count("<svg") == 6
    assert body.count("<tr>") >= 4
    for word in ("diloco(every=4, lr=0.5)", "rank 1", "speed-up", "seconds", "Drift"):
        assert word in body
    assert "NaN" not in body
    assert "Infinity" not in body


def test_the_page_of_a_study_and_of_a_run_that_diverged(runs: list[Logged], tmp_path: Path) -> None:
    curves = [{"name": "one, 2 workers", "points": [[0.1, 2.0, 0.5, 4], [1.0, 1.0, 0.9, 1]]}]
    found = drawn(render(runs, curves=curves), tmp_path, 1000)
    assert re.findall(r"<title>(wide \d+)</title>", found)
    assert "Accuracy against communication" in found
    broken = written(tmp_path, "ddp()", seed=0, losses=[2.0, float("nan")])
    found = drawn(render([broken]), tmp_path, 1000)
    assert re.findall(r"<title>(wide \d+)</title>", found)
    assert "diverged" in found


def test_marks_of_losses_close_to_each_other_are_told_apart(tmp_path: Path) -> None:
    close = written(tmp_path, "ddp()", seed=0, losses=[2.2931, 2.2929, 2.2924])
    found = drawn(render([close]), tmp_path, 1000)
    first = found.split("<svg")[1].split("</svg>")[0]
    marks = re.findall(r'text-anchor="end"[^>]*>(2\.29\d*)<', first)
    assert len(marks) >= 2
    assert len(set(marks)) == len(marks)

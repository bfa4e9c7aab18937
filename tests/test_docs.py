"""What README, docs and examples say is true: every block of code runs, and prints what it should."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import runpy
import subprocess
import tempfile
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import pytest
import torch
import warm
from conftest import Pool
from torch import nn

import offbeat

ROOT = Path(__file__).parent.parent
PAGES = [
    "README.md",
    "CONTRIBUTING.md",
    *sorted(str(page.relative_to(ROOT)) for page in ROOT.glob("docs/*.md")),
]

# A block of Python; before it perhaps a note of how many gloo workers run it, after it perhaps its output.
BLOCK = re.compile(
    r"(?:<!-- on (?P<workers>\d) workers -->\n)?```python\n(?P<code>.*?)```"
    r"(?:\n\n```text\n(?P<output>.*?)```)?",
    re.DOTALL,
)
FENCES = re.compile(r"^```(\w*)\n.*?^```$", re.DOTALL | re.MULTILINE)


def blocks(only_pooled: bool) -> list[Any]:
    found = []
    for page in PAGES:
        text = (ROOT / page).read_text()
        for match in BLOCK.finditer(text):
            if bool(match["workers"]) == only_pooled:
                line = text.count("\n", 0, match.start("code")) + 1
                # Plans and the script of the start page take long, and have tests of their own.
                marks = [pytest.mark.slow] if page in ("docs/plan.md", "docs/index.md") else []
                found.append(pytest.param(match, line, id=f"{page}:{line}", marks=marks))
    return found


def prepared(rank: int) -> dict[str, Any]:
    """What the pages take for granted: a model, its optimizer, its data, and the two imports."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2))
    draw = torch.Generator().manual_seed(rank)
    loader = [(torch.randn(5, 6, generator=draw), torch.randint(2, (5,), generator=draw)) for _ in range(20)]
    return {
        "offbeat": offbeat,
        "torch": torch,
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        "loader": loader,
        "loss": nn.functional.cross_entropy,
        "evaluate": lambda model: nn.functional.cross_entropy(model(loader[0][0]), loader[0][1]).item(),
        "rank": rank,
        "device": "cpu",
    }


def run(code: str, line: int, rank: int = 0) -> str:
    """What the block prints."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile("\n" * (line - 1) + code, "page", "exec"), prepared(rank))
    return printed.getvalue()


def run_on_worker(comm: offbeat.Communicator, code: str, line: int) -> str:
    return run(code, line, comm.rank)


@pytest.mark.parametrize(("block", "line"), blocks(only_pooled=False))
def test_the_code_runs(
    block: re.Match[str], line: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    printed = run(block["code"], line)
    if block["output"] is not None:
        assert printed == block["output"]


@pytest.mark.few(3)
@pytest.mark.parametrize(("block", "line"), blocks(only_pooled=True))
def test_the_code_runs_on_real_workers(pool: Pool, block: re.Match[str], line: int) -> None:
    printed = pool.run(run_on_worker, block["code"], line, workers=int(block["workers"]))
    if block["output"] is not None:
        assert printed[0] == block["output"]


@pytest.mark.parametrize("page", PAGES)
def test_no_code_escapes(page: str) -> None:
    text = (ROOT / page).read_text()
    kinds = [match[1] for match in FENCES.finditer(text)]
    assert set(kinds) <= {"python", "text", "diff", "sh"}, "a block without a language is not run"
    assert kinds.count("python") == len(list(BLOCK.finditer(text)))


def anchors(page: Path) -> set[str]:
    """The headings of a page, as GitHub writes them in links."""
    prose = FENCES.sub("", page.read_text())
    titles = re.findall(r"^#+ (.+)$", prose, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    for target, _, anchor in re.findall(r"\]\((?!https?:)([^)#]*)(#([^)]*))?\)", (ROOT / page).read_text()):
        file = (ROOT / page).parent / target if target else ROOT / page
        assert file.exists(), target
        assert not anchor or anchor in anchors(file), f"{target}#{anchor}"


def test_the_readme_leads_to_every_page() -> None:
    text = (ROOT / "README.md").read_text()
    assert [page for page in PAGES[1:] if f"]({page})" not in text] == []


def test_every_method_has_a_row_and_a_section() -> None:
    text = (ROOT / "docs/methods.md").read_text()
    rows = re.findall(r"^\| `(\w+)\(", text, re.MULTILINE)
    sections = re.findall(r"^### `(\w+)`", text, re.MULTILINE)
    assert sorted(rows) == sorted(offbeat.methods.__all__), "the table of docs/methods.md"
    assert sorted(sections) == sorted(offbeat.methods.__all__), "the sections of docs/methods.md"


@pytest.mark.slow
def test_every_method_has_a_picture() -> None:
    """Drawn by scripts/pictures from the log of a simulated run. The script still runs."""
    page = (ROOT / "docs/methods.md").read_text()
    for name in offbeat.methods.__all__:
        assert f"(pictures/{name}.svg)" in page, f"run scripts/pictures {name}"
        assert (ROOT / f"docs/pictures/{name}.svg").read_text().startswith("<svg"), name
    script = runpy.run_path(str(ROOT / "scripts/pictures"))
    with tempfile.TemporaryDirectory() as place:
        drawn = script["draw"]("ddp()", script["simulate"]("ddp()", Path(place) / "run"))
    shapes = (ROOT / "docs/pictures/ddp.svg").read_text().count("<rect")
    assert drawn.count("<rect") == shapes > 4 * 2 * 24


def test_the_reference_has_every_public_name() -> None:
    text = (ROOT / "docs/reference.md").read_text()
    assert sorted(re.findall(r"^::: offbeat\.names\.(\w+)$", text, re.MULTILINE)) == sorted(offbeat.__all__)
    members = re.findall(r"^        - (\w+)$", text, re.MULTILINE)
    assert sorted(members) == sorted(n for n in dir(offbeat.Synchronizer) if not n.startswith("_"))


@pytest.mark.slow
def test_the_script_of_the_start_page_prints_what_it_says(tmp_path: Path) -> None:
    text = (ROOT / "docs/index.md").read_text()
    (tmp_path / "train.py").write_text(text.split("```python\n")[1].split("```")[0])
    done = launched(*TORCHRUN, str(tmp_path / "train.py"))
    assert done.returncode == 0, done.stderr
    assert done.stdout == text.split("It prints:\n\n```text\n")[1].split("```")[0]


def families(page: str, pattern: str) -> list[str]:
    return [name.lower() for name in re.findall(pattern, (ROOT / page).read_text(), re.MULTILINE)]


def test_the_readme_has_one_method_of_each_family() -> None:
    calls = re.findall(r"^\| [\w -]+ \| `(\w+\(.*?\))` \|", (ROOT / "README.md").read_text(), re.MULTILINE)
    for call in calls:
        offbeat.method(call)
    named = families("README.md", r"^\| ([\w -]+) \| `\w+\(")
    assert named == families("docs/methods.md", r"^## (?!Common)(.+)$")
    assert len(calls) == len(named) == 6


EXAMPLES = {"digits.py": 120, "minimal.py": 50, "simulate.py": 80}
# The tests of the frameworks run these.
EXAMPLES |= {"accelerate_local_sgd.py": 80, "lightning_strategy.py": 80, "transformers_trainer.py": 80}


def test_examples_are_short_and_say_how_to_run_them() -> None:
    assert {path.name for path in ROOT.glob("examples/*.py")} == set(EXAMPLES)
    for name, most in EXAMPLES.items():
        text = (ROOT / "examples" / name).read_text()
        assert text.count("\n") <= most, f"{name} is longer than {most} lines"
        assert f"examples/{name}\n" in text.split('"""')[1], (
            f"{name}: the command is missing in the docstring"
        )


def launched(*command: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    return warm.run(*command, cwd=ROOT, env=environment)


TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


@pytest.mark.slow
@pytest.mark.parametrize("launch", [TORCHRUN, []], ids=["torchrun", "python"])
@pytest.mark.parametrize(
    ("example", "expected"),
    [
        (["examples/digits.py", "--steps", "12"], "hierarchical(nodes="),
        (["examples/minimal.py"], "weights [1.0, 2.0, 3.0,"),
        (["examples/simulate.py"], "rank 7"),
    ],
    ids=["digits", "minimal", "simulate"],
)
def test_examples_run_quietly(launch: list[str], example: list[str], expected: str) -> None:
    if launch and example == ["examples/simulate.py"]:
        pytest.skip("one process is enough for it")
    done = launched(*launch, *example)
    assert done.returncode == 0, done.stderr
    assert expected in done.stdout
    assert done.stderr == ""


@pytest.mark.slow
def test_a_bad_expression_is_one_sentence_printed_once() -> None:
    sentence = "method('local_sgd(evry=8)'): local_sgd has no argument 'evry'"
    alone = launched("examples/digits.py", "local_sgd(evry=8)")
    assert alone.returncode == 2
    assert alone.stderr.startswith(sentence)
    assert alone.stderr.count("\n") == 1
    together = launched(*TORCHRUN, "examples/digits.py", "local_sgd(evry=8)")
    assert together.stderr.count(sentence) == 1
    assert "exitcode  : 2" in together.stderr


@pytest.mark.parametrize("page", ["docs/benchmarks.md", "benchmarks/plan/log.md"])
def test_the_planner_is_judged_by_the_runs_that_are_logged(page: str) -> None:
    logged = map(json.loads, (ROOT / "benchmarks/plan/results.jsonl").read_text().splitlines())
    rows = {
        (row["rate"], row["method"], f"{row['measured']:.2f}", f"{row['error']:+.1%}")
        for row in logged
        if "method" in row
    }
    table = re.findall(
        r"^\| (\w+) \| `(.+?)` \| \w* \| \d+ \| [\d.]+ ± [\d.]+ \| ([\d.]+) \| (.+?) \|$",
        (ROOT / page).read_text(),
        re.MULTILINE,
    )
    assert len(table) == 21
    assert set(table) == rows


# Sections of docs/benchmarks.md whose tables are copied from a log; others come from .jsonl files.
COPIED = {
    "Loss against time": "curves",
    "A round": "round",
    "Pushes and pulls": "pushpull",
    "A late mean": "backward",
    "Overlap": "overlap",
    "Plan": "plan",
    "Simulation": "simulate",
    "Memory": "memory",
    "Frameworks": "frameworks",
    "Real workers": "waitfree",
    "Simulated workers": "waitfree",
}


def rows_below(title: str) -> list[str]:
    """The rows with figures in the section of docs/benchmarks.md."""
    text = (ROOT / "docs/benchmarks.md").read_text()
    section = re.split(rf"^##+ {title}$", text, flags=re.MULTILINE)[1]
    section = re.split(r"^##", section, flags=re.MULTILINE)[0]
    return [line for line in section.splitlines() if re.match(r"\|.*\d", line)]


@pytest.mark.parametrize(("title", "folder"), COPIED.items(), ids=list(COPIED))
def test_tables_are_those_of_the_logs(title: str, folder: str) -> None:
    logged = (ROOT / "benchmarks" / folder / "log.md").read_text().splitlines()
    rows = rows_below(title)
    assert len(rows) >= 3
    assert [row for row in rows if row not in logged] == []


def test_losses_are_the_means_of_the_runs_that_are_logged() -> None:
    losses: dict[str, list[float]] = {}
    for line in (ROOT / "benchmarks/quality/results.jsonl").read_text().splitlines():
        row = json.loads(line)
        if row["steps"] == 400:
            losses.setdefault(row["method"], []).append(row["loss"])
    expected = {
        (method, f"{mean(runs):.4f}", f"{stdev(runs):.4f}" if len(runs) > 1 else "", str(len(runs)))
        for method, runs in losses.items()
    }
    rows = [row.strip("| ").split(" | ") for row in rows_below("Quality")]
    assert {(row[0].strip("`"), *row[1:4]) for row in rows} == expected


def test_areas_are_those_of_the_runs() -> None:
    script = runpy.run_path(str(ROOT / "benchmarks/papers/coda.py"))
    logged = [json.loads(line) for line in script["RESULTS"].read_text().splitlines()]
    assert script["table"](logged) in (ROOT / "docs/benchmarks.md").read_text()


def test_delays_cost_what_the_log_says() -> None:
    script = runpy.run_path(str(ROOT / "benchmarks/delays/run.py"))
    rows = [row for row in script["table"](script["read"](script["RESULTS"])).splitlines() if "`" in row]
    assert rows_below("Delays") == rows


def test_losses_by_length_are_those_of_the_runs() -> None:
    script = runpy.run_path(str(ROOT / "benchmarks/quality/run.py"))
    logged = [json.loads(line) for line in script["RESULTS"].read_text().splitlines()]
    header, _, *lines = script["lengths"](logged).splitlines()
    assert rows_below("By length") == [header, *lines]


def test_outer_rates_are_those_of_the_runs() -> None:
    script = runpy.run_path(str(ROOT / "benchmarks/quality/sparse.py"))
    rows = [json.loads(line) for line in script["RESULTS"].read_text().splitlines()]
    assert script["table"](rows) in (ROOT / "docs/benchmarks.md").read_text()


def test_the_table_of_codes_is_that_of_its_log() -> None:
    script = runpy.run_path(str(ROOT / "benchmarks/codes/study.py"))
    rows = [json.loads(line) for line in script["RESULTS"].read_text().splitlines()]
    assert script["table"](rows) in (ROOT / "docs/codes.md").read_text()


def test_the_demo_printed_what_the_readme_shows() -> None:
    logged = (ROOT / "benchmarks/demo/log.md").read_text().splitlines()
    readme = (ROOT / "README.md").read_text()
    rows = re.findall(r"^\| `.*` \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \| (.*×) \|$", readme, re.MULTILINE)
    assert len(rows) == 5
    for row in rows:
        assert any(set(row) <= set(line.split()) for line in logged), row


def test_the_figure_is_drawn_from_its_log() -> None:
    script = runpy.run_path(str(ROOT / "benchmarks/curves/draw.py"))
    assert script["PICTURE"].read_text() == script["picture"](script["read"]())

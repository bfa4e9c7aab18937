"""`offbeat compare`, `study` and `report`, in simulation: tables, pages, and what they refuse."""

from __future__ import annotations

import json
import re
import shutil
import zipfile
from pathlib import Path
from typing import Any

import pytest
import warm
from test_every_method import one_of_each

from offbeat.app.cli.app import run
from offbeat.app.commands.train import _count_workers
from offbeat.tasks import digits_task

SMALL = ["--task", "digits", "--model", "tiny", "--workers", "2", "--steps", "12", "--evaluations", "3"]
METHODS = ["ddp", "local_sgd(every=4)", "cocod(every=4, delay=2)"]


def call(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = run(list(words))
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def simulated(capsys: pytest.CaptureFixture[str], out: Path, *words: str) -> list[dict[str, Any]]:
    code, text, error = call(
        capsys,
        "compare",
        *METHODS,
        *SMALL,
        "--simulate",
        "--link",
        "1mbit",
        "--out",
        str(out),
        "--json",
        *words,
    )
    assert (code, error) == (0, "")
    rows: list[dict[str, Any]] = json.loads(text)
    return rows


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A comparison that tests take copies of."""
    folder = tmp_path_factory.mktemp("comparison") / "runs"
    words = ["compare", *METHODS, *SMALL, "--simulate", "--link", "1mbit", "--quiet"]
    assert run([*words, "--out", str(folder)]) == 0
    return folder


def copied(capsys: pytest.CaptureFixture[str], made: Path, out: Path) -> list[dict[str, Any]]:
    """The rows of a copy of the comparison. All its runs are done."""
    shutil.copytree(made, out)
    return simulated(capsys, out)


SHARED = pytest.mark.xdist_group("comparison")


@SHARED
def test_the_same_seed_gives_the_same_table(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, made: Path
) -> None:
    first = copied(capsys, made, tmp_path / "one")
    assert first == simulated(capsys, tmp_path / "two")
    ddp, local, delayed = first
    assert [row["method"] for row in first] == ["ddp()", "local_sgd(every=4)", "cocod(every=4, delay=2)"]
    assert (ddp["rounds"], local["rounds"], delayed["rounds"]) == (12, 3, 3)
    assert ddp["megabytes"] == pytest.approx(4 * local["megabytes"], rel=0.01)
    assert ddp["seconds"] > local["seconds"] > delayed["seconds"]
    assert local["exposed"] > delayed["exposed"]
    assert delayed["hidden"] > local["hidden"]
    assert ddp["speedup"] == 1.0


@pytest.mark.slow
def test_report_computes_the_same_figures_from_the_logs(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    rows = simulated(capsys, tmp_path / "runs", "--seeds", "2")
    assert all(row["seeds"] == 2 and row["spread"] > 0 for row in rows)
    page = tmp_path / "again.html"
    code, text, _ = call(capsys, "report", str(tmp_path / "runs"), "--out", str(page), "--json")
    assert code == 0
    assert sorted(json.loads(text), key=lambda row: row["method"]) == sorted(
        rows, key=lambda row: row["method"]
    )
    assert page.stat().st_size > 20_000
    assert (tmp_path / "runs" / "report.html").exists()
    # One line of one log is changed, and the table follows.
    (log,) = (tmp_path / "runs").glob("00-*-seed0/rank-0.jsonl")
    log.write_text(log.read_text().replace('"rounds": 12, ', '"rounds": 14, '))
    _, text, _ = call(capsys, "report", str(tmp_path / "runs"), "--out", str(page), "--json")
    assert next(row for row in json.loads(text) if row["method"] == "ddp()")["rounds"] == 12.5


@SHARED
def test_a_comparison_goes_on_where_it_was_ended(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, made: Path
) -> None:
    whole = copied(capsys, made, tmp_path / "runs")
    (gone,) = (tmp_path / "runs").glob("01-*")
    (gone / "rank-1.jsonl").write_text('{"kind": "steps", "step": 1}\n{"kind"')
    kept = list((tmp_path / "runs").glob("0[02]-*/rank-0.jsonl"))
    before = {path: path.stat().st_mtime_ns for path in kept}
    assert simulated(capsys, tmp_path / "runs") == whole
    assert {path: path.stat().st_mtime_ns for path in kept} == before
    code, _, error = call(
        capsys, "compare", *METHODS, *SMALL, "--simulate", "--batch", "8", "--out", str(tmp_path / "runs")
    )
    assert code == 2
    assert error.endswith("this folder holds other runs; name another one.\n")


def test_the_table_for_people(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "runs"
    code, text, _ = call(
        capsys, "compare", "ddp", "local_sgd(every=4)", *SMALL, "--simulate", "--out", str(out)
    )
    assert code == 0
    for word in (
        "local_sgd(every=4)",
        "loss",
        "accuracy",
        "MB/worker",
        "s to ref. loss",
        "speed-up",
        "1.00×",
    ):
        assert word in text
    assert f"report: {out / 'report.html'}" in text
    assert (
        "\nThe untrained model is already at the loss of ddp() (within 5 %), so the times say nothing."
        in text
    )


GRID = ["--lr", "0.003,0.03", "--seeds", "2"]


@pytest.mark.slow
def test_a_search_of_rates_goes_on_and_report_shows_the_same(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = ["compare", *METHODS, *SMALL, "--simulate", "--link", "1mbit", "--out", str(tmp_path / "runs")]
    code, text, error = call(capsys, *words, *GRID, "--json")
    assert (code, error) == (0, "offbeat: 12 runs: 3 methods × 2 rates × 2 seeds\n")
    rows = json.loads(text)
    assert len(rows) == 3
    for number, row in enumerate(rows):
        assert [rate for rate, _ in row["rates"]] == [0.003, 0.03]
        assert [row["lr"], row["loss"]] == min(row["rates"], key=lambda rate: rate[1]), "the lower loss"
        for rate in ("0.003", "0.03"):
            for seed in (0, 1):
                (folder,) = (tmp_path / "runs").glob(f"{number:02d}-*-lr{rate}-seed{seed}")
                setting = json.loads((folder / "setting.json").read_text())
                assert (setting["lr"], setting["seed"]) == (float(rate), seed)
    _, text, _ = call(
        capsys, "report", str(tmp_path / "runs"), "--json", "--out", str(tmp_path / "again.html")
    )
    assert json.loads(text) == rows
    stamps = {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").glob("*/rank-0.jsonl")}
    code, text, error = call(capsys, *words, "--lr", "0.003,0.03,0.1", "--seeds", "2")
    assert (code, error) == (0, "offbeat: 18 runs: 3 methods × 3 rates × 2 seeds; 12 of them are done\n")
    assert {path: path.stat().st_mtime_ns for path in stamps} == stamps, "a wider search keeps what is there"
    assert re.search(r"┃ +lr ┃", text)
    assert "best at the first or the last rate, so another rate may be better: " in text
    code, _, error = call(capsys, *words, "--lr", "0.01")
    assert (code, error) == (0, ""), "a single rate is no search"
    assert (tmp_path / "runs" / "00-ddp-lr0.01-seed0").exists()


@pytest.mark.parametrize("first", [(), ("--lr", "0.03")], ids=["the rate of the task", "one rate"])
def test_more_rates_keep_the_runs_of_one(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, first: tuple[str, ...]
) -> None:
    words = ["compare", "ddp", *SMALL, "--simulate", "--out", str(tmp_path), "--json"]
    assert call(capsys, *words, *first)[0] == 0
    (log,) = tmp_path.glob("*/rank-0.jsonl")
    rate, stamp = json.loads((log.parent / "setting.json").read_text())["lr"], log.stat().st_mtime_ns
    rates = ["--lr", f"{rate / 2!r},{rate!r}"]
    code, text, error = call(capsys, *words, *rates)
    assert (code, error) == (0, "offbeat: 2 runs: 1 method × 2 rates; 1 of them is done\n")
    assert [lr for lr, _ in json.loads(text)[0]["rates"]] == [rate / 2, rate]
    assert (len(list(tmp_path.glob("*/rank-0.jsonl"))), log.stat().st_mtime_ns) == (2, stamp)
    assert call(capsys, *words, *rates, "--quiet") == (0, text, ""), "nothing is said"


def test_the_rate_of_the_task_keeps_a_run_whose_rate_was_given(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = ["compare", "ddp", *SMALL, "--simulate", "--out", str(tmp_path), "--json"]
    own = digits_task("tiny").lr
    for rates in (["--lr", f"{own!r},{2 * own!r}"], []):
        assert call(capsys, *words, *rates)[0] == 0
        assert len(list(tmp_path.glob("*/rank-0.jsonl"))) == 2


@pytest.mark.slow
def test_rates_are_searched_behind_real_links_too(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = ["torch_ddp", "local_sgd(every=4)", *SMALL, "--link", "100mbit", "--lr", "0.01,0.001,0.01"]
    with warm.on_hosts():
        code, text, error = call(
            capsys, "compare", *words, "--to-loss", "9", "--out", str(tmp_path), "--json"
        )
    assert (code, error) == (0, "offbeat: 4 runs: 2 methods × 2 rates\n"), "a rate given twice is one"
    for row in json.loads(text):
        assert [rate for rate, _ in row["rates"]] == [0.001, 0.01]
        assert (row["reached"], row["reached_megabytes"]) == (0.0, 0.0)


@SHARED
def test_a_loss_to_reach_is_a_view_of_the_same_runs(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, made: Path
) -> None:
    rows = copied(capsys, made, tmp_path / "runs")
    first = json.loads((next((tmp_path / "runs").glob("00-*")) / "rank-0.jsonl").read_text().splitlines()[0])
    target = (first["loss"] + rows[0]["loss"]) / 2
    again = simulated(capsys, tmp_path / "runs", "--to-loss", str(target))
    assert [row["loss"] for row in again] == [row["loss"] for row in rows]
    assert 0 < again[0]["reached"] < again[0]["seconds"]
    assert 0 < again[0]["reached_megabytes"] < again[0]["megabytes"]
    assert simulated(capsys, tmp_path / "runs", "--to-loss", "-1")[0]["reached"] is None
    words = [str(tmp_path / "runs"), "--out", str(tmp_path / "page.html"), "--to-loss", "0.5"]
    _, text, _ = call(capsys, "report", *words)
    assert "Nothing reached a loss of 0.5; the closest was " in text
    assert re.search(r"s to loss .*MB to loss", text)
    assert "s to ref." not in text
    assert '"to_loss": 0.5' in (tmp_path / "page.html").read_text()


@pytest.mark.slow
def test_every_method_is_searched_and_timed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    methods = one_of_each()
    words = ["--task", "digits", "--model", "tiny", "--workers", "2", "--steps", "8", "--evaluations", "2"]
    words += ["--simulate", "--link", "1gbit,10us", "--lr", "0.01,0.02", "--to-loss", "9"]
    code, text, error = call(capsys, "compare", *methods, *words, "--out", str(tmp_path), "--json")
    assert (code, error) == (0, f"offbeat: {2 * len(methods)} runs: {len(methods)} methods × 2 rates\n")
    rows = json.loads(text)
    assert [row["method"] for row in rows] == methods
    for row in rows:
        assert row["loss"] == min(loss for _, loss in row["rates"]), row["method"]
        assert row["rates"][0][1] != row["rates"][1][1], row["method"]
        assert (row["reached"], row["reached_megabytes"]) == (0.0, 0.0), row["method"]
        assert row["rounds"] >= 1, row["method"]
        assert row["megabytes"] > 0, row["method"]
        assert row["loss"] < 10, row["method"]


@pytest.mark.slow
@SHARED
def test_unlike_runs_have_their_own_tables(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, made: Path
) -> None:
    shutil.copytree(made, tmp_path / "one")
    simulated(capsys, tmp_path / "two", "--steps", "16", "--straggler", "rank=0,delay=1")
    torn = next((tmp_path / "two").glob("01-*")) / "rank-1.jsonl"
    lines = torn.read_text().splitlines(keepends=True)
    torn.write_text("".join(line for line in lines if '"kind": "end"' not in line))
    words = ["report", str(tmp_path / "one"), str(tmp_path / "two"), "--out", str(tmp_path / "both.html")]
    code, text, error = call(capsys, *words)
    assert (code, error) == (0, "")
    ours = [line for line in text.splitlines() if line.startswith("digits, ")]
    assert [line.strip() for line in ours] == [
        "digits, straggler none, 2 workers, 12 steps, 1mbit (simulated), 1 seed; the reference is ddp()",
        "digits, straggler rank=0,delay=1, 2 workers, 16 steps, 1mbit (simulated), 1 seed; "
        "the reference is ddp()",
    ]
    assert text.count("1.00×") == 2, "each has its own reference"
    assert "unfinished: local_sgd(every=4), seed 0 (16 of 16 steps)" in text
    code, text, error = call(capsys, *words, "--json")
    assert error == "offbeat: unfinished and left out: local_sgd(every=4), seed 0 (16 of 16 steps)\n"
    assert [row["method"] for row in json.loads(text)] == ["ddp()", *METHODS[1:], "ddp()", METHODS[2]]
    assert len({row["section"] for row in json.loads(text)}) == 2
    for path in (tmp_path / "two").glob("*/rank-1.jsonl"):
        path.write_text("")
    code, text, _ = call(capsys, "report", str(tmp_path / "two"), "--out", str(tmp_path / "none.html"))
    assert code == 0
    assert text.count("unfinished: ") == 3


@pytest.mark.slow
def test_a_study_is_a_grid_that_goes_on(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = ["study", "ddp", "local_sgd", "--model", "tiny", "--workers", "1,2", "--every", "2,5",
             "--samples", "320", "--out", str(tmp_path / "grid")]  # fmt: skip
    code, text, error = call(capsys, *words, "--json")
    assert (code, error) == (0, "")
    rows = json.loads(text)
    grid = [(row["method"], row["workers"], row["every"], row["steps"]) for row in rows]
    assert grid == [
        ("ddp", 1, None, 20), ("ddp", 2, None, 10),
        ("local_sgd", 1, 2, 20), ("local_sgd", 1, 5, 20), ("local_sgd", 2, 2, 10), ("local_sgd", 2, 5, 10),
    ]  # fmt: skip
    assert [row["rounds"] for row in rows] == [20, 10, 10, 4, 5, 2]
    assert rows[4]["megabytes"] == pytest.approx(2.5 * rows[5]["megabytes"], rel=0.01)
    stamps = {path: path.stat().st_mtime_ns for path in (tmp_path / "grid").glob("*/rank-0.jsonl")}
    code, text, _ = call(capsys, *words)
    assert code == 0
    assert "local_sgd" in text
    assert stamps == {path: path.stat().st_mtime_ns for path in (tmp_path / "grid").glob("*/rank-0.jsonl")}
    assert '"name": "local_sgd, 2 workers"' in (tmp_path / "grid" / "report.html").read_text()


def test_the_default_folder_of_a_study_holds_one_study(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["study", "local_sgd", "--model", "tiny", "--workers", "1", "--every", "2", "--samples"]
    assert call(capsys, *words, "64")[0] == 0
    code, _, error = call(capsys, *words, "96")
    assert code == 2
    sentence = "'runs/study' holds a study with other settings; name another folder with --out."
    assert error == f"offbeat: {sentence}\n"


def broken_zip(place: Path) -> str:
    (place / "broken.zip").write_bytes(b"no zip at all")
    return str(place / "broken.zip")


def broken_image(place: Path) -> str:
    with zipfile.ZipFile(place / "one.zip", "w") as target:
        for label in "ab":
            target.writestr(f"train/{label}/0.jpg", b"not a picture")
    return str(place / "one.zip")


def locked_image(place: Path) -> str:
    path = Path(broken_image(place))
    content = bytearray(path.read_bytes())
    for mark, offset in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):  # the flag that says: a password is needed
        start = 0
        while (start := content.find(mark, start)) >= 0:
            content[start + offset] |= 1
            start += 4
    path.write_bytes(content)
    return str(path)


def broken_task(place: Path, text: str) -> str:
    (place / "own.py").write_text(text)
    return "own.py"


@pytest.mark.parametrize("command", ["train", "compare"])
@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--task", "nope"], "There is no task 'nope': name one of bytes, digits, images, or a Python file"),
        (
            ["--task", "bytes", "--data", "gone.txt"],
            "offbeat: --data 'gone.txt': data must be the path of an existing file.",
        ),
        (
            ["--task", "images", "--data", "gone.zip"],
            "offbeat: --data 'gone.zip': data must be an existing",
        ),
        (["--task", "images", "--data", "BROKEN"], "this is not a readable zip (File is not a zip file)."),
        (
            ["--task", "images", "--data", "IMAGE"],
            "'train/a/0.jpg' cannot be decoded (it is not a picture); replace or delete it.",
        ),
        (
            ["--task", "images", "--data", "LOCKED"],
            "password required for extraction); replace or delete it.",
        ),
        (["--task", "SYNTAX"], "'own.py' cannot be used: SyntaxError: invalid syntax (own.py, line 1)."),
        (
            ["--task", "IMPORT"],
            "'own.py' cannot be used: line 1: ModuleNotFoundError: No module named 'nowhere'.",
        ),
        (["--task", "RAISES"], "'own.py' cannot be used: line 2: KeyError: 'size'."),
        (["--task", "mine.py"], "The task file 'mine.py' does not exist."),
        (["--model", "huge"], "offbeat: --model 'huge': size must be one of"),
        (["--workers", "0"], "--workers 0: must be at least 1."),
        (["--workers", "9999"], "offbeat: --workers 9999: there are 1438 training pictures"),
        (["--workers", "two"], "--workers"),
        (["--link", "100"], "--link '100': a number without a unit means bits per second: write 100mbit or"),
        (["--link", "100bananas"], "--link '100bananas': a link is a rate and perhaps a latency"),
        (["--straggler", "sometimes"], "--straggler 'sometimes': write rank=1,delay=300ms,every=4"),
        (["--steps", "0"], "--steps 0: must be at least 1."),
    ],
)
def test_bad_input_is_one_sentence(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    command: str,
    words: list[str],
    sentence: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    words = [
        {
            "BROKEN": broken_zip,
            "IMAGE": broken_image,
            "LOCKED": locked_image,
            "SYNTAX": lambda place: broken_task(place, "def task(:\n"),
            "IMPORT": lambda place: broken_task(place, "import nowhere\n"),
            "RAISES": lambda place: broken_task(place, "def task():\n    return {}['size']\n"),
        }.get(w, lambda place, w=w: w)(tmp_path)
        for w in words
    ]
    code, out, error = call(capsys, command, "local_sgd(every=8)", *words)
    assert (code, out) == (2, "")
    assert error.startswith("offbeat: ")
    assert sentence in error
    assert error.count("\n") == 1
    assert not (tmp_path / "runs").exists(), "nothing is left behind"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["compare", "local_sgd(evry=8)"], "method('local_sgd(evry=8)'): local_sgd has no argument 'evry'"),
        (["compare", "nope()"], "There is no method 'nope'; `offbeat methods` lists them."),
        (["compare", "ddp", "local_sgd", "ddp()"], "ddp() is given twice: leave one out.\n"),
        (
            ["compare", "local_sgd(every=4)", "local_sgd( every=4 )"],
            "local_sgd(every=4) is given twice: leave one out.\n",
        ),
        (
            ["study", "local_sgd(every=4)", "local_sgd(every=8)", "--model", "tiny", "--samples", "320"],
            "local_sgd(every=8) makes the same runs as local_sgd(every=4): leave one out.\n",
        ),
        (["study", "local_sgd", "local_sgd"], "local_sgd() is given twice: leave one out.\n"),
        (
            ["study", "torch_ddp"],
            "torch_ddp is torch's own DDP, which only `train` and `compare` run: use ddp.\n",
        ),
        (
            ["train", "wagma(every=4, reduce=Quantized(8))", "--model", "tiny"],
            "reduce=Quantized(bits=8, block=256, stochastic=False, seed=0): a lossy code would round the",
        ),
        (["compare", "ddp", "--netns", "--simulate"], "--netns and --simulate exclude each other."),
        (["compare", "ddp", "--seeds", "0"], "--seeds 0: must be at least 1."),
        (
            ["compare", "ddp", "hierarchical(nodes=3)"],
            "hierarchical(nodes=3): Subgroups(3): 4 workers do not divide into groups of 3;",
        ),
        (["compare", "torch_ddp", "--simulate"], "torch_ddp cannot be simulated: leave it out"),
        (["compare", "ddp", "--simulate", "--compute", "soon"], "--compute 'soon': a time is a number"),
        (["compare", "ddp", "--simulate", "--compute", "0"], "--compute '0': must be longer than 0."),
        (["compare", "ddp", "--compute", "5ms"], "--compute needs --simulate: real steps take the time"),
        (["compare", "ddp", "--compute", "5ms", "--netns"], "--compute needs --simulate: real steps take"),
        (
            ["compare", "ddp", "--lr", "0.1,fast"],
            "--lr '0.1,fast': must be a number, or several separated by",
        ),
        (
            ["compare", "ddp", "--lr", "0.1,"],
            "--lr '0.1,': must be a number, or several separated by commas.",
        ),
        (["compare", "ddp", "--lr", "0.1,-1"], "--lr -1.0: must be a positive number."),
        (["compare", "ddp", "--lr", "nan"], "--lr nan: must be a positive number."),
        (["compare", "ddp", "--to-loss", "nan"], "--to-loss nan: must be a finite number."),
        (["report", ".", "--to-loss", "inf"], "--to-loss inf: must be a finite number."),
        (
            ["lab", "--rate", "100", "--", "true"],
            "--link '100': a number without a unit means bits per second",
        ),
        (["train", "ddp", "--resume"], "--resume: name the run's folder with --checkpoint-dir."),
        (["train", "ddp", "--resume", "--checkpoint-dir", "gone"], "--resume: there is no run in 'gone'."),
        (["train", "ddp", "--checkpoint-every", "-1"], "--checkpoint-every -1: must be at least 0."),
        (["report", "gone"], "There is no run in gone: no folder below it has a setting.json."),
        (["study", "local_sgd", "--workers", "2,x"], "--workers '2,x': must be whole numbers,"),
        (["study", "local_sgd", "--every", "0"], "--every 0: must be at least 1."),
        (
            ["study", "local_sgd", "--samples", "5"],
            "--samples 5: one step of 2 workers with batches of 16",
        ),
        (["lab", "--workers", "0", "--", "true"], "--workers 0: hosts must be at least 1."),
        (["lab", "--link", "fast", "--", "true"], "--link 'fast': a link is a rate and perhaps a latency"),
        (
            ["lab", "--link", "1mbit,9ms", "--", "true"],
            "--link '1mbit,9ms': the links of a lab have a rate and no",
        ),
        (["lab", "--link", "1bit", "--", "true"], "--link '1bit': rate must be from 8kbit to 100gbit"),
        (["lab", "--", "no-such-command"], "The command 'no-such-command' does not exist."),
        (["lab", "--timeout", "0", "--", "true"], "--timeout 0.0: must be a positive number of seconds."),
    ],
)
def test_other_bad_input(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    words: list[str],
    sentence: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("offbeat.app.commands.lab.unavailable", lambda: None)
    code, out, error = call(capsys, *words)
    assert (code, out) == (2, "")
    assert error.startswith(f"offbeat: {sentence}")
    assert error.count("\n") == 1


def test_torchruns_number_of_workers_is_not_contradicted(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29999")
    code, out, error = call(capsys, "train", "ddp", "--workers", "4")
    assert (code, out) == (2, "")
    assert error == "offbeat: --workers 4: torchrun has started 2 workers; leave this option out.\n"
    assert [_count_workers(*pair) for pair in ((None, None), (3, None), (None, 2), (2, 2))] == [4, 3, 2, 2]


def test_a_refused_comparison_leaves_nothing_behind(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for words in (["compare", "ddp", "local_sgd(evry=8)"], ["study", "ddp", "local_sgd(evry=8)"]):
        code, out, error = call(capsys, *words, "--model", "tiny", "--out", str(tmp_path / "runs"))
        assert (code, out) == (2, "")
        assert "no argument 'evry'" in error
        assert not (tmp_path / "runs").exists()


def test_what_report_cannot_read_or_write(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "setting.json").write_text('{"theme": "dark"}')
    code, out, error = call(capsys, "report", str(tmp_path), "--out", str(tmp_path / "page.html"))
    assert (code, out) == (2, "")
    assert "setting.json' does not describe a run (" in error
    code, out, error = call(capsys, "report", str(tmp_path), "--out", str(tmp_path))
    assert (code, out) == (2, "")
    assert error.endswith("this is a folder; name an HTML file.\n")


def test_without_root_there_are_no_namespaces(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    for words in (["compare", "ddp", "--netns"], ["lab", "--", "true"]):
        code, _, error = call(capsys, *words)
        assert code == 2
        assert "A lab needs root" in error
        assert error.count("\n") == 1


@SHARED
def test_resuming_another_run_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, made: Path
) -> None:
    tmp_path = shutil.copytree(made, tmp_path / "runs")
    (folder,) = tmp_path.glob("01-*")
    code, _, error = call(capsys, "train", "ddp", *SMALL, "--checkpoint-dir", str(folder), "--resume")
    assert code == 2
    assert "has another setting: method was 'local_sgd(every=4)'" in error
    code, _, error = call(capsys, "train", "ddp", *SMALL, "--checkpoint-dir", str(folder))
    assert code == 2
    assert error.endswith("already: add --resume, or name another folder.\n")

"""The command line: its table of methods, its help, and one sentence for bad input."""

from __future__ import annotations

import io
import json
import sys
from types import ModuleType

import pytest
import torch
from rich.console import Console
from rich.progress import Progress

import offbeat
from offbeat.app.cli import main
from offbeat.app.cli.app import run
from offbeat.app.commands import show
from offbeat.app.commands.progress import draw_bar, line_columns
from offbeat.plan import methods_table as methods_table
from offbeat.plan.methods_table import without_warmup


def outcome(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = run(arguments)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.fixture(scope="module")
def entries() -> dict[str, methods_table.Entry]:
    return {entry.name: entry for entry in methods_table.methods_table()}


@pytest.mark.slow
def test_every_method_is_in_the_catalogue_with_its_paper(entries: dict[str, methods_table.Entry]) -> None:
    assert list(entries) == offbeat.methods.__all__
    for name, entry in entries.items():
        assert entry.call.startswith(f"{name}(")
        assert entry.summary.endswith(".")
        assert entry.lines
        assert name == "ddp" or "arXiv" in entry.reference, name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "share", "copies"),
    [
        ("ddp", 1.0, 1),
        ("local_sgd", 1 / 8, 1),
        ("post_local_sgd", 1 / 8, 2),  # no longer synchronous
        ("hierarchical", 1.0, 2),  # with all workers in one node
        ("qsr", 1 / 4, 1),  # while the rate is high
        ("adaptive", 1 / 4, 1),
        ("adacomm", 1 / 16, 1),
        ("cocod", 1 / 8, 2),  # one of them in flight
        ("dasgd", 1 / 8, 1),
        ("coda", 1 / 8, 4),
        ("desloc", (1 + 1 / 3 + 1 / 6) / 64, 2),  # one of them in flight
        ("slowmo", 1 / 12, 3),
        ("overlap_local_sgd", 1 / 2, 3),
        ("diloco", 1 / 64, 3),
        ("snoo", 1.0, 4),
        ("eager_diloco", 1 / 64, 5),
        ("noloco", 8 / (2 * 7) / 50, 3),
        ("palsgd", 1 / 64 / 0.9, 3),
        ("a2sgd", 1 / 32, 2),  # two numbers a step are nothing beside 124 M
        ("def_sgd", 1 / 64, 3),
        # 4 bits and a scale of 16 bits for 32 of them, with 32 bits each way in ddp
        ("streaming_diloco", (4 + 16 / 32) / 32 / 64, 3.16),
        # of 64, one value: 12 bits for its place, 2 for itself, four levels for 1 024; and to all the others
        ("sparse_loco", (12 + 2 + 128 / 1024) / 64 / 32 * 8 / 2 / 30, None),
        ("ssd_sgd", (1 + 1 / 5) / 2, 6.25),  # no longer in its warm-up
        ("od_sgd", 1.0, 6.25),
        ("wagma", (1 - 1 / 10) * (1 - 1 / 4) / (1 - 1 / 8) + 1 / 10, 5),
        ("eager_sgd", 1 + 1 / 10, 5),
        ("gradient_code", 1.0, 1),
    ],
)
def test_figures_are_those_of_the_theory(
    entries: dict[str, methods_table.Entry], name: str, share: float, copies: float | None
) -> None:
    entry = entries[name]
    assert entry.share_of_ddp == pytest.approx(share, rel=0.02)
    assert entry.bytes_per_step == pytest.approx(entry.share_of_ddp * 2 * 7 / 8 * 4 * 124e6, rel=1e-3)
    if copies is not None:
        assert entry.copies == pytest.approx(copies, abs=0.02)


@pytest.mark.slow
def test_only_the_methods_own_tensors_are_counted(
    entries: dict[str, methods_table.Entry],
) -> None:
    others = [torch.zeros(100_000), torch.eye(500).to_sparse()]
    (entry,) = methods_table.methods_table(["local_sgd"])
    assert entry.copies == pytest.approx(1, abs=0.02)
    assert len(others) == 2
    assert entries["streaming_diloco"].copies > 3.1, "the 4 bits have rooms of their own"


@pytest.mark.slow
def test_parts_tell_what_they_are(entries: dict[str, methods_table.Entry]) -> None:
    (line,) = entries["cocod"].lines
    assert line == methods_table.Line("Every(steps=8)", "World()", "parameters", "Correct()", "4")
    assert entries["ddp"].lines[0].sent == "gradients"
    assert entries["noloco"].lines[0].among == "Pairs()"
    assert entries["overlap_local_sgd"].lines[0].delay == "round"
    assert [line.when for line in entries["palsgd"].lines][1].startswith("PseudoSync(p=0.1")
    assert len(entries["streaming_diloco"].lines) == 4


@pytest.mark.slow
def test_the_warm_up_is_left_out_of_the_figures_alone(entries: dict[str, methods_table.Entry]) -> None:
    assert str(without_warmup(offbeat.method("ssd_sgd(every=5, warmup=500)"))) == "ssd_sgd(every=5, warmup=1)"
    assert str(without_warmup(offbeat.method("diloco(every=64)"))) == "diloco(every=64)"
    assert entries["ssd_sgd"].call == "ssd_sgd(every=5, warmup=500)"
    assert entries["ssd_sgd"].lines[0].when.startswith("PushPull(every=5, warmup=500, local=GLU(")


def test_methods_as_a_table_and_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = outcome(capsys, "methods", "diloco", "--verbose")
    assert (code, err) == (0, "")
    assert "diloco(every=64)" in out
    assert "0.0156" in out
    assert "Douillard et al." in out
    assert "For another outer optimizer" in out, "its documentation follows"
    code, out, err = outcome(capsys, "methods", "noloco", "--json")
    (entry,) = json.loads(out)
    assert (code, err, entry["name"]) == (0, "", "noloco")
    assert entry["lines"][0]["among"] == "Pairs()"
    assert outcome(capsys, "methods", "diloco(every=3)") == outcome(capsys, "methods", "diloco")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["methods", "nope"], "There is no method 'nope': name one of a2sgd, adacomm, adaptive,"),
        (
            ["methods", "torch_ddp"],
            "torch_ddp is torch's own DDP, which only `train` and `compare` run: use ddp.\n",
        ),
        (["mehtods"], "No such command 'mehtods'."),
        (["methods", "--jsn"], "No such option: --jsn"),
    ],
)
def test_bad_input_is_one_sentence(
    capsys: pytest.CaptureFixture[str], arguments: list[str], sentence: str
) -> None:
    code, out, err = outcome(capsys, *arguments)
    assert (code, out) == (2, "")
    assert err.startswith(f"offbeat: {sentence}")
    assert err.count("\n") == 1


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = outcome(capsys, "--help")
    assert code == 0
    assert "offbeat compare torch_ddp" in out
    assert "methods" in out
    assert outcome(capsys, "--version") == (0, f"offbeat {offbeat.__version__}\n", "")
    code, out, err = outcome(capsys)
    assert (code, err) == (2, "")
    assert "Usage" in out
    code, out, _ = outcome(capsys, "methods", "--help")
    assert code == 0
    assert "offbeat methods diloco" in out


def test_without_the_extra_one_command_installs_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "typer", None)
    with pytest.raises(SystemExit, match="2"):
        main()
    remedy = "pip install -c constraints.txt '.[cli]' in Offbeat's folder"
    assert capsys.readouterr() == ("", f"offbeat: the command line is an extra: {remedy}\n")


def test_completion_knows_the_commands(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = {"_OFFBEAT_COMPLETE": "complete_bash", "COMP_WORDS": "offbeat met", "COMP_CWORD": "1"}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "argv", ["offbeat"])
    monkeypatch.setitem(sys.modules, "__main__", ModuleType("__main__"))  # or it is `python -m pytest`
    with pytest.raises(SystemExit):
        main()
    assert capsys.readouterr().out.strip() == "methods"


COLUMNS = {"method": "fold", "loss": "right", "exposed s": "right", "MB/worker": "right"}
ROWS = [
    ["ddp()", "0.0949 ± 0.0012", "7.52", "68.91"],
    ["diloco(every=16, lr=1.0, momentum=0.3)", "0.0992 ± 0.0010", "2.39", "17.24"],
]


def printed(width: int, columns: dict[str, str] = COLUMNS, rows: list[list[str]] = ROWS) -> str:
    console = Console(width=width, highlight=False, file=io.StringIO())
    show.print_table(console, "digits, 4 workers", columns, rows)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert max(map(len, text.splitlines())) <= width
    return text


@pytest.mark.parametrize("width", [200, 100, 80, 60, 45, 30])
def test_a_table_is_whole_at_any_width(width: int) -> None:
    text = printed(width)
    assert "…" not in text
    for row in ROWS:
        for word in [*row[0].split(), *row[1:]]:
            assert word in text, word
    for heading in COLUMNS:
        assert heading == "method" or all(word in text for word in heading.split())


def test_the_layouts_of_a_table() -> None:
    assert "│ diloco(every=16, lr=1.0, momentum=0.3) │ 0.0992 ± 0.0010 │" in printed(100)
    assert "│ momentum=0.3) " in printed(70), "text is wrapped at blanks, figures are not"
    below = printed(45).splitlines()
    place = below.index("diloco(every=16, lr=1.0, momentum=0.3)")
    assert below[place + 1] == "  0.0992 ± 0.0010     2.39      17.24"
    assert "  loss 0.0992 ± 0.0010\n  exposed s 2.39\n" in printed(30)


def test_text_in_a_narrow_table_is_listed() -> None:
    columns = {"method": "fold", "when": "fold", "delay": "right"}
    rows = [["a(every=1)", "Every(steps=1)\nEvery(steps=16)", "0\n0"]]
    listed = "  when:\n    Every(steps=1);\n    Every(steps=16)\n  delay 0\n"
    assert printed(20, columns, rows).endswith(listed)


def test_lines_break_at_blanks_and_behind_parentheses() -> None:
    assert show.wrap("Outer(optimizer=SGD(lr=0.7, momentum=0.9))", 16) == [
        "Outer(", "optimizer=SGD(", "lr=0.7,", "momentum=0.9))",
    ]  # fmt: skip
    assert show.wrap("", 10) == [""]


def test_one_is_not_many() -> None:
    told = [show.count(count, "worker") for count in (1, 2, 1000)]
    assert told == ["1 worker", "2 workers", "1,000 workers"]


@pytest.mark.parametrize("width", [160, 80, 50])
def test_a_runs_line_is_whole_at_any_width(width: int) -> None:
    console = Console(width=width, file=io.StringIO(), force_terminal=True, color_system=None)
    progress = Progress(*line_columns(width), console=console)
    told = "loss 0.123  1,234 images/s  exposed 77%  12.3 MB  period 8  drift 0.01"
    bar = draw_bar(20, 300, 31.0, 420.0)
    progress.add_task("hierarchical(nodes=[[0], [1]]) seed 0", total=300, bar=bar, status=told)
    console.print(progress.get_renderable())
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert max(map(len, text.splitlines())) <= width
    for word in [
        "hierarchical(nodes=[[0],",
        "[1]])",
        "█",
        "20/300,",
        "31",
        "7",
        "min",
        "left",
        *told.split(),
    ]:
        assert word in text, word

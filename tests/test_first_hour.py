"""What a newcomer meets in the first hour: mistakes, damaged folders, the list of methods, a first task."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pty
import re
import runpy
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console
from rich.progress import Progress
from test_runs import trained
from torch.utils.data import DataLoader, TensorDataset

import offbeat
from offbeat.app.cli.app import run
from offbeat.app.cli.options import Refused, reading
from offbeat.app.cli.waiting import waiting
from offbeat.app.commands.catalogue import read_catalogue
from offbeat.app.commands.join import read_launch
from offbeat.app.commands.progress import Follower, Tail, follow_progress, track
from offbeat.app.commands.resume import resume_command
from offbeat.app.report.page import render
from offbeat.app.runs import folder as folders
from offbeat.app.runs.frames import describe
from offbeat.app.runs.setting import Setting
from offbeat.app.runs.summary import read
from offbeat.base.errors import OffbeatError
from offbeat.tasks import LoaderBatches, digits_task, find_task

ROOT = Path(__file__).parent.parent
PLAIN = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
Call = Callable[..., tuple[int, str, str]]


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Call:
    """Run a command in an empty folder."""
    monkeypatch.chdir(tmp_path)

    def answer(*words: str) -> tuple[int, str, str]:
        code = run(words)
        return code, *capsys.readouterr()

    return answer


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small run that nobody has touched."""
    return trained(tmp_path_factory.mktemp("made"), "local_sgd(every=4)", steps=8, checkpoint_every=4)


# The list of methods.


def test_the_list_of_methods_is_that_of_the_pages() -> None:
    collect = runpy.run_path(str(ROOT / "scripts/catalogue"))["collect"]
    assert read_catalogue() == collect(), "the pages have changed: run scripts/catalogue"
    page = (ROOT / "docs/methods.md").read_text()
    script = runpy.run_path(str(ROOT / "scripts/catalogue"))
    losses = script["read_losses"]((ROOT / "docs/benchmarks.md").read_text())
    assert script["add_losses"](page, losses) == page, "the losses have changed: run scripts/catalogue"
    names = [name for family in read_catalogue()["families"].values() for name in family]
    assert sorted(names) == offbeat.methods.__all__


def test_methods_are_listed_by_family_on_one_line_each(call: Call) -> None:
    code, out, error = call("methods")
    assert (code, error) == (0, "")
    for name in offbeat.methods.__all__:
        assert sum(line.startswith(f"  {name} ") for line in out.splitlines()) == 1, name
    assert out.startswith("Averaging\n  ddp ")
    assert "Every(" not in out, "reprs are for --verbose"


def test_a_method_is_explained(call: Call) -> None:
    code, out, error = call("methods", "diloco")
    assert (code, error) == (0, "")
    for text in (
        "Δ = mean(a − x)", "`momentum=0.9`: a larger value remembers more rounds", "Use it when",
        "Costs 1/every of the bytes", "diloco(every=16, ramp=0)", "3.0942 ± 0.0231", "34.1%", "arXiv",
    ):  # fmt: skip
        assert text in out, text
    elsewhere = " ".join(call("methods", "wagma")[1].partition("Measured\n")[2].split())
    assert elsewhere.startswith("in WAGMA: delayed workers (docs/papers.md), ")
    assert "not yet on a small GPT (docs/benchmarks.md)." in elsewhere


def test_a_method_that_was_measured_anywhere_says_where() -> None:
    """Only what no table has is called "not yet"."""
    pages = [(ROOT / "docs" / name).read_text() for name in ("benchmarks.md", "papers.md")]
    tables = "".join(re.sub(r"\n## (?:Memory|Plan)\n.*?(?=\n## )", "", page, flags=re.S) for page in pages)
    rows = [line for line in tables.splitlines() if line.startswith("|")]
    for family in read_catalogue()["families"].values():
        for name, about in family.items():
            if name != "ddp" and "not yet." in about["measured"]:
                assert not [row for row in rows if f"`{name}(" in row], name


@pytest.mark.parametrize("width", ["60", "100", "140"])
def test_the_explanations_of_methods_read_well_at_any_width(
    call: Call, monkeypatch: pytest.MonkeyPatch, width: str
) -> None:
    monkeypatch.setenv("COLUMNS", width)
    for name in offbeat.methods.__all__:
        lines = call("methods", name)[1].splitlines()
        assert not [line for line in lines if line.endswith("(")], name
        assert not [line for line in lines if line.strip() in ("options.", "options,")], name
        assert not [word for word in ("as above", "below)", "](") if word in " ".join(lines)], name


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (["methods", "dilco"], "diloco"),
        (["train", "dilco(every=3)"], "diloco"),
        (["train", "diloco(evry=3)"], "every"),
        (["train", "ddp", "--task", "digit"], "digits"),
        (["train", "ddp", "--model", "tny"], "tiny"),
    ],
)
def test_a_slip_of_the_finger_is_recognized(call: Call, words: list[str], meant: str) -> None:
    code, out, error = call(*words)
    assert (code, out) == (2, "")
    assert f"(did you mean {meant!r}?)" in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("command", ["train", "compare", "study", "plan"])
def test_a_misspelled_method_is_named_before_torch_is_loaded(
    call: Call, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.delitem(sys.modules, f"offbeat.app.commands.{command}", raising=False)  # comes back
    sentence = "There is no method 'dilco' (did you mean 'diloco'?); `offbeat methods` lists them."
    assert call(command, "dilco(every=3)") == (2, "", f"offbeat: {sentence}\n")
    assert f"offbeat.app.commands.{command}" not in sys.modules


@pytest.mark.parametrize(
    "words",
    [["diloco(evry=3)"], ["ddp", "--link", "100"], ["ddp", "--steps", "0"], ["ddp", "--seed", "9" * 30]],
)
def test_what_is_wrong_by_itself_is_said_before_the_task_is_loaded(call: Call, words: list[str]) -> None:
    for command in (["train", *words], ["compare", "ddp", *words]):
        code, out, error = call(*command, "--task", "there-is-no-such-file.py")
        assert (code, out, error.count("\n")) == (2, "", 1)
        assert "no-such-file" not in error


@pytest.mark.parametrize(
    ("words", "expected"),
    [("--version", "offbeat 0.1.0"), ("train eager_d", "eager_diloco"), ("train --li", "--link")],
)
def test_the_version_and_completion_do_not_wait_for_torch(words: str, expected: str) -> None:
    code = (
        "import sys; from offbeat.app.cli import main; sys.argv = ['offbeat', *sys.argv[1:]]\n"
        "try: main()\nfinally: assert not {'torch', 'numpy'} & set(sys.modules)"
    )
    if words.startswith("--"):
        arguments, extra = words.split(), {}
    else:
        typed = f"offbeat {words}"
        arguments, extra = [], {"_OFFBEAT_COMPLETE": "complete_bash", "COMP_WORDS": typed, "COMP_CWORD": "2"}
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, env={**PLAIN, **extra}
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.split("\n")[0].strip() == expected


# A damaged or foreign folder.


Damage = Callable[[Path], object]


def change(**values: Any) -> Damage:
    return lambda path: path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def without(name: str) -> Damage:
    def apply(path: Path) -> None:
        values = json.loads(path.read_text())
        path.write_text(json.dumps({key: value for key, value in values.items() if key != name}))

    return apply


def become_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


DAMAGES: dict[str, dict[str, Damage]] = {
    "setting.json": {
        **{f"workers {bad!r}": change(workers=bad) for bad in (10**9, 0, -1, "2", None, [2], True, 1.5)},
        **{f"steps {bad!r}": change(steps=bad) for bad in (10**30, "8", {})},
        **{f"method {bad!r}": change(method=bad) for bad in (None, 3, ["ddp"])},
        **{f"straggler {bad!r}": change(straggler=bad) for bad in ("rank=1", None, [3])},
        **{f"text {bad!r}": lambda path, bad=bad: path.write_text(bad) for bad in ("", "[]", "3", "nope")},
        "deep": lambda path: path.write_text("[" * 100_000),
        "bytes": lambda path: path.write_bytes(b"\xff\xfe"),
        "where": change(where="the moon"),
        "no method": without("method"),
        "unknown": change(colour="red"),
        "pipe": become_pipe,
    },
    "origin.json": {
        **{f"text {bad!r}": lambda path, bad=bad: path.write_text(bad) for bad in ("", "[]", '"x"', "{}")},
        "no unit": without("unit"),
        "command": change(command="offbeat train"),
        "parameters": change(parameters="many"),
        "missing": Path.unlink,
        "pipe": become_pipe,
    },
}


@pytest.mark.parametrize(("file", "damage"), [(file, name) for file in DAMAGES for name in DAMAGES[file]])
def test_a_damaged_description_is_named_in_one_sentence(
    call: Call, made: Path, tmp_path: Path, file: str, damage: str
) -> None:
    folder = copied(made, tmp_path)
    DAMAGES[file][damage](folder / file)
    code, out, error = call("report", str(folder))
    assert (code, out) == (2, "")
    assert error.startswith(f"offbeat: {str(folder / file)!r} does not describe a run (")
    assert error.count("\n") == 1


def copied(made: Path, place: Path) -> Path:
    """A copy of the run that may be damaged."""
    return Path(shutil.copytree(made, place / "run"))


LINES = [
    "", "3", "null", "[]", "{}", '{"kind": "steps"}', '{"kind": "round", "step": 1}', '{"kind": ["end"]}',
    '{"kind": "eval", "step": "1", "t": 1, "units": 3, "sent": 1, "loss": 2}', '{"kind": "dance", "step": 1}',
    '{"kind": "steps", "step": 1, "t": 1e999, "seconds": 1, "exposed": 0, "loss": 1, "units": 1}', "\x00\x01",
    '{"kind": "end", "step": 1, "t": 1, "rounds": 1, "sent": 1e400, "exposed": 0, "air": 0}', "[" * 50_000,
]  # fmt: skip


def test_foreign_lines_of_a_log_are_skipped_with_one_warning(call: Call, made: Path, tmp_path: Path) -> None:
    code, expected, error = call("report", str(made))
    assert (code, error) == (0, "")
    folder = copied(made, tmp_path)
    log = folders.log_path(folder, 0)
    whole = log.read_text().splitlines(keepends=True)
    log.write_text("".join([whole[0], *[line + "\n" for line in LINES], *whole[1:], '{"kind": "st']))
    code, out, error = call("report", str(folder))
    assert (code, out) == (0, expected)
    first = f"{log}: skipped {len(LINES) + 1} lines that a run does not write, the first is line 2"
    assert error == f"offbeat: {first}\n"


def test_a_pipe_in_place_of_a_log_is_an_unfinished_run(call: Call, made: Path, tmp_path: Path) -> None:
    folder = copied(made, tmp_path)
    become_pipe(folder / "rank-1.jsonl")
    code, out, error = call("report", str(folder))
    assert (code, error) == (0, f"offbeat: {folder / 'rank-1.jsonl'}: not read, because it is not a file\n")
    assert "unfinished: local_sgd(every=4), seed 0 (0 of 8 steps)" in out


def test_a_million_lines_are_read_in_seconds(made: Path, tmp_path: Path) -> None:
    log = folders.log_path(copied(made, tmp_path), 0)
    lines = log.read_bytes() * (100_000 // log.read_bytes().count(b"\n"))
    log.write_bytes(lines)
    start = time.process_time()
    assert len(list(folders.entries(log))) == lines.count(b"\n")
    assert time.process_time() - start < 2, "15 s for a million is too slow"


def test_names_reach_neither_the_terminal_nor_the_page_raw(call: Call, made: Path, tmp_path: Path) -> None:
    folder = copied(made, tmp_path)
    change(method="\x1b[31m<!--<script>(every=4)", task="\x07bell")(folder / "setting.json")
    code, out, error = call("report", str(folder))
    assert (code, error) == (0, "")
    assert r"\x1b[31m<!--<script>" in out
    assert not {"\x1b", "\x07"} & set(out)
    data = render([read(folder)]).split('type="application/json">')[1].split("</script>")[0]
    assert "<" not in data
    assert json.loads(data)[0]["rows"][0]["method"] == "\x1b[31m<!--<script>(every=4)"


# Checkpoints, the lock, the disk.


def test_a_folder_has_one_run_at_a_time(call: Call, tmp_path: Path) -> None:
    with folders.lock(tmp_path / "run"):
        code, out, error = call("train", "ddp", "--steps", "2", "--checkpoint-dir", "run")
    assert (code, out) == (2, "")
    assert error == "offbeat: Another process is training in this folder: 'run'.\n"
    assert not (tmp_path / "run/setting.json").exists()
    words = [
        "compare",
        "ddp",
        "--simulate",
        "--model",
        "tiny",
        "--workers",
        "2",
        "--steps",
        "2",
        "--out",
        "run",
    ]
    with folders.lock(tmp_path / "run"):
        assert call(*words)[0] == 2
    assert call(*words)[0] == 0
    code, out, _ = call("report", "run")
    assert code == 0
    assert "the reference is" not in out, "there is nothing to compare with it"
    Path("file").touch()
    code, out, error = call("train", "ddp", "--steps", "2", "--checkpoint-dir", "file")
    assert (code, error) == (2, "offbeat: 'file' is a file: name a folder.\n")
    code, out, error = call("train", "ddp", "--steps", "2", "--checkpoint-dir", "file/inside")
    sentence = "The folder 'file/inside' cannot be made or written (Not a directory)."
    assert (code, error) == (2, f"offbeat: {sentence}\n")
    assert call("init", "tsk")[2] == "offbeat: Invalid value for 'what': 'tsk' is not one of 'task'.\n"
    small = ["--model", "tiny", "--workers", "2", "--every", "2", "--samples", "128"]
    with folders.lock(tmp_path / "grid"):
        code, out, error = call("study", "local_sgd", *small, "--out", "grid")
    assert (code, out) == (2, "")
    assert error == "offbeat: Another process is training in this folder: 'grid'.\n"
    assert [path.name for path in (tmp_path / "grid").iterdir()] == [".lock"]
    assert call("study", "local_sgd", *small, "--out", "grid")[0] == 0


def test_a_full_disk_is_one_sentence(tmp_path: Path) -> None:
    store = folders.CheckpointStore(tmp_path, rank=0, workers=1)
    place = tmp_path / "step-000000004"
    place.mkdir()
    (place / f".rank-0.pt.{os.getpid()}").symlink_to("/dev/full")
    with pytest.raises(OffbeatError, match=r"^Cannot write '.*rank-0.pt': the disk is full\.$"):
        store.save(4, {"x": torch.zeros(100_000)})
    assert describe(OSError(28, "No space left on device", "log")) == "the disk is full: 'log'."
    with pytest.raises(Refused, match=r"^No space left on device\.$"), reading():
        raise OSError(28, "No space left on device")


@pytest.mark.parametrize("name", ["rng", "sync", "model", "costs", "units"])
def test_a_checkpoint_that_lacks_something_is_refused(made: Path, tmp_path: Path, name: str) -> None:
    folder = copied(made, tmp_path)
    path = folder / "checkpoints/step-000000004/rank-0.pt"
    state = torch.load(path, weights_only=True)
    del state[name]
    torch.save(state, path)
    with pytest.raises(OffbeatError, match=f"Rank 0's checkpoint does not fit this run: it has no '{name}'"):
        resumed(folder)


def resumed(folder: Path) -> bool:
    from offbeat.app.runs.launch import launch

    for rank in range(2):  # back to the first checkpoint
        (folder / f"checkpoints/step-000000008/rank-{rank}.pt").unlink()
    return launch([folder], resume=True)


def test_strange_files_beside_checkpoints_do_not_matter(made: Path, tmp_path: Path) -> None:
    folder = copied(made, tmp_path)
    for stray in ("step-", "step-x", "step-000000012/rank-0.pt", "step-000000012/rank-1.pt", "step-²"):
        (folder / "checkpoints" / stray).mkdir(parents=True)
    assert resumed(folder)
    assert [end["weights"] for end in read(folder).ends] == [end["weights"] for end in read(made).ends]


def test_a_finished_run_says_so_and_keeps_its_settings(call: Call, made: Path, tmp_path: Path) -> None:
    folder = copied(made, tmp_path)
    change(where="processes")(folder / "setting.json")
    words = ["train", "--resume", "--checkpoint-dir", str(folder)]
    code, out_of_one, error = call(*words)
    assert (code, error) == (0, "")
    assert (
        out_of_one
        == f"offbeat: the run in {str(folder)!r} is finished, after 8 steps; a larger --steps extends it\n"
    )
    for extra, sentence in {
        ("--batch", "3"): "has another setting: batch was 16.",
        ("--steps", "4"): "--steps 4: the run in",
    }.items():
        code, out, error = call(*words, *extra)
        assert (code, out) == (2, "")
        assert sentence in error
    assert call(*words, "--workers", "3") == (0, out_of_one, "")
    assert call(words[0], "local_sgd(every=4)", *words[1:])[0] == 0
    code, _, error = call("train", "--resume", "--checkpoint-dir", "nowhere")
    assert (code, error) == (2, "offbeat: --resume: there is no run in 'nowhere'.\n")
    # The folder has the name that it has in `compare`, too, and is no value of --resume.
    assert call("train", "--resume", "--out", str(folder)) == (0, out_of_one, "")
    code, _, error = call("train", "--resume", str(folder))
    assert code == 2
    assert f"--resume takes no value: name the folder with --checkpoint-dir {folder}." in error


def test_a_method_that_cannot_change_its_number_says_so(call: Call, made: Path, tmp_path: Path) -> None:
    folder = copied(made, tmp_path)
    change(where="processes", method="overlap_local_sgd(every=4)")(folder / "setting.json")
    before = sorted(folder.rglob("*"))
    words = ["train", "--resume", "--checkpoint-dir", str(folder), "--steps", "12", "--workers", "3"]
    code, out, error = call(*words)
    assert (code, out) == (2, "")
    assert error == (
        "offbeat: --workers 3: overlap_local_sgd(every=4) cannot go on with another number of workers than "
        "the 2 it had, because each worker has an anchor of its own.\n"
    )
    assert sorted(folder.rglob("*")) == before


def test_a_simulated_run_goes_on_with_more_and_with_fewer(made: Path, tmp_path: Path) -> None:
    """From the newest complete checkpoint, whose number of workers is noted in it."""
    from offbeat.app.runs.launch import launch

    folder = copied(made, tmp_path)
    store = folders.CheckpointStore(folder / "checkpoints", rank=0, workers=2)
    assert store.steps() == [4, 8]
    (folder / "checkpoints/step-000000009").mkdir()
    shutil.copy(folder / "checkpoints/step-000000008/rank-1.pt", folder / "checkpoints/step-000000009")
    for old, new, steps in ((2, 3, 12), (3, 1, 14), (1, 4, 15)):
        folders.CheckpointStore(folder / "checkpoints", rank=0, workers=old).hand_over()
        change(workers=new, steps=steps)(folder / "setting.json")
        assert launch([folder], resume=True)
        run = read(folder)
        assert run.complete
        assert [end["step"] for end in run.ends] == [steps] * new
        assert len({end["weights"] for end in run.ends}) == 1
        assert run.evals[-1]["loss"] < run.evals[0]["loss"]
        left = folders.CheckpointStore(folder / "checkpoints", rank=0, workers=new)
        assert left.workers_of(left.steps()[-1]) == new
    assert [(step, left.workers_of(step)) for step in left.steps()][-2:] == [(14, 1), (15, 4)]


def test_without_tensorboard_nothing_is_written(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    code, _, error = call("train", "ddp", "--tensorboard", "--checkpoint-dir", "run")
    assert (code, error) == (
        2,
        "offbeat: --tensorboard: TensorBoard is not installed: pip install tensorboard\n",
    )
    assert not Path("run").exists()


# Workers that something else has started.


@pytest.mark.parametrize(
    ("environment", "sentence"),
    [
        ({"RANK": "7"}, "RANK=7 WORLD_SIZE=2: 2 workers have the ranks 0 to 1."),
        (
            {"RANK": "x"},
            "The environment has RANK, but RANK is 'x', not a whole number: use torchrun, or set it.",
        ),
        (
            {"MASTER_PORT": ""},
            "The environment has RANK, but MASTER_PORT is not set: use torchrun, or set it.",
        ),
    ],
)
def test_a_bad_environment_is_refused_at_once_on_any_rank(
    call: Call, monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], sentence: str
) -> None:
    good = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29999"}
    for name, value in {**good, **environment}.items():
        monkeypatch.setenv(name, value)
    code, out, error = call("train", "ddp")
    assert (code, out, error.count("\n")) == (2, "", 1)
    assert error.startswith(f"offbeat: {sentence}")


# A first task.


def test_the_first_task_runs_and_is_not_overwritten(call: Call, tmp_path: Path) -> None:
    code, out, error = call("init", "task")
    assert (code, error) == (0, "")
    assert "--task task.py" in out
    code, _, error = call("init", "task")
    assert (code, error) == (2, "offbeat: 'task.py' exists already: name another file.\n")
    words = ["compare", "local_sgd(every=4)", "--task", "task.py", "--simulate", "--workers", "2", "--json"]
    code, out, error = call(*words, "--steps", "150", "--out", "runs")
    assert code == 0, error
    (found,) = json.loads(out)
    assert found["loss"] < 0.45
    assert found["accuracy"] > 0.8


def loader(count: int = 10, **options: Any) -> LoaderBatches:
    data = TensorDataset(torch.arange(count), torch.arange(count))
    own = {"rank": options.pop("rank", 0), "seed": options.pop("seed", 0)}
    return LoaderBatches(DataLoader(data, **{"batch_size": 3, "shuffle": True, **options}), **own)


def taken(batches: LoaderBatches, count: int) -> list[list[int]]:
    return [next(batches)[0].tolist() for _ in range(count)]


@pytest.mark.parametrize("own", [False, True])
def test_a_loader_goes_on_for_ever_and_resumes_exactly(own: bool) -> None:
    def build(**options: int) -> LoaderBatches:
        return loader(generator=torch.Generator() if own else None, **options)

    batches, state = build(), torch.get_rng_state()
    first, second = ([value for batch in taken(batches, 4) for value in batch] for _ in range(2))
    assert sorted(first) == sorted(second) == list(range(10)) != first
    assert first != second
    assert torch.equal(torch.get_rng_state(), state), "torch's own random numbers are not used up"
    for steps in range(1, 9):
        one, two = build(), build()
        taken(one, steps)
        two.load_state_dict(one.state_dict())
        assert taken(one, 6) == taken(two, 6)
    assert taken(build(seed=1), 4) != taken(build(), 4) != taken(build(rank=1), 4)


def test_a_loader_that_gives_no_batches() -> None:
    with pytest.raises(ValueError, match="The DataLoader of rank 0 gives no batch"):
        next(loader(2, drop_last=True))
    batches = LoaderBatches(DataLoader([{"x": 1}, {"x": 2}]), rank=0, seed=0)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"gives a dict: a batch must be \(inputs, targets\)"):
        next(batches)


# Errors of the user's own code.

BROKEN = """
from dataclasses import replace
from offbeat.tasks import digits_task

def task(seed=0):
    def loss(model, batch):
        return deep(model)
    def deep(model):
        raise RuntimeError("boom")
    return replace(digits_task("tiny", seed=seed), name="task", loss=loss)

def early():
    raise KeyError("data")
"""


def test_an_error_of_a_task_shows_where_it_happened(call: Call, tmp_path: Path) -> None:
    Path("broken.py").write_text(BROKEN)
    code, _, error = call(
        "compare", "ddp", "--task", "broken.py", "--simulate", "--steps", "3", "--out", "here"
    )
    assert code == 1
    assert error.startswith('offbeat: RuntimeError: boom\n  File "')
    assert 'broken.py", line 9, in deep\n    raise RuntimeError("boom")\n' in error
    assert "offbeat/app" not in error, "our own frames are hidden"
    output = Path(error.rstrip().rpartition(" ")[2])
    assert "offbeat/app" in output.read_text(), "and kept in a file"
    with pytest.raises(ValueError, match=r"'broken.py:early' cannot be used: line 13: KeyError: 'data'"):
        find_task("broken.py:early")


# Progress and Ctrl-C.


@pytest.mark.slow
def test_something_is_said_from_the_first_moment(tmp_path: Path) -> None:
    """On a terminal, before torch is loaded, and erased again; in order, with the time it takes."""
    command = [
        sys.executable,
        "-m",
        "offbeat",
        "plan",
        "ddp",
        "--workers",
        "2",
        "--step",
        "1s",
        "--steps",
        "9",
    ]
    master, terminal = pty.openpty()
    process = subprocess.Popen(
        [*command, "--parameters", "1M", "--link", "1gbit"],
        stdout=subprocess.PIPE,
        stderr=terminal,
        cwd=tmp_path,
    )
    os.close(terminal)
    seen = b""
    with contextlib.suppress(OSError):  # the other end is closed
        while some := os.read(master, 10_000):
            seen += some
    os.close(master)
    out, _ = process.communicate(timeout=100)
    assert process.returncode == 0
    lines = [re.sub(r"\x1b\[K|, \d+ s", "", line)[2:] for line in seen.decode().split("\r")]
    said = [line for line, before in zip(lines, ["", *lines], strict=False) if line and line != before]
    assert said[0] == "loading torch"
    assert said[-1] in ("planning", "planning ddp")
    assert seen.endswith(b"\r\x1b[K"), "nothing is left of it"
    assert b"loading" not in out


def test_waiting_is_said_without_a_terminal_if_it_takes_long(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("offbeat.app.cli.waiting.SILENT", 0.05)
    with waiting("reading"):
        time.sleep(0.3)
    assert capsys.readouterr().err.startswith("offbeat: reading, 0 s\n")
    with waiting("reading", quiet=True):
        time.sleep(0.2)
    monkeypatch.setenv("RANK", "1")
    with waiting("reading"):
        time.sleep(0.2)
    assert capsys.readouterr().err == ""


def test_progress_says_which_run_starts_and_stops_the_clock_of_one_that_is_done(tmp_path: Path) -> None:
    """Of two runs, one has not written anything yet; the time of a run is its own."""
    places = [tmp_path / name for name in ("one", "two")]
    for folder in places:
        setting = Setting(method="local_sgd()", workers=2, steps=2, batch=4, lr=0.1, where="simulation")
        folders.prepare(folder, setting, digits_task("tiny"), command=["offbeat"])
    printed = io.StringIO()
    console = Console(file=printed, width=200)
    one, two = (Follower(folder, Progress(console=console), verbose=True) for folder in places)
    one.start = time.monotonic() - 60
    one.poll()
    two.poll()
    assert (one._status(), two._status()) == ("starting", "waiting")
    record = folders.Record(folders.log_path(places[0], 0))
    record.write("eval", step=0, t=0.0, units=0, sent=0, loss=2.5)
    one.poll()
    assert one._status() == "making the first step"
    assert "local_sgd() seed 0: step 0: loss 2.5000, 0.00 s, 0.00 MB\n" in printed.getvalue()
    for step in (1, 2):
        record.write("steps", step=step, t=1.0, seconds=1.0, exposed=0.0, loss=2.0, units=4)
    record.close()
    one.poll()
    assert one.done
    done = one._bar()
    assert "2/2, 60 s" in done
    one.start -= 600
    one.poll()
    assert one._bar() == done
    assert two._bar().endswith("0/2, 0 s")


def test_progress_without_a_terminal_is_a_line_from_time_to_time(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = copied(made, tmp_path)
    log = folders.log_path(folder, 0)
    lines = log.read_text().splitlines(keepends=True)
    half = next(i for i, line in enumerate(lines) if '"step": 5' in line)
    log.write_text("".join(lines[:half]))
    monkeypatch.setattr("offbeat.app.commands.progress.LINE", 0.3)
    for quiet in (True, False):
        with follow_progress([folder], quiet=quiet):
            time.sleep(1)
        error = capsys.readouterr().err
        assert error.startswith("" if quiet else "offbeat: local_sgd(every=4) seed 0: 4/8, ")
        assert "loss" in error or quiet
        assert bool(error) is not quiet


def test_progress_goes_on_while_one_of_several_runs_takes_long(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("offbeat.app.commands.progress.LINE", 0.0)
    monkeypatch.setattr("offbeat.app.commands.progress.LOOK", 0.01)
    for done, item in enumerate(track(["first", "second"], "runs")):
        said, deadline = "", time.monotonic() + 60
        while f"offbeat: runs {done}/2, " not in said:
            assert time.monotonic() < deadline, (item, said)
            said += capsys.readouterr().err
        assert ("left" in said.splitlines()[-1]) is (item == "second")


def test_a_log_that_is_cut_is_read_from_the_beginning(tmp_path: Path) -> None:
    path, tail = tmp_path / "rank-0.jsonl", Tail(tmp_path / "rank-0.jsonl")
    line = {"t": 0.0, "seconds": 0.5, "exposed": 0.0, "loss": 1.0, "units": 8}
    for steps, expected in ((range(1, 4), [1, 2, 3]), (range(4, 6), [4, 5])):
        record = folders.Record(path)
        for step in steps:
            record.write("steps", step=step, **line)
        record.close()
        assert not tail.replaced()
        assert [entry["step"] for entry in tail.read()] == expected
    folders.cut(path, after=2)
    record = folders.Record(path)
    for step in range(3, 9):  # longer than before, by the time of the next look
        record.write("steps", step=step, **line)
    record.close()
    assert tail.replaced()
    assert [entry["step"] for entry in tail.read()] == list(range(1, 9))


@pytest.mark.parametrize(
    ("options", "environment", "expected"),
    [
        ({}, {}, "offbeat train --resume --checkpoint-dir 'runs/my run'"),
        (
            {"tensorboard": True, "quiet": True}, {},
            "offbeat train --resume --checkpoint-dir 'runs/my run' --tensorboard --quiet",
        ),
        (
            {}, {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "x"},
            "torchrun --nproc-per-node 2 -m offbeat train --resume --checkpoint-dir 'runs/my run'",
        ),
        (
            {"json": True},
            {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "x"},
            "offbeat train --resume --checkpoint-dir 'runs/my run' --json as each of the 4 workers",
        ),
        (
            {}, {"RANK": "0", "WORLD_SIZE": "2"},
            "offbeat train --resume --checkpoint-dir 'runs/my run' as each of the 2 workers",
        ),
        (
            {"elastic": True, "token": Path("s"), "lighthouse": "http://a"}, {},
            "offbeat train --elastic --resume --checkpoint-dir 'runs/my run' --lighthouse http://a --token s",
        ),
    ],
)  # fmt: skip
def test_a_stopped_run_is_continued_as_it_was_started(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], environment: dict[str, str], expected: str
) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"MASTER_ADDR": "here", "MASTER_PORT": "1", **environment}.items():
        monkeypatch.setenv(name, value)
    names = ("tensorboard", "quiet", "verbose", "json", "elastic")
    given = SimpleNamespace(**{**dict.fromkeys(names, False), "token": None, "lighthouse": None, **options})
    assert resume_command(Path("runs/my run"), given, read_launch()) == expected


def test_little_is_imported_before_ctrl_c_is_one_line() -> None:
    """Until the handler is set, Ctrl-C is a traceback of Python's own."""
    slow = {"typing", "re", "threading", "contextlib", "pathlib", "typer", "rich", "torch"}
    code = "import sys; before = set(sys.modules); import offbeat.app.cli\n"
    code += f"print(sorted({slow!r} & set(sys.modules) - before))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=PLAIN)
    assert (done.stdout, done.stderr) == ("[]\n", "")


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.parametrize("moment", ["import", "plan"])
def test_ctrl_c_is_one_line_at_any_moment(moment: str) -> None:
    cluster = ["--workers", "64", "--step", "1s", "--parameters", "1M", "--link", "1gbit"]
    command = [sys.executable, "-m", "offbeat", "plan", "wagma()", "ssd_sgd()", *cluster, "--steps", "100000"]
    options: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": PLAIN}
    process = subprocess.Popen(command, start_new_session=True, **options)
    about, deadline = Path(f"/proc/{process.pid}"), time.monotonic() + 120

    def reached() -> bool:
        if moment == "import":
            return "libtorch_cpu" in (about / "maps").read_text()
        return sum(map(int, (about / "stat").read_text().split()[13:15])) >= 300  # 3 s of CPU

    while process.poll() is None and time.monotonic() < deadline and not reached():
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    out, error = process.communicate(timeout=60)
    said = [line for line in error.splitlines() if not line.startswith("offbeat: loading torch, ")]
    assert (process.returncode, out, said) == (130, "", ["offbeat: stopped"])

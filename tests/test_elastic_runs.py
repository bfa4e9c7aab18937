"""`offbeat train --elastic` and `offbeat join`: workers of a run come and go."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
from test_first_hour import Call, call  # noqa: F401  # a fixture
from test_train import end_all, started, until

from offbeat.app.commands import elastic as command
from offbeat.app.report.page import render
from offbeat.app.runs import folder as folders
from offbeat.app.runs.elastic import saved_steps
from offbeat.app.runs.presence import Presence, list_presence
from offbeat.app.runs.seats import count_taken, take_seat
from offbeat.app.runs.setting import Setting
from offbeat.app.runs.summary import Logged, read
from offbeat.base.errors import OffbeatError


def test_seats_are_free_again(tmp_path: Path) -> None:
    with take_seat(tmp_path, 2) as first, take_seat(tmp_path, 2) as second:
        assert (first, second) == (0, 1)
        assert count_taken(tmp_path, 2) == 2
        with (
            pytest.raises(OffbeatError, match=r"All 2 workers of the run in .* are there"),
            take_seat(tmp_path, 2),
        ):
            pass
    assert count_taken(tmp_path, 2) == 0
    with take_seat(tmp_path, 2) as first:
        assert first == 0


def test_a_busy_machine_does_not_end_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process that watches the workers may be stopped for seconds between any two of its instructions."""
    times, over = itertools.count(step=100.0), iter([False, False, True])
    clock = SimpleNamespace(sleep=lambda seconds: None, monotonic=lambda: next(times))
    monkeypatch.setattr(command, "time", clock)
    monkeypatch.setattr(folders, "finished", lambda place: next(over))
    answers = iter([None] * 4)
    worker = SimpleNamespace(poll=lambda: next(answers, 0), returncode=None)
    command._watch([worker], tmp_path, SimpleNamespace(workers=2), "")  # type: ignore[arg-type, list-item]
    with pytest.raises(StopIteration):
        next(over)


def write_log(folder: Path, seat: int, *entries: dict[str, object]) -> None:
    folders.log_path(folder, seat).write_text("".join(json.dumps(entry) + "\n" for entry in entries))


def life(t: float, alive: bool = True) -> dict[str, object]:
    return {"kind": "life", "step": 0, "t": t, "alive": alive}


def round_of(number: int, t: float, **more: object) -> dict[str, object]:
    costs = {"exposed": 0.0, "air": 0.0, "sent": 1, "drift": None, "norm": None, "period": 4}
    place = {"kind": "round", "step": 4 * number, "t": t, "round": number, "begun_after": 4 * number}
    return {**place, "began": t, **costs, "counts": True, **more}


def test_alive_and_counted_are_two_things(tmp_path: Path) -> None:
    """By hand: ten seconds and four rounds. Nobody was there in the first second."""
    (tmp_path / folders.SETTING).write_text(
        json.dumps({"method": "diloco(every=4)", "workers": 3, "steps": 16})
    )
    elastic = {"lighthouse": "http://127.0.0.1:1", "least": 1, "began": 0.0}
    origin = {"command": ["offbeat"], "unit": "images", "elastic": elastic}
    (tmp_path / folders.ORIGIN).write_text(json.dumps(origin))
    write_log(tmp_path, 0, life(1), *[round_of(i, 3.0 + 2 * i) for i in range(4)], life(11, False))
    # Killed after four seconds, started again after seven: it listens in the last round.
    again = [life(8), round_of(3, 9, counts=False), life(11, False)]
    write_log(tmp_path, 1, life(1), round_of(0, 3), round_of(1, 5), *again)
    one, other = list_presence(read(tmp_path))
    assert (one.name, one.alive, one.counted, one.rounds) == ("worker-0", 1.0, 1.0, [True] * 4)
    assert (other.name, other.alive, other.counted) == ("worker-1", 0.7, 0.5)
    assert other.rounds == [True, True, False, False]
    assert '"presence": [{"name": "worker-0"' in render([read(tmp_path)])


def test_steps_are_written_as_in_other_titles() -> None:
    setting = Setting(method="diloco()", workers=6, steps=6000)
    assert command.write_title(setting, 2) == "digits, 2 to 6 workers, 6,000 steps"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--workers", "2:3"], "--workers '2:3': workers must be a whole number, such as 4; with --elastic"),
        (["--elastic", "--workers", "3:2"], "--workers '3:2': the fewest must be at least 1, and at most"),
        (["--elastic", "--workers", "x"], "--workers 'x': workers must be a whole number"),
        (["--lighthouse", "http://a:1"], "--lighthouse: add --elastic."),
        (["--token", "secret"], "--token: add --elastic."),
        (["--elastic", "--token", "/dev/null"], "--token '/dev/null': the file is empty"),
        (["--elastic", "--token", "missing"], "offbeat: --token 'missing': there is no such file.\n"),
        (["--elastic", "--token", "."], "offbeat: --token '.': this is a directory.\n"),
        (["--elastic", "--resume"], "--resume: there is no run in 'run'"),
        (["--elastic", "--link", "1mbit"], "--link: not with --elastic"),
    ],
)
def test_bad_words(call: Call, words: list[str], sentence: str) -> None:  # noqa: F811
    code, out, error = call("train", "ddp", *words, "--checkpoint-dir", "run")
    assert (code, out) == (2, "")
    assert sentence in error
    assert not (Path("run") / folders.SETTING).exists()


@pytest.mark.parametrize(
    ("expression", "sentence"),
    [
        (
            "ddp",
            "ddp() cannot go on without a worker: a worker that joins would have to receive the optimizers "
            "of another one: use a method that sends parameters, such as diloco.",
        ),
        (
            "hierarchical(nodes=2)",
            "hierarchical(nodes=2) cannot go on without a worker: Subgroups(2) needs the same workers all "
            "the time.",
        ),
        ("torch_ddp", "torch_ddp() cannot go on without a worker: use a method such as diloco."),
        (
            "streaming_diloco(every=4, fragments=2, delay=2)",
            "delay=2: each round must land before the next one begins, 2 steps later: choose "
            "a smaller delay or fewer fragments.",
        ),
    ],
)
def test_a_method_that_needs_every_worker_is_refused_at_once(
    call: Call,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    expression: str,
    sentence: str,
) -> None:
    monkeypatch.setattr(command, "_light", None)  # no lighthouse is started
    code, out, error = call(
        "train", expression, "--elastic", "--workers", "4", "--model", "tiny", "--out", "run"
    )
    assert (code, out, error) == (2, "", f"offbeat: --elastic: {sentence}\n")
    assert not Path("run").exists()


@pytest.mark.parametrize("place", ["", ":29510", ":abc/run", ":99999/run", ":0/run"])
def test_join_says_what_its_address_is(call: Call, place: str) -> None:  # noqa: F811
    code, _, error = call("join", f"http://127.0.0.1{place}")
    assert (code, error.startswith(f"offbeat: join http://127.0.0.1{place}: the address is that of")) == (
        2,
        True,
    )
    assert "as `offbeat train --elastic` prints it" in error


def test_join_needs_a_run(call: Call, tmp_path: Path) -> None:  # noqa: F811
    code, _, error = call("join", f"http://127.0.0.1:29510{tmp_path}")
    assert (code, "does not describe a run" in error) == (2, True)


@pytest.mark.slow
def test_a_worker_is_killed_and_another_takes_its_seat(tmp_path: Path) -> None:
    """With one worker of two the run waits, so it cannot end before the other comes."""
    folder = tmp_path / "run"
    words = [
        "train",
        "diloco(every=4)",
        "--elastic",
        "--workers",
        "2:3",
        "--model",
        "tiny",
        "--steps",
        "800",
    ]
    command = started(*words, "--evaluations", "2", "--checkpoint-dir", str(folder))
    try:
        until(lambda: rounds(folder, 0) and rounds(folder, 1))
        children = Path(f"/proc/{command.pid}/task/{command.pid}/children").read_text().split()
        os.kill(int(children[-1]), signal.SIGKILL)  # the first may be a server that forks workers in tests
        until(lambda: count_taken(folder, 3) == 1)
        address = json.loads((folder / folders.ORIGIN).read_text())["elastic"]["lighthouse"]
        joined = started("join", f"{address}{folder}")
        out, error = command.communicate(timeout=240)
        said = joined.communicate(timeout=60)
    finally:
        command.kill()
    assert (command.returncode, joined.returncode) == (0, 0), (error, said)
    assert re.search(
        r"a worker ended by SIGKILL; start another: offbeat join http://127\.0\.0\.1:\d+/", error
    )
    assert "who was there" in out
    run = read(folder)
    assert run.complete
    assert len(run.ends) == 2
    assert len({end["weights"] for end in run.ends}) == 1
    assert run.evals[-1]["step"] == 800
    lives = [sum(e["kind"] == "life" and e["alive"] for e in rank) for rank in run.ranks]
    assert sorted(lives) == [0, 1, 2]
    stayed, came = sorted(list_presence(run), key=lambda p: lives[int(p.name[-1])])
    assert stayed.alive == pytest.approx(share_from_first_to_last(run, stayed))
    assert came.alive < share_from_first_to_last(run, came)  # nobody had the seat for a while
    assert came.counted < stayed.counted == 1


def share_from_first_to_last(run: Logged, worker: Presence) -> float:
    """The share of the run's seconds between the first and the last line of a seat."""
    times = [float(entry["t"]) for rank in run.ranks for entry in rank]
    own = [float(entry["t"]) for entry in run.ranks[int(worker.name[-1])]]
    return (own[-1] - own[0]) / (max(times) - min(times))


def elastic(folder: Path, *words: str) -> list[str]:
    sizes = ["--workers", "2:3", "--model", "tiny", "--evaluations", "2"]
    return ["train", *words, "--elastic", *sizes, "--checkpoint-dir", str(folder)]


@pytest.mark.slow
def test_a_run_whose_workers_are_all_lost_is_resumed(tmp_path: Path) -> None:
    """With a token: nobody joins without it. After the end, a larger number of steps extends the run."""
    folder, secret = tmp_path / "run", tmp_path / "token"
    secret.write_text("a secret\n")
    token = ["--token", str(secret)]
    command = started(
        *elastic(folder, "diloco(every=4)", "--steps", "2000", "--checkpoint-every", "20"), *token
    )
    try:
        until(lambda: max(saved_steps(folder), default=0) >= 40)
        address = json.loads((folder / folders.ORIGIN).read_text())["elastic"]["lighthouse"]
        stranger = started("join", f"{address}{folder}")
        assert "the run has a token: add --token" in stranger.communicate(timeout=60)[1]
        (tmp_path / "other").write_text("another secret\n")
        stranger = started("join", f"{address}{folder}", "--token", str(tmp_path / "other"))
        assert stranger.communicate(timeout=60)[1].endswith("/other': the run has another one.\n")
    finally:
        end_all(command)
        command.communicate(timeout=60)
    saved = saved_steps(folder)[-1]
    assert secret.read_text().strip() not in (folder / folders.ORIGIN).read_text()
    again = started("train", "--resume", "--checkpoint-dir", str(folder))
    assert "is elastic: add --elastic" in again.communicate(timeout=60)[1]
    for steps in (saved + 30, saved + 50):
        more = ["--elastic", "--resume", "--checkpoint-dir", str(folder), *token, "--steps", str(steps)]
        command = started("train", *more)
        _, error = command.communicate(timeout=200)
        assert command.returncode == 0, error
        run = read(folder)
        assert run.complete
        assert len({end["weights"] for end in run.ends}) == 1
        assert run.evals[-1]["step"] == steps
        for rank in run.ranks[:2]:  # no step is missing, and none is there twice
            made = [entry["step"] for entry in rank if entry["kind"] == "steps"]
            assert made == list(range(1, steps + 1))
    assert (folder / folders.MODEL).is_file()


def rounds(folder: Path, seat: int) -> int:
    return sum(entry["kind"] == "round" for entry in folders.entries(folders.log_path(folder, seat)))

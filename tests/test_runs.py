"""What runs are made of: links, stragglers, logs, checkpoints on disk, and the table from the logs."""

from __future__ import annotations

import json
import random
import re
import shlex
import shutil
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from test_pictures import pictures

import offbeat
from offbeat.app.commands.report import caption
from offbeat.app.commands.study import with_period
from offbeat.app.report.page import collect, render
from offbeat.app.runs import summary
from offbeat.app.runs.folder import CheckpointStore, Record, cut, entries, log_path, prepare, write_whole
from offbeat.app.runs.launch import launch
from offbeat.app.runs.loop import LOOK, Loop, Stop
from offbeat.app.runs.setting import Setting, check
from offbeat.app.runs.trainer import Stopwatch, Watched
from offbeat.app.runs.verdict import trade_off, verdict
from offbeat.tasks import digits_task


def test_a_torn_log_can_be_read_and_cut(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.jsonl"
    record = Record(path)
    for step in range(5):
        record.write("steps", step=step, t=step / 2, seconds=0.5, exposed=0.0, loss=1.0, units=8)
    record.write("end", step=4, t=2.5, rounds=1, sent=0, exposed=0.0, air=0.0)
    record.close()
    whole = path.read_bytes()
    for length in range(len(whole) + 1):
        path.write_bytes(whole[:length])
        assert len(list(entries(path))) == whole[:length].count(b"\n")
    path.write_bytes(whole + b'{"kind": "steps", "st')
    cut(path, after=2)
    assert [entry["step"] for entry in entries(path)] == [0, 1, 2]
    assert list(entries(tmp_path / "none")) == []
    foreign = b"[1]\n3\nnull\n\xff\n{}\n" + b"[" * 100_000 + b"\n"
    path.write_bytes(foreign + whole.replace(b'"loss": 1.0', b'"loss": NaN'))
    skipped: list[int] = []
    assert len(list(entries(path, skipped=skipped))) == 6
    assert skipped == [1, 2, 3, 4, 5, 6]


def test_a_text_that_cannot_be_written_leaves_nothing_behind(tmp_path: Path) -> None:
    write_whole(tmp_path / "a.json", "first")
    with pytest.raises(UnicodeEncodeError):
        write_whole(tmp_path / "a.json", "second \ud800")
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"a.json": "first"}


def test_a_long_run_writes_one_line_for_several_steps(tmp_path: Path) -> None:
    record = Record(tmp_path / "log", steps=5000)
    for step in range(1, 8):
        record.add_step(step, start=step, end=step + 0.5, exposed=0.1, loss=float(step), units=4)
    record.write_steps(7, 7.5)
    record.close()
    lines = list(entries(tmp_path / "log"))
    assert [line["step"] for line in lines] == [3, 6, 7]
    assert [line["loss"] for line in lines] == [2.0, 5.0, 7.0]
    assert [line["units"] for line in lines] == [12, 24, 28]
    assert lines[0]["seconds"] == pytest.approx(1.5)


def test_a_checkpoint_counts_once_all_ranks_have_saved(tmp_path: Path) -> None:
    shelves = [CheckpointStore(tmp_path, rank=rank, workers=2) for rank in range(2)]
    for step in (10, 20, 30):
        shelves[1].save(step, {"x": torch.tensor([step])})
        assert step not in shelves[0].steps()
        shelves[0].save(step, {"x": torch.tensor([-step])})
    assert shelves[0].steps() == [20, 30], "older ones are dropped"
    assert shelves[1].load(30)["x"].tolist() == [30]
    (tmp_path / "step-000000030" / "rank-0.pt").unlink()
    assert shelves[1].steps() == [20]
    (tmp_path / "step-000000020" / ".rank-0.pt.77").write_bytes(b"half")
    assert shelves[1].steps() == [20]


def test_other_folders_and_torn_files_do_not_disturb_checkpoints(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, rank=0, workers=1)
    store.save(10, {})
    for name in ("step-foo", "step-", "step-5-old"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "rank-0.pt").write_bytes(b"")
    (tmp_path / "step-000000007").mkdir()
    torn, other = (tmp_path / "step-000000007" / f".rank-{rank}.pt.77" for rank in (0, 1))
    torn.write_bytes(b"half")
    other.write_bytes(b"half")
    assert store.steps() == [10]
    store.delete_after(10)
    assert store.steps() == [10]
    assert not torn.exists()
    assert other.exists(), "rank 1 may be writing it"


def test_all_ranks_stop_after_the_step_of_the_furthest(tmp_path: Path) -> None:
    stops = [Stop(tmp_path, rank=rank, workers=3) for rank in range(3)]
    (tmp_path / ".stop-0.new").write_text("of a process that was killed")
    (tmp_path / ".stop-1").write_text("3")
    for stop in stops:
        stop.clear()
    for stop, begun in zip(stops, (4, 40, 5), strict=True):
        stop.listen(begun - 1)
    time.sleep(3 * LOOK)
    assert not stops[0].after(3), "nobody has called yet"
    stops[1].call()
    last: dict[int, int] = {}

    def loop(rank: int, step: int, seconds: float) -> None:
        while not stops[rank].after(step):
            step += 1
            time.sleep(seconds)
        last[rank] = step

    # Neither the one that is far ahead nor those that the signal did not reach stop alone.
    steps = ((4, 0.02), (40, 0.0), (5, 0.01))
    threads = [threading.Thread(target=loop, args=(rank, *step)) for rank, step in enumerate(steps)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert last == {0: 40, 1: 40, 2: 40}
    for stop in stops:
        stop.forget()
    assert [path.name for path in tmp_path.iterdir()] == [".stop-0.new"]


def test_a_rank_in_a_long_step_answers_and_a_dead_one_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stops = [Stop(tmp_path, rank=rank, workers=2) for rank in range(2)]
    for stop in stops:
        stop.listen(6)
    stops[0].call()
    assert stops[0].after(7), "rank 1 has said 7 from within its step"
    assert stops[1].after(7)
    stops[1].forget()
    monkeypatch.setattr("offbeat.app.runs.loop.PATIENCE", 0.1)
    with pytest.raises(offbeat.PeerLost, match=r"^Ctrl-C: ranks \[1\] have not answered within 0.1 s.$"):
        stops[0].after(8)
    stops[0].forget()


def test_what_happens_before_the_first_evaluation_takes_no_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Old files are looked through, and the ranks meet: on a busy disk that takes seconds."""
    clock = [0.0]
    monkeypatch.setattr(offbeat.Solo, "now", lambda comm: clock[0])
    monkeypatch.setattr(CheckpointStore, "delete_after", lambda store, step: clock.__setitem__(0, 100.0))
    task = digits_task("tiny")
    setting = check(Setting(method="ddp()", model="tiny", workers=1, steps=2, where="simulation"), task)
    prepare(tmp_path, setting, task)
    Loop(offbeat.Solo(), setting, task, tmp_path).run()
    assert {entry["t"] for entry in entries(log_path(tmp_path, 0))} == {0.0}


def test_a_resumed_run_draws_the_same_random_numbers(tmp_path: Path) -> None:
    """Of torch, and of Python and NumPy, which a task of one's own may use as well."""
    task, drawn = digits_task("tiny"), list[tuple[float, ...]]()

    def loss(model: Any, batch: Any) -> Any:
        drawn.append((random.random(), float(numpy.random.random()), float(torch.rand(()))))
        return task.loss(model, batch)

    noisy = replace(task, loss=loss)
    setting = check(
        Setting(method="ddp()", model="tiny", workers=1, steps=4, checkpoint_every=2, where="simulation"),
        task,
    )
    prepare(tmp_path, setting, noisy)
    Loop(offbeat.Solo(), setting, noisy, tmp_path).run()
    shutil.rmtree(tmp_path / "checkpoints/step-000000004")
    before, drawn[:] = drawn[2:], []
    Loop(offbeat.Solo(), setting, noisy, tmp_path).run(resume=True)
    assert (len(drawn), drawn) == (2, before)


def test_a_stopwatch_can_be_stopped() -> None:
    now = [10.0]
    watch = Stopwatch(lambda: now[0], elapsed=2.0)
    now[0] = 11.0
    with watch.stopped():
        now[0] = 50.0
        assert watch.read() == 3.0
    now[0] = 51.5
    assert watch.read() == 4.5


def test_waiting_is_watched_in_groups_too() -> None:
    def worker(comm: offbeat.Communicator) -> tuple[float, float]:
        watched = Watched(comm)
        if comm.rank == 0:
            watched.worker.computed(0)
        start = watched.now()
        watched.mean([torch.ones(1000)]).wait()
        watched.split([[0, 1]]).gather(torch.ones(1000)).wait()
        watched.tell([1]).wait()
        return watched.waited, watched.now() - start

    network = offbeat.Network(latency=0.25, bandwidth=1e6)
    first, second = offbeat.simulate(worker, 2, network=network, compute=lambda rank, step: 1.0)
    assert first[0] == pytest.approx(first[1])
    assert second[0] == pytest.approx(first[0] + 1.0)
    assert first[0] > 0.75


def test_the_time_to_a_loss_is_on_the_line_between_evaluations() -> None:
    def evals(*losses: float) -> list[dict[str, Any]]:
        return [{"t": float(t), "loss": loss} for t, loss in enumerate(losses)]

    assert summary.reach(evals(4.0, 2.0, 1.0), 3.0) == 0.5
    assert summary.reach(evals(4.0, 2.0, 1.0), 1.5) == 1.5
    assert summary.reach(evals(4.0, 2.0), 1.0) is None
    assert summary.reach(evals(1.0, 2.0), 3.0) == 0.0
    assert summary.reach(evals(float("nan"), 2.0), 3.0) == 1.0
    late = [{"t": 0.01, "loss": 2.0}]
    assert summary.reach(late, 3.0) == 0.0, "before the first step, no time has passed"
    costly = [{**entry, "sent": 10 * entry["t"]} for entry in evals(4.0, 2.0, 1.0)]
    assert summary.reach(costly, 1.5, "sent") == 15.0


def written(
    place: Path,
    method: str,
    *,
    seed: int,
    losses: list[float],
    lr: float = 0.1,
    task: str = "digits",
    **end: Any,
) -> summary.Logged:
    """A run of two workers whose log says this."""
    setting = Setting(method=method, task=task, workers=2, steps=10, seed=seed, batch=4, lr=lr)
    folder = place / f"{method}{seed}-{lr}-{task}"
    prepare(folder, setting, digits_task("tiny"), command=["offbeat", "compare", method])
    for rank in range(2):
        record = Record(log_path(folder, rank))
        for number, loss in enumerate(losses):
            costs = {"rounds": number, "sent": number * 100, "exposed": 0.0, "air": 0.0, "units": number * 4}
            if rank == 0:
                record.write("eval", step=number * 5, t=number * 1.0, loss=loss, **costs)
            record.write("steps", step=number, t=number * 1.0, seconds=0.5, exposed=0.1, loss=loss, units=4)
        record.write("round", step=1, t=1.0, round=0, begun_after=5, began=0.5, exposed=0.1, air=0.2, sent=5,
                     drift=0.25, norm=None, period=5)  # fmt: skip
        last = {"t": 4.0, "exposed": 1.0, "air": 3.0 + rank, "sent": 2_000_000 * (rank + 1), "rounds": 6}
        record.write("end", step=10, weights="00", **{**last, **end})
        record.close()
    return summary.read(folder)


def test_the_table_is_computed_from_the_logs(tmp_path: Path) -> None:
    runs = [
        written(tmp_path, "local_sgd()", seed=0, losses=[2.0, 1.0, 0.5], t=2.0),
        written(tmp_path, "ddp()", seed=0, losses=[2.0, 1.0], t=8.0),
        written(tmp_path, "local_sgd()", seed=1, losses=[2.0, 1.0, 0.7], t=2.0),
        written(tmp_path, "ddp()", seed=1, losses=[2.0, 1.0], t=8.0),
    ]
    local, ddp = summary.summarize(runs)
    assert (local.method, ddp.method, local.seeds) == ("local_sgd()", "ddp()", 2)
    assert local.loss == pytest.approx(0.6)
    assert local.spread == pytest.approx(0.1414, abs=1e-4)
    assert (local.seconds, local.exposed, local.hidden) == (2.0, 1.0, 2.5)
    assert (local.megabytes, local.rounds, local.speedup) == (3.0, 6.0, 4.0)
    assert local.reached == pytest.approx(0.95), "a loss of 1.05 lies on the way from 2 to 1"
    assert (ddp.speedup, ddp.kernel_megabytes) == (1.0, None)


def test_each_seed_is_compared_with_the_same_seed_of_the_reference(tmp_path: Path) -> None:
    """With 5 % above the mean of 1.5 as the target, the second seed of the reference would never reach it."""
    runs = [
        written(tmp_path, "ddp()", seed=0, losses=[4.0, 1.0]),
        written(tmp_path, "ddp()", seed=1, losses=[4.0, 2.0]),
        written(tmp_path, "local_sgd()", seed=0, losses=[4.0, 2.0, 1.0]),
        written(tmp_path, "local_sgd()", seed=1, losses=[4.0, 2.0]),
    ]
    ddp, local = summary.summarize(runs)
    assert ddp.reached == pytest.approx(((4 - 1.05) / 3 + (4 - 2.1) / 2) / 2)
    assert local.reached == pytest.approx(((1 + 0.95) + (4 - 2.1) / 2) / 2)
    late = written(tmp_path, "local_sgd()", seed=2, losses=[4.0, 1.5])
    assert summary.summarize([*runs, late])[1].reached is not None, "its target is 5 % above the mean"


@pytest.mark.parametrize(
    ("to_loss", "reached", "megabytes"),
    [
        (2.0, (1.0, 0.5), (1e-4, 0.5e-4)),
        (1.0, (2.0, 0.75), (2e-4, 0.75e-4)),
        (0.75, (None, 0.8125), (None, 0.8125e-4)),  # one seed of the first method ends at 1
        (0.0, (None, 1.0), (None, 1e-4)),
        (-1.0, (None, None), (None, None)),
    ],
)
def test_the_time_and_the_bytes_to_a_given_loss(
    tmp_path: Path,
    to_loss: float,
    reached: tuple[float | None, float | None],
    megabytes: tuple[float | None, float | None],
) -> None:
    runs = [
        written(tmp_path, "ddp()", seed=0, losses=[3.0, 2.0, 1.0]),
        written(tmp_path, "ddp()", seed=1, losses=[3.0, 2.0, 1.0, 0.5]),
        written(tmp_path, "local_sgd()", seed=0, losses=[4.0, 0.0]),
        written(tmp_path, "local_sgd()", seed=1, losses=[4.0, 0.0]),
    ]
    rows = summary.summarize(runs, to_loss=to_loss)
    assert tuple(row.reached for row in rows) == reached
    assert tuple(row.reached_megabytes for row in rows) == megabytes
    (part,) = shown(runs, to_loss=to_loss)
    assert part["to_loss"] == to_loss
    assert [row["reached_megabytes"] for row in part["rows"]] == list(megabytes)


def test_each_method_is_shown_at_its_best_rate(tmp_path: Path) -> None:
    nan = float("nan")
    finals = {
        "ddp()": {0.1: (1.0, 1.2), 0.3: (1.3, 0.8), 1.0: (0.2, nan)},
        "local_sgd()": {0.1: (0.9, 0.9), 0.3: (2.0, 2.0), 1.0: (1.0, 1.0)},
        "slowmo()": {0.1: (nan, nan), 0.3: (nan, nan)},
    }
    runs = [
        written(tmp_path, method, seed=seed, losses=[2.0, loss], lr=lr, t=10 * lr)
        for method, rates in finals.items()
        for lr, losses in sorted(rates.items(), reverse=True)
        for seed, loss in enumerate(losses)
    ]
    ddp, local, slow = summary.summarize(runs)
    assert (ddp.lr, local.lr, slow.lr) == (0.3, 0.1, 0.1), (
        "a seed that diverged loses; of equals, the smallest"
    )
    assert (ddp.loss, ddp.seeds, ddp.speedup) == (pytest.approx(1.05), 2, 1.0)
    assert local.speedup == pytest.approx(3.0), "of the reference at its best rate"
    assert [rate for rate, _ in ddp.rates] == [0.1, 0.3, 1.0]
    assert ddp.rates[0][1] == pytest.approx(1.1)
    (part,) = shown(runs)
    assert [(run["method"], run["seed"]) for run in part["runs"]] == [
        (method, seed) for method in finals for seed in (0, 1)
    ]
    assert part["rows"][0]["rates"][2] == [1.0, None]


def test_rates_are_compared_over_the_seeds_that_all_have(tmp_path: Path) -> None:
    """The second seed is the harder one. A rate that has not finished it is not the better for that."""
    finals = {0.1: {0: 1.0, 1: 3.0}, 0.3: {0: 1.5}}
    runs = [
        written(tmp_path, "ddp()", seed=seed, losses=[4.0, loss], lr=lr)
        for lr, losses in finals.items()
        for seed, loss in losses.items()
    ]
    (row,) = summary.summarize(runs)
    assert (row.lr, row.loss, row.seeds) == (0.1, 2.0, 2)
    assert row.rates == ((0.1, 1.0), (0.3, 1.5))
    assert [run.setting.lr for run in summary.best_runs(runs)] == [0.1, 0.1]
    (row,) = summary.summarize(runs[1:])
    assert (row.lr, row.loss) == (0.3, 1.5), "they share no seed"


def test_unlike_runs_are_not_compared(tmp_path: Path) -> None:
    runs = [
        written(tmp_path, "ddp()", seed=0, losses=[2.0, 1.0], t=8.0),
        written(tmp_path, "ddp()", seed=0, losses=[5.0, 3.0], t=2.0, task="bytes"),
        written(tmp_path, "local_sgd()", seed=0, losses=[2.0, 1.0], t=4.0),
        written(tmp_path, "local_sgd()", seed=0, losses=[5.0, 3.0], t=2.0, task="bytes"),
    ]
    digits, texts = summary.sections(runs)
    assert [run.setting.task for run in (*digits, *texts)] == ["digits", "digits", "bytes", "bytes"]
    assert [row.speedup for row in summary.summarize(digits)] == [1.0, 2.0]
    assert [row.speedup for row in summary.summarize(texts)] == [1.0, 1.0]
    assert [part["setting"]["task"] for part in shown(runs)] == ["digits", "bytes"]
    for name, value in {
        "model": "tiny", "data": "x.txt", "workers": 4, "steps": 20, "batch": 8, "optimizer": "sgd",
        "link": "1gbit", "straggler": ("rank=0,delay=1",), "where": "simulation", "compute": 1.0,
    }.items():  # fmt: skip
        other = replace(runs[0], setting=replace(runs[0].setting, **{name: value}))
        assert len(summary.sections([runs[0], other])) == 2, name
        titles = [caption(group, [runs[0], other]) for group in ([runs[0]], [other])]
        assert titles[0] != titles[1], name
        assert "where" not in titles[0] + titles[1]
    for name, value in {"seed": 1, "lr": 1.0, "evaluations": 3, "checkpoint_every": 7}.items():
        other = replace(runs[0], setting=replace(runs[0].setting, **{name: value}))
        assert len(summary.sections([runs[0], other])) == 1, name


def row(method: str, reached: float | None, loss: float = 1.0) -> summary.Row:
    """A row of which a verdict reads this."""
    left = {"lr": 0.1, "rates": (), "seeds": 1, "spread": None, "accuracy": None, "kernel_megabytes": None}
    left |= dict.fromkeys(["seconds", "exposed", "hidden", "megabytes", "rounds"], 0.0)
    left |= dict.fromkeys(["reached_megabytes", "speedup", "reported_megabytes"])
    return summary.Row(method=method, reached=reached, loss=loss, **left)


REF = "the loss of ddp() (within 5 %)"
FAST = f"a() reached {REF} in 1.00 s instead of 9.00 s"
VERDICTS: list[tuple[float | None, dict[str, float | None], str]] = [
    (None, {"ddp()": 9.0}, ""),
    (None, {"ddp()": 9.0, "a()": 1.0}, f"{FAST}."),
    (None, {"ddp()": 9.0, "a()": 1.0, "b()": None}, f"{FAST}; nothing else did."),
    (None, {"b()": 4.0, "ddp()": 9.0, "a()": 1.0}, f"{FAST}; b() (4.00 s) did, too."),
    (
        None,
        {"ddp()": 9.0, "a()": 1.0, "b()": 10.0, "c()": 3.0, "d()": 2.0, "e()": 11.0, "f()": None},
        f"{FAST}; d() (2.00 s), c() (3.00 s), b() (10.00 s) and 1 more did, too.",
    ),
    (
        None,
        {"ddp()": 9.0, "a()": 12.0, "b()": 10.0},
        f"Nothing reached {REF} sooner than ddp() itself, in 9.00 s; next was b(), in 10.00 s.",
    ),
    (
        None,
        {"ddp()": 9.0, "a()": None},
        f"Nothing else reached {REF}; the closest was a(), with 1.0000 instead of 1.0000.",
    ),
    (None, {"ddp()": None, "a()": None}, "ddp() diverged, so there is no loss to reach."),
    (None, {"ddp()": 0.0, "a()": 0.0}, f"The untrained model is already at {REF}, so the times say nothing."),
    (1.5, {"ddp()": 9.0, "a()": 2.5}, "a() reached a loss of 1.5 in 2.50 s instead of 9.00 s with ddp()."),
    (1.5, {"ddp()": None, "a()": 2.5}, "a() reached a loss of 1.5 in 2.50 s; nothing else did."),
    (
        1.5,
        {"ddp()": 9.0, "a()": None},
        "Only ddp() reached a loss of 1.5, in 9.00 s; the closest was a(), with 1.0000.",
    ),
    (1.5, {"ddp()": None, "a()": None}, "Nothing reached a loss of 1.5; the closest was ddp(), with 1.0000."),
]


@pytest.mark.parametrize(("to_loss", "reached", "sentence"), VERDICTS)
def test_the_verdict(to_loss: float | None, reached: dict[str, float | None], sentence: str) -> None:
    rows = [row(method, seconds) for method, seconds in reached.items()]
    assert verdict(rows, "ddp()", to_loss=to_loss) == sentence


def test_methods_that_diverged_are_not_close() -> None:
    rows = [row("ddp()", None), row("a()", None, loss=float("nan"))]
    assert verdict(rows, "ddp()", to_loss=0.5).endswith("the closest was ddp(), with 1.0000.")
    assert verdict([replace(r, loss=float("nan")) for r in rows], "ddp()", to_loss=0.5).endswith(
        "a loss of 0.5."
    )
    assert verdict([], None) == ""
    seeds = [replace(r, seeds=2, loss=0.4) for r in rows]
    told = "Nothing reached a loss of 0.5 with all seeds; the closest was ddp(), with 0.4000."
    assert verdict(seeds, "ddp()", to_loss=0.5) == told, "one seed did, and the mean did"


def test_a_run_that_did_not_finish_is_not_in_the_table(tmp_path: Path) -> None:
    whole = written(tmp_path, "ddp()", seed=0, losses=[2.0, 1.0])
    torn = written(tmp_path, "local_sgd()", seed=0, losses=[2.0, 1.0])
    path = log_path(torn.folder, 1)
    path.write_text(path.read_text()[:-20])
    torn = summary.read(torn.folder)
    assert not torn.complete
    assert [row.method for row in summary.summarize([whole, torn])] == ["ddp()"]
    (part,) = shown([whole, torn])
    assert [(run["method"], run["complete"]) for run in part["runs"]] == [
        ("ddp()", True),
        ("local_sgd()", False),
    ]
    assert part["unfinished"] == ["local_sgd(), seed 0 (1 of 10 steps)"]
    other = replace(torn, setting=replace(torn.setting, lr=0.5, steps=10), ranks=([], []))
    assert summary.unfinished([whole, other]) == ["local_sgd(), lr 0.5, seed 0 (0 of 10 steps)"]


def test_torch_ddp_is_the_reference_where_it_takes_part(tmp_path: Path) -> None:
    names = ("local_sgd()", "ddp()", "torch_ddp()", "slowmo()")
    local, ddp, torchs, slow = (written(tmp_path, name, seed=0, losses=[2.0, 1.0]) for name in names)
    assert summary.reference_of([local, ddp, torchs]) == "torch_ddp()"
    assert summary.reference_of([local, ddp]) == "ddp()"
    assert summary.reference_of([local, slow]) == "local_sgd()"
    assert summary.reference_of([local, replace(ddp, ends=[])]) == "local_sgd()", "it did not finish"
    assert summary.reference_of([]) is None


def test_runs_of_different_settings_are_no_seeds_of_each_other(tmp_path: Path) -> None:
    first = written(tmp_path, "local_sgd()", seed=0, losses=[2.0, 1.0])
    second = written(tmp_path, "local_sgd()", seed=1, losses=[2.0, 1.0])
    ddp = written(tmp_path, "ddp()", seed=0, losses=[2.0, 1.0])
    other = replace(second, setting=replace(second.setting, lr=0.5, straggler=("rank=0,delay=1",)))
    (row,) = summary.summarize([first, second])
    assert (row.method, row.seeds) == ("local_sgd()", 2)
    rows = summary.summarize([first, other, ddp])
    assert [row.method for row in rows] == [
        "local_sgd(), straggler None",
        "local_sgd(), straggler rank=0,delay=1",
        "ddp(), straggler None",
    ]
    more = replace(ddp, setting=replace(ddp.setting, workers=4), ends=ddp.ends * 2)
    assert summary.reference_of([first, more]) == "ddp() × 4"


def test_a_run_that_diverged_never_reached_the_loss(tmp_path: Path) -> None:
    ddp = written(tmp_path, "ddp()", seed=0, losses=[2.0, 1.0])
    gone = written(tmp_path, "local_sgd()", seed=0, losses=[2.0, 0.5, float("nan")])
    assert [row.reached is None for row in summary.summarize([ddp, gone])] == [False, True]


def shown(runs: list[summary.Logged], **options: Any) -> list[dict[str, Any]]:
    """The data of the page's parts."""
    (data,) = re.findall(r'<script id="data"[^>]*>(.*?)</script>', render(runs, **options), re.DOTALL)
    parts: list[dict[str, Any]] = json.loads(data)
    return parts


def test_the_page_holds_everything_and_needs_no_network(tmp_path: Path) -> None:
    run = written(tmp_path, "diloco(lr='</script><b>')", seed=0, losses=[2.0, float("nan")])
    page = render([run])
    assert "/*DATA*/" not in page
    assert page.count("</script>") == 2, "what a method is called cannot end the script"
    assert not re.search(r"(?:src|href)\s*=\s*[\"']?(?:https?:)?//", page)
    assert "@import" not in page
    (data,) = shown([run])
    assert data["rows"][0]["loss"] is None, "JSON has no NaN"
    assert data["runs"][0]["evals"][0][3] == 2.0
    assert data["commands"] == ["offbeat compare " + shlex.quote("diloco(lr='</script><b>')")]
    assert data["setting"]["torch"] == torch.__version__
    (flight,) = data["runs"][0]["ranks"][1]["flights"]
    assert flight == [0.5, pytest.approx(0.7)]


def test_the_page_shows_the_same_figures_as_the_table(tmp_path: Path) -> None:
    run = written(tmp_path, "ddp()", seed=0, losses=[2.0, 1.0])
    (row,) = summary.summarize([run])
    assert collect([run])["rows"] == [vars(row)]


def trained(place: Path, method: str, **changes: Any) -> Path:
    """A small run in simulation."""
    wanted = {
        "task": "digits",
        "model": "tiny",
        "workers": 2,
        "steps": 12,
        "evaluations": 3,
        "link": "1mbit,1ms",
    }
    setting = Setting(method=method, where="simulation", **{**wanted, **changes})
    task = setting.find_task()
    check(setting, task)
    prepare(place, setting.fill(task), task)
    assert launch([place])
    return place


def test_simulated_runs_repeat_themselves_to_the_letter(tmp_path: Path) -> None:
    folders = [trained(tmp_path / name, "local_sgd(every=4, delay=2)") for name in ("one", "two")]
    for rank in range(2):
        first, second = (log_path(folder, rank).read_text() for folder in folders)
        assert first == second
        assert '"end"' in first
    assert trained(tmp_path / "three", "local_sgd(every=4, delay=2)", seed=1) != folders[0]
    other = summary.read(tmp_path / "three")
    assert other.evals[-1]["loss"] != summary.read(folders[0]).evals[-1]["loss"]


def test_the_log_accounts_for_the_time_and_the_bytes(tmp_path: Path) -> None:
    run = summary.read(
        trained(tmp_path / "run", "local_sgd(every=4)", straggler=("rank=1,delay=0.5,every=6",))
    )
    waits = []
    for rank, lines in enumerate(run.ranks):
        steps = [line for line in lines if line["kind"] == "steps"]
        rounds = [line for line in lines if line["kind"] == "round"]
        assert [line["step"] for line in steps] == list(range(1, 13))
        assert [line["begun_after"] for line in rounds] == [4, 8, 12]
        assert [line["period"] for line in rounds] == [4, 4, 4]
        end = run.ends[rank]
        assert end["t"] == pytest.approx(steps[-1]["t"], abs=0.05)
        assert sum(line["seconds"] for line in steps) == pytest.approx(steps[-1]["t"])
        assert end["sent"] >= sum(line["sent"] for line in rounds) > 3 * 4 * 9_802 * 0.99
        assert end["rounds"] == 3
        assert end["units"] == 12 * 16
        waits.append(sum(line["exposed"] for line in steps))
        assert waits[-1] == pytest.approx(end["exposed"], rel=0.1)
    assert waits[0] > waits[1] + 0.9, "rank 0 waits for the straggler"
    assert run.ends[0]["weights"] == run.ends[1]["weights"]
    assert [line["step"] for line in run.evals] == [0, 4, 8, 12]


def test_evaluations_cost_neither_time_nor_bytes(tmp_path: Path) -> None:
    few, many = (
        summary.read(trained(tmp_path / str(n), "local_sgd(every=4)", evaluations=n)).ends[0] for n in (1, 12)
    )
    for name in ("t", "sent", "exposed", "rounds", "weights"):
        assert few[name] == (many[name] if name == "weights" else pytest.approx(many[name]))


def test_periods_are_put_into_methods() -> None:
    assert with_period("local_sgd", 8) == "local_sgd(every=8)"
    assert with_period("slowmo(every=3, momentum=0.5)", 8) == "slowmo(every=8, momentum=0.5)"
    assert with_period("ddp()", 8) is None
    with pytest.raises(ValueError, match="name one of"):
        with_period("nope", 8)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"workers": 0}, "workers=0: must be at least 1."),
        ({"steps": 0}, "steps=0: must be at least 1."),
        ({"batch": 0}, "batch=0: must be at least 1."),
        ({"lr": -1.0}, "lr=-1.0: must be a positive number."),
        ({"optimizer": "lion"}, "optimizer='lion': name one of adamw, sgd."),
        ({"method": "local_sgd(every=0)"}, "Every(steps=0): steps must be at least 1."),
        ({"method": "hierarchical(nodes=3)"}, "Subgroups(3): 4 workers do not divide into groups of 3; for"),
        ({"method": "torch_ddp()", "where": "simulation"}, "torch_ddp cannot be simulated:"),
        (
            {"link": "1gbit,5ms", "where": "netns"},
            "link='1gbit,5ms': a link has no latency with --netns;",
        ),
        ({"workers": 5000}, "batches(workers=5000): there are 1438 training pictures, and each worker"),
    ],
)
def test_settings_that_cannot_be(changes: dict[str, Any], sentence: str) -> None:
    setting = Setting(**{"method": "local_sgd(every=8)", "model": "tiny", **changes})
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}"):
        check(setting, setting.find_task())


def test_a_model_with_batch_normalization_is_trained_saved_and_resumed(tmp_path: Path) -> None:
    """Its count of batches is a number without a dimension."""
    data = str(pictures(tmp_path / "album", each=10))
    changes = {"task": "images", "data": data, "batch": 4, "checkpoint_every": 5}
    place = trained(tmp_path / "run", "local_sgd(every=4)", **changes)
    whole = summary.read(place)
    assert whole.complete
    assert whole.ends[0]["weights"] == whole.ends[1]["weights"]
    assert launch([place], resume=True), "from the checkpoint of step 10"
    again = summary.read(place)
    for name in ("weights", "rounds", "sent", "units"):
        assert [end[name] for end in again.ends] == [end[name] for end in whole.ends]


def test_an_evaluation_does_not_move_the_rounds_before_it(tmp_path: Path) -> None:
    """A round begins when its step ends, also if an evaluation follows the step."""
    run = summary.read(trained(tmp_path / "run", "local_sgd(every=2)"))
    steps = {e["step"]: e for e in run.ranks[0] if e["kind"] == "steps"}
    evaluated = {e["step"] for e in run.evals}
    rounds = [e for e in run.ranks[0] if e["kind"] == "round" and e["begun_after"] in steps]
    assert evaluated & {e["begun_after"] for e in rounds}
    for e in rounds:
        step = steps[e["begun_after"]]
        assert e["began"] == pytest.approx(step["t"] - step["exposed"])


def test_the_verdict_of_a_study() -> None:
    """The fewest bytes among points within 5 % of the lowest loss; points are MB, loss, accuracy, period."""
    nan = float("nan")
    ddp = {"name": "ddp, 2 workers", "points": [[10.0, 1.0, None, None]]}
    local = {
        "name": "local_sgd, 2 workers",
        "points": [[0.1, nan, None, 64], [0.5, 1.06, None, 8], [2.0, 1.04, None, 4]],
    }
    assert trade_off([ddp, local]) == (
        "The lowest loss, 1.0000, is that of ddp, 2 workers (10.00 MB per worker); local_sgd, 2 workers, "
        "period 4 came within 5 % of it (1.0400) and sent 2.00 MB."
    )
    assert trade_off([ddp, {**local, "points": local["points"][:2]}]).endswith(
        "nothing within 5 % of it sent less."
    )
    assert trade_off([ddp]) == ""

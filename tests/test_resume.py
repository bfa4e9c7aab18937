"""A run stays the same to the bit when it is repeated, looked at, saved, or interrupted after any step."""

from __future__ import annotations

import io
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
from problems import Dyadic, Realistic, optimizer_for, same, snapshot, take_step
from table import BROAD, EACH, METHODS, ROWS, enough, savable
from ticking import clocked
from torch import Tensor

import offbeat
from offbeat.engine.agreement import FORMAT

# The tests share their runs, so one process runs them all.
pytestmark = pytest.mark.xdist_group("resume")
STEPS = 10


class Run:
    """A training loop with everything a user would save."""

    def __init__(self, comm: offbeat.Communicator, expression: str, optimizer: str, seed: int) -> None:
        self.comm = comm
        self.net = Realistic(seed)
        self.opt = optimizer_for(self.net, optimizer)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.opt, 0.9)
        self.sync = offbeat.method(expression)(self.net, self.opt, group=clocked(comm, expression))

    def go(self, first: int, last: int) -> list[dict[str, Tensor]]:
        trace = []
        for step in range(first, last):
            take_step(self.net, self.opt, self.sync, self.comm.rank, step)
            self.scheduler.step()
            trace.append(snapshot(self.net))
        return trace

    def end(self) -> list[dict[str, Tensor]]:
        self.sync.finish()
        return [snapshot(self.net)]

    def save(self) -> bytes:
        file = io.BytesIO()
        parts = {k: getattr(self, k).state_dict() for k in ("net", "opt", "scheduler", "sync")}
        torch.save({**parts, "rng": torch.get_rng_state()}, file)
        return file.getvalue()

    def load(self, saved: bytes, *, weights_only: bool = True) -> None:
        state = torch.load(io.BytesIO(saved), weights_only=weights_only)
        for part in ("net", "opt", "scheduler", "sync"):
            getattr(self, part).load_state_dict(state[part])
        torch.set_rng_state(state["rng"])


def reports_of(run: Run) -> list[Any]:
    return sorted((r.step, r.round, r.workers, r.drift or 0.0, r.norm or 0.0) for r in run.sync.reports)


class Whole(NamedTuple):
    """The weights after every step and after `finish`, the reports, and both at every step."""

    trace: list[dict[str, Tensor]]
    reports: list[Any]
    saved: list[tuple[bytes, list[Any]]]


def optimizer_of(expression: str) -> str:
    return ("adamw", "momentum")[METHODS.index(expression) % 2]


def run_whole(expression: str, *, save: bool = False, look: bool = False) -> list[Whole]:
    """An uninterrupted run."""

    def worker(comm: offbeat.Communicator) -> Whole:
        torch.manual_seed(comm.rank)
        run = Run(comm, expression, optimizer_of(expression), seed=comm.rank)
        saved, trace = [(run.save() if save else b"", reports_of(run))], []
        for step in range(STEPS):
            trace += run.go(step, step + 1)
            if look:
                look_at(run)
            saved.append((run.save() if save and savable(expression, step + 1) else b"", reports_of(run)))
        return Whole(trace + run.end(), reports_of(run), saved)

    return offbeat.simulate(worker, enough(expression))


def look_at(run: Run) -> None:
    """All workers see the same weights."""
    with run.sync.averaged():
        seen = [v.flatten() for v in snapshot(run.net).values() if v.is_floating_point()]
        views = run.comm.gather(torch.cat(seen)).wait()
        assert all(torch.equal(views[0], other) for other in views)


@cache
def undisturbed(expression: str) -> list[Whole]:
    return run_whole(expression)


@cache
def saved_after_every_step(expression: str) -> list[Whole]:
    return run_whole(expression, save=True)


def assert_equal(these: list[Whole], those: list[Whole]) -> None:
    for a, b in zip(these, those, strict=True):
        assert all(same(x, y) for x, y in zip(a.trace, b.trace, strict=True))
        assert a.reports == b.reports


FEW = {3, 4, 5, 8}  # with messages in flight, right after they land, and in between
REST = set(range(STEPS + 1)) - FEW
AHEAD = 6  # how many steps a run resumed after one of the rest continues: more than any period


# All rows are cut after a few steps. One row of every method, option, clock and code is cut after all others.
CUTS = [
    pytest.param(row, steps, id=f"{row}-{name}", marks=[] if fast and row in EACH else pytest.mark.slow)
    for name, steps, rows, fast in (("few", FEW, METHODS, True), ("rest", REST, BROAD, False))
    for row in rows
]


@pytest.mark.few(5)
@pytest.mark.parametrize(("expression", "steps"), CUTS)
def test_resume_after_any_step(expression: str, steps: set[int]) -> None:
    whole = saved_after_every_step(expression)

    def rest(comm: offbeat.Communicator, at: int) -> Any:
        torch.manual_seed(99)
        run = Run(comm, expression, optimizer_of(expression), seed=7)
        run.load(whole[comm.rank].saved[at][0], weights_only=at in FEW)  # which takes longer
        if at in REST and at + AHEAD < STEPS:
            return run.go(at, at + AHEAD), reports_of(run)
        return run.go(at, STEPS) + run.end(), reports_of(run)

    cuts = [step for step in sorted(steps) if savable(expression, step)]
    assert cuts
    for at in cuts:
        resumed = offbeat.simulate(lambda comm, at=at: rest(comm, at), enough(expression))
        for (trace, reports), expected in zip(resumed, whole, strict=True):
            pairs = zip(trace, expected.trace[at : at + len(trace)], strict=True)
            assert all(same(a, b) for a, b in pairs), f"cut after step {at}"
            done = expected.reports if len(trace) + at > STEPS else expected.saved[at + len(trace)][1]
            assert sorted(expected.saved[at][1] + reports) == done, f"cut after step {at}"


@pytest.mark.few(8)
@pytest.mark.parametrize("expression", ROWS)
def test_saving_changes_nothing(expression: str) -> None:
    assert_equal(saved_after_every_step(expression), undisturbed(expression))


@pytest.mark.few(8)
@pytest.mark.parametrize("expression", ROWS)
def test_looking_changes_nothing(expression: str) -> None:
    """Messages in flight stay in flight, and land as if nobody had looked."""
    assert_equal(run_whole(expression, look=True), undisturbed(expression))


@pytest.mark.few(3)
@pytest.mark.parametrize("expression", METHODS[::13])
def test_a_repeated_simulation_is_equal(expression: str) -> None:
    assert_equal(run_whole(expression), undisturbed(expression))


@pytest.mark.few(10)
@pytest.mark.parametrize("expression", ROWS)
def test_workers_are_equal_in_the_end(expression: str) -> None:
    ends = [run.trace[-1] for run in undisturbed(expression)]
    floats = [{k: v for k, v in end.items() if v.is_floating_point()} for end in ends]
    assert all(same(floats[0], other) for other in floats)


def load(comm: offbeat.Communicator, expression: str, change: dict[str, Any]) -> None:
    net = Dyadic()
    sync = offbeat.method(expression)(net, optimizer_for(net), group=comm)
    sync.load_state_dict({**sync.state_dict(), **change})


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"method": "ddp()"}, r"The checkpoint has method ddp\(\), this run has local_sgd\(every=3\)."),
        ({"workers": 8}, "The checkpoint has workers 8, this run has 2."),
        ({"format": 0}, f"The checkpoint has format 0, this run has {FORMAT}."),
        ({"rank": 5}, "The checkpoint has rank 5, this worker has [01]: every rank loads its own."),
    ],
)
def test_another_runs_checkpoint(change: dict[str, Any], sentence: str) -> None:
    with pytest.raises(offbeat.CheckpointMismatch, match=sentence):
        offbeat.simulate(lambda comm: load(comm, "local_sgd(every=3)", change), 2)


def test_checkpoints_of_different_steps() -> None:
    def worker(comm: offbeat.Communicator) -> None:
        load(comm, "local_sgd(every=3)", dict.fromkeys(("steps", "place"), 4 + comm.rank // 2))

    with pytest.raises(offbeat.Disagreement, match="rank 0 loads step 4, rank 2 step 5"):
        offbeat.simulate(worker, 3)


def test_the_weights_are_not_given_out_again_after_loading() -> None:
    """Rank 0's weights are everyone's at the start of a run, but not at its resumption."""

    def worker(comm: offbeat.Communicator) -> float:
        net = torch.nn.Linear(1, 1, bias=False)
        opt = optimizer_for(net)
        first = offbeat.local_sgd(net, opt, every=8, group=comm)
        net.weight.grad = torch.zeros(1, 1)
        first.step()
        state = first.state_dict()
        second = offbeat.local_sgd(net, opt, every=8, group=comm)
        second.load_state_dict(state)
        with torch.no_grad():
            net.weight.fill_(comm.rank)
        second.step()
        return net.weight.item()

    assert offbeat.simulate(worker, 3) == [0.0, 1.0, 2.0]

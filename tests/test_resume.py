"""A run interrupted after any step and resumed is bit-identical to one that was not."""

from __future__ import annotations

import io
import itertools
from typing import Any

import pytest
import torch
from problems import Dyadic, Realistic, data, optimizer_for, same, snapshot
from table import METHODS, savable
from torch import Tensor

import offbeat

STEPS = 10


class Run:
    """A training loop with everything a user would save."""

    def __init__(self, comm: offbeat.Communicator, expression: str, optimizer: str, seed: int) -> None:
        self.comm = comm
        self.net = Realistic(seed)
        self.opt = optimizer_for(self.net, optimizer)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.opt, 0.9)
        self.sync = offbeat.method(expression)(self.net, self.opt, group=comm)

    def go(self, first: int, last: int) -> list[dict[str, Tensor]]:
        trace = []
        for step in range(first, last):
            loss = self.net(data(self.comm.rank, step))
            loss.backward()
            self.sync.observe(loss)
            self.sync.step()
            self.opt.zero_grad()
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

    def load(self, saved: bytes) -> None:
        state = torch.load(io.BytesIO(saved), weights_only=True)
        for part in ("net", "opt", "scheduler", "sync"):
            getattr(self, part).load_state_dict(state[part])
        torch.set_rng_state(state["rng"])


def reports_of(run: Run) -> list[Any]:
    return sorted((r.step, r.round, r.workers, r.drift or 0.0, r.norm or 0.0) for r in run.sync.reports)


@pytest.mark.parametrize(
    ("expression", "optimizer"), list(zip(METHODS, itertools.cycle(["adamw", "momentum"])))
)
def test_resume_after_any_step(expression: str, optimizer: str) -> None:
    def whole(comm: offbeat.Communicator) -> Any:
        """Its checkpoints before and after every step, with the reports until then; that saving changes
        nothing is a law of its own."""
        torch.manual_seed(comm.rank)
        run = Run(comm, expression, optimizer, seed=comm.rank)
        saved, trace = [(run.save(), reports_of(run))], []
        for step in range(STEPS):
            trace += run.go(step, step + 1)
            saved.append((run.save() if savable(expression, step + 1) else b"", reports_of(run)))
        return trace + run.end(), reports_of(run), saved

    def rest(comm: offbeat.Communicator, at: int) -> Any:
        torch.manual_seed(99)
        run = Run(comm, expression, optimizer, seed=7)
        run.load(expected[comm.rank][2][at][0])
        return run.go(at, STEPS) + run.end(), reports_of(run)

    expected = offbeat.simulate(whole, 4)
    for at in filter(lambda step: savable(expression, step), range(STEPS + 1)):
        resumed = offbeat.simulate(lambda comm, at=at: rest(comm, at), 4)
        for (mine, reports), (theirs, told, saved) in zip(resumed, expected, strict=True):
            assert all(same(a, b) for a, b in zip(mine, theirs[at:], strict=True)), f"cut after step {at}"
            assert sorted(saved[at][1] + reports) == told, f"cut after step {at}"


@pytest.mark.parametrize("expression", METHODS)
def test_saving_changes_nothing(expression: str) -> None:
    def saving(comm: offbeat.Communicator, often: bool) -> list[dict[str, Tensor]]:
        torch.manual_seed(comm.rank)
        run = Run(comm, expression, "momentum", seed=0)
        trace = []
        for step in range(STEPS):
            trace += run.go(step, step + 1)
            if often and savable(expression, step + 1):
                run.save()
        return trace

    with_saves = offbeat.simulate(lambda comm: saving(comm, True), 4)
    without = offbeat.simulate(lambda comm: saving(comm, False), 4)
    for a, b in zip(with_saves, without, strict=True):
        assert all(same(x, y) for x, y in zip(a, b, strict=True))


def load(comm: offbeat.Communicator, expression: str, change: dict[str, Any]) -> None:
    net = Dyadic()
    sync = offbeat.method(expression)(net, optimizer_for(net), group=comm)
    sync.load_state_dict({**sync.state_dict(), **change})


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"method": "ddp()"}, r"The checkpoint has method ddp\(\), this run has local_sgd\(every=3\)."),
        ({"workers": 8}, "The checkpoint has workers 8, this run has 2."),
        ({"format": 0}, "The checkpoint has format 0, this run has 2."),
        ({"rank": 5}, "The checkpoint was written by rank 5, this is rank [01]: every rank loads its own."),
    ],
)
def test_another_runs_checkpoint(change: dict[str, Any], sentence: str) -> None:
    with pytest.raises(offbeat.CheckpointMismatch, match=sentence):
        offbeat.simulate(lambda comm: load(comm, "local_sgd(every=3)", change), 2)


def test_checkpoints_of_different_steps() -> None:
    def worker(comm: offbeat.Communicator) -> None:
        load(comm, "local_sgd(every=3)", {"steps": 4 + comm.rank // 2})

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

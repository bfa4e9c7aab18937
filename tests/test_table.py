"""Every row of the table does what it is there for: codes are at work, rounds land, periods change."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from problems import Dyadic, Realistic, Wide, data, optimizer_for, problem, take_step
from table import CODES, LAWS, ROUNDED, ROWS, TOO_SMALL, Law, enough
from ticking import clocked
from torch import nn

import offbeat
from offbeat import Detached, ErrorFeedback, Exchange, GroupReport, PseudoSync, PushPull
from offbeat.reduce import Code, LowRank, Mean, Quantized, RandomBlock, Reducer, TopK, TwoLevel

CARRIERS = [Mean, Quantized, TopK, RandomBlock, LowRank]


@dataclass
class Seen:
    """What one worker saw of a run, before `finish()`."""

    rounds: list[int]
    landed: list[int]
    pulls: int
    late_enough: bool
    groups: int
    moments: list[int]
    lossy: list[Reducer]


@pytest.fixture
def at_work(monkeypatch: pytest.MonkeyPatch) -> list[Code]:
    """The codes that have carried something."""
    seen: list[Code] = []
    for kind in CARRIERS:

        def carry(self: Code, vector: Any, *rest: Any, inner: Any = kind.carry) -> Any:
            if sum(span.end - span.start for span in vector.spans):
                seen.append(self)
            return inner(self, vector, *rest)

        monkeypatch.setattr(kind, "carry", carry)
    return seen


def code(reduce: Any) -> Any:
    return reduce.code if isinstance(reduce, ErrorFeedback | Detached) else reduce


def run(comm: offbeat.Communicator, expression: str, model: type[nn.Module]) -> Seen:
    torch.manual_seed(comm.rank)
    net = model(seed=comm.rank)
    opt = optimizer_for(net, "adamw" if expression.startswith("desloc") else "momentum")
    sync = offbeat.method(expression)(net, opt, group=clocked(comm, expression))
    pulls = []
    for part in sync.parts:
        if isinstance(part, PseudoSync):
            pull = part._pull
            part._pull = lambda pull=pull: (pulls.append(1), pull())  # type: ignore[method-assign]
    for step in range(10):
        loss = net(data(comm.rank, step))
        loss.backward()
        sync.observe(loss.square())
        sync.step()
        opt.zero_grad()
    exchanges = [part for part in sync.parts if isinstance(part, Exchange)]
    seen = Seen(
        rounds=[part.rhythm.round for part in exchanges],
        landed=[part.landed_at for part in exchanges],
        pulls=len(pulls),
        late_enough=all(p._round.clock.round > p.warmup for p in sync.parts if isinstance(p, PushPull)),
        groups=sum(isinstance(report, GroupReport) for report in sync.reports),
        moments=[len(p.payload.moments.find()) for p in exchanges if p.payload.moments.rule != "keep"],
        lossy=[part.reduce for part in exchanges if part.reduce.lossy],
    )
    if (
        sync.method.startswith(("adaptive", "adacomm", "qsr"))
        or "every=Budget(0.125, least=2))" in expression
    ):
        steps = [0, *(report.step for report in sync.reports)]
        periods = {b - a for a, b in itertools.pairwise(steps)}
        assert len(periods) > 1, f"every period is {periods}"
    sync.finish()
    return seen


@pytest.mark.few(10)
@pytest.mark.parametrize("expression", ROWS)
def test_rows_of_methods_do_what_they_are_there_for(expression: str, at_work: list[Code]) -> None:
    for model in (problem(expression), Realistic):
        at_work.clear()
        for seen in offbeat.simulate(lambda comm, m=model: run(comm, expression, m), enough(expression)):
            assert all(rounds > 0 for rounds in seen.rounds), "an exchange has held no round"
            assert all(step > 0 for step in seen.landed), "no round of an exchange has landed"
            assert seen.pulls > 0 or not expression.startswith("palsgd")
            assert all(seen.moments), "the optimizer has no moments"
            assert seen.late_enough, "the warm-up has not ended"
            if expression.startswith(("wagma", "eager_sgd", "gradient_code")):
                assert (seen.groups > 0) == ("group_size=1," not in expression)
            coded = [code(reduce) for reduce in seen.lossy if not isinstance(reduce, TwoLevel)]
            assert all(any(c is worked for worked in at_work) for c in coded), "a code was never at work"
            assert bool(seen.lossy) == (expression in CODES + ROUNDED)


SIDES = [
    (law, side)
    for law in LAWS
    if law.options.get("workers") != 1  # alone, nothing is lost
    for side in (law.this, law.that)
    if "reduce=" in side or side.startswith(("streaming_diloco", "sparse_loco", "def_sgd"))
]


@pytest.mark.parametrize(("law", "side"), SIDES, ids=str)
def test_codes_of_laws_are_at_work(law: Law, side: str, at_work: list[Code]) -> None:
    def worker(comm: offbeat.Communicator) -> list[Any]:
        """Four steps, and the codes its exchanges have."""
        net = (Wide if law.wide else Dyadic)(seed=comm.rank)
        opt = optimizer_for(net, "momentum")
        sync = offbeat.method(side)(net, opt, group=comm)
        for step in range(4):
            take_step(net, opt, sync, comm.rank, step)
        return [code(part.reduce) for part in sync.parts if isinstance(part, Exchange) and part.reduce.lossy]

    (codes, *_) = offbeat.simulate(worker, 4)
    assert bool(codes) != side.endswith("reduce=Mean())")
    idle = [each for each in codes if not any(each is worked for worked in at_work)]
    assert idle == ([Quantized(4)] if side == TOO_SMALL else [])

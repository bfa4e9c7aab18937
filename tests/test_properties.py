"""Laws that hold for every model, world, schedule and cut, sought by hypothesis in simulation."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import same, snapshot
from torch import Tensor, nn

import offbeat
from offbeat import QSR, Clock, Every, Then

lawful = settings(derandomize=True, deadline=None, database=None, max_examples=40)

Shapes = list[tuple[tuple[int, ...], torch.dtype]]
shapes = st.lists(
    st.tuples(
        st.lists(st.integers(0, 4), max_size=3).map(tuple),
        st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
    ),
    min_size=1,
    max_size=5,
)


class Random(nn.Module):
    """Tensors of any shapes and kinds, each pulled towards where a worker wants it."""

    def __init__(self, shapes: Shapes, seed: int) -> None:
        super().__init__()
        g = torch.Generator().manual_seed(seed)
        for i, (shape, dtype) in enumerate(shapes):
            self.register_parameter(f"p{i}", nn.Parameter(torch.randn(shape, generator=g).to(dtype)))
        self.register_buffer("seen", torch.zeros(2))

    def loss(self, rank: int, step: int) -> Tensor:
        g = torch.Generator().manual_seed(1000 * rank + step)
        self.seen.add_(torch.randn(2, generator=g))
        pulls = [
            (p - torch.randn(p.shape, generator=g).to(p.dtype)).square().sum() for p in self.parameters()
        ]
        return torch.stack([pull.double() for pull in pulls]).sum() / 2


@st.composite
def schedules(draw: Any) -> str:
    steps = draw(st.integers(1, 5))
    return draw(
        st.sampled_from(
            [
                f"Every(steps={steps}, offset={draw(st.integers(0, steps - 1))})",
                f"QSR(alpha={draw(st.floats(0, 1)):.3f}, base={steps})",
                f"Then({draw(st.integers(0, 6))}, Every(1), Every({steps}))",
            ]
        )
    )


@st.composite
def methods(draw: Any, workers: int) -> str:
    rules = (
        f"buffers={draw(st.sampled_from(['average', 'keep', 'follow']))!r}, "
        f"moments={draw(st.sampled_from(['keep', 'average', 'reset']))!r}"
    )
    period = draw(st.integers(1, 5))
    inner = draw(st.integers(1, 3))
    size = draw(st.sampled_from([n for n in range(1, workers + 1) if workers % n == 0]))
    delay = draw(st.one_of(st.integers(0, period), st.just("round")))
    offset = draw(st.integers(0, period - 1))
    return draw(
        st.sampled_from(
            [
                "ddp()",
                f"local_sgd(every={draw(schedules())}, {rules})",
                f"local_sgd(every=Every({period}, offset={offset}), delay={delay!r}, {rules})",
                f"post_local_sgd(switch={draw(st.integers(0, 6))}, every={period}, {rules})",
                f"hierarchical(nodes={size}, inner={inner}, outer={inner * period}, {rules})",
            ]
        )
    )


worlds = st.integers(1, 5).flatmap(lambda workers: st.tuples(st.just(workers), methods(workers)))
optimizers = st.sampled_from(["sgd", "momentum", "adamw"])


class Run:
    def __init__(
        self, comm: offbeat.Communicator, expression: str, shapes: Shapes, name: str, seed: int
    ) -> None:
        self.comm = comm
        self.net = Random(shapes, seed)
        parameters = self.net.parameters()
        self.opt: torch.optim.Optimizer = (
            torch.optim.AdamW(parameters, lr=0.05)
            if name == "adamw"
            else torch.optim.SGD(parameters, lr=0.25, momentum=0.5 if name == "momentum" else 0.0)
        )
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.opt, 0.9)
        self.sync = offbeat.method(expression)(self.net, self.opt, group=comm)

    def go(self, first: int, last: int) -> list[dict[str, Tensor]]:
        trace = []
        for step in range(first, last):
            self.net.loss(self.comm.rank, step).backward()
            self.sync.step()
            self.opt.zero_grad()
            self.scheduler.step()
            trace.append(snapshot(self.net))
        return trace


@pytest.mark.slow
@lawful
@given(worlds, shapes, optimizers, st.integers(0, 9))
def test_replicas_are_equal_after_finish(
    world: tuple[int, str], shapes: Shapes, optimizer: str, steps: int
) -> None:
    workers, expression = world

    def worker(comm: offbeat.Communicator) -> dict[str, Tensor]:
        run = Run(comm, expression, shapes, optimizer, seed=comm.rank)
        run.go(0, steps)
        run.sync.finish()
        return snapshot(run.net)

    ends = offbeat.simulate(worker, workers)
    assert all(same(end, ends[0]) for end in ends)


@lawful
@given(st.integers(1, 5), shapes, st.integers(1, 4), st.integers(0, 4), st.sampled_from([0.25, 0.5, 1.0]))
def test_a_round_preserves_the_mean(
    workers: int, shapes: Shapes, period: int, delay: int, gain: float
) -> None:
    """With a learning rate of zero only rounds move the weights, and their mean stays where it is.

    Without a delay all are there after one round. Late rounds each leave 1 − gain of what is between.
    """
    shapes, delay = [(shape, torch.float64) for shape, _ in shapes], min(delay, period)

    def worker(comm: offbeat.Communicator) -> tuple[list[Tensor], list[Tensor], float, int]:
        net = Random(shapes, 0)
        opt = torch.optim.SGD(net.parameters(), lr=0.0)
        sync = offbeat.local_sgd(net, opt, every=period, delay=delay, gain=gain, group=comm)
        sync.step()  # the weights are given out here
        with torch.no_grad():
            for p, q in zip(net.parameters(), Random(shapes, comm.rank + 1).parameters(), strict=True):
                p.copy_(q)
        before = [p.detach().clone() for p in net.parameters()]
        for _ in range(2 * period):
            sync.step()
        drift = max((report.drift or 0.0 for report in sync.reports), default=0.0)
        landed = sum(report.step > 1 for report in sync.reports)
        return before, [p.detach().clone() for p in net.parameters()], drift, landed

    answers = offbeat.simulate(worker, workers)
    means = [
        torch.stack(tensors).mean(0) for tensors in zip(*[before for before, *_ in answers], strict=True)
    ]
    for before, after, drift, landed in answers:
        left = (1 - gain) ** landed if delay else 0.0
        for start, value, mean in zip(before, after, means, strict=True):
            torch.testing.assert_close(value, mean + left * (start - mean), rtol=1e-12, atol=1e-12)
        spread = [
            sum((b - m).square().sum().item() for b, m in zip(others, means, strict=True))
            for others, *_ in answers
        ]
        assert math.isclose(drift, sum(spread) / workers, rel_tol=1e-9, abs_tol=1e-12)


@pytest.mark.slow
@lawful
@given(worlds, shapes, optimizers, st.integers(0, 8), st.integers(0, 3))
def test_resumed_is_as_not_resumed(
    world: tuple[int, str], shapes: Shapes, optimizer: str, cut: int, more: int
) -> None:
    workers, expression = world
    steps = cut + more + 1

    def worker(comm: offbeat.Communicator, resume: bool) -> list[dict[str, Tensor]]:
        run = Run(comm, expression, shapes, optimizer, seed=comm.rank)
        trace = run.go(0, cut)
        if resume:
            parts = ("net", "opt", "scheduler", "sync")
            states = [getattr(run, part).state_dict() for part in parts]
            run = Run(comm, expression, shapes, optimizer, seed=77)
            for part, state in zip(parts, states, strict=True):
                getattr(run, part).load_state_dict(state)
        trace += run.go(cut, steps)
        run.sync.finish()
        return [*trace, snapshot(run.net)]

    whole = offbeat.simulate(lambda comm: worker(comm, False), workers)
    cut_run = offbeat.simulate(lambda comm: worker(comm, True), workers)
    for a, b in zip(whole, cut_run, strict=True):
        assert all(same(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.slow
@lawful
@given(worlds, shapes, optimizers, st.integers(0, 9))
def test_the_bytes_are_those_of_the_reports_and_of_start_and_finish(
    world: tuple[int, str], shapes: Shapes, optimizer: str, steps: int
) -> None:
    workers, expression = world

    def worker(comm: offbeat.Communicator) -> tuple[int, int, int, int]:
        meter = offbeat.Metered(comm)
        run = Run(meter, expression, shapes, optimizer, seed=0)
        with run.sync.averaged():  # starts the run, and needs no more while nobody has moved
            pass
        started = run.sync.totals.bytes_sent
        run.go(0, steps)
        rounds = sum(report.bytes_sent for report in run.sync.reports)
        before = run.sync.totals.bytes_sent
        run.sync.finish()
        landed = sum(report.bytes_sent for report in run.sync.reports)
        totals = run.sync.totals
        assert totals.bytes_sent == totals.bytes_received
        assert totals.rounds == len(run.sync.reports)
        assert before == started + rounds
        return totals.bytes_sent, started, landed, meter.sent

    for total, started, landed, counted in offbeat.simulate(worker, workers):
        assert total >= started + landed
        if not expression.startswith("hierarchical"):  # a subgroup's bytes pass by this meter
            assert total == counted
        if workers == 1:
            assert total == 0


class Boom(Exception):
    """Raised inside averaged()."""


@pytest.mark.slow
@lawful
@given(worlds, shapes, st.integers(0, 7), st.booleans())
def test_averaged_restores_to_the_bit(world: tuple[int, str], shapes: Shapes, steps: int, fail: bool) -> None:
    workers, expression = world

    def worker(comm: offbeat.Communicator) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        run = Run(comm, expression, shapes, "momentum", seed=0)
        run.go(0, steps)
        before = snapshot(run.net)
        try:
            with run.sync.averaged():
                inside = snapshot(run.net)
                with torch.no_grad():
                    for tensor in [*run.net.parameters(), *run.net.buffers()]:
                        tensor.fill_(float("nan"))
                if fail:
                    raise Boom
        except Boom:
            assert fail
        assert same(snapshot(run.net), before)
        run.go(steps, steps + 2)
        run.sync.finish()
        return inside, before

    answers = offbeat.simulate(worker, workers)
    for inside, _ in answers:
        assert same(inside, answers[0][0])
        for name, value in inside.items():
            mean = torch.stack([before[name].double() for _, before in answers]).mean(0)
            rough = value.dtype == torch.bfloat16
            tolerance = {"rtol": 2e-2 if rough else 1e-5, "atol": 2e-2 if rough else 1e-5}
            torch.testing.assert_close(value.double(), mean, **tolerance)


rates = st.lists(st.floats(0, 10, allow_nan=False), min_size=1, max_size=12)
plans = st.one_of(
    st.builds(
        lambda steps, offset, times: Every(steps, offset=offset % steps, skip=times and steps * times),
        st.integers(1, 9),
        st.integers(0, 8),
        st.one_of(st.none(), st.integers(2, 4)),
    ),
    st.builds(
        lambda **options: QSR(**options),
        alpha=st.floats(0, 1e9),
        base=st.integers(1, 9),
        warmup=st.integers(0, 20),
        peak=st.one_of(st.none(), st.floats(1e-12, 10)),
        total=st.one_of(st.none(), st.integers(1, 60)),
        power=st.floats(0.1, 5),
    ),
)
nested = st.one_of(plans, st.builds(Then, st.integers(0, 20), plans, plans))


@settings(lawful, max_examples=300)
@given(nested, rates)
def test_plans_strictly_increase(plan: offbeat.Schedule, rates: list[float]) -> None:
    """Whatever the learning rate does, zero included."""
    state = plan.init()
    step = 0
    for round, lr in enumerate(rates):
        due = plan.next(Clock(step=step, round=round, lr=lr), state)
        assert isinstance(due, int)
        assert due > step
        if round and isinstance(plan, Every):  # single periods of other schedules may be shorter
            assert due - step >= plan.shortest
        step = due


@lawful
@given(st.integers(1, 9), st.integers(0, 8), st.one_of(st.none(), st.integers(2, 4)), st.integers(0, 50))
def test_every_plans_the_next_that_fits(steps: int, offset: int, times: int | None, now: int) -> None:
    offset %= steps
    skip = times and steps * times
    due = Every(steps, offset=offset, skip=skip).next(Clock(step=now, round=0, lr=0.1), {})
    fits = [n for n in range(now + 1, now + 30) if n % steps == offset and not (skip and n % skip == 0)]
    assert due == fits[0]

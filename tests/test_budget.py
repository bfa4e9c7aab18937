"""Periods by the share of time that exposed communication may take, from what the rounds measure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from conftest import Pool
from problems import reloaded
from sentences import says
from ticking import Ticking
from torch import nn

import offbeat
from offbeat import Budget, Clock, Network
from offbeat.base.clock import Cost


def periods(when: Budget, costs: Sequence[tuple[float, ...]], delay: float = 0) -> list[int]:
    """The periods that it plans, first without a cost, then after each round of such a cost."""
    state, step, found = when.init(), 0, []
    for round, cost in enumerate([None, *costs]):
        measured = None if cost is None else Cost(*cost)
        due = when.next(Clock(step, round, 0.1, cost=measured, delay=delay), state)
        assert due is not None
        found.append(due - step)
        step = due
    return found


def test_the_rule_by_hand() -> None:
    # A round of 1 s at 0.1 s a step: 1·0.8/(0.2·0.1) = 40 steps, reached by factors of four.
    assert periods(Budget(0.2), [(1.0, 0.1)] * 4) == [1, 4, 16, 40, 40]
    # Then the round takes 1 s of 5 s in all: exactly a fifth.
    assert 1.0 / (40 * 0.1 + 1.0) == pytest.approx(0.2)
    # The link gets ten times slower: the mean of four rounds follows within four.
    slower = periods(Budget(0.2, most=1000), [(1.0, 0.1)] * 4 + [(10.0, 0.1)] * 4)
    assert slower[5:] == [130, 220, 310, 400]
    # One slow step among four does not count: the median of the paces.
    assert periods(Budget(0.2), [(1.0, 0.1)] * 4 + [(1.0, 9.0)])[-1] == 40
    # Bounds.
    assert periods(Budget(0.2, least=3, most=20), [(1.0, 0.1)] * 3) == [3, 12, 20, 20]
    assert periods(Budget(0.2, least=3), [(0.001, 0.1)] * 3) == [3, 3, 3, 3]
    # The same round is looked at once, and without a cost nothing changes.
    state = Budget(0.2).init()
    clock = Clock(0, 1, 0.1, cost=Cost(1.0, 0.1))
    assert [Budget(0.2).next(clock, state) for _ in range(3)] == [4, 4, 4]


def test_a_delay_hides_a_part() -> None:
    when = Budget(0.2)
    # Five of ten steps' time are hidden: 0.5·0.8/(0.2·0.1) = 20.
    assert when.period(1.0, 0.1, 5) == 20
    # All of it but a fifth of the period, or all: with delay="round" the period itself hides it.
    assert when.period(1.0, 0.1, math.inf) == 8
    assert (1.0 - 0.8) / 1.0 == pytest.approx(0.2)
    # As soon as the delay is long enough, the share allows the rest.
    assert when.period(1.0, 0.1, 8) == 8
    assert when.period(1.0, 0.1, 7) == 12
    assert when.period(0.0, 0.1) == when.period(0.0, 0.0) == 1
    assert when.period(1.0, 0.0) == 500


def test_the_message_that_agrees_on_the_numbers_counts() -> None:
    when = Budget(0.2)
    # A gradient of 0.1 s hides a part of its 0.6 s: (1 + 0.5)·0.8/(0.2·0.1) = 60. Then 1.5 s of 7.5 s count.
    assert when.period(1.0, 0.1, 0, 0.6) == 60
    assert periods(when, [(1.0, 0.1, 0.6)] * 4) == [1, 4, 16, 60, 60]
    assert when.period(1.0, 0.1, 0, 0.1) == when.period(1.0, 0.1) == 40
    # With delay="round" the period hides the round, but not the message that ends it: after 10 steps, 0.25 s
    # of 1.25 s are exposed. 0.5 s alone need 0.5·0.8/(0.2·0.1) = 20 steps.
    assert when.period(1.0, 0.1, math.inf, 0.35) == 10
    assert when.period(1.0, 0.1, math.inf, 0.6) == 20
    # With a delay of some steps it arrives long before it is needed.
    assert when.period(1.0, 0.1, 5, 0.6) == 20
    assert when.period(0.0, 0.1, 0, 0.0) == 1


class Wide(nn.Module):
    """8 kB, and a slope that differs by worker."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1000, dtype=torch.float64))


def run(
    comm: offbeat.Communicator, expression: str, steps: int, cut: int | None = None
) -> tuple[list[float], list[int], list[float], float]:
    """The first weight after each step; period and wait of each round; and the time."""
    net, trace = Wide(), []
    opt = torch.optim.SGD(net.parameters(), lr=0.125)
    sync = offbeat.method(expression)(net, opt, group=comm)
    for step in range(steps):
        if step == cut:
            weights, state = reloaded(net.state_dict(), sync.state_dict())
            net = Wide()
            net.load_state_dict(weights)
            opt = torch.optim.SGD(net.parameters(), lr=0.125)
            sync = offbeat.method(expression)(net, opt, group=comm)
            sync.load_state_dict(state)
        opt.zero_grad()
        (net.weight - comm.rank).square().sum().backward()
        sync.step()
        trace.append(net.weight[0].item())
    reports = sync.reports
    return trace, [r.period for r in reports], [r.seconds_waited for r in reports], comm.now()


def simulate(expression: str, steps: int, bandwidth: float, cut: int | None = None, **options: Any) -> Any:
    compute = options.get("compute", lambda rank, step: 0.01)
    network = Network(latency=0.001, bandwidth=bandwidth)
    worker = lambda comm: run(comm, expression, steps, cut)  # noqa: E731
    return offbeat.simulate(worker, 2, compute=compute, network=network)


@pytest.mark.few(1)
@pytest.mark.parametrize("bandwidth", [1e5, pytest.param(1e6, marks=pytest.mark.slow), 1e7])
@pytest.mark.parametrize(
    "expression", ["diloco(every=Budget(0.1))", "local_sgd(every=Budget(0.1, least=3), delay=3)"]
)
def test_the_exposed_share_stays_within_the_budget(expression: str, bandwidth: float) -> None:
    one, two = simulate(expression, 700, bandwidth)
    assert one[1] == two[1]  # all workers agree
    _, found, waited, _ = one
    settled = found[8:] or found[-1:]
    seconds = waited[-2]  # the last one ends with the run, whose end waits for its numbers
    assert seconds / (settled[-1] * 0.01 + seconds) <= 0.1001
    # The shortest such period: one step less would not do, unless it is the least.
    least, shorter = 3 if "least=3" in expression else 1, settled[-1] - 1
    assert shorter < least or seconds / (shorter * 0.01 + seconds) > 0.0999


def test_a_slow_worker_does_not_count_as_communication() -> None:
    """Rank 0 waits for rank 1 all the time, but the link is fast."""
    slow = {"compute": lambda rank, step: (0.01, 0.02)[rank]}
    one, _ = simulate("diloco(every=Budget(0.1))", 100, 1e9, **slow)
    assert set(one[1]) == {1}


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "expression",
    [
        "diloco(every=Budget(0.07))",
        "local_sgd(every=Budget(0.07, least=2), delay=2)",
        "cocod(every=Budget(0.07), delay='round')",
    ],
)
def test_it_resumes_exactly(expression: str) -> None:
    noisy = {"compute": lambda rank, step: 0.011 + 0.001 * ((step * 7 + rank) % 5)}
    whole = simulate(expression, 120, 1.3e6, **noisy)
    for cut in (2, 5, 40):
        again = simulate(expression, 120, 1.3e6, cut, **noisy)
        assert [found[0] for found in whole] == [found[0] for found in again], cut


def test_the_slowest_worker_says_how_long_a_step_takes() -> None:
    """A round of 0.5 s, steps of 0.0625 and 0.125 s. The workers wait 0.375 s more for each other's numbers:
    0.875·0.875/(0.125·0.125) = 49 steps."""
    compute = lambda rank, step: 0.0625 * (1 + rank)  # noqa: E731
    worker = lambda comm: run(comm, "diloco(every=Budget(0.125, least=2))", 260)  # noqa: E731
    _, (_, found, waited, _) = offbeat.simulate(worker, 2, compute=compute, network=Network(latency=0.5))
    assert found[-1] == 49
    # All waiting is reported, and takes the share that was asked for.
    assert waited[-1] == pytest.approx(0.875)
    assert waited[-1] / (49 * 0.125 + waited[-1]) == pytest.approx(0.125)


def ticking(comm: offbeat.Communicator, expression: str, seconds: float) -> Any:
    return run(Ticking(comm, seconds * (1 + comm.rank % 2), 0.5), expression, 60)


@pytest.mark.parametrize(
    "expression",
    [
        "diloco(every=Budget(0.125, least=2))",
        "local_sgd(every=Budget(0.0625, least=2, most=12), delay=2)",
        "local_sgd(every=Budget(0.25), delay='round')",
    ],
)
def test_simulation_equals_gloo(pool: Pool, expression: str) -> None:
    """Real workers on a clock that moves as virtual time does measure, wait and plan the same."""
    real = pool.run(ticking, expression, 0.0625)
    virtual = offbeat.simulate(
        lambda comm: run(comm, expression, 60),
        4,
        compute=lambda rank, step: 0.0625 * (1 + rank % 2),
        network=Network(latency=0.5),
    )
    for mine, other in zip(real, virtual, strict=True):
        assert mine[0] == pytest.approx(other[0])
        assert mine[1] == other[1] == real[0][1]
        assert len(set(mine[1])) > 1
        assert mine[2:] == other[2:]


REFUSED = [
    ("local_sgd(every=Budget(0))", "Budget(share=0, least=1, most=500): share must be above 0 and below 1."),
    ("local_sgd(every=Budget(0.1, 0))", "Budget(share=0.1, least=0, most=500): least must be at least 1."),
    ("local_sgd(every=Budget(0.1, 9, 8))", "Budget(share=0.1, least=9, most=8): most must be at least 9."),
    (
        "local_sgd(every=Budget(0.1), delay=2)",
        "delay=2 with Budget(share=0.1, least=1, most=500): delay must not exceed the period, which can be "
        "1.",
    ),
    (
        "local_sgd(every=Budget(0.1), drift=False)",
        "drift=False with Budget(share=0.1, least=1, most=500), which needs the measurements of rounds: "
        "leave drift out.",
    ),
]


@pytest.mark.parametrize(("expression", "sentence"), REFUSED)
def test_bad_budgets(expression: str, sentence: str) -> None:
    net = Wide()
    with says(ValueError, sentence):
        offbeat.method(expression)(net, torch.optim.SGD(net.parameters(), lr=1.0), group=offbeat.Solo())


@pytest.mark.slow
def test_the_planner_predicts_the_period() -> None:
    from offbeat.plan import Cluster, Job, predict

    network = Network(latency=0.001, bandwidth=1e7, reduce="ring")
    cluster = Cluster(4, offbeat.Constant(0.05), network)
    job = Job(steps=400, parameters=1_000_000)
    found = predict("diloco(every=Budget(0.2))", job, cluster)
    (note,) = [note for note in found.notes if "planned as every=" in note]
    steps = int(note.rpartition("=")[2])
    assert found.exposed / found.seconds <= 0.2
    shorter = predict(f"diloco(every={steps - 1})", job, cluster)
    assert shorter.exposed / shorter.seconds > 0.19
    timed = predict("diloco(every=Seconds(5))", job, cluster)
    assert timed.seconds == predict("diloco(every=100)", job, cluster).seconds
    with pytest.raises(ValueError, match="these differ in speed: simulate it"):
        predict(
            "diloco(every=Seconds(5))",
            job,
            Cluster(4, offbeat.Uneven(offbeat.Constant(0.05), (1.0, 2.0)), network),
        )

"""Wait-free rounds in virtual time: who is late, what happens to late steps, and what always holds."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from problems import Realistic, data, optimizer_for, same, snapshot
from sentences import says
from torch import Tensor, nn
from watch import Watched, watch

import offbeat
from offbeat import (
    QSR,
    SGD,
    Butterfly,
    Correct,
    EagerGradients,
    Every,
    Exchange,
    GroupAverage,
    GroupReport,
    Network,
    Outer,
    Part,
    PseudoSync,
    Replace,
    Subgroups,
    Synchronizer,
    World,
    grads,
    params,
)
from offbeat.waitfree.base import allowance
from offbeat.waitfree.rounds import Rounds

Compute = Callable[[int, int], float]


class Line(nn.Module):
    """One number; a step of rank k adds 2k + 1."""

    def __init__(self) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.zeros(1, dtype=torch.float64))


def walk(
    expression: str,
    compute: Compute,
    *,
    steps: int,
    workers: int = 2,
    network: Network | None = None,
) -> tuple[list[list[float]], list[list[Any]]]:
    """x on each rank after every step, and each rank's reports of group rounds."""

    def worker(comm: offbeat.Communicator) -> Any:
        model = Line()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        sync = offbeat.method(expression)(model, optimizer, group=comm)
        trace = []
        for _ in range(steps):
            (-(2 * comm.rank + 1) * model.x.sum()).backward()
            sync.step()
            optimizer.zero_grad()
            trace.append(model.x.item())
        reports = [report for report in sync.reports if isinstance(report, GroupReport)]
        sync.finish()
        return trace, reports

    done = offbeat.simulate(worker, workers, compute=compute, network=network)
    return [trace for trace, _ in done], [reports for _, reports in done]


def slow(rank: int, step: int, seconds: float) -> Compute:
    """Each worker needs a second per gradient; one of them needs more once."""
    return lambda r, s: seconds if (r, s) == (rank, step) else 1.0


def kinds(reports: list[Any]) -> list[tuple[str, int]]:
    return [(report.kind, report.age) for report in reports]


def test_a_late_worker_by_hand() -> None:
    # Rank 1 needs 2.5 s for its first gradient, everything else takes 1 s.
    # 1.0  rank 0: W' = 1; rank 1 contributes its start 0: 1/2.
    # 2.0  rank 0: W' = 3/2; again 0: 3/4.
    # 2.5  rank 1: W' = 3; round 0 is over, the newest is 1, in which it was old: (3/2 + 3)/3 = 3/2.
    # 3.0  rank 0: W' = 7/4; rank 1 contributes 3, which it had before it merged: 19/8.
    # 3.5  rank 1: W' = 9/2; the newest is round 2: (19/4 + 9/2)/3 = 37/12.
    # 4.0  rank 0: W' = 27/8, and waits for the global round.
    # 4.5  rank 1: W' = 73/12; round 2 is used already: it stays.
    # 5.5  rank 1: W' = 109/12; the mean of all is (27/8 + 109/12)/2 = 299/48.
    (first, second), reports = walk("wagma(group_size=2, every=4, grace=0)", slow(1, 0, 2.5), steps=4)
    assert first == pytest.approx([1 / 2, 3 / 4, 19 / 8, 299 / 48])
    assert second == pytest.approx([3 / 2, 37 / 12, 73 / 12, 299 / 48])
    assert kinds(reports[0]) == [("fresh", 0)] * 3
    assert kinds(reports[1]) == [("late", 2), ("late", 2), ("nothing new", 2)]
    assert [r.seconds_waited for r in reports[0] + reports[1]] == [0.0] * 6


def test_a_late_worker_whose_steps_are_added_by_hand() -> None:
    # The same, with c what rank 1's sidecar has.
    # 1.0  rank 0: W' = 1; c = 0: 1/2 for both.  2.0  rank 0: W' = 3/2; c = 1/2: 1 for both.
    # 2.5  rank 1: 0 became 3, so c + 3 = 4.
    # 3.0  rank 0: W' = 2; rank 1's 4: 3 for both.
    # 3.5  rank 1: 4 became 7, so c + 3 = 6.
    # 4.0  rank 0: W' = 4, and waits.  4.5  rank 1: 6 became 9; no round was held: c + 6 = 9.
    # 5.5  rank 1: W' = 12; the mean is 8: four steps of 1 and four of 3.
    expression = "wagma(group_size=2, every=4, grace=0, late='add')"
    (first, second), reports = walk(expression, slow(1, 0, 2.5), steps=4)
    assert first == [1 / 2, 1, 3, 8]
    assert second == [4, 6, 9, 8]
    assert kinds(reports[0]) == [("fresh", 0)] * 3
    assert kinds(reports[1]) == [("late", 2), ("late", 2), ("nothing new", 2)]


@pytest.mark.parametrize("seed", range(8))
def test_with_add_no_step_is_lost(seed: int) -> None:
    """After a global round each worker holds the sum of all steps of all workers."""
    draw = random.Random(seed)
    workers, every = draw.randint(2, 7), draw.randint(2, 6)
    size, grace = draw.choice([None, 2, 3, workers]), draw.choice([None, 0.0, 0.5])
    expression = f"wagma(group_size={size}, every={every}, grace={grace}, late='add')"
    network = Network(latency=draw.choice([0.0, 0.3]))
    traces, reports = walk(
        expression, random_compute(seed), steps=3 * every, workers=workers, network=network
    )
    for step in range(every, 3 * every + 1, every):  # one of rank k adds 2k + 1, so the mean of them is K
        assert [trace[step - 1] for trace in traces] == pytest.approx([step * workers] * workers, rel=1e-12)
    assert any(report.kind != "fresh" for of_rank in reports for report in of_rank)


def test_after_a_global_round_a_late_worker_contributes_the_mean() -> None:
    # Both are on time until the global round 1: x = 2, then mean(3, 5) = 4. Rank 1 then needs 3 s.
    # 3.0  rank 0: W' = 5; rank 1 contributes 4: 9/2.  4.0  rank 0: W' = 11/2, waits.
    # 5.0  rank 1: W' = 7; late: (9 + 7)/3 = 16/3.  6.0  W' = 25/3: the mean of 11/2 and 25/3 is 83/12.
    (first, second), reports = walk("wagma(group_size=2, every=2, grace=0)", slow(1, 2, 3.0), steps=4)
    assert first == pytest.approx([2, 4, 9 / 2, 83 / 12])
    assert second == pytest.approx([2, 4, 16 / 3, 83 / 12])
    assert kinds(reports[1]) == [("fresh", 0), ("late", 1)]


def test_a_call_reaches_workers_that_must_run_another_round_first() -> None:
    # Four workers in pairs: rounds 0, 1, 2 with partners rank ^ 1, rank ^ 2, rank ^ 1. Rank 3 needs 3.5 s.
    # 1.0  W' = 1, 3, 5; rank 3 contributes 0: ranks 0 and 1 have 2, rank 2 has 5/2.
    # 2.0  W' = 3, 5, 15/2: ranks 0 and 2 have 21/4; rank 1 with rank 3's 0 has 5/2.
    # 3.0  W' = 25/4, 11/2, 41/4: ranks 0 and 1 have 47/8; rank 2 with rank 3's 0 has 41/8.
    # 3.5  rank 3: W' = 7; the newest is round 2 with rank 2: (41/4 + 7)/3 = 23/4.
    # 4.5, 5.5  rank 3: 51/4, 79/4, nothing new.  6.5  global: the mean of 55/8, 71/8, 81/8 and 107/4.
    traces, reports = walk("wagma(group_size=2, every=4, grace=0)", slow(3, 0, 3.5), steps=4, workers=4)
    mean = (55 / 8 + 71 / 8 + 81 / 8 + 107 / 4) / 4
    assert traces[0] == pytest.approx([2, 21 / 4, 47 / 8, mean])
    assert traces[1] == pytest.approx([2, 5 / 2, 47 / 8, mean])
    assert traces[2] == pytest.approx([5 / 2, 21 / 4, 41 / 8, mean])
    assert traces[3] == pytest.approx([23 / 4, 51 / 4, 79 / 4, mean])
    assert kinds(reports[3]) == [("late", 3), ("nothing new", 3), ("nothing new", 3)]


def test_alone_in_a_round() -> None:
    """Of three workers in pairs one is alone; a late one is not averaged with its own past."""
    groups = [offbeat.Butterfly(2, offbeat.Solo()).groups(0)]
    assert groups == [[[0]]]
    traces, _ = walk("wagma(group_size=2, every=3, grace=0)", slow(0, 0, 1.5), steps=2, workers=3)
    for t in range(2):
        for members in pairs_of_three()[t]:
            if members == [0] and t == 0:
                assert traces[0][0] == 1.0
            if members == [1] and t == 0:
                assert traces[1][0] == 3.0


def pairs_of_three() -> list[list[list[int]]]:
    return offbeat.simulate(lambda comm: [offbeat.Butterfly(2, comm).groups(t) for t in range(16)], 3)[0]


@pytest.mark.parametrize(
    ("grace", "latency", "kind", "waited"),
    [
        ("0", 0.0, "late", 0.0),
        ("0.05", 0.0, "fresh", 0.04),
        ("0.03", 0.0, "late", 0.03),
        ("0", 0.05, "fresh", 0.09),
    ],
)
def test_a_near_tie(grace: str, latency: float, kind: str, waited: float) -> None:
    """Rank 1 comes 0.04 s later. A grace that is longer waits for it, and so does a call on its way; a
    shorter one is waited for in vain."""
    compute = lambda rank, step: 1.04 if rank == 1 else 1.0  # noqa: E731
    expression = f"wagma(group_size=2, every=2, grace={grace})"
    _, reports = walk(expression, compute, steps=1, network=Network(latency=latency))
    assert reports[1][0].kind == kind
    assert reports[0][0].kind == "fresh"
    assert reports[0][0].seconds_waited == pytest.approx(waited)


def test_by_default_a_round_waits_until_a_worker_is_overdue() -> None:
    """A tenth over the usual time is awaited. A later worker is awaited again in the next round."""
    for seconds, late in ((1.08, []), (1.2, [5])):
        _, reports = walk("wagma(group_size=2, every=10)", slow(1, 5, seconds), steps=9)
        assert [report.round for report in reports[1] if report.kind == "late"] == late
        waited = [report.seconds_waited for report in reports[0]]
        expected = [0.0] * 5 + ([0.1, 0.1] if late else [0.08, 0.0]) + [0.0] * 2
        assert waited == pytest.approx(expected)


def test_the_usual_time_follows_the_spread_of_steps_and_ignores_delays() -> None:
    assert allowance([2.0] * 5) == pytest.approx(2.2)
    assert allowance([1.0, 1.1, 1.2, 1.3, 1.4]) == pytest.approx(1.2 + 5 * 0.1)
    assert allowance([1.0, 1.0, 9.0, 1.0, 9.0, 1.0, 1.0]) == pytest.approx(1.1)


@pytest.mark.slow
def test_by_default_steps_that_vary_are_not_late() -> None:
    """Steps vary by a tenth. Once that is known, almost no worker is late, unlike with grace 0."""
    compute = lambda rank, step: random.Random(f"{rank} {step}").gauss(1, 0.1)  # noqa: E731

    def late(expression: str) -> float:
        _, reports = walk(expression, compute, steps=60, workers=4)
        known = [report for of_rank in reports for report in of_rank if report.round >= 10]
        return statistics.mean(report.kind != "fresh" for report in known)

    assert late("wagma(every=10)") < 0.02
    assert late("wagma(every=10, grace=0)") > 0.4


def test_by_default_no_worker_waits_for_one_that_is_rounds_behind() -> None:
    _, reports = walk("wagma(group_size=2, every=10)", slow(1, 3, 5.0), steps=9)
    # Rank 0 waits a tenth in round 3, where rank 1 stays away, and not at all in those after it.
    assert [report.seconds_waited for report in reports[0]] == pytest.approx([0.0] * 3 + [0.1] + [0.0] * 5)
    assert [report.kind for report in reports[1]].count("fresh") == 3


def test_by_default_a_worker_that_is_always_slower_is_awaited_which_costs_no_time() -> None:
    compute = lambda rank, step: 2.0 if rank == 1 else 1.0  # noqa: E731

    def seconds(expression: str) -> float:
        _, reports = walk(expression, compute, steps=8)
        if "grace" not in expression:
            # In the first period it is rounds behind before its usual time is known.
            assert [report.kind for report in reports[1]][3:] == ["fresh"] * 3
            assert [report.seconds_waited for report in reports[0]][3:] == [1.0] * 3
        return max(offbeat.simulate(lambda comm: last_moment(comm, expression), 2, compute=compute))

    assert seconds("wagma(group_size=2, every=4)") == seconds("wagma(group_size=2, every=4, grace=0)") == 16.0


def last_moment(comm: offbeat.Communicator, expression: str) -> float:
    model = Line()
    sync = offbeat.method(expression)(model, torch.optim.SGD(model.parameters(), lr=1.0), group=comm)
    for _ in range(8):
        sync.step()
    return comm.now()


def test_a_straggler_costs_the_others_nothing_between_global_rounds() -> None:
    """At each step another worker needs nine seconds. Averaging waits every time, groups once per period."""
    compute = lambda rank, step: 9.0 if step % 4 == rank else 1.0  # noqa: E731

    def seconds(expression: str) -> float:
        def worker(comm: offbeat.Communicator) -> float:
            model = Line()
            optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
            sync = offbeat.method(expression)(model, optimizer, group=comm)
            for _ in range(16):
                sync.step()
            return comm.now()

        return max(offbeat.simulate(worker, 4, compute=compute))

    assert seconds("local_sgd(every=1)") == 16 * 9
    assert seconds("wagma(every=16, grace=0)") == 4 * 9 + 12 * 1
    assert seconds("eager_sgd(every=16, grace=0)") == 4 * 9 + 12 * 1


def test_eager_sgd_by_hand() -> None:
    # Gradients −1 and −3; rank 1 needs 2.5 s for its first. "in" is what a rank's step adds to x.
    # 1.0  round 0: rank 0 sends 1, rank 1 nothing: in 1/2.  2.0  round 1: the same: x = 1.
    # 2.5  rank 1: sends its 3 later, in 1/2 + 1/2: x = 1.
    # 3.0  round 2: 1 and the late 3: rank 0 in 2: x = 3.
    # 3.5  rank 1: in 2: x = 3; its second 3 waits.  4.0  rank 0: waits at round 3, which is blocking.
    # 4.5  rank 1: nothing has come: x = 3; two of its gradients wait.
    # 5.5  round 3: 1 and three times 3: in 5: both are at 8, four times the mean gradient.
    (first, second), reports = walk("eager_sgd(every=4, grace=0)", slow(1, 0, 2.5), steps=4)
    assert first == [0.5, 1.0, 3.0, 8.0]
    assert second == [1.0, 3.0, 3.0, 8.0]
    assert [report.kind for report in reports[1]] == ["late", "late", "nothing new", "fresh"]


def test_majority_waits_for_a_worker_that_is_drawn() -> None:
    """The first worker may have to wait for the one that was drawn, which itself never waits."""
    compute = lambda rank, step: 1.0 + rank  # noqa: E731
    for seed in range(8):
        _, reports = walk(
            f"eager_sgd(every=2, activation='majority', grace=0, seed={seed})", compute, steps=1, workers=4
        )
        waits = [reports[rank][0].seconds_waited for rank in range(4)]
        (drawn,) = {rank + wait for rank, wait in enumerate(waits) if wait > 0} or {0}
        assert waits == [max(0.0, drawn - rank) for rank in range(4)]
        assert [r[0].kind for r in reports] == ["fresh" if rank <= drawn else "late" for rank in range(4)]


@pytest.mark.slow
def test_groups_mix() -> None:
    """At rate 0, log K / log S rounds of a butterfly give each worker the mean of all."""
    for workers, size, rounds in ((4, 2, 2), (8, 2, 3), (16, 4, 2), (8, 8, 1), (64, 8, 2)):

        def worker(comm: offbeat.Communicator, size: int = size, rounds: int = rounds) -> float:
            model = Line()
            sync = offbeat.wagma(
                model, torch.optim.SGD(model.parameters(), lr=0.0), group_size=size, every=99, group=comm
            )
            for step in range(rounds):
                with torch.no_grad():
                    sync.step(lambda step=step: None if step else model.x.fill_(comm.rank))
            return model.x.item()

        assert offbeat.simulate(worker, workers) == [(workers - 1) / 2] * workers


def butterfly_by_hand(
    starts: Tensor, moves: Callable[[int, int, Tensor], Tensor], steps: int, every: int
) -> Tensor:
    """Four workers in pairs, written out: after each step the mean with the partner, or of all."""
    x = starts.clone()
    for step in range(steps):
        x = torch.stack([moves(rank, step, x[rank]) for rank in range(4)])
        if (step + 1) % every == 0:
            x = x.mean(0).expand(4, -1).clone()
        else:
            x = (x + x[[rank ^ (1 << step % 2) for rank in range(4)]]) / 2
    return x


def test_without_late_workers_it_is_the_butterfly_average_after_every_step() -> None:
    target = torch.randn(4, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def worker(comm: offbeat.Communicator) -> Tensor:
        x = nn.Parameter(torch.zeros(6, dtype=torch.float64))
        model = nn.ParameterList([x])
        optimizer = torch.optim.SGD([x], lr=0.25)
        sync = offbeat.wagma(model, optimizer, group_size=2, every=5, group=comm)
        for step in range(12):
            ((x - target[comm.rank] * step).square().sum() / 2).backward()
            sync.step()
            optimizer.zero_grad()
        return x.detach().clone()

    ends = offbeat.simulate(worker, 4, compute=lambda rank, step: 1.0)
    expected = butterfly_by_hand(
        torch.zeros(4, 6, dtype=torch.float64), lambda r, s, x: x - (x - target[r] * s) / 4, 12, 5
    )
    torch.testing.assert_close(torch.stack(ends), expected)


def random_compute(seed: int, share: float = 0.3) -> Compute:
    """Jitter, and sometimes a long pause."""

    def compute(rank: int, step: int) -> float:
        draw = random.Random(f"{seed} {rank} {step}")
        return draw.uniform(0.9, 1.1) + (draw.uniform(0, 8) if draw.random() < share else 0.0)

    return compute


@pytest.mark.few(4)
@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=[] if seed < 8 else pytest.mark.slow) for seed in range(24)]
)
def test_what_always_holds(seed: int) -> None:
    draw = random.Random(seed)
    workers, every = draw.randint(2, 9), draw.randint(2, 6)
    size, grace = draw.choice([None, 2, 3, 4, workers]), draw.choice([None, 0.0, 0.05, 1.0])
    network = Network(latency=draw.choice([0.0, 0.01, 0.3]), bandwidth=draw.choice([1e3, float("inf")]))
    late = draw.choice(["join", "join", "add"])
    expression = f"wagma(group_size={size}, every={every}, grace={grace}, late={late!r})"
    steps = 4 * every

    def worker(comm: offbeat.Communicator) -> Watched:
        return watch(comm, expression, steps)

    runs = offbeat.simulate(worker, workers, compute=random_compute(seed), network=network)
    Watched.check(runs, every, steps)
    assert any(kind != "fresh" for run in runs for kind in run.kinds)


@pytest.mark.few(6)
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("activation", ["solo", "majority"])
def test_each_gradient_reaches_each_worker_once(seed: int, activation: str) -> None:
    draw = random.Random(seed)
    workers, every = draw.randint(2, 6), draw.randint(1, 5)
    expression = f"eager_sgd(every={every}, activation={activation!r}, grace={draw.choice([0.0, 0.5])})"

    def worker(comm: offbeat.Communicator) -> list[tuple[float, float]]:
        return conserved(comm, expression, 4 * every)[0]

    runs = offbeat.simulate(worker, workers, compute=random_compute(seed), network=Network(latency=0.1))
    for step in range(every - 1, 4 * every, every):
        produced = sum(run[step][0] for run in runs) / workers
        assert [run[step][1] for run in runs] == [produced] * workers


def conserved(
    comm: offbeat.Communicator,
    expression: str,
    steps: int,
    pause: Callable[[int], float] = lambda step: 0.0,
) -> tuple[list[tuple[float, float]], list[str]]:
    """All that was produced and all that was applied here, after every step; whole numbers, so exact. And
    how this worker came to its rounds."""
    model = Line()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    draw = random.Random(comm.rank)
    produced = applied = 0.0
    trace = []

    def local() -> None:
        nonlocal applied
        applied += model.x.grad.item()
        optimizer.step()

    with offbeat.method(expression)(model, optimizer, group=comm) as sync:
        for step in range(steps):
            gradient = comm.size * draw.randint(-9, 9)
            model.x.grad = torch.full_like(model.x, gradient)
            produced += gradient
            time.sleep(pause(step))
            sync.step(local)
            trace.append((produced, applied))
    return trace, [report.kind for report in sync.reports if isinstance(report, GroupReport)]


def test_gradients_that_no_worker_ever_had_stay_none() -> None:
    def worker(comm: offbeat.Communicator) -> list[bool]:
        model = nn.ParameterDict({name: nn.Parameter(torch.ones(2)) for name in "abc"})
        sync = offbeat.eager_sgd(model, torch.optim.SGD(model.parameters(), lr=0.1), every=2, group=comm)
        model["a"].grad = torch.ones(2)
        if comm.rank == 1:
            model["b"].grad = torch.ones(2)
        sync.step()
        return [p.grad is None for p in model.values()]

    assert offbeat.simulate(worker, 2) == [[False, False, True]] * 2


def test_stragglers_are_visible_to_all_workers() -> None:
    """Rank 2 needs twice as long as the others."""

    def worker(comm: offbeat.Communicator) -> Any:
        model = Line()
        sync = offbeat.wagma(model, torch.optim.SGD(model.parameters(), lr=1.0), every=8, grace=0, group=comm)
        assert sync.parts[1].attendance == []
        for _ in range(10):
            sync.step()
        return sync.parts[1].attendance, [r for r in sync.reports if isinstance(r, GroupReport)]

    runs = offbeat.simulate(worker, 4, compute=lambda rank, step: 2.0 if rank == 2 else 1.0)
    for seen, _ in runs:
        assert [a.rank for a in seen] == [0, 1, 2, 3]
        assert [a.fresh for a in seen] == [1.0, 1.0, 0.0, 1.0]
        assert seen == runs[0][0]
    straggler, reports = runs[0][0][2], runs[2][1][:7]
    # Its steps end at 2, 4, …, 14; the others' at 1, …, 7: at 8 it has used the last of their rounds.
    assert [report.kind for report in reports] == ["late"] * 4 + ["nothing new"] * 3
    assert (straggler.late, straggler.nothing_new) == (4 / 7, 3 / 7)
    # Sidecars run rounds 0 to 6 at 1, …, 7, with what was made at 0, 2, 4, 6 in rounds −1, 0, 1, 2.
    ages = [1, 1 + 0, 2, 2 + 0, 3, 3 + 0, 4]
    assert straggler.age == pytest.approx(statistics.mean(ages))
    assert straggler.oldest == 4


def test_bytes_are_those_of_the_groups() -> None:
    def worker(comm: offbeat.Communicator) -> list[int]:
        net = nn.Linear(100, 10)
        sync = offbeat.wagma(
            net, torch.optim.SGD(net.parameters(), lr=0.1), group_size=2, every=4, group=comm
        )
        for _ in range(3):
            sync.step()
        return [report.bytes_sent for report in sync.reports]

    # An all-reduce of n bytes in a pair: each sends n.
    assert offbeat.simulate(worker, 4) == [[4 * 1010] * 3] * 4


@pytest.mark.parametrize(
    ("expression", "check"), [("wagma(group_size=2, every=2)", 192), ("eager_sgd(every=2)", 0)]
)
def test_the_totals_include_messages_outside_the_rounds(expression: str, check: int) -> None:
    """Eight numbers for each other worker: the attendance, twice, and one message before the threads end. The
    first global round of `wagma` also compares checksums."""

    def worker(comm: offbeat.Communicator) -> None:
        model = Line()
        sync = offbeat.method(expression)(model, torch.optim.SGD(model.parameters(), lr=1.0), group=comm)
        with sync.averaged():
            started = sync.totals.bytes_sent
        rolls = []
        for _ in range(5):
            sync.step()
            reported = sum(report.bytes_sent for report in sync.reports)
            rolls.append(sync.totals.bytes_sent - started - reported)
        assert rolls == [0, 192 + check, 192 + check, 384 + check, 384 + check]
        before = sync.totals.bytes_sent
        sync.finish()
        meeting, checksums = 192, 192  # the workers are equal
        assert sync.totals.bytes_sent - before == meeting + 192 + checksums
        assert sync.totals.bytes_received == sync.totals.bytes_sent

    offbeat.simulate(worker, 4)


def test_averaged_is_the_mean_of_all_in_the_middle_of_a_period() -> None:
    def worker(comm: offbeat.Communicator) -> tuple[float, float, float]:
        model = Line()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        sync = offbeat.wagma(model, optimizer, group_size=2, every=8, group=comm)
        for _ in range(3):
            model.x.grad = torch.full_like(model.x, -(2.0 * comm.rank + 1))
            sync.step()
        before = model.x.item()
        with sync.averaged():
            shown = model.x.item()
        assert model.x.item() == before
        sync.step()
        return before, shown, model.x.item()

    compute = lambda rank, step: 1.0 + 0.3 * rank  # noqa: E731
    runs = offbeat.simulate(worker, 4, compute=compute)
    assert {shown for _, shown, _ in runs} == {statistics.mean(before for before, _, _ in runs)}


def test_finish_in_the_middle_of_a_period_leaves_all_equal() -> None:
    def worker(comm: offbeat.Communicator) -> dict[str, Tensor]:
        net = Realistic(comm.rank)
        opt = optimizer_for(net, "momentum")
        with offbeat.wagma(net, opt, every=6, group=comm) as sync:
            for step in range(10):
                net(data(comm.rank, step)).backward()
                sync.step()
                opt.zero_grad()
        return snapshot(net)

    ends = offbeat.simulate(worker, 5, compute=random_compute(1))
    for end in ends:
        assert same(end, ends[0]) or all(
            torch.equal(end[k], ends[0][k]) for k in end if end[k].is_floating_point()
        )


# Checkpoints


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "expression",
    ["wagma(every=4, grace=0)", "wagma(every=4)", "wagma(every=4, late='add')", "eager_sgd(every=4)"],
)
def test_resuming_after_a_global_round_is_exact_even_with_late_workers(expression: str) -> None:
    compute = random_compute(5)

    def whole(comm: offbeat.Communicator, cut: bool) -> list[dict[str, Tensor]]:
        torch.manual_seed(comm.rank)
        net = Realistic(comm.rank)
        opt = optimizer_for(net, "adamw")
        sync = offbeat.method(expression)(net, opt, group=comm)
        trace = []
        for step in range(16):
            net(data(comm.rank, step)).backward()
            sync.step()
            opt.zero_grad()
            trace.append(snapshot(net))
            if cut and step == 7:
                state = sync.state_dict()
                sync = offbeat.method(expression)(net, opt, group=comm)
                sync.load_state_dict(state)
        assert any(r.kind != "fresh" for r in sync.reports if isinstance(r, GroupReport))
        return trace

    for a, b in zip(
        offbeat.simulate(lambda comm: whole(comm, True), 4, compute=compute),
        offbeat.simulate(lambda comm: whole(comm, False), 4, compute=compute),
        strict=True,
    ):
        assert all(same(x, y) for x, y in zip(a, b, strict=True))


def test_elsewhere_a_checkpoint_is_refused_and_the_run_continues() -> None:
    def worker(comm: offbeat.Communicator) -> None:
        model = Line()
        with offbeat.wagma(model, torch.optim.SGD(model.parameters(), lr=1.0), every=4, group=comm) as sync:
            sync.state_dict()
            for step in range(1, 10):
                sync.step()
                if step % 4:
                    sentence = rf"after step {step}, .* next step that allows it is {step + 4 - step % 4}\."
                    with pytest.raises(RuntimeError, match=sentence):
                        sync.state_dict()
                else:
                    sync.state_dict()

    offbeat.simulate(worker, 2)


@pytest.mark.parametrize(
    ("expression", "workers"),
    [("wagma(every=4)", 1), ("eager_sgd(every=4)", 1), ("wagma(group_size=1, every=4)", 3)],
)
def test_where_nothing_runs_beside_the_workers_any_step_can_be_saved(expression: str, workers: int) -> None:
    def worker(comm: offbeat.Communicator, cut: int | None) -> list[float]:
        model = Line()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        sync = offbeat.method(expression)(model, optimizer, group=comm)
        trace = []
        for step in range(6):
            model.x.grad = torch.full_like(model.x, -(2.0 * comm.rank + 1))
            sync.step()
            trace.append(model.x.item())
            if step == cut:
                state = sync.state_dict()
                sync = offbeat.method(expression)(model, optimizer, group=comm)
                sync.load_state_dict(state)
        sync.finish()
        return [*trace, model.x.item()]

    whole = offbeat.simulate(lambda comm: worker(comm, None), workers)
    for cut in range(6):
        assert offbeat.simulate(lambda comm, cut=cut: worker(comm, cut), workers) == whole


def test_loading_into_a_running_synchronizer() -> None:
    """The old threads end, new ones begin at the step that was loaded."""

    def worker(comm: offbeat.Communicator) -> list[float]:
        model = Line()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        sync = offbeat.wagma(model, optimizer, every=2, group=comm)
        trace = []
        saved: Any = None
        for step in range(8):
            if step == 2:
                saved = (sync.state_dict(), model.x.item())
            if step == 5:
                sync.load_state_dict(saved[0])
                with torch.no_grad():
                    model.x.fill_(saved[1])
                assert sync.steps == 2
            model.x.grad = torch.full_like(model.x, -(2.0 * comm.rank + 1))
            sync.step()
            trace.append(model.x.item())
        sync.finish()
        return trace

    for trace in offbeat.simulate(worker, 2):
        assert trace == [2, 4, 6, 8, 10, 6, 8, 10]


# Errors


def test_an_error_in_the_sidecar_surfaces_in_the_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    original = Rounds._run

    def fail(self: Rounds, round: int) -> None:
        if round == 2:
            raise ZeroDivisionError("in a thread")
        original(self, round)

    monkeypatch.setattr(Rounds, "_run", fail)
    reached = []

    def worker(comm: offbeat.Communicator) -> None:
        model = Line()
        sync = offbeat.wagma(model, torch.optim.SGD(model.parameters(), lr=1.0), every=8, group=comm)
        for step in range(5):
            sync.step()
            reached.append(step)

    with pytest.raises(ZeroDivisionError, match="in a thread"):
        offbeat.simulate(worker, 2)
    assert max(reached) == 1


def test_a_worker_that_fails_ends_the_run_of_all() -> None:
    errors = {}

    def worker(comm: offbeat.Communicator) -> None:
        model = Line()
        try:
            with offbeat.wagma(
                model, torch.optim.SGD(model.parameters(), lr=1.0), every=4, group=comm
            ) as sync:
                for step in range(20):
                    if (comm.rank, step) == (1, 6):
                        raise KeyError("mine")
                    sync.step()
        except BaseException as error:
            errors[comm.rank] = error
            raise

    with pytest.raises(KeyError):
        offbeat.simulate(worker, 3, compute=random_compute(3))
    assert isinstance(errors[1], KeyError)
    assert isinstance(errors[0], offbeat.PeerLost)
    assert isinstance(errors[2], offbeat.PeerLost)
    assert "rank 1 failed (KeyError: 'mine')" in f"{errors[0]} {errors[2]}"


def test_after_an_error_there_is_no_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Rounds, "_run", lambda self, round: 1 / 0)

    def worker(comm: offbeat.Communicator) -> None:
        model = Line()
        sync = offbeat.wagma(model, torch.optim.SGD(model.parameters(), lr=1.0), every=4, group=comm)
        with pytest.raises(ZeroDivisionError):
            sync.step()
        with pytest.raises(RuntimeError, match="an error has ended this run"):
            sync.step()

    offbeat.simulate(worker, 2)


def test_a_worker_that_has_no_more_data_is_named() -> None:
    def worker(comm: offbeat.Communicator) -> None:
        model = Line()
        with offbeat.wagma(model, torch.optim.SGD(model.parameters(), lr=1.0), every=4, group=comm) as sync:
            for _ in range(6 if comm.rank else 5):
                sync.step()

    sentence = "rank 0 is in finish.. at step 5, rank 1 in finish.. at step 6"
    with pytest.raises(offbeat.Disagreement, match=sentence):
        offbeat.simulate(worker, 3)


def test_a_forgotten_finish_does_not_deadlock() -> None:
    def worker(comm: offbeat.Communicator) -> float:
        model = Line()
        sync = offbeat.wagma(model, torch.optim.SGD(model.parameters(), lr=1.0), every=4, group=comm)
        for _ in range(6):
            sync.step()
        return comm.now()

    assert offbeat.simulate(worker, 4, compute=lambda rank, step: 1.0) == [6.0] * 4


@pytest.mark.parametrize(
    ("expression", "sentence"),
    [
        ("wagma(group_size=0)", "group_size=0: group_size must be a whole number, at least 1."),
        ("wagma(group_size=2.0)", "group_size=2.0: group_size must be a whole number, at least 1."),
        ("wagma(every=0)", "steps must be at least 1"),
        ("wagma(grace=-1)", "grace=-1: grace must be a number of seconds, at least 0, or None."),
        ("wagma(late='drop')", 'late=\'drop\': choose "join" or "add".'),
        ("eager_sgd(every=4, activation='all')", 'activation=\'all\': choose "solo" or "majority".'),
    ],
)
def test_bad_arguments(expression: str, sentence: str) -> None:
    model = Line()
    with pytest.raises(ValueError, match=sentence.replace("(", r"\(")):
        offbeat.method(expression)(model, torch.optim.SGD(model.parameters(), lr=1.0), group=offbeat.Solo())


def test_schedules_that_cannot_be_known_and_lossy_codes_are_refused() -> None:
    class Lossy:
        def start(self) -> None: ...

        def init(self) -> dict[str, Any]:
            return {}

        def __repr__(self) -> str:
            return "Lossy()"

    model = Line()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    exchange = Exchange(params(model), when=Every(4))
    with pytest.raises(ValueError, match=r"reduce=Lossy\(\): a lossy code would round the weights"):
        GroupAverage(exchange, reduce=Lossy())
    with pytest.raises(ValueError, match=r"every=Every\(steps=4\): every must be a whole number of steps"):
        EagerGradients(grads(model), every=Every(4))
    assert "reduce=Mean()" in repr(
        offbeat.wagma(model, optimizer, reduce=offbeat.Mean(), group=offbeat.Solo()).parts[1]
    )


def line() -> tuple[Line, torch.optim.Optimizer]:
    model = Line()
    return model, torch.optim.SGD(model.parameters(), lr=1.0)


# Exchanges that can run the global rounds, and others that look similar.
GLOBAL: dict[str, tuple[bool, Callable[[nn.Module, offbeat.Communicator], Exchange]]] = {
    "mean": (True, lambda m, c: Exchange(params(m), when=Every(4), among=c)),
    "world": (True, lambda m, c: Exchange(params(m), when=Every(4), among=World(c))),
    "outer": (True, lambda m, c: Exchange(params(m), when=Every(4), among=c, update=Outer(SGD(0.7)))),
    "offset": (False, lambda m, c: Exchange(params(m), when=Every(4, offset=1), among=c)),
    "skip": (False, lambda m, c: Exchange(params(m), when=Every(2, skip=4), among=c)),
    "unknown": (False, lambda m, c: Exchange(params(m), when=QSR(alpha=0.5, base=4), among=c)),
    "delay": (False, lambda m, c: Exchange(params(m), when=Every(4), among=c, update=Correct(), delay=1)),
    "groups": (False, lambda m, c: Exchange(params(m), when=Every(4), among=Subgroups(2, c))),
    "some": (False, lambda m, c: Exchange(params(m, only=["x"]), when=Every(4), among=c)),
    "gradients": (False, lambda m, c: Exchange(grads(m), when=Every(4), among=c)),
}


def test_global_rounds_that_leave_the_workers_different_are_refused() -> None:
    """The first one is measured, since nothing else tells what an update does."""

    def worker(comm: offbeat.Communicator) -> None:
        model, optimizer = line()
        exchange = Exchange(params(model), when=Every(4), among=World(comm), update=Replace(0.5))
        sync = Synchronizer(optimizer, [exchange, GroupAverage(exchange)])
        sentence = (
            f"GroupAverage({exchange!r}): this exchange must leave equal weights on all workers at a fixed "
            "period, as Exchange(params(model), when=Every(10)) does."
        )
        for step in range(1, 5):
            model.x.grad = torch.full_like(model.x, float(comm.rank))
            with says(ValueError, sentence) if step == 4 else nullcontext():
                sync.step()

    offbeat.simulate(worker, 4)


@pytest.mark.parametrize("kind", GLOBAL)
def test_only_an_exchange_that_makes_all_workers_equal_runs_global_rounds(kind: str) -> None:
    good, make = GLOBAL[kind]

    def worker(comm: offbeat.Communicator) -> set[float]:
        model, optimizer = line()
        exchange = make(model, comm)
        if not good:
            with says(
                ValueError,
                f"GroupAverage({exchange!r}): this exchange must leave equal weights on all workers at a "
                "fixed period, as Exchange(params(model), when=Every(10)) does.",
            ):
                GroupAverage(exchange)
            return set()
        with Synchronizer(optimizer, [exchange, GroupAverage(exchange)]) as sync:
            for _ in range(8):
                (-(2 * comm.rank + 1) * model.x.sum()).backward()
                sync.step()
                optimizer.zero_grad()
                if sync.steps % 4 == 0:
                    seen = {row[0] for row in comm.tell([int(model.x.item() * 2**20)]).wait()}
                    assert len(seen) == 1
        return seen

    offbeat.simulate(worker, 4, compute=slow(1, 0, 2.5))


def test_group_averages_need_an_exchange_among_the_same_workers() -> None:
    def worker(comm: offbeat.Communicator) -> None:
        exchange = Exchange(params(Line()), when=Every(4), among=comm)
        others = Butterfly(2, comm.split([[0, 1], [2, 3]]))
        with says(
            ValueError,
            "GroupAverage(exchange, among=Butterfly(2, seed=0)): the exchange has other workers; give "
            "both the same group.",
        ):
            GroupAverage(exchange, among=others)

    offbeat.simulate(worker, 4)
    live = params(Line())
    with says(
        TypeError,
        f"GroupAverage({live!r}): pass the global exchange, such as Exchange(params(model), when=Every(10)).",
    ):
        GroupAverage(live)


@pytest.mark.parametrize("kind", [GroupAverage, PseudoSync])
def test_a_part_that_relies_on_another_stands_directly_after_it(kind: type[Part]) -> None:
    model, optimizer = line()
    exchange, other = (Exchange(params(model), when=Every(4), update=Outer(SGD(1.0))) for _ in range(2))
    part = GroupAverage(exchange) if kind is GroupAverage else PseudoSync(exchange, p=0.5, eta=1.0)
    for wrong in ([part], [part, exchange], [other, part], [exchange, other, part], [exchange, part, part]):
        with says(
            ValueError,
            f"Synchronizer(...): {kind.__name__} must stand directly after the Exchange it was given: list "
            f"them as [exchange, {kind.__name__}(exchange, ...)].",
        ):
            Synchronizer(optimizer, wrong)
    for right in ([exchange, part], [other, exchange, part], [exchange, part, other]):
        Synchronizer(optimizer, right)


@pytest.mark.parametrize("late", ["join", "add"])
@pytest.mark.parametrize("buffers", ["average", "keep"])
def test_parts_by_hand_are_the_named_method(late: str, buffers: str) -> None:
    """Buffers included: what the exchange does with them is what group rounds do."""

    def worker(comm: offbeat.Communicator, named: bool) -> list[dict[str, Tensor]]:
        torch.manual_seed(comm.rank)
        model = Realistic(seed=comm.rank)
        optimizer = optimizer_for(model, "momentum")
        if named:
            sync = offbeat.wagma(model, optimizer, every=3, late=late, buffers=buffers, group=comm)
        else:
            exchange = Exchange(params(model), when=Every(3), among=comm, buffers=buffers)
            sync = Synchronizer(optimizer, [exchange, GroupAverage(exchange, late=late)])
        trace = []
        for step in range(7):
            model(data(comm.rank, step)).backward()
            sync.step()
            optimizer.zero_grad()
            trace.append(snapshot(model))
        sync.finish()
        return trace

    ends = [
        offbeat.simulate(lambda comm, n=n: worker(comm, n), 4, compute=slow(1, 1, 2.5)) for n in (True, False)
    ]
    for these, those in zip(*ends, strict=True):
        assert all(same(a, b) for a, b in zip(these, those, strict=True))


@pytest.mark.few(6)
@pytest.mark.parametrize("exchange_first", [True, False])
@pytest.mark.parametrize("every", [None, 1, 2, 3, 4, 5, 6, 8])
def test_eager_gradients_rely_on_no_exchange(every: int | None, exchange_first: bool) -> None:
    """However the weights are averaged: after a blocking round, each gradient has reached each worker once.

    Rank 2 is late for two rounds of each four.
    """

    def worker(comm: offbeat.Communicator) -> tuple[float, set[str]]:
        model, optimizer = line()
        eager = EagerGradients(grads(model), every=4, among=World(comm), grace=0.0)
        exchange = [] if every is None else [Exchange(params(model), when=Every(every), among=comm)]
        sync = Synchronizer(optimizer, [*exchange, eager] if exchange_first else [eager, *exchange])
        for step in range(12):
            (-(2 * comm.rank + 1) * (step + 1) * model.x.sum()).backward()
            sync.step()
            optimizer.zero_grad()
        kinds = {report.kind for report in sync.reports if isinstance(report, GroupReport)}
        sync.finish()
        return model.x.item(), kinds

    done = offbeat.simulate(worker, 3, compute=lambda rank, step: 2.75 if (rank, step % 4) == (2, 0) else 1.0)
    assert [x for x, _ in done] == pytest.approx([3 * sum(range(1, 13))] * 3)
    assert "late" in done[2][1]

"""Gradient coding: the exact mean whoever is late, equal replicas, clusters, parts, and what it saves."""

from __future__ import annotations

import random
import runpy
import time
from collections.abc import Callable
from functools import cache, partial
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, call

import pytest
import torch
from conftest import Pool
from problems import Dyadic, Realistic, data, optimizer_for, same
from sentences import says
from torch import Tensor, nn

import offbeat
from offbeat import CodedReport, Constant, Network, Stragglers
from offbeat.plan import Cluster, Job, predict
from offbeat.waitfree.clusters import Clusters
from offbeat.waitfree.cyclic import cyclic, find_coefficients
from offbeat.waitfree.sampler import seeded

Compute = Callable[[int, int], float]


def punctual(rank: int, step: int) -> float:
    return 1.0


def delays(seed: int, share: float = 0.3) -> Compute:
    """Jitter, and sometimes a long pause."""

    def compute(rank: int, step: int) -> float:
        draw = random.Random(f"{seed} {rank} {step}")
        return draw.uniform(0.9, 1.1) + (draw.uniform(0, 8) if draw.random() < share else 0.0)

    return compute


class Numbered(torch.utils.data.Dataset[Tensor]):
    """Sample i of a step is the data of `problems` for rank i: a step of `ddp` has the same samples."""

    def __init__(self, workers: int, steps: int) -> None:
        self.workers, self.steps = workers, steps

    def __len__(self) -> int:
        return self.workers * self.steps

    def __getitem__(self, index: int) -> Tensor:
        return data(index % self.workers, index // self.workers)


def train(
    comm: offbeat.Communicator, expression: str, *, steps: int = 10, model: type[nn.Module] = Dyadic
) -> tuple[list[dict[str, Tensor]], list[CodedReport], float]:
    """Weights after every step, the reports, and the time at the end."""
    net = model(seed=comm.rank)
    opt = optimizer_for(net, "momentum")
    scheduler = torch.optim.lr_scheduler.ExponentialLR(opt, 0.5)
    sync = offbeat.method(expression)(net, opt, group=comm)
    trace = []
    numbered = Numbered(comm.size, steps)
    for parts in offbeat.coded_sampler(numbered, sync, batch_size=1, shuffle=False, collate=lambda b: b[0]):
        for part in parts:
            (part.weight * net(part.load())).backward()
        sync.step()
        opt.zero_grad()
        scheduler.step()
        trace.append({name: p.detach().clone() for name, p in net.named_parameters()})
    reports = [report for report in sync.reports if isinstance(report, CodedReport)]
    ended = comm.now()
    sync.finish()
    return trace, reports, ended


def plain(comm: offbeat.Communicator, steps: int, model: type[nn.Module]) -> list[dict[str, Tensor]]:
    """The same with `ddp`."""
    net = model(seed=comm.rank)
    opt = optimizer_for(net, "momentum")
    scheduler = torch.optim.lr_scheduler.ExponentialLR(opt, 0.5)
    sync, trace = offbeat.ddp(net, opt, group=comm), []
    sync.start()
    for step in range(steps):
        net(data(comm.rank, step)).backward()
        sync.step()
        opt.zero_grad()
        scheduler.step()
        trace.append({name: p.detach().clone() for name, p in net.named_parameters()})
    return trace


# Laws


@cache
def synchronous(workers: int) -> list[dict[str, Tensor]]:
    return offbeat.simulate(lambda comm: plain(comm, 10, Dyadic), workers)[0]


def seeds(count: int, fast: int) -> list[Any]:
    """So many, of which the first are in the fast part."""
    return [pytest.param(seed, marks=pytest.mark.slow if seed >= fast else []) for seed in range(count)]


@pytest.mark.few(5)
@pytest.mark.parametrize("seed", seeds(4, fast=2))
@pytest.mark.parametrize(
    ("call", "workers", "exact"),
    [
        ("stragglers=0", 4, True),
        ("stragglers=1", 4, True),
        ("stragglers=3", 4, True),
        ("stragglers=1, dynamic=True", 8, True),
        ("stragglers=1, clusters=1", 4, True),
        ("stragglers=1", 5, False),
        ("stragglers=2, clusters=2, dynamic=True", 8, False),
    ],
)
def test_it_equals_ddp_whoever_is_late(call: str, workers: int, exact: bool, seed: int) -> None:
    """To the bit on dyadic data, if coefficients are 1; the data of `ddp` are those of the parts."""
    runs = offbeat.simulate(
        lambda comm: train(comm, f"gradient_code({call})"),
        workers,
        compute=delays(seed),
        network=Network(latency=random.Random(seed).choice([0.0, 0.05])),
    )
    expected = synchronous(workers)
    for trace, _, _ in runs:
        for ours, theirs in zip(trace, expected, strict=True):
            for name in ours:
                close = torch.equal if exact else partial(torch.allclose, rtol=1e-4, atol=1e-4)
                assert close(ours[name], theirs[name]), name
    assert "stragglers=0" in call or any(r.late for _, reports, _ in runs for r in reports)


@pytest.mark.parametrize("seed", seeds(3, fast=1))
@pytest.mark.parametrize("call", ["stragglers=1", "stragglers=2, clusters=2, dynamic=True"])
def test_replicas_stay_equal_to_the_bit(call: str, seed: int) -> None:
    """On any numbers, with dropout and BatchNorm, although late workers make their steps later."""
    runs = offbeat.simulate(
        lambda comm: train(comm, f"gradient_code({call})", model=Realistic), 8, compute=delays(seed)
    )
    for trace, _, _ in runs:
        assert all(same(a, b) for a, b in zip(trace, runs[0][0], strict=True))


@pytest.mark.slow
def test_with_repetition_lateness_changes_no_bit() -> None:
    """Dropout included: replicas of a part draw the same numbers, and ranks are added in order."""
    ends = [
        offbeat.simulate(
            lambda comm: train(comm, "gradient_code(stragglers=1)", model=Realistic)[0][-1],
            6,
            compute=compute,
        )[0]
        for compute in (punctual, delays(0), delays(1))
    ]
    # BatchNorm in Realistic normalizes by the batch at hand, which is that of one part.
    assert same(ends[0], ends[1])
    assert same(ends[0], ends[2])


def test_uneven_parts_weigh_as_much_as_their_samples() -> None:
    """Of 10 samples, 8 make the first step of four workers, and 2 the second: the mean of one big batch."""
    samples = [torch.tensor([float(i)], dtype=torch.float64) for i in range(10)]

    def worker(comm: offbeat.Communicator) -> list[float]:
        x = nn.Parameter(torch.zeros(1, dtype=torch.float64))
        optimizer = torch.optim.SGD([x], lr=1.0)
        sync = offbeat.gradient_code(nn.ParameterList([x]), optimizer, stragglers=1, group=comm)
        seen = []
        for parts in offbeat.coded_sampler(samples, sync, batch_size=2, shuffle=False):
            for part in parts:
                (part.weight * (x * part.load()).mean()).backward()
            sync.step()
            seen.append(x.grad.item())
            optimizer.zero_grad()
        return seen

    assert offbeat.simulate(worker, 4, compute=delays(3)) == [[sum(range(8)) / 8, (8 + 9) / 2]] * 4


# By hand


class Line(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.zeros(1, dtype=torch.float64))


def walk(expression: str, compute: Compute, steps: int, workers: int) -> list[Any]:
    """x and the time after each step, with gradient −(part + 1), and which parts were computed."""

    def worker(comm: offbeat.Communicator) -> Any:
        model = Line()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        sync = offbeat.method(expression)(model, optimizer, group=comm)
        trace = []
        for parts in offbeat.coded_sampler(range(workers * steps), sync, batch_size=1, shuffle=False):
            numbers = []
            for part in parts:
                (part.weight * -(part.number + 1) * model.x.sum()).backward()
                numbers.append(part.number)
            sync.step()
            optimizer.zero_grad()
            trace.append((model.x.item(), comm.now(), numbers))
        sync.finish()
        return trace, [(r.kind, r.answered, r.slow) for r in sync.reports]

    return offbeat.simulate(worker, workers, compute=compute)


def test_late_workers_by_hand() -> None:
    # Ranks 0 and 1 compute parts 0 and 1, ranks 2 and 3 parts 2 and 3: the mean of 1, 2, 3 and 4 is 5/2. Both
    # parts of a step take rank 1 1.25 s, rank 3 5 s in the first step and 1.5 s later, the others 1 s.
    # 1.0   ranks 0 and 2 have answered, which is enough: x = 5/2.
    # 1.25  rank 1 answers too late. It takes the result, and begins its second step.
    # 2.0   ranks 0 and 2 have answered: x = 5. Rank 3 has answered nothing yet: it is slow.
    # 2.5   rank 1 answers too late again. Rank 3 has its first part, and finds that two rounds are over: it
    #       makes both steps and begins the third.
    # 3.0   ranks 0 and 2 have answered: x = 15/2.
    # 3.125, 3.25  ranks 1 and 3 have their first parts, and leave out the second ones.
    def compute(rank: int, step: int) -> float:
        return {1: 1.25, 3: 1.5 if step else 5.0}.get(rank, 1.0)

    runs = walk("gradient_code(stragglers=1)", compute, 3, 4)
    assert [trace for trace, _ in runs] == [
        [(2.5, 1.0, [0, 1]), (5.0, 2.0, [0, 1]), (7.5, 3.0, [0, 1])],
        [(2.5, 1.25, [0, 1]), (5.0, 2.5, [0, 1]), (7.5, 3.125, [0])],
        [(2.5, 1.0, [2, 3]), (5.0, 2.0, [2, 3]), (7.5, 3.0, [2, 3])],
        [(2.5, 2.5, [2]), (5.0, 2.5, []), (7.5, 3.25, [2])],
    ]
    for rank, (_, reports) in enumerate(runs):
        kind = "late" if rank % 2 else "fresh"
        assert reports == [(kind, (0, 2), ()), (kind, (0, 2), (3,)), (kind, (0, 2), (3,))]


def test_a_cyclic_code_by_hand() -> None:
    """Three workers, one late. Rows 1, 2 and 3 of a code have parts {0, 1}, {1, 2}, {2, 0}."""
    matrix = cyclic(3, 1)
    assert matrix is not None
    assert (matrix != 0).tolist() == [[True, True, False], [False, True, True], [True, False, True]]
    for rows in combinations(range(3), 2):
        factors = find_coefficients(matrix[list(rows)])
        assert (factors @ matrix[list(rows)]).tolist() == pytest.approx([1.0] * 3)
    # Ranks 0 and 1 answer after 1 s: the sum of all parts, 1 + 2 + 3, over 3.
    runs = walk("gradient_code(stragglers=1, clusters=1)", lambda r, s: 9.0 if r == 2 else 1.0, 1, 3)
    assert [trace[0][0] for trace, _ in runs] == pytest.approx([2.0] * 3)
    assert [trace[0][1] for trace, _ in runs] == [1.0, 1.0, 4.5]


@pytest.mark.few(4)
@pytest.mark.parametrize(
    ("size", "stragglers"), [(3, 1), (4, 1), (4, 2), (5, 2), (5, 3), (6, 3), (7, 3), (7, 4), (20, 1), (21, 2)]
)
def test_any_answers_but_the_stragglers_decode_with_small_coefficients(size: int, stragglers: int) -> None:
    matrix = cyclic(size, stragglers)
    assert matrix is not None
    for rows in combinations(range(size), size - stragglers):
        factors = find_coefficients(matrix[list(rows)])
        torch.testing.assert_close(factors @ matrix[list(rows)], torch.ones(size, dtype=torch.float64))
        assert factors.abs().max() < 10


# Clusters


@pytest.mark.parametrize(
    ("workers", "stragglers", "clusters", "sizes"),
    [
        (8, 1, None, [2] * 4),
        (7, 1, None, [2, 2, 3]),
        (20, 2, None, [3] * 5 + [5]),
        (20, 2, 5, [4] * 5),
        (20, 1, 5, [2] * 10),
        (4, 0, None, [1] * 4),
        (3, 2, None, [3]),
    ],
)
def test_clusters_are_small_and_cover_all_parts(
    workers: int, stragglers: int, clusters: int | None, sizes: list[int]
) -> None:
    formed = Clusters.form(workers, stragglers, clusters)
    assert list(map(len, formed.ranks)) == sizes
    parts = [formed.parts(rank) for rank in range(workers)]
    assert all(len(own) == stragglers + 1 for own in parts)
    for missing in combinations(range(workers), stragglers):
        there = frozenset(range(workers)) - set(missing)
        assert formed.enough(there)
        total = [0.0] * workers
        for rank, factor in formed.weigh(there).items():
            for number, coefficient in parts[rank]:
                total[number] += factor * coefficient
        assert total == pytest.approx([1.0] * workers)
        if len(total) > 8:
            break
    assert not formed.enough(frozenset(range(workers)) - set(formed.ranks[0][: stragglers + 1]))


def test_dynamic_clusters_spread_the_late_and_move_few() -> None:
    formed = Clusters.form(8, 1, None)
    assert formed.reform({0, 2}) == formed
    spread = formed.reform({0, 1})
    assert spread.ranks == ((2, 1), (0, 3), (4, 5), (6, 7))
    assert not formed.enough(frozenset(range(2, 8)))
    assert spread.enough(frozenset(range(2, 8)))
    assert spread.reform({1, 5, 4, 7}).ranks == ((2, 1), (4, 3), (0, 5), (6, 7))
    assert formed.reform(range(8)) == formed


def test_dynamic_clusters_avoid_waiting_for_two_that_stay_slow() -> None:
    """Ranks 0 and 1 are one cluster, and slow from step 4 on: it waits once, then they are apart."""
    compute = lambda rank, step: 50.0 if rank < 2 and step >= 4 else 1.0 + rank / 100  # noqa: E731

    def seconds(call: str) -> float:
        return min(trace[11][1] for trace, _ in walk(f"gradient_code({call})", compute, 12, 8))

    assert seconds("stragglers=1") > 4 + 8 * 50
    assert seconds("stragglers=1, dynamic=True") < 4 + 50 + 7 * 1.1 + 0.5


@pytest.mark.parametrize(("share", "least"), [(0.5, 1.4), (0.29, 1.4), (0.2, 1.4)])
def test_workers_that_stay_slow_are_waited_for_in_this_order(share: float, least: float) -> None:
    """The paper's rounds, as in benchmarks/coding: one code, clusters, dynamic clusters, each faster."""
    script = runpy.run_path(str(Path(__file__).parent.parent / "benchmarks/coding/clusters.py"))
    means = [
        sum(script["rounds"](kind, share, seed, 250) for seed in range(4))
        for kind in ("coded", "clustered", "dynamic")
    ]
    assert means == sorted(means, reverse=True)
    assert means[1] >= least * means[2]


@pytest.mark.few(1)
@pytest.mark.parametrize("call", ["stragglers=1", "stragglers=1, behind=2", "stragglers=2"])
def test_the_planner_predicts_what_the_simulation_takes(call: str) -> None:
    """Delays do not grow with the parts, computation does."""
    compute = Stragglers(Constant(0.1), chance=0.25, delay=0.8)
    cluster = Cluster(4, compute, Network(latency=0.001, bandwidth=1e8))
    load = 1 + int(call[11])

    def worker(comm: offbeat.Communicator) -> tuple[float, int]:
        x = nn.Parameter(torch.zeros(10_000))
        optimizer = torch.optim.SGD([x], lr=0.1)
        sync = offbeat.method(f"gradient_code({call})")(nn.ParameterList([x]), optimizer, group=comm)
        for parts in offbeat.coded_sampler(range(4 * 60), sync, batch_size=1):
            for part in parts:
                (part.weight * x.sum()).backward()
            sync.step()
            optimizer.zero_grad()
        sync.finish()
        return comm.now(), sync.totals.bytes_sent

    done = offbeat.simulate(worker, 4, compute=compute.loaded(load), network=cluster.network)
    plan = predict(f"gradient_code({call})", Job(60, 10_000, optimizer="sgd", layers=1), cluster)
    assert plan.seconds == pytest.approx(max(now for now, _ in done), rel=0.15)
    assert plan.bytes_sent == pytest.approx(done[0][1], rel=0.01)
    assert plan.rounds == 60


def test_a_worker_far_behind_is_waited_for() -> None:
    """Rank 3 needs 100 s once. The others wait when it is `behind` rounds behind."""
    compute = lambda rank, step: 100.0 if (rank, step) == (3, 0) else 1.0 + rank / 100  # noqa: E731
    for behind, free in ((3, 3), (16, 10)):
        trace = walk(f"gradient_code(stragglers=1, behind={behind})", compute, 10, 4)[0][0]
        times = [time for _, time, _ in trace]
        assert [time < 50 for time in times] == [True] * free + [False] * (10 - free)


# Parts


def draws(comm: offbeat.Communicator) -> list[Any]:
    """For each part, what a dropout would draw, and what is drawn between steps."""
    model = Line()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    sync = offbeat.gradient_code(model, optimizer, stragglers=1, grace=60.0, group=comm)
    torch.manual_seed(comm.rank)
    seen: list[Any] = []
    for parts in offbeat.coded_sampler(list(range(19)), sync, batch_size=2, epochs=2, seed=5):
        for part in parts:
            seen.append((part.number, part.indices, torch.rand(1).item(), random.random()))
            part.load()
        model.x.grad = torch.zeros_like(model.x)
        sync.step()
        seen.append(torch.rand(1).item())
    return seen


def test_replicas_of_a_part_draw_the_same_numbers_and_disturb_no_others() -> None:
    runs = offbeat.simulate(draws, 4)
    parts = [[e for e in run if isinstance(e, tuple)] for run in runs]
    assert (parts[0], parts[2]) == (parts[1], parts[3])
    torch.manual_seed(2)
    assert [e for e in runs[2] if isinstance(e, float)] == [torch.rand(1).item() for _ in range(6)]
    drawn = [(one, other) for _, _, one, other in parts[0] + parts[2]]
    assert len(set(drawn)) == len(drawn)
    # 19 samples in steps of 8, 8 and 3: each once in an epoch, the last step of which has an empty part.
    indices = sorted(index for _, own, _, _ in parts[0] + parts[2] for index in own)
    assert indices == sorted(2 * list(range(19)))
    assert [len(own) for _, own, _, _ in parts[2]] == 2 * [2, 2, 2, 2, 1]


@pytest.mark.parametrize("places", [[], [torch.device("cuda", 1)]], ids=str)
def test_only_generators_of_the_models_own_devices_are_seeded(
    monkeypatch: pytest.MonkeyPatch, places: list[torch.device]
) -> None:
    """A worker of a machine with eight GPUs must not reach for the other seven."""
    model, seen = MagicMock(), MagicMock()
    model.parameters.return_value = [SimpleNamespace(device=d) for d in (torch.device("cpu"), *places * 2)]
    monkeypatch.setattr(torch.random, "fork_rng", seen.fork_rng)
    monkeypatch.setattr(torch, "get_device_module", lambda place: seen)
    state = torch.get_rng_state()
    with seeded(5, model):
        drawn = torch.rand(1)
    torch.set_rng_state(state)
    assert torch.equal(drawn, torch.rand(1, generator=torch.Generator().manual_seed(5)))
    seen.fork_rng.assert_called_once_with([place.index for place in places], device_type="cuda")
    assert seen.device.mock_calls[:1] == [call(1)][: len(places)]
    assert seen.manual_seed.mock_calls == [call(5)] * len(places)


def test_a_step_with_parts_left_is_refused() -> None:
    def worker(comm: offbeat.Communicator) -> None:
        model = Line()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        sync = offbeat.gradient_code(model, optimizer, group=comm)
        for parts in offbeat.coded_sampler(list(range(8)), sync, batch_size=1):
            next(parts)
            sync.step()

    sentence = (
        "step(): 2 of this step's 2 parts are left: go through all parts that the sampler hands out before "
        "every step."
    )
    with says(RuntimeError, sentence):
        offbeat.simulate(worker, 4)


# Real workers


def delayed(comm: offbeat.Communicator, expression: str) -> Any:
    """A quarter of the steps takes longer."""
    draw = random.Random(comm.rank)
    slow = [draw.uniform(0.005, 0.03) if draw.random() < 0.25 else 0.0 for _ in range(10)]
    forward, steps = Dyadic.forward, iter(slow)

    class Slow(Dyadic):
        def forward(self, given: Tensor) -> Tensor:
            time.sleep(next(steps, 0.0))
            return forward(self, given)

    trace, reports, _ = train(comm, expression, model=Slow)
    return trace, [report.kind for report in reports]


@pytest.mark.few(1)
@pytest.mark.parametrize("call", ["stragglers=1", "stragglers=1, dynamic=True", "stragglers=3"])
def test_real_workers_do_what_simulated_ones_do(pool: Pool, call: str) -> None:
    """To the bit, whoever is late in either."""
    expression = f"gradient_code({call})"
    real = pool.run(delayed, expression)
    virtual = offbeat.simulate(lambda comm: train(comm, expression), 4, compute=delays(0))
    for trace, _ in real:
        assert all(same(a, b) for a, b in zip(trace, virtual[0][0], strict=True))


def lost(comm: offbeat.Communicator) -> str:
    """Rank 1 fails in its third step, which cannot be decided without it."""
    model = Line()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    try:
        with offbeat.gradient_code(model, optimizer, stragglers=0, group=comm) as sync:
            for parts in offbeat.coded_sampler(list(range(40)), sync, batch_size=1):
                for part in parts:
                    if (comm.rank, sync.steps) == (1, 2):
                        raise KeyError("mine")
                    (part.weight * model.x.sum()).backward()
                sync.step()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def test_a_worker_that_is_needed_and_lost_is_missed(pool: Pool) -> None:
    for answers in (pool.run(lost, fresh=True), offbeat.simulate(lost, 4)):
        assert answers[1] == "KeyError: 'mine'"
        for rank in (0, 2, 3):
            assert answers[rank].startswith("PeerLost: "), answers[rank]
            assert "rank 1 failed (KeyError: 'mine')" in answers[rank]


# Resuming


def interrupted(comm: offbeat.Communicator, saved: dict[int, Any] | None, cut: int, model: Any) -> Any:
    net = model(seed=comm.rank)
    opt = optimizer_for(net, "momentum")
    sync = offbeat.gradient_code(net, opt, stragglers=1, dynamic=True, group=comm)
    sampler = offbeat.coded_sampler(
        Numbered(comm.size, 9), sync, batch_size=1, seed=3, collate=lambda batch: batch[0]
    )
    states = {"net": net, "opt": opt, "sync": sync, "sampler": sampler}
    if saved is not None:
        for name, state in saved[comm.rank].items():
            states[name].load_state_dict(state)
    kept, trace = None, []
    for parts in sampler:
        for part in parts:
            (part.weight * net(part.load())).backward()
        sync.step()
        opt.zero_grad()
        trace.append({name: p.detach().clone() for name, p in net.named_parameters()})
        if sync.steps == cut:
            kept = {name: copied(each.state_dict()) for name, each in states.items()}
    return kept, trace


def copied(state: Any) -> Any:
    if torch.is_tensor(state):
        return state.clone()
    if isinstance(state, dict):
        return {key: copied(value) for key, value in state.items()}
    return [copied(value) for value in state] if isinstance(state, list) else state


@pytest.mark.parametrize("cut", [1, 4, 8])
def test_it_resumes_after_any_step_although_some_are_late(cut: int) -> None:
    compute = delays(4)
    whole = offbeat.simulate(lambda comm: interrupted(comm, None, cut, Dyadic), 4, compute=compute)
    saved = {rank: kept for rank, (kept, _) in enumerate(whole)}
    rest = offbeat.simulate(lambda comm: interrupted(comm, saved, 99, Dyadic), 4, compute=compute)
    for (_, before), (_, after) in zip(whole, rest, strict=True):
        assert len(after) == 9 - cut
        assert all(same(a, b) for a, b in zip(before[cut:], after, strict=True))


# Bad input

FEW = "stragglers must be a whole number from 0 to 3, since there are 4 workers."


@pytest.mark.parametrize(
    ("call", "workers", "sentence"),
    [
        (
            "stragglers=4",
            4,
            f"stragglers=4: {FEW}",
        ),
        (
            "stragglers=-1",
            4,
            f"stragglers=-1: {FEW}",
        ),
        ("clusters=3", 4, "clusters=3: it must divide the 4 workers into equal clusters of 2 or more."),
        ("clusters=4", 4, "clusters=4: it must divide the 4 workers into equal clusters of 2 or more."),
        ("behind=0", 4, "behind=0: behind must be a whole number of rounds, at least 1."),
        ("grace=-1", 4, "grace=-1: grace must be a number of seconds, at least 0."),
        ("dynamic=2", 4, "dynamic=2: dynamic must be True or False."),
        (
            "stragglers=2, clusters=1",
            20,
            "stragglers=2: a cyclic code of 20 workers would need coefficients above 10: use clusters of 3 "
            "workers, or of another size.",
        ),
    ],
)
def test_bad_input(call: str, workers: int, sentence: str) -> None:
    def worker(comm: offbeat.Communicator) -> None:
        model = Line()
        offbeat.method(f"gradient_code({call})")(model, optimizer_for(model), group=comm)

    with says(ValueError, sentence):
        offbeat.simulate(worker, workers)


def test_a_sampler_is_for_coded_gradients() -> None:
    def worker(comm: offbeat.Communicator, method: str, **options: Any) -> None:
        model = Line()
        sync = offbeat.method(method)(model, optimizer_for(model), group=comm)
        offbeat.coded_sampler(**{"dataset": [1, 2], "sync": sync, "batch_size": 1, **options})

    code = "gradient_code()"
    with says(ValueError, "coded_sampler(dataset, ddp()): the method must be gradient_code(...)."):
        offbeat.simulate(lambda comm: worker(comm, "ddp()"), 2)
    with says(ValueError, "coded_sampler(batch_size=0): batch_size must be a whole number, at least 1."):
        offbeat.simulate(lambda comm: worker(comm, code, batch_size=0), 2)
    with says(ValueError, "coded_sampler(dataset): the dataset is empty."):
        offbeat.simulate(lambda comm: worker(comm, code, dataset=[]), 2)
    with says(ValueError, "coded_sampler(dataset, None): the method must be gradient_code(...)."):
        offbeat.simulate(lambda comm: worker(comm, code, sync=None), 2)
    with says(ValueError, "coded_sampler(seed='a'): seed must be a whole number."):
        offbeat.simulate(lambda comm: worker(comm, code, seed="a"), 2)
    loader = "a list_iterator has no length and index: pass a dataset, not a loader."
    with says(TypeError, f"coded_sampler(dataset): {loader}"):
        offbeat.simulate(lambda comm: worker(comm, code, dataset=iter([1])), 2)

"""Pushes and pulls: every intermediate against a trace worked by hand and a server written in NumPy."""

from __future__ import annotations

import functools
import itertools
import threading
import warnings
from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from conftest import Pool
from problems import Dyadic, data, optimizer_for, same, snapshot, train
from sentences import says
from torch import Tensor, nn
from torch.distributed import HashStore

import offbeat
from offbeat import GLU, Communicator, Compensated, LocalStep, Network, PushPull, Solo, simulate
from offbeat.comm.monitor import PeerMonitor
from offbeat.comm.store import StoreClient
from offbeat.comm.torch_backend import Connection, Message
from offbeat.server.rules import stable_product
from offbeat.server.shard import Transport


class Vector(nn.Module):
    """Parameters of the given sizes. Each worker pulls them to its own target, with curvature h."""

    def __init__(self, *sizes: int, h: float = 1.0) -> None:
        super().__init__()
        self.parts = nn.ParameterList([torch.zeros(n, dtype=torch.float64) for n in sizes])
        self.h = h

    def loss(self, rank: int, step: int) -> Tensor:
        wanted = targets(rank, step, sum(p.numel() for p in self.parts))
        return self.h * (torch.cat(list(self.parts)) - torch.from_numpy(wanted)).square().sum() / 2


def targets(rank: int, step: int, n: int) -> np.ndarray:
    return np.random.default_rng([rank, step]).normal(size=n)


def slope(model: Vector, rank: int) -> None:
    """Gradient 1, 3, 5, … of rank 0, 1, 2, …, wherever the weights are."""
    for p in model.parts:
        p.grad = torch.full_like(p, 2.0 * rank + 1)


def part_of(sync: offbeat.Synchronizer) -> PushPull:
    (part,) = sync.parts
    assert isinstance(part, PushPull)
    return part


# By hand: 2 workers with slopes 1 and 3, lr 1/2, momentum 1/2, k = 2, two steps of warm-up, alpha 2, beta
# 1/2. v ← v/2 + 2, W ← W − v/2; a pull requested after a step lands in the next.
# After each step: base of rank 0 and 1, pulled weights, Λ, server's weights and momentum.
TRACE = [
    (-1.0, -1.0, -1.0, 0.5, -1.0, 2.0),
    (-2.5, -2.5, -2.5, 0.5, -2.5, 3.0),
    (-4.25, -6.25, -2.5, 0.5, -4.25, 3.5),  # ĝ = (−1 + 2.5)/0.5 = 3: moved by (2·g + 1.5)/2
    (-6.0, -10.0, -2.5, 0.5, -6.125, 3.75),
    (-8.03125, -10.03125, -6.125, 1.0, -8.0625, 3.875),  # rebased; ĝ = (−2.5 + 6.125)/1 = 3.625
    (-9.9375, -13.9375, -6.125, 1.0, -10.03125, 3.9375),
    (-12.0078125, -14.0078125, -10.03125, 1.0, -12.015625, 3.96875),  # ĝ = 3.90625
    (-13.984375, -17.984375, -10.03125, 1.0, -14.0078125, 3.984375),
]


def test_a_trace_worked_by_hand() -> None:
    def worker(comm: Communicator) -> None:
        model = Vector(2)  # one weight for each rank to own
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)
        sync = offbeat.ssd_sgd(model, optimizer, every=2, warmup=2, group=comm)
        part = part_of(sync)
        for base0, base1, pulled, pace, served, momentum in TRACE:
            slope(model, comm.rank)
            sync.step()
            part.state_dict()  # lands the pushes on the server, but no pull in the workers
            assert part.replica.base.flats[0].tolist() == [[base0] * 2, [base1] * 2][comm.rank]
            assert model.parts[0].tolist() == part.replica.base.flats[0].tolist()
            assert part.replica.pulled[0].tolist() == [pulled] * 2
            assert part.replica.lr_sum == [pace]
            assert part.shard.weights[0].tolist() == [served]
            (state,) = part.shard.optimizer.state.values()
            assert state["momentum_buffer"].tolist() == [momentum]
        sync.finish()
        assert model.parts[0].tolist() == [-14.0078125] * 2
        assert [r.step for r in sync.reports] == [1, 2, 4, 6, 8]
        assert [r.period for r in sync.reports] == [1, 1, 2, 2, 2]

    simulate(worker, 2)


class Reference:
    """The whole method in NumPy: one unsharded server and all workers."""

    def __init__(
        self, workers: int, sizes: Sequence[int], k: int, warmup: int, rule: str, momentum: float
    ) -> None:
        n = sum(sizes)
        self.k, self.warmup, self.rule, self.momentum = k, warmup, rule, momentum
        self.group = np.repeat(np.arange(len(sizes)), sizes)
        self.W, self.v = np.zeros(n), np.zeros(n)
        self.prev, self.cur, self.pace, self.sum = np.zeros(n), np.zeros(n), np.zeros(n), np.zeros(n)
        self.base = [np.zeros(n) for _ in range(workers)]
        self.x = [np.zeros(n) for _ in range(workers)]
        self.air: tuple[np.ndarray, np.ndarray] | None = None

    def land(self) -> None:
        assert self.air is not None
        self.prev, (self.cur, self.pace), self.air = self.cur, self.air, None
        self.base = [self.cur.copy() for _ in self.base]

    def step(self, t: int, lrs: Sequence[float], decays: Sequence[float], nesterov: bool) -> None:
        lr, wd = np.asarray(lrs)[self.group], np.asarray(decays)[self.group]
        gradients = [x - targets(rank, t, len(x)) for rank, x in enumerate(self.x)]
        if t >= self.warmup:
            if self.air is not None:
                self.land()
            ahead = np.divide(
                self.prev - self.cur, self.pace, out=np.zeros_like(self.cur), where=self.pace != 0
            )
            for rank, g in enumerate(gradients):
                b = self.base[rank]
                if self.rule == "glu":
                    self.base[rank] = b - lr * (2.0 * g + wd * b + 0.5 * ahead)
                else:
                    lam = 0.25 if self.rule == "compensated" else 0.0
                    self.base[rank] = b - lr * (g + lam * g * g * (b - self.x[rank]) + wd * b)
        d = np.mean(gradients, axis=0) + wd * self.W
        self.v = self.momentum * self.v + d
        self.W = self.W - lr * (d + self.momentum * self.v if nesterov else self.v)
        self.sum = self.sum + lr
        if t < self.warmup or (t - self.warmup) % self.k == self.k - 1:
            self.air, self.sum = (self.W.copy(), self.sum), np.zeros_like(self.sum)
        if t < self.warmup:
            self.land()
        self.x = [b.copy() for b in self.base]


RULES = {"glu": GLU(), "plain": LocalStep(), "compensated": Compensated(0.25)}


@pytest.mark.few(4)
@pytest.mark.parametrize(
    ("workers", "k", "warmup", "rule", "momentum", "nesterov"),
    [
        (1, 2, 3, "glu", 0.9, False),
        (2, 2, 2, "glu", 0.5, True),
        (3, 3, 0, "glu", 0.9, True),
        (4, 5, 4, "glu", 0.0, False),
        (3, 1, 2, "compensated", 0.5, False),
        (4, 2, 1, "compensated", 0.9, True),
        (4, 4, 3, "plain", 0.5, False),
        (5, 1, 20, "plain", 0.9, True),
    ],
)
def test_slices_equal_an_unsharded_server(
    workers: int, k: int, warmup: int, rule: str, momentum: float, nesterov: bool
) -> None:
    """Seven weights in two groups, a learning rate that falls to 0 and rises again, and weight decay."""
    sizes, decays, steps = (4, 3), (0.1, 0.0), 14
    rates = [(0.0 if t in (5, 6, 7, 8, 9) else 0.1 * 0.9**t) for t in range(steps)]

    def worker(comm: Communicator) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        model = Vector(*sizes)
        groups = [
            {"params": [p], "weight_decay": wd, "lr": 1.0 + i}
            for i, (p, wd) in enumerate(zip(model.parts, decays, strict=True))
        ]
        optimizer = torch.optim.SGD(groups, lr=1.0, momentum=momentum, nesterov=nesterov)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: rates[min(t, steps - 1)])
        part = PushPull(offbeat.params(model), every=k, warmup=warmup, local=RULES[rule], among=comm)
        sync = offbeat.Synchronizer(optimizer, [part])
        trace = []
        for step in range(steps):
            model.loss(comm.rank, step).backward()
            sync.step()
            optimizer.zero_grad()
            scheduler.step()
            part.state_dict()
            states = part.shard.optimizer.state.values()
            v = [state["momentum_buffer"].numpy() for state in states] if momentum else []
            trace.append((live(model), part.shard.weights[0].numpy().copy(), np.concatenate([*v, []])))
        with sync.averaged():
            trace.append((live(model), part.shard.weights[0].numpy().copy(), np.zeros(0)))
        sync.finish()
        return [*trace, (live(model), part.shard.weights[0].numpy().copy(), np.zeros(0))]

    traces = simulate(worker, workers)
    reference = Reference(workers, sizes, k, warmup, rule, momentum)
    for step in range(steps):
        reference.step(step, [rates[step], 2 * rates[step]], decays, nesterov)
        served = np.concatenate([trace[step][1] for trace in traces])
        np.testing.assert_allclose(served[:7], reference.W, rtol=1e-12, atol=1e-14)
        assert not served[7:].any()  # the padding
        for rank, trace in enumerate(traces):
            np.testing.assert_allclose(trace[step][0], reference.x[rank], rtol=1e-12, atol=1e-14)
        if momentum:
            velocity = np.concatenate([trace[step][2] for trace in traces])
            np.testing.assert_allclose(velocity, reference.v, rtol=1e-12, atol=1e-14)
    for trace in traces:
        for shown in trace[steps:]:  # averaged() and finish()
            np.testing.assert_allclose(shown[0], reference.W, rtol=1e-12, atol=1e-14)


def live(model: Vector) -> np.ndarray:
    return torch.cat(list(model.parts)).detach().numpy().copy()


@pytest.mark.parametrize("server", [torch.optim.AdamW, functools.partial(torch.optim.Adam, amsgrad=True)])
def test_another_servers_optimizer_follows_the_users(server: Callable[..., Any]) -> None:
    """In the warm-up it steps like the user's own optimizer on mean gradients, with its options."""
    kind = server if isinstance(server, type) else server.func

    def worker(comm: Communicator, method: str, **options: Any) -> np.ndarray:
        model = Vector(4, 3)
        make = functools.partial(kind, betas=(0.5, 0.75), weight_decay=0.1, amsgrad=kind is torch.optim.Adam)
        optimizer = make(model.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
        sync = getattr(offbeat, method)(model, optimizer, group=comm, **options)
        for step in range(6):
            model.loss(comm.rank, step).backward()
            sync.step()
            optimizer.zero_grad()
            scheduler.step()
        return live(model)

    ours = simulate(lambda comm: worker(comm, "ssd_sgd", server=server), 3)
    theirs = simulate(lambda comm: worker(comm, "ddp"), 3)
    np.testing.assert_allclose(ours, theirs, rtol=1e-12)


# The loop around it.


def after_steps(
    comm: Communicator, local: Callable[..., Any], expression: str, steps: int = 6
) -> list[np.ndarray]:
    model = Vector(3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25, momentum=0.5)
    sync = offbeat.method(expression)(model, optimizer, group=comm)
    trace = []
    for step in range(steps):
        model.loss(comm.rank, step).backward()
        local(sync, optimizer, model, step)
        optimizer.zero_grad()
        trace.append(live(model))
    sync.finish()
    return [*trace, live(model)]


def plainly(sync: offbeat.Synchronizer, optimizer: torch.optim.Optimizer, model: Vector, step: int) -> None:
    sync.step()


def by_a_framework(sync: offbeat.Synchronizer, optimizer: Any, model: Vector, step: int) -> None:
    assert sync.before_step() is False
    sync.after_step()


def zeroing_inside(sync: offbeat.Synchronizer, optimizer: Any, model: Vector, step: int) -> None:
    sync.step(lambda: (optimizer.step(), optimizer.zero_grad()))


def with_a_closure(sync: offbeat.Synchronizer, optimizer: Any, model: Vector, step: int) -> None:
    gradient = model.parts[0].grad.clone()
    model.parts[0].grad = None

    def closure() -> float:
        model.parts[0].grad = gradient
        return 7.0

    assert sync.step(lambda: optimizer.step(closure)) == 7.0


@pytest.mark.parametrize("local", [by_a_framework, zeroing_inside, with_a_closure])
def test_it_does_not_matter_who_steps_the_optimizer(local: Callable[..., Any]) -> None:
    expression = "ssd_sgd(every=2, warmup=2)"
    ours, plain = (simulate(lambda comm, f=f: after_steps(comm, f, expression), 2) for f in (local, plainly))
    np.testing.assert_array_equal(ours, plain)


def test_clipping_happens_before_the_push() -> None:
    def clipping(sync: offbeat.Synchronizer, optimizer: Any, model: Vector, step: int) -> None:
        def local() -> None:
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()

        sync.step(local)

    def clipped_beforehand(sync: offbeat.Synchronizer, optimizer: Any, model: Vector, step: int) -> None:
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        sync.step()

    def by_a_framework(sync: offbeat.Synchronizer, optimizer: Any, model: Vector, step: int) -> None:
        assert sync.before_step() is False
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        with sync.still():
            optimizer.step()
        sync.after_step()

    expression = "ssd_sgd(every=2, warmup=2)"
    inside, before, theirs, not_at_all = (
        simulate(lambda comm, f=f: after_steps(comm, f, expression), 2)
        for f in (clipping, clipped_beforehand, by_a_framework, plainly)
    )
    np.testing.assert_array_equal(inside, before)
    np.testing.assert_array_equal(inside, theirs)
    assert not np.array_equal(inside, not_at_all)


def test_a_step_that_amp_skipped_pushes_zeros() -> None:
    """Rank 1 overflows at steps 1 and 4, where its gradient counts as zero. Each rank has its own scaler."""

    def worker(comm: Communicator, amp: bool) -> list[np.ndarray]:
        scaler = torch.amp.GradScaler("cpu", init_scale=16.0)

        def local(sync: offbeat.Synchronizer, optimizer: Any, model: Vector, step: int) -> None:
            gradient = model.parts[0].grad
            overflow = comm.rank == 1 and step in (1, 4)
            if not amp:
                gradient.mul_(0.0 if overflow else 1.0)
                sync.step()
                return
            gradient.mul_(float("inf") if overflow else scaler.get_scale())
            scaler.scale(torch.zeros(()))  # which sets it up

            def scaled() -> None:
                scaler.step(optimizer)
                scaler.update()

            sync.step(scaled)

        trace = after_steps(comm, local, "ssd_sgd(every=2, warmup=2)")
        if amp:
            assert scaler.get_scale() == (4.0 if comm.rank == 1 else 16.0)
        return trace

    np.testing.assert_array_equal(
        *(simulate(lambda comm, amp=amp: worker(comm, amp), 2) for amp in (True, False))
    )


def test_a_missing_gradient_counts_as_zero_and_a_sparse_one_is_refused() -> None:
    model = Vector(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    sync = offbeat.od_sgd(model, optimizer, warmup=9)
    model.parts[0].grad = torch.ones(2, dtype=torch.float64)
    sync.step()
    model.parts[0].grad = None
    model.parts[1].grad = torch.ones(1, dtype=torch.float64)
    sync.step()
    assert live(model).tolist() == [-1.0, -1.0, -1.0]
    model.parts[1].grad = torch.ones(1, dtype=torch.float64).to_sparse()
    with says(TypeError, "The gradient of 'parts.1' is sparse: build its layer with sparse=False."):
        sync.step()


def test_only_parameters_of_the_optimizer_move() -> None:
    def worker(comm: Communicator) -> list[float]:
        model = Vector(2, 3)
        sync = offbeat.ssd_sgd(
            model, torch.optim.SGD([model.parts[1]], lr=1.0), every=2, warmup=1, group=comm
        )
        for _ in range(3):
            slope(model, comm.rank)
            sync.step()
        sync.finish()
        return live(model).tolist()

    assert simulate(worker, 2) == [[0.0, 0.0, -6.0, -6.0, -6.0]] * 2


def test_two_optimizers() -> None:
    """Each one's learning rate applies to its own weights."""

    def worker(comm: Communicator) -> list[float]:
        model = Vector(1, 2)
        optimizers = [torch.optim.SGD([p], lr=lr) for p, lr in zip(model.parts, (1.0, 0.5), strict=True)]
        with offbeat.ssd_sgd(model, optimizers, every=2, warmup=1, group=comm) as sync:
            for _ in range(3):
                slope(model, comm.rank)
                sync.step()
        return live(model).tolist()

    assert simulate(worker, 2) == [[-6.0, -3.0, -3.0]] * 2


# What it costs.


@pytest.mark.parametrize(
    ("workers", "n", "every"), [(2, 10, 1), (4, 40, 5), (4, 37, 2), (3, 7, 4), (1, 5, 2)]
)
def test_bytes(workers: int, n: int, every: int) -> None:
    """(1 + 1/k)·n·(K−1)/K values per step and worker, n padded, and a 64-byte header to each other worker."""
    warmup, steps = 2, 2 + 3 * every
    padded = -(-n // workers) * workers

    def worker(comm: Communicator) -> None:
        model = Vector(n)
        sync = offbeat.ssd_sgd(
            model, torch.optim.SGD(model.parameters(), lr=0.01), every=every, warmup=warmup, group=comm
        )
        for _ in range(steps):
            slope(model, comm.rank)
            sync.step()
        landed = sync.totals.rounds
        assert landed == warmup + 2
        sync.finish()
        message = 8 * padded * (workers - 1) // workers
        header = 64 * (workers - 1)
        expected = [message * 2 + header] * warmup + [every * (message + header) + message] * 3
        assert [report.bytes_sent for report in sync.reports] == expected
        assert [report.bytes_received for report in sync.reports] == expected

    simulate(worker, workers)


def seconds_of_steps(
    *, compute: float, push: float, every: int, steps: int, in_flight: int = 1
) -> list[float]:
    """When every step of rank 0 ended; 4 000 weights of 8 bytes on 2 workers: messages of 16 000 bytes."""

    def worker(comm: Communicator) -> list[float]:
        model = Vector(4000)
        sync = offbeat.ssd_sgd(
            model,
            torch.optim.SGD(model.parameters(), lr=0.01),
            every=every,
            warmup=0,
            in_flight=in_flight,
            group=comm,
        )
        with sync.averaged():
            pass  # the start is over
        start, ends = comm.now(), []
        for _ in range(steps):
            slope(model, comm.rank)
            sync.step()
            ends.append(comm.now() - start)
        return ends

    network = Network(bandwidth=16_000 / push)
    return simulate(worker, 2, network=network, compute=lambda rank, step: compute)[0]


def test_a_fast_network_costs_no_time_at_all() -> None:
    """Push and pull together take 0.75 of a step's computation: all of it is hidden."""
    ends = seconds_of_steps(compute=1.0, push=0.375, every=3, steps=10)
    assert ends == pytest.approx([float(step) for step in range(1, 11)])


def test_a_step_takes_the_longer_of_computing_and_pushing() -> None:
    """Pushes of 1.5 behind computations of 1: the next push leaves when the previous one has arrived."""
    for in_flight in (1, 2, 3):
        ends = seconds_of_steps(compute=1.0, push=1.5, every=100, steps=8, in_flight=in_flight)
        assert ends[7] - ends[6] == pytest.approx(1.5, rel=1e-2)  # the first ones are not held back
    assert seconds_of_steps(compute=1.0, push=1.5, every=100, steps=4) == pytest.approx(
        [1.0, 2.5, 4.0, 5.5], rel=1e-2
    )


def test_a_pull_starts_when_the_push_before_it_arrives() -> None:
    """It does not wait for the worker: after 0.75 + 0.75 the weights are there, half a step late."""
    ends = seconds_of_steps(compute=1.0, push=0.75, every=4, steps=8)
    assert ends == pytest.approx([1.0, 2.0, 3.0, 4.0, 5.5, 6.5, 7.5, 8.5], rel=1e-3)


@pytest.mark.parametrize("in_flight", [1, 2, 4])
def test_a_slow_network_holds_the_worker_back(in_flight: int) -> None:
    """Pushes follow each other every 10 seconds, from the first step on; a step waits until the one
    `in_flight` before it has arrived, so that never more are on their way."""
    ends = seconds_of_steps(compute=1.0, push=10.0, every=100, steps=12, in_flight=in_flight)
    expected = [1.0 + step if step < in_flight else 1.0 + 10.0 * (step - in_flight + 1) for step in range(12)]
    assert ends == pytest.approx(expected, rel=1e-2)  # and the header, 0.4 % of a message


def test_averaged_asks_the_server_only_without_a_pull_in_flight() -> None:
    def worker(comm: Communicator) -> None:
        meter = offbeat.Metered(comm)
        model = Vector(4)
        sync = offbeat.ssd_sgd(
            model, torch.optim.SGD(model.parameters(), lr=0.5), every=2, warmup=1, group=meter
        )
        part, seen = part_of(sync), []
        for step in range(1, 7):
            slope(model, comm.rank)
            sync.step()
            before = snapshot(model)
            part._drain()
            sent = meter.sent
            with (
                patch.object(part._transport, "fetch", wraps=part._transport.fetch) as fetch,
                sync.averaged(),
            ):
                assert live(model).tolist() == [-1.0 * step] * 4
            assert same(snapshot(model), before)
            assert meter.sent - sent == 128  # a header and the checksums
            seen.append(fetch.call_count)
        assert seen == [0, 1, 0, 1, 0, 1]
        assert sync.totals.bytes_sent > 0

    simulate(worker, 2)


# Real processes.


def saved_in_flight(comm: Communicator, cut: int) -> list[dict[str, Tensor]]:
    expression = "ssd_sgd(every=3, warmup=1, in_flight=3)"
    model = Dyadic(comm.rank)
    optimizer = optimizer_for(model, "momentum")
    sync = offbeat.method(expression)(model, optimizer, group=comm)
    trace = []
    for step in range(8):
        if step == cut:
            state, weights = sync.state_dict(), model.state_dict()
            model = Dyadic(17)
            model.load_state_dict(weights)
            optimizer = optimizer_for(model, "momentum")
            sync = offbeat.method(expression)(model, optimizer, group=comm)
            sync.load_state_dict(state)
        model(data(comm.rank, step)).backward()
        sync.step()
        optimizer.zero_grad()
        trace.append(snapshot(model))
    sync.finish()
    return [*trace, snapshot(model)]


@pytest.mark.slow
def test_resumed_processes_continue_bit_identically(pool: Pool) -> None:
    expected = pool.run(train_whole)
    for cut in (2, 4, 5):  # with pushes in flight, with a pull too, and one step later
        for a, b in zip(pool.run(saved_in_flight, cut), expected, strict=True):
            assert all(same(x, y) for x, y in zip(a, b, strict=True))


def train_whole(comm: Communicator) -> list[dict[str, Tensor]]:
    return train(comm, "ssd_sgd(every=3, warmup=1, in_flight=3)", steps=8, optimizer="momentum")


def two_models(comm: Communicator) -> list[list[np.ndarray]]:
    """Two servers among the same workers, each with its own task queues."""
    models = [Vector(5), Vector(5)]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.25, momentum=0.5) for m in models]
    syncs = [
        offbeat.ssd_sgd(m, o, every=2, warmup=1, group=comm) for m, o in zip(models, optimizers, strict=True)
    ]
    for step, (model, optimizer, sync) in itertools.product(
        range(7), zip(models, optimizers, syncs, strict=True)
    ):
        model.loss(comm.rank, step).backward()
        sync.step()
        optimizer.zero_grad()
    for sync in syncs:
        sync.finish()
    return [live(model) for model in models]


def test_two_servers_do_not_mix(pool: Pool) -> None:
    expected = simulate(two_models, 4)
    for mine, theirs in zip(pool.run(two_models), expected, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-12)
        np.testing.assert_array_equal(mine[0], mine[1])


def one_fails(comm: Communicator) -> None:
    model = Vector(5)
    with offbeat.ssd_sgd(
        model, torch.optim.SGD(model.parameters(), lr=0.25), every=2, warmup=1, group=comm
    ) as sync:
        for step in range(20):
            slope(model, comm.rank)
            if comm.rank == 2 and step == 5:
                raise KeyError("trouble")
            sync.step()


def test_workers_that_wait_for_a_lost_one_are_told(pool: Pool) -> None:
    answers = pool.attempt(one_fails)
    assert isinstance(answers[2], KeyError)
    for rank in (0, 1, 3):
        assert isinstance(answers[rank], offbeat.PeerLost)
        assert "rank 2 failed (KeyError: 'trouble')" in str(answers[rank])


class Ending:
    """A message that succeeds or fails exactly when one slice of waiting ends."""

    def __init__(self, fails: bool) -> None:
        self.waits, self.fails = 0, fails

    def is_completed(self) -> bool:
        return self.waits > 0

    def wait(self, timeout: object) -> None:
        self.waits += 1
        if self.waits == 1:
            raise RuntimeError("Operation timed out!")
        if self.fails:
            raise RuntimeError("Connection closed by peer. Somewhere.")


def test_a_message_that_ends_with_a_slice_of_waiting_has_arrived() -> None:
    message = Message(PeerMonitor("key", [0], 0, StoreClient(HashStore()), 1.0), "news", [], 0, [])
    message.calls = [(Connection("cpu", None), 0, Ending(fails=False))]
    assert message.wait() == []
    message.calls = [(Connection("cpu", None), 0, Ending(fails=True))]
    sentence = "Waiting for news: rank 0 lost a connection (Connection closed by peer)."
    with says(offbeat.PeerLost, sentence):
        message.wait()


class Order:
    """Jobs that record when they are done."""

    def __init__(self, task_queue: offbeat.comm.background.TaskQueue) -> None:
        self.task_queue, self.done = task_queue, []

    def give(self, name: int) -> offbeat.Pending[int]:
        def job() -> int:
            if name < 0:
                raise KeyError(name)
            self.done.append(name)
            return name

        return self.task_queue.give(job)


@pytest.mark.parametrize("kind", ["thread", "world of one", "simulation"])
def test_a_task_queue_keeps_the_order_and_stops_at_an_error(kind: str) -> None:
    def worker(comm: Communicator) -> None:
        task_queue = offbeat.comm.background.ThreadQueue() if kind == "thread" else comm.worker.task_queue()
        order = Order(task_queue)
        jobs = [order.give(name) for name in range(5)]
        assert jobs[3].wait() == 3
        assert order.done[:4] == [0, 1, 2, 3]
        assert [job.wait() for job in jobs] == [0, 1, 2, 3, 4]
        if kind != "world of one":  # where trouble is raised at once
            bad, later = order.give(-1), order.give(7)
            for job in (bad, later):
                with pytest.raises(KeyError):
                    job.wait()
            assert 7 not in order.done
        task_queue.close()

    simulate(worker, 1) if kind == "simulation" else worker(Solo())


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_a_shift_goes_round(size: int) -> None:
    def worker(comm: Communicator) -> list[float]:
        seen, now = [], torch.full((2,), float(comm.rank))
        for _ in range(size):
            now = comm.shift(now).wait()
            seen.append(now[0].item())
        return seen

    expected = [[float((rank - step) % size) for step in range(1, size + 1)] for rank in range(size)]
    assert simulate(worker, size) == expected


def shifted(comm: Communicator) -> list[float]:
    duplicate = comm.worker.duplicate()
    return [duplicate.shift(torch.full((3,), float(comm.rank))).wait().sum().item(), duplicate.size]


def test_a_shift_of_processes(pool: Pool) -> None:
    assert pool.run(shifted) == [[9.0, 4], [0.0, 4], [3.0, 4], [6.0, 4]]


# Workers that do different things.


def test_another_number_of_steps() -> None:
    def worker(comm: Communicator) -> None:
        model = Vector(5)
        sync = offbeat.ssd_sgd(model, torch.optim.SGD(model.parameters(), lr=0.25), warmup=1, group=comm)
        for _ in range(4 + comm.rank):
            slope(model, comm.rank)
            sync.step()
        sync.finish()

    with pytest.raises(offbeat.Disagreement, match=r"rank 0 is in finish\(\) at step 4, rank 1 in round"):
        simulate(worker, 2)


def test_another_learning_rate() -> None:
    def worker(comm: Communicator) -> None:
        model = Vector(5)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
        sync = offbeat.ssd_sgd(model, optimizer, warmup=1, group=comm)
        for step in range(6):
            optimizer.param_groups[0]["lr"] = 0.5 if (comm.rank, step) == (1, 3) else 0.25
            slope(model, comm.rank)
            sync.step()
        sync.finish()

    with pytest.raises(offbeat.Disagreement, match=r"at step 4: rank 0 has learning rate 0.25, rank 1 0.5"):
        simulate(worker, 2)


def test_one_worker_evaluates_while_another_steps() -> None:
    def worker(comm: Communicator) -> None:
        model = Vector(5)
        sync = offbeat.ssd_sgd(model, torch.optim.SGD(model.parameters(), lr=0.25), warmup=1, group=comm)
        for step in range(6):
            slope(model, comm.rank)
            sync.step()
            if comm.rank == 0 and step == 2:
                with sync.averaged():
                    pass

    with pytest.raises(offbeat.Disagreement, match=r"rank 0 is in averaged\(\) at step 3, rank 1 in round"):
        simulate(worker, 2)


# The stable region.


def descend(
    product: float, every: int, momentum: float, alpha: float, beta: float, steps: int = 600
) -> list[str]:
    """The warnings of a descent on ½·h·w² with lr·h = product."""
    model = Vector(2, h=2.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=product / 2, momentum=momentum)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        sync = offbeat.ssd_sgd(model, optimizer, every=every, warmup=20, alpha=alpha, beta=beta)
        for _ in range(steps):
            model.parts[0].grad = 2.0 * (model.parts[0].detach() - 1.0)
            sync.step()
    return [str(warning.message) for warning in caught]


REGION = [
    (1, 0.9, 2.0, 0.5),
    (2, 0.9, 2.0, 0.5),
    (5, 0.9, 2.0, 0.5),
    (10, 0.9, 2.0, 0.5),
    (5, 0.9, 1.0, 0.0),
    (5, 0.5, 1.0, 0.5),
    (5, 0.0, 2.0, 0.0),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("every", "momentum", "alpha", "beta"),
    [pytest.param(*row, marks=pytest.mark.slow if i % 4 else []) for i, row in enumerate(REGION)],
)
def test_it_warns_once_outside_the_stable_region_and_never_inside(
    every: int, momentum: float, alpha: float, beta: float
) -> None:
    limit = stable_product(every, momentum, alpha, beta)
    assert descend(0.9 * limit, every, momentum, alpha, beta) == []
    warned = descend(1.5 * limit, every, momentum, alpha, beta)
    assert len(warned) == 1
    assert warned[0].startswith(f"PushPull(every={every}) at step ")
    measured = f"times the curvature of the loss, about 2, is {1.5 * limit:.2g}, but every={every} "
    assert f"lr={0.75 * limit:g} {measured}" in warned[0]
    assert warned[0].endswith(f"is stable only below {limit:.2g}: lower the learning rate or every.")


def test_the_stable_region_of_synchronous_sgd_is_known() -> None:
    """alpha=1, beta=μ, k=1 is heavy ball itself: 2 (1 + μ); plain local steps with μ = 0: 2, whatever k."""
    for momentum in (0.0, 0.5, 0.9):
        assert stable_product(1, momentum, 1.0, momentum) == pytest.approx(2 * (1 + momentum), rel=1e-2)
    for every in (1, 2, 5):
        assert stable_product(every, 0.0, 1.0, 0.0) == pytest.approx(2.0, rel=1e-2)


# Bad input.


BAD: list[tuple[str, dict[str, Any], type[Exception], str]] = [
    ("ssd_sgd", {"every": 0}, ValueError, "PushPull(every=0): every must be a whole number, at least 1."),
    ("ssd_sgd", {"every": 2.0}, ValueError, "PushPull(every=2.0): every must be a whole number, at least 1."),
    ("od_sgd", {"warmup": -1}, ValueError, "PushPull(warmup=-1): warmup must be a whole number, at least 0."),
    (
        "od_sgd",
        {"in_flight": 0},
        ValueError,
        "PushPull(in_flight=0): in_flight must be a whole number, at least 1.",
    ),
    (
        "ssd_sgd",
        {"alpha": -1.0},
        ValueError,
        "GLU(alpha=-1.0, beta=0.5, lr=None): alpha must be a finite number, at least 0.",
    ),
    (
        "ssd_sgd",
        {"local_lr": float("nan")},
        ValueError,
        "GLU(alpha=2.0, beta=0.5, lr=nan): lr must be a finite number, at least 0, or None.",
    ),
    ("od_sgd", {"lam": -0.5}, ValueError, "Compensated(lam=-0.5): lam must be a finite number, at least 0."),
    (
        "od_sgd",
        {"server": 3},
        TypeError,
        "server=3: pass a function that makes an optimizer, such as torch.optim.Adam.",
    ),
    (
        "od_sgd",
        {"server": torch.optim.SGD([torch.zeros(1)])},
        TypeError,
        "server=SGD(...): this optimizer already has parameters: pass a function that makes an optimizer, "
        "such as torch.optim.Adam.",
    ),
]


@pytest.mark.parametrize(("method", "options", "kind", "sentence"), BAD)
def test_bad_arguments(method: str, options: dict[str, Any], kind: type[Exception], sentence: str) -> None:
    model = Vector(2)
    with says(kind, sentence):
        getattr(offbeat, method)(model, torch.optim.SGD(model.parameters(), lr=0.1), group=Solo(), **options)


@pytest.mark.parametrize("server", [torch.optim.Adafactor, torch.optim.LBFGS, torch.optim.SparseAdam])
def test_a_server_that_cannot_be_sharded_is_refused(server: Any) -> None:
    model = Vector(2)
    with pytest.raises(ValueError, match="it does not step the pieces of a tensor as it steps the whole"):
        offbeat.od_sgd(model, torch.optim.SGD(model.parameters(), lr=0.1), server=server)


@pytest.mark.parametrize(
    ("optimizer", "sentence"),
    [
        (
            functools.partial(torch.optim.AdamW, lr=0.1),
            "The optimizer is AdamW, but by default the server steps like torch.optim.SGD without dampening: "
            "for another rule, such as this one, pass server=torch.optim.AdamW.",
        ),
        (
            functools.partial(torch.optim.SGD, lr=0.1, momentum=0.5, dampening=0.5),
            "The optimizer is SGD(dampening=0.5), but by default the server steps like torch.optim.SGD "
            "without dampening: for another rule, such as this one, pass server=torch.optim.SGD.",
        ),
        (
            functools.partial(torch.optim.SGD, lr=0.1, maximize=True),
            "SGD(maximize=True): a server only minimizes: negate the loss instead.",
        ),
        (
            functools.partial(torch.optim.SGD, lr=0.1, fused=True),
            "SGD(fused=True): AMP would leave its gradients scaled: build it unfused.",
        ),
    ],
)
def test_optimizers_that_do_not_fit(optimizer: Any, sentence: str) -> None:
    model = Vector(2)
    with says(ValueError, sentence):
        offbeat.ssd_sgd(model, optimizer(model.parameters()))


def test_local_must_be_a_rule() -> None:
    sentence = "PushPull(local=2): pass a rule, such as GLU(alpha=2.0, beta=0.5)."
    with says(TypeError, sentence):
        PushPull(offbeat.params(Vector(2)), every=2, local=2)


def test_a_scheduler_may_step_inside_the_local_step() -> None:
    """The server steps with the rate the optimizer would have stepped with."""

    def end(method: Callable[..., offbeat.Synchronizer]) -> dict[str, Tensor]:
        model = Vector(4)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        sync = method(model, optimizer, group=Solo())
        for _ in range(3):
            slope(model, 0)
            sync.step(lambda: (optimizer.step(), scheduler.step()))
        return snapshot(model)

    assert same(end(offbeat.ssd_sgd), end(offbeat.ddp))


def test_a_server_keeps_its_own_kind_of_weight_decay() -> None:
    ends = []
    for user, server in ((torch.optim.Adam, torch.optim.AdamW), (torch.optim.AdamW, torch.optim.AdamW)):
        model = Vector(4)
        nn.init.ones_(model.parts[0])
        optimizer = user(model.parameters(), lr=0.1, weight_decay=0.5)
        sync = offbeat.ssd_sgd(model, optimizer, server=server, group=Solo())
        for _ in range(3):
            slope(model, 0)
            sync.step()
        ends.append(snapshot(model))
    assert same(*ends)


def test_after_an_error_the_task_queue_is_gone_and_steps_are_refused() -> None:
    model = Vector(4)
    sync = offbeat.ssd_sgd(model, torch.optim.SGD(model.parameters(), lr=0.1), group=Solo())
    with pytest.raises(ZeroDivisionError), sync:
        raise ZeroDivisionError
    with says(RuntimeError, "step(): an error has ended this run; make a new synchronizer to continue."):
        sync.step()


def test_a_push_is_sent_before_a_pull_is_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    order = []
    for owner, name in ((Transport, "push"), (offbeat.PushPull, "_land")):
        act = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *a, act=act, name=name: order.append(name) or act(*a))
    model = Vector(4)
    sync = offbeat.ssd_sgd(
        model, torch.optim.SGD(model.parameters(), lr=0.1), every=2, warmup=0, group=Solo()
    )
    for _ in range(3):
        slope(model, 0)
        sync.step()
    assert order == ["push", "push", "push", "_land"]


def failing(comm: Communicator) -> bool:
    """Whether a thread of ours is left after an error in the user's loop."""
    model, before, ours = Vector(4), set(threading.enumerate()), set[threading.Thread]()
    try:
        with offbeat.ssd_sgd(model, torch.optim.SGD(model.parameters(), lr=0.1), group=comm) as sync:
            slope(model, comm.rank)
            sync.step()
            ours = {
                thread for thread in threading.enumerate() if thread.name.startswith("offbeat-task_queue")
            }
            raise ZeroDivisionError
    except ZeroDivisionError:
        pass
    ours -= before
    assert ours
    for thread in ours:
        thread.join(10)
    return any(thread.is_alive() for thread in ours)


def test_no_thread_outlives_an_error(pool: Pool) -> None:
    assert pool.run(failing, workers=2, fresh=True) == [False, False]

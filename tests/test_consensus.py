"""What `averaged()` shows and `finish()` leaves, for every update among every kind of peers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from sentences import says
from torch import Tensor, nn

import offbeat
from offbeat import (
    SGD,
    Butterfly,
    Correct,
    Detached,
    Every,
    Exchange,
    Gossip,
    Outer,
    Pairs,
    Rebase,
    Replace,
    SlowMo,
    Subgroups,
    Synchronizer,
    TopK,
    World,
    params,
)
from offbeat.base.draws import draw_order
from offbeat.update.outer import Eager, Overlap

STEPS, EVERY = 7, 2
SCALE = torch.tensor([1.0, -2.0, 3.0, 5.0]).double()  # of the slopes of four weights

Groups = list[list[int]]


def slope(rank: int, step: int) -> float:
    return 2.0 * rank + 1.0 + rank * (step % 3)


# Each rule anew, for one number per worker.


@dataclass
class Averaging:
    """x ← keep·x + (1 − keep)·mean"""

    keep: float = 0.0
    x: float = 0.0

    def send(self, workers: int) -> float:
        return self.x

    def land(self, mean: float) -> None:
        self.x = self.keep * self.x + (1 - self.keep) * mean

    def consensus(self) -> float:
        return self.x

    def close(self, mean_way: float, workers: int) -> None:
        """The last act; `mean_way` is the group's mean of anchor − x."""

    anchor = 0.0


@dataclass
class Correcting(Averaging):
    gain: float = 1.0

    def send(self, workers: int) -> float:
        self.sent = self.x
        return self.x

    def land(self, mean: float) -> None:
        self.x += self.gain * (mean - self.sent)


@dataclass
class Alone(Averaging):
    """No worker is ever moved: for rules that leave the mean of all workers where it is."""

    def land(self, mean: float) -> None:
        pass


@dataclass
class Stepping(Averaging):
    """The anchor steps along the mean way with lr 0.5 and heavy-ball momentum 0.5."""

    velocity: float = 0.0

    def send(self, workers: int) -> float:
        return self.anchor - self.x

    def land(self, mean: float) -> None:
        self.step(mean)
        self.x = self.keep * self.x + (1 - self.keep) * self.anchor

    def step(self, gradient: float) -> None:
        self.velocity = 0.5 * self.velocity + gradient
        self.anchor -= 0.5 * self.velocity

    def consensus(self) -> float:
        return self.anchor


@dataclass
class Gossiping(Stepping):
    def send(self, workers: int) -> float:
        return self.x

    def land(self, mean: float) -> None:
        super().land(self.anchor - mean)


@dataclass
class Eagerly(Stepping):
    own: float = 0.0
    known: float = 0.0

    def send(self, workers: int) -> float:
        way = self.anchor - self.x
        self.known += max(0.75, 1 / workers) * (way - self.own)
        self.own = way
        self.step(self.known)
        self.x = self.anchor
        return way

    def land(self, mean: float) -> None:
        self.known = mean

    def close(self, mean_way: float, workers: int) -> None:
        self.x -= self.known - max(0.75, 1 / workers) * self.own


@dataclass
class Overlapping(Averaging):
    velocity: float = 0.0

    def send(self, workers: int) -> float:
        self.x = 0.25 * self.x + 0.75 * self.anchor
        self.velocity = 0.5 * self.velocity + self.anchor - self.x
        return self.anchor - self.velocity

    def land(self, mean: float) -> None:
        self.anchor = mean


@dataclass(frozen=True)
class Row:
    """An update, its delay, its rule, and whether it needs groups that stay."""

    update: offbeat.Update
    rule: Callable[[], Averaging]
    delay: Any = 0
    stays: bool = False

    def __str__(self) -> str:
        return f"{type(self.update).__name__}, delay={self.delay}"


MOMENTUM = SGD(0.5, 0.5)
UPDATES = [
    Row(Replace(), Averaging),
    Row(Replace(0.25), lambda: Averaging(0.25), 1),
    Row(Correct(), Correcting, 1),
    Row(Correct(0.5), lambda: Correcting(gain=0.5), "round"),
    Row(Outer(MOMENTUM), Stepping, stays=True),
    Row(Outer(MOMENTUM, keep=0.25), lambda: Stepping(0.25), 1, stays=True),
    Row(SlowMo(0.5, 0.5), Stepping, stays=True),
    Row(Rebase(), Correcting, 1, stays=True),
    Row(Rebase(0.5), lambda: Correcting(gain=0.5), "round", stays=True),
    Row(Gossip(MOMENTUM), Gossiping),
    Row(Eager(MOMENTUM), Eagerly, "round"),
    Row(Overlap(0.75, 0.5), Overlapping, "round"),
    Row(Detached(TopK(2, least=1), 0.25), Alone, stays=True),
]


def pairs(workers: int, round: int) -> Groups:
    order = draw_order(workers, 0, round, "pairs")
    return [order[i : i + 2] for i in range(0, workers, 2)]


@dataclass(frozen=True)
class Circle:
    """Peers, how many there are of them in all, who is with whom, and whether that ever changes."""

    make: Callable[[offbeat.Communicator], Any]
    workers: int
    groups: Callable[[int], Groups]
    changes: bool = False
    name: str = ""

    def __str__(self) -> str:
        return self.name


UNEVEN = ((0, 4), (3,), (1, 2))
PEERS = [
    Circle(World, 4, lambda t: [[0, 1, 2, 3]], name="World of 4"),
    Circle(lambda comm: Subgroups(1, comm), 2, lambda t: [[0], [1]], name="Subgroups(1) of 2"),
    Circle(lambda comm: Subgroups(2, comm), 4, lambda t: [[0, 1], [2, 3]], name="Subgroups(2) of 4"),
    Circle(lambda comm: Subgroups(3, comm), 3, lambda t: [[0, 1, 2]], name="Subgroups(3) of 3"),
    Circle(lambda comm: Subgroups(UNEVEN, comm), 5, lambda t: [*map(list, UNEVEN)], name="uneven Subgroups"),
    Circle(Pairs, 2, lambda t: [[0, 1]], name="Pairs of 2"),
    Circle(Pairs, 4, lambda t: pairs(4, t), changes=True, name="Pairs of 4"),
    Circle(Pairs, 5, lambda t: pairs(5, t), changes=True, name="Pairs of 5"),
    Circle(
        lambda comm: Butterfly(2, comm),
        4,
        lambda t: [[[0, 1], [2, 3]], [[0, 2], [1, 3]]][t % 2],
        changes=True,
        name="Butterfly(2) of 4",
    ),
    Circle(lambda comm: Butterfly(3, comm), 3, lambda t: [[0, 1, 2]], name="Butterfly(3) of 3"),
    Circle(lambda comm: Butterfly(1, comm), 2, lambda t: [[0], [1]], name="Butterfly(1) of 2"),
]


def mean(numbers: Sequence[float]) -> float:
    return sum(numbers) / len(numbers)


def expected(row: Row, circle: Circle) -> list[float]:
    """The mean of every worker's consensus after each step, and of their weights in the end."""
    workers = [row.rule() for _ in range(circle.workers)]
    landing: tuple[int | None, dict[int, float]] | None = None
    shown, round = [], 0

    def land() -> None:
        nonlocal landing
        assert landing is not None
        for rank, value in landing[1].items():
            workers[rank].land(value)
        landing = None

    for step in range(1, STEPS + 1):
        for rank, worker in enumerate(workers):
            worker.x -= slope(rank, step - 1)
        begins = step % EVERY == 0
        if landing and (landing[0] == step or (landing[0] is None and begins)):
            land()
        if begins:
            groups, round = circle.groups(round), round + 1
            means = {}
            for group in groups:
                sent = mean([workers[rank].send(len(group)) for rank in group])
                means.update(dict.fromkeys(group, sent))
            landing = (None if row.delay == "round" else step + row.delay, means)
            if row.delay == 0:
                land()
        shown.append(mean([worker.consensus() for worker in workers]))
    if landing:
        land()
    for group in circle.groups(round - 1):
        way = mean([workers[rank].anchor - workers[rank].x for rank in group])
        for rank in group:
            workers[rank].close(way, len(group))
    return [*shown, mean([worker.x for worker in workers])]


class Weights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4).double())

    def forward(self, slope: float) -> Tensor:
        return slope * (self.weight * SCALE).sum()


def run(comm: offbeat.Communicator, build: Callable[..., list[offbeat.Part]]) -> list[list[float]]:
    net = Weights()
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    sync = Synchronizer(optimizer, build(net, comm))
    trace = []
    for step in range(STEPS):
        net(slope(comm.rank, step)).backward()
        sync.step()
        optimizer.zero_grad()
        with sync.averaged():
            trace.append((net.weight / SCALE).tolist())
    sync.finish()
    return [*trace, (net.weight / SCALE).tolist()]


PAIRS = [  # the fast part runs every update and every kind of peers, in half of the pairs
    pytest.param(row, circle, id=f"{row}-{circle}", marks=pytest.mark.slow if (i + j) % 2 else [])
    for i, row in enumerate(UPDATES)
    for j, circle in enumerate(PEERS)
]


@pytest.mark.few(24)
@pytest.mark.parametrize(("row", "circle"), PAIRS)
def test_every_update_among_every_kind_of_peers(row: Row, circle: Circle) -> None:
    def build(net: nn.Module, comm: offbeat.Communicator) -> list[offbeat.Part]:
        peers = circle.make(comm)
        return [Exchange(params(net), when=Every(EVERY), among=peers, update=row.update, delay=row.delay)]

    def worker(comm: offbeat.Communicator) -> list[list[float]]:
        return run(comm, build)

    if row.stays and circle.changes:
        peers = offbeat.simulate(lambda comm: repr(circle.make(comm)), circle.workers)[0]
        with says(
            ValueError,
            f"update={row.update!r} with among={peers}: the workers of a round must have the same anchor, "
            "but the groups change; use Gossip(SGD(lr=0.7)), whose anchors may differ, or Subgroups(...).",
        ):
            offbeat.simulate(worker, circle.workers)
        return
    for trace in offbeat.simulate(worker, circle.workers):
        for step, (weights, right) in enumerate(zip(trace, expected(row, circle), strict=True), 1):
            assert weights == pytest.approx([right] * 4, abs=1e-9), f"after step {step}"


def test_all_updates_stand_in_the_table() -> None:
    """A new update adds a row."""
    known = {type(row.update) for row in UPDATES}
    exported = {getattr(offbeat, name) for name in offbeat.__all__}
    missing = [
        u for u in exported if isinstance(u, type) and issubclass(u, offbeat.Update) and u not in known
    ]
    assert missing == [offbeat.Update]
    assert {Eager, Overlap} <= known


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_the_last_part_that_shows_something_is_averaged_if_its_groups_differ(order: tuple[int, int]) -> None:
    """One part shows an anchor that everybody has, the other one of its own group's, for the same weights."""

    def build(net: nn.Module, comm: offbeat.Communicator) -> list[offbeat.Part]:
        own = Exchange(params(net), when=Every(2), among=Subgroups(2, comm), update=Outer(SGD(1.0)))
        all_ = Exchange(params(net), when=Every(100), among=World(comm), update=Outer(SGD(1.0)))
        return [[own, all_][i] for i in order]

    traces = offbeat.simulate(lambda comm: run(comm, build), 4)
    assert all(trace == traces[0] for trace in traces)
    walked = [mean([-sum(slope(rank, t) for t in range(step)) for rank in range(4)]) for step in range(1, 8)]
    right = [0.0] * 7 if order == (0, 1) else [0.0, *(walked[step // 2 * 2 - 1] for step in range(2, 8))]
    for step, (weights, number) in enumerate(zip(traces[0][:7], right, strict=True), 1):
        assert weights == pytest.approx([number] * 4), f"after step {step}"

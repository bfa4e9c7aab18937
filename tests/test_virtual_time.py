"""Virtual time: how long workers compute, what messages take on links and uplinks, failures."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from problems import optimizer_for
from sentences import says
from torch import nn

import offbeat
from offbeat import (
    Communicator,
    Constant,
    Failures,
    HeavyTailed,
    Jittered,
    Level,
    Network,
    Recorded,
    Stragglers,
    Uneven,
    simulate,
)
from offbeat.base.draws import uniforms
from offbeat.comm.collective import COLLECTIVES, Crossing
from offbeat.simulate.network import hops, own_bytes

# How long workers compute.

RANKS, STEPS = torch.arange(200)[:, None], torch.arange(500)[None, :]
VALUES = [
    Constant(0.5),
    Jittered(0.5, jitter=0.3, seed=1),
    HeavyTailed(0.5, tail=2.5, seed=2),
    Recorded(((0.1, 0.2, 0.3), (0.4, 0.5))),
    Uneven(Jittered(0.5), (1.0, 2.0, 4.0)),
    Stragglers(Constant(0.5), chance=0.1, delay=2.0),
]


@pytest.mark.parametrize("compute", VALUES, ids=repr)
def test_one_by_one_and_all_at_once_are_the_same(compute: offbeat.Compute) -> None:
    every = compute.seconds(RANKS, STEPS)
    assert every.dtype == torch.float64
    assert every.shape == (200, 500)
    for rank, step in [(0, 0), (0, 499), (3, 255), (3, 256), (199, 257)]:
        assert compute(rank, step) == every[rank, step].item()
    assert torch.equal(every[7:9], compute.seconds(RANKS[7:9], STEPS))


def test_uniform_numbers_are_uniform_and_independent() -> None:
    drawn = uniforms(RANKS, STEPS, 3, "test")
    assert 0 < drawn.min() < 1e-4
    assert 1 - 1e-4 < drawn.max() < 1
    assert abs(drawn.mean().item() - 0.5) < 4 / math.sqrt(12 * drawn.numel())
    counts = torch.histc(drawn, bins=10, min=0, max=1)
    assert (counts - 10_000).abs().max() < 400
    for one, other in [
        (drawn[1:], drawn[:-1]),
        (drawn[:, 1:], drawn[:, :-1]),
        (drawn, uniforms(RANKS, STEPS, 4)),
    ]:
        assert abs(torch.corrcoef(torch.stack([one.flatten(), other.flatten()]))[0, 1]) < 0.015
    assert drawn.unique().numel() == drawn.numel()


def test_jitter_has_the_mean_and_deviation_it_says() -> None:
    drawn = Jittered(0.5, jitter=0.3, seed=1).seconds(RANKS, STEPS)
    assert drawn.mean().item() == pytest.approx(0.5, rel=0.005)
    assert drawn.std().item() == pytest.approx(0.15, rel=0.02)
    assert Jittered(0.5, jitter=0.0)(3, 4) == 0.5


def test_a_heavy_tail_by_hand() -> None:
    """P(t > x) = (least / x)^tail, with least = step · (tail − 1) / tail = 0.3."""
    drawn = HeavyTailed(0.5, tail=2.5, seed=2).seconds(RANKS, STEPS)
    assert 0.3 <= drawn.min() < 0.3001
    assert drawn.mean().item() == pytest.approx(0.5, rel=0.02)
    assert (drawn > 3.0).double().mean().item() == pytest.approx(0.1**2.5, rel=0.1)


def test_a_recording_is_played_again() -> None:
    compute = Recorded(((0.1, 0.2, 0.3), (0.4, 0.5)))
    assert [compute(0, step) for step in range(5)] == [0.1, 0.2, 0.3, 0.1, 0.2]
    assert [compute(1, step) for step in range(3)] == [0.4, 0.5, 0.4]
    third = [compute(2, step) for step in range(3)]
    assert sorted(third) == [0.1, 0.2, 0.3]
    starts = {compute(rank, 0) for rank in range(2, 200, 2)}
    assert starts == {0.1, 0.2, 0.3}  # later players begin anywhere


def test_a_recording_survives_a_file(tmp_path: Path) -> None:
    compute = Recorded(((0.1, 1 / 3), (0.4,)))
    compute.write(tmp_path / "steps.json")
    assert Recorded.read(tmp_path / "steps.json") == compute


def test_uneven_workers_and_stragglers() -> None:
    assert [Uneven(Constant(0.5), (1.0, 3.0))(rank, 9) for rank in range(4)] == [0.5, 1.5, 0.5, 1.5]
    drawn = Stragglers(Constant(0.5), chance=0.1, delay=2.0).seconds(RANKS, STEPS)
    assert set(drawn.unique().tolist()) == {0.5, 2.5}
    assert (drawn > 1).double().mean().item() == pytest.approx(0.1, rel=0.05)


# Links.


def landed(network: Network, call: Callable[[Communicator], object], workers: int = 4) -> list[float]:
    """When each worker has what `call` sends; all begin at 0."""

    def worker(comm: Communicator) -> float:
        call(comm)
        return comm.now()

    return simulate(worker, workers, network=network)


def mean_of(nbytes: int) -> Callable[[Communicator], object]:
    return lambda comm: comm.mean([torch.zeros(nbytes // 4)]).wait()


def test_messages_queue_on_a_link() -> None:
    """400 bytes among four are 600: 6 s at 100 bytes per second. The second waits for the first."""

    def worker(comm: Communicator) -> list[float]:
        first, second = comm.mean([torch.zeros(100)]), comm.mean([torch.zeros(100)])
        second.wait()
        return [comm.now(), first.arrived()]

    network = Network(latency=1.0, bandwidth=100.0)
    assert simulate(worker, 4, network=network) == [[13.0, 7.0]] * 4


def test_other_links_are_free() -> None:
    """Two pairs at once: 400 bytes each, 4 s, whoever else sends."""

    def call(comm: Communicator) -> None:
        comm.split([[0, 1], [2, 3]]).mean([torch.zeros(100)]).wait()

    assert landed(Network(bandwidth=100.0), call) == [4.0] * 4


def test_words_pass_the_queue_by() -> None:
    def worker(comm: Communicator) -> float:
        comm.mean([torch.zeros(10_000)])
        comm.tell([1]).wait()
        return comm.now()

    # 64 bytes to three others.
    assert simulate(worker, 4, network=Network(latency=0.5, bandwidth=192.0)) == [1.5] * 4


def test_the_slowest_link_of_a_group_decides() -> None:
    network = Network(bandwidth=(100.0, 50.0, 200.0, 200.0))
    assert landed(network, mean_of(400)) == [12.0] * 4

    def pairs(comm: Communicator) -> None:
        comm.split([[0, 1], [2, 3]]).mean([torch.zeros(100)]).wait()

    assert landed(network, pairs) == [8.0, 8.0, 2.0, 2.0]


@pytest.mark.parametrize(
    ("reduce", "seconds"),
    [
        ("ideal", 1.0 + 6.0),  # 600 bytes
        ("ring", 2 * 3 * 1.0 + 6.0),
        ("tree", 2 * 2 * 1.0 + 8.0),  # all of it up and down: 800 bytes
        ("direct", 2 * 1.0 + 6.0),
    ],
)
def test_ways_to_reduce(reduce: str, seconds: float) -> None:
    network = Network(latency=1.0, bandwidth=100.0, reduce=reduce)
    assert landed(network, mean_of(400)) == pytest.approx([seconds] * 4)


NODES = (Level(2, bandwidth=50.0, latency=3.0),)


@pytest.mark.parametrize(
    ("reduce", "seconds"),
    [
        # Two nodes of two workers. 400 bytes over the uplinks: reduced inside first, 2·400·(2−1)/2 = 400.
        ("ideal", 3.0 + 400 / 50),
        # The ring has two links inside and two between the nodes, each carrying 600 bytes.
        ("ring", 2 * 3 / 4 * (2 * 1.0 + 2 * 3.0) + 600 / 50),
        ("tree", 2 * (1.0 + 3.0) + 800 / 50),
        # Each of two workers sends a quarter to each of two outside, twice: 2·400·2·2/4 = 800.
        ("direct", 2 * 3.0 + 800 / 50),
    ],
)
def test_ways_to_reduce_across_nodes(reduce: str, seconds: float) -> None:
    network = Network(latency=1.0, bandwidth=100.0, reduce=reduce, levels=NODES)
    assert landed(network, mean_of(400)) == pytest.approx([seconds] * 4)


def test_a_collective_may_get_a_share_of_the_bandwidth() -> None:
    """An all-to-all of 400 bytes among four sends 300: 3 s at 100 bytes per second, 6 at half of them."""

    def call(comm: Communicator) -> None:
        comm.exchange([torch.zeros(25)] * 4).wait()

    assert landed(Network(bandwidth=100.0), call) == [3.0] * 4
    assert landed(Network(bandwidth=100.0, shares=(("exchange", 0.5),)), call) == [6.0] * 4
    assert landed(Network(bandwidth=100.0, shares=(("exchange", 0.5),)), mean_of(400)) == [6.0] * 4


def test_inside_a_node_the_uplink_is_not_used() -> None:
    def inside(comm: Communicator) -> None:
        comm.split([[0, 1], [2, 3]]).mean([torch.zeros(100)]).wait()

    def across(comm: Communicator) -> None:
        comm.split([[0, 2], [1, 3]]).mean([torch.zeros(100)]).wait()

    network = Network(latency=1.0, bandwidth=100.0, levels=NODES)
    assert landed(network, inside) == [1.0 + 4.0] * 4
    # Each pair takes 400 bytes over both uplinks, 8 s; the second pair waits for the first.
    assert landed(network, across) == [3.0 + 8.0, 3.0 + 16.0] * 2


def test_three_levels() -> None:
    """Nodes of 2 in regions of 4: a mean among eight crosses all, one in a region the nodes' links alone."""
    levels = (Level(2, bandwidth=80.0, latency=1.0), Level(4, bandwidth=20.0, latency=10.0))
    network = Network(bandwidth=1000.0, levels=levels)
    # 2·400·(2−1)/2 = 400 bytes between two regions.
    assert landed(network, mean_of(400), workers=8) == [10.0 + 400 / 20] * 8

    def region(comm: Communicator) -> None:
        comm.split([[0, 1, 2, 3], [4, 5, 6, 7]]).mean([torch.zeros(100)]).wait()

    assert landed(network, region, workers=8) == [1.0 + 400 / 80] * 8


def test_what_other_collectives_put_on_links() -> None:
    assert [own_bytes("ring", kind, 4, 400) for kind in ("mean", "gather", "exchange", "broadcast")] == [
        600,
        1200,
        300,
        300,
    ]
    assert own_bytes("tree", "mean", 1, 400) == 0

    def up(reduce: str, kind: str, inside: int = 1) -> float:
        return COLLECTIVES[kind].crosses(reduce, Crossing(400, 4, inside, groups=2))

    assert [up(reduce, "gather") for reduce in ("ideal", "ring", "tree", "direct")] == [
        1200,
        1200,
        1200,
        1200,
    ]
    assert up("direct", "gather", inside=2) == 1600
    assert up("ideal", "gather", inside=2) == 800
    assert [up(reduce, "exchange") for reduce in ("ideal", "direct")] == [300, 300]
    assert up("ring", "broadcast") == 400


def test_latencies_of_a_ring_and_a_tree() -> None:
    """Eight workers in four nodes in two regions: of eight links four are inside a node, two in a region."""
    assert hops("ring", "mean", [8, 4, 2]) == [2 * 7 / 8 * n for n in (4, 2, 2)]
    assert hops("ring", "gather", [2, 1, 1]) == [1.0, 0.0, 0.0]
    assert hops("tree", "mean", [8, 4, 2]) == [2.0, 2.0, 2.0]
    assert hops("tree", "broadcast", [5, 1]) == [3.0, 0.0]
    assert hops("direct", "mean", [8, 4, 1]) == [0.0, 2.0, 0.0]


def test_alone_nothing_takes_time() -> None:
    assert landed(Network(latency=1.0, bandwidth=1.0), mean_of(400), workers=1) == [0.0]


# Failures.


def test_a_failure_by_hand() -> None:
    """Steps of 10 s; failures fall where the gaps say. A worker is back after 100 s, and does again what it
    had done since the last checkpoint, one every 30 s."""
    failures = Failures(per_hour=60.0, restart=100.0, checkpoint=30.0, seed=5)

    def worker(comm: Communicator) -> float:
        for step in range(20):
            comm.worker.computed(step)
        return comm.now()

    expected = []
    for rank in range(3):
        lost, at, number = 0.0, failures.gap(rank, 0), 0
        while at <= 200:
            lost += 100 + at % 30
            number += 1
            at += failures.gap(rank, number)
        expected.append(200 + lost)
    assert len(set(expected)) == 3
    assert simulate(worker, 3, compute=Constant(10.0), failures=failures) == pytest.approx(expected)


def test_failures_come_as_often_as_said() -> None:
    failures = Failures(per_hour=2.0, restart=90.0, checkpoint=60.0)
    gaps = [failures.gap(rank, number) for rank in range(50) for number in range(50)]
    assert sum(gaps) / len(gaps) == pytest.approx(1800, rel=0.05)
    assert failures.cost == 120.0
    assert Failures(per_hour=0.0).gap(0, 0) == math.inf


def test_all_wait_for_the_one_that_failed() -> None:
    def worker(comm: Communicator) -> tuple[float, list[float]]:
        model = nn.Linear(1, 1)
        with offbeat.local_sgd(model, optimizer_for(model), every=2, group=comm) as sync:
            for _ in range(4):
                sync.step()
        return comm.now(), [report.seconds_waited for report in sync.reports]

    gaps = [Failures(per_hour=30.0, seed=3).gap(rank, 0) for rank in range(2)]
    first = min(range(2), key=lambda rank: gaps[rank])
    step = gaps[first] / 2.5  # it falls into the third step of one worker
    assert max(gaps) > 4 * step
    assert Failures(per_hour=30.0, seed=3).gap(first, 1) > 4 * step
    failures = Failures(per_hour=30.0, restart=50.0, seed=3)
    results = simulate(worker, 2, compute=Constant(step), failures=failures)
    assert [now for now, _ in results] == pytest.approx([4 * step + 50] * 2)
    assert results[first][1] == [0.0, 0.0]
    assert results[1 - first][1] == pytest.approx([0.0, 50.0])


# Nonsense.

WRONG: list[tuple[Callable[[], object], str]] = [
    (lambda: Constant(0.0), "Constant(step=0.0): step must be a positive number of seconds."),
    (
        lambda: Jittered(0.1, jitter=-1.0),
        "Jittered(step=0.1, jitter=-1.0, seed=0): jitter is a share of the step, from 0 to 100.",
    ),
    (
        lambda: HeavyTailed(0.1, tail=1.0),
        "HeavyTailed(step=0.1, tail=1.0, seed=0): tail must be a finite number above 1, for a finite mean.",
    ),
    (lambda: Recorded(()), "Recorded(rows): rows must contain at least one row, and each row one step."),
    (lambda: Recorded(((0.1,), (-0.1,))), "Recorded(rows): every step must take 0 seconds or more."),
    (
        lambda: Uneven(Constant(1.0), ()),
        "Uneven(base=Constant(step=1.0), factors=()): factors must be positive numbers, one or more.",
    ),
    (
        lambda: Stragglers(Constant(1.0), 2.0, 1.0),
        "Stragglers(base=Constant(step=1.0), chance=2.0, delay=1.0, seed=0): chance must be from 0 to 1.",
    ),
    (
        lambda: Stragglers(Constant(1.0), 0.5, -1.0),
        "Stragglers(base=Constant(step=1.0), chance=0.5, delay=-1.0, seed=0): "
        "delay must be a number of seconds, 0 or more.",
    ),
    (
        lambda: Failures(-1.0),
        "Failures(per_hour=-1.0, restart=60.0, checkpoint=0.0, seed=0): "
        "per_hour must be a finite number, 0 or more.",
    ),
    (
        lambda: Level(0),
        "Level(workers=0, bandwidth=inf, latency=0.0): workers must be a whole number, at least 1.",
    ),
    (
        lambda: Level(2, bandwidth=-5.0),
        "Level(workers=2, bandwidth=-5.0, latency=0.0): bandwidth must be positive.",
    ),
    (
        lambda: Network(shares=(("exchange", 0.0),)),
        "Network(latency=0.0, bandwidth=inf, shares=(('exchange', 0.0),)): shares are pairs of one of "
        "'mean', 'gather', 'exchange', 'broadcast', 'shift' and a number above 0 and at most 1.",
    ),
    (lambda: Network(bandwidth=()), "Network(latency=0.0, bandwidth=()): bandwidth must be positive."),
    (
        lambda: Network(reduce="star"),
        "Network(latency=0.0, bandwidth=inf, reduce='star'): "
        "reduce must be one of 'ideal', 'ring', 'tree', 'direct'.",
    ),
    (
        lambda: Network(levels=(Level(4), Level(6))),
        "Network(latency=0.0, bandwidth=inf, levels=(Level(workers=4, bandwidth=inf, latency=0.0), "
        "Level(workers=6, bandwidth=inf, latency=0.0))): groups of 6 must be made of whole groups of 4.",
    ),
    (
        lambda: simulate(print, 3, network=Network(bandwidth=(1.0, 2.0))),
        "Network(latency=0.0, bandwidth=(1.0, 2.0)): it has 2 links for 3 workers.",
    ),
]


@pytest.mark.parametrize(("make", "sentence"), WRONG, ids=[sentence.split(":")[0] for _, sentence in WRONG])
def test_sentences(make: Callable[[], object], sentence: str) -> None:
    with says(ValueError, sentence):
        make()


def test_a_file_that_is_no_recording(tmp_path: Path) -> None:
    path = tmp_path / "steps.json"
    path.write_text("[0.1, 0.2]")
    reason = "this is not a list of seconds for every worker ('float' object is not iterable)"
    with says(ValueError, f"Recorded.read(path={str(path)!r}): {reason}."):
        Recorded.read(path)

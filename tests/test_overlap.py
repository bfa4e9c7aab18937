"""Messages behind compute: DaSGD, CoCoD, Overlap Local SGD, Eager DiLoCo."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from slopes import Walk, composed, odd, walked
from torch import Tensor, nn

import offbeat

# Closed forms, worked out by hand.


def test_dasgd() -> None:
    # Slopes 1 and 3; sent after steps 2, 4, 6, landing a step later as x ← 0.5·x + 0.5·mean.
    # sent −2, −6: mean −4.        step 3: −3, −9           → −3.5, −6.5
    # sent −4.5, −9.5: mean −7.    step 5: −5.5, −12.5      → −6.25, −9.75
    # sent −7.25, −12.75: mean −10, which finish() lands    → −8.625, −11.375, and their mean is −10
    first, second = walked("dasgd(every=2, delay=1, keep=0.5)", 6)
    assert first == [-1, -2, -3.5, -4.5, -6.25, -7.25, -10]
    assert second == [-3, -6, -6.5, -9.5, -9.75, -12.75, -10]


def test_dasgd_keeps_so_much_of_the_local_progress() -> None:
    # mean −4 at step 3: 0.25·(−3) + 0.75·(−4) = −3.75 and 0.25·(−9) − 3 = −5.25
    first, second = walked("dasgd(every=2, delay=1, keep=0.25)", 3)
    assert (first[2], second[2]) == (-3.75, -5.25)


def test_cocod() -> None:
    # The same, landing as x ← x + mean − sent.
    # sent −2, −6: mean −4.      step 3: −3 − 2, −9 + 2     = −5, −7
    # sent −6, −10: mean −8.     step 5: −7 − 2, −13 + 2    = −9, −11
    # sent −10, −14: mean −12, which finish() lands: −12 on both
    first, second = walked("cocod(every=2, delay=1)", 6)
    assert first == [-1, -2, -5, -6, -9, -10, -12]
    assert second == [-3, -6, -7, -10, -11, -14, -12]


def test_overlap_local_sgd() -> None:
    # Slopes 1 and 3, two steps of lr 1 to a boundary; pull and momentum 0.5.
    # 1: z = 0      x = −2, −6       → −1, −3         v = 1, 3                          send −1, −3: −2
    # 2: z = −2     x = −3, −9       → −2.5, −5.5     v = 0.5 + 0.5, 1.5 + 3.5 = 1, 5   send −3, −7: −5
    # 3: z = −5     x = −4.5, −11.5  → −4.75, −8.25   v = 0.5 − 0.25, 2.5 + 3.25 = 0.25, 5.75
    #                                                                                   send −5.25, −10.75: −8
    # 4: z = −8     x = −6.75, −14.25 → −7.375, −11.125, whose mean is −9.25
    first, second = walked("overlap_local_sgd(every=2, pull=0.5, momentum=0.5)", 8)
    assert first == [-1, -1, -2, -2.5, -3.5, -4.75, -5.75, -7.375, -9.25]
    assert second == [-3, -3, -6, -5.5, -8.5, -8.25, -11.25, -11.125, -9.25]


def test_overlap_local_sgd_pulls_by_so_much() -> None:
    # z = 0 at the first boundary: x ← 0.25·x.
    first, second = walked("overlap_local_sgd(every=2, pull=0.75, momentum=0.5)", 2)
    assert (first[1], second[1]) == (-0.5, -1.5)


@pytest.mark.parametrize(("pull", "momentum"), [(0.2, 0.6), (0.6, 0.7)])
def test_how_far_overlap_local_sgd_moves(pull: float, momentum: float) -> None:
    """At a constant slope, by (1 − pull)/(1 − pull·momentum) of a period in each round."""
    method = f"overlap_local_sgd(every=2, pull={pull}, momentum={momentum})"
    for trace in walked(method, 60, slope=lambda rank, step: 1.0):
        assert trace[57] - trace[59] == pytest.approx(2 * (1 - pull) / (1 - pull * momentum), rel=1e-4)


def test_overlap_local_sgd_at_a_changing_rate() -> None:
    # One worker on slope 1 with a boundary after every step; pull and momentum 0.5.
    # γ = 1:    z = 0       x = −1 → −0.5           v = 0.5                           send −0.5
    # γ = 0.5:  z = −0.5    x = −1 → −0.75          r = 0.5: v = 0.125 + 0.25         send −0.875
    # γ = 0:    z = −0.875  x = −0.75 → −0.8125     v ← 0.5·0.375 = 0.1875            send x = −0.8125
    # γ = 1:    z = −0.8125 x = −1.8125 → −1.3125   r = 1/0.5: v = 0.1875 + 0.5       send −1.5
    rates = [1, 0.5, 0, 1]

    def worker(comm: offbeat.Communicator) -> list[tuple[float, float]]:
        walk = Walk(
            comm,
            "overlap_local_sgd(every=1, pull=0.5, momentum=0.5)",
            slope=lambda rank, step: 1.0,
            lr=lambda step: [rates[step]],
        )
        return [(walk.go()[0], walk.state()["momentum"][0].item()) for _ in rates]

    trace = [(-0.5, 0.5), (-0.75, 0.375), (-0.8125, 0.1875), (-1.3125, 0.6875)]
    assert offbeat.simulate(worker, 1) == [trace]


def varying(rank: int, step: int) -> float:
    """Rounds of two steps with displacements 2, 4, 2 of rank 0 and 6, 4, 10 of rank 1; then 1 and 3."""
    return ([1, 2, 1, 1], [3, 2, 5, 3])[rank][step // 2]


def eager_walks(method: str) -> tuple[list[float], list[float], float]:
    """The weights of both workers after each of seven steps and at the end, and the outer momentum there."""

    def worker(comm: offbeat.Communicator) -> tuple[list[float], float, list[int]]:
        walk = Walk(comm, method, slope=varying)
        trace = [*walk.go(7), walk.finish()]
        buffer = walk.state()["outer"]["state"][0]["momentum_buffer"].item()
        assert walk.state()["anchor"][0].item() == walk.weight
        return trace, buffer, walk.rounds

    (first, b, rounds), (second, also, _) = offbeat.simulate(worker, 2)
    assert b == also
    assert rounds[:3] == [2, 4, 6]
    return first, second, b


def test_eager_diloco() -> None:
    # Δ̄ = 4, 4, 6. Outer lr 0.5, momentum 0.5.
    #                D_0, D_1
    # round 1:       2,                      6
    # round 2:       4 + (4 − 2) = 6,        4 + (4 − 6) = 2
    # round 3:       4 + (2 − 4) = 2,        4 + (10 − 4) = 10
    #
    # worker 0: b = 2       d = 3         a = −1.5            worker 1: b = 6       d = 9        a = −4.5
    #           b = 7       d = 9.5       a = −6.25                     b = 5       d = 4.5      a = −6.75
    #           b = 5.5     d = 4.75      a = −8.625                    b = 12.5    d = 16.25    a = −14.875
    # finish():      6 − 2 = 4 and 6 − 10 = −4 are unused. After the open step, x = −9.625 and −17.875, so
    # x = −13.625 and −13.875, with mean −13.75. The mean of b is 9.
    # In every round the mean of D is Δ̄, so the mean of x is DiLoCo's.
    first, second, b = eager_walks("eager_diloco(every=2, lr=0.5, momentum=0.5, ramp=0, share=1.0)")
    assert first == [-1, -1.5, -3.5, -6.25, -7.25, -8.625, -9.625, -13.75]
    assert second == [-3, -4.5, -6.5, -6.75, -11.75, -14.875, -17.875, -13.75]
    assert b == 9
    plain = walked("diloco(every=2, lr=0.5, momentum=0.5, ramp=0)", 7, slope=varying)
    means = [[(x + y) / 2 for x, y in zip(*traces, strict=True)] for traces in ((first, second), plain)]
    assert means[0] == means[1]


def test_eager_diloco_as_in_the_paper() -> None:
    # Δ̄ = 4, 4, 6. K = 2; outer lr 0.5, momentum 0.5.
    #                D_0, D_1
    # round 1:       2/2 = 1,                6/2 = 3
    # round 2:       4 + (4 − 2)/2 = 5,      4 + (4 − 6)/2 = 3
    # round 3:       4 + (2 − 4)/2 = 3,      4 + (10 − 4)/2 = 7
    #
    # worker 0: b = 1       d = 1.5       a = −0.75           worker 1: b = 3       d = 4.5      a = −2.25
    #           b = 5.5     d = 7.75      a = −4.625                    b = 4.5     d = 5.25     a = −4.875
    #           b = 5.75    d = 5.875     a = −7.5625                   b = 9.25    d = 11.625   a = −10.6875
    # finish():      6 − 2/2 = 5 and 6 − 10/2 = 1 are unused. After the open step, x = −8.5625 and −13.6875,
    # so x = −13.5625 and −14.6875, with mean −14.125. The mean of b is 7.5.
    first, second, b = eager_walks("eager_diloco(every=2, lr=0.5, momentum=0.5, ramp=0, share=0.0)")
    assert first == [-1, -0.75, -2.75, -4.625, -5.625, -7.5625, -8.5625, -14.125]
    assert second == [-3, -2.25, -4.25, -4.875, -9.875, -10.6875, -13.6875, -14.125]
    assert b == 7.5


def test_the_ramp_of_eager_diloco() -> None:
    # As in the paper, with momenta 1/4, 2/5, 1/2.
    # worker 0: b = 1       d = 1.25      a = −0.625          worker 1: b = 3       d = 3.75     a = −1.875
    #           b = 5.4     d = 7.16      a = −4.205                    b = 4.2     d = 4.68     a = −4.215
    #           b = 5.7     d = 5.85      a = −7.13                     b = 9.1     d = 11.55    a = −9.99
    # finish():      x = −8.13 − 5 and −12.99 − 1, with mean −13.56.
    method = "eager_diloco(every=2, lr=0.5, momentum=0.9, ramp=3, share=0.0)"
    first, second = walked(method, 7, slope=varying)
    assert first[1::2] == pytest.approx([-0.625, -4.205, -7.13, -13.56], rel=1e-14)
    assert second[1::2] == pytest.approx([-1.875, -4.215, -9.99, -13.56], rel=1e-14)
    # Before the first round, finish() is a mean.
    assert [trace[-1] for trace in walked(method, 1, slope=varying)] == [-2, -2]


COVERED = torch.tensor([0.25, 0.3, 0.5, 0.75, 1.0], dtype=torch.float64)


class Bowl(nn.Module):
    """A quadratic, from 1 in each direction: a step covers these shares of the way to the minimum."""

    def __init__(self, minimum: float) -> None:
        super().__init__()
        self.minimum = minimum
        self.x = nn.Parameter(torch.ones(len(COVERED), dtype=torch.float64))

    def forward(self) -> Tensor:
        return (COVERED * (self.x - self.minimum).square() / 2).sum()


def bowls(method: str, minima: list[float], rounds: int) -> list[list[list[float]]]:
    """x of every worker after every round, each of one step. Each worker has a minimum of its own."""

    def worker(comm: offbeat.Communicator) -> list[list[float]]:
        net = Bowl(minima[comm.rank])
        opt = torch.optim.SGD(net.parameters(), lr=1.0)
        sync = offbeat.method(method)(net, opt, group=comm)
        trace = []
        for _ in range(rounds):
            net().backward()
            sync.step()
            opt.zero_grad()
            trace.append(net.x.tolist())
        return trace

    return offbeat.simulate(worker, len(minima))


LR, MOMENTUM = 0.7, 0.9  # the defaults of eager_diloco


def recursion(now: float, before: float) -> Tensor:
    """The matrix that takes (y(r), y(r−1), m(r−1)) to (y(r+1), y(r), m(r)).

    D is now·y(r) + before·y(r−1).
    """
    fed = torch.tensor([now, before, 0.0], dtype=torch.float64)
    velocity = fed + torch.tensor([0.0, 0.0, MOMENTUM], dtype=torch.float64)
    y = torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64)
    return torch.stack([y - LR * (fed + MOMENTUM * velocity), y, velocity])


def iterate(now: float, before: float, rounds: int) -> list[float]:
    """y(1), y(2), … from y(0) = 1, where nothing came before."""
    states = [torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64)]
    for _ in range(rounds):
        states.append(recursion(now, before) @ states[-1])
    return [state[0].item() for state in states[1:]]


@pytest.mark.few(4)
@pytest.mark.parametrize("workers", [1, 2, 4, 8])
@pytest.mark.parametrize("share", [0.0, 0.75, 1.0])
def test_eager_diloco_on_quadratics_is_a_linear_recursion(share: float, workers: int) -> None:
    """Let the minima have mean 0, and Δ_k = c·y_k. The mean ȳ and the differences y_k − ȳ evolve separately:

    D̄ = c·(s·ȳ(r) + (1 − s)·ȳ(r−1)) and D_k − D̄ = c·s·(d_k(r) − d_k(r−1)) with d_k = y_k − ȳ.
    """
    minima = [2 * rank / max(1, workers - 1) - 1 if workers > 1 else 0.0 for rank in range(workers)]
    traces = bowls(f"eager_diloco(every=1, ramp=0, share={share})", minima, 16)
    used = max(share, 1 / workers)
    for i, covered in enumerate(COVERED.tolist()):
        mean = iterate(covered * used, covered * (1 - used), 16)
        apart = iterate(covered * used, -covered * used, 16)
        for minimum, trace in zip(minima, traces, strict=True):
            expected = [y + minimum * (1 - d) for y, d in zip(mean, apart, strict=True)]
            assert [xs[i] for xs in trace] == pytest.approx(expected, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize(
    ("used", "mean", "apart"),
    [
        (1 / 8, 0.457, 7.755),
        (1 / 4, 0.594, 3.877),
        (1 / 2, 1.099, 1.938),
        (0.75, 2.624, 1.292),
        (1.0, 1.938, 0.969),
    ],
)
def test_where_eager_diloco_is_stable(used: float, mean: float, apart: float) -> None:
    """The figures of docs/methods.md: how much of the way to the minimum a period may cover."""

    def radius(covered: float, before: float) -> float:
        roots = torch.linalg.eigvals(recursion(covered * used, covered * before))
        return float(roots[(roots - 1).abs() > 1e-9].abs().max())  # differences that stay have the root 1

    for limit, before in ((mean, 1 - used), (apart, -used)):
        assert all(radius(limit * i / 100, before) < 1 for i in range(1, 100))
        assert radius(limit + 0.002, before) > 1


def test_eager_diloco_of_one_is_diloco() -> None:
    for outer in ("lr=0.5, momentum=0.5", "lr=1.0, momentum=0.0"):
        (eager,) = walked(f"eager_diloco(every=2, {outer})", 6, workers=1, slope=varying)
        (plain,) = walked(f"diloco(every=2, {outer})", 6, workers=1, slope=varying)
        assert eager[:-1] == plain[:-1]


@dataclass
class Fed:
    """Makes an outer SGD with lr 1, and adds up what it is fed."""

    gradients: list[float] = field(default_factory=list, repr=False)

    def __call__(self, tensors: list[Tensor]) -> torch.optim.Optimizer:
        self.gradients.append(tensors[0].grad.item())
        return torch.optim.SGD(tensors, lr=1.0)


@pytest.mark.parametrize("workers", [1, 2, 4])
@pytest.mark.parametrize("steps", [1, 2, 3, 4, 5, 6])
def test_eager_workers_end_at_the_sum_of_all_mean_displacements(workers: int, steps: int) -> None:
    def slope(rank: int, step: int) -> float:
        return float((3 * rank + 1) * (step + 2) % 7)

    def worker(comm: offbeat.Communicator) -> float:
        fed = Fed()
        walk = Walk(comm, composed(offbeat.Eager(fed), delay="round"), slope=slope, lr=0.25)
        walk.go(steps)
        end = walk.finish()
        assert len(fed.gradients) == steps // 2
        return end

    mean = sum(0.25 * slope(rank, step) for rank in range(workers) for step in range(steps)) / workers
    assert offbeat.simulate(worker, workers) == [-mean] * workers


class Shapes(nn.Module):
    """A scalar, a vector and a matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList([torch.zeros(()), torch.zeros(3), torch.zeros(2, 2)])

    def forward(self, slope: float) -> Tensor:
        return slope * sum(weight.sum() for weight in self.weights)


@pytest.mark.parametrize("momentum", [0.5, 0.0])
@pytest.mark.parametrize("steps", [5, 6])
def test_eager_outer_buffers_are_equal_after_finish(momentum: float, steps: int) -> None:
    def worker(comm: offbeat.Communicator) -> list[list[Tensor]]:
        net = Shapes()
        opt = torch.optim.SGD(net.parameters(), lr=0.25)
        sync = offbeat.eager_diloco(net, opt, every=2, lr=0.5, momentum=momentum, group=comm)
        for step in range(steps):
            net(odd(comm.rank, step) * (1 + step % 3)).backward()
            sync.step()
            opt.zero_grad()
        before = buffers(sync)
        sync.finish()
        return [before, buffers(sync), list(sync.state_dict()["parts"][0]["states"]["update"]["anchor"])]

    def buffers(sync: offbeat.Synchronizer) -> list[Tensor]:
        outer = sync.state_dict()["parts"][0]["states"]["update"]["outer"]["state"]
        return [value for state in outer.values() for value in state.values() if value is not None]

    results = offbeat.simulate(worker, 4)
    assert len(results[0][1]) == (3 if momentum else 0)
    for before, after, anchor in results[1:]:
        assert not any(map(torch.equal, before, results[0][0]))
        assert all(map(torch.equal, after, results[0][1]))
        assert all(map(torch.equal, anchor, results[0][2]))


def test_eager_goes_on_from_a_finished_run_without_feeding_twice() -> None:
    """With outer lr 1 and no momentum, the weights are always minus all that was fed."""

    def worker(comm: offbeat.Communicator) -> float:
        first = Walk(comm, "eager_diloco(every=2, lr=1.0, momentum=0.0)")
        first.go(5)
        first.finish()
        second = Walk(comm, "eager_diloco(every=2, lr=1.0, momentum=0.0)")
        second.net.load_state_dict(first.net.state_dict())
        second.sync.load_state_dict(first.sync.state_dict())
        second.go(3)
        return second.finish()

    assert offbeat.simulate(worker, 4) == [-32.0] * 4  # eight steps of mean slope 4


def test_the_last_act_of_eager_counts_in_the_totals() -> None:
    def worker(comm: offbeat.Communicator) -> tuple[int, int]:
        net = nn.Linear(100, 10, bias=False)
        opt = torch.optim.SGD(net.parameters(), lr=0.1)
        sync = offbeat.eager_diloco(net, opt, every=2, momentum=0.5, group=comm)
        for _ in range(3):
            net(torch.full((1, 100), 0.1 * (1 + comm.rank))).sum().backward()
            sync.step()
        before = sync.totals.bytes_sent
        sync.finish()
        return sync.totals.bytes_sent - before, sync.totals.rounds

    # The landing round, and the means of the outer momentum and of the weights: 4 000 bytes each.
    for sent, rounds in offbeat.simulate(worker, 2):
        assert 12_000 <= sent < 12_500
        assert rounds == 2


# Consensus and the end.

LATE = [
    "dasgd(every=2, delay=1)",
    "cocod(every=2, delay=1)",
    "overlap_local_sgd(every=2)",
]


@pytest.mark.parametrize("expression", LATE)
def test_averaged_shows_the_mean_of_the_live_weights(expression: str) -> None:
    def worker(comm: offbeat.Communicator) -> tuple[float, float]:
        walk = Walk(comm, expression)
        walk.go(4)
        return walk.weight, walk.shown()

    (first, shown), (second, also) = offbeat.simulate(worker, 2)
    assert first != second
    assert shown == also == pytest.approx((first + second) / 2, rel=1e-15)


def test_the_anchor_of_overlap_follows_at_the_end() -> None:
    def worker(comm: offbeat.Communicator) -> tuple[float, float]:
        walk = Walk(comm, "overlap_local_sgd(every=2)")
        walk.go(5)
        return walk.finish(), walk.state()["anchor"][0].item()

    ((first, anchor), (second, also)) = offbeat.simulate(worker, 2)
    assert first == second == anchor == also


@pytest.mark.parametrize("expression", [*LATE, "eager_diloco(every=2)"])
@pytest.mark.parametrize("steps", [1, 4, 5])
def test_replicas_are_equal_after_finish(expression: str, steps: int) -> None:
    first, second = walked(expression, steps)
    assert first[-2] != second[-2]
    assert first[-1] == second[-1]


@pytest.mark.parametrize("build", [lambda c: c, offbeat.Metered])
def test_nobody_waits_for_a_message_behind_enough_compute(
    build: Callable[[offbeat.Communicator], offbeat.Communicator],
) -> None:
    """Three seconds in flight, a second per step, four steps to a round."""

    def worker(comm: offbeat.Communicator, expression: str) -> float:
        walk = Walk(build(comm), expression)
        walk.go(12)
        return sum(report.seconds_waited for report in walk.sync.reports)

    def waited(expression: str) -> list[float]:
        return offbeat.simulate(
            lambda comm: worker(comm, expression),
            2,
            network=offbeat.Network(latency=3.0),
            compute=lambda rank, step: 1.0,
        )

    for expression in ("eager_diloco(every=4)", "overlap_local_sgd(every=4)", "cocod(every=4, delay=3)"):
        assert waited(expression) == [0.0, 0.0]
    assert min(waited("diloco(every=4)")) > 0

"""Protection of a round: displacements that are clipped, and workers that are left out of a round."""

from __future__ import annotations

import logging
import math
from typing import Any

import pytest
import torch
from conftest import Pool
from problems import reloaded, same, simulated
from sentences import says
from torch import nn

import offbeat
from offbeat import SGD, Outer


class Line(nn.Module):
    """Two weights; their gradient is what the worker says."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, dtype=torch.float64))
        self.other = nn.Parameter(torch.zeros(1, dtype=torch.float64))


def walk(
    comm: offbeat.Communicator, expression: str, steps: list[list[float]], **options: Any
) -> list[float]:
    """The first weight after each step. Both weights climb by 3/5 and 4/5 of what the worker's row says."""
    net, trace = Line(), []
    opt = torch.optim.SGD(net.parameters(), lr=1.0, momentum=options.pop("momentum", 0.0))
    sync = offbeat.method(expression)(net, opt, group=comm)
    for size in steps[comm.rank]:
        opt.zero_grad()
        (-size * (0.6 * net.weight + 0.8 * net.other).sum()).backward()
        sync.step(**options)
        trace.append(round(net.weight.item() / 0.6, 5))
    return trace


def walks(expression: str, *steps: list[float], **options: Any) -> list[list[float]]:
    return offbeat.simulate(lambda comm: walk(comm, expression, list(steps), **options), len(steps))


def test_a_long_displacement_is_clipped() -> None:
    """Lengths 1 and 8, of which 2 is sent: (1 + 2)/2, over both weights together."""
    assert walks("diloco(every=1, lr=1.0, momentum=0.0, clip=2.0)", [1], [8]) == [[1.5], [1.5]]
    assert walks("diloco(every=1, lr=1.0, momentum=0.0, clip=9.0)", [1], [8]) == [[4.5], [4.5]]


def test_clips_that_are_no_length() -> None:
    for clip in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match=r"clip must be a positive number, or None\.$"):
            Outer(SGD(0.7), clip=clip)
    assert repr(Outer(SGD(0.7))) == "Outer(optimizer=" + repr(SGD(0.7)) + ", keep=0.0, device=None)"


AVERAGES = ["local_sgd(every=1, guard=3.0)", "local_sgd(every=1, drift=False, guard=3.0)"]
ANCHORED = [
    "diloco(every=1, lr=1.0, momentum=0.0, guard=3.0)",
    "slowmo(every=1, lr=1.0, momentum=0.0, guard=3.0)",
    "local_sgd(every=1, reduce=TopK(1, least=1), guard=3.0)",
]


@pytest.mark.parametrize("expression", AVERAGES + ANCHORED)
def test_an_outlier_is_left_out_of_one_round(expression: str, caplog: pytest.LogCaptureFixture) -> None:
    """Nine rounds of 1 each make m = 1, s = 0.05: more than 1.15 is out. Rank 1 then jumps by 9."""
    usual = [1.0] * 9
    with caplog.at_level(logging.WARNING):
        one, two = walks(expression, [*usual, 1.0, 1.0], [*usual, 9.0, 1.0])
    assert one == two
    assert one[-2:] == [10.0, 11.0]  # rank 0 alone counts, then both again
    lines = [record.getMessage() for record in caplog.records]
    assert lines == ["Round 9 (step 10) goes on without rank 1: it has moved much further than usual."] * 2
    # Just inside, it counts: (1 + 1.14)/2.
    assert walks(expression, [*usual, 1.0], [*usual, 1.14])[0][-1] == 10.07
    # In the first eight rounds there is too little history to judge by.
    assert walks(expression, [1.0] * 8, [*usual[:7], 9.0])[0][-1] == 12.0
    assert walks(expression, [1.0] * 9, [*usual[:8], 9.0])[0][-1] == 9.0


@pytest.mark.parametrize("expression", AVERAGES + ANCHORED)
def test_a_worker_that_is_not_finite_comes_back(expression: str) -> None:
    """From the first round on, and its optimizer forgets the gradient, which momentum would keep."""
    one, two = walks(expression, [1.0, 1.0], [math.nan, 1.0], momentum=0.5)
    assert one == two
    # Rank 0 walks 1, then 1.5; rank 1, whose momentum begins again, walks 1.
    assert one == [1.0, 2.25]


def test_three_of_four_are_divided_by_three() -> None:
    rows = [[1.0], [4.0], [math.inf], [7.0]]
    assert walks("local_sgd(every=1, guard=3.0)", *rows)[2] == [4.0]
    # With samples, by theirs: (1·1 + 4·1 + 7·1)/3, and the dropped worker's do not count.
    assert walks("local_sgd(every=1, guard=3.0)", *rows, samples=5)[2] == [4.0]


@pytest.mark.parametrize("expression", [*AVERAGES, *ANCHORED, "local_sgd(every=1, delay=1, guard=3.0)"])
@pytest.mark.parametrize("options", [{}, {"samples": 2}])
def test_if_all_are_left_out_they_return_to_where_the_period_began(
    expression: str, options: dict[str, Any]
) -> None:
    one, two = walks(expression, [1.0, math.nan, 1.0, 1.0], [1.0, math.nan, 1.0, 1.0], **options)
    assert one[2:] == two[2:]
    assert math.isfinite(one[-1])
    if "delay" not in expression:
        assert one == [1.0, 1.0, 2.0, 3.0]


@pytest.mark.parametrize("delay", [1, 2, "'round'"])
def test_a_delayed_round_brings_the_whole_result(delay: object) -> None:
    """The worker whose weights were not finite takes the mean, not a shift of what it had."""
    expression = f"local_sgd(every=2, delay={delay}, gain=0.25, guard=3.0)"
    one, two = walks(expression, [1.0] * 6, [1.0, math.nan, 1.0, 1.0, 1.0, 1.0])
    assert all(map(math.isfinite, one))
    assert math.isfinite(two[-1])


def test_a_lasting_change_is_accepted_in_time() -> None:
    """Rank 1 makes steps of 2 from now on. Outliers enter its history at the limit, which therefore grows."""

    def worker(comm: offbeat.Communicator) -> list[tuple[int, ...]]:
        net = Line()
        opt = torch.optim.SGD(net.parameters(), lr=1.0)
        sync = offbeat.local_sgd(net, opt, every=1, guard=3.0, group=comm)
        for step in range(30):
            opt.zero_grad()
            (-(2.0 if comm.rank and step >= 10 else 1.0) * net.weight.sum()).backward()
            sync.step()
        return [report.dropped for report in sync.reports]

    for dropped in offbeat.simulate(worker, 2):
        first = next(i for i, ranks in enumerate(dropped) if ranks)
        assert first == 10
        assert dropped[first] == (1,)
        assert 3 <= sum(map(len, dropped)) <= 15
        assert not any(dropped[-5:])


@pytest.mark.parametrize(
    "expression",
    [
        "local_sgd(every=3, moments='average', guard=3.0)",
        "diloco(every=3, lr=0.5, momentum=0.5, ramp=0, guard=3.0)",
        "hierarchical(nodes=2, inner=1, outer=4, guard=3.0)",
        "diloco(every=3, lr=0.5, momentum=0.5, ramp=0, clip=1e9)",
    ],
)
def test_if_nobody_is_left_out_nothing_changes(expression: str) -> None:
    plain = expression.replace(", guard=3.0", "").replace(", clip=1e9", "")
    for a, b in zip(simulated(expression), simulated(plain), strict=True):
        assert all(same(x, y) for x, y in zip(a, b, strict=True))


def jump(comm: offbeat.Communicator, expression: str, cut: int | None = None) -> list[float]:
    """Rank 1 jumps in the tenth of twelve rounds."""
    net, trace = Line(), []
    opt = torch.optim.SGD(net.parameters(), lr=1.0)
    sync = offbeat.method(expression)(net, opt, group=comm)
    for step in range(12):
        if step == cut:
            weights, state = reloaded(net.state_dict(), sync.state_dict())
            net = Line()
            net.load_state_dict(weights)
            opt = torch.optim.SGD(net.parameters(), lr=1.0)
            sync = offbeat.method(expression)(net, opt, group=comm)
            sync.load_state_dict(state)
        opt.zero_grad()
        (-(64.0 if comm.rank and step == 9 else 1.0) * net.weight.sum()).backward()
        sync.step()
        trace.append(net.weight.item())
    return trace


@pytest.mark.parametrize(
    "expression", ["local_sgd(every=1, delay=1, guard=3.0)", "diloco(every=1, guard=3.0)"]
)
@pytest.mark.parametrize("cut", [4, 9, 10])
def test_the_history_is_in_the_checkpoint(expression: str, cut: int) -> None:
    whole = offbeat.simulate(lambda comm: jump(comm, expression), 2)
    assert whole == offbeat.simulate(lambda comm: jump(comm, expression, cut), 2)


def test_simulation_equals_gloo(pool: Pool) -> None:
    expression = "diloco(every=1, lr=1.0, momentum=0.0, guard=3.0)"
    assert pool.run(jump, expression) == offbeat.simulate(lambda comm: jump(comm, expression), 4)


REFUSED = [
    ("local_sgd(guard=0.0)", "guard=0.0: guard is the limit of z, a positive number, such as 3.0."),
    ("local_sgd(guard=-1)", "guard=-1: guard is the limit of z, a positive number, such as 3.0."),
    (
        "overlap_local_sgd(every=2, pull=0.5, momentum=0.5, guard=3.0)",
        "guard=3.0 with params(2 tensors) and update=Overlap(pull=0.5, momentum=0.5): a worker can only be "
        "left out of a round that averages parameters, or steps an anchor along displacements: omit guard.",
    ),
]


@pytest.mark.parametrize(("expression", "sentence"), REFUSED)
def test_guards_that_cannot_be(expression: str, sentence: str) -> None:
    net = Line()
    with says(ValueError, sentence):
        offbeat.method(expression)(net, torch.optim.SGD(net.parameters(), lr=1.0), group=offbeat.Solo())


class Counting(Line):
    """With a buffer that rounds average."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.full((1,), 5.0, dtype=torch.float64))


def counted(comm: offbeat.Communicator, expression: str, steps: list[list[float]], **sgd: Any) -> list[float]:
    """The first weight and the buffer in the end. A step of NaN makes the buffer NaN as well."""
    net = Counting()
    opt = torch.optim.SGD(net.parameters(), lr=1.0, **sgd)
    sync = offbeat.method(expression)(net, opt, group=comm)
    for size in steps[comm.rank]:
        opt.zero_grad()
        (-size * (0.6 * net.weight + 0.8 * net.other).sum()).backward()
        if math.isnan(size):
            net.seen.fill_(math.nan)
        sync.step()
    sync.join()
    return [round(net.weight.item() / 0.6, 5), net.seen.item()]


def test_buffers_stay_if_everyone_is_left_out() -> None:
    rows = [[1.0] * 9 + [100.0]] * 2
    for method in ("local_sgd(every=1, guard=3.0)", "diloco(every=1, lr=1.0, momentum=0.0, guard=3.0)"):
        assert offbeat.simulate(lambda comm, m=method: counted(comm, m, rows), 2) == [[9.0, 5.0]] * 2


@pytest.mark.parametrize("delay", [0, 1])
def test_buffers_of_a_broken_worker_do_not_spread(delay: int) -> None:
    """Worker 0 makes six steps; worker 1 makes NaN of its weights and buffer in the third."""
    rows = [[1.0] * 6, [1.0, 1.0, math.nan, 1.0, 1.0, 1.0]]
    method = f"local_sgd(every=2, delay={delay}, guard=3.0)"
    for weight, seen in offbeat.simulate(lambda comm: counted(comm, method, rows), 2):
        assert math.isfinite(weight)
        assert seen == 5.0


def test_a_broken_worker_while_the_others_are_dry() -> None:
    """Worker 1 is dry from the third step on: nobody counts, and worker 0 takes the weights of worker 1."""
    rows = [[1.0, 1.0, math.nan, 1.0], [1.0, 1.0]]
    found = offbeat.simulate(lambda comm: counted(comm, "local_sgd(every=2, guard=3.0)", rows), 2)
    assert found == [[2.0, 5.0]] * 2


def test_a_broken_worker_begins_with_fresh_moments() -> None:
    """SGD creates its momentum at the first step: a reset deletes it, after the mean has arrived."""
    rows = [[1.0] * 6, [1.0, 1.0, math.nan, 1.0, 1.0, 1.0]]
    method = "local_sgd(every=2, guard=3.0, moments='average')"
    for weight, _ in offbeat.simulate(
        lambda comm: counted(comm, method, rows, momentum=0.5, dampening=0.1), 2
    ):
        assert math.isfinite(weight)


def test_buffers_of_rank_0_are_not_followed() -> None:
    net = Counting()
    with pytest.raises(ValueError, match=r'guard=3\.0 with buffers="follow": all workers would take'):
        offbeat.local_sgd(net, torch.optim.SGD(net.parameters(), lr=1.0), guard=3.0, buffers="follow")


class Masked(Counting):
    """Also with a mask, whose infinities have always been there."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.tensor([0.0, -math.inf]))


@pytest.mark.parametrize("method", [AVERAGES[0], ANCHORED[0], "local_sgd(every=1, delay=1, guard=3.0)"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_worker_whose_buffers_are_not_finite_is_left_out(method: str, bad: float) -> None:
    """Its weights are fine: a step that a scaler has skipped, after a forward pass that was not finite."""

    def worker(comm: offbeat.Communicator) -> tuple[list[Any], list[float], bool]:
        net = Masked()
        opt = torch.optim.SGD(net.parameters(), lr=1.0)
        sync = offbeat.method(method)(net, opt, group=comm)
        for step in range(6):
            opt.zero_grad()
            (-net.weight.sum()).backward()
            if comm.rank == 1 and step in (2, 3):
                net.seen.fill_(bad)
            sync.step()
        sync.finish()
        dropped = [(report.round, report.dropped) for report in sync.reports if report.dropped]
        return dropped, [net.seen.item(), net.weight.item()], bool(net.mask[1] == -math.inf)

    for dropped, (seen, weight), masked in offbeat.simulate(worker, 3):
        # With a delay, what lands in between makes the buffer finite again.
        assert dropped == [(2, (1,)), (3, (1,))][: 1 if "delay" in method else 2]
        assert (seen, masked) == (5.0, True)
        assert weight == 6.0 or "delay" in method
    kept = method.replace("guard", "buffers='keep', guard")
    assert all(d == [] for d, *_ in offbeat.simulate(lambda comm: worker_keeping(comm, kept, bad), 2))


def worker_keeping(comm: offbeat.Communicator, method: str, bad: float) -> tuple[list[Any]]:
    """Buffers that are not sent are nobody else's concern."""
    net = Masked()
    opt = torch.optim.SGD(net.parameters(), lr=1.0)
    sync = offbeat.method(method)(net, opt, group=comm)
    for _ in range(3):
        opt.zero_grad()
        (-net.weight.sum()).backward()
        net.seen.fill_(bad)
        sync.step()
    return ([report.dropped for report in sync.reports if report.dropped],)


@pytest.mark.parametrize("method", ["local_sgd(every=2, guard=3.0)", "diloco(every=2, lr=1.0, guard=3.0)"])
def test_buffers_that_are_broken_everywhere_do_not_hold_the_run_up(method: str) -> None:
    """All return to the start of that period, once, and go on with the buffers as they are."""

    def worker(comm: offbeat.Communicator) -> list[int]:
        net = Line()
        net.register_buffer("seen", torch.ones(1, dtype=torch.float64))
        opt = torch.optim.SGD(net.parameters(), lr=1.0)
        sync = offbeat.method(method)(net, opt, group=comm)
        for step in range(12):
            opt.zero_grad()
            (-net.weight.sum()).backward()
            if step == 3:
                net.seen.fill_(math.nan)
            sync.step()
        return [len(report.dropped) for report in sync.reports]

    assert offbeat.simulate(worker, 2) == [[0, 2, 0, 0, 0, 0]] * 2

"""Rounds by the clock: workers make as many steps as they can, and count by their steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Pool
from problems import reloaded
from sentences import says
from ticking import Ticking
from torch import nn

import offbeat
from offbeat import Clock, Every, Never, Seconds, Then
from offbeat.when import LATER


def uneven(rank: int, step: int) -> float:
    """Rank 1 needs twice the time."""
    return (1.0, 2.0)[rank % 2]


class Line(nn.Module):
    """One weight; rank r climbs by 4ʳ a step."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, dtype=torch.float64))


def climb(
    comm: offbeat.Communicator, expression: str, rounds: int, **options: Any
) -> tuple[list[float], int]:
    """The weight after each of some rounds and in the end, and the number of steps."""
    net, trace = Line(), []
    opt = torch.optim.SGD(net.parameters(), lr=1.0)
    sync = offbeat.method(expression)(net, opt, group=comm)
    while sync.rounds < rounds:
        before = sync.rounds
        opt.zero_grad()
        (-(4.0**comm.rank) * net.weight.sum()).backward()
        sync.step(**options)
        if sync.rounds > before:
            trace.append(net.weight.item())
    sync.finish()
    return [*trace, net.weight.item()], sync.steps


def test_the_schedule_by_hand() -> None:
    when = Seconds(5.0)
    answers = [when.next(Clock(7, 0, 0.1, elapsed=elapsed), {}) for elapsed in (0.0, 4.9, 5.0, 9.0)]
    assert answers == [LATER, LATER, 8, 8]
    assert when.next(Clock(7, 0, 0.1, dry=True), {}) == 8  # who has no data does not wait for the time
    assert when.timed
    assert Then(3, Never(), when).timed
    assert not Then(3, Never(), Every(2)).timed
    assert Then(3, Never(), when).next(Clock(7, 0, 0.1, elapsed=1.0), Then(3, Never(), when).init()) == LATER
    assert Then(3, Never(), when).next(Clock(7, 0, 0.1, elapsed=5.0), Then(3, Never(), when).init()) == 8
    assert repr(when) == "Seconds(seconds=5.0)"


def test_closed_forms() -> None:
    def climbs(expression: str, rounds: int, **options: Any) -> list[tuple[list[float], int]]:
        found = offbeat.simulate(lambda comm: climb(comm, expression, rounds, **options), 2, compute=uneven)
        assert found[0][0] == found[1][0]
        return found

    # The time runs from the first step's gradient on: 5 and 3 steps in 4 seconds, then 4 and 2.
    # Rank 0 is at 5, rank 1 at 3·4 = 12: (5·5 + 3·12)/8 = 7.625. Then +4 and +8: (4·4 + 2·8)/6 = 16/3.
    (trace, steps), (_, slow) = climbs("local_sgd(every=Seconds(4))", 2)
    assert trace == [7.625, 7.625 + 16 / 3, 7.625 + 16 / 3]
    assert (steps, slow) == (9, 5)
    # Samples count if they are given: 5·1 and 3·1 times 2 samples are the same weights.
    assert climbs("local_sgd(every=Seconds(4))", 2, samples=2)[0][0] == trace
    # An outer step of lr 2 goes twice as far.
    assert climbs("diloco(every=Seconds(4), lr=2.0, momentum=0.0)", 1)[0][0] == [15.25, 15.25]
    # A synchronous warm-up of 2 steps climbs by 2.5 each, and lasts as long as its slower worker.
    assert climbs("diloco(every=Seconds(4), lr=1.0, momentum=0.0, warmup=2)", 1)[0][0] == [12.625] * 2


def test_equal_workers_do_what_a_number_of_steps_does() -> None:
    """A law: at one second a step, with the first gradient before the clock starts."""
    same = {"compute": lambda rank, step: 1.0}
    clocked = offbeat.simulate(lambda comm: climb(comm, "diloco(every=Seconds(3))", 4), 4, **same)
    counted = offbeat.simulate(lambda comm: climb(comm, "diloco(every=Every(3, offset=1))", 5), 4, **same)
    # Rounds after steps 4, 7, 10, 13 by the clock, and after 1, 4, 7, 10, 13 by the count.
    assert [steps for _, steps in clocked] == [steps for _, steps in counted] == [13] * 4


def interrupted(comm: offbeat.Communicator, expression: str, cut: int | None) -> list[float]:
    """Eight rounds. After round `cut`, and each worker's own further steps, the run is saved and loaded."""
    net, trace = Line(), []

    def build(net: nn.Module) -> tuple[torch.optim.Optimizer, offbeat.Synchronizer]:
        opt = torch.optim.SGD(net.parameters(), lr=0.125)
        return opt, offbeat.method(expression)(net, opt, group=comm)

    opt, sync = build(net)
    at = None
    while sync.rounds < 8:
        if sync.rounds == cut and at is None:
            at = sync.steps + (1, 0)[comm.rank % 2]
        if sync.steps == at:
            weights, state = reloaded(net.state_dict(), sync.state_dict())
            net = Line()
            net.load_state_dict(weights)
            opt, sync = build(net)
            sync.load_state_dict(state)
            at = -1
        opt.zero_grad()
        (net.weight - comm.rank).square().sum().backward()
        sync.step()
        trace.append(net.weight.item())
    sync.finish()
    return [*trace, net.weight.item()]


@pytest.mark.parametrize(
    "expression",
    ["diloco(every=Seconds(5.3))", "diloco(every=Seconds(4), warmup=2)"],
)
@pytest.mark.parametrize("cut", [1, 4])
def test_it_resumes_exactly(expression: str, cut: int) -> None:
    options: dict[str, Any] = {"compute": lambda rank, step: 0.37 * (1 + rank % 2) + 0.01 * (step % 3)}
    whole = offbeat.simulate(lambda comm: interrupted(comm, expression, None), 2, **options)
    assert whole == offbeat.simulate(lambda comm: interrupted(comm, expression, cut), 2, **options)
    assert len(whole[0]) > 1.4 * len(whole[1])


def test_files_of_a_checkpoint_are_named_after_the_largest_step(tmp_path: Path) -> None:
    def worker(comm: offbeat.Communicator) -> tuple[int, int, bool]:
        net = Line()
        opt = torch.optim.SGD(net.parameters(), lr=1.0)
        sync = offbeat.local_sgd(net, opt, every=Seconds(4), group=comm)
        while sync.rounds < 2:
            opt.zero_grad()
            (-net.weight.sum()).backward()
            sync.step()
        sync.save(tmp_path)
        with sync.averaged():
            pass
        again = offbeat.local_sgd(net, opt, every=Seconds(4), group=comm)
        return sync.steps, again.steps if again.load(tmp_path) else -1, again.rounds == 2

    assert offbeat.simulate(worker, 2, compute=uneven) == [(9, 9, True), (5, 5, True)]
    assert {path.name.split("-rank")[0] for path in tmp_path.iterdir()} == {"offbeat-step-9"}


def test_two_checkpoints_of_one_round_are_told_apart(tmp_path: Path) -> None:
    """A worker is killed before it has written the second one: all continue from the first."""

    def worker(comm: offbeat.Communicator) -> tuple[list[int], bool]:
        def build() -> tuple[Line, offbeat.Synchronizer]:
            net = Line()
            opt = torch.optim.SGD(net.parameters(), lr=1.0)
            return net, offbeat.local_sgd(net, opt, every=Seconds(40), group=comm)

        net, sync = build()
        kept, steps = Path(tmp_path, "kept"), []
        for folder in (kept, tmp_path / "later"):
            for _ in range(2 - comm.rank):
                (-net.weight.sum()).backward()
                sync.step()
            sync.save(folder)
            steps.append(sync.steps)
        if comm.rank == 0:
            later = next((tmp_path / "later").glob("*-rank-0-*"))
            later.rename(kept / later.name)
        comm.tell([]).wait()
        _, again = build()
        return [*steps, again.steps if again.load(kept) else -1], again.rounds == 0

    assert offbeat.simulate(worker, 2, compute=uneven) == [([2, 4, 2], True), ([1, 2, 1], True)]


def test_a_worker_that_runs_dry_begins_its_rounds_at_once() -> None:
    def worker(comm: offbeat.Communicator) -> tuple[float, int]:
        net = Line()
        opt = torch.optim.SGD(net.parameters(), lr=1.0)
        sync = offbeat.local_sgd(net, opt, every=Seconds(4), group=comm)
        for _ in sync.batches(range((6, 5)[comm.rank])):
            (-net.weight.sum()).backward()
            sync.step()
            opt.zero_grad()
        sync.finish()
        return net.weight.item(), sync.rounds

    # Five and three steps: (5·5 + 3·3)/8 = 4.25. Then 1 and 2: (1 + 2·2)/3. A round without data ends it.
    for weight, rounds in offbeat.simulate(worker, 2, compute=uneven):
        assert weight == pytest.approx(4.25 + 5 / 3)
        assert rounds == 3


def test_a_worker_that_runs_dry_has_no_samples_either() -> None:
    """Worker 0 climbs by 3 in the first period, worker 1 by 4 in its only step, then it has no data."""

    def worker(comm: offbeat.Communicator) -> float:
        net = Line()
        opt = torch.optim.SGD(net.parameters(), lr=1.0)
        sync = offbeat.local_sgd(net, opt, every=Seconds(2), group=comm)
        for _ in range((6, 1)[comm.rank]):
            opt.zero_grad()
            (-(4.0**comm.rank) * net.weight.sum()).backward()
            sync.step(samples=4)
        sync.join()
        return net.weight.item()

    # (12·3 + 4·4)/16, and then three steps of worker 0 alone.
    assert offbeat.simulate(worker, 2, compute=uneven) == [3.25 + 3] * 2


def test_places_are_compared_by_rounds() -> None:
    """Rank 0 evaluates after its first round, rank 1 after its second."""

    def worker(comm: offbeat.Communicator) -> None:
        net = Line()
        opt = torch.optim.SGD(net.parameters(), lr=1.0)
        sync = offbeat.local_sgd(net, opt, every=Seconds(4), group=comm)
        while sync.rounds < 1 + comm.rank:
            net.weight.sum().backward()
            sync.step()
        with sync.averaged():
            pass

    with pytest.raises(offbeat.Disagreement, match=r"rank 0 is in averaged\(\)"):
        offbeat.simulate(worker, 2, compute=uneven)


def test_other_schedules_still_compare_steps() -> None:
    def worker(comm: offbeat.Communicator) -> None:
        net = Line()
        opt = torch.optim.SGD(net.parameters(), lr=1.0)
        when = offbeat.QSR(alpha=0.0, base=4)
        sync = offbeat.local_sgd(net, opt, every=when, group=comm)
        for _ in range(3 + comm.rank):
            net.weight.sum().backward()
            sync.step()
        sync.finish()

    with pytest.raises(offbeat.Disagreement, match="at step"):
        offbeat.simulate(worker, 2)


def test_learning_rates_may_differ_unless_the_update_uses_them() -> None:
    def worker(comm: offbeat.Communicator, expression: str) -> float:
        net = Line()
        opt = torch.optim.SGD(net.parameters(), lr=1.0)
        scheduler = torch.optim.lr_scheduler.LambdaLR(opt, lambda step: 1 / (1 + step))
        sync = offbeat.method(expression)(net, opt, group=comm)
        while sync.rounds < 2:
            opt.zero_grad()
            (-net.weight.sum()).backward()
            sync.step()
            scheduler.step()
        sync.finish()
        return net.weight.item()

    one, two = offbeat.simulate(lambda comm: worker(comm, "diloco(every=Seconds(4))"), 2, compute=uneven)
    assert one == two
    with pytest.raises(offbeat.Disagreement, match="has learning rate"):
        offbeat.simulate(lambda comm: worker(comm, "slowmo(every=Seconds(4))"), 2, compute=uneven)


REFUSED = [
    ("local_sgd(every=Seconds(0))", "Seconds(seconds=0): seconds must be a positive number."),
    ("local_sgd(every=Seconds(-1.0))", "Seconds(seconds=-1.0): seconds must be a positive number."),
    (
        "eager_diloco(every=Seconds(5))",
        "delay='round' with Seconds(seconds=5): workers would be in different ",
    ),
    (
        "local_sgd(every=Seconds(5), delay=2)",
        "delay=2 with Seconds(seconds=5): workers would be in different ",
    ),
    ("def_sgd(every=Seconds(5))", "Seconds(seconds=5) weighs workers by their steps, but Exchange("),
    ("a2sgd(every=Seconds(5))", "Seconds(seconds=5) lets workers make different numbers of steps, but "),
    ("streaming_diloco(every=Seconds(5), fragments=1)", "fragments take turns within a fixed period"),
]


@pytest.mark.parametrize(("expression", "sentence"), REFUSED)
def test_what_cannot_go_by_the_clock(expression: str, sentence: str) -> None:
    def worker(comm: offbeat.Communicator) -> None:
        net = Line()
        offbeat.method(expression)(net, torch.optim.SGD(net.parameters(), lr=1.0), group=comm)

    with pytest.raises((TypeError, ValueError)) as error:
        offbeat.simulate(worker, 2)
    assert sentence in str(error.value)


def ticking(comm: offbeat.Communicator, expression: str, rounds: int) -> tuple[list[float], int]:
    return climb(Ticking(comm, uneven(comm.rank, 0)), expression, rounds)


@pytest.mark.parametrize(
    "expression",
    [
        "local_sgd(every=Seconds(4))",
        "diloco(every=Seconds(4), lr=0.5, momentum=0.5, ramp=0, warmup=2)",
        "diloco(every=Seconds(3), reduce=Quantized(8, block=8, least=1))",
    ],
)
def test_simulation_equals_gloo(pool: Pool, expression: str) -> None:
    """Every other worker needs two seconds for a step, in real processes too: they have a clock for it."""
    virtual = offbeat.simulate(lambda comm: climb(comm, expression, 5), 4, compute=uneven)
    for (trace, steps), (expected, count) in zip(pool.run(ticking, expression, 5), virtual, strict=True):
        assert trace == pytest.approx(expected)  # weights of a third round
        assert steps == count
    assert virtual[0][1] > 1.4 * virtual[1][1]


def stop_early(comm: offbeat.Communicator) -> None:
    climb(comm, "local_sgd(every=Seconds(0.05))", 2 if comm.rank == 3 else 4)


def test_a_worker_that_stops_after_fewer_rounds(pool: Pool) -> None:
    for answer in pool.attempt(stop_early):
        assert isinstance(answer, offbeat.Disagreement)
        assert "rank 3 in finish() at step " in str(answer)


def timed(comm: offbeat.Communicator) -> tuple[list[float], bool]:
    trace, _ = climb(comm, "diloco(every=Seconds(0.05))", 3)
    return trace, trace[-1] == trace[-2]


def test_on_real_workers(pool: Pool) -> None:
    """Time decides how many steps they make, but not that all get the same weights."""
    found = pool.run(timed)
    assert all(trace == found[0][0] and closed for trace, closed in found)
    with says(ValueError, "Seconds(seconds=nan): seconds must be a positive number."):
        Seconds(float("nan"))


class Hand(offbeat.Solo):
    """A worker whose clock is moved by hand."""

    time = 0.0

    def now(self) -> float:
        return self.time


class Slow:
    """Something that takes a minute to say its state."""

    def __init__(self, clock: Hand) -> None:
        self.clock = clock

    def state_dict(self) -> dict[str, Any]:
        self.clock.time += 60
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.clock.time += 60


@pytest.mark.parametrize("drift", [True, False])
def test_only_steps_take_time(drift: bool, tmp_path: Path) -> None:
    """Rounds come every three steps of a second, whatever is done between them for a minute."""
    clock, net, periods = Hand(), Line(), []
    opt = torch.optim.SGD(net.parameters(), lr=1.0)
    sync = offbeat.local_sgd(net, opt, every=Seconds(3.0), drift=drift, group=clock)

    def hear(report: offbeat.Report) -> None:
        clock.time += 60
        periods.append(report.period)

    sync.on_report = hear
    for step in range(16):
        (-net.weight.sum()).backward()
        clock.time += 1
        sync.step()
        if step % 3 == 1:
            with sync.averaged():
                clock.time += 60
                assert sync.totals.rounds == len(periods)  # which is another pause, inside
            sync.save(tmp_path, slow=Slow(clock))
    # The first period begins with the first step.
    assert [report.period for report in sync.reports] == periods == [4, 3, 3, 3, 3]

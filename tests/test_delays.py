"""What is live × delay × update × period: right by hand, or refused in one sentence.

Slopes are those of straight lines, so gradients are known; two workers, rules worked out on plain numbers.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from problems import same, snapshot
from sentences import says
from slopes import Walk

import offbeat
from offbeat import (
    QSR,
    SGD,
    AdaComm,
    Adaptive,
    Clock,
    Communicator,
    Correct,
    Detached,
    Eager,
    Every,
    Exchange,
    Gossip,
    Never,
    Outer,
    Overlap,
    Packed,
    RandomBlock,
    Rebase,
    Reducer,
    Replace,
    Schedule,
    SlowMo,
    Synchronizer,
    Then,
    Update,
    grads,
    params,
)
from offbeat.plan import Cosine, Job
from offbeat.plan.forecast import unroll
from offbeat.reduce.code import Staged

Delay = int | str
STEPS = 13
DELAYS: list[Delay] = [0, 1, 2, "round"]
PERIODS = [1, 2, 3]


def slope(rank: int, step: int) -> float:
    return float((3 * rank + 1) * (1 + (step + rank) % 4))


@dataclass
class Worker:
    """Plain numbers: the weight, and what the rule remembers."""

    x: float = 0.0
    a: float = 0.0
    b: float = 0.0  # momentum
    own: float = 0.0  # displacement at the last round
    heard: float = 0.0  # mean displacement that landed last
    sent: float = field(default=0.0)

    def outer(self, gradient: float, lr: float, momentum: float) -> None:
        self.b = momentum * self.b + gradient
        self.a -= lr * self.b


@dataclass(frozen=True)
class Rule:
    """`begin` returns what is sent; `land` applies the mean. Both may move the worker."""

    update: Update
    begin: Callable[[Worker], float]
    land: Callable[[Worker, float], None]


def replace(keep: float) -> Rule:
    def land(w: Worker, mean: float) -> None:
        w.x = keep * w.x + (1 - keep) * mean

    return Rule(Replace(keep), lambda w: w.x, land)


def correct(gain: float) -> Rule:
    def land(w: Worker, mean: float) -> None:
        w.x += gain * (mean - w.sent)

    return Rule(Correct(gain), lambda w: w.x, land)


def outer(lr: float, momentum: float, keep: float) -> Rule:
    def land(w: Worker, mean: float) -> None:
        w.outer(mean, lr, momentum)
        w.x = keep * w.x + (1 - keep) * w.a

    return Rule(Outer(SGD(lr, momentum), keep=keep), lambda w: w.a - w.x, land)


def rebase(gain: float) -> Rule:
    def land(w: Worker, mean: float) -> None:
        w.a -= mean
        w.x += gain * (w.sent - mean)

    return Rule(Rebase(gain), lambda w: w.a - w.x, land)


def slowmo(lr: float, momentum: float) -> Rule:
    def land(w: Worker, mean: float) -> None:
        w.outer(mean, lr, momentum)
        w.x = w.a

    return Rule(SlowMo(lr, momentum), lambda w: w.a - w.x, land)


def gossip(lr: float, momentum: float) -> Rule:
    def land(w: Worker, mean: float) -> None:
        w.outer(w.a - mean, lr, momentum)
        w.x = w.a

    return Rule(Gossip(SGD(lr, momentum)), lambda w: w.x, land)


def eager(lr: float, momentum: float, share: float) -> Rule:
    def begin(w: Worker) -> float:
        way = w.a - w.x
        w.outer(w.heard + share * (way - w.own), lr, momentum)
        w.own, w.x = way, w.a
        return way

    def land(w: Worker, mean: float) -> None:
        w.heard = mean

    return Rule(Eager(SGD(lr, momentum), share), begin, land)


def overlap(pull: float, momentum: float) -> Rule:
    def begin(w: Worker) -> float:
        w.x = (1 - pull) * w.x + pull * w.a
        w.b = momentum * w.b + w.a - w.x
        return w.a - w.b

    def land(w: Worker, mean: float) -> None:
        w.a = mean

    return Rule(Overlap(pull, momentum), begin, land)


def detached() -> Rule:
    """With a code that loses nothing there is no error: it averages."""

    def land(w: Worker, mean: float) -> None:
        w.a -= mean
        w.x = w.a

    return Rule(Detached(RandomBlock(1, least=1), lam=0.25), lambda w: w.a - w.x, land)


RULES = [
    replace(0.0),
    replace(0.25),
    correct(1.0),
    correct(0.5),
    outer(0.5, 0.5, 0.0),
    outer(1.0, 0.0, 0.5),
    rebase(1.0),
    rebase(0.25),
    slowmo(0.5, 0.5),
    gossip(0.5, 0.5),
    eager(0.5, 0.5, 0.75),
    overlap(0.5, 0.5),
    detached(),
]
TABLE = list(itertools.product(RULES, DELAYS, PERIODS))
IDS = [f"{rule.update!r}-{delay}-{period}" for rule, delay, period in TABLE]


def refusal(live: str, update: Update, delay: Delay, period: int) -> str | None:
    """The sentence of a row that makes no sense."""
    if isinstance(delay, int) and delay > period:
        return (
            f"delay={delay} with Every(steps={period}): "
            f"delay must not exceed the period, which can be {period}."
        )
    if live == "grads" and not isinstance(update, Replace | Correct):
        return (
            f"update={update!r} with grads(1 tensors): it needs an anchor, which gradients do not have; use "
            "Replace() or Correct(), or params(model)."
        )
    if delay and isinstance(update, Detached):
        return f"delay={delay!r} with update={update!r}: the steps made during the delay would be lost."
    return None


def landing(step: int, delay: Delay, period: int) -> int:
    """The step at which the round of a step lands."""
    return step + (period if delay == "round" else int(delay))


def composed(live: Callable[..., Any], update: Update, delay: Delay, period: int, **options: Any) -> Any:
    def build(model: Any, optimizer: Any, group: offbeat.Communicator) -> Synchronizer:
        exchange = Exchange(
            live(model), when=Every(period), among=group, update=update, delay=delay, **options
        )
        return Synchronizer(optimizer, [exchange])

    return build


@pytest.mark.few(30)
@pytest.mark.parametrize(("rule", "delay", "period"), TABLE, ids=IDS)
def test_parameters(rule: Rule, delay: Delay, period: int) -> None:
    build = composed(params, rule.update, delay, period)
    sentence = refusal("params", rule.update, delay, period)
    if sentence is not None:
        with says(ValueError, sentence):
            Walk(offbeat.Solo(), build)
        return

    workers, expected = [Worker(), Worker()], []
    air: tuple[int, float] | None = None
    for step in range(1, STEPS + 1):
        for rank, w in enumerate(workers):
            w.x -= slope(rank, step - 1)
        for phase in ("land", "begin", "land"):
            if phase == "begin" and step % period == 0:
                for w in workers:
                    w.sent = rule.begin(w)
                air = (landing(step, delay, period), sum(w.sent for w in workers) / 2)
            elif phase == "land" and air is not None and air[0] == step:
                for w in workers:
                    rule.land(w, air[1])
                air = None
        expected.append([w.x for w in workers])

    traces = offbeat.simulate(lambda comm: Walk(comm, build, slope=slope).go(STEPS), 2)
    assert [list(pair) for pair in zip(*traces, strict=True)] == [pytest.approx(row) for row in expected]


@pytest.mark.few(30)
@pytest.mark.parametrize(("rule", "delay", "period"), TABLE, ids=IDS)
def test_gradients(rule: Rule, delay: Delay, period: int) -> None:
    build = composed(grads, rule.update, delay, period)
    sentence = refusal("grads", rule.update, delay, period)
    if sentence is not None:
        with says(ValueError, sentence):
            Walk(offbeat.Solo(), build)
        return

    def used(rank: int, step: int) -> float:
        """The gradient of a step: its own, unless the mean of a round lands there."""
        own = slope(rank, step - 1)
        sent = [s for s in range(period, step + 1, period) if landing(s, delay, period) == step]
        if not sent:
            return own
        mean = sum(slope(other, sent[0] - 1) for other in range(2)) / 2
        w = Worker(x=own, sent=slope(rank, sent[0] - 1))
        rule.land(w, mean)
        return w.x

    expected = [
        list(itertools.accumulate(-used(rank, step) for step in range(1, STEPS + 1))) for rank in range(2)
    ]
    traces = offbeat.simulate(lambda comm: Walk(comm, build, slope=slope).go(STEPS), 2)
    assert traces == [pytest.approx(trace) for trace in expected]


def test_what_a_code_kept_back_is_all_that_moves_the_mean() -> None:
    """Each worker sends the larger of two displacements and keeps the other as its residual e.

    The anchor lands at mean(sent) + mean(e) − mean(e before): a round moves the mean of the workers by the
    change of mean(e). The changes add up: the mean is that of workers alone, plus mean(e).
    """
    code = offbeat.ErrorFeedback(offbeat.TopK(2, least=1))

    def worker(comm: offbeat.Communicator) -> list[torch.Tensor]:
        net = torch.nn.Linear(2, 1, bias=False).double()
        torch.nn.init.zeros_(net.weight)
        opt = torch.optim.SGD(net.parameters(), lr=1.0)
        sync = offbeat.local_sgd(net, opt, every=3, delay=2, reduce=code, group=comm)
        for step in range(14):
            push = torch.tensor([slope(comm.rank, step), 3.0 * (step % 2 + comm.rank)]).double()
            (-net.weight @ push).sum().backward()
            sync.step()
            opt.zero_grad()
        (part,) = sync.parts
        return [net.weight.detach()[0], part.state_dict()["states"]["reduce"]["residual"][0]]

    weights, residuals = [sum(row) / 2 for row in zip(*offbeat.simulate(worker, 2), strict=True)]
    pushes = [
        [slope(rank, step), 3.0 * (step % 2 + rank)] for step, rank in itertools.product(range(14), range(2))
    ]
    alone = torch.tensor(pushes).double().sum(0) / 2
    assert residuals.abs().max() > 1
    torch.testing.assert_close(weights, alone + residuals)


@pytest.mark.slow
@pytest.mark.parametrize("gain", ["", ", gain=1.0"])
def test_feedback_and_a_delay_converge(gain: str) -> None:
    """Each round sends an eighth of a parabola's coordinates. A gain of 1/4 would send the others twice."""
    method = f"local_sgd(every=4, delay=3, reduce=ErrorFeedback(RandomBlock(8, least=1)){gain})"

    def worker(comm: offbeat.Communicator) -> float:
        net = torch.nn.Linear(64, 1, bias=False)
        torch.nn.init.ones_(net.weight)
        opt = torch.optim.SGD(net.parameters(), lr=0.05)
        goal = torch.randn(64, generator=torch.Generator().manual_seed(comm.rank))
        sync = offbeat.method(method)(net, opt, group=comm)
        for _ in range(400):
            (net.weight - goal).square().sum().div(2).backward()
            sync.step()
            opt.zero_grad()
        sync.finish()
        goals = comm.mean([goal.clone()]).wait()[0]
        return float((net.weight.detach() - goals).norm() / (1 - goals).norm())

    assert max(offbeat.simulate(worker, 4)) < 0.5


def test_late_gradients_in_numbers() -> None:
    """Own gradients in the first step, then the mean of the step before: 10.5, 20.5, 30.5, …"""
    build = composed(grads, Replace(), 1, 1)

    def worker(comm: offbeat.Communicator) -> list[float]:
        walk = Walk(comm, build, slope=lambda rank, step: 10.0 * (step + 1) + rank)
        return [0.0, *walk.go(5)]

    for rank, trace in enumerate(offbeat.simulate(worker, 2)):
        steps = [before - after for before, after in itertools.pairwise(trace)]
        assert steps == [10.0 + rank, 10.5, 20.5, 30.5, 40.5]


class Gaps(torch.nn.Module):
    """Rank r uses parameter i in step n where it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = torch.nn.ParameterList([torch.zeros(1).double() for _ in range(3)])


@pytest.mark.parametrize("update", [Replace(), Replace(0.5), Correct()], ids=repr)
def test_a_late_gradient_nobody_had_is_none_and_a_missing_one_stays_missing(update: Update) -> None:
    """Weight 0 is used by rank 0 alone, in step 2; weight 1 by both, always; weight 2 never."""

    def worker(comm: offbeat.Communicator) -> list[list[float | None]]:
        net = Gaps()
        opt = torch.optim.SGD(net.parameters(), lr=1.0)
        exchange = Exchange(grads(net), when=Every(1), among=comm, update=update, delay=1)
        sync = Synchronizer(opt, [exchange])
        seen = []
        for step in range(1, 5):
            loss = net.weights[1] * (comm.rank + 1)
            if comm.rank == 0 and step == 2:
                loss = loss + 8.0 * net.weights[0]
            loss.backward()
            sync.step(lambda: seen.append([None if p.grad is None else p.grad.item() for p in net.weights]))
            opt.zero_grad()
        return seen

    first, second = offbeat.simulate(worker, 2)
    assert [row[2] for row in first + second] == [None] * 8
    # In step 3 lands what rank 0 had in step 2; in step 2 it lands nothing, and keeps what the rule keeps.
    own = {"Replace(keep=0.0)": (None, 4.0, 4.0), "Replace(keep=0.5)": (4.0, 2.0, 2.0)}
    step2, step3, other = own.get(repr(update), (8.0, -4.0, 4.0))
    assert [row[0] for row in first] == [None, step2, step3, None]
    assert [row[0] for row in second] == [None, None, other, None]
    assert [row[1] for row in first] == [1.0, *[1.25 if update == Replace(0.5) else 1.5] * 3]


def test_finish_drops_late_gradients_and_leaves_those_of_the_user() -> None:
    def worker(comm: offbeat.Communicator) -> tuple[float | None, float, int]:
        walk = Walk(comm, composed(grads, Replace(), 1, 1), slope=slope)
        walk.go(3)
        (p,) = walk.net.parameters()
        before = None if comm.rank else torch.full_like(p, 7.0)
        p.grad = before
        walk.finish()
        assert p.grad is before
        return None if p.grad is None else p.grad.item(), walk.weight, len(walk.rounds)

    (first, a, rounds), (second, b, _) = offbeat.simulate(worker, 2)
    assert (first, second, rounds) == (7.0, None, 3)
    # Own gradients in step 1, then the means of steps 1 and 2; finish() takes the mean of the weights.
    assert a == b == -sum(slope(rank, step) for rank in range(2) for step in (0, 0, 1)) / 2


@pytest.mark.parametrize("stop", range(1, 6))
@pytest.mark.parametrize("delay", [1, 2, "round"])
def test_late_gradients_resume_exactly(delay: Delay, stop: int) -> None:
    build = composed(grads, Correct(0.5), delay, 2)

    def worker(comm: offbeat.Communicator) -> bool:
        whole = Walk(comm, build, slope=slope)
        whole.go(8)
        first = Walk(comm, build, slope=slope)
        first.go(stop)
        again = Walk(comm, build, slope=slope)
        again.net.load_state_dict(first.net.state_dict())
        again.sync.load_state_dict(first.sync.state_dict())
        again.steps = stop
        again.go(8 - stop)
        return same(snapshot(whole.net), snapshot(again.net))

    assert offbeat.simulate(worker, 2) == [True, True]


# Periods that change: what is in flight lands at the latest when the next round begins.


@dataclass(frozen=True)
class Uneven(Schedule):
    """Periods 5, 1, 2 in turn, of which nothing is known beforehand."""

    def next(self, clock: Clock, state: dict[str, Any]) -> int:
        return clock.step + (5, 1, 2)[clock.round % 3]


CHANGING = [
    *(QSR(alpha=0.0, base=4, total=total) for total in (97, 98, 99, 100)),
    QSR(alpha=0.1, base=4, total=99),
    QSR(alpha=0.3, base=4, warmup=30, peak=0.05, total=99),
    Then(10, Every(4), QSR(alpha=0.0, base=4, total=98)),
    Then(10, Every(4), Every(4, offset=1)),
    Then(9, Every(4), Then(13, Every(5, offset=2), Every(4, offset=3))),
    Adaptive(start=4, sample=12),
    AdaComm(start=8, interval=10),
    Then(10, Every(4), AdaComm(start=8, interval=10)),
    Uneven(),
]
HORIZON = 100
JOB = Job(steps=HORIZON, parameters=1000, layers=2, rate=Cosine(0.1, HORIZON))


class Watched:
    """A walk of `local_sgd` that notes when its rounds begin, are half-way, and land."""

    def __init__(self, comm: offbeat.Communicator, when: Schedule, delay: Delay) -> None:
        self.walk = Walk(
            comm,
            functools.partial(offbeat.local_sgd, every=when, delay=delay),
            slope=slope,
            lr=lambda step: [JOB.rate(step)],
        )
        (self.part,) = self.walk.sync.parts
        self.seen: dict[str, list[int]] = {"begin": [], "advance": [], "land": []}
        for what in ("begin", "land"):
            setattr(self.part, what, functools.partial(self._note, what, getattr(self.part, what)))
        self.part.advance = lambda: self.seen["advance"].append(self.walk.sync.steps)
        begin = self.part.rhythm.begin
        self.part.rhythm.begin = lambda step, messages: begin(step, 2)  # as if a code had two messages

    def _note(self, what: str, act: Callable[..., None], clock: Clock, *args: Any) -> None:
        self.seen[what].append(clock.step)
        act(clock, *args)

    def go(self, steps: int) -> list[float]:
        trace = []
        for _ in range(steps):
            self.walk.sync.observe(1.0 / (1 + self.walk.steps))
            trace += self.walk.go()
        return trace


@pytest.mark.few(10)
@pytest.mark.parametrize(
    "delay", [3, "round", *[pytest.param(delay, marks=pytest.mark.slow) for delay in (1, 2, 4)]]
)
@pytest.mark.parametrize("when", CHANGING, ids=repr)
def test_periods_that_change(when: Schedule, delay: Delay) -> None:
    def worker(comm: offbeat.Communicator) -> tuple[list[float], dict[str, list[int]], Any]:
        watched = Watched(comm, when, delay)
        trace = watched.go(HORIZON)
        parts = watched.walk.sync.parts
        return trace, {name: list(steps) for name, steps in watched.seen.items()}, unroll(parts, JOB)

    (first, seen, course), (second, other, _) = offbeat.simulate(worker, 2)
    assert seen == other
    begins = seen["begin"]
    due = [HORIZON + 1 if delay == "round" else begun + int(delay) for begun in begins]
    lands = [min(pair) for pair in zip(due, [*begins[1:], HORIZON + 1], strict=True)]
    assert seen["land"] == [at for at in lands if at <= HORIZON]

    weights, air, expected = [0.0, 0.0], None, []
    for step in range(1, HORIZON + 1):
        weights = [w - JOB.rate(step - 1) * slope(rank, step - 1) for rank, w in enumerate(weights)]
        if air is not None and air[0] == step:
            weights = [w + (sum(air[1]) / 2 - sent) / 4 for w, sent in zip(weights, air[1], strict=True)]
        if step in begins:
            air = (lands[begins.index(step)], weights)
        expected.append(weights)
    assert [first, second] == [pytest.approx(trace) for trace in zip(*expected, strict=True)]

    if not when.needs:  # what rounds tell is not known to the planner
        planned = {what: [act.iteration for act in course.acts if act.what == what] for what in seen}
        landed = {act.round: act.iteration for act in course.acts if act.what == "land"}
        # In the plan what is not yet half-way when it lands gets there at that moment.
        planned["advance"] = [at for at in planned["advance"] if at not in landed.values()]
        assert planned == seen
        flushed = [act.round for act in course.flush if act.what == "land"]
        assert flushed == ([len(begins) - 1] if lands[-1] > HORIZON else [])


@pytest.mark.slow
def test_some_of_these_periods_are_shorter_than_the_delay() -> None:
    """Or else the table would show nothing."""

    def worker(comm: offbeat.Communicator) -> list[int]:
        return [
            min(b - a for a, b in itertools.pairwise(began(comm, when)))
            for when in (CHANGING[0], CHANGING[6], CHANGING[7], CHANGING[10], CHANGING[11])
        ]

    def began(comm: offbeat.Communicator, when: Schedule) -> list[int]:
        watched = Watched(comm, when, 3)
        watched.go(HORIZON)
        return watched.seen["begin"]

    assert offbeat.simulate(worker, 2) == [[1, 2, 3, 1, 1]] * 2


@pytest.mark.few(1)
@pytest.mark.parametrize("when", [QSR(alpha=0.0, base=4, total=18), AdaComm(start=8, interval=4), Uneven()])
def test_early_landings_resume_exactly(when: Schedule) -> None:
    def worker(comm: offbeat.Communicator) -> list[int]:
        whole = Watched(comm, when, 3)
        whole.go(24)
        wrong = []
        for stop in range(1, 24):
            first, again = Watched(comm, when, 3), Watched(comm, when, 3)
            first.go(stop)
            again.walk.net.load_state_dict(first.walk.net.state_dict())
            again.walk.sync.load_state_dict(first.walk.sync.state_dict())
            again.walk.steps = stop
            again.go(24 - stop)
            seen = [first.seen[what] + again.seen[what] for what in ("begin", "land")]
            if seen != [whole.seen["begin"], whole.seen["land"]] or not same(
                snapshot(whole.walk.net), snapshot(again.walk.net)
            ):
                wrong.append(stop)
        return wrong

    assert offbeat.simulate(worker, 2) == [[], []]


@pytest.mark.parametrize(
    ("when", "shortest"),
    [
        (QSR(alpha=0.3, base=4), 4),
        (QSR(alpha=0.3, base=4, total=99), 4),
        (Adaptive(start=4, sample=12), 4),
        (AdaComm(start=4, interval=12), 4),
        (Then(8, Every(4), Every(2)), 2),
        (Then(8, Every(2), Every(4)), 2),
        (Then(8, Never(), Every(4)), 4),
    ],
    ids=repr,
)
def test_a_delay_beyond_regular_periods_is_refused(when: Schedule, shortest: int) -> None:
    net = torch.nn.Linear(1, 1)
    Exchange(params(net), when=when, delay=shortest)
    delay = shortest + 1
    with says(
        ValueError,
        f"delay={delay} with {when!r}: delay must not exceed the period, which can be {shortest}.",
    ):
        Exchange(params(net), when=when, delay=delay)


@dataclass(frozen=True)
class Slow(Reducer):
    """The mean of so many messages, one after the other; only the last one matters."""

    messages: int
    ran: list[str] = field(default_factory=list)

    def start(self, payload: Packed, comm: Communicator, clock: Clock, state: dict[str, Any]) -> Any:
        return SlowMean(self, payload, comm)


class SlowMean(Staged):
    def __init__(self, code: Slow, payload: Packed, comm: Communicator) -> None:
        self.code, self.payload, self.comm, self.stages = code, payload, comm, code.messages - 1
        self.sent: Any = comm.mean([torch.zeros(1)])
        super().__init__(lambda: self.sent.wait() and payload, lambda: False, lambda: self.sent.arrived())

    def advance(self) -> None:
        self.sent.wait()
        self.code.ran.append(f"stage {self.code.messages - self.stages}")
        self.stages -= 1
        self.sent = self.comm.mean([torch.zeros(1)] if self.stages else self.payload.flats)


@pytest.mark.parametrize(
    ("messages", "delay", "steps"),
    [(2, 4, [2]), (2, 3, [2]), (3, 6, [2, 4]), (3, 4, [2, 3]), (4, 8, [2, 4, 6]), (3, 1, [1, 1])],
)
def test_a_code_of_n_messages_sends_the_next_after_each_nth_of_the_delay(
    messages: int, delay: int, steps: list[int]
) -> None:
    def worker(comm: offbeat.Communicator) -> tuple[list[int], float]:
        code = Slow(messages)
        build = functools.partial(offbeat.local_sgd, every=8, delay=delay, reduce=code)
        walk = Walk(comm, build, slope=slope)
        ran = []
        for step in range(-7, delay + 1):
            walk.go()
            ran += [step] * (len(code.ran) - len(ran))
        assert code.ran == [f"stage {i}" for i in range(1, messages)]
        return ran, walk.weight

    exact = offbeat.simulate(
        lambda comm: Walk(comm, functools.partial(offbeat.local_sgd, every=8, delay=delay), slope=slope).go(
            8 + delay
        )[-1],
        2,
    )
    assert offbeat.simulate(worker, 2) == [(steps, weight) for weight in exact]

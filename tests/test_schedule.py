"""The exact steps at which rounds begin."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from sentences import says
from slopes import Walk
from torch import nn

import offbeat
from offbeat import QSR, AdaComm, Adaptive, Clock, Every, Never, Schedule, Then
from offbeat.when import schedule


def rounds(when: Schedule, steps: int, lr: Any = lambda step: 0.1) -> list[int]:
    """The steps after which rounds begin, asked as an exchange asks."""
    state, plan, found = when.init(), None, []
    for step in range(steps):
        if plan is None:
            plan = when.next(Clock(step=step, round=len(found), lr=lr(step)), state)
            assert plan is None or plan > step
        if plan == step + 1:
            found.append(plan)
            plan = None
    return found


@pytest.mark.parametrize(
    ("when", "expected"),
    [
        (Every(1), list(range(1, 21))),
        (Every(8), [8, 16]),
        (Every(20), [20]),
        (Every(21), []),
        (Every(8, offset=0), [8, 16]),
        (Every(8, offset=1), [1, 9, 17]),
        (Every(8, offset=7), [7, 15]),
        (Every(3, skip=6), [3, 9, 15]),
        (Every(1, skip=4), [1, 2, 3, 5, 6, 7, 9, 10, 11, 13, 14, 15, 17, 18, 19]),
        (Every(2, skip=4), [2, 6, 10, 14, 18]),
        (Every(4, skip=4), []),
        (Every(4, offset=1, skip=4), [1, 5, 9, 13, 17]),
        (Every(4, offset=1, skip=8), [1, 5, 9, 13, 17]),
        (Never(), []),
        (Then(4, Every(1), Never()), [1, 2, 3, 4]),
        (Then(4, Never(), Every(3)), [7, 10, 13, 16, 19]),
        (Then(0, Every(1), Every(5)), [5, 10, 15, 20]),
        (Then(4, Every(2), Every(5)), [2, 4, 9, 14, 19]),
        # The period that begins at step 3 is the first schedule's, and ends after the switch.
        (Then(5, Every(3), Every(4)), [3, 6, 9, 13, 17]),
        (Then(6, Every(3), Every(4, offset=1)), [3, 6, 7, 11, 15, 19]),
        (Then(4, Every(2), Then(3, Every(1), Every(6))), [2, 4, 5, 6, 7, 13, 19]),
    ],
    ids=repr,
)
def test_rounds(when: Schedule, expected: list[int]) -> None:
    assert rounds(when, 20) == expected


def test_four_fragments() -> None:
    found = [rounds(Every(64, offset=offset), 128) for offset in (0, 16, 32, 48)]
    assert found == [[64, 128], [16, 80], [32, 96], [48, 112]]


def test_asked_anywhere_every_answers_with_the_next_of_its_steps() -> None:
    for step in range(40):
        for offset in range(7):
            due = Every(7, offset=offset).next(Clock(step=step, round=0, lr=0.1), {})
            assert due == next(n for n in range(step + 1, step + 8) if n % 7 == offset)


def test_the_shortest_period() -> None:
    assert Every(5).shortest == 5
    assert Every(5, skip=10).shortest == 5
    assert QSR(alpha=0.1, base=3).shortest == 3
    assert QSR(alpha=0.1, base=3, total=10).shortest == 3
    assert Adaptive(start=3, sample=10).shortest == AdaComm(start=3, interval=10).shortest == 3
    assert Never().shortest is None
    assert Then(3, Every(1), Every(4)).shortest == 1
    assert Then(0, Every(1), Every(4)).shortest == 4
    assert Then(3, Never(), Every(4)).shortest == 4
    assert Then(3, Never(), Never()).shortest is None


def test_then_hands_each_schedule_its_own_state() -> None:
    seen: list[tuple[str, int]] = []

    class Noting(Schedule):
        def init(self) -> dict[str, Any]:
            return {"asked": 0}

        def next(self, clock: Clock, state: dict[str, Any]) -> int:
            state["asked"] += 1
            seen.append((clock.step, state["asked"]))
            return clock.step + 2

    assert rounds(Then(4, Noting(), Noting()), 8) == [2, 4, 6, 8]
    assert seen == [(0, 1), (2, 2), (0, 1), (2, 2)]


@pytest.mark.parametrize(
    ("when", "steps", "expected"),
    [
        # The last round ends the run, and the warm-up is the run's: rates of 1/8 before step 20, 1/16 after.
        (Then(10, Never(), QSR(alpha=0.0, base=4, total=40)), 40, [14, 18, 22, 26, 30, 34, 38, 40]),
        (Then(10, Never(), Then(6, Never(), QSR(alpha=0.0, base=5, total=30))), 30, [21, 26, 30]),
        (Then(10, Every(2), QSR(alpha=0.375, base=4, total=70)), 70, [2, 4, 6, 8, 10, 19, 28, 64, 70]),
        (Then(10, Never(), QSR(alpha=0.375, base=4, warmup=20, total=70)), 70, [14, 18, 22, 58, 70]),
        (Then(10, Never(), QSR(alpha=0.375, base=4, warmup=9, total=70)), 70, [19, 28, 64, 70]),
    ],
    ids=repr,
)
def test_after_a_switch_steps_of_the_run_are_those_of_the_whole_run(
    when: Schedule, steps: int, expected: list[int]
) -> None:
    assert rounds(when, steps, lambda step: 0.125 if step < 20 else 0.0625) == expected


@pytest.mark.parametrize(
    "expression",
    [
        "post_local_sgd(switch=10, every=QSR(alpha=0.0, base=4, total=40))",
        "diloco(warmup=10, every=QSR(alpha=0.0, base=4, total=40))",
        "slowmo(warmup=10, every=QSR(alpha=0.0, base=4, total=40))",
        "palsgd(p=0.0, warmup=10, every=QSR(alpha=0.0, base=4, total=40))",
        "qsr(alpha=0.0, base=3, total=40)",
    ],
)
def test_the_last_round_ends_the_run(expression: str) -> None:
    walk = Walk(offbeat.Solo(), expression)
    walk.go(40)
    assert walk.rounds[-1] == 40


def asked(when: Schedule, steps: int) -> list[tuple[int, dict[str, Any]]]:
    """The state of the second of two schedules after each plan; all rounds report drift 1 and loss 1."""
    state, step, known = when.init(), 0, []
    while step < steps:
        heard = {"drift": 1.0, "loss": 1.0, "round_lr": 0.1} if known and known[0][0] != step else {}
        plan = when.next(Clock(step=step, round=max(0, len(known)), lr=0.1, **heard), state)
        if plan is not None:
            known.append((step, dict(state["second"])))
        step = step + 1 if plan is None else plan
    return known


@pytest.mark.parametrize(
    ("warmup", "sampled"), [(0, {14, 18, 22, 26}), (10, {14, 18, 22, 26}), (20, {22, 26})]
)
def test_after_a_switch_drift_is_sampled_until_a_step_of_the_run(warmup: int, sampled: set[int]) -> None:
    known = asked(Then(10, Never(), Adaptive(start=4, sample=30, warmup=warmup)), 40)
    counts = [(step, state["count"]) for step, state in known]
    assert {step for (_, before), (step, now) in pairwise(counts) if now > before} == sampled
    assert counts[0] == (10, 0)


@pytest.mark.parametrize(("warmup", "ended"), [(0, 18), (10, 18), (12, 22), (20, 30)])
def test_after_a_switch_intervals_of_losses_begin_there(warmup: int, ended: int) -> None:
    """The first interval of eight steps ends when its reference loss is known."""
    known = asked(Then(10, Never(), AdaComm(start=4, interval=8, warmup=warmup)), 40)
    assert next(step for step, state in known if state["first"] is not None) == ended


def published(peak: float, total: int, warmup: int, step: int) -> float:
    """Linear warm-up, then cosine decay to 1e-6."""
    e = 1e-6
    if step < warmup:
        return e + step * (peak - e) / warmup
    return e + 0.5 * (peak - e) * (1 + math.cos(math.pi * (step - warmup) / (total - warmup)))


@pytest.mark.parametrize(
    ("peak", "total", "warmup", "base", "alpha", "expected", "share"),
    [
        (0.008, 93_600, 10_000, 4, 0.0175, 9_711, 10.4),
        (0.008, 93_600, 10_000, 8, 0.0175, 6_461, 6.9),
        (0.8, 62_400, 1_560, 2, 0.2, 24_792, 39.7),
        (0.8, 62_400, 1_560, 4, 0.25, 12_539, 20.1),
    ],
)
def test_qsr_communicates_as_much_as_published(
    peak: float, total: int, warmup: int, base: int, alpha: float, expected: int, share: float
) -> None:
    rule = QSR(alpha=alpha, base=base, warmup=warmup, peak=peak, total=total)
    found = rounds(rule, total, lambda step: published(peak, total, warmup, step))
    assert len(found) == expected
    assert round(100 * len(found) / total, 1) == share
    assert found[-1] == total  # the last round ends the run


def period(rule: QSR, *, step: int = 0, lr: float = 0.1) -> int:
    due = rule.next(Clock(step=step, round=0, lr=lr), rule.init())
    assert due is not None
    return due - step


@pytest.mark.parametrize(
    ("rule", "step", "lr", "expected"),
    [
        (QSR(alpha=0.5, base=4), 0, 0.125, 16),  # (0.5 / 0.125)²
        (QSR(alpha=0.5, base=4), 100, 0.125, 16),
        (QSR(alpha=0.5, base=4), 0, 0.11, 20),  # ⌊20.66⌋
        (QSR(alpha=0.5, base=4), 0, 0.25, 4),
        (QSR(alpha=0.5, base=4), 0, 0.5, 4),  # base, not 1
        (QSR(alpha=0.5, base=4), 0, 8.0, 4),
        (QSR(alpha=0.5, base=17), 0, 0.125, 17),
        (QSR(alpha=0.5), 0, 1.0, 4),  # base is 4 unless given
        (QSR(alpha=0.5, base=1, power=1), 0, 0.125, 4),
        (QSR(alpha=0.5, base=1, power=3), 0, 0.125, 64),
        (QSR(alpha=0.5, base=1, power=1), 0, 0.11, 4),
        (QSR(alpha=0.0, base=3), 0, 1e-9, 3),
        (QSR(alpha=0.5, base=3), 0, 0.0, 3),
        (QSR(alpha=0.5, base=3), 0, -0.1, 3),
        # In the warm-up: base, or the rule at the peak, whatever the rate is.
        (QSR(alpha=0.5, base=3, warmup=10), 0, 1e-6, 3),
        (QSR(alpha=0.5, base=3, warmup=10), 9, 1e-6, 3),
        (QSR(alpha=0.5, base=3, warmup=10), 10, 0.125, 16),
        (QSR(alpha=0.5, base=3, warmup=10, peak=0.125), 0, 1e-6, 16),
        (QSR(alpha=0.5, base=3, warmup=10, peak=0.125), 9, 1e-6, 16),
        (QSR(alpha=0.5, base=3, warmup=10, peak=0.125), 10, 0.25, 4),
        (QSR(alpha=0.5, base=3, warmup=10, peak=5.0), 0, 1e-6, 3),
        (QSR(alpha=0.5, base=3, peak=0.125), 0, 0.25, 4),  # without a warm-up the peak says nothing
        # The last round ends the run, in the warm-up too; after the end the rule is free again.
        (QSR(alpha=0.5, base=4, total=20), 0, 0.125, 16),
        (QSR(alpha=0.5, base=4, total=20), 16, 0.125, 4),
        (QSR(alpha=0.5, base=4, total=20), 18, 0.125, 2),
        (QSR(alpha=0.5, base=4, total=20), 19, 0.125, 1),
        (QSR(alpha=0.5, base=4, total=20), 20, 0.125, 16),
        (QSR(alpha=0.5, base=4, total=20), 21, 0.125, 16),
        (QSR(alpha=0.5, base=4, total=20), 18, 0.0, 2),
        (QSR(alpha=0.5, base=4, warmup=30, total=20), 18, 0.125, 2),
        (QSR(alpha=0.5, base=4, warmup=30, peak=0.125, total=20), 10, 0.125, 10),
        (QSR(alpha=0.5, base=4, warmup=30, peak=0.125, total=20), 20, 0.125, 16),
    ],
)
def test_qsr_periods(rule: QSR, step: int, lr: float, expected: int) -> None:
    assert period(rule, step=step, lr=lr) == expected


@pytest.mark.parametrize("power", [1.0, 2.0, 3.0, 0.5, 0.01, 40.0])
@pytest.mark.parametrize("lr", [1e-30, 1e-300, 5e-324])
def test_qsr_periods_stay_finite(power: float, lr: float) -> None:
    longest = period(QSR(alpha=1e6, base=1, power=power), lr=lr)
    assert longest <= 2**31
    if power >= 0.5:
        assert longest >= 0.999 * 2**31  # the cap is reached, up to the rounding of a power


def test_qsr_is_asked_with_the_rate_of_the_coming_step() -> None:
    """lr 0.5 at first, 0.125 from step 5 on: the period begun at step 4 is still short, the next is 16."""
    assert rounds(QSR(alpha=0.5, base=4), 40, lambda step: 0.5 if step < 5 else 0.125) == [4, 8, 24, 40]


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: Every(0), "Every(steps=0): steps must be at least 1."),
        (lambda: Every(-3), "Every(steps=-3): steps must be at least 1."),
        (lambda: Every(4, offset=4), "Every(steps=4, offset=4): offset must be between 0 and steps - 1."),
        (lambda: Every(4, offset=-1), "Every(steps=4, offset=-1): offset must be between 0 and steps - 1."),
        (lambda: Every(4, skip=6), "Every(steps=4, skip=6): skip must be a multiple of steps."),
        (lambda: Every(4, skip=0), "Every(steps=4, skip=0): skip must be a multiple of steps."),
        (lambda: Every(4, skip=-4), "Every(steps=4, skip=-4): skip must be a multiple of steps."),
        (
            lambda: Then(-1, Never(), Every(2)),
            "Then(switch=-1, first=Never(), second=Every(steps=2)): switch must not be negative.",
        ),
        (lambda: schedule(0), "Every(steps=0): steps must be at least 1."),
    ],
)
def test_sentences(make: Any, sentence: str) -> None:
    with says(ValueError, sentence):
        make()


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"alpha": -0.1}, "alpha must be a finite number, at least 0."),
        ({"alpha": math.inf}, "alpha must be a finite number, at least 0."),
        ({"alpha": math.nan}, "alpha must be a finite number, at least 0."),
        ({"base": 0}, "base must be at least 1."),
        ({"warmup": -1}, "warmup must not be negative."),
        ({"peak": 0.0}, "peak must be positive."),
        ({"peak": math.nan}, "peak must be positive."),
        ({"total": 0}, "total must be at least 1."),
        ({"power": 0.0}, "power must be positive."),
        ({"power": math.nan}, "power must be positive."),
    ],
)
def test_qsr_sentences(changes: dict[str, Any], fault: str) -> None:
    values = {"alpha": 0.1, "base": 4, "warmup": 0, "peak": None, "total": None, "power": 2.0, **changes}
    call = "QSR(" + ", ".join(f"{key}={value!r}" for key, value in values.items()) + ")"
    with says(ValueError, f"{call}: {fault}"):
        QSR(**values)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: Every(2.5), "Every(steps=2.5): steps must be a whole number."),
        (lambda: Adaptive(2.5, 8), "Adaptive(start=2.5, sample=8, warmup=0): start must be a whole number."),
        (
            lambda: AdaComm(4, 0.5),
            "AdaComm(start=4, interval=0.5, warmup=0): interval must be a whole number.",
        ),
        (
            lambda: QSR(0.1, base=2.5),
            "QSR(alpha=0.1, base=2.5, warmup=0, peak=None, total=None, power=2.0): "
            "base must be a whole number.",
        ),
        (
            lambda: Then(True, Never(), Never()),
            "Then(switch=True, first=Never(), second=Never()): switch must be a whole number.",
        ),
    ],
)
def test_steps_are_whole(make: Any, sentence: str) -> None:
    with says(TypeError, sentence):
        make()


@pytest.mark.parametrize("every", [2.0, "8", True, None])
def test_every_is_a_number_or_a_schedule(every: Any) -> None:
    sentence = f"every={every!r}: every must be a whole number of steps, or a schedule such as Every(8)."
    with says(TypeError, sentence):
        schedule(every)


def test_every_as_a_number() -> None:
    assert schedule(8) == Every(8)
    assert schedule(QSR(alpha=0.1)) == QSR(alpha=0.1)


def test_reprs_are_as_one_would_type_them() -> None:
    for text in (
        "Every(steps=8)",
        "Every(steps=8, offset=2)",
        "Every(steps=8, skip=16)",
        "Every(steps=8, offset=2, skip=16)",
        "Never()",
        "Then(switch=4, first=Never(), second=Every(steps=3))",
        "QSR(alpha=0.1, base=4, warmup=0, peak=None, total=None, power=2.0)",
    ):
        assert repr(eval(text)) == text


def test_a_schedule_of_ones_own_must_answer() -> None:
    with pytest.raises(NotImplementedError):
        Schedule().next(Clock(step=0, round=0, lr=0.1), {})
    assert Clock(step=0, round=0, lr=0.1).drift is None


class Counting(Schedule):
    """Records every call; answers like `Every(period)`, or None in between."""

    def __init__(self, period: int, silent: int = 0) -> None:
        self.period, self.silent, self.asked = period, silent, []

    def __repr__(self) -> str:
        return f"Counting({self.period})"

    def next(self, clock: Clock, state: dict[str, Any]) -> int | None:
        self.asked.append((clock.step, clock.round, clock.lr))
        return None if clock.step < self.silent else clock.step + self.period


def driven(when: Schedule, lrs: list[float], delay: int = 0) -> list[int]:
    """The steps at which rounds of a plain averaging began."""
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=lrs[0])
    part = offbeat.Exchange(offbeat.params(model), when=when, among=offbeat.Solo(), delay=delay)
    sync = offbeat.Synchronizer(optimizer, [part])
    for lr in lrs:
        optimizer.param_groups[0]["lr"] = lr
        sync.step()
    return [report.step for report in sync.reports]


def test_a_schedule_is_asked_once_per_period_before_its_first_step() -> None:
    when = Counting(3)
    lrs = [0.5 / (n + 1) for n in range(8)]
    assert driven(when, lrs) == [3, 6]
    # The rate is that of the coming step, which the loop has already set.
    assert when.asked == [(0, 0, lrs[0]), (3, 1, lrs[3]), (6, 2, lrs[6])]


def test_a_schedule_without_a_plan_is_asked_before_every_step() -> None:
    when = Counting(2, silent=3)
    assert driven(when, [0.5] * 8) == [5, 7]
    assert [step for step, _, _ in when.asked] == [0, 1, 2, 3, 5, 7]


def test_a_plan_survives_a_falling_rate() -> None:
    """If asked again at each step, the rule's horizon would recede: 4, 5, 7, 11 … steps away."""
    lrs = [0.25 / 1.2**n for n in range(12)]
    assert period(QSR(alpha=0.5, base=2), lr=lrs[3]) > 4
    # (0.5 / 0.25)² = 4; at step 4 the rate is 0.1206: 17.
    assert driven(QSR(alpha=0.5, base=2), lrs) == [4]
    assert driven(QSR(alpha=0.5, base=2), [*lrs, *[0.25] * 10]) == [4, 21]


def test_a_schedule_knows_the_drift_of_the_last_round() -> None:
    seen: list[float | None] = []

    class Curious(Counting):
        def next(self, clock: Clock, state: dict[str, Any]) -> int | None:
            seen.append(clock.drift)
            return super().next(clock, state)

    assert driven(Curious(2), [0.5] * 5) == [2, 4]
    assert seen[0] is None
    assert seen[-1] == 0.0  # one worker never drifts


@pytest.mark.parametrize(
    ("when", "delay", "sentence"),
    [
        (Every(2), 3, "delay=3 with Every(steps=2): delay must not exceed the period, which can be 2."),
        (Every(2), -1, 'delay=-1: delay must be a number of steps, at least 0, or "round".'),
        (Every(2), True, 'delay=True: delay must be a number of steps, at least 0, or "round".'),
        (Every(2), "next", "delay='next': delay must be a number of steps, at least 0, or \"round\"."),
        (Every(2), 1.0, 'delay=1.0: delay must be a number of steps, at least 0, or "round".'),
    ],
)
def test_delay_sentences(when: Schedule, delay: Any, sentence: str) -> None:
    with says(ValueError, sentence):
        driven(when, [0.5], delay)


def test_a_schedule_that_plans_the_past_is_a_mistake() -> None:
    with pytest.raises(AssertionError, match=r"^Counting\(0\) plans step 0 after step 0"):
        driven(Counting(0), [0.5])

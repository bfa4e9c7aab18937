"""When the next round begins."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar

from offbeat.base.checks import is_whole
from offbeat.base.clock import Clock, State
from offbeat.base.errors import show

LATER = -1  # instead of a step: a period has begun, and its end is not known yet


class Schedule:
    """When the next round begins. A frozen value; equal clocks give equal answers on all ranks."""

    floor: ClassVar[str | None] = None  # the field that holds the shortest regular period

    @property
    def shortest(self) -> int | None:
        """The shortest regular period, or None if it is not known in advance. A longer delay is refused."""
        return None if self.floor is None else getattr(self, self.floor)

    @property
    def needs(self) -> frozenset[str]:
        """Which of "drift", "loss" and "cost" the schedule depends on."""
        return frozenset()

    @property
    def timed(self) -> bool:
        """Whether a period ends by the clock, so that workers make different numbers of steps."""
        return False

    def init(self) -> State:
        return {}

    def next(self, clock: Clock, state: State) -> int | None:
        """Return the number of completed iterations after which the next round begins; above `clock.step`.

        Called once per period, before its first step. After None it is called again before the next step;
        after LATER as well, but then the period has begun.
        """
        raise NotImplementedError


def check_fields(value: Schedule, **least: int) -> None:
    """Refuse a value unless the named fields are whole numbers, each at least the given number."""
    for name, low in least.items():
        given = getattr(value, name)
        if not is_whole(given):
            raise TypeError(f"{value!r}: {name} must be a whole number.")
        if given < low:
            must = f"be at least {low}" if low else "not be negative"
            raise ValueError(f"{value!r}: {name} must {must}.")
        if given.bit_length() > 63:
            raise ValueError(f"{type(value).__name__}({name}={show(given)}): {name} must be below 2**63.")


@dataclass(frozen=True)
class Every(Schedule):
    """A round after each step n ≡ offset (mod steps), except where n is a multiple of `skip`."""

    steps: int
    offset: int = 0
    skip: int | None = None
    floor = "steps"

    def __post_init__(self) -> None:
        check_fields(self, steps=1)
        if not 0 <= self.offset < self.steps:
            raise ValueError(f"{self!r}: offset must be between 0 and steps - 1.")
        if self.skip is not None and (self.skip < 1 or self.skip % self.steps):
            raise ValueError(f"{self!r}: skip must be a multiple of steps.")

    def __repr__(self) -> str:
        offset = f", offset={self.offset}" if self.offset else ""
        skip = f", skip={self.skip}" if self.skip is not None else ""
        return f"Every(steps={self.steps}{offset}{skip})"

    def next(self, clock: Clock, state: State) -> int | None:
        if self.skip == self.steps and self.offset == 0:
            return None
        due = clock.step + 1 + (self.offset - clock.step - 1) % self.steps
        return due if self.skip is None or due % self.skip else due + self.steps


@dataclass(frozen=True)
class Never(Schedule):
    """No rounds at all."""

    def next(self, clock: Clock, state: State) -> int | None:
        return None


@dataclass(frozen=True)
class Then(Schedule):
    """`first` plans the steps 1 … switch, `second` the steps after the switch, counted from there.

    A period belongs wholly to the schedule that plans its first step. Fields that name a step of the run,
    `warmup`, `sample` and `total`, still count from the start of the run.
    """

    switch: int
    first: Schedule
    second: Schedule

    def __post_init__(self) -> None:
        check_fields(self, switch=0)
        for name in ("first", "second"):
            if not isinstance(getattr(self, name), Schedule):
                raise TypeError(f"{self!r}: {name} must be a schedule, such as Every(8).")

    @property
    def shortest(self) -> int | None:
        inside = [self.first, self.second] if self.switch else [self.second]
        return min((s.shortest for s in inside if s.shortest is not None), default=None)

    @property
    def needs(self) -> frozenset[str]:
        return self.first.needs | self.second.needs

    @property
    def timed(self) -> bool:
        return self.first.timed or self.second.timed

    def init(self) -> State:
        return {"first": self.first.init(), "second": self.second.init()}

    def next(self, clock: Clock, state: State) -> int | None:
        if clock.step < self.switch:
            return self.first.next(clock, state["first"])
        later = replace(clock, step=clock.step - self.switch, origin=clock.origin + self.switch)
        due = self.second.next(later, state["second"])
        return due if due in (None, LATER) else due + self.switch


@dataclass(frozen=True)
class QSR(Schedule):
    """The quadratic synchronization rule: the period grows as the learning rate decays.

        H = max(base, ⌊(alpha / lr)^power⌋)

    The lr is that of the period's first step. Larger `alpha` communicates less; `base` is the shortest
    period. In the first `warmup` steps, whose tiny rates would make periods enormous, the rule uses `peak`,
    the rate after the warm-up; without `peak`, H = base there. With `total`, the last round ends the run.
    First alpha to try: peak·√base with AdamW, about 0.17 of that with SGD.
    """

    alpha: float
    base: int = 4
    warmup: int = 0
    peak: float | None = None
    total: int | None = None
    power: float = 2.0
    floor = "base"

    def __post_init__(self) -> None:
        if not (math.isfinite(self.alpha) and self.alpha >= 0):
            raise ValueError(f"{self!r}: alpha must be a finite number, at least 0.")
        check_fields(self, base=1, warmup=0)
        if self.peak is not None and not self.peak > 0:
            raise ValueError(f"{self!r}: peak must be positive.")
        if self.total is not None:
            check_fields(self, total=1)
        if not self.power > 0:
            raise ValueError(f"{self!r}: power must be positive.")

    def next(self, clock: Clock, state: State) -> int | None:
        lr = self.peak if clock.absolute < self.warmup else clock.lr
        period = self.base
        if lr is not None and lr > 0:
            # A period beyond 2³¹ steps means no more rounds; the cap keeps the power finite.
            ratio = min(self.alpha / lr, 2.0 ** min(31 / self.power, 1023))
            period = max(period, int(ratio**self.power))
        if self.total is not None and clock.absolute < self.total:
            period = max(1, min(period, self.total - clock.absolute))
        return clock.step + period


@dataclass(frozen=True)
class Adaptive(Schedule):
    """The period grows while workers stay closer than the learning rate explains: see `offbeat.adaptive`."""

    start: int
    sample: int
    warmup: int = 0
    floor, needs = "start", frozenset({"drift"})

    def __post_init__(self) -> None:
        check_fields(self, start=1, sample=1, warmup=0)
        if self.warmup >= self.sample:
            raise ValueError(f"{self!r}: warmup must be below sample.")

    def init(self) -> State:
        return {"period": self.start, "seen": 0, "total": 0.0, "count": 0}

    def next(self, clock: Clock, state: State) -> int | None:
        drift, lr, step = clock.drift, clock.round_lr, clock.absolute
        if drift is not None and lr and clock.round > state["seen"]:
            state["seen"] = clock.round
            if step >= self.warmup and (step < self.sample or not state["count"]):
                state["total"] += drift / lr
                state["count"] += 1
            elif step >= self.warmup:
                expected = lr * state["total"] / state["count"]
                if drift < 0.7 * expected:
                    state["period"] += 1
                elif drift > 1.3 * expected:
                    state["period"] = max(1, state["period"] - 1)
        return clock.step + int(state["period"])


@dataclass(frozen=True)
class AdaComm(Schedule):
    """The period shrinks as the loss given to `sync.observe(loss)` falls: see `offbeat.adacomm`."""

    start: int
    interval: int
    warmup: int = 0
    floor, needs = "start", frozenset({"loss"})

    def __post_init__(self) -> None:
        check_fields(self, start=1, interval=1, warmup=0)

    def init(self) -> State:
        return {"period": self.start, "seen": 0, "at": 0, "total": 0.0, "steps": 0, "ended": 0, "first": None}

    def next(self, clock: Clock, state: State) -> int | None:
        if clock.loss is not None and clock.round > state["seen"] and clock.absolute > self.warmup:
            steps = clock.step - state["at"]
            state["total"] += clock.loss * steps
            state["steps"] += steps
        state["seen"], state["at"] = clock.round, clock.step
        # Intervals count from the end of the warm-up, or from the first step this schedule plans.
        ended = max(0, clock.absolute - max(self.warmup, clock.origin)) // self.interval
        if ended > state["ended"] and state["steps"]:
            self._learn(state["total"] / state["steps"], clock.round_lr or 0.0, state)
            state.update(total=0.0, steps=0, ended=ended)
        return clock.step + int(state["period"])

    def _learn(self, loss: float, lr: float, state: State) -> None:
        if state["first"] is None:
            state["first"] = [loss, lr]
            return
        first_loss, first_lr = state["first"]
        wanted = math.inf
        if lr > 0 and first_lr > 0 and 0 < first_loss < math.inf:
            wanted = math.sqrt(first_lr / lr * max(loss, 0.0) / first_loss) * self.start
        # Compare before rounding, because a loss can be infinite or NaN.
        smaller = wanted <= state["period"] - 1
        state["period"] = max(1, math.ceil(wanted)) if smaller else math.ceil(state["period"] / 2)


def schedule(every: int | Schedule) -> Schedule:
    """`every=8` means `Every(8)`."""
    if isinstance(every, Schedule):
        return every
    if not is_whole(every):
        raise TypeError(
            f"every={every!r}: every must be a whole number of steps, or a schedule such as Every(8)."
        )
    return Every(every)

"""The time between the rounds of an exchange."""

from __future__ import annotations

from offbeat.base.clock import State

_UNIT = 1e9  # whole nanoseconds: their sum does not depend on when a clock began


class Stopwatch:
    """Measures the current period, and the pace of the steps in the one before."""

    def __init__(self) -> None:
        self._last: float | None = None
        self._passed = 0
        self._known = False  # whether the period began with a round
        self._waited = 0.0  # for rounds since then
        self._stopped = 0  # the number of nested pauses
        self.pace = 0.0  # seconds of a step, without waiting, in the last period; 0 if it is not known

    def read(self, now: float) -> float:
        """Return the seconds since the period began."""
        if self._last is not None and not self._stopped:
            self._passed += round((now - self._last) * _UNIT)
        self._last = now
        return self._passed / _UNIT

    def stop(self, now: float) -> None:
        """A pause begins. Its time does not count."""
        self.read(now)
        self._stopped += 1

    def go(self, now: float) -> None:
        """A pause is over."""
        self.read(now)
        self._stopped -= 1

    def begin(self, now: float, steps: int) -> None:
        """A round begins, this number of steps after the last."""
        computed = max(0.0, self.read(now) - self._waited)
        self.pace = computed / steps if self._known and steps else 0.0
        self._known, self._waited = True, 0.0
        self.restart(now)

    def land(self, now: float, waited: float, *, late: bool) -> None:
        """A round has landed, after a wait: a `late` one in this period, others before it begins."""
        if late:
            self._waited += waited
        else:
            self.restart(now)

    def restart(self, now: float) -> None:
        """The period begins now."""
        self._last, self._passed = now, 0

    def state_dict(self, now: float) -> State:
        self.read(now)
        return {"passed": self._passed, "known": self._known, "waited": self._waited, "pace": self.pace}

    def load_state_dict(self, state: State, now: float) -> None:
        self._last, self._passed, self._known = now, state["passed"], state["known"]
        self._waited, self.pace = state["waited"], state["pace"]

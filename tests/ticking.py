"""A clock that moves by computation and messages alone, on workers of any kind."""

from __future__ import annotations

from offbeat.comm.collective import Collective
from offbeat.comm.communicator import Communicator, Pending, PendingList, Tensors, Wrapped


class Ticking(Wrapped):
    """Another communicator, whose worker needs `seconds` for a gradient and waits `latency` for a message.

    Real workers then have the virtual time of `simulate(compute=..., network=Network(latency))`.
    """

    def __init__(
        self, comm: Communicator, seconds: float = 1.0, latency: float = 0.0, time: list[float] | None = None
    ) -> None:
        super().__init__(comm)
        self._seconds, self._latency, self._time = seconds, latency, [0.0] if time is None else time

    def wrap(self, comm: Communicator) -> Communicator:
        return Ticking(comm, self._seconds, self._latency, self._time)

    def now(self) -> float:
        return self._time[0]

    def computed(self, step: int, share: float = 1.0) -> None:
        super().computed(step, share)
        self._time[0] += self._seconds if share == 1 else 0.0

    def run(self, kind: Collective, tensors: Tensors, *, src: int = 0, control: bool = False) -> PendingList:
        begun = self.comm.tell([round(self.now() * 1e9)])
        message = self.comm.run(kind, tensors, src=src, control=control)

        def lands() -> float:
            """Once the last worker has sent it."""
            latency = self._latency if self.size > 1 else 0.0
            return max(words[0] for words in begun.wait()) / 1e9 + latency

        def wait() -> Tensors:
            value = message.wait()
            self._time[0] = max(self.now(), lands())
            return value

        return Pending(wait, lambda: False, lands)


def needs_clock(expression: str) -> bool:
    """Whether the time that steps and messages take decides what a method does."""
    return "Seconds(" in expression or "Budget(" in expression


def clocked(comm: Communicator, expression: str) -> Communicator:
    """The communicator, with a second for each gradient and half of one for each message if time decides."""
    return Ticking(comm, 1.0, 0.5) if needs_clock(expression) else comm

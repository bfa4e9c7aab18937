"""Throttled links whose time is virtual where the workers' time is: exact, and over at once."""

from __future__ import annotations

from offbeat import Communicator, Throttled
from offbeat.comm.throttled import Link
from offbeat.simulate.virtual import Virtual


def throttled(comm: Communicator, *, rate: float, latency: float = 0.0, burst: int = 0) -> Throttled:
    """Behind a link on the clock of the workers: that of the simulation, or the real one."""
    if not isinstance(comm, Virtual):
        return Throttled(comm, rate=rate, latency=latency, burst=burst)
    stage = comm._stage

    def now() -> float:
        return stage.clocks[stage.current]

    def sleep(seconds: float) -> None:
        stage.clocks[stage.current] += seconds

    link = Link(rate, latency, burst, clock=now, sleep=sleep)
    return Throttled(comm, rate=rate, latency=latency, burst=burst, link=link)

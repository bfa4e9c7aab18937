"""Throttled links in virtual time, where the workers' time is virtual: exact and instant."""

from __future__ import annotations

from offbeat import Communicator, Throttled
from offbeat.comm.throttled import LinkQueue
from offbeat.simulate.virtual import Virtual


def throttled(comm: Communicator, *, rate: float, latency: float = 0.0, burst: int = 0) -> Throttled:
    """The communicator behind a link on the workers' clock, simulated or real."""
    if not isinstance(comm, Virtual):
        return Throttled(comm, rate=rate, latency=latency, burst=burst)
    scheduler = comm._scheduler

    def now() -> float:
        return scheduler.clocks[scheduler.current]

    def sleep(seconds: float) -> None:
        scheduler.clocks[scheduler.current] += seconds

    link = LinkQueue(rate, latency, burst, clock=now, sleep=sleep)
    return Throttled(comm, rate=rate, latency=latency, burst=burst, link=link)

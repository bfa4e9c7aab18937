"""Many workers in one process: deterministic, in virtual time."""

from offbeat.simulate.compute import (
    Compute,
    Constant,
    HeavyTailed,
    Jittered,
    Recorded,
    Stragglers,
    Uneven,
)
from offbeat.simulate.failures import Failures
from offbeat.simulate.network import Level, Network
from offbeat.simulate.run import simulate
from offbeat.simulate.virtual import Virtual

__all__ = [
    "Compute",
    "Constant",
    "Failures",
    "HeavyTailed",
    "Jittered",
    "Level",
    "Network",
    "Recorded",
    "Stragglers",
    "Uneven",
    "Virtual",
    "simulate",
]

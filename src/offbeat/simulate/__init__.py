"""Many workers in one process: deterministic, in virtual time."""

from offbeat.simulate.compute import (
    Compute,
    Constant,
    Failures,
    HeavyTailed,
    Jittered,
    Recorded,
    Stragglers,
    Uneven,
)
from offbeat.simulate.network import Level, Network
from offbeat.simulate.virtual import Virtual, simulate

__all__ = [
    "Compute", "Constant", "Failures", "HeavyTailed", "Jittered", "Level", "Network", "Recorded",
    "Stragglers", "Uneven", "Virtual", "simulate",
]  # fmt: skip

"""Many workers in one process: deterministic, in virtual time."""

from offbeat.simulate.network import Network
from offbeat.simulate.run import simulate
from offbeat.simulate.virtual import Virtual

__all__ = ["Network", "Virtual", "simulate"]

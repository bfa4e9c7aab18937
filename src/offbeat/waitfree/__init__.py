"""Wait-free rounds: the first worker to arrive starts a round; late workers contribute older tensors."""

from offbeat.waitfree.parts import EagerGradients, GroupAverage
from offbeat.waitfree.rounds import Attendance, GroupReport

__all__ = ["Attendance", "EagerGradients", "GroupAverage", "GroupReport"]

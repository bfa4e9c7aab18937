"""Wait-free rounds: the first worker to arrive starts a round; late workers contribute older tensors."""

from offbeat.waitfree.eager import EagerGradients
from offbeat.waitfree.group_average import GroupAverage
from offbeat.waitfree.rounds import Attendance, GroupReport

__all__ = ["Attendance", "EagerGradients", "GroupAverage", "GroupReport"]

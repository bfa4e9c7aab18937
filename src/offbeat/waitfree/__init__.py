"""Rounds that wait for nobody: whoever is ready calls the others, the late contribute what they last had."""

from offbeat.waitfree.attendance import Attendance, GroupReport
from offbeat.waitfree.eager import EagerGradients
from offbeat.waitfree.group_average import GroupAverage

__all__ = ["Attendance", "EagerGradients", "GroupAverage", "GroupReport"]

"""Wait-free rounds: late workers contribute older tensors, or nothing."""

from offbeat.waitfree.coded import CodedGradients, CodedReport
from offbeat.waitfree.parts import EagerGradients, GroupAverage
from offbeat.waitfree.rounds import Attendance, GroupReport
from offbeat.waitfree.sampler import CodedSampler, DataPart, coded_sampler

__all__ = ["Attendance", "CodedGradients", "CodedReport", "CodedSampler", "DataPart", "EagerGradients"]
__all__ += ["GroupAverage", "GroupReport", "coded_sampler"]

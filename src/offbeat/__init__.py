"""Train one PyTorch model on many workers that communicate seldom."""

from offbeat import methods as _methods
from offbeat.comm import Communicator, Metered, Pending, Solo
from offbeat.cost import Report, Totals
from offbeat.distributed import Torch
from offbeat.errors import CheckpointMismatch, Deadlock, Disagreement, OffbeatError, PeerLost
from offbeat.exchange import Exchange
from offbeat.expression import method
from offbeat.local import PseudoSync
from offbeat.methods import *  # noqa: F403 - the named methods, listed in methods.__all__
from offbeat.outer import SGD, Gossip, Outer, SlowMo
from offbeat.overlap import Eager, Overlap
from offbeat.part import Part
from offbeat.peers import Butterfly, Pairs, Peers, Subgroups, World
from offbeat.reduce import Mean, Reducer
from offbeat.schedule import QSR, AdaComm, Adaptive, Clock, Every, Never, Schedule, Then
from offbeat.simulate import Network, Virtual, simulate
from offbeat.sync import Synchronizer
from offbeat.tensors import Packed, grads, params
from offbeat.update import Correct, Replace, Update
from offbeat.waitfree import Attendance, EagerGradients, GroupAverage, GroupReport

__version__ = "0.1.0"

__all__ = [
    "QSR",
    "SGD",
    "AdaComm",
    "Adaptive",
    "Attendance",
    "Butterfly",
    "CheckpointMismatch",
    "Clock",
    "Communicator",
    "Correct",
    "Deadlock",
    "Disagreement",
    "Eager",
    "EagerGradients",
    "Every",
    "Exchange",
    "Gossip",
    "GroupAverage",
    "GroupReport",
    "Mean",
    "Metered",
    "Network",
    "Never",
    "OffbeatError",
    "Outer",
    "Overlap",
    "Packed",
    "Pairs",
    "Part",
    "PeerLost",
    "Peers",
    "Pending",
    "PseudoSync",
    "Reducer",
    "Replace",
    "Report",
    "Schedule",
    "SlowMo",
    "Solo",
    "Subgroups",
    "Synchronizer",
    "Then",
    "Torch",
    "Totals",
    "Update",
    "Virtual",
    "World",
    "grads",
    "method",
    "params",
    "simulate",
]
__all__ += _methods.__all__

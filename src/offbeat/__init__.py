"""Train one PyTorch model on many workers that communicate seldom."""

from offbeat import methods as _methods
from offbeat.comm import Communicator, Solo
from offbeat.cost import Report, Totals
from offbeat.detached import Detached
from offbeat.distributed import Torch
from offbeat.errors import CheckpointMismatch, Deadlock, Disagreement, NotFinite, OffbeatError, PeerLost
from offbeat.exchange import Exchange
from offbeat.expression import method
from offbeat.hook import ddp_hook
from offbeat.layout import flatten
from offbeat.local import PseudoSync
from offbeat.metered import Metered
from offbeat.methods import *  # noqa: F403 - the named methods, listed in methods.__all__
from offbeat.outer import SGD, Gossip, Outer, Rebase, SlowMo
from offbeat.overlap import Eager, Overlap
from offbeat.packed import Packed
from offbeat.part import Part
from offbeat.peers import Butterfly, Pairs, Peers, Subgroups, World
from offbeat.pending import Pending
from offbeat.reduce import (
    Code,
    ErrorFeedback,
    LowRank,
    Mean,
    Quantized,
    RandomBlock,
    Reducer,
    TopK,
    TwoLevel,
)
from offbeat.schedule import QSR, AdaComm, Adaptive, Clock, Every, Never, Schedule, Then
from offbeat.server import GLU, Compensated, LocalRule, LocalStep, PushPull
from offbeat.simulate import (
    Compute,
    Constant,
    Failures,
    HeavyTailed,
    Jittered,
    Level,
    Network,
    Recorded,
    Stragglers,
    Uneven,
    Virtual,
    simulate,
)
from offbeat.sync import Synchronizer
from offbeat.tensors import grads, params
from offbeat.throttle import Throttled
from offbeat.update import Correct, Replace, Update
from offbeat.waitfree import Attendance, EagerGradients, GroupAverage, GroupReport

__version__ = "0.1.0"

__all__ = [
    "GLU",
    "QSR",
    "SGD",
    "AdaComm",
    "Adaptive",
    "Attendance",
    "Butterfly",
    "CheckpointMismatch",
    "Clock",
    "Code",
    "Communicator",
    "Compensated",
    "Compute",
    "Constant",
    "Correct",
    "Deadlock",
    "Detached",
    "Disagreement",
    "Eager",
    "EagerGradients",
    "ErrorFeedback",
    "Every",
    "Exchange",
    "Failures",
    "Gossip",
    "GroupAverage",
    "GroupReport",
    "HeavyTailed",
    "Jittered",
    "Level",
    "LocalRule",
    "LocalStep",
    "LowRank",
    "Mean",
    "Metered",
    "Network",
    "Never",
    "NotFinite",
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
    "PushPull",
    "Quantized",
    "RandomBlock",
    "Rebase",
    "Recorded",
    "Reducer",
    "Replace",
    "Report",
    "Schedule",
    "SlowMo",
    "Solo",
    "Stragglers",
    "Subgroups",
    "Synchronizer",
    "Then",
    "Throttled",
    "TopK",
    "Torch",
    "Totals",
    "TwoLevel",
    "Uneven",
    "Update",
    "Virtual",
    "World",
    "ddp_hook",
    "flatten",
    "grads",
    "method",
    "params",
    "simulate",
]
__all__ += _methods.__all__

"""Train one PyTorch model on many workers that rarely communicate."""

from offbeat import methods as _methods
from offbeat.among import Butterfly, Pairs, Peers, Subgroups, World
from offbeat.base.clock import Clock
from offbeat.base.errors import CheckpointMismatch, Deadlock, Disagreement, NotFinite, OffbeatError, PeerLost
from offbeat.base.packed import Packed
from offbeat.base.tensors import flatten, grads, params
from offbeat.comm.communicator import Communicator, Metered, Pending
from offbeat.comm.solo import Solo
from offbeat.comm.throttled import Throttled
from offbeat.comm.torch_backend import Torch
from offbeat.engine.ddp_hook import ddp_hook
from offbeat.engine.exchange import Exchange
from offbeat.engine.part import Part
from offbeat.engine.pull import PseudoSync
from offbeat.engine.report import Report, Totals
from offbeat.engine.synchronizer import Synchronizer
from offbeat.methods import *  # noqa: F403 - the named methods, listed in methods.__all__
from offbeat.methods.expression import method
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
from offbeat.update.outer import SGD, Eager, Gossip, Outer, Overlap, SlowMo
from offbeat.update.update import Correct, Detached, Rebase, Replace, Update
from offbeat.waitfree import Attendance, EagerGradients, GroupAverage, GroupReport
from offbeat.when import QSR, AdaComm, Adaptive, Every, Never, Schedule, Then

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

"""The public names of Offbeat. `offbeat` imports them when the first is used: they need torch."""

# ruff: noqa: F403, F405 - the names of packages are listed in their own __all__
from offbeat import methods as _methods
from offbeat.among import Butterfly, Pairs, Peers, Subgroups, World
from offbeat.base.clock import Clock
from offbeat.base.errors import (
    CheckpointMismatch,
    Deadlock,
    Disagreement,
    NotFinite,
    OffbeatError,
    PeerLost,
    RunFinished,
)
from offbeat.base.packed import Packed
from offbeat.base.tensors import flatten, grads, moments, params
from offbeat.comm.communicator import Communicator, Metered, Pending
from offbeat.comm.solo import Solo
from offbeat.comm.throttled import Throttled
from offbeat.comm.torch_backend import Torch
from offbeat.elastic import *
from offbeat.engine.auc import AUCLoss
from offbeat.engine.ddp_hook import ddp_hook
from offbeat.engine.exchange import Exchange
from offbeat.engine.part import Part
from offbeat.engine.pull import PseudoSync
from offbeat.engine.report import Report, Totals
from offbeat.engine.stages import Stages
from offbeat.engine.synchronizer import Synchronizer
from offbeat.methods import *
from offbeat.methods.expression import method
from offbeat.reduce import *
from offbeat.server import *
from offbeat.simulate import *
from offbeat.update.outer import SGD, Eager, Gossip, Outer, Overlap, SlowMo
from offbeat.update.update import Correct, Detached, Rebase, Replace, Update
from offbeat.waitfree import *
from offbeat.when import QSR, AdaComm, Adaptive, Budget, Every, Never, Schedule, Seconds, Then

__all__ = ["GLU", "QSR", "SGD"]
__all__ += ["AUCLoss", "AdaComm", "Adaptive", "Attendance", "Budget", "Butterfly", "CheckpointMismatch"]
__all__ += ["Clock", "Code", "CodedGradients", "CodedReport", "CodedSampler", "Communicator", "Compensated"]
__all__ += ["Compute", "Constant", "Correct", "DataPart", "Deadlock", "Detached", "Disagreement", "Eager"]
__all__ += ["EagerGradients", "Elastic", "ErrorFeedback", "Every", "Exchange", "Failures", "Gossip"]
__all__ += ["GroupAverage", "GroupReport", "HeavyTailed", "Jittered", "Level", "LocalRule", "LocalStep"]
__all__ += ["LowRank", "Mean", "Metered", "Network", "Never", "NotFinite", "OffbeatError", "Outer", "Overlap"]
__all__ += ["Packed", "Pairs", "Part", "PeerLost", "Peers", "Pending", "PseudoSync", "PushPull", "Quantized"]
__all__ += ["RandomBlock", "Rebase", "Recorded", "Reducer", "Replace", "Report", "RunFinished", "Schedule"]
__all__ += ["Seconds", "SlowMo", "Solo", "Stages", "Stragglers", "Subgroups", "Synchronizer", "Then"]
__all__ += ["Throttled", "TopK", "Torch", "Totals", "TwoLevel", "Uneven", "Update", "Virtual", "World"]
__all__ += ["coded_sampler", "ddp_hook", "flatten", "grads", "method", "moments", "params", "simulate"]
__all__ += _methods.__all__

"""How a mean is applied to the live tensors, with an anchor or without."""

from offbeat.update.outer import SGD, Anchor, Anchored, Detached, Outer, Rebase, SlowMo
from offbeat.update.own import Eager, Gossip, Overlap
from offbeat.update.update import Correct, Replace, Update, square_distance

__all__ = [
    "SGD",
    "Anchor",
    "Anchored",
    "Correct",
    "Detached",
    "Eager",
    "Gossip",
    "Outer",
    "Overlap",
    "Rebase",
    "Replace",
    "SlowMo",
    "Update",
    "square_distance",
]

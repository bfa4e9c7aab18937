"""How a mean is applied to the live tensors, with an anchor or without."""

from offbeat.update.anchor import Anchor
from offbeat.update.detached import Detached
from offbeat.update.outer import SGD, Anchored, Gossip, Outer, Rebase, SlowMo
from offbeat.update.overlap import Eager, Overlap
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

"""How a payload is sent: each reducer owns its collectives."""

from offbeat.reduce.code import Code, ErrorFeedback
from offbeat.reduce.lowrank import LowRank
from offbeat.reduce.mean import Mean
from offbeat.reduce.quantized import Quantized
from offbeat.reduce.reducer import Reducer, Staged
from offbeat.reduce.sparse import RandomBlock, TopK
from offbeat.reduce.twolevel import TwoLevel

__all__ = [
    "Code",
    "ErrorFeedback",
    "LowRank",
    "Mean",
    "Quantized",
    "RandomBlock",
    "Reducer",
    "Staged",
    "TopK",
    "TwoLevel",
]

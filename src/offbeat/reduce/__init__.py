"""How a payload is sent: each reducer chooses its own collectives."""

from offbeat.reduce.code import Code, Reducer
from offbeat.reduce.feedback import ErrorFeedback
from offbeat.reduce.rounded import Mean, Quantized
from offbeat.reduce.sparse import RandomBlock, TopK
from offbeat.reduce.summary import LowRank, TwoLevel

__all__ = ["Code", "ErrorFeedback", "LowRank", "Mean", "Quantized", "RandomBlock"]
__all__ += ["Reducer", "TopK", "TwoLevel"]

"""Error feedback: what a code loses is sent later."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from offbeat.base.clock import Clock, State
from offbeat.base.packed import Packed
from offbeat.comm.communicator import Communicator, Pending
from offbeat.reduce.code import Code, Reducer


@dataclass(frozen=True)
class ErrorFeedback(Reducer):
    """A code whose losses each rank keeps and adds to its next payload.

        e ← decay·e + payload        q = code(e)        e ← e − q

    q is this rank's part of the mean. With decay=1 and equal weights nothing is ever lost: the sum of all q
    plus the kept e is the sum of all payloads. Smaller `decay` forgets old losses faster.

        offbeat.local_sgd(model, optimizer, reduce=ErrorFeedback(TopK(64)))
    """

    code: Code
    decay: float = 1.0

    lossy = remembers = True

    def __post_init__(self) -> None:
        check_code(self.code, "ErrorFeedback")
        if not 0 < self.decay <= 1:
            raise ValueError(f"{self!r}: decay must be above 0 and at most 1.")

    def init(self) -> State:
        return {"residual": None, "factor": 1.0, "code": self.code.init()}

    def start(self, payload: Packed, comm: Communicator, clock: Clock, state: State) -> Pending[Packed]:
        return feed(self.code, self.decay, payload, comm, clock, state)

    def reweigh(self, state: State, factor: float) -> None:
        """Scale the residual, so that it keeps its weight in a mean that is multiplied by `factor`."""
        for left in (state["residual"] or ()) if factor != state["factor"] else ():
            left.mul_(state["factor"] / factor)
        state["factor"] = factor


def feed(
    code: Code, decay: float, payload: Packed, comm: Communicator, clock: Clock, state: State
) -> Pending[Packed]:
    """Send the payload plus earlier losses. `state` keeps the new losses."""
    if state["residual"] is None:
        state["residual"] = [torch.zeros_like(flat) for flat in payload.flats]
    for flat, left in zip(payload.flats, state["residual"], strict=True):
        flat.add_(left, alpha=decay)
    return code.start(payload, comm, clock, state["code"], state["residual"])


def check_code(code: object, call: str) -> None:
    if not isinstance(code, Code):
        raise TypeError(f"{call}({code!r}): pass a code that knows what it loses, such as TopK(64).")
    if not code.lossy:
        raise ValueError(f"{call}({code!r}): it loses nothing; use it alone.")

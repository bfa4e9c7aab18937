"""Error feedback: what a code loses is sent later."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from offbeat.base.checks import is_number
from offbeat.base.clock import Clock, State
from offbeat.base.packed import Packed
from offbeat.comm.communicator import Communicator, Pending
from offbeat.reduce.code import Code, Reducer


@dataclass(frozen=True, repr=False)
class ErrorFeedback(Reducer):
    """A code whose losses each rank keeps and adds to its next payload.

        e ← decay·e + payload        q = code(e)        e ← e − q

    q is this rank's part of the mean. With decay=1, equal weights and no limit, nothing is ever lost: the sum
    of all q plus the kept e is the sum of all payloads. Smaller `decay` forgets old losses faster. With
    `limit` and K workers, the e of each tensor is first shortened to limit·√K times the norm of the tensor's
    payload, unless that payload is zero. So the loss of one huge gradient does not drown the next ones.

    By default, decay is 1 and there is no limit, but both are 0.5 for gradients through `Quantized` and
    `Mean(dtype)`: gradients are noisy, so that a small error of each mean is worth more than an exact sum.

        offbeat.local_sgd(model, optimizer, reduce=ErrorFeedback(TopK(64)))
    """

    code: Code
    decay: float | None = None
    limit: float | None = None

    lossy = remembers = True

    def __post_init__(self) -> None:
        check_code(self.code, "ErrorFeedback")
        if self.decay is not None and (not is_number(self.decay) or not 0 < self.decay <= 1):
            raise ValueError(f"{self!r}: decay must be above 0 and at most 1.")
        if self.limit is not None and (not is_number(self.limit) or not 0 < self.limit < math.inf):
            raise ValueError(
                f"{self!r}: limit must be a positive number, such as 1e9 to keep everything, or None for the "
                "default."
            )

    def __repr__(self) -> str:
        given = [f"{name}={value!r}" for name, value in vars(self).items() if value is not None]
        return f"ErrorFeedback({', '.join(given)})"

    def for_gradients(self) -> ErrorFeedback:
        decay = self.code.gradient_decay if self.decay is None else self.decay
        limit = self.code.gradient_limit if self.limit is None else self.limit
        return replace(self, decay=decay, limit=limit)

    def init(self) -> State:
        return {"residual": None, "factor": 1.0, "code": self.code.init()}

    def start(self, payload: Packed, comm: Communicator, clock: Clock, state: State) -> Pending[Packed]:
        if state["residual"] is not None and self.limit is not None:
            kept = payload.over(state["residual"]).views
            shorten(kept, payload.views, self.limit * math.sqrt(comm.size))
        return feed(self.code, 1.0 if self.decay is None else self.decay, payload, comm, clock, state)

    def reweigh(self, state: State, factor: float) -> None:
        """Scale the residual, so that it keeps its weight in a mean that is multiplied by `factor`."""
        for left in (state["residual"] or ()) if factor != state["factor"] else ():
            left.mul_(state["factor"] / factor)
        state["factor"] = factor


def shorten(tensors: Sequence[Tensor], others: Sequence[Tensor], limit: float) -> None:
    """Scale each tensor that is longer than `limit` times the other one to that length, unless it is 0."""
    norms = torch._foreach_norm([*tensors, *others])
    lengths = torch.stack([norm.to(norms[0].device, torch.float32) for norm in norms]).tolist()
    for tensor, length, other in zip(tensors, lengths, lengths[len(tensors) :], strict=False):
        if length > limit * other > 0:
            tensor.mul_(limit * other / length)


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

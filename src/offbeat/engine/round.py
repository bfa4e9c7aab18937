"""One round, from its beginning to its landing."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.profiler import record_function

from offbeat.base.clock import Clock, State
from offbeat.base.packed import Packed
from offbeat.comm.communicator import Metered, Pending, arrived
from offbeat.engine.checkpoint import copy_state
from offbeat.engine.report import Report, naming
from offbeat.reduce.reducer import Staged


def profiled(name: str) -> AbstractContextManager[object]:
    """A range of this name while a profile is taken; otherwise it would cost as much as ten small sums."""
    return record_function(name) if torch._C._autograd._profiler_enabled() else nullcontext()


class Round:
    """The messages of one round, and what they cost.

    A round opens with a header that compares the workers. The mean follows, then rank 0's buffers and the
    mean of the moments, where there are any.
    """

    def __init__(
        self, clock: Clock, period: int, comm: Metered, began: float, heads: Pending[list[int]]
    ) -> None:
        self.clock = clock  # when it began
        self.period = period  # steps since the last round
        self.comm, self.began = comm, began
        self.heads = heads  # raises if the ranks are not all in this round
        self.waited = 0.0  # seconds this worker has waited for it
        self.mean: Pending[Packed]
        self.followed: Pending[list[Tensor]] | None = None  # rank 0's buffers
        self.moments: Pending[Packed] | None = None
        self.sent: list[Tensor] | None = None  # the extras as they were sent, if the round lands late

    def wait(self) -> None:
        """Wait for all messages. Raises if the workers are not in the same round."""
        start = self.comm.now()
        for message in self._messages():
            message.wait()
        self.waited += self.comm.now() - start

    def advance(self) -> None:
        """Run the reducer's next stage, if it has one left."""
        if not (isinstance(self.mean, Staged) and self.mean.stages):
            return
        start = self.comm.now()
        self.heads.wait()
        self.mean.advance()
        self.waited += self.comm.now() - start

    def report(self, norm: float | None) -> Report:
        """What it cost; the drift is not known yet."""
        return Report(
            step=self.clock.step,
            round=self.clock.round,
            workers=self.comm.size,
            bytes_sent=self.comm.sent,
            bytes_received=self.comm.received,
            seconds_waited=self.waited,
            seconds_in_air=max(0.0, max(message.arrived() for message in self._messages()) - self.began),
            drift=None,
            norm=norm,
            period=self.period,
        )

    def _messages(self) -> list[Pending[Any]]:
        found: list[Pending[Any] | None] = [self.heads, self.mean, self.followed, self.moments]
        return [message for message in found if message is not None]

    def state_dict(self) -> State:
        """Wait for the messages, and save them without applying them."""
        with naming(self.clock):
            self.wait()
        return {
            "step": self.clock.step,
            "round": self.clock.round,
            "lr": self.clock.lr,
            "period": self.period,
            "bytes": [self.comm.sent, self.comm.received],
            "mean": [flat.clone() for flat in self.mean.wait().flats],
            "followed": copy_state(None if self.followed is None else self.followed.wait()),
            "moments": None if self.moments is None else self.moments.wait().tensors(),
            "sent": copy_state(self.sent),
        }

    @classmethod
    def resumed(cls, state: State, comm: Metered, packed: Packed) -> Round:
        """A round whose messages have all arrived, the mean in `packed`."""
        for flat, saved in zip(packed.flats, state["mean"], strict=True):
            flat.copy_(saved)
        comm.sent, comm.received = state["bytes"]
        clock = Clock(step=state["step"], round=state["round"], lr=state["lr"])
        round = cls(clock, state["period"], comm, comm.now(), heads=arrived([]))
        round.mean = arrived(packed)
        if state["followed"] is not None:
            round.followed = arrived(copy_state(state["followed"]))
        if state["moments"] is not None:
            moments = Packed.like(state["moments"])
            moments.read(list(state["moments"].values()))
            round.moments = arrived(moments)
        round.sent = copy_state(state["sent"])
        return round

"""One round, from its beginning to its landing."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.profiler import record_function

from offbeat.base.clock import Clock, State
from offbeat.base.packed import Packed
from offbeat.comm.metered import Metered
from offbeat.comm.pending import Pending, arrived
from offbeat.engine.report import Report, naming


def profiled(name: str) -> AbstractContextManager[object]:
    """A range of this name while a profile is taken; otherwise it would cost as much as ten small sums."""
    return record_function(name) if torch._C._autograd._profiler_enabled() else nullcontext()


@dataclass
class Round:
    """The messages of one round."""

    clock: Clock  # when it began
    period: int  # steps since the round before
    comm: Metered
    began: float
    heads: Pending[list[int]]  # raises if the ranks are not all in this round
    mean: Pending[Packed]
    followed: Pending[list[Tensor]]  # rank 0's buffers
    moments: Pending[Packed]
    sent: list[Tensor] | None  # the extras as they were sent, if the round lands late
    waited: float = 0.0  # seconds this worker has waited for it

    def wait(self) -> None:
        """Wait for all messages. Raises if the workers are not in the same round."""
        start = self.comm.now()
        self.heads.wait()
        for message in (self.mean, self.followed, self.moments):
            message.wait()
        self.waited += self.comm.now() - start

    def advance(self) -> None:
        """Send the second message, if the reducer has one."""
        if not self.mean.answers:
            return
        start = self.comm.now()
        self.heads.wait()
        self.mean.advance()
        self.waited += self.comm.now() - start

    def report(self, norm: float | None) -> Report:
        """What it cost; the drift is not known yet."""
        messages = (self.heads, self.mean, self.followed, self.moments)
        return Report(
            step=self.clock.step,
            round=self.clock.round,
            workers=self.comm.size,
            bytes_sent=self.comm.sent,
            bytes_received=self.comm.received,
            seconds_waited=self.waited,
            seconds_in_air=max(0.0, max(message.arrived() for message in messages) - self.began),
            drift=None,
            norm=norm,
            period=self.period,
        )

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
            "followed": [value.clone() for value in self.followed.wait()],
            "moments": self.moments.wait().tensors(),
            "sent": None if self.sent is None else [value.clone() for value in self.sent],
        }

    @classmethod
    def resumed(cls, state: State, comm: Metered, room: Packed) -> Round:
        """A round whose messages have all arrived, the mean in `room`."""
        for flat, saved in zip(room.flats, state["mean"], strict=True):
            flat.copy_(saved)
        comm.sent, comm.received = state["bytes"]
        moments = Packed.like(state["moments"])
        moments.read(list(state["moments"].values()))
        return cls(
            clock=Clock(step=state["step"], round=state["round"], lr=state["lr"]),
            period=state["period"],
            comm=comm,
            began=comm.now(),
            heads=arrived([]),
            mean=arrived(room),
            followed=arrived([value.clone() for value in state["followed"]]),
            moments=arrived(moments),
            sent=None if state["sent"] is None else [value.clone() for value in state["sent"]],
        )

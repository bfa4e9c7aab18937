"""A round between its beginning and its landing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.profiler import record_function

from offbeat.base.clock import Clock, State
from offbeat.base.errors import PeerLost
from offbeat.base.packed import Packed
from offbeat.comm.communicator import Metered, Pending, arrived
from offbeat.engine.report import Report
from offbeat.reduce.reducer import Staged


@contextmanager
def naming(when: Clock | Report) -> Iterator[None]:
    """A worker lost inside was lost in this round."""
    try:
        yield
    except PeerLost as error:
        raise error.during(when.round, when.step) from error.__cause__


def profiled(name: str) -> AbstractContextManager[object]:
    """A range of this name in a profile, if one is being taken: naming it costs as much as ten small sums."""
    return record_function(name) if torch._C._autograd._profiler_enabled() else nullcontext()


def halfway(begun: int, due: int | None) -> int | None:
    """The step in the middle of a flight, the same for everyone; None while its end is not known."""
    return None if due is None else (begun + due + 1) // 2


def soonest(due: int | None, plan: int | None) -> int | None:
    """The step at which a round_ lands: when it is due, or when the next round begins if that is sooner."""
    return min((step for step in (due, plan) if step is not None), default=None)


@dataclass
class Round:
    """The messages of one round."""

    clock: Clock  # when it began
    due: int | None  # lands after this many steps, or just before the next round begins if that is sooner
    period: int  # steps since the round before
    comm: Metered
    began: float
    heads: Pending[list[int]]  # raises if the ranks are not all in this round
    mean: Pending[Packed]
    followed: Pending[list[Tensor]]  # rank 0's buffers
    moments: Pending[Packed]
    sent: list[Tensor] | None  # the extras' values, if it lands late: buffers averaged and followed, moments
    waited: float = 0.0  # seconds this worker has stood still for it

    def wait(self) -> None:
        """Until all has arrived. Raises if the workers are not in the same round."""
        start = self.comm.now()
        self.heads.wait()
        for message in (self.mean, self.followed, self.moments):
            message.wait()
        self.waited += self.comm.now() - start

    def advance(self) -> None:
        """Run the next stage of the reducer, if it has one left; others do nothing."""
        if not (isinstance(self.mean, Staged) and self.mean.stages):
            return
        start = self.comm.now()
        self.heads.wait()
        self.mean.advance()
        self.waited += self.comm.now() - start

    def report(self, norm: float | None) -> Report:
        """What it cost, its drift yet unknown."""
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
        """What is in the air, waited for but not applied."""
        with naming(self.clock):
            self.wait()
        return {
            "step": self.clock.step,
            "round": self.clock.round,
            "lr": self.clock.lr,
            "due": self.due,
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
            due=state["due"],
            period=state["period"],
            comm=comm,
            began=comm.now(),
            heads=arrived([]),
            mean=arrived(room),
            followed=arrived([value.clone() for value in state["followed"]]),
            moments=arrived(moments),
            sent=None if state["sent"] is None else [value.clone() for value in state["sent"]],
        )

"""The server's weights on their way to the workers."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from offbeat.comm import Communicator, Metered, Pending, arrived
from offbeat.cost import Report
from offbeat.schedule import Clock, State

Slices = list[list[Tensor]]  # of each vector, every rank's slice


@dataclass
class Pull:
    """All pushes since the pull before, and the weights they led to."""

    clock: Clock  # when it was asked for
    period: int  # steps since the pull before
    pace: list[float]  # the server's rates in them, summed, of each parameter group
    sent: int  # bytes of the pushes
    received: int
    waited: float  # seconds the worker has stood still for them
    began: float  # when the first of them was pushed
    weights: Pending[tuple[Slices, int]]  # and the bytes of the pull

    def report(self, workers: int, norm: float, waited: float) -> Report:
        _, pulled = self.weights.wait()
        return Report(
            step=self.clock.step,
            round=self.clock.round,
            workers=workers,
            bytes_sent=self.sent + pulled,
            bytes_received=self.received + pulled,
            seconds_waited=self.waited + waited,
            seconds_in_air=max(0.0, self.weights.arrived() - self.began),
            drift=None,
            norm=norm,
            period=self.period,
        )

    def state_dict(self) -> State:
        slices, pulled = self.weights.wait()
        return {
            "step": self.clock.step,
            "round": self.clock.round,
            "lr": self.clock.lr,
            "period": self.period,
            "pace": list(self.pace),
            "sent": self.sent,
            "received": self.received,
            "pulled": pulled,
            "slices": [[part.clone() for part in parts] for parts in slices],
        }

    @classmethod
    def resumed(cls, state: State, now: float) -> Pull:
        """One that has arrived."""
        slices = [[part.clone() for part in parts] for parts in state["slices"]]
        return cls(
            clock=Clock(step=state["step"], round=state["round"], lr=state["lr"]),
            period=state["period"],
            pace=list(state["pace"]),
            sent=state["sent"],
            received=state["received"],
            waited=0.0,
            began=now,
            weights=arrived((slices, state["pulled"])),
        )


def gathered(weights: list[Tensor], comm: Communicator) -> tuple[Slices, int]:
    """Every rank's slices, and how many bytes that took."""
    meter = Metered(comm)
    messages = [meter.gather(w) if w.numel() else arrived([w] * comm.size) for w in weights]
    # A gathering in a world of one is the slice itself, which the next push changes.
    slices = [
        [part.clone() if part is w else part for part in message.wait()]
        for message, w in zip(messages, weights, strict=True)
    ]
    return slices, meter.sent

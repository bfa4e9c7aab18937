"""What travels between workers and server: gradients there, weights back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.profiler import record_function

from offbeat.base.clock import Clock, State
from offbeat.comm.communicator import Communicator, Metered, Pending, arrived
from offbeat.engine.report import Report, naming
from offbeat.server.shard import Options, Shard

Slices = list[list[Tensor]]  # of each vector, every rank's slice
_PARTS = 4  # of a slice that is added up


@dataclass
class Pull:
    """All pushes since the pull before, and the weights they led to."""

    clock: Clock  # when it was asked for
    period: int  # steps since the pull before
    lr_sum: list[float]  # the server's rates in them, summed, of each parameter group
    told: int  # bytes of their headers
    waited: float  # seconds the worker has stood still for them
    began: float  # when the first of them was pushed
    weights: Pending[tuple[Slices, int]]  # and the bytes that had been sent by then

    def report(self, workers: int, norm: float, waited: float, carried: int) -> Report:
        return Report(
            step=self.clock.step,
            round=self.clock.round,
            workers=workers,
            bytes_sent=self.told + carried,
            bytes_received=self.told + carried,
            seconds_waited=self.waited + waited,
            seconds_in_air=max(0.0, self.weights.arrived() - self.began),
            drift=None,
            norm=norm,
            period=self.period,
        )

    def state_dict(self, reported: int) -> State:
        slices, carried = self.weights.wait()
        return {
            "step": self.clock.step,
            "round": self.clock.round,
            "lr": self.clock.lr,
            "period": self.period,
            "lr_sum": list(self.lr_sum),
            "told": self.told,
            "carried": carried - reported,
            "slices": [[part.clone() for part in parts] for parts in slices],
        }

    @classmethod
    def resumed(cls, state: State, now: float, reported: int) -> Pull:
        """One that has arrived."""
        slices = [[part.clone() for part in parts] for parts in state["slices"]]
        return cls(
            clock=Clock(step=state["step"], round=state["round"], lr=state["lr"]),
            period=state["period"],
            lr_sum=list(state["lr_sum"]),
            told=state["told"],
            waited=0.0,
            began=now,
            weights=arrived((slices, reported + state["carried"])),
        )


class Channel:
    """A task queue, and a duplicate of the communicator that nobody else uses."""

    def __init__(self, comm: Communicator) -> None:
        self.comm, self.task_queue = Metered(comm.worker.duplicate()), comm.worker.task_queue()


class Transport:
    """Pushes are applied and pulls fetched strictly in turn, by one task_queue.

    Two more bring the gradients, every other one each: while the last words of one push are on their way, the
    next has the link. What travels on a channel is in the same order on all ranks.
    """

    def __init__(self, comm: Communicator) -> None:
        self.server = Channel(comm)
        self.channels = [Channel(comm), Channel(comm)]
        self._pushed = 0

    @property
    def sent(self) -> int:
        """Bytes of the pushes that have been applied, and of the pulls."""
        return self._pushed + self.server.comm.sent

    def push(
        self, flats: Sequence[Tensor], shard: Shard, options: Options, heads: Pending[list[int]], clock: Clock
    ) -> Pending[None]:
        """Bring a gradient to the server, if all workers are at the same step, and let it be applied."""
        channel = self.channels[clock.step % len(self.channels)]

        def bring() -> tuple[list[Tensor], int]:
            with record_function("offbeat.push"), naming(clock), torch.no_grad():
                heads.wait()
                before = channel.comm.sent
                return [scattered(flat, channel.comm) for flat in flats], channel.comm.sent - before

        def apply() -> None:
            means, sent = brought.wait()
            shard.apply(means, options)
            self._pushed += sent

        brought = channel.task_queue.give(bring)
        return self.server.task_queue.give(apply)

    def fetch(self, shard: Shard, clock: Clock) -> Pending[tuple[Slices, int]]:
        """The weights after the pushes given so far, and the bytes sent by then."""

        def bring() -> tuple[Slices, int]:
            with record_function("offbeat.pull"), naming(clock), torch.no_grad():
                return gathered(shard.weights, self.server.comm), self.sent

        return self.server.task_queue.give(bring)

    def close(self) -> None:
        for channel in (self.server, *self.channels):
            channel.task_queue.close()

    def abandon(self) -> None:
        for channel in (self.server, *self.channels):
            channel.task_queue.abandon()


def scattered(flat: Tensor, comm: Communicator) -> Tensor:
    """The mean of this rank's slice, round the slots: each adds its own to what comes, and passes it on.

    Everyone talks to one neighbour all the time. In an all-to-all of as many bytes several send to one, and
    none at its full rate: on links of 100 Mbit/s it took half as long again. Slices go in parts: some fly
    while another is added up.
    """
    if comm.size == 1 or not flat.numel():
        return flat.clone()
    slices = [part.chunk(_PARTS) for part in flat.chunk(comm.size)]
    moving = [comm.shift(part.clone()) for part in slices[comm.rank - 1]]
    for ahead in range(2, comm.size + 1):
        for i, own in enumerate(slices[comm.rank - ahead]):
            total = moving[i].wait().add_(own)
            moving[i] = comm.shift(total) if ahead < comm.size else arrived(total)
    return torch.cat([message.wait() for message in moving]).mul_(1 / comm.size)


def gathered(weights: list[Tensor], comm: Communicator) -> Slices:
    """Every rank's slices, in two parts for the same reason."""
    messages = [[comm.gather(part) for part in w.chunk(2)] if w.numel() else [] for w in weights]
    slices = []
    for parts, own in zip(messages, weights, strict=True):
        heard = [message.wait() for message in parts]
        slices.append(
            [torch.cat([half[rank] for half in heard]) for rank in range(comm.size)]
            if heard
            else [own] * comm.size
        )
    return slices

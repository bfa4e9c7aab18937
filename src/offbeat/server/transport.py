"""Messages between workers and server: gradients are pushed there, weights come back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.profiler import record_function

from offbeat.base.clock import Clock, State
from offbeat.base.packed import Packed
from offbeat.base.tensors import Live, local
from offbeat.comm.background import TaskQueue
from offbeat.comm.communicator import Communicator, Metered, Pending, arrived
from offbeat.engine.report import Report, naming
from offbeat.server.replica import GroupOptions, Slices
from offbeat.server.shard import Shard

_PARTS = 4  # of a slice: while one is summed, the others are in flight


@dataclass
class Period:
    """The pushes since a pull was requested."""

    start: int  # the step of that pull
    lr_sum: list[float]  # server learning rates summed over the pushes, per parameter group
    header_bytes: int = 0
    waited: float = 0.0  # seconds the worker stood still for a free slot
    began: float = 0.0  # when the first gradient was pushed


@dataclass
class Pull:
    """One round: the pushes of a period, and the weights they led to."""

    period: Period
    clock: Clock  # when the weights were requested
    weights: Pending[tuple[Slices, int]]  # and all bytes that the transport had sent by then

    def report(self, workers: int, norm: float, waited: float, carried: int) -> Report:
        """`carried` is the number of bytes sent by the transport since the previous report."""
        return Report(
            step=self.clock.step,
            round=self.clock.round,
            workers=workers,
            bytes_sent=self.period.header_bytes + carried,
            bytes_received=self.period.header_bytes + carried,
            seconds_waited=self.period.waited + waited,
            seconds_in_air=max(0.0, self.weights.arrived() - self.period.began),
            drift=None,
            norm=norm,
            period=self.clock.step - self.period.start,
        )

    def state_dict(self, reported: int) -> State:
        slices, carried = self.weights.wait()
        return {
            "start": self.period.start,
            "lr_sum": list(self.period.lr_sum),
            "header_bytes": self.period.header_bytes,
            "step": self.clock.step,
            "round": self.clock.round,
            "lr": self.clock.lr,
            "carried": carried - reported,
            "slices": [[part.clone() for part in parts] for parts in slices],
        }

    @classmethod
    def restore(cls, state: State, now: float, reported: int) -> Pull:
        """A pull that has already arrived."""
        slices = [[part.clone() for part in parts] for parts in state["slices"]]
        period = Period(state["start"], list(state["lr_sum"]), state["header_bytes"], began=now)
        clock = Clock(step=state["step"], round=state["round"], lr=state["lr"])
        return cls(period, clock, arrived((slices, reported + state["carried"])))


class Slot:
    """Memory for one push, free again once the server has applied it."""

    def __init__(self, live: Live, like: Packed) -> None:
        self._live, self._filled = live, set[int]()
        self.packed = like.over([torch.zeros_like(flat) for flat in like.flats])
        self.applied: Pending[None] | None = None  # the push that uses this memory

    def await_free(self) -> None:
        """On a slow network, a fast worker waits here."""
        if self.applied is not None:
            self.applied.wait()
            self.applied = None

    def fill(self, optimizer: Optimizer) -> None:
        """Copy the current gradients of an optimizer's parameters."""
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        views, gradients = [], []
        for name, p, view in zip(self._live.names, self._live.parameters, self.packed.views, strict=True):
            if id(p) in held and p.grad is not None:
                if p.grad.layout != torch.strided:
                    raise TypeError(f"The gradient of {name!r} is sparse: build its layer with sparse=False.")
                views.append(view)
                gradients.append(local(p.grad))
                self._filled.add(id(view))
        if views:
            torch._foreach_copy_(views, gradients)

    def finish(self) -> list[Tensor]:
        """The gradient of the step, zero where none was filled in."""
        for view in self.packed.views:
            if id(view) not in self._filled:
                view.zero_()
        self._filled.clear()
        return self.packed.flats


class Transport:
    """Three task queues, each with a duplicate of the communicator.

    The first applies pushes and fetches pulls strictly in order. The other two carry alternate gradients, so
    the next push uses the link while the previous one finishes. Each duplicate carries its messages in the
    same order on all ranks.
    """

    def __init__(self) -> None:
        self._lanes: list[tuple[Metered, TaskQueue]] = []
        self._pushed = 0

    def connect(self, comm: Communicator) -> None:
        """Open the connections, once; all ranks must take part."""
        if not self._lanes:
            self._lanes = [(Metered(comm.worker.duplicate()), comm.worker.task_queue()) for _ in range(3)]

    @property
    def sent(self) -> int:
        """Bytes of all pulls, and of the pushes that the server has applied."""
        return self._pushed + self._lanes[0][0].sent

    def push(
        self,
        gradient: Sequence[Tensor],
        shard: Shard,
        options: GroupOptions,
        heads: Pending[list[int]],
        clock: Clock,
    ) -> Pending[None]:
        """Average a gradient and apply it to the shard, if the headers show all workers at the same step."""
        comm, queue = self._lanes[1 + clock.step % 2]

        def average() -> tuple[list[Tensor], int]:
            with record_function("offbeat.push"), naming(clock), torch.no_grad():
                heads.wait()
                before = comm.sent
                return [reduce_scatter(flat, comm) for flat in gradient], comm.sent - before

        def apply() -> None:
            means, sent = averaged.wait()
            shard.apply(means, options)
            self._pushed += sent

        averaged = queue.give(average)
        return self._lanes[0][1].give(apply)

    def fetch(self, shard: Shard, clock: Clock) -> Pending[tuple[Slices, int]]:
        """The weights after all pushes so far, and the bytes sent by then."""
        comm, queue = self._lanes[0]

        def gather() -> tuple[Slices, int]:
            with record_function("offbeat.pull"), naming(clock), torch.no_grad():
                return gather_slices(shard.weights, comm), self.sent

        return queue.give(gather)

    def close(self) -> None:
        for _, queue in self._lanes:
            queue.close()

    def abandon(self) -> None:
        for _, queue in self._lanes:
            queue.abandon()


def reduce_scatter(flat: Tensor, comm: Communicator) -> Tensor:
    """The mean of this rank's slice. Partial sums travel around a ring; each rank adds its own values.

    Each rank sends to one neighbour at a time. In an all-to-all of as many bytes, several ranks send to the
    same one: on 100 Mbit/s links that takes half as long again.
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


def gather_slices(weights: list[Tensor], comm: Communicator) -> Slices:
    """Every rank's slices, each sent in two halves so that both stay in flight."""
    messages = [[comm.gather(half) for half in w.chunk(2)] if w.numel() else [] for w in weights]
    slices = []
    for halves, own in zip(messages, weights, strict=True):
        gathered = [message.wait() for message in halves]
        ranks = [torch.cat([half[rank] for half in gathered]) for rank in range(comm.size) if gathered]
        slices.append(ranks or [own] * comm.size)
    return slices

"""Messages between workers and server: gradients are pushed there, weights come back."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.profiler import record_function

from offbeat.base.clock import Clock
from offbeat.base.packed import Packed
from offbeat.base.tensors import Live, local
from offbeat.comm.background import TaskQueue
from offbeat.comm.communicator import Communicator, Metered, Pending, arrived
from offbeat.engine.report import naming
from offbeat.engine.round import Round
from offbeat.server.shard import GroupOptions, Shard

_PARTS = 4  # of a slice: while one is summed, the others are in flight


class Slot:
    """Memory for one push, free again once the server has applied it."""

    def __init__(self, live: Live, like: Packed) -> None:
        self._live, self._filled = live, set[int]()
        self.packed = like.over([torch.zeros_like(flat) for flat in like.flats])
        self.applied: Pending[None] = arrived(None)  # the push that uses this memory

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
        if views:
            torch._foreach_copy_(views, gradients)
            self._filled.update(map(id, views))

    def finish(self) -> list[Tensor]:
        """The gradient of the step, zero where none was filled in."""
        for view in self.packed.views:
            if id(view) not in self._filled:
                view.zero_()
        self._filled.clear()
        return self.packed.flats


class Transport:
    """Three task queues, each with a duplicate of the communicator, so its messages keep their order.

    The first applies pushes and fetches pulls strictly in order. The other two carry alternate gradients, so
    the next push uses the link while the previous one finishes.
    """

    def __init__(self) -> None:
        self.queues: list[TaskQueue] = []
        self.comms: list[Metered] = []  # the first counts the bytes of all queues that no round counts yet

    def connect(self, comm: Communicator) -> None:
        """Open the connections, once; all ranks must take part."""
        if not self.queues:
            self.queues = [comm.worker.task_queue() for _ in range(3)]
            self.comms = [Metered(comm.worker.duplicate()) for _ in range(3)]

    def push(
        self, gradient: list[Tensor], shard: Shard, options: GroupOptions, heads: Pending[Any], clock: Clock
    ) -> Pending[None]:
        """Average a gradient and apply it to the shard, if the headers show all workers at the same step."""
        lane = 1 + clock.step % 2
        comm = self.comms[lane]

        def average() -> tuple[list[Tensor], int]:
            with record_function("offbeat.push"), naming(clock), torch.no_grad():
                heads.wait()
                before = comm.sent
                return [reduce_scatter(flat, comm) for flat in gradient], comm.sent - before

        def apply() -> None:
            means, sent = averaged.wait()
            shard.apply(means, options)
            self.comms[0].sent += sent

        averaged = self.queues[lane].give(average)
        return self.queues[0].give(apply)

    def fetch(self, shard: Shard, clock: Clock, round: Round | None = None) -> Pending[Packed]:
        """The weights after all pushes so far. A round counts the bytes sent since the last one."""
        comm = self.comms[0]

        def gather() -> Packed:
            with record_function("offbeat.pull"), naming(clock), torch.no_grad():
                weights = gather_weights(shard.weights, comm)
            if round is not None:
                round.comm.sent += comm.sent
                round.comm.received += comm.sent
                comm.sent = 0
            return shard.whole.over(weights)

        return self.queues[0].give(gather)


def reduce_scatter(flat: Tensor, comm: Communicator) -> Tensor:
    """The mean of this rank's slice. Partial sums travel around a ring; each rank adds its own values.

    In an all-to-all of as many bytes, several ranks send to the same one, which takes half as long again.
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


def gather_weights(slices: list[Tensor], comm: Communicator) -> list[Tensor]:
    """The vectors made of every rank's slices, each sent in two halves so that both stay in flight."""
    messages = [[comm.gather(half) for half in own.chunk(2) if half.numel()] for own in slices]
    weights = []
    for halves, own in zip(messages, slices, strict=True):
        parts = [half.wait() for half in halves]
        ranks = [half[rank] for rank in range(comm.size) for half in parts]
        weights.append(torch.cat([own[:0], *ranks]))
    return weights

"""Averages buckets of gradients with a code, in background threads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

import torch
from torch import Tensor

from offbeat.base.clock import Clock, State
from offbeat.base.errors import NotFinite
from offbeat.base.packed import Packed
from offbeat.comm.communicator import Communicator, Metered, Pending, Worker, Wrapped
from offbeat.reduce import Reducer
from offbeat.reduce.code import Staged


class Pipeline:
    """Averages buckets in two threads, so that the messages of several buckets share the link.

    The first thread encodes a bucket as soon as it is given, and sends its first message. The second waits
    for that, sends the later messages, and only then finishes the bucket before. Each thread has its own
    connections, on which all ranks send in the same order. With threads=1, one does both in turn.
    """

    def __init__(self, reduce: Reducer, worker: Worker, *, threads: int = 2) -> None:
        self._reduce = reduce
        self._comms = [Metered(worker.duplicate()) for _ in range(threads)]
        self._queues = [worker.task_queue() for _ in range(threads)]
        self.forget()

    def forget(self) -> None:
        """No bucket has been given."""
        self.refused: NotFinite | None = None  # the first refusal, on all ranks
        self._means = list[tuple[Packed, Pending[Packed]]]()

    def send(self, part: Packed, clock: Clock, memory: State, *, last: bool) -> Pending[None]:
        """Replace a bucket by its mean, unless it is refused."""
        comm = _Relay(self._comms[0])
        # The learning rate is unknown when a bucket is sent early, and the mean must not depend on that.
        clock = Clock(clock.step, clock.round, 0.0, workers=comm.size)
        begun = self._queues[0].give(partial(self._begin, part, comm, clock, memory, fence(part.flats)))
        ended = self._queues[-1].give(partial(self._end, part, comm, begun, last))
        return ended.then(lambda join: join())

    @torch.no_grad()
    def _begin(
        self, part: Packed, comm: Communicator, clock: Clock, memory: State, join: Callable[[], None]
    ) -> Pending[Packed]:
        join()
        return self._reduce.start(part, comm, clock, memory)

    @torch.no_grad()
    def _end(
        self, part: Packed, comm: _Relay, begun: Pending[Pending[Packed]], last: bool
    ) -> Callable[[], None]:
        mean = begun.wait()
        comm.comm = self._comms[-1]
        with suppress(NotFinite):  # raised again by `wait`
            while isinstance(mean, Staged) and mean.stages:
                mean.advance()
        self._means.append((part, mean))
        finished = list[Tensor]()
        while len(self._means) > (0 if last else 1):
            own, earlier = self._means.pop(0)
            try:
                if (found := earlier.wait()) is not own:
                    own.read(found.views)
            except NotFinite as error:  # on all ranks; ignored if all buckets are sent again
                self.refused = self.refused or error
            finished += own.flats
        return fence(finished)

    def move_bytes(self, to: Metered) -> None:
        """Move the bytes counted so far."""
        for comm in self._comms:
            comm.move(to)

    def close(self, *, wait: bool) -> None:
        """End the threads."""
        for queue in self._queues:
            queue.close() if wait else queue.abandon()


class _Relay(Wrapped):
    """The communicator of one bucket, whose later messages go to other connections."""

    def wrap(self, comm: Communicator) -> Communicator:
        raise RuntimeError("A reducer of gradients cannot split its communicator: use it for parameters.")


def fence(tensors: Sequence[Tensor]) -> Callable[[], None]:
    """Return a function that another thread calls before it uses these tensors. Its stream waits for ours."""
    devices = {tensor.device for tensor in tensors if tensor.is_cuda}
    events = [(device, torch.cuda.current_stream(device).record_event()) for device in devices]

    def wait() -> None:
        for device, event in events:
            torch.cuda.current_stream(device).wait_event(event)

    return wait

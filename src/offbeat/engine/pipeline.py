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
from offbeat.comm.background import TaskQueue
from offbeat.comm.communicator import Communicator, Metered, Pending, Worker, Wrapped
from offbeat.reduce import Reducer
from offbeat.reduce.code import Staged


class Pipeline:
    """Averages buckets in two threads, so that the messages of several buckets share the link.

    The first thread encodes a bucket as soon as it is given, and sends its first message. The second waits
    for that and sends the later messages. Each thread has its own connections, on which all ranks send in the
    same order. On a GPU the first thread does both in turn: NCCL does not let two threads use two
    communicators of one GPU at a time.
    """

    def __init__(self, reduce: Reducer, worker: Worker) -> None:
        self._reduce, self._comms, self._queues = reduce, list[Metered](), list[TaskQueue]()
        for _ in range(2):
            self._comms.append(Metered(worker.duplicate()))
            self._queues.append(worker.task_queue())
        self.forget()

    def forget(self) -> None:
        """No bucket has been given."""
        self.refused: NotFinite | None = None  # the first refusal, on all ranks
        self._means = list[tuple[Packed, Pending[Packed]]]()

    def send(self, part: Packed, clock: Clock, memory: State, *, last: bool) -> Pending[None]:
        """Replace a bucket by its mean, unless it is refused."""
        comm, second = _Relay(self._comms[0]), count_threads(part) - 1
        # The learning rate is unknown when a bucket is sent early, and the mean must not depend on that.
        clock = Clock(clock.step, clock.round, 0.0, workers=comm.size)
        begun = self._queues[0].give(partial(self._begin, part, comm, clock, memory, fence(part.flats)))
        ended = self._queues[second].give(partial(self._end, part, comm, begun, self._comms[second], last))
        return ended.then(lambda join: join())

    @torch.no_grad()
    def _begin(
        self, part: Packed, comm: Communicator, clock: Clock, memory: State, join: Callable[[], None]
    ) -> Pending[Packed]:
        join()
        return self._reduce.start(part, comm, clock, memory)

    @torch.no_grad()
    def _end(
        self, part: Packed, comm: _Relay, begun: Pending[Pending[Packed]], later: Communicator, last: bool
    ) -> Callable[[], None]:
        """Send the later messages of a bucket, then finish the buckets that need not be waited for."""
        mean = begun.wait()
        comm.comm = later
        with suppress(NotFinite):  # raised again by `wait`
            while isinstance(mean, Staged) and mean.stages:
                mean.advance()
        self._means.append((part, mean))
        finished = list[Tensor]()
        while self._means and (last or self._may_finish()):
            own, earlier = self._means.pop(0)
            try:
                if (found := earlier.wait()) is not own:
                    own.read(found.views)
            except NotFinite as error:  # on all ranks; ignored if all buckets are sent again
                self.refused = self.refused or error
            finished += own.flats
        return fence(finished)

    def _may_finish(self) -> bool:
        """Whether the oldest mean has arrived. One that may still send is waited for after the next bucket's
        messages, because all ranks must send in the same order."""
        oldest = self._means[0][1]
        return oldest.done() if isinstance(oldest, Staged) else len(self._means) > 1

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
        raise RuntimeError(
            "A reducer of gradients in buckets cannot split its communicator: set its attribute `splits` to "
            "False, so that all gradients arrive at once."
        )


def count_threads(part: Packed) -> int:
    return 1 if any(flat.is_cuda for flat in part.flats) else 2


def fence(tensors: Sequence[Tensor]) -> Callable[[], None]:
    """Return a function that another thread calls before it uses these tensors. Its stream waits for ours."""
    devices = {tensor.device for tensor in tensors if tensor.is_cuda}
    events = [(device, torch.cuda.current_stream(device).record_event()) for device in devices]

    def wait() -> None:
        for device, event in events:
            torch.cuda.current_stream(device).wait_event(event)

    return wait

"""The companion of a worker that is a process: one thread works, another listens."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from offbeat.comm import Communicator
from offbeat.companion import Companion, Stopped
from offbeat.errors import PeerLost

_LISTENER = "offbeat-listen"
_LONG = timedelta(days=365)  # a listener is never tired
_END = 10.0  # seconds in which a thread ends; each of them looks up four times a second


def clone(store: Store) -> Store:
    """A client of the same store for another thread."""
    copy: Store = store.clone()  # type: ignore[attr-defined]  # missing in torch's annotations
    return copy


class Threads(Companion):
    """Numbers travel through queues in the process group's store, one queue per rank.

    The store's clients are clones, one per thread, and the communicator's connections belong to the working
    thread: no two threads ever share any. Threads are daemons: they never keep a process alive.
    """

    def __init__(self, comm: Communicator, store: Store, stopped: threading.Event) -> None:
        self.comm, self._heard = comm, -1
        self._stopped = stopped
        self._shared = threading.Condition()
        self._error: BaseException | None = None
        self._threads: list[threading.Thread] = []
        self._outbox, self._inbox = clone(store), clone(store)
        self._inbox.set_timeout(_LONG)
        try:
            self._outbox.queue_len(str(comm.rank))
        except (AttributeError, RuntimeError) as error:
            raise ValueError(
                "The process group's store has no queues, through which workers call each other to a round: "
                "use torchrun, or init_process_group with tcp:// or env://, and torch 2.8 or newer."
            ) from error

    @property
    def heard(self) -> int:
        return self._heard

    def start(self, work: Callable[[], None]) -> None:
        for name, target in (("offbeat-work", work), (_LISTENER, self._listen)):
            thread = threading.Thread(target=self._guarded, args=(target,), name=name, daemon=True)
            self._threads.append(thread)
            thread.start()

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Stopped:
            pass
        except BaseException as error:
            with self.locked():
                self._error = self._error or error

    def _listen(self) -> None:
        while not self._stopped.is_set():
            try:
                number = int(self._inbox.queue_pop(str(self.comm.rank)))
            except dist.DistError as error:
                if self._stopped.is_set():
                    return
                raise PeerLost(f"Rank {self.comm.rank} lost the process group's store.") from error
            with self.locked():
                self._heard = max(self._heard, number)

    @contextmanager
    def locked(self) -> Iterator[None]:
        with self._shared:
            yield
            self._shared.notify_all()

    def until(self, ready: Callable[[], bool], what: str, seconds: float | None = None) -> bool:
        deadline = None if seconds is None else time.perf_counter() + seconds
        self._shared.notify_all()
        while not ready() or self._stopped.is_set():
            self.check()
            if self._stopped.is_set():
                raise Stopped
            left = None if deadline is None else deadline - time.perf_counter()
            if left is not None and left <= 0:
                return False
            self._shared.wait(left)
        return True

    def announce(self, number: int) -> None:
        self.check()  # a listener that has lost the store has said so
        self._heard = max(self._heard, number)
        try:
            for rank in range(self.comm.size):
                if rank != self.comm.rank:
                    self._outbox.queue_push(str(rank), str(number))
        except dist.DistError as error:
            raise PeerLost(f"Rank {self.comm.rank} lost the process group's store.") from error

    def check(self) -> None:
        if self._error is not None:
            raise self._error

    def stop(self) -> None:
        self._stopped.set()
        with self.locked():
            pass  # wakes the worker
        if any(thread.name == _LISTENER and thread.is_alive() for thread in self._threads):
            with suppress(dist.DistError):
                self._outbox.queue_push(str(self.comm.rank), "-1")  # wakes it
        for thread in self._threads:
            # The garbage collector may end a forgotten run, in whatever thread it happens to work.
            if thread is not threading.current_thread():
                thread.join(_END)

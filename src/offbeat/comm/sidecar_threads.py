"""The sidecar of a worker that is a process: one thread works, another listens."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from offbeat.base.errors import PeerLost
from offbeat.comm.background import Sidecar, Stopped
from offbeat.comm.communicator import Communicator
from offbeat.comm.lookout import STORE_GONE, STORE_SILENT
from offbeat.comm.store import Bulletin, Silent

T = TypeVar("T")

_LISTENER = "offbeat-listen"
_LONG = timedelta(days=365)  # a listener never gives up
_WAKE = 2.0  # seconds in which the store must accept a number
_END = 10.0  # seconds to wait for a thread to end; each checks four times a second


class ThreadSidecar(Sidecar):
    """Numbers travel through queues in the process group's store, one queue per rank.

    Each thread has its own clone of the store's client, and only the working thread uses the communicator's
    connections, so no two threads share any. Threads are daemons: they never keep a process alive.
    """

    def __init__(
        self, comm: Communicator, bulletin: Bulletin, key: str, stopped: threading.Event, timeout: float
    ) -> None:
        self.comm, self._heard, self._timeout = comm, -1, timeout
        self._bulletin, self._key = bulletin, key
        self._stopped = stopped
        self._shared = threading.Condition()
        self._error: BaseException | None = None
        self._threads: list[threading.Thread] = []
        try:
            self._ask(lambda store: self._queues(store).queue_len(str(comm.rank)), timeout)
        except (AttributeError, NotImplementedError) as error:
            raise ValueError(
                "The process group's store has no queues, which workers need to call each other to a round: "
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

    def _queues(self, store: Store) -> Store:
        return PrefixStore(self._key, store)

    def _listen(self) -> None:
        try:
            with self._bulletin.lend(shared=False) as client:
                client.set_timeout(_LONG)
                while not self._stopped.is_set():
                    number = int(self._queues(client).queue_pop(str(self.comm.rank)))
                    with self.locked():
                        self._heard = max(self._heard, number)
        except dist.DistError as error:
            if not self._stopped.is_set():
                raise PeerLost(f"Rank {self.comm.rank} {STORE_GONE}.") from error

    def _ask(self, call: Callable[[Store], T], seconds: float) -> T:
        try:
            return self._bulletin.ask(call, seconds)
        except Silent:
            silence = f"timed out after {seconds:g} s, {STORE_SILENT}"
            raise PeerLost(f"Rank {self.comm.rank} {silence}.") from None
        except dist.DistError as error:
            raise PeerLost(f"Rank {self.comm.rank} {STORE_GONE}.") from error

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
        self.check()  # raises if the listener has lost the store
        self._heard = max(self._heard, number)

        def push(store: Store) -> None:
            for rank in range(self.comm.size):
                if rank != self.comm.rank:
                    self._queues(store).queue_push(str(rank), str(number))

        self._ask(push, self._timeout)

    def check(self) -> None:
        if self._error is not None:
            raise self._error

    def stop(self) -> None:
        self._stopped.set()
        with self.locked():
            pass  # wakes the worker
        woken, me = True, str(self.comm.rank)
        if any(thread.name == _LISTENER and thread.is_alive() for thread in self._threads):
            try:
                self._bulletin.ask(lambda store: self._queues(store).queue_push(me, "-1"), _WAKE)
            except Silent:
                woken = False  # it waits for a store that does not answer: leave it behind
            except dist.DistError:
                pass  # it ends by itself
        for thread in self._threads:
            # The garbage collector may end an abandoned run, in any thread.
            if thread is not threading.current_thread() and (woken or thread.name != _LISTENER):
                thread.join(_END)

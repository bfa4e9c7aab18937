"""A slow link in front of any communicator: messages arrive as late as such a link would bring them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

from torch import Tensor

from offbeat.comm.collective import COLLECTIVES
from offbeat.comm.communicator import Communicator
from offbeat.comm.metered import Wrapped, nbytes, traffic
from offbeat.comm.pending import Pending
from offbeat.comm.sidecar import Sidecar

T = TypeVar("T")

FRAMING = 1514 / 1448  # a full Ethernet frame to the payload that TCP has in it


def hops(kind: str, size: int) -> int:
    """Messages between neighbours that follow each other in a collective, as gloo runs it."""
    return COLLECTIVES[kind].hops(size)


class Throttled(Wrapped):
    """Another communicator, behind a full-duplex link of `rate` bytes per second each way.

    A message begins when its last rank has sent it and those before it have passed; its bytes, as `Metered`
    counts them, with TCP's headers, then take their time, and `latency` seconds come on top for each hop of a
    ring. Nothing is slowed down while it really travels: it is merely not shown before its time, so the
    emulation is exact as long as the real link is the faster one. All ranks must be on one machine, whose
    clock they share; for simulated workers there is `Network`.

    `burst` bytes pass at once after a pause, as a token bucket lets them: the links of `offbeat.lab` have
    256 kB. Words of control wait for the latency only.

        sync = offbeat.diloco(model, optimizer, group=Throttled(offbeat.Torch(), rate=12.5e6, latency=0.02))
    """

    def __init__(
        self,
        comm: Communicator,
        *,
        rate: float,
        latency: float = 0.0,
        burst: int = 0,
        link: Link | None = None,
    ) -> None:
        if not rate > 0:
            raise ValueError(f"Throttled(rate={rate}): rate must be a positive number of bytes per second.")
        if not latency >= 0 or not burst >= 0:
            raise ValueError(f"Throttled(latency={latency}, burst={burst}): neither may be negative.")
        super().__init__(comm)
        self._link = link or Link(rate, latency, burst)
        self._children: dict[int, Throttled] = {}

    def __repr__(self) -> str:
        link = self._link
        return f"Throttled({self.comm!r}, rate={link.rate:g}, latency={link.latency:g}, burst={link.burst})"

    def total(self, tensors: Iterable[Tensor]) -> Pending[list[Tensor]]:
        given = 0

        def counted() -> Iterator[Tensor]:
            nonlocal given
            for tensor in tensors:
                given += nbytes([tensor])
                yield tensor

        began = self._link.now()
        message = self.comm.total(counted())
        return self._late(message, "mean", given, began)

    def gather(self, tensor: Tensor) -> Pending[list[Tensor]]:
        return self._late(self.comm.gather(tensor), "gather", nbytes([tensor]))

    def exchange(self, chunks: Sequence[Tensor]) -> Pending[list[Tensor]]:
        return self._late(self.comm.exchange(chunks), "exchange", nbytes(chunks))

    def shift(self, tensor: Tensor) -> Pending[Tensor]:
        return self._late(self.comm.shift(tensor), "shift", nbytes([tensor]))

    def broadcast(self, tensors: Sequence[Tensor], src: int = 0) -> Pending[list[Tensor]]:
        return self._late(self.comm.broadcast(tensors, src), "broadcast", nbytes(tensors))

    def tell(self, numbers: Sequence[int]) -> Pending[list[list[int]]]:
        word = self.comm.tell(numbers)
        if not self._link.latency or self.size == 1:
            return word
        late = self._link.latency * hops("gather", self.size)
        return self._link.held(word, lambda: word.arrived() + late, word.done)

    def split(self, groups: Sequence[Sequence[int]]) -> Communicator:
        part = self.comm.split(groups)
        if id(part) not in self._children:
            self._children[id(part)] = self._beside(part)
        return self._children[id(part)]

    def duplicate(self) -> Communicator:
        return self._beside(self.comm.duplicate())

    def sidecar(self) -> Sidecar:
        sidecar = self.comm.sidecar()
        sidecar.comm = self._beside(sidecar.comm)
        return sidecar

    def _beside(self, comm: Communicator) -> Throttled:
        """Another communicator behind the same link."""
        link = self._link
        return Throttled(comm, rate=link.rate, latency=link.latency, burst=link.burst, link=link)

    def _late(self, message: Pending[T], kind: str, given: int, began: float | None = None) -> Pending[T]:
        if self.size == 1:
            return message
        link = self._link
        began = link.now() if began is None else began
        passage = link.send(
            begun=self.comm.tell([round(began * 1e9)]),
            seconds=traffic(kind, self.size, given) * FRAMING / link.rate,
            flight=link.latency * hops(kind, self.size),
        )
        return link.held(message, lambda: link.landing(passage), lambda: link.knows(passage))


class _Passage:
    """A message on a link: when each rank has begun it, how long its bytes take, and how far they go."""

    def __init__(self, begun: Pending[list[list[int]]], seconds: float, flight: float) -> None:
        self.begun, self.seconds, self.flight = begun, seconds, flight
        self.lands: float | None = None


class Link:
    """A queue that every message of one rank passes, whichever communicator it belongs to.

    Tests give it a clock and a sleep of their own.
    """

    def __init__(
        self,
        rate: float,
        latency: float,
        burst: int,
        *,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.rate, self.latency, self.burst = rate, latency, burst
        self.now, self._sleep = clock, sleep
        self._free = 0.0  # when the last byte of what has begun will have passed
        self._ahead: list[_Passage] = []
        self._lock = threading.Lock()  # parts may send from threads of their own

    def send(self, begun: Pending[list[list[int]]], seconds: float, flight: float) -> _Passage:
        passage = _Passage(begun, seconds, flight)
        with self._lock:
            self._ahead.append(passage)
        return passage

    def knows(self, passage: _Passage) -> bool:
        """Whether all ranks have begun it."""
        return passage.lands is not None or passage.begun.done()

    def landing(self, passage: _Passage) -> float:
        """When it arrives; waits until all ranks have begun it."""
        passage.begun.wait()
        with self._lock:
            # What was sent earlier but is not complete takes no room yet: its last rank begins later.
            for ahead in list(self._ahead):
                if passage.lands is None and (ahead is passage or ahead.begun.done()):
                    self._pass(ahead)
        assert passage.lands is not None
        return passage.lands

    def _pass(self, passage: _Passage) -> None:
        start = max(word[0] for word in passage.begun.wait()) / 1e9
        self._free = max(self._free, start - self.burst / self.rate) + passage.seconds
        passage.lands = max(start, self._free) + passage.flight
        self._ahead.remove(passage)

    def held(
        self, message: Pending[T], landing: Callable[[], float], known: Callable[[], bool]
    ) -> Pending[T]:
        """The message, not to be seen before it lands."""

        def wait() -> T:
            value = message.wait()
            self._sleep(max(0.0, landing() - self.now()))
            return value

        def done() -> bool:
            return message.done() and known() and landing() <= self.now()

        return Pending(wait, done, landing, message.advance if message.answers else None)

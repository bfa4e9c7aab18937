"""A slow link in front of any communicator: messages arrive as late as they would on that link."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from offbeat.comm.collective import Collective, nbytes
from offbeat.comm.communicator import Communicator, Pending, PendingList, Tensors, Wrapped

FRAMING = 1514 / 1448  # bytes of a full Ethernet frame per byte of TCP payload


class Throttled(Wrapped):
    """Another communicator, behind a full-duplex link of `rate` bytes per second each way.

    A message starts when all ranks have sent it and earlier messages have passed. Its bytes, as `Metered`
    counts them, plus TCP's headers, pass at `rate`; each hop of a ring adds `latency` seconds. A message that
    has arrived is held back until its time. This is exact as long as the real link is faster. All ranks must
    run on one machine and share its clock; simulated workers use `Network` instead.

    After a pause, `burst` bytes pass at once, as in a token bucket: the links of `offbeat.lab` have 256 kB.
    Control messages are delayed by the latency only.

        sync = offbeat.diloco(model, optimizer, group=Throttled(offbeat.Torch(), rate=12.5e6, latency=0.02))
    """

    def __init__(
        self,
        comm: Communicator,
        *,
        rate: float,
        latency: float = 0,
        burst: int = 0,
        link: LinkQueue | None = None,
    ) -> None:
        if not rate > 0:
            raise ValueError(f"Throttled(rate={rate}): rate must be a positive number of bytes per second.")
        if not latency >= 0 or not burst >= 0:
            raise ValueError(f"Throttled(latency={latency}, burst={burst}): neither may be negative.")
        super().__init__(comm)
        self._link = link or LinkQueue(rate, latency, burst)

    def __repr__(self) -> str:
        link = self._link
        return f"Throttled({self.comm!r}, rate={link.rate:g}, latency={link.latency:g}, burst={link.burst})"

    def wrap(self, comm: Communicator) -> Communicator:
        link = self._link
        return Throttled(comm, rate=link.rate, latency=link.latency, burst=link.burst, link=link)

    def run(self, kind: Collective, tensors: Tensors, *, src: int = 0, control: bool = False) -> PendingList:
        link, began = self._link, self._link.clock()
        message = self.comm.run(kind, tensors, src=src, control=control)
        if self.size == 1 or (control and not link.latency):
            return message
        flight = link.latency * kind.hops(self.size, nbytes(tensors))
        if control:
            return link.hold(message, lambda: message.arrived() + flight, message.done)
        seconds = kind.sent(self.size, nbytes(tensors)) * FRAMING / link.rate
        passage = _Passage(self.comm.tell([round(began * 1e9)]), seconds, flight)
        link.ahead.append(passage)
        return link.hold(message, lambda: link.landing(passage), passage.begun.done)


@dataclass(eq=False)
class _Passage:
    """A message on a link."""

    begun: Pending[list[list[int]]]  # when each rank sent it
    seconds: float  # the time that its bytes take
    flight: float  # its latency
    lands: float | None = None


@dataclass(eq=False)
class LinkQueue:
    """A queue for all messages of one rank, on any of its communicators."""

    rate: float
    latency: float
    burst: int
    clock: Callable[[], float] = time.perf_counter  # tests replace the clock and the sleep
    sleep: Callable[[float], None] = time.sleep
    ahead: list[_Passage] = field(default_factory=list)
    _free: float = 0.0  # when the link is free again
    _lock: threading.Lock = field(default_factory=threading.Lock)  # background threads also send

    def landing(self, passage: _Passage) -> float:
        """Return when it arrives. Waits until all ranks have sent it."""
        passage.begun.wait()
        with self._lock:
            # An earlier message that some rank has not sent does not occupy the link yet.
            for ahead in list(self.ahead):
                if passage.lands is None and (ahead is passage or ahead.begun.done()):
                    start = max(word[0] for word in ahead.begun.wait()) / 1e9
                    self._free = max(self._free, start - self.burst / self.rate) + ahead.seconds
                    ahead.lands = max(start, self._free) + ahead.flight
                    self.ahead.remove(ahead)
        assert passage.lands is not None
        return passage.lands

    def hold(self, message: PendingList, due: Callable[[], float], known: Callable[[], bool]) -> PendingList:
        """Hold the message back until it is due. `known` says whether `due` would return at once."""

        def wait() -> list[Tensor]:
            value = message.wait()
            self.sleep(max(0.0, due() - self.clock()))
            return value

        return Pending(wait, lambda: message.done() and known() and due() <= self.clock(), due)

"""Finds out why a message will not arrive: a rank has left, is in another call, is late, or is dead."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from math import inf
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from offbeat.base.errors import Disagreement, OffbeatError, PeerLost
from offbeat.comm.background import Stopped
from offbeat.comm.presence import Departure, Place, Track, describe_disagreement
from offbeat.comm.store import STORE_GONE, STORE_SILENT, Silent, StoreClient

_ANSWER = 1.0  # seconds in which a healthy store answers
_GONE = 3.0  # seconds to wait after the store, which rank 0 may host, is gone
_LOOKS, _PAUSE = 5, 0.1  # how often to check for a closed connection, and the seconds between
_PROBES = 1.0  # seconds between two checks for dead ranks while ranks connect
_PATIENT = 20.0  # seconds until a rank that announces nothing is checked; each pause is twice the one before
_PROBE = 2**31 - 1  # a tag that no rank receives

_unread: list[Any] = []  # probes, which gloo must not destroy


@dataclass(eq=False)
class PeerMonitor:
    """Reads in the store about other ranks while one rank waits, and writes there about this one."""

    key: str
    names: Sequence[int]  # the ranks as errors name them
    name: int  # this rank as errors name it
    store_client: StoreClient
    timeout: float
    above: PeerMonitor | None = None  # that of the communicator from which this one was made
    stopped: threading.Event = field(default_factory=threading.Event)  # ends every wait
    patience: float = inf  # seconds for all ranks to connect, if that is less than the timeout
    gloo: list[Any] = field(default_factory=list)  # backends that show which ranks are connected
    is_alive: Callable[[int], bool] | None = None  # whether the process of a rank runs, until it connects
    _tracks: WeakSet[Track] = field(default_factory=WeakSet)
    _runs: int = 0

    def _levels(self) -> list[PeerMonitor]:
        """This monitor and those above it, whose notes also concern a rank that waits here."""
        return [self] if self.above is None else [self, *self.above._levels()]

    def follow(self, track: Track) -> None:
        """A run begins. On all ranks, runs begin in the same order."""
        self._runs += 1
        track.key = f"{self.key}/run {self._runs}"
        self._tracks.add(track)

    def leave(self, departure: Departure, begun: Mapping[str, Mapping[str, int]]) -> None:
        """Tell the others that this rank sends nothing more. `begun` counts its messages by connection."""
        note = json.dumps({"text": departure.text, "shared": departure.shared, "begun": begun})

        def write(store: Store) -> None:
            store.set(f"{self.key}/left/{self.name}", note)
            store.set(f"{self.key}/left", "yes")

        # Without a store, the others see the connections close, or wait for its host as well.
        with suppress(dist.DistError, Silent):
            self.store_client.ask(write, _ANSWER)

    def arrive(self, connection: str, begun: int) -> None:
        """Tell the others that this rank waits here and how many messages it has begun."""
        self.store_client.post(lambda store: store.set(f"{self.key}/{connection}/at/{self.name}", str(begun)))

    def find_leaver(self, store: Store, what: str, part: str = "", at: float = inf) -> OffbeatError | None:
        """Return the error if a rank has left. Its earlier messages still arrive, unless another is lost."""
        for level in self._levels():
            if store.check([f"{level.key}/left"]):
                for name in self.names:
                    place = f"{level.key}/left/{name}"
                    if name != self.name and store.check([place]):
                        note = json.loads(store.get(place))
                        begun: int = note["begun"].get(self.key, {}).get(part, -1)
                        if at >= begun or note["shared"] == PeerLost.__name__:
                            return Departure(note["text"], note["shared"]).error(name, what)
        return None

    def find_conflict(self, store: Store) -> Disagreement | None:
        """Return the error if a rank waits in a call that another passed. The first to see it tells all."""
        for track in [track for level in self._levels() for track in list(level._tracks)]:
            here = track.place  # read once: the worker moves on
            key = f"{track.key}/meeting {here.meetings}"
            if here.meeting is not None:
                store.set(key, json.dumps([track.rank, asdict(here)]))
            elif store.check([key]):
                rank, there = json.loads(store.get(key))
                other = Place(**there)
                if other.passed_by(here):
                    sentence = describe_disagreement((rank, other), (track.rank, here))
                    verdict = store.compare_set(f"{track.key}/verdict", "", sentence)
                    return Disagreement(verdict.decode())
        return None

    def expect_number(self, rank: int, what: str, seconds: float) -> NumberWait:
        """Begin to wait for a number that a rank announces within `seconds`."""
        return NumberWait(self, rank, what, seconds)

    def explain_loss(self, what: str, error: Exception) -> OffbeatError:
        """Return the error for a broken connection: why a rank left, if it said so; otherwise which rank."""
        with suppress(dist.DistError, Silent):
            if departure := self.store_client.ask(lambda store: self.find_leaver(store, what), _ANSWER):
                return departure
        gone: dict[int, RuntimeError] = {}
        for _ in range(_LOOKS if any(level.gloo for level in self._levels()) else 0):
            if gone := self.find_closed():
                break
            time.sleep(_PAUSE)  # not all connections of a rank close at the same time
        if not gone and isinstance(error, dist.DistNetworkError | dist.DistStoreError):
            return PeerLost(f"Waiting for {what}: rank {self.name} {STORE_GONE}.")
        reason = str(next(iter(gone.values()), error)).splitlines()[0].split("] ", 1)[-1].split(". ")[0]
        whose = f"the connection to {list_ranks(list(gone))}" if gone else "a connection"
        return PeerLost(f"Waiting for {what}: rank {self.name} lost {whose} ({reason}).")

    def find_closed(self) -> dict[int, RuntimeError]:
        """Return ranks that are dead or have closed a connection: gloo refuses to send them a probe."""
        gone = {}
        # A communicator that is not connected yet asks the one from which it was made.
        level = next((level for level in self._levels() if level.gloo), self)
        if not level.gloo and (is_alive := level.is_alive) is not None:
            dead = [name for name in level.names if name != level.name and not is_alive(name)]
            return {name: RuntimeError(f"the process of rank {name} is gone") for name in dead}
        for name in [name for name in self.names if name != self.name]:
            try:
                rank = level.names.index(name)
                _unread.extend(backend.send([torch.zeros(1)], rank, _PROBE) for backend in level.gloo)
            except RuntimeError as error:
                gone[name] = error
        return gone


class Wait:
    """A wait for message `number`, or with −1 for all ranks to connect, which ends when it is hopeless."""

    def __init__(self, monitor: PeerMonitor, part: str, number: int, what: str) -> None:
        self._monitor, self._part, self._number, self._what = monitor, part, number, what
        self._probed = time.perf_counter()
        self._deadline = self._probed + min(monitor.timeout, monitor.patience if number < 0 else inf)

    def check(self) -> None:
        """Raise if the message will not arrive."""
        monitor = self._monitor
        if monitor.stopped.is_set():
            raise Stopped
        # gloo notices a dead rank only once it is connected.
        if self._number < 0 and time.perf_counter() > self._probed + _PROBES:
            self._probe()
        timeout, trouble = f"timed out after {monitor.timeout:g} s", ""
        try:
            if error := monitor.store_client.ask(self._find_error, _ANSWER):
                raise error
        except Silent:
            trouble = f"{timeout}, {STORE_SILENT}"
        except dist.DistError:
            self._probe()
            trouble = STORE_GONE
            self._deadline = min(self._deadline, time.perf_counter() + _GONE)
        if time.perf_counter() > self._deadline:
            trouble = trouble or timeout + self._list_absent()
            raise PeerLost(f"Waiting for {self._what}: rank {monitor.name} {trouble}.")

    def _find_error(self, store: Store) -> OffbeatError | None:
        leaver = self._monitor.find_leaver(store, self._what, self._part, self._number)
        return leaver or self._monitor.find_conflict(store)

    def _probe(self) -> None:
        self._probed = time.perf_counter()
        for error in self._monitor.find_closed().values():
            raise self._monitor.explain_loss(self._what, error) from error

    def _list_absent(self) -> str:
        """Return in words which ranks have not sent the message, according to the store."""
        monitor = self._monitor

        def lacks(store: Store, name: int) -> bool:
            key = f"{monitor.key}/{self._part}/at/{name}"
            return name != monitor.name and not (store.check([key]) and int(store.get(key)) > self._number)

        with suppress(Silent, dist.DistError):
            if absent := monitor.store_client.ask(
                lambda s: [n for n in monitor.names if lacks(s, n)], _ANSWER
            ):
                return f": {list_ranks(absent)} {'is' if len(absent) == 1 else 'are'} missing"
        return ""


class NumberWait(Wait):
    """A wait for a number that one rank announces. While that rank lives, it does so within `seconds`."""

    def __init__(self, monitor: PeerMonitor, rank: int, what: str, seconds: float) -> None:
        super().__init__(monitor, "", sys.maxsize, what)
        self._deadline += seconds
        self._rank, self._pause = monitor.names[rank], _PATIENT

    def check(self) -> None:
        super().check()
        # A rank that was killed leaves no note. Probes are rare, because they are never freed.
        if time.perf_counter() > self._probed + self._pause:
            self._pause *= 2
            self._probe()

    def _list_absent(self) -> str:
        return f": rank {self._rank} is missing"


def list_ranks(ranks: Sequence[int]) -> str:
    """Return ranks in words: rank 1; ranks 1 and 2; ranks 1, 2 and 3."""
    *first, last = map(str, ranks)
    return f"ranks {', '.join(first)} and {last}" if first else f"rank {last}"

"""Finds out why a message will not arrive: a rank has left, is elsewhere, is late, or is dead."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Mapping, Sequence
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
from offbeat.comm.store import STORE_GONE, STORE_SILENT, Bulletin, Silent

_ANSWER = 1.0  # seconds in which a healthy store answers
_GONE = 3.0  # seconds to wait after the store, which rank 0 may host, has vanished
_LOOKS, _PAUSE = 5, 0.1  # how often to look for a closed connection, and seconds between
_PROBES = 1.0  # seconds between two looks for dead ranks while ranks connect
_PROBE = 2**31 - 1  # a tag that nobody listens to

_unread: list[Any] = []  # kept, since gloo must not destroy them


@dataclass(eq=False)
class Lookout:
    """What one rank reads in the store while it waits, and what it writes there for the others."""

    key: str
    names: Sequence[int]  # what errors call the ranks
    name: int  # what they call this rank
    bulletin: Bulletin
    timeout: float
    above: Lookout | None = None  # of the communicator that this one was made from
    stopped: threading.Event = field(default_factory=threading.Event)  # ends every wait
    gloo: list[Any] = field(default_factory=list)  # backends that can tell which ranks are connected
    _tracks: WeakSet[Track] = field(default_factory=WeakSet)
    _runs: int = 0

    def _levels(self) -> list[Lookout]:
        """This one and those above, whose notes concern a rank that waits here, too."""
        return [self] if self.above is None else [self, *self.above._levels()]

    def follow(self, track: Track) -> None:
        """Begin a run. All ranks begin their runs in the same order."""
        self._runs += 1
        track.key = f"{self.key}/run {self._runs}"
        self._tracks.add(track)

    def leave(self, departure: Departure, begun: Mapping[str, Mapping[str, int]]) -> None:
        """Tell the others that this rank sends nothing more. `begun` counts its messages by connection."""
        note = json.dumps({"text": departure.text, "shared": departure.shared, "begun": begun})

        def write(store: Store) -> None:
            store.set(f"{self.key}/left/{self.name}", note)
            store.set(f"{self.key}/left", "yes")

        try:
            self.bulletin.ask(write, _ANSWER)
        except (dist.DistError, Silent):
            pass  # the others see our connections close, or wait for the store's host as well

    def arrive(self, connection: str, begun: int) -> None:
        """Tell the others that this rank waits here and how many messages it has begun."""
        self.bulletin.post(lambda store: store.set(f"{self.key}/{connection}/at/{self.name}", str(begun)))

    def look(self, connection: str, number: int, what: str) -> None:
        """Raise if the store says that the message will never arrive. Number −1 stands for connecting."""
        error = self.bulletin.ask(
            lambda store: self._find_leaver(store, what, connection, number) or self._find_conflict(store),
            _ANSWER,
        )
        if error is not None:
            raise error

    def _find_leaver(
        self, store: Store, what: str, connection: str = "", number: float = inf
    ) -> OffbeatError | None:
        """The error to raise if a rank has left and a message will not come.

        A message sent before its sender left still arrives, unless a worker on the way is lost.
        """
        for level in self._levels():
            if store.check([f"{level.key}/left"]):
                for name in self.names:
                    place = f"{level.key}/left/{name}"
                    if name != self.name and store.check([place]):
                        note = json.loads(store.get(place))
                        begun: int = note["begun"].get(self.key, {}).get(connection, -1)
                        if number >= begun or note["shared"] == PeerLost.__name__:
                            return Departure(note["text"], note["shared"]).error(name, what)
        return None

    def _find_conflict(self, store: Store) -> Disagreement | None:
        """The error to raise if a rank waits in a call that this rank can no longer come to.

        A rank that waits in such a call notes it. The first to see the conflict writes the sentence for all.
        """
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

    def lost(self, what: str, error: Exception) -> OffbeatError:
        """The error for a broken connection: why a rank left, if it said so; else whose it was."""
        try:
            departure = self.bulletin.ask(lambda store: self._find_leaver(store, what), _ANSWER)
        except (dist.DistError, Silent):
            departure = None
        if departure is not None:
            return departure
        for _ in range(_LOOKS):
            if gone := self.closed():
                break
            time.sleep(_PAUSE)  # one of a rank's connections may close before the others
        if not gone and isinstance(error, dist.DistError):
            return PeerLost(f"Waiting for {what}: rank {self.name} {STORE_GONE}.")
        reason = str(next(iter(gone.values()), error)).splitlines()[0].split("] ", 1)[-1].split(". ")[0]
        whose = f"the connection to {list_ranks(list(gone))}" if gone else "a connection"
        return PeerLost(f"Waiting for {what}: rank {self.name} lost {whose} ({reason}).")

    def closed(self) -> dict[int, RuntimeError]:
        """The ranks that have closed a connection, or whose process is dead: gloo refuses to send to them.

        A rank that is alive gets the start of a message that it never reads. A communicator that is not yet
        connected asks the one it was made from.
        """
        gone = {}
        level = next((level for level in self._levels() if level.gloo), self)
        for name in self.names:
            if name != self.name:
                rank = level.names.index(name)
                try:
                    _unread.extend(backend.send([torch.zeros(1)], rank, _PROBE) for backend in level.gloo)
                except RuntimeError as error:
                    gone[name] = error
        return gone


class Watch:
    """One wait for a message, or for all ranks to connect. Ends the wait when it is hopeless."""

    def __init__(self, lookout: Lookout, connection: str, number: int, what: str) -> None:
        self._lookout, self._connection, self._number, self._what = lookout, connection, number, what
        self._probed = time.perf_counter()
        self._deadline = self._probed + lookout.timeout

    def look(self) -> None:
        """Raise if the message will not come."""
        if self._lookout.stopped.is_set():
            raise Stopped
        # gloo notices a dead rank only once it is connected.
        if self._number < 0 and time.perf_counter() > self._probed + _PROBES:
            self._probe()
        timeout, trouble = f"timed out after {self._lookout.timeout:g} s", ""
        try:
            self._lookout.look(self._connection, self._number, self._what)
        except Silent:
            trouble = f"{timeout}, {STORE_SILENT}"
        except dist.DistError:
            self._probe()
            trouble = STORE_GONE
            self._deadline = min(self._deadline, time.perf_counter() + _GONE)
        if time.perf_counter() > self._deadline:
            trouble = trouble or timeout + self._list_absent()
            raise PeerLost(f"Waiting for {self._what}: rank {self._lookout.name} {trouble}.")

    def _probe(self) -> None:
        self._probed = time.perf_counter()
        for error in self._lookout.closed().values():
            raise self._lookout.lost(self._what, error) from error

    def _list_absent(self) -> str:
        """The ranks that have not begun the message, according to the store, in words."""
        lookout = self._lookout

        def has_begun(store: Store, name: int) -> bool:
            place = f"{lookout.key}/{self._connection}/at/{name}"
            return name == lookout.name or (store.check([place]) and int(store.get(place)) > self._number)

        try:
            absent = lookout.bulletin.ask(
                lambda store: [name for name in lookout.names if not has_begun(store, name)], _ANSWER
            )
        except (Silent, dist.DistError):
            absent = []
        return f": {list_ranks(absent)} {'is' if len(absent) == 1 else 'are'} missing" if absent else ""


def list_ranks(ranks: Sequence[int]) -> str:
    """Ranks in words: rank 1; ranks 1 and 2; ranks 1, 2 and 3."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"

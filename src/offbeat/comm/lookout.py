"""Why a wait is in vain: somebody has left, is elsewhere, has not come, or is gone."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from offbeat.base.errors import Disagreement, OffbeatError, PeerLost
from offbeat.comm.departure import Departure
from offbeat.comm.place import Place, Track, disagreement
from offbeat.comm.store import Bulletin, Silent

_ANSWER = 1.0  # seconds in which a healthy store answers
_LOOKS, _PAUSE = 5, 0.1  # how often to look for a closed connection, and seconds between
_PROBE = 2**31 - 1  # a tag that nobody listens to

STORE_GONE = "lost the process group's store: its host, usually rank 0, is gone"
STORE_SILENT = "and the process group's store is silent: its host, usually rank 0, is stopped or cut off"


class Lookout:
    """What one rank of a communicator looks up in the store while it waits, and tells the others there.

    Notes are found by those who wait on the same communicator or on one made from it, hence `above`.
    """

    def __init__(
        self, key: str, names: Sequence[int], rank: int, bulletin: Bulletin, above: Lookout | None = None
    ) -> None:
        self.key, self.names, self.name = key, list(names), names[rank]
        self.bulletin, self._above = bulletin, above
        self._tracks: WeakSet[Track] = WeakSet()
        self._runs = 0

    def follow(self, track: Track) -> None:
        """A run begins, on all ranks in the same order."""
        self._runs += 1
        track.key = f"{self.key}/run {self._runs}"
        self._tracks.add(track)

    def leave(self, departure: Departure, begun: Mapping[str, Mapping[str, int]]) -> None:
        """Tell everybody that this rank sends no more than it has begun, by communicator and connection."""
        note = json.dumps({"text": departure.text, "shared": departure.shared, "begun": begun})

        def write(store: Store) -> None:
            store.set(f"{self.key}/left/{self.name}", note)
            store.set(f"{self.key}/left", "yes")

        try:
            self.bulletin.ask(write, _ANSWER)
        except (dist.DistError, Silent):
            pass  # who waits for us sees our connections close, or waits for the store's host as well

    def arrive(self, connection: str, begun: int) -> None:
        """Tell the others that this rank waits here, having begun so many messages."""
        self.bulletin.post(lambda store: store.set(f"{self.key}/{connection}/at/{self.name}", str(begun)))

    def look(self, connection: str, number: int, what: str) -> None:
        """Raise if the message will never arrive, as far as the store tells."""
        error = self.bulletin.ask(lambda store: self._look(store, connection, number, what), _ANSWER)
        if error is not None:
            raise error

    def _look(self, store: Store, connection: str, number: int, what: str) -> OffbeatError | None:
        error = self._leaver(store, what, lambda note: _in_vain(note, self.key, connection, number))
        return error or self._elsewhere(store)

    def _leaver(
        self, store: Store, what: str, counts: Callable[[dict[str, Any]], bool]
    ) -> OffbeatError | None:
        """What to raise because one of us has left."""
        level: Lookout | None = self
        while level is not None:
            if store.check([f"{level.key}/left"]):
                for name in self.names:
                    place = f"{level.key}/left/{name}"
                    if name != self.name and store.check([place]):
                        note = json.loads(store.get(place))
                        if counts(note):
                            return Departure(note["text"], note["shared"]).error(name, what)
            level = level._above
        return None

    def _elsewhere(self, store: Store) -> Disagreement | None:
        """What to raise because somebody waits in a call that this rank can no longer come to.

        Who waits in such a call says so; the first to see it words the sentence for all.
        """
        level: Lookout | None = self
        while level is not None:
            for track in list(level._tracks):
                here = track.place  # read once: the worker moves on
                key = f"{track.key}/meeting {here.meetings}"
                if here.meeting is not None:
                    store.set(key, json.dumps([track.rank, asdict(here)]))
                elif store.check([key]):
                    rank, there = json.loads(store.get(key))
                    other = Place(**there)
                    if other.passed_by(here):
                        sentence = disagreement((rank, other), (track.rank, here))
                        verdict = store.compare_set(f"{track.key}/verdict", "", sentence)
                        return Disagreement(verdict.decode())
            level = level._above
        return None

    def absent(self, connection: str, number: int) -> list[int]:
        """Who has not come to a message, as far as the store tells."""

        def find(store: Store) -> list[int]:
            missing = []
            for name in self.names:
                place = f"{self.key}/{connection}/at/{name}"
                if name != self.name and not (store.check([place]) and int(store.get(place)) > number):
                    missing.append(name)
            return missing

        return self.bulletin.ask(find, _ANSWER)

    def lost(self, what: str, error: Exception, backends: Sequence[Any]) -> OffbeatError:
        """What to raise for a broken connection: why a rank left, if it said so; else whose it was."""
        try:
            departure = self.bulletin.ask(lambda store: self._leaver(store, what, lambda note: True), _ANSWER)
        except (dist.DistError, Silent):
            departure = None
        if departure is not None:
            return departure
        reason = str(error).splitlines()[0].split("] ", 1)[-1].split(". ")[0]
        gone = self.closed(backends)
        for _ in range(_LOOKS):
            if gone or not backends:
                break
            time.sleep(_PAUSE)  # one of a rank's connections may close before the others
            gone = self.closed(backends)
        whose = f"the connection to {listed(gone)}" if gone else "a connection"
        return PeerLost(f"Waiting for {what}: rank {self.name} lost {whose} ({reason}).")

    def closed(self, backends: Sequence[Any]) -> list[int]:
        """The ranks that a connection to is closed: gloo refuses to send to them.

        A rank that is there gets the first word of a message that it never asks for.
        """
        gone = []
        for rank, name in enumerate(self.names):
            if name != self.name:
                try:
                    _unread.extend(backend.send([torch.zeros(1)], rank, _PROBE) for backend in backends)
                except RuntimeError:
                    gone.append(name)
        return gone


_unread: list[Any] = []  # gloo must not see the end of them


def _in_vain(note: dict[str, Any], key: str, connection: str, number: int) -> bool:
    """Whether a message will not come; number −1 is the connecting before the first.

    What was sent before its sender left still arrives, unless a worker on the way is lost.
    """
    begun: int = note["begun"].get(key, {}).get(connection, -1)
    return number >= begun or note["shared"] == PeerLost.__name__


def listed(ranks: Sequence[int]) -> str:
    """Ranks in words: rank 1; ranks 1 and 2; ranks 1, 2 and 3."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"

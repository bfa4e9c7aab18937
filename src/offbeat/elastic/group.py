"""Workers that are separate jobs, and find each other through a lighthouse."""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import os
import socket
import time
import uuid
from concurrent.futures import Future, wait
from concurrent.futures import TimeoutError as Late
from contextlib import suppress
from dataclasses import asdict, replace
from datetime import timedelta
from math import inf
from typing import Any, ClassVar
from urllib.parse import urlsplit

from torch._C._distributed_c10d import TCPStore

from offbeat.base.checks import is_whole
from offbeat.base.errors import OffbeatError, PeerLost, RunFinished
from offbeat.comm.changing import Card, Give, Members
from offbeat.comm.communicator import Communicator
from offbeat.comm.monitor import PeerMonitor
from offbeat.comm.presence import Departure
from offbeat.comm.solo import Solo
from offbeat.comm.store import StoreClient, start
from offbeat.comm.torch_backend import Torch
from offbeat.elastic.decision import FINISHED, Decision, Seat, of_one_method
from offbeat.elastic.gathering import Gathering
from offbeat.elastic.lighthouse import Lighthouse
from offbeat.elastic.wire import share_text

logger = logging.getLogger("offbeat")

_REACH = 5.0  # seconds to connect to others, one of which may be dead before anybody can tell
_KNOCK = 1.0  # seconds in which a machine that runs says whether a process listens
_AGAIN = 0.3  # seconds before the next look for enough workers
_NAMED = 100  # workers with another token that are named: their names cost memory
_FAREWELL = 6.0  # seconds to tell workers that still come that the run is finished: usually a tenth of one


class Elastic(Gathering):
    """Workers that may come and go. Each is a job of its own; there is no common process group.

    Before a round, the workers agree through torchft's lighthouse who takes part. A round is applied by all
    its members or by none: if one is lost, the others repeat the round. A worker that joins receives the
    state from one that trains on. With fewer than `least` workers, all wait. Workers with another `token`
    are ignored. `timeout` is the longest wait for one message, in seconds. `name` appears in logs.

        elastic = offbeat.Elastic(lighthouse="http://host:29510", least=2)
        sync = offbeat.diloco(model, optimizer, every=16, group=elastic)
    """

    _ended: ClassVar[set[str]] = set()  # lineages of runs that this process has finished

    def __init__(
        self, lighthouse: str, *, least: int = 2, token: str | None = None, timeout: float = 60.0,
        name: str | None = None,
    ) -> None:  # fmt: skip
        call = f"Elastic(lighthouse={lighthouse!r}, least={least!r}, timeout={timeout!r})"
        if not isinstance(lighthouse, str) or urlsplit(lighthouse).scheme not in ("http", "https"):
            raise ValueError(f"{call}: lighthouse must be its address, such as http://host:29510.")
        if not is_whole(least, 1):
            raise ValueError(f"{call}: least must be a number of workers, at least 1.")
        if not timeout > 0:
            raise ValueError(f"{call}: timeout must be a positive number of seconds.")
        if token is not None and not (isinstance(token, str) and token):
            raise TypeError(f"{call}: token must be a string that all workers share, or None.")
        own = name or f"{socket.gethostname()}-{os.getpid()}"
        super().__init__(f"{own}:{uuid.uuid4().hex[:8]}", Solo())
        self.lighthouse, self.least, self.timeout = lighthouse, least, timeout
        self._token = token
        self._client: Lighthouse | None = None
        self._stores: dict[str, StoreClient] = {}  # by address
        self._asked: Future[tuple[Communicator, Members]] | None = None
        self._card: Card | None = None  # the last one
        self._waits = self._closed = False
        self._strangers: set[str] = set()  # workers with another token

    def __repr__(self) -> str:
        return f"Elastic(lighthouse={self.lighthouse!r}, least={self.least})"

    def ask(self, card: Card, give: Give) -> None:
        assert self._asked is None
        if self._client is None and self._leads:
            self._client = Lighthouse(self.lighthouse, self.name)
            host = _find_address(self.lighthouse)
            self._store = TCPStore("0.0.0.0", 0, is_master=True, wait_for_workers=False)
            self._address = f"{host}:{self._store.port}"
        self._card = card
        self._asked = start(lambda: self._gather(card, give), "offbeat-members")

    def answer(self) -> Members:
        assert self._asked is not None
        asked, self._asked = self._asked, None
        try:
            return self._use(*asked.result(self.timeout if self.may_end else None))
        except Late:
            raise RunFinished(FINISHED) from None

    def close(self) -> None:
        if self._card is not None and not self._closed:
            if self.finished:
                wait([start(self._say_finished, "offbeat-finished")], _FAREWELL)
            if self._client is not None:
                self._client.close()
        self._closed = True

    def shard(self, inside: Communicator) -> None:
        """The first process asks the lighthouse, for all. Each connects to those with the same shard."""
        self.inside, self.beside = inside, inside.worker.duplicate()
        self.name = share_text(self.name, inside)
        self.members = Members((self.name,))

    @property
    def _leads(self) -> bool:
        return self.inside is None or self.inside.rank == 0

    def _say_finished(self) -> None:
        """Tell workers that still come that the run is finished: they would wait for it."""
        assert self._card is not None
        self._ended.add(self._card.lineage)
        if self._asked is not None:
            with suppress(OffbeatError):
                comm, _ = self._asked.result()
                if comm is not self.comm:
                    comm.worker.leave(Departure(FINISHED, RunFinished.__name__))
        self._attempt += 1
        if self._leads:
            self._ask_lighthouse(replace(self._card, over=True))

    def _ask_lighthouse(self, card: Card) -> list[Any]:
        assert self._client is not None
        own = asdict(card) | {"place": None if card.place == inf else card.place}  # JSON has no infinity
        key = "" if self.broken else self.members.key
        told = {"card": own, "attempt": self._attempt, "key": key, "size": self.size}
        proof = self._prove(self.name, self._address, told)
        return self._client.quorum(self._address, {"told": told, "proof": proof})

    def _list(self, card: Card) -> list[Seat]:
        answer: list[Any] | None = None
        try:
            answer = self._ask_lighthouse(card) if self._leads else []
        finally:  # the other processes must not wait for one that fails
            if self.beside is not None:
                answer = json.loads(share_text(json.dumps(answer), self.beside))
        if answer is None:
            raise RunFinished(FINISHED)
        seats = [seat for found in answer if (seat := self._read(*found)) is not None]
        # A run that this process has finished does not end the next one.
        return [seat for seat in seats if not (seat.card.over and seat.card.lineage in self._ended)]

    def _read(self, name: str, address: str, data: dict[str, Any]) -> Seat | None:
        """A worker that has asked; None if it does not know the token, or tells what cannot be read."""
        told = data.get("told")
        proof = data.get("proof")
        if not isinstance(told, dict) or not isinstance(proof, str):
            return None
        if not hmac.compare_digest(proof.encode(), self._prove(name, address, told).encode()):
            if name not in self._strangers and len(self._strangers) < _NAMED:
                logger.warning("%s has another token than this worker: they ignore each other.", name)
                self._strangers.add(name)
            return None
        try:
            fields = dict(told["card"])
            place = inf if fields["place"] is None else float(fields["place"])
            card = Card(**{**fields, "place": place})
            texts = (card.method, card.call, card.lineage, card.prepared)
            numbers, flags = (card.rounds, card.entered), (card.open, card.over)
            if not all(isinstance(text, str) for text in texts):
                raise ValueError(card)
            if not all(is_whole(n, -1) for n in numbers) or not all(isinstance(f, bool) for f in flags):
                raise ValueError(card)
            return Seat(name, card, address, int(told["attempt"]), str(told["key"]), int(told["size"]))
        except (KeyError, TypeError, ValueError):
            logger.warning("%s asks to take part with a message that cannot be read: it is ignored.", name)
            return None

    def _prove(self, *words: Any) -> str:
        text = json.dumps(words, sort_keys=True)
        key = b"offbeat" if self._token is None else self._token.encode()
        return hmac.new(key, text.encode(), hashlib.sha256).hexdigest()

    def _enough(self, seats: list[Seat]) -> bool:
        if not any(seat.name == self.name for seat in seats):
            time.sleep(_AGAIN)
            return False
        here = len(of_one_method(seats, self.name))
        if here >= self.least or self.may_end:
            if self._waits:
                logger.info("%d workers are here: going on.", here)
            self._waits = False
            return True
        if not self._waits:
            logger.warning("%d of at least %d workers are here: waiting for more.", here, self.least)
        self._waits = True
        time.sleep(_AGAIN)
        return False

    def _connect(self, decision: Decision) -> Communicator:
        names, key = decision.members.names, decision.members.key
        if len(names) == 1:
            return Solo()
        logger.info("%s connects to %d workers: %s", self.name, len(names), ", ".join(names))
        store_client = self._reach(decision.host)
        place = f"offbeat/{key}/{self._prove(key, 'connections')[:16]}"
        if self.inside is not None:
            place += f"/{self.inside.rank}"
        own, ranks, addresses = names.index(self.name), range(len(names)), decision.addresses
        monitor = PeerMonitor(place, ranks, own, store_client, self.timeout, patience=_REACH)
        monitor.is_alive = lambda rank: listens(addresses[rank])
        try:
            return Torch.among(monitor)
        except OffbeatError as error:  # those who are connected wait for this one
            monitor.leave(Departure(str(error), PeerLost.__name__), {})
            raise

    def _reach(self, address: str) -> StoreClient:
        """The store at an address. Those of earlier members are closed: their workers may be dead."""
        self._stores = {known: store for known, store in self._stores.items() if known == address}
        if address not in self._stores:
            self._stores[address] = StoreClient(_open_store(address))
        return self._stores[address]


def _open_store(address: str) -> TCPStore:
    """Connect to the store of a worker, as long as it listens: torch alone would not notice that it dies."""
    host, _, port = address.rpartition(":")
    deadline = time.monotonic() + _REACH
    while listens(address) and time.monotonic() < deadline:
        with suppress(RuntimeError, ValueError):
            patience = timedelta(seconds=_KNOCK)
            store = TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=patience)
            store.set_timeout(timedelta(seconds=_REACH))
            return store
        time.sleep(_AGAIN / 10)
    raise PeerLost(f"The store of a worker at {address} cannot be reached.")


def listens(address: str) -> bool:
    """Whether a process listens at an address, as each worker does as long as it lives. True if unsure."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=_KNOCK).close()
    except ConnectionRefusedError:
        return False
    except (OSError, ValueError, OverflowError):
        return True
    return True


def _find_address(lighthouse: str) -> str:
    """The address of this machine on the way to the lighthouse."""
    parts = urlsplit(lighthouse)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((parts.hostname or "127.0.0.1", parts.port or 80))  # sends nothing
        except OSError as error:
            raise ValueError(f"Elastic(lighthouse={lighthouse!r}): the address is not known here.") from error
        return str(probe.getsockname()[0])

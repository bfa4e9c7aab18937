"""The client of torchft's lighthouse: asks for a quorum, and says that this worker is alive."""

from __future__ import annotations

import atexit
import importlib.util
import json
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, TypeVar

from offbeat.base.errors import RunFinished, how_to_install
from offbeat.elastic.decision import FINISHED

T = TypeVar("T")
logger = logging.getLogger("offbeat")

_BEAT = 0.25  # seconds between two signs of life
_PATIENCE = 5.0  # seconds in which a lighthouse must accept a connection
_PAUSE = 0.5  # seconds before the next attempt
_LONG = 120.0  # seconds of one call for a quorum; asking again restarts the lighthouse's join timeout


def load_torchft() -> ModuleType:
    """Load torchft's extension alone: its package would import much of torch that is not needed here."""
    found = importlib.util.find_spec("torchft")
    folders = () if found is None else found.submodule_search_locations or ()
    path = next((file for folder in folders for file in Path(folder).glob("_torchft.*")), None)
    own = None if path is None else importlib.util.spec_from_file_location("torchft._torchft", path)
    if own is None or own.loader is None:
        raise ImportError(f"offbeat.Elastic needs torchft: {how_to_install('elastic')}")
    os.environ.setdefault("RUST_LOG", "warn")  # it prints every request otherwise
    module = importlib.util.module_from_spec(own)
    own.loader.exec_module(module)
    return module


class Lighthouse:
    """One worker's connection to a lighthouse. A lighthouse that is gone is waited for."""

    _all: ClassVar[weakref.WeakSet[Lighthouse]] = weakref.WeakSet()

    def __init__(self, address: str, name: str) -> None:
        self.address, self.name = address, name
        self._torchft, self._clients = load_torchft(), dict[str, Any]()
        self._closed, self._silent = threading.Event(), False
        self._brief: set[object] = set()  # one for each call that returns soon, and has not
        self._all.add(self)
        threading.Thread(target=self._beat, name="offbeat-alive", daemon=True).start()

    def quorum(self, store: str, data: dict[str, Any]) -> list[tuple[str, str, dict[str, Any]]]:
        """Wait for the others, and return name, store and data of each."""

        def ask(client: Any) -> Any:
            timeout = timedelta(seconds=_LONG)
            return client.quorum(replica_id=self.name, timeout=timeout, store_address=store, data=data)

        while True:
            answer = self._call("quorum", ask)
            if self._closed.is_set():
                raise RunFinished(FINISHED)
            if answer is not None:
                found = [(p.replica_id, p.store_address, _read(p.data)) for p in answer.participants]
                return [(name, at, told) for name, at, told in found if told is not None]

    def close(self) -> None:
        self._closed.set()

    @classmethod
    def close_all(cls) -> None:
        """Wait for calls that soon return: if one does while Python ends, the process is aborted.

        A call for a quorum may take minutes, and is not waited for.
        """
        deadline, every = time.monotonic() + 2 * _PATIENCE, list(cls._all)
        for one in every:
            one.close()
        while any(one._brief for one in every) and time.monotonic() < deadline:
            time.sleep(0.01)

    def _beat(self) -> None:
        with suppress(RunFinished):
            while not self._closed.wait(_BEAT):
                self._call("heartbeat", self._say_alive)

    def _say_alive(self, client: Any) -> None:
        with self._returning_soon():
            client.heartbeat(self.name, timedelta(seconds=_PATIENCE))

    @contextmanager
    def _returning_soon(self) -> Iterator[None]:
        """Around a call that `close_all` waits for. Raises once the connection is closed."""
        self._brief.add(call := object())
        try:
            if self._closed.is_set():
                raise RunFinished(FINISHED)
            yield
        finally:
            self._brief.discard(call)

    def _call(self, kind: str, call: Callable[[Any], T]) -> T | None:
        """Make a call, each kind on a client of its own. None if it failed, after a pause."""
        try:
            if kind not in self._clients:
                with self._returning_soon():
                    patience = timedelta(seconds=_PATIENCE)
                    self._clients[kind] = self._torchft.LighthouseClient(self.address, patience)
            result = call(self._clients[kind])
        except TimeoutError:
            return None  # the others are not here yet
        except RuntimeError as error:
            if not (self._silent or self._closed.is_set()):
                logger.warning("The lighthouse at %s does not answer; trying again: %s", self.address, error)
            self._silent = True
            self._clients.pop(kind, None)
            self._closed.wait(_PAUSE)
            return None
        if self._silent:
            self._silent = False
            logger.info("The lighthouse at %s answers again.", self.address)
        return result


atexit.register(Lighthouse.close_all)


def _read(data: Any) -> dict[str, Any] | None:
    """What a worker has told; None if it is nothing that can be read."""
    try:
        told = json.loads(data) if isinstance(data, str) else data
    except ValueError:
        return None
    return told if isinstance(told, dict) else None

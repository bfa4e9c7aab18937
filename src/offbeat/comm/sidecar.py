"""A second thread of a worker: works beside the loop, hears the others, and waits for nobody's loop."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from offbeat.comm.communicator import Communicator


class Stopped(Exception):
    """Raised in a sidecar that is to end; never seen outside of it."""


class Sidecar(ABC):
    """One thread beside a worker's own, what the two share, and numbers announced by the other workers.

    Real workers have threads, simulated ones take turns in virtual time. An error in the sidecar is raised
    by the worker's next `until` or `check`.
    """

    comm: Communicator  # connections for the sidecar alone

    @property
    @abstractmethod
    def heard(self) -> int:
        """The highest number announced so far, here or elsewhere; −1 if none."""

    @abstractmethod
    def start(self, work: Callable[[], None]) -> None:
        """Begin the sidecar's work."""

    @abstractmethod
    def locked(self) -> AbstractContextManager[None]:
        """Inside, what is shared may be looked at and changed; afterwards who waits looks again."""

    @abstractmethod
    def until(self, ready: Callable[[], bool], what: str, seconds: float | None = None) -> bool:
        """Inside `locked`: let the other thread go on until `ready()`; False if that took too long."""

    @abstractmethod
    def announce(self, number: int) -> None:
        """Everybody shall have heard this number soon. To be called by the worker's own thread."""

    @abstractmethod
    def check(self) -> None:
        """Raise the sidecar's error, if it had one."""

    @abstractmethod
    def stop(self) -> None:
        """End the sidecar, whatever it waits for. Idempotent."""

"""A message in the air."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")
S = TypeVar("S")


class Pending(Generic[T]):
    """A message in the air."""

    def __init__(
        self,
        wait: Callable[[], T],
        done: Callable[[], bool],
        arrived: Callable[[], float],
        advance: Callable[[], None] | None = None,
    ) -> None:
        self._wait: Callable[[], T] | None = wait
        self._done = done
        self._arrived = arrived
        self._advance = advance

    def wait(self) -> T:
        """The message, once it has arrived. Idempotent; raises `PeerLost` if it never will."""
        if self._wait is not None:
            self._value = self._wait()
            self._wait = None
        return self._value

    def done(self) -> bool:
        """Whether `wait` would return at once."""
        return self._wait is None or self._done()

    def advance(self) -> None:
        """Of a question and an answer: wait for the question to arrive, and send the answer. All ranks call
        this at the same point, or none; messages of one part have nothing to do."""
        if self._wait is not None and self._advance is not None:
            self._advance()

    @property
    def answers(self) -> bool:
        """Whether it is a question and an answer, so that `advance` has something to do."""
        return self._advance is not None

    def arrived(self) -> float:
        """When it arrived, on the communicator's clock; to be asked after `wait`."""
        return self._arrived()

    def then(self, change: Callable[[T], S]) -> Pending[S]:
        """The message with `change` applied to it on arrival."""
        advance = self.advance if self.answers else None
        return Pending(lambda: change(self.wait()), self.done, self.arrived, advance)


def arrived(value: T) -> Pending[T]:
    """A message that is already here."""
    return Pending(lambda: value, lambda: True, lambda: 0.0)

"""The contract of every code."""

from typing import Protocol

from offbeat.comm import Communicator, Pending
from offbeat.schedule import Clock, State
from offbeat.tensors import Packed


class Reducer(Protocol):
    """What is sent. A frozen value that brings every rank the same mean of everyone's payload."""

    def init(self) -> State:
        """What it remembers, at first."""

    def start(self, payload: Packed, comm: Communicator, clock: Clock, state: State) -> Pending[Packed]:
        """Send the payload, which now belongs to the message; the mean may lie in its memory."""

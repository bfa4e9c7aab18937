"""The contract of every reducer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from offbeat.base.clock import Clock, State
from offbeat.base.packed import Packed
from offbeat.comm.communicator import Communicator, Pending

T = TypeVar("T")


class Staged(Pending[T]):
    """A result that takes several messages. `stages` send the second and later ones, in order.

    Each stage waits for the message before it. All ranks run a stage at the same point: a round runs stage i
    of n when i/n of its delay is over. `wait` runs the stages that are left.
    """

    def __init__(
        self, stages: Sequence[Callable[[], None]], wait: Callable[[], T], arrived: Callable[[], float]
    ) -> None:
        super().__init__(wait, lambda: False, arrived)
        self.stages = list(stages)

    def advance(self) -> None:
        """Run the next stage."""
        self.stages[0]()
        del self.stages[0]

    def wait(self) -> T:
        while self.stages:
            self.advance()
        return super().wait()


class Reducer:
    """How a payload is sent. A frozen value that gives every rank the mean of all payloads, or nearly.

    Drift is not measured with a `lossy` reducer. One that `remembers` keeps values for later rounds.
    """

    lossy: bool = False  # the result only approximates the mean: send differences from an anchor, not weights
    agrees: bool = True  # all ranks get the same result, to the bit
    remembers: bool = False  # the mean may be nonzero where no worker sends anything in this round

    def init(self) -> State:
        """The initial state."""
        return {}

    def start(self, payload: Packed, comm: Communicator, clock: Clock, state: State) -> Pending[Packed]:
        """Send the payload, which now belongs to the message; the mean may use its memory.

        A reducer that needs more than one message returns a `Staged`.
        """
        raise NotImplementedError

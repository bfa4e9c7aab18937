"""One round, from its beginning to its report."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.profiler import record_function

from offbeat.base.clock import Clock, State
from offbeat.base.errors import PeerLost
from offbeat.base.packed import Packed
from offbeat.comm.communicator import Communicator, Metered, Pending, arrived
from offbeat.engine.checkpoint import copy_state
from offbeat.engine.handshake import ROUND, compare_headers, header
from offbeat.engine.report import Report
from offbeat.reduce.reducer import Staged


class Round:
    """One round of a part as this worker sees it: its workers, its messages, and what they cost.

    A part opens a round when it begins, compares the workers with a header, adds what it sends to `messages`,
    and closes the round with a report. `clock` is that of the beginning. `since` is the step of the round
    before. `comm` counts the bytes of everything that is sent through it.
    """

    def __init__(self, clock: Clock, comm: Communicator, *, since: int) -> None:
        self.clock, self.since, self.comm = clock, since, Metered(comm)
        self.began = comm.now()
        self.waited = 0.0  # seconds this worker has waited for it
        self.messages: list[Pending[Any]] = []
        self.mean: Pending[Packed]
        self.followed: Pending[list[Tensor]] | None = None  # rank 0's buffers
        self.moments: Pending[Packed] | None = None
        self.sent: list[Tensor] | None = None  # the extras as they were sent, if the round lands late

    def compare(self, part: int, rates: int, rank: int, digest: int = 0) -> Pending[list[int]]:
        """Send a header. The answer raises unless all workers are in this round, and holds their digests.

        `part` is the place of the part in its method. `rates` is a digest of the learning rates. `rank` is
        this worker's rank among all workers.
        """
        head = header(ROUND, part, self.clock, rates, rank)
        heads = self.comm.tell([*head, digest]).then(compare_headers)
        self.messages.append(heads)
        return heads

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Work on this round: a range of this name in a profile. If a worker is lost, the error names the
        round."""
        # A range that nobody records would cost as much as ten small sums.
        with record_function(name) if torch._C._autograd._profiler_enabled() else nullcontext():
            try:
                yield
            except PeerLost as error:
                raise error.during(self.clock.round, self.clock.step) from error.__cause__

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the seconds inside as waited."""
        start = self.comm.now()
        try:
            yield
        finally:
            self.waited += self.comm.now() - start

    def wait(self) -> None:
        """Wait for all messages."""
        with self.waiting():
            for message in self.messages:
                message.wait()

    def advance(self) -> None:
        """Run the next stage of the mean, if one is left."""
        if isinstance(self.mean, Staged) and self.mean.stages:
            with self.waiting():
                self.messages[0].wait()  # the header: nobody sends a stage of another round
                self.mean.advance()

    def report(self, kind: type[Report] = Report, **fields: Any) -> Report:
        """What the round cost, after `wait`. `fields` replace what it measured, or add to it."""
        landed = max([message.arrived() for message in self.messages], default=self.began + self.waited)
        measured = {
            "step": self.clock.step,
            "round": self.clock.round,
            "workers": self.comm.size,
            "bytes_sent": self.comm.sent,
            "bytes_received": self.comm.received,
            "seconds_waited": self.waited,
            "seconds_in_air": max(0.0, landed - self.began),
            "drift": None,
            "norm": None,
            "period": self.clock.step - self.since,
        }
        return kind(**{**measured, **fields})

    def state_dict(self) -> State:
        """Wait for the messages, and save them without applying them."""
        with self.phase("offbeat.wait"):
            self.wait()
        return {
            "step": self.clock.step,
            "round": self.clock.round,
            "lr": self.clock.lr,
            "since": self.since,
            "bytes": [self.comm.sent, self.comm.received],
            "mean": [flat.clone() for flat in self.mean.wait().flats],
            "followed": copy_state(None if self.followed is None else self.followed.wait()),
            "moments": None if self.moments is None else self.moments.wait().tensors(),
            "sent": copy_state(self.sent),
        }

    @classmethod
    def resume(cls, state: State, comm: Communicator, packed: Packed) -> Round:
        """A round whose messages have all arrived, the mean in `packed`."""
        for flat, saved in zip(packed.flats, state["mean"], strict=True):
            flat.copy_(saved)
        round = cls(Clock(state["step"], state["round"], state["lr"]), comm, since=state["since"])
        round.comm.sent, round.comm.received = state["bytes"]
        round.mean = arrived(packed)
        if state["followed"] is not None:
            round.followed = arrived(copy_state(state["followed"]))
        if state["moments"] is not None:
            moments = Packed.like(state["moments"])
            moments.read(list(state["moments"].values()))
            round.moments = arrived(moments)
        round.sent = copy_state(state["sent"])
        return round

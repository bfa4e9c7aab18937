"""The contracts of a reducer and of a code."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from functools import partial
from inspect import GEN_SUSPENDED, getgeneratorstate
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from offbeat.base.checks import is_whole
from offbeat.base.clock import Clock, State
from offbeat.base.errors import NotFinite
from offbeat.base.packed import Packed
from offbeat.comm.communicator import Communicator, Pending, arrived, join_messages
from offbeat.reduce.vectors import Residual, Vector, lay_out

Messages = Generator[Pending[list[Tensor]], list[Tensor], None]
"""A code's messages, one after the other. The generator yields each and gets back what arrives."""


class Staged(Pending[Packed]):
    """A result that takes several messages. `stages` is how often `advance` still sends one.

    All ranks advance at the same point: a round does so for the i-th time of n when i/n of its delay has
    passed. After the last time, `wait` sends nothing, and `done` tells whether it would return at once.
    """

    stages = 0

    def advance(self) -> None:
        """Wait for the message before, send the next one, and count `stages` down."""
        raise NotImplementedError

    def done(self) -> bool:
        return not self.stages and super().done()

    def wait(self) -> Packed:
        while self.stages:
            self.advance()
        return super().wait()


class Reducer:
    """How a payload is sent. A frozen value that gives every rank the mean of all payloads, exact or not.

    Drift is not measured with a `lossy` reducer. One that `remembers` keeps values for later rounds.
    """

    lossy: bool = False  # the result only approximates the mean: send differences from an anchor, not weights
    agrees: bool = True  # all ranks get the same result, to the bit
    splits: bool = True  # the mean of a payload is that of its parts, or near it
    remembers: bool = False  # the mean may be nonzero where no worker sends anything in this round

    def init(self) -> State:
        """Return the initial state."""
        return {}

    def start(self, payload: Packed, comm: Communicator, clock: Clock, state: State) -> Pending[Packed]:
        """Send the payload. Its memory now belongs to the message, and the mean may use it. A reducer that
        needs more than one message returns a `Staged`."""
        raise NotImplementedError

    def for_gradients(self) -> Reducer:
        """Return the reducer to use for gradients. Defaults may differ from those for other payloads."""
        return self

    def reweigh(self, state: State, factor: float) -> None:
        """The mean of a round was multiplied by `factor`, because workers had different weights."""


@dataclass(frozen=True, repr=False)
class Code(Reducer):
    """A reducer that loses information and knows what it lost, so that `ErrorFeedback` can resend it.

    Tensors of fewer than `least` values, and the extras of a round, are sent uncompressed; larger `least`
    loses less. NaN and infinity are refused on all ranks. A single worker sends and loses nothing.
    """

    least: int = field(default=1024, kw_only=True)

    lossy = True
    messages = 1  # sent one after the other; a round spreads them over its delay
    carries_exact = False  # its `carry` sends `Vector.exact` too, at the head of an exchange and a gather
    most = 3.4028234663852886e38  # the largest magnitude it can send
    gradient_decay: ClassVar[float | None] = None  # of `ErrorFeedback` for gradients, unless given
    gradient_limit: ClassVar[float | None] = None  # the same

    def __init_subclass__(cls) -> None:
        if "carry" in vars(cls) and "carries_exact" not in vars(cls):
            cls.carries_exact = False  # what it inherits is true of another `carry`

    def __post_init__(self) -> None:
        if not is_whole(self.least, 1):
            raise ValueError(f"{self!r}: least is a number of values, at least 1.")

    def __repr__(self) -> str:
        own = [f"{f.name}={getattr(self, f.name)!r}" for f in fields(self) if f.name != "least"]
        own += [f"least={self.least}"] * (self.least != 1024)
        return f"{type(self).__name__}({', '.join(own)})"

    def takes(self, tensor: Tensor) -> bool:
        """Whether it compresses such a tensor; others are sent as they are."""
        return tensor.numel() >= self.least

    def start(
        self, payload: Packed, comm: Communicator, clock: Clock, state: State, residual: Residual = None
    ) -> Pending[Packed]:
        """Send the payload. `residual`, vectors like those of the payload, receives what this rank lost.

        The result is the mean over the ranks of payload − residual.
        """
        if comm.size == 1:
            for flat in residual or ():
                flat.zero_()
            return arrived(payload)
        split = PayloadSplit(payload, comm, clock, self, residual)
        return split.send([self.carry(vector, comm, clock, state) for vector in split.vectors], self.messages)

    def carry(self, vector: Vector, comm: Communicator, clock: Clock, state: State) -> Messages:
        """Replace the values of a vector by their mean, compressed, and fill its residual.

        A generator: it yields each message that it sends and gets back what arrives. With `carries_exact`, it
        must send `vector.exact` too, as `mean_in_two_phases` does.
        """
        raise NotImplementedError


class PayloadSplit(Staged):
    """A payload in two parts: vectors for a code, and small tensors and extras that are averaged exactly.

    Every rank tells the others whether its payload is finite. If one is not, all raise before anything is
    written. The exact part and that word travel in the code's own messages if it carries them: on a slow or
    distant link, and on a busy machine, each further message costs more than its bytes.
    """

    _messages: Sequence[Pending[Any]] = ()  # besides those of the code

    def __init__(
        self, payload: Packed, comm: Communicator, clock: Clock, code: Code | None, residual: Residual = None
    ) -> None:
        self._payload, self._clock, self._arrivals = payload, clock, list[float]()
        super().__init__(self._finish, self._is_here, partial(max, self._arrivals))
        self._most = most = Code.most if code is None else code.most
        layout = lay_out(payload, code, comm.size, residual)
        self._layout, self.vectors = layout, layout.vectors
        layout.exact.read(layout.rest)
        for view in layout.extras:
            view.zero_()  # extras may be infinite
        ends = [torch.stack(torch.aminmax(flat)).tolist() for flat in payload.flats if len(flat)]
        fits = False not in [-most <= low <= high <= most for low, high in ends]  # NaN does not
        # The number, from 1, of the first tensor that cannot be sent:
        bad = 0 if fits else 1 + [bool((view.abs() <= most).all()) for view in payload.views].index(False)
        if layout.rest:
            torch._foreach_zero_(layout.rest)
        for flat, left, copy in layout.narrow:
            copy.values.copy_(flat)
            if left is not None and copy.residual is not None:
                torch.sub(flat, copy.values, out=left)  # what the copy loses
        if layout.carried is not None:
            layout.carried.word = bad
        else:
            exact = layout.exact.flats
            self._messages = [comm.tell([bad]), *([comm.mean(exact)] if exact else [])]

    def send(self, codes: Sequence[Messages], messages: int = 1) -> Self:
        """Send the first of the `messages` of each code."""
        self._checked = False
        self._sent = [(code, next(code)) for code in codes]  # what each code waits for
        self.stages = messages - 1 if codes else 0
        return self

    def _is_here(self) -> bool:
        """Whether the messages that were sent last have arrived."""
        return all(message.done() for message in (*self._messages, *(message for _, message in self._sent)))

    def _check(self) -> None:
        """Wait until all ranks have told whether their payload is finite."""
        if self._layout.carried is None:
            words = [words[0] for words in self._messages[0].wait()]
        else:
            words = self._layout.carried.words(self._sent[0][1].wait())
        for rank, bad in enumerate(words):
            if bad:
                # The next round reuses their memory, so all must have arrived.
                join_messages([*self._messages, *(message for _, message in self._sent)]).wait()
                name, step = self._payload.names[bad - 1], self._clock.step
                raise NotFinite(
                    f"Round {self._clock.round} (step {step}): {name!r} on rank {rank} has a value that is "
                    f"NaN, infinite or beyond {self._most:.3g}. No worker applied the round. Check that "
                    "rank's loss, or clip its gradients."
                )
        self._checked = True

    def advance(self) -> None:
        """Wait for the message of each code, and let it send the next one."""
        if not self._checked:
            self._check()
        sent = []
        for code, message in self._sent:
            tensors = message.wait()
            self._arrivals.append(message.arrived())
            assert getgeneratorstate(code) == GEN_SUSPENDED, "the code has raised before"
            with suppress(StopIteration):
                sent.append((code, code.send(tensors)))
        self._sent, self.stages = sent, max(0, self.stages - 1)

    def _finish(self) -> Packed:
        """Wait for all messages, and return the payload with the means in it."""
        self.advance()
        while self._sent:
            self.advance()
        for message in self._messages:
            message.wait()
            self._arrivals.append(message.arrived())
        for flat, left, copy in self._layout.narrow:
            flat.copy_(copy.values)
            if left is not None and copy.residual is not None:
                left.add_(copy.residual)
        if self._layout.rest:
            torch._foreach_copy_(self._layout.rest, self._layout.exact.views)
        if self._layout.lost:
            torch._foreach_zero_(self._layout.lost)
        return self._payload

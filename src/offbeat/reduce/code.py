"""Reducers that compress: the contract of a code, and the vectors it compresses."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, fields, replace
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from offbeat.base.clock import Clock, State
from offbeat.base.errors import NotFinite
from offbeat.base.packed import Packed
from offbeat.comm.communicator import Communicator, Pending, arrived
from offbeat.reduce.reducer import Reducer, Staged


@dataclass(frozen=True)
class Span:
    """The place of a tensor in a vector."""

    name: str
    start: int
    shape: torch.Size

    @property
    def size(self) -> int:
        return self.shape.numel()

    @property
    def end(self) -> int:
        return self.start + self.size


@dataclass(frozen=True)
class Vector:
    """One long vector of a payload. Outside its `spans` it is zero and may be overwritten."""

    values: Tensor
    residual: Tensor | None  # receives what this rank failed to send
    spans: tuple[Span, ...]
    index: int  # of the vector in its payload
    buffers: dict[Hashable, Tensor]

    def buffer(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Memory that is kept from round to round with its contents; zeros at first."""
        key = (self.index, name, shape, dtype, self.values.device)
        if key not in self.buffers:
            self.buffers[key] = torch.zeros(shape, dtype=dtype, device=self.values.device)
        return self.buffers[key]

    def views(self, flat: Tensor) -> list[Tensor]:
        """The tensors, in this or another vector of the same length."""
        return [flat[span.start : span.end].view(span.shape) for span in self.spans]


_kept: WeakKeyDictionary[Packed, dict[Hashable, Tensor]] = WeakKeyDictionary()


def kept_with(payload: Packed) -> list[Tensor]:
    """The buffers that codes keep with a payload. They are not part of a checkpoint."""
    return list(_kept.get(payload, {}).values())


@dataclass(frozen=True, repr=False)
class Code(Reducer):
    """A reducer that loses information and knows what it lost, so that `ErrorFeedback` can resend it.

    Tensors of fewer than `least` values, and the extras of a round, are sent uncompressed; larger `least`
    loses less. NaN and infinity are refused on all ranks. A single worker sends and loses nothing.
    """

    least: int = field(default=1024, kw_only=True)

    lossy = True

    def __post_init__(self) -> None:
        if isinstance(self.least, bool) or not isinstance(self.least, int) or self.least < 1:
            raise ValueError(f"{self!r}: least is a number of values, at least 1.")

    def __repr__(self) -> str:
        own = [f"{f.name}={getattr(self, f.name)!r}" for f in fields(self) if f.name != "least"]
        rest = [] if self.least == 1024 else [f"least={self.least}"]
        return f"{type(self).__name__}({', '.join([*own, *rest])})"

    @property
    def most(self) -> float:
        """The largest magnitude it can send."""
        return 3.4028234663852886e38

    def takes(self, tensor: Tensor) -> bool:
        """Whether it compresses such a tensor; others are sent as they are."""
        return tensor.numel() >= self.least

    def start(
        self,
        payload: Packed,
        comm: Communicator,
        clock: Clock,
        state: State,
        residual: Sequence[Tensor] | None = None,
    ) -> Pending[Packed]:
        """Send the payload. `residual`, vectors like those of the payload, receives what this rank lost.

        The mean over the ranks of payload − residual is the result.
        """
        if comm.size == 1:
            for flat in residual or ():
                flat.zero_()
            return arrived(payload)
        split = PayloadSplit(payload, comm, clock, self.takes, self.most, residual)
        return split.finish([self.carry(vector, comm, clock, state) for vector in split.vectors])

    def carry(self, vector: Vector, comm: Communicator, clock: Clock, state: State) -> Pending[None]:
        """Replace the values of a vector by their mean, compressed, and fill its residual."""
        raise NotImplementedError


class PayloadSplit:
    """A payload in two parts: vectors for a code, and small tensors and extras that are averaged exactly.

    Every rank tells whether its payload is finite. If one is not, all raise before anything is written.
    Vectors have type `dtype`, or the payload's own if that is None.
    """

    def __init__(
        self,
        payload: Packed,
        comm: Communicator,
        clock: Clock,
        takes: Callable[[Tensor], bool],
        most: float,
        residual: Sequence[Tensor] | None,
        dtype: torch.dtype | None = torch.float32,
    ) -> None:
        self._payload, self._clock, self._most = payload, clock, most
        self._residual, self._narrow = residual, list[tuple[Tensor, Tensor | None, Vector]]()
        views, flats, names = payload.views, payload.flats, payload.names
        extras = [name.startswith("+") for name in names]
        coded = [not extra and takes(view) for view, extra in zip(views, extras, strict=True)]
        self._fine = [i for i, taken in enumerate(coded) if not taken]
        self._exact = Packed.like({names[i]: views[i] for i in self._fine})
        self._exact.read([views[i] for i in self._fine])
        _zero([views[i] for i in self._fine if extras[i]])
        self._word = comm.tell([self._first_bad()])
        _zero([views[i] for i in self._fine])
        self._message = comm.mean(self._exact.flats)
        members: list[list[int]] = [[] for _ in flats]
        for i, (which, _, _) in enumerate(payload.spans):
            if coded[i]:
                members[which].append(i)
        self.vectors = [self._vector(i, found, dtype) for i, found in enumerate(members) if found]
        for i, found in enumerate(members):
            if residual is not None and not found:
                residual[i].zero_()

    def _vector(self, index: int, members: Sequence[int], dtype: torch.dtype | None) -> Vector:
        payload, flat = self._payload, self._payload.flats[index]
        left = None if self._residual is None else self._residual[index]
        views, places = payload.views, payload.spans
        spans = tuple([Span(payload.names[j], places[j][1], views[j].shape) for j in members])
        vector = Vector(flat, left, spans, index, _kept.setdefault(payload, {}))
        if dtype is None or flat.dtype == dtype:
            return vector
        narrow = vector.buffer("narrow", (flat.numel(),), dtype).copy_(flat)
        if left is not None:
            torch.sub(flat, narrow, out=left)  # what the narrower type loses is not sent either
        vector = replace(vector, values=narrow, residual=None if left is None else torch.zeros_like(narrow))
        self._narrow.append((flat, left, vector))
        return vector

    def finish(self, messages: Sequence[Pending[None]]) -> Pending[Packed]:
        """The payload, once its vectors and the exact part have arrived."""
        staged = [message for message in messages if isinstance(message, Staged)]

        def advance() -> None:
            self._check()
            for message in staged:
                message.advance()

        def wait() -> Packed:
            self._check()
            for message in messages:
                message.wait()
            self._message.wait()
            self._put_back()
            return self._payload

        def arrive() -> float:
            return max([self._message.arrived(), *[message.arrived() for message in messages]])

        return Staged([advance] * max([len(message.stages) for message in staged], default=0), wait, arrive)

    def _put_back(self) -> None:
        for flat, left, vector in self._narrow:
            flat.copy_(vector.values)
            if left is not None and vector.residual is not None:
                left.add_(vector.residual)
        if self._fine:
            views = self._payload.views
            torch._foreach_copy_([views[i] for i in self._fine], self._exact.views)
            if self._residual is not None:
                left_views = self._payload.over(self._residual).views
                _zero([left_views[i] for i in self._fine])

    def _first_bad(self) -> int:
        """The number, from 1, of the first tensor that cannot be sent; 0 if there is none."""
        if all(_largest(flat) <= self._most for flat in self._payload.flats):
            return 0
        views = self._payload.views
        return next(i for i, view in enumerate(views, 1) if not _largest(view.flatten()) <= self._most)

    def _check(self) -> None:
        for rank, word in enumerate(self._word.wait()):
            if word[0]:
                raise NotFinite(
                    f"Round {self._clock.round} (step {self._clock.step}): rank {rank} was to send "
                    f"{self._payload.names[word[0] - 1]!r} with a value that is NaN, infinite or beyond "
                    f"{self._most:.3g}; nobody has applied the round. Look at that rank's loss, or clip its "
                    "gradients."
                )


def _largest(flat: Tensor) -> float:
    """The largest magnitude; NaN if there is one."""
    if flat.numel() == 0:
        return 0.0
    low, high = torch.stack(torch.aminmax(flat)).tolist()
    return math.nan if math.isnan(low) else max(-low, high)


def _zero(tensors: list[Tensor]) -> None:
    if tensors:
        torch._foreach_zero_(tensors)

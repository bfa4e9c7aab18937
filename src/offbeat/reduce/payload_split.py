"""A payload as codes see it: what they carry, what goes as it is, and who has sent no number."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from offbeat.base.clock import Clock
from offbeat.base.errors import NotFinite
from offbeat.base.packed import Packed
from offbeat.comm.communicator import Communicator
from offbeat.comm.pending import Pending
from offbeat.reduce.workspace import Workspace


@dataclass(frozen=True)
class Span:
    """Where a tensor lies in a vector."""

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
    """One long vector of a payload. Where no `spans` lie it is zero, and may become anything."""

    values: Tensor
    residual: Tensor | None  # to be filled with what this rank failed to send
    spans: tuple[Span, ...]
    workspace: Workspace

    def views(self, flat: Tensor) -> list[Tensor]:
        """The tensors, in this or another vector of the same length."""
        return [flat[span.start : span.end].view(span.shape) for span in self.spans]


class PayloadSplit:
    """Small tensors and what rides along are averaged as they are; the rest becomes vectors for a code.

    All ranks tell whether their payload is finite, and all raise if one is not, before anything is written.
    Vectors are of type `dtype`, or, without one, of the payload's own.
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
        self._residual = residual
        views, riders = payload.views, [name.startswith("+") for name in payload.names]
        coarse = [not rider and takes(view) for view, rider in zip(views, riders, strict=True)]
        self._fine = [i for i, taken in enumerate(coarse) if not taken]
        self._exact = Packed.like({payload.names[i]: views[i] for i in self._fine})
        self._exact.read([views[i] for i in self._fine])
        _zero([views[i] for i in self._fine if riders[i]])
        self._word = comm.tell([self._first_bad()])
        _zero([views[i] for i in self._fine])
        self._message = comm.mean(self._exact.flats)
        self._flats = [
            _Flat(payload, i, [j for j, taken in enumerate(coarse) if taken and payload.spans[j][0] == i])
            for i in range(len(payload.flats))
        ]
        self.vectors = [
            flat.vector(None if residual is None else residual[i], dtype or flat.flat.dtype)
            for i, flat in enumerate(self._flats)
            if flat.members
        ]
        for i, flat in enumerate(self._flats):
            if residual is not None and not flat.members:
                residual[i].zero_()

    def landing(self, messages: Sequence[Pending[None]]) -> Pending[Packed]:
        """The payload, once everything has arrived and been put in its place."""

        def wait() -> Packed:
            self._check()
            for message in messages:
                message.wait()
            self._message.wait()
            for flat in self._flats:
                flat.put_back()
            if self._fine:
                torch._foreach_copy_([self._payload.views[i] for i in self._fine], self._exact.views)
                if self._residual is not None:
                    left = self._payload.over(self._residual).views
                    _zero([left[i] for i in self._fine])
            return self._payload

        def advance() -> None:
            self._check()
            for message in messages:
                message.advance()

        everything: list[Pending[Any]] = [self._message, *messages]
        answer = advance if any(message.answers for message in messages) else None
        return Pending(wait, lambda: False, lambda: max(message.arrived() for message in everything), answer)

    def _first_bad(self) -> int:
        """The number, from 1, of the first tensor that cannot be sent; 0: there is none."""
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


class _Flat:
    """One of the payload's vectors, which may travel in a narrower type."""

    def __init__(self, payload: Packed, index: int, members: Sequence[int]) -> None:
        self.flat, self.members = payload.flats[index], members
        self._workspace = Workspace(payload, index)
        self._spans = tuple(
            Span(payload.names[j], payload.spans[j][1], payload.views[j].shape) for j in members
        )
        self._given: Vector | None = None

    def vector(self, residual: Tensor | None, dtype: torch.dtype) -> Vector:
        values, left = self.flat, residual
        if values.dtype != dtype:
            values = self._workspace.room("narrow", (self.flat.numel(),), self.flat, dtype)
            values.copy_(self.flat)
            if residual is not None:
                left = torch.zeros_like(values)
                torch.sub(self.flat, values, out=residual)  # what the narrower type loses is not sent either
        self._residual, self._given = residual, Vector(values, left, self._spans, self._workspace)
        return self._given

    def put_back(self) -> None:
        if self._given is not None and self._given.values is not self.flat:
            self.flat.copy_(self._given.values)
            if self._residual is not None and self._given.residual is not None:
                self._residual.add_(self._given.residual)


def _largest(flat: Tensor) -> float:
    """The largest magnitude; NaN if there is one."""
    if flat.numel() == 0:
        return 0.0
    low, high = torch.stack(torch.aminmax(flat)).tolist()
    return math.nan if math.isnan(low) else max(-low, high)


def _zero(tensors: list[Tensor]) -> None:
    if tensors:
        torch._foreach_zero_(tensors)

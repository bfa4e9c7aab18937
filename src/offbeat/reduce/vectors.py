"""The vectors of a payload that a code compresses, and what it leaves out."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from offbeat.base.packed import Packed
from offbeat.reduce.wire import ExactSlices

Residual = Sequence[Tensor] | None


class TensorSpan(NamedTuple):
    """The place of a tensor in a vector."""

    name: str
    start: int
    end: int
    shape: torch.Size


@dataclass(frozen=True)
class Vector:
    """One vector of a payload. Outside its `spans` it is zero and may be overwritten.

    It is the same object from round to round, unless its memory has changed.
    """

    values: Tensor
    residual: Tensor | None  # receives what this rank failed to send
    spans: tuple[TensorSpan, ...]
    index: int  # of the vector in its payload
    buffers: dict[Hashable, Tensor]
    exact: ExactSlices | None = None  # what travels in the messages of the vector besides its values
    plans: dict[Hashable, Any] = field(default_factory=dict)  # views of its memory, kept by codes

    def buffer(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return memory that keeps its contents from round to round. It starts as zeros."""
        key = (self.index, name, shape, dtype, self.values.device)
        if key not in self.buffers:
            self.buffers[key] = torch.zeros(shape, dtype=dtype, device=self.values.device)
        return self.buffers[key]


class Coded(Protocol):
    """What a layout asks a code."""

    carries_exact: bool

    def takes(self, tensor: Tensor) -> bool: ...


class PayloadLayout:
    """What of a payload goes to a code, and what is averaged exactly. It is kept from round to round.

    Vectors are float32. Without a code they keep their type and contain the small tensors as well.
    """

    def __init__(self, payload: Packed, code: Coded | None) -> None:
        names, views = payload.names, payload.views
        extras = [name.startswith("+") for name in names]
        coded = [not extras[i] and (code is None or code.takes(view)) for i, view in enumerate(views)]
        self.code, self.buffers = code, dict[Hashable, Tensor]()
        self._flats = payload.flats
        self._spans = [
            tuple(
                TensorSpan(names[i], start, start + n, views[i].shape)
                for i, (which, start, n) in enumerate(payload.spans)
                if which == index and coded[i]
            )
            for index in range(len(payload.flats))
        ]
        self._places = [i for i, taken in enumerate(coded) if not taken]
        self.rest = [views[i] for i in self._places]
        self.extras = [views[i] for i in self._places if extras[i]]
        self.exact = Packed.like({names[i]: views[i] for i in self._places})
        self.lost = list[Tensor]()  # what the residual has for the rest: zeros
        self.size, self.vectors = 0, list[Vector]()
        self.residual: Sequence[Tensor] = ()
        self.narrow = list[tuple[Tensor, Tensor | None, Vector]]()  # float64 vectors, and copies of them
        self.carried: ExactSlices | None = None  # the rest and a word from each rank, if the code sends them

    def fit(self, payload: Packed, size: int, residual: Sequence[Tensor]) -> None:
        """Make the vectors for a residual and a number of ranks."""
        self.residual, self.size, self.vectors, self.narrow = residual, size, [], []
        lefts = payload.over(residual).views if residual else []
        self.lost = [lefts[i] for i in self._places if lefts]
        code, exact = self.code, self.exact.flats
        # On a GPU, reading the word would wait for all that is queued there.
        elsewhere = [flat for flat in (*exact, *self._flats) if flat.device.type != "cpu"]
        carries = code is not None and code.carries_exact and any(self._spans) and not elsewhere
        self.carried = ExactSlices(exact, size) if carries else None
        for index, (flat, spans) in enumerate(zip(self._flats, self._spans, strict=True)):
            if spans:
                first = None if self.vectors else self.carried
                left = residual[index] if residual else None
                vector = Vector(flat, left, spans, index, self.buffers, first)
                kept = code is None or flat.dtype == torch.float32
                self.vectors.append(vector if kept else self._convert(vector))

    def _convert(self, vector: Vector) -> Vector:
        """Return a vector for a copy in float32."""
        narrow = vector.buffer("narrow", (vector.values.numel(),), torch.float32)
        left = None if vector.residual is None else torch.zeros_like(narrow)
        copy = replace(vector, values=narrow, residual=left)
        self.narrow.append((vector.values, vector.residual, copy))
        return copy


_layouts: WeakKeyDictionary[Packed, PayloadLayout] = WeakKeyDictionary()


def lay_out(payload: Packed, code: Coded | None, size: int, residual: Residual) -> PayloadLayout:
    """Return the layout of the last round, unless the code, the ranks or the residual have changed."""
    layout, kept = _layouts.get(payload), residual or ()
    if layout is None or layout.code != code:
        layout = _layouts[payload] = PayloadLayout(payload, code)
    if not layout.vectors or layout.size != size or list(map(id, kept)) != list(map(id, layout.residual)):
        layout.fit(payload, size, kept)
    return layout


def list_buffers(payload: Packed) -> list[Tensor]:
    """Return the buffers that codes keep with a payload. They are not part of a checkpoint."""
    layout = _layouts.get(payload)
    return [] if layout is None else [*layout.buffers.values(), *layout.exact.flats]

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

    It is the same object from round to round, until the code, the residual or the number of ranks changes.
    """

    values: Tensor
    residual: Tensor | None  # receives what this rank failed to send
    spans: tuple[TensorSpan, ...]
    index: int  # of the vector in its payload
    buffers: dict[Hashable, Tensor]
    exact: ExactSlices | None = None  # what travels in the messages of the vector besides its values
    plans: dict[Hashable, Any] = field(default_factory=dict, init=False, repr=False, compare=False)
    """Views of its memory that codes keep. `dataclasses.replace` does not copy them."""

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

    def __init__(
        self,
        payload: Packed,
        code: Coded | None,
        size: int,
        residual: tuple[Tensor, ...],
        key: tuple[object, ...],
    ) -> None:
        self.key, self.residual = key, residual  # kept, so that its ids stay its own
        names, views, lefts = payload.names, payload.views, payload.over(residual).views if residual else []
        extras = [name.startswith("+") for name in names]
        coded = [not extras[i] and (code is None or code.takes(view)) for i, view in enumerate(views)]
        rest = [i for i, taken in enumerate(coded) if not taken]
        self.rest = [views[i] for i in rest]
        self.extras = [views[i] for i in rest if extras[i]]
        self.lost = [lefts[i] for i in rest if lefts]  # what the residual has for the rest: zeros
        self.exact = Packed.like({names[i]: views[i] for i in rest})
        # On a GPU, reading the word would wait for all that is queued there.
        elsewhere = [flat for flat in (*self.exact.flats, *payload.flats) if flat.device.type != "cpu"]
        carries = code is not None and code.carries_exact and any(coded) and not elsewhere
        # The rest and a word from each rank, if the code sends them in its own messages.
        self.carried = ExactSlices(self.exact.flats, size) if carries else None
        self.vectors = list[Vector]()
        self.narrow = list[tuple[Tensor, Tensor | None, Vector]]()  # float64 vectors, and copies of them
        buffers = _buffers.setdefault(payload, {})
        for index, flat in enumerate(payload.flats):
            spans = tuple(
                TensorSpan(names[i], start, start + n, views[i].shape)
                for i, (which, start, n) in enumerate(payload.spans)
                if which == index and coded[i]
            )
            if spans:
                first = None if self.vectors else self.carried
                vector = Vector(flat, residual[index] if residual else None, spans, index, buffers, first)
                kept = code is None or flat.dtype == torch.float32
                self.vectors.append(vector if kept else self._convert(vector))

    def _convert(self, vector: Vector) -> Vector:
        """Return a vector for a copy in float32."""
        values, left = torch.zeros_like(vector.values, dtype=torch.float32), vector.residual
        copy = replace(vector, values=values, residual=None if left is None else torch.zeros_like(values))
        self.narrow.append((vector.values, left, copy))
        return copy


_buffers: WeakKeyDictionary[Packed, dict[Hashable, Tensor]] = WeakKeyDictionary()
_layouts: WeakKeyDictionary[Packed, PayloadLayout] = WeakKeyDictionary()


def lay_out(payload: Packed, code: Coded | None, size: int, residual: Residual) -> PayloadLayout:
    """Return the layout of the last round, unless the code, the ranks or the residual have changed."""
    layout, left = _layouts.get(payload), tuple(residual or ())
    key = (code, size, *map(id, left))
    if layout is None or layout.key != key:
        layout = _layouts[payload] = PayloadLayout(payload, code, size, left, key)
    return layout


def list_buffers(payload: Packed) -> list[Tensor]:
    """Return the buffers that codes keep with a payload. They are not part of a checkpoint."""
    found, layout = list(_buffers.get(payload, {}).values()), _layouts.get(payload)
    if layout is not None:
        copies = [tensor for *_, copy in layout.narrow for tensor in (copy.values, copy.residual)]
        found += [*layout.exact.flats, *[tensor for tensor in copies if tensor is not None]]
    return found

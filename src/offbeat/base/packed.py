"""Named tensors packed into a few long vectors."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor


class Packed:
    """Named tensors laid out one after the other in a few long vectors, one per dtype and device.

    Halves are widened to float32, so that sums lose nothing; `views` are the tensors as they lie there.
    """

    def __init__(
        self,
        names: Sequence[str],
        views: Sequence[Tensor],
        flats: Sequence[Tensor],
        spans: Sequence[_Span],
        staged: dict[int, Tensor] | None = None,
        factor: float = 1.0,
    ) -> None:
        self.names = tuple(names)
        self._views = list(views)
        self._flats = list(flats)
        self._spans = tuple(spans)
        self._factor = factor  # by which all values are yet to be multiplied
        self._staged = {} if staged is None else staged  # sources yet to be copied, by view

    @classmethod
    def like(cls, tensors: Mapping[str, Tensor], *, multiple: int = 1) -> Packed:
        """Room for tensors of these shapes, in vectors whose lengths are multiples of a number."""
        sizes, spans = _placed(tensors.values())
        flats = [
            torch.zeros(n + -n % multiple, dtype=dtype, device=device) for (dtype, device), n in sizes.items()
        ]
        return cls._laid(tensors, flats, spans)

    @classmethod
    def around(cls, tensors: Mapping[str, Tensor]) -> Packed | None:
        """The tensors' own memory, if they lie in it one after the other; see `offbeat.flatten`."""
        sizes, spans = _placed(tensors.values())
        flats = []
        for i, (kind, size) in enumerate(sizes.items()):
            members = [t for t, (which, _, _) in zip(tensors.values(), spans, strict=True) if which == i]
            if not _adjoin(members) or members[0].dtype != kind[0]:
                return None
            first = next(t for t in members if t.numel())
            flats.append(first.as_strided((size,), (1,)))
        return cls._laid(tensors, flats, spans)

    @classmethod
    def _laid(cls, tensors: Mapping[str, Tensor], flats: Sequence[Tensor], spans: Sequence[_Span]) -> Packed:
        views = [
            flats[i][start : start + n].view(tensor.shape)
            for (i, start, n), tensor in zip(spans, tensors.values(), strict=True)
        ]
        return cls(tuple(tensors), views, flats, spans)

    def beside(self, other: Packed) -> Packed:
        """The entries of both, each in its own vectors."""
        spans = [(i + len(self._flats), start, n) for i, start, n in other._spans]
        return Packed(
            self.names + other.names,
            self._views + other._views,
            self._flats + other._flats,
            [*self._spans, *spans],
        )

    @property
    def flats(self) -> list[Tensor]:
        self._materialize()
        return self._flats

    @property
    def views(self) -> list[Tensor]:
        self._materialize()
        return self._views

    @property
    def spans(self) -> tuple[_Span, ...]:
        """For every entry which vector it lies in, where, and how many values it has."""
        return self._spans

    def cut(self, *lengths: int) -> list[Packed]:
        """The first so many entries, the next so many, …, and the rest, sharing memory."""
        edges = [0, *itertools.accumulate(lengths), len(self.names)]
        return [self._part(first, last) for first, last in itertools.pairwise(edges)]

    def _part(self, first: int, last: int) -> Packed:
        edges: dict[int, tuple[int, int]] = {}
        for i, start, n in self._spans[first:last]:
            low, _ = edges.get(i, (start, start))
            edges[i] = (low, start + n)
        order = list(edges)
        flats = [self._flats[i][low:high] for i, (low, high) in edges.items()]
        spans = [(order.index(i), start - edges[i][0], n) for i, start, n in self._spans[first:last]]
        return Packed(
            self.names[first:last], self._views[first:last], flats, spans, self._staged, self._factor
        )

    def scaled(self, factor: float) -> Packed:
        """The same memory, its values to be multiplied by `factor` when they are looked at or written."""
        self._materialize()
        return Packed(self.names, self._views, self._flats, self._spans, factor=factor)

    def over(self, flats: Sequence[Tensor]) -> Packed:
        """The same entries in other vectors of the same lengths."""
        views = [
            flats[i][start : start + n].view(view.shape)
            for (i, start, n), view in zip(self._spans, self._views, strict=True)
        ]
        return Packed(self.names, views, flats, self._spans)

    def read(self, tensors: Sequence[Tensor]) -> None:
        """Copy tensors in."""
        if self._views:
            torch._foreach_copy_(self._views, list(tensors))

    def stage(self, tensors: Sequence[Tensor]) -> None:
        """Copy tensors in when the memory is looked at, so that `pieces` can send one and fill the next."""
        if self._is(tensors):
            return
        self._staged.update((id(view), tensor) for view, tensor in zip(self._views, tensors, strict=True))

    def pieces(self, size: int) -> Iterator[Tensor]:
        """The vectors, one after the other, in slices of whole tensors of at least `size` values."""
        for i, flat in enumerate(self._flats):
            sent = 0
            for view, (which, start, n) in zip(self._views, self._spans, strict=True):
                if which == i:
                    self._fill([view])
                    if start + n - sent >= size:
                        yield flat[sent : start + n]
                        sent = start + n
            if sent < flat.numel():
                yield flat[sent:]

    def _fill(self, views: Sequence[Tensor] | None = None) -> None:
        if self._staged:
            chosen = [view for view in (views or self._views) if id(view) in self._staged]
            if chosen:
                torch._foreach_copy_(chosen, [self._staged.pop(id(view)) for view in chosen])

    def _materialize(self) -> None:
        self._fill()
        if self._factor != 1:
            for flat in self._flats:
                flat.mul_(self._factor)
            self._factor = 1.0

    def write(self, tensors: Sequence[Tensor]) -> None:
        """Copy into tensors."""
        if self._is(tensors):
            self._materialize()
        elif self._factor != 1 and all(t.dtype == v.dtype for t, v in zip(tensors, self._views, strict=True)):
            for tensor, view in zip(tensors, self._views, strict=True):
                torch.mul(view, self._factor, out=tensor)  # one pass instead of two
        elif self._views:
            torch._foreach_copy_(list(tensors), self.views)

    def _is(self, tensors: Sequence[Tensor]) -> bool:
        """Whether these tensors lie in this very memory."""
        pairs = zip(self._views, tensors, strict=True)
        return all(view.data_ptr() == t.data_ptr() and view.dtype == t.dtype for view, t in pairs)

    def tensors(self) -> dict[str, Tensor]:
        """Copies, by name."""
        return {name: view.clone() for name, view in zip(self.names, self.views, strict=True)}


_Span = tuple[int, int, int]  # which flat, where in it, how many values


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def _placed(tensors: Iterable[Tensor]) -> tuple[dict[tuple[torch.dtype, torch.device], int], list[_Span]]:
    """How long the vector of each kind gets, and where in it each tensor lies."""
    sizes: dict[tuple[torch.dtype, torch.device], int] = {}
    spans = []
    for tensor in tensors:
        kind = (_wide(tensor.dtype), tensor.device)
        start = sizes.setdefault(kind, 0)
        sizes[kind] += tensor.numel()
        spans.append((list(sizes).index(kind), start, tensor.numel()))
    return sizes, spans


def _adjoin(tensors: Sequence[Tensor]) -> bool:
    """Whether each begins where the one before it ends, in one piece of memory."""
    filled = [tensor for tensor in tensors if tensor.numel()]
    if not filled or not all(tensor.is_contiguous() for tensor in tensors):
        return False
    ends = [tensor.data_ptr() + tensor.numel() * tensor.element_size() for tensor in filled]
    memory = {tensor.untyped_storage().data_ptr() for tensor in filled}
    return len(memory) == 1 and [t.data_ptr() for t in filled[1:]] == ends[:-1]

"""Named tensors packed into a few flat vectors."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor


class Packed:
    """Named tensors packed into flat vectors, one per dtype and device.

    Half-precision tensors are widened to float32, so that sums are exact. `views` are the packed tensors.
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
        self._factor = factor  # a multiplication that is still to be done
        self._staged = {} if staged is None else staged  # tensors still to be copied, by view

    @classmethod
    def like(cls, tensors: Mapping[str, Tensor], *, multiple: int = 1) -> Packed:
        """Zeros for tensors of these shapes. The length of each vector is a multiple of `multiple`."""
        sizes, spans = _place(tensors.values())
        flats = [
            torch.zeros(n + -n % multiple, dtype=dtype, device=device) for (dtype, device), n in sizes.items()
        ]
        return cls(tuple(tensors), _cut(flats, spans, tensors.values()), flats, spans)

    @classmethod
    def around(cls, tensors: Mapping[str, Tensor]) -> Packed | None:
        """The tensors' own memory if it is contiguous, else None; see `offbeat.flatten`."""
        sizes, spans = _place(tensors.values())
        flats = []
        for i, (kind, size) in enumerate(sizes.items()):
            members = [t for t, (which, _, _) in zip(tensors.values(), spans, strict=True) if which == i]
            if not _are_contiguous(members) or members[0].dtype != kind[0]:
                return None
            first = next(t for t in members if t.numel())
            flats.append(first.as_strided((size,), (1,)))
        return cls(tuple(tensors), _cut(flats, spans, tensors.values()), flats, spans)

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
        """For every entry: its vector, its offset there, and its number of values."""
        return self._spans

    def cut(self, *lengths: int) -> list[Packed]:
        """Split the entries into groups of these lengths, and the rest. Memory is shared."""
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
        """The same memory, multiplied by `factor` when it is first read or written out."""
        self._materialize()
        return Packed(self.names, self._views, self._flats, self._spans, factor=factor)

    def over(self, flats: Sequence[Tensor]) -> Packed:
        """The same entries in other vectors of the same lengths."""
        return Packed(self.names, _cut(flats, self._spans, self._views), flats, self._spans)

    def read(self, tensors: Sequence[Tensor]) -> None:
        """Copy tensors in."""
        if self._views:
            torch._foreach_copy_(self._views, list(tensors))

    def stage(self, tensors: Sequence[Tensor]) -> None:
        """Copy tensors in when they are first read, so that `pieces` can fill one while another is sent."""
        if self._owns(tensors):
            return
        self._staged.update((id(view), tensor) for view, tensor in zip(self._views, tensors, strict=True))

    def pieces(self, size: int) -> Iterator[Tensor]:
        """The vectors in order, in slices of whole tensors with at least `size` values each."""
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
        if self._owns(tensors):
            self._materialize()
        elif self._factor != 1 and all(t.dtype == v.dtype for t, v in zip(tensors, self._views, strict=True)):
            for tensor, view in zip(tensors, self._views, strict=True):
                torch.mul(view, self._factor, out=tensor)  # one pass instead of two
        elif self._views:
            torch._foreach_copy_(list(tensors), self.views)

    def _owns(self, tensors: Sequence[Tensor]) -> bool:
        """Whether these tensors are this memory."""
        pairs = zip(self._views, tensors, strict=True)
        return all(view.data_ptr() == t.data_ptr() and view.dtype == t.dtype for view, t in pairs)

    def tensors(self) -> dict[str, Tensor]:
        """Copies, by name."""
        return {name: view.clone() for name, view in zip(self.names, self.views, strict=True)}


_Span = tuple[int, int, int]  # vector, offset, number of values


def _widen(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def _place(tensors: Iterable[Tensor]) -> tuple[dict[tuple[torch.dtype, torch.device], int], list[_Span]]:
    """The length of each kind of vector, and the span of each tensor."""
    sizes: dict[tuple[torch.dtype, torch.device], int] = {}
    spans = []
    for tensor in tensors:
        kind = (_widen(tensor.dtype), tensor.device)
        start = sizes.setdefault(kind, 0)
        sizes[kind] += tensor.numel()
        spans.append((list(sizes).index(kind), start, tensor.numel()))
    return sizes, spans


def _cut(flats: Sequence[Tensor], spans: Sequence[_Span], like: Iterable[Tensor]) -> list[Tensor]:
    """Views of the spans, shaped like the given tensors."""
    return [flats[i][start : start + n].view(t.shape) for (i, start, n), t in zip(spans, like, strict=True)]


def _are_contiguous(tensors: Sequence[Tensor]) -> bool:
    """Whether each tensor begins where the previous one ends, in the same storage."""
    nonempty = [tensor for tensor in tensors if tensor.numel()]
    if not nonempty or not all(tensor.is_contiguous() for tensor in tensors):
        return False
    ends = [tensor.data_ptr() + tensor.numel() * tensor.element_size() for tensor in nonempty]
    memory = {tensor.untyped_storage().data_ptr() for tensor in nonempty}
    return len(memory) == 1 and [t.data_ptr() for t in nonempty[1:]] == ends[:-1]

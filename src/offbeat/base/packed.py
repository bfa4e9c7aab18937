"""Named tensors packed into a few flat vectors."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

_Span = tuple[int, int, int]  # vector, offset, number of values
_CACHED = 2**16  # values: two tensors of this size and their difference fit a processor's cache


class Packed:
    """Named tensors packed into flat vectors, one per dtype and device.

    Half-precision tensors are widened to float32, so that sums are exact. `views` are the packed tensors.
    `spans` say where each one is: its vector, its offset in it, and its number of values.
    """

    _in_place = False  # whether some of the memory may belong to tensors outside

    def __init__(
        self, names: Iterable[str], like: Iterable[Tensor], flats: Iterable[Tensor], spans: Iterable[_Span]
    ) -> None:
        """`like` are tensors with the shapes of the views."""
        self.names, self.spans, self._flats = tuple(names), tuple(spans), list(flats)
        places = zip(self.spans, like, strict=True)
        self._views = [self._flats[i][start : start + n].view(t.shape) for (i, start, n), t in places]
        self._factor = 1.0  # a multiplication that has not been done yet
        self._cuts: dict[tuple[int, ...], list[Packed]] = {}

    @classmethod
    def like(cls, tensors: Mapping[str, Tensor], *, multiple: int = 1) -> Packed:
        """Return zeros for tensors of these shapes. Vector lengths are multiples of `multiple`."""
        sizes, spans = _place(tensors.values())
        flats = [torch.zeros(n + -n % multiple, dtype=k[0], device=k[1]) for k, n in sizes.items()]
        return cls(tensors, tensors.values(), flats, spans)

    @classmethod
    def around(cls, tensors: Mapping[str, Tensor]) -> Packed | None:
        """Return the tensors' own memory, or None if it is not contiguous. See `offbeat.flatten`."""
        sizes, spans = _place(tensors.values())
        flats = []
        for i, (kind, size) in enumerate(sizes.items()):
            members = [t for t, (at, _, n) in zip(tensors.values(), spans, strict=True) if at == i and n]
            memory = {t.untyped_storage().data_ptr() for t in members}
            ends = [t.data_ptr() + t.numel() * t.element_size() for t in members]
            if len(memory) != 1 or [t.data_ptr() for t in members[1:]] != ends[:-1]:
                return None
            if members[0].dtype != kind[0] or not all(t.is_contiguous() for t in members):
                return None
            flats.append(members[0].as_strided((size,), (1,)))
        packed = cls(tensors, tensors.values(), flats, spans)
        packed._in_place = True
        return packed

    def beside(self, other: Packed) -> Packed:
        """Return the entries of both, each in its own vectors."""
        spans = [(i + len(self._flats), start, n) for i, start, n in other.spans]
        views, flats = self._views + other._views, self._flats + other._flats
        both = Packed(self.names + other.names, views, flats, [*self.spans, *spans])
        both._in_place = self._in_place or other._in_place
        return both

    @property
    def flats(self) -> list[Tensor]:
        if self._factor != 1:
            self._multiply()
        return self._flats

    @property
    def views(self) -> list[Tensor]:
        if self._factor != 1:
            self._multiply()
        return self._views

    def _multiply(self) -> None:
        for flat in self._flats:
            flat.mul_(self._factor)
        self._factor = 1.0

    def scaled(self, factor: float) -> Packed:
        """Return the same memory, to be multiplied by `factor` when it is first used."""
        assert self._factor == 1
        scaled = copy.copy(self)
        scaled._factor = factor
        return scaled

    def scale(self, factor: float) -> None:
        """Multiply every value now. A factor of 0 makes all values 0, also those that are not finite."""
        for flat in self.flats if factor != 1 else ():
            flat.mul_(factor) if factor else flat.zero_()

    def over(self, flats: Sequence[Tensor]) -> Packed:
        """Return the same entries in other vectors of the same lengths."""
        return Packed(self.names, self._views, flats, self.spans)

    def cut(self, *lengths: int) -> list[Packed]:
        """Split the entries into groups of these lengths, and the rest. Memory is shared."""
        if lengths not in self._cuts:
            edges = [0, *itertools.accumulate(lengths), len(self.names)]
            self._cuts[lengths] = [self._part(first, last) for first, last in itertools.pairwise(edges)]
        parts = self._cuts[lengths]
        return parts if self._factor == 1 else [part.scaled(self._factor) for part in parts]

    def _part(self, first: int, last: int) -> Packed:
        edges: dict[int, tuple[int, int]] = {}
        for i, start, n in self.spans[first:last]:
            low, _ = edges.get(i, (start, start))
            edges[i] = (low, start + n)
        order = list(edges)
        flats = [self._flats[i][low:high] for i, (low, high) in edges.items()]
        spans = [(order.index(i), start - edges[i][0], n) for i, start, n in self.spans[first:last]]
        part = Packed(self.names[first:last], self._views[first:last], flats, spans)
        part._in_place = self._in_place
        return part

    def pieces(self, size: int, growth: int) -> Iterator[tuple[Tensor, list[int]]]:
        """Yield slices of the vectors, and which tensors are inside. No tensor is split.

        The first slice has at least `size` values, each next one at least `growth` times as many as the one
        before, and the last one has the rest.
        """
        for i, flat in enumerate(self.flats):
            sent, least, inside = 0, size, list[int]()
            for j, (which, start, n) in enumerate(self.spans):
                if which == i:
                    inside.append(j)
                    if start + n - sent >= least:
                        yield flat[sent : start + n], inside
                        sent, least, inside = start + n, least * growth, []
            if sent < flat.numel():
                yield flat[sent:], inside

    def read(self, tensors: Sequence[Tensor]) -> None:
        """Copy tensors in, unless they are this memory."""
        self._factor = 1.0
        if self._views and not (self._in_place and self.is_memory_of(tensors)):
            torch._foreach_copy_(self._views, list(tensors))

    def write(self, tensors: Sequence[Tensor]) -> None:
        """Copy into tensors, unless they are this memory."""
        if self._in_place and self.is_memory_of(tensors):
            _ = self.flats
        elif self._factor != 1 and [t.dtype for t in tensors] == [v.dtype for v in self._views]:
            for tensor, view in zip(tensors, self._views, strict=True):
                torch.mul(view, self._factor, out=tensor)  # one pass instead of two
        elif self._views:
            torch._foreach_copy_(list(tensors), self.views)

    def write_and_measure(self, tensors: Sequence[Tensor]) -> float:
        """Copy into tensors, in one pass. Return the squared distance between their old and new values."""
        norms = []
        for tensor, view in zip(tensors, self._views, strict=True):
            for x, y in split_alike(tensor, view):
                new = y * self._factor
                wide = torch.promote_types(new.dtype, torch.float32)
                norms.append(torch.linalg.vector_norm(x - new, dtype=wide).double())
                x.copy_(new)
        return float(torch.stack(norms).square().sum()) if norms else 0.0

    def is_memory_of(self, tensors: Sequence[Tensor]) -> bool:
        return [view.data_ptr() for view in self._views] == [tensor.data_ptr() for tensor in tensors]

    def tensors(self) -> dict[str, Tensor]:
        """Return copies by name."""
        return {name: view.clone() for name, view in zip(self.names, self.views, strict=True)}


def split_alike(a: Tensor, b: Tensor) -> Iterable[tuple[Tensor, Tensor]]:
    """Split two tensors of one shape into pieces that fit a processor's cache."""
    if a.numel() <= _CACHED or a.device.type != "cpu" or not (a.is_contiguous() and b.is_contiguous()):
        return [(a, b)]
    return zip(torch.split(a.view(-1), _CACHED), torch.split(b.view(-1), _CACHED), strict=True)


def _place(tensors: Iterable[Tensor]) -> tuple[dict[tuple[torch.dtype, torch.device], int], list[_Span]]:
    """Return the length of the vector of each kind, and the span of each tensor."""
    sizes: dict[tuple[torch.dtype, torch.device], int] = {}
    spans = []
    for tensor in tensors:
        half = tensor.dtype in (torch.float16, torch.bfloat16)
        kind = (torch.float32 if half else tensor.dtype, tensor.device)
        start = sizes.setdefault(kind, 0)
        sizes[kind] += tensor.numel()
        spans.append((list(sizes).index(kind), start, tensor.numel()))
    return sizes, spans

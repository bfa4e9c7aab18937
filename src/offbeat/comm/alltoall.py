"""Messages from rank to rank, as gloo's all-to-all carries them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from offbeat.comm.collective import nbytes
from offbeat.comm.communicator import Communicator

_LONG = 2**15  # bytes of a chunk from which on chunks are sent one after the other
_PIECES, _PIECE = 4, 2**19  # most pieces of a chunk, since each costs a latency; fewest bytes of a piece

Call = tuple[Tensor, Callable[[Any], dist.Work]]
Calls = tuple[list[Call], list[Tensor]]


def begin_exchange(comm: Communicator, chunks: Sequence[Tensor], src: int) -> Calls:
    """In turns where chunks are long: everyone sends to one rank and hears from one at a time.

    When all send to all at once, several share the way to each, and some links fall idle before others. gloo
    works on two calls at a time, in their order: while one piece ends, the next has the link.
    """
    given = _join(chunks)
    got = torch.empty_like(given)
    result = list(got.view(comm.size, *chunks[0].shape))
    if given.device.type != "cpu" or nbytes(chunks[:1]) < _LONG:
        return [(given, lambda pg: pg.alltoall_base(got, given, [], []))], result
    ours, theirs = (flat.view(torch.uint8).view(comm.size, -1) for flat in (given, got))
    theirs[comm.rank] = ours[comm.rank]
    piece = max(_PIECE, -(-ours.shape[1] // _PIECES))
    calls = []
    for ahead in range(1, comm.size):
        to, by = (comm.rank + ahead) % comm.size, comm.rank - ahead
        for out, room in zip(torch.split(ours[to], piece), torch.split(theirs[by], piece), strict=True):
            calls.append((given, _pass(comm, out, to, room, by)))
    return calls, result


def begin_shift(comm: Communicator, tensors: Sequence[Tensor], src: int) -> Calls:
    given = tensors[0].contiguous().view(-1)
    got = torch.empty_like(given)
    call = _pass(comm, given, (comm.rank + 1) % comm.size, got, comm.rank - 1)
    return [(given, call)], [got.view(tensors[0].shape)]


def _pass(comm: Communicator, given: Tensor, to: int, got: Tensor, by: int) -> Callable[[Any], dist.Work]:
    """Send to one rank, and receive as much from another."""
    ours, theirs = [0] * comm.size, [0] * comm.size
    ours[to], theirs[by] = len(given), len(got)
    return lambda pg: pg.alltoall_base(got, given, theirs, ours)


def _join(chunks: Sequence[Tensor]) -> Tensor:
    """The chunks in one vector; a view if they already lie in one."""
    first, size = chunks[0], chunks[0].numel()
    in_place = all(
        chunk.is_contiguous() and chunk.data_ptr() == first.data_ptr() + i * nbytes([first])
        for i, chunk in enumerate(chunks)
    )
    same = len({chunk.untyped_storage().data_ptr() for chunk in chunks}) == 1
    if in_place and same and size:
        return first.as_strided((len(chunks) * size,), (1,))
    return torch.cat([chunk.reshape(-1) for chunk in chunks])

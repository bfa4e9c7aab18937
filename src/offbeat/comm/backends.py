"""torch's backends: how a rank connects to the others, and the calls that carry each collective."""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import Store

_LONG = 2**15  # bytes of a chunk from which on chunks are sent one after the other
_PIECES, _PIECE = 4, 2**19  # most pieces of a chunk, since each costs a latency; fewest bytes of a piece

Call = tuple[str, tuple[Any, ...]]  # a backend's method and its arguments, a tensor first


@functools.cache
def _devices(process: int) -> list[Any]:
    """The devices of gloo's connections. Each has a thread that never ends and that no fork inherits."""
    if names := os.environ.get("GLOO_SOCKET_IFNAME"):
        return [dist.ProcessGroupGloo.create_device(interface=name) for name in names.split(",")]
    return [dist.ProcessGroupGloo.create_default_device()]


def connect(kind: str, store: Store, rank: int, size: int, timeout: float) -> Any:
    """Connect this rank to all others, and return the backend that holds the connections."""
    if kind == "gloo":
        settings = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        settings._devices, settings._timeout = _devices(os.getpid()), timedelta(seconds=timeout)
        return dist.ProcessGroupGloo(store, rank, size, settings)
    if kind == "nccl":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=timeout)
        return dist.ProcessGroupNCCL(store, rank, size, options)
    raise ValueError(f"The process group runs on {kind}: Offbeat supports gloo and nccl.")


def exchange_calls(rank: int, size: int, chunks: Sequence[Tensor]) -> tuple[list[Call], list[Tensor]]:
    """The calls of an exchange, and the tensors they fill. Long chunks go to one rank after the other.

    When all send to all at once, several share the way to each, and some links fall idle before others. gloo
    works on two calls at a time, in their order: while one piece ends, the next has the link.
    """
    given = _join(chunks)
    got = torch.empty_like(given)
    result = list(got.view(size, *chunks[0].shape))
    if given.device.type != "cpu" or chunks[0].nbytes < _LONG:
        return [("alltoall_base", (got, given, [], []))], result
    ours, theirs = (flat.view(torch.uint8).view(size, -1) for flat in (given, got))
    theirs[rank] = ours[rank]
    piece, calls = max(_PIECE, -(-ours.shape[1] // _PIECES)), []
    for ahead in range(1, size):
        to, by = (rank + ahead) % size, rank - ahead
        for out, room in zip(torch.split(ours[to], piece), torch.split(theirs[by], piece), strict=True):
            calls.append(pass_call(size, out, to, room, by))
    return calls, result


def pass_call(size: int, given: Tensor, to: int, got: Tensor, by: int) -> Call:
    """Send to one rank, and receive as much from another."""
    ours, theirs = [0] * size, [0] * size
    ours[to], theirs[by] = len(given), len(got)
    return "alltoall_base", (got, given, theirs, ours)


def _join(chunks: Sequence[Tensor]) -> Tensor:
    """The chunks in one vector; a view if they already lie in one."""
    first, size = chunks[0], chunks[0].numel()
    starts = [first.data_ptr() + i * first.nbytes for i in range(len(chunks))]
    in_place = starts == [c.data_ptr() for c in chunks] and all(c.is_contiguous() for c in chunks)
    if in_place and size and len({c.untyped_storage().data_ptr() for c in chunks}) == 1:
        return first.as_strided((len(chunks) * size,), (1,))
    return torch.cat([chunk.reshape(-1) for chunk in chunks])

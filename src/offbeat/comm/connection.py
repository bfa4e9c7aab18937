"""A backend of torch.distributed and its calls in flight."""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

_NEVER = 2**31 - 2  # a tag that no rank sends with
_MOMENT = timedelta(milliseconds=1)


@dataclass(eq=False)
class Connection:
    """One backend, the number of calls begun on it, and the calls that may still be in flight.

    The last call is kept until the next one. If only gloo's thread held it, that thread would free its
    tensors, possibly while the interpreter ends, which aborts the process.
    """

    name: str
    backend: Any
    begun: int = 0
    in_flight: deque[dist.Work] = field(default_factory=deque)

    def close(self) -> None:
        """Close the sockets to all other ranks after a failure. Calls in flight end with an error.

        Otherwise gloo's thread uses a core forever: data that arrives for a failed call is never read.
        Neither `abort` nor `shutdown` closes a socket, but gloo closes all when a receive times out.
        """
        backend: Any = self.backend  # torch's annotations lack these calls
        if not isinstance(self.backend, dist.ProcessGroupGloo):
            return
        for rank in range(backend.size()):
            with suppress(RuntimeError):  # recv also raises if the socket to this rank is already closed
                if rank != backend.rank():
                    backend.recv([torch.zeros(1)], rank, _NEVER).wait(_MOMENT)

    def __del__(self, keep: Callable[[Any], None] = ctypes.pythonapi.Py_IncRef) -> None:
        # gloo's destructor blocks the interpreter until all messages have arrived. If some never do, the
        # backend is kept for the life of the process.
        if not all(work.is_completed() for work in self.in_flight):
            keep(ctypes.py_object(self.backend))

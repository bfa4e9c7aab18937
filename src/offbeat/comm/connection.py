"""One backend of torch.distributed, and the calls that may still be in flight on it."""

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

_NEVER = 2**31 - 2  # a tag that nobody sends with
_MOMENT = timedelta(milliseconds=1)


@dataclass(eq=False)
class Connection:
    """One backend, the number of calls begun on it, and those that may still be in flight.

    The last one stays until the next. If gloo's thread were the last to hold it, that thread would free its
    tensors, perhaps while the interpreter ends, which aborts the process.
    """

    name: str
    backend: Any
    begun: int = 0
    in_flight: deque[dist.Work] = field(default_factory=deque)

    def close(self) -> None:
        """Close the sockets to all others after a failure. Calls in flight end with an error.

        Otherwise gloo's thread never rests again: what still arrives for a call that has failed stays
        unread. Neither `abort` nor `shutdown` closes a socket, but gloo closes all when a receive times out.
        """
        backend: Any = self.backend  # torch's annotations lack what it can do
        if not isinstance(self.backend, dist.ProcessGroupGloo):
            return
        for rank in range(backend.size()):
            with suppress(RuntimeError):  # recv raises, too, if the socket to this rank is closed already
                if rank != backend.rank():
                    backend.recv([torch.zeros(1)], rank, _NEVER).wait(_MOMENT)

    def __del__(self, keep: Callable[[Any], None] = ctypes.pythonapi.Py_IncRef) -> None:
        # gloo's destructor holds the interpreter until all messages have arrived. If they never do, the
        # backend is kept as long as the process lives.
        if not all(work.is_completed() for work in self.in_flight):
            keep(ctypes.py_object(self.backend))

"""Connections between the processes of a group, and the messages on them."""

from __future__ import annotations

import ctypes
import functools
import os
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store


class InFlight:
    """A message and when it was first seen to have arrived.

    Python must not run in gloo's threads, which may outlive the interpreter: so no callbacks.
    """

    def __init__(self, work: dist.Work) -> None:
        self.work = work
        self.arrived = 0.0

    def look(self) -> bool:
        """Whether it is here."""
        if not self.arrived and self.work.is_completed():
            self.arrived = time.perf_counter()
        return self.arrived > 0


class Connection:
    """Connections of their own, how many messages were begun on them, and which may be in the air."""

    def __init__(self, backend: Any) -> None:
        self.backend = backend
        self.begun = 0
        self._air: list[InFlight] = []

    def begin(self, call: Callable[[Any], dist.Work]) -> InFlight:
        self.look()
        self.begun += 1
        message = InFlight(call(self.backend))
        self._air.append(message)
        return message

    def look(self) -> None:
        """See what has arrived."""
        self._air = [message for message in self._air if not message.look()]

    def __del__(self, keep: Callable[[Any], None] = ctypes.pythonapi.Py_IncRef) -> None:
        # gloo's destructor holds the interpreter until all has arrived, which after a failure never happens:
        # such connections last as long as the process.
        if not all(message.look() for message in self._air):
            keep(ctypes.py_object(self.backend))


@functools.cache
def _devices(process: int) -> list[Any]:
    """Where gloo's connections begin, for all of a process: each device has a thread that never rests.

    A forked process has no such thread, and needs a device of its own.
    """
    if names := os.environ.get("GLOO_SOCKET_IFNAME"):
        return [dist.ProcessGroupGloo.create_device(interface=name) for name in names.split(",")]
    return [dist.ProcessGroupGloo.create_default_device()]


def connected(kind: str, store: Store, rank: int, size: int, timeout: float) -> Any:
    """The connections of this rank to all others, once they are made."""
    if kind == "gloo":
        settings = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        settings._devices, settings._timeout = _devices(os.getpid()), timedelta(seconds=timeout)
        return dist.ProcessGroupGloo(store, rank, size, settings)
    if kind == "nccl":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=timeout)
        return dist.ProcessGroupNCCL(store, rank, size, options)
    raise ValueError(f"The process group runs on {kind}: Offbeat speaks gloo and nccl.")

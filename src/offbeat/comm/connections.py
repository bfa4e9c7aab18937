"""Connections between the processes of a group, as torch makes them."""

from __future__ import annotations

import functools
import os
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store


@functools.cache
def _devices(process: int) -> list[Any]:
    """The devices of gloo's connections, one set per process: each device has a thread that never ends.

    A forked process inherits no such thread and needs devices of its own.
    """
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

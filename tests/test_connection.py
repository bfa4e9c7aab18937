"""Connections that have failed are closed."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from offbeat.comm.connection import Connection
from offbeat.comm.store import open_backend, start


def test_a_closed_connection_ends_what_is_in_flight() -> None:
    """Here and on the others: nothing stays unread, which would keep gloo's thread busy for ever."""
    store = dist.HashStore()
    opening = [start(lambda r=rank: open_backend("gloo", store, r, 3, 60.0), "open") for rank in range(3)]
    one, other, third = [Connection("cpu", future.result(20)) for future in opening]
    arriving = [peer.backend.recv([torch.ones(1)], 0, 5) for peer in (other, third)]
    work = one.backend.allreduce(torch.ones(4))
    one.air.append(work)
    assert not work.is_completed()
    one.close()
    one.close()
    with pytest.raises(RuntimeError):
        work.wait(timedelta(seconds=20))
    assert work.is_completed()
    for receive in arriving:
        with pytest.raises(RuntimeError, match="closed"):
            receive.wait(timedelta(seconds=20))

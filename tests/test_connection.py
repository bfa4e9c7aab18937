"""Connections that have failed are closed, and a store that was busy is asked again."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

import offbeat
from offbeat.comm.changing import Members
from offbeat.comm.communicator import Communicator
from offbeat.comm.connection import Connection
from offbeat.comm.monitor import PeerMonitor
from offbeat.comm.store import StoreClient, open_backend, start
from offbeat.comm.torch_backend import Torch


def test_a_closed_connection_ends_what_is_in_flight() -> None:
    """Here and on the others: nothing stays unread, which would keep gloo's thread busy for ever."""
    store = dist.HashStore()
    opening = [start(lambda r=rank: open_backend("gloo", store, r, 3, 60.0), "open") for rank in range(3)]
    one, other, third = [Connection("cpu", future.result(20)) for future in opening]
    arriving = [peer.backend.recv([torch.ones(1)], 0, 5) for peer in (other, third)]
    work = one.backend.allreduce(torch.ones(4))
    one.in_flight.append(work)
    assert not work.is_completed()
    one.close()
    one.close()
    with pytest.raises(RuntimeError):
        work.wait(timedelta(seconds=20))
    assert work.is_completed()
    for receive in arriving:
        with pytest.raises(RuntimeError, match=r"closed|reset"):
            receive.wait(timedelta(seconds=20))


def test_workers_that_come_and_go_close_their_connections_after_a_failure() -> None:
    """Also those of the communicators that were made from the one that has failed."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def connect(rank: int) -> tuple[Torch, Communicator]:
        store_client = StoreClient(TCPStore("127.0.0.1", store.port, is_master=False, wait_for_workers=False))
        comm = Torch.among(PeerMonitor("test", range(2), rank, store_client, 20.0))
        return comm, comm.split([[0, 1]])

    connecting = [start(lambda r=rank: connect(r), "connect") for rank in range(2)]
    (comm, child), _other = [future.result(20) for future in connecting]
    group = offbeat.Elastic("http://127.0.0.1:1")
    group._use(comm, Members(("a", "b"), "key"))
    messages = [comm.tell([1]), child.mean([torch.ones(3)])]
    assert not any(message.done() for message in messages)
    group.fail(offbeat.PeerLost("The test has lost a worker."))
    for message in messages:
        with pytest.raises(offbeat.PeerLost):
            message.wait()
        assert message.done()


def test_a_store_that_was_busy_is_asked_again() -> None:
    """Its host may take seconds to accept a client: the thread that asks it must not end."""

    class Busy:
        refused = 2

        def clone(self) -> Busy:
            self.refused -= 1
            if self.refused >= 0:
                raise dist.DistNetworkError("timed out")
            return self

    store_client = StoreClient(Busy())  # type: ignore[arg-type]
    with pytest.raises(dist.DistNetworkError, match="lost the process group's store"):
        store_client.ask(lambda store: 5, 20)
    assert store_client.ask(lambda store: 5, 20) == 5

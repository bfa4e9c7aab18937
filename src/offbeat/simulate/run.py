"""Runs many workers in one process, one at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from offbeat.comm.communicator import Communicator
from offbeat.simulate.failures import Failures
from offbeat.simulate.network import Network
from offbeat.simulate.scheduler import Scheduler
from offbeat.simulate.virtual import member

T = TypeVar("T")


def simulate(
    worker: Callable[[Communicator], T],
    workers: int,
    *,
    network: Network | None = None,
    compute: Callable[[int, int], float] | None = None,
    failures: Failures | None = None,
) -> list[T]:
    """Run `worker(comm)` for every rank in one process, and return the results in rank order.

    Exactly one worker runs at a time, and workers switch only where one waits for a message, so a run is a
    pure function of its inputs. Each worker has its own state of torch's random numbers, initially the
    caller's.

    Reports are in virtual seconds. `compute(rank, step)` is the time that a worker needs for the gradient
    after `step` iterations: a function, or a value such as `Jittered(0.2)`. `network` says how long messages
    take, and `failures` how often workers fail and how long they are away.

        def worker(comm):
            model, optimizer, batches = build(comm.rank)
            with offbeat.local_sgd(model, optimizer, every=8, group=comm) as sync:
                for x, y in batches: ...
            return sync.totals
        totals = simulate(worker, workers=4, network=Network(latency=0.02, bandwidth=12.5e6))
    """
    if workers < 1:
        raise ValueError(f"simulate(workers={workers}): workers must be at least 1.")
    rng = torch.get_rng_state()
    network = network or Network()
    network.check(workers)
    scheduler = Scheduler(workers, network, compute or (lambda rank, step: 0.0), failures or Failures(0.0))
    results: list[Any] = [None] * workers

    def play(rank: int) -> None:
        error: BaseException | None = None
        scheduler.enter(rank)
        try:
            results[rank] = worker(member(scheduler, (tuple(range(workers)),), rank))
        except BaseException as failure:
            error = failure
        scheduler.exit(rank, error)  # which keeps the error; it is raised in the caller's thread

    threads = [threading.Thread(target=play, args=(rank,), daemon=True) for rank in range(workers)]
    for thread in threads:
        thread.start()
    scheduler.hand_over()
    for thread in threads:
        thread.join()
    for thread in scheduler.sidecars:
        thread.join()
    torch.set_rng_state(rng)
    if scheduler.failure is not None:
        raise scheduler.failure
    return results

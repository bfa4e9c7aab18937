"""Joins the workers that torchrun, or anything else that sets RANK and WORLD_SIZE, has started."""

import os
import sys
import threading
from datetime import timedelta
from typing import NamedTuple

import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from offbeat.app.cli.options import Refused
from offbeat.base.units import as_time

PATIENCE = 300  # seconds that workers wait for each other at the start
SILENCE = 10.0  # seconds until a worker says that it waits


class Launch(NamedTuple):
    """The rank of this process, and the number of workers."""

    rank: int
    workers: int


def read_launch() -> Launch | None:
    """What the launcher has set in the environment; None if nothing has started this process as a worker."""
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return None
    numbers = {}
    for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"):
        text = os.environ.get(name, "")
        if not (text.isascii() and text.isdecimal()):
            is_what = f"is {text!r}, not a whole number" if text else "is not set"
            raise Refused(
                f"The environment has RANK, but {name} {is_what}: use torchrun, or set it.", alone=True
            )
        numbers[name] = int(text)
    launch = Launch(numbers["RANK"], numbers["WORLD_SIZE"])
    if launch.rank >= launch.workers:
        ranks = f"{launch.workers} workers have the ranks 0 to {launch.workers - 1}"
        raise Refused(f"RANK={launch.rank} WORLD_SIZE={launch.workers}: {ranks}.", alone=True)
    if "MASTER_ADDR" not in os.environ:
        raise Refused(
            "The environment has RANK, but MASTER_ADDR is not set: use torchrun, or set it.", alone=True
        )
    return launch


def join_workers(backend: str = "gloo") -> None:
    """Meet the other workers. Says what it waits for, and gives up with one sentence."""
    rank, workers = os.environ["RANK"], os.environ["WORLD_SIZE"]
    place = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    who = f"rank {rank} of {workers}"
    words = f"offbeat: {who} waits for the others at {place} (MASTER_ADDR:MASTER_PORT)"
    waiting = threading.Timer(SILENCE, print, [words], {"file": sys.stderr, "flush": True})
    waiting.daemon = True
    waiting.start()
    try:
        store, *numbers = next(iter(rendezvous("env://", timeout=timedelta(seconds=PATIENCE))))
        dist.init_process_group(backend, store=store, rank=numbers[0], world_size=numbers[1])
    except RuntimeError as error:
        text = str(error)
        reason = f"they did not meet within {as_time(PATIENCE)}"
        if "EADDRINUSE" in text or "already in use" in text:
            reason = "the port is in use: choose another MASTER_PORT"
        elif "timed out" not in text.lower() and "timeout" not in text.lower():
            reason = text.strip().partition("\n")[0].rstrip(".")
        raise Refused(
            f"{who.capitalize()} cannot join the others at {place}: {reason}.", alone=True
        ) from error
    finally:
        waiting.cancel()

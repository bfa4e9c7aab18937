"""The seats of an elastic run: parts of the data, one for each worker, free again when a worker ends."""

import fcntl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from offbeat.base.errors import OffbeatError

ATTEMPTS = 4  # to take a seat: `count_taken` holds each for an instant


@contextmanager
def take_seat(folder: Path, seats: int) -> Iterator[int]:
    """Take the first free seat. The system frees it if this process is killed."""
    for attempt in range(ATTEMPTS):
        for seat in range(seats):
            with (folder / f".seat-{seat}").open("w") as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except OSError:
                    continue
                yield seat
                return
        time.sleep(0.05 * attempt)
    raise OffbeatError(f"All {seats} workers of the run in {str(folder)!r} are there: nobody else can join.")


def count_taken(folder: Path, seats: int) -> int:
    """How many seats are taken."""
    taken = 0
    for seat in range(seats):
        path = folder / f".seat-{seat}"
        if path.exists():
            with path.open("w") as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except OSError:
                    taken += 1
    return taken

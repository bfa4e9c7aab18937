"""What workers that may be killed say to the process that has started them."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable
from multiprocessing import connection
from typing import Any


class Heard:
    """Starts workers, each with a pipe of its own, and hears all of them.

    A queue for all has one lock. A worker that is killed while it writes would keep it: nobody would hear
    the others any more, and they could not even end.
    """

    def __init__(self, context: Any) -> None:
        self._context, self._pipes = context, list[Any]()

    def start(self, target: Callable[..., None], *args: Any) -> Any:
        """Start a worker. Its last argument is its end of the pipe: what it passes to `send` is heard."""
        ours, theirs = self._context.Pipe(duplex=False)
        worker = self._context.Process(target=target, args=(*args, theirs), daemon=True)
        worker.start()
        theirs.close()  # so that the end of the worker is the end of the pipe
        self._pipes.append(ours)
        return worker

    def get(self, timeout: float = 0.0) -> Any:
        """Return what a worker has said, or raise `queue.Empty` when the time is over."""
        deadline = time.monotonic() + timeout
        while True:
            ready: list[Any] = connection.wait(self._pipes, max(0.0, deadline - time.monotonic()))
            for pipe in ready:
                try:
                    return pipe.recv()
                except (EOFError, OSError):  # it has ended, perhaps in the middle of a sentence
                    self._pipes.remove(pipe)
            if time.monotonic() >= deadline:
                raise queue.Empty

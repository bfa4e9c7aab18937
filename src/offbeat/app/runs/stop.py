"""Ctrl-C: all ranks stop after the same step."""

from __future__ import annotations

import signal
import threading
import time
from pathlib import Path

from offbeat.app.runs.folder import write_whole
from offbeat.base.errors import PeerLost

LOOK = 0.05  # seconds between looks for the files of the others
PATIENCE = 120.0  # seconds to wait for a file; a live rank needs about 0.1, even during a long step


class Stop:
    """Agrees on the last step. Each rank writes the number of steps it has begun; the largest is the last.

    A thread writes the file once the signal comes or another rank has written its own, so a rank in the
    middle of a step or a round answers at once. The number is never changed, and no step begins while the
    thread writes it: `after` begins the next step under the same lock.
    """

    def __init__(
        self, folder: Path, *, rank: int, workers: int, called: threading.Event | None = None
    ) -> None:
        self._files = [folder / f".stop-{other}" for other in range(workers)]
        self._mine = self._files[rank]
        self._begun, self._written = 0, False
        self._called = called or threading.Event()  # shared by all runs of a process
        self._lock, self._over = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def clear(self) -> None:
        """Delete the file of an earlier process. All ranks do so before any of them listens."""
        self._mine.unlink(missing_ok=True)

    def listen(self, step: int) -> None:
        """Listen for Ctrl-C and SIGTERM; `step` steps are done, and the next one has begun."""
        self._begun = step + 1
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, self.call)
        self._thread.start()

    def call(self, *signal: object) -> None:
        """Ask all ranks to stop."""
        self._called.set()

    def _watch(self) -> None:
        while not self._over.wait(LOOK):
            if self._called.is_set() or any(file.exists() for file in self._files):
                with self._lock:
                    self._write()
                return

    def _write(self) -> None:
        if not self._written:
            write_whole(self._mine, str(self._begun))
            self._written = True

    def after(self, step: int) -> bool:
        """Whether the step just completed is the last one. If not, the next one begins."""
        with self._lock:
            if not (self._called.is_set() or self._written):
                self._begun = step + 1
                return False
            self._write()
        deadline = time.monotonic() + PATIENCE
        while silent := [rank for rank, file in enumerate(self._files) if not file.exists()]:
            if time.monotonic() > deadline:
                raise PeerLost(f"Ctrl-C: ranks {silent} have not answered within {PATIENCE:g} s.")
            time.sleep(0.01)
        return step >= max(int(file.read_text()) for file in self._files)

    def forget(self) -> None:
        """Stop listening and delete the file, which everybody has read."""
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()
        self.clear()

"""Ctrl-C: all ranks stop after the same step, and none in the middle of one."""

from __future__ import annotations

import signal
import threading
import time
from pathlib import Path
from types import FrameType

PATIENCE = 5.0  # seconds to wait for word from the others


class Stop:
    """Each rank says in a file how many steps it has begun when the signal comes; the largest is the last.

    A rank that waits inside a round says so too, since its signal handler runs there. `begun` is kept by the
    loop.
    """

    def __init__(self, folder: Path, *, rank: int, workers: int) -> None:
        self.folder, self.rank, self.workers = folder, rank, workers
        self.begun = 0
        self._mine = folder / f".stop-{rank}"
        self._called = False

    def listen(self) -> None:
        """From now on Ctrl-C and SIGTERM are heard."""
        self._mine.unlink(missing_ok=True)
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, self._hear)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        self._say()

    def _say(self) -> None:
        if not self._called:
            self._called = True
            beside = self._mine.with_name(f"{self._mine.name}.new")
            beside.write_text(str(self.begun))
            beside.replace(self._mine)

    def after(self, step: int) -> bool:
        """Whether this step, just completed, is the last one."""
        if not self._called and not any(self.folder.glob(".stop-?*")):
            return False
        self._say()
        deadline = time.monotonic() + PATIENCE
        while len(said := self._heard()) < self.workers and time.monotonic() < deadline:
            time.sleep(0.01)
        return step >= max(said)

    def _heard(self) -> list[int]:
        files = [self.folder / f".stop-{rank}" for rank in range(self.workers)]
        return [int(file.read_text()) for file in files if file.exists()]

    def forget(self) -> None:
        self._mine.unlink(missing_ok=True)

"""Ctrl-C: all ranks stop after the same step, and none in the middle of one."""

from __future__ import annotations

import signal
import threading
import time
from pathlib import Path
from types import FrameType

from offbeat.app.runs.setting import write_whole
from offbeat.base.errors import PeerLost

LOOK = 0.05  # seconds between looks for the others' files
PATIENCE = 120.0  # seconds to wait for a word, which takes a living rank two looks, however long its step


class Stop:
    """Each rank says in a file how many steps it has begun when the signal comes; the largest is the last.

    A thread says it, also for a rank that the signal did not reach, once another has spoken: a rank that is
    in the middle of a step, or waits inside a round, answers at once. A word once said is never changed, and
    no step is begun between the look and the word: `after` grants the next step under the thread's lock.
    """

    def __init__(
        self, folder: Path, *, rank: int, workers: int, called: threading.Event | None = None
    ) -> None:
        self._words = [folder / f".stop-{other}" for other in range(workers)]
        self._mine = self._words[rank]
        self._begun = 0
        self._called = called or threading.Event()  # of a process with several runs, the same in all
        self._said = False
        self._lock, self._over = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def clear(self) -> None:
        """Take back what an earlier process of this rank said; all ranks do before any listens."""
        self._mine.unlink(missing_ok=True)

    def listen(self, step: int) -> None:
        """From now on Ctrl-C and SIGTERM are heard; so many steps are done, and the next one is begun."""
        self._begun = step + 1
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, self._hear)
        self._thread.start()

    def _hear(self, number: int, frame: FrameType | None) -> None:
        self._called.set()

    def _watch(self) -> None:
        while not self._over.wait(LOOK):
            if self._called.is_set() or any(word.exists() for word in self._words):
                with self._lock:
                    self._say()
                return

    def _say(self) -> None:
        if not self._said:
            write_whole(self._mine, str(self._begun))
            self._said = True

    def after(self, step: int) -> bool:
        """Whether this step, just completed, is the last one; if not, the next is begun."""
        with self._lock:
            if not (self._called.is_set() or self._said):
                self._begun = step + 1
                return False
            self._say()
        return step >= max(self._heard())

    def _heard(self) -> list[int]:
        """Everybody's word."""
        deadline = time.monotonic() + PATIENCE
        while silent := [rank for rank, word in enumerate(self._words) if not word.exists()]:
            if time.monotonic() > deadline:
                raise PeerLost(f"Ctrl-C: ranks {silent} have not answered within {PATIENCE:g} s.")
            time.sleep(0.01)
        return [int(word.read_text()) for word in self._words]

    def forget(self) -> None:
        """Listen no longer, and take the word back; everybody has read it."""
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()
        self.clear()

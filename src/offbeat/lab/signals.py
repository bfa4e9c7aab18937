"""Handlers for signals that end the process, so that nothing is left half built."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def hold_signals() -> Iterator[None]:
    """Delay Ctrl-C, SIGTERM and SIGHUP until the end of the block.

    Python handles signals in the main thread, so another thread has nothing to delay.
    """
    arrived: list[int] = []
    handlers = {}
    try:
        if threading.current_thread() is threading.main_thread():
            for ending in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                handlers[ending] = signal.signal(ending, lambda number, frame: arrived.append(number))
        yield
    finally:
        for ending, handler in reversed(handlers.items()):
            signal.signal(ending, handler)
        for number in dict.fromkeys(arrived):
            signal.raise_signal(number)


@contextmanager
def exit_on_signals() -> Iterator[None]:
    """Let SIGTERM and SIGHUP raise SystemExit, so that `with` blocks end. Other handlers stay in place."""
    ours: list[signal.Signals] = []
    if threading.current_thread() is threading.main_thread():
        ours = [n for n in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) is signal.SIG_DFL]
    for number in ours:
        signal.signal(number, _exit)
    try:
        yield
    finally:
        for number in ours:
            if signal.getsignal(number) is _exit:
                signal.signal(number, signal.SIG_DFL)


def _exit(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)  # the status that a shell reports for this signal

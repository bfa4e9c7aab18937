"""Signals that end the process, made to wait or to unwind, so that nothing is left half built."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def held() -> Iterator[None]:
    """Ctrl-C, SIGTERM and SIGHUP wait until the block is done.

    Python handles signals in the main thread, so that in any other thread there is nothing to hold.
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
def unwinding() -> Iterator[None]:
    """SIGTERM and SIGHUP raise SystemExit, so that `with` blocks end in order; handlers already set stay."""
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
    raise SystemExit(128 + number)  # the status a shell reports for a process ended by this signal

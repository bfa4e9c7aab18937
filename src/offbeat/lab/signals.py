"""Signals that ask this process to end, and what has to be done first."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def collect_signals() -> Iterator[list[int]]:
    """Collect Ctrl-C, SIGTERM and SIGHUP. Those that are ignored stay so, as after `nohup` or `&`.

    Only the main thread receives signals. In another one, the list stays empty.
    """
    caught: list[int] = []
    handlers = {}
    try:
        if threading.current_thread() is threading.main_thread():
            for number in ENDING:
                if signal.getsignal(number) is not signal.SIG_IGN:
                    handlers[number] = signal.signal(number, lambda number, frame: caught.append(number))
        yield caught
    finally:
        for number, handler in reversed(handlers.items()):
            signal.signal(number, handler)


@contextmanager
def hold_signals() -> Iterator[None]:
    """Delay Ctrl-C, SIGTERM and SIGHUP until the block ends."""
    arrived: list[int] = []
    try:
        with collect_signals() as arrived:
            yield
    finally:
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

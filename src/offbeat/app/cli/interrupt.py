"""Ctrl-C. It ends the process at once, except where something has to be cleaned up."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


def end_at_once(*_: object) -> None:
    """Answer Ctrl-C while there is nothing to clean up: one line, the terminal's cursor, and the end."""
    os.write(2, b"\x1b[?25h\noffbeat: stopped\n" if os.isatty(2) else b"offbeat: stopped\n")
    os._exit(130)


@contextmanager
def interruptible() -> Iterator[None]:
    """Let Ctrl-C raise KeyboardInterrupt, for what has to clean up."""
    main = threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGINT)
    if main and before is end_at_once:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        if main and before is end_at_once:
            signal.signal(signal.SIGINT, before)

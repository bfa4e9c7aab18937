"""Ctrl-C where something has to be cleaned up. Elsewhere it ends the process at once."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from offbeat.app.cli import end_at_once


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

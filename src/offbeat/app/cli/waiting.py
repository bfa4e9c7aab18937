"""A line on standard error that says what takes its time, from the first moment on."""

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

SILENT = 10.0  # seconds until it is said without a terminal
TURN = 0.2  # seconds between two pictures of the line
PICTURES = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"


class Line:
    """What is awaited now. `say` changes it."""

    def __init__(self, words: str) -> None:
        self.words, self.since = words, time.monotonic()

    def say(self, words: str) -> None:
        self.words = words


@contextmanager
def waiting(words: str, *, quiet: bool = False) -> Iterator[Line]:
    """Say what the block does and how long it has taken; on a terminal the line disappears at the end."""
    line, over = Line(words), threading.Event()
    if quiet or os.environ.get("RANK", "0") != "0":  # all ranks of torchrun wait alike
        yield line
        return
    thread = threading.Thread(target=_show if sys.stderr.isatty() else _tell, args=(line, over), daemon=True)
    thread.start()
    try:
        yield line
    finally:
        over.set()
        thread.join()


def _show(line: Line, over: threading.Event) -> None:
    """Redraw the line on the terminal until the block is over, then erase it."""
    for turn in range(10**9):
        spent = round(time.monotonic() - line.since)
        sys.stderr.write(
            f"\r{PICTURES[turn % len(PICTURES)]} {line.words}{f', {spent} s' if spent else ''}\x1b[K"
        )
        sys.stderr.flush()
        if over.wait(TURN):
            break
    sys.stderr.write("\r\x1b[K")
    sys.stderr.flush()


def _tell(line: Line, over: threading.Event) -> None:
    """Print the line if the block takes long, and again from time to time."""
    pause = SILENT
    while not over.wait(pause):
        print(f"offbeat: {line.words}, {round(time.monotonic() - line.since)} s", file=sys.stderr, flush=True)
        pause = max(SILENT, (time.monotonic() - line.since) / 2)

"""A process that ends with the one that started it, from its first moment on."""

# As little as possible is imported before `tie` is called: the other imports of a worker take seconds.
import os
import select
import signal
from fcntl import F_GETFL, F_SETFL, F_SETOWN, fcntl


def tie() -> None:
    """End when standard input closes, that is, when the launcher has ended, and at once on Ctrl-C.

    The kernel does so, even in the middle of an import or while a library waits. Forks of this process have
    to watch standard input themselves.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    fcntl(0, F_SETOWN, os.getpid())
    fcntl(0, F_SETFL, fcntl(0, F_GETFL) | os.O_ASYNC)  # SIGIO, which ends a process, once the pipe closes
    if select.select([0], [], [], 0)[0]:  # the launcher has ended before that
        os._exit(1)


def end_with_launcher() -> None:
    """Wait until standard input closes, and end this process. For a thread."""
    while os.read(0, 1):
        pass
    os._exit(1)

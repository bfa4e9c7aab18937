"""A command on one host."""

import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress


class Process:
    """A command in its own process group.

    Its output goes to temporary files, which unlike pipes never fill up. A thread records when it ends.
    """

    def __init__(
        self, command: Sequence[str], env: Mapping[str, str], *, stdin: int = subprocess.DEVNULL
    ) -> None:
        self._stdout = tempfile.TemporaryFile()
        self._stderr = tempfile.TemporaryFile()
        self._began = time.monotonic()
        self._popen = subprocess.Popen(
            command, env=env, stdin=stdin, stdout=self._stdout, stderr=self._stderr, start_new_session=True
        )
        self.seconds = self.ended_at = 0.0
        self._wake_at = 0.0
        self._waker: threading.Timer | None = None
        # An event: a join that Ctrl-C interrupts may take its thread for ended (python/cpython#90882).
        self._ended = threading.Event()
        threading.Thread(target=self._watch, daemon=True).start()

    @property
    def returncode(self) -> int | None:
        return self._popen.returncode

    def stdout(self) -> str:
        return _text(self._stdout.fileno())

    def stderr(self) -> str:
        return _text(self._stderr.fileno())

    def join(self, timeout: float | None) -> bool:
        """Wait for the end; False after a timeout."""
        return self._ended.wait(timeout)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def interrupt(self) -> None:
        """Send SIGINT, as Ctrl-C does."""
        self._signal(signal.SIGINT)

    def delay(self, seconds: float) -> None:
        """Pause for `seconds`. If delays overlap, the one that ends last counts."""
        self._signal(signal.SIGSTOP)
        wake_at = time.monotonic() + seconds
        if wake_at < self._wake_at:
            return
        self._wake_at = wake_at
        if self._waker is not None:
            self._waker.cancel()
        self._waker = threading.Timer(seconds, self._signal, [signal.SIGCONT])
        self._waker.daemon = True
        self._waker.start()

    def close(self) -> None:
        self._stdout.close()
        self._stderr.close()
        if self._popen.stdin is not None:
            self._popen.stdin.close()

    def _watch(self) -> None:
        self._popen.wait()
        self.ended_at = time.monotonic()
        self.seconds = self.ended_at - self._began
        if self._waker is not None:
            self._waker.cancel()
        self._ended.set()

    def _signal(self, number: int) -> None:
        with suppress(ProcessLookupError):  # it has just ended
            if self._popen.poll() is None:
                os.killpg(self._popen.pid, number)


def _text(file: int) -> str:
    # pread does not move the file position, which the command shares.
    return os.pread(file, os.fstat(file).st_size, 0).decode(errors="replace")

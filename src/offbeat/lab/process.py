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
    """A command in a process group of its own.

    Its output goes to nameless files, which unlike pipes never fill up, and a thread notes when it ends.
    """

    def __init__(
        self, command: Sequence[str], env: Mapping[str, str], *, stdin: int = subprocess.DEVNULL
    ) -> None:
        self._stdout = tempfile.TemporaryFile()
        self._stderr = tempfile.TemporaryFile()
        self._began = time.monotonic()
        self._popen = subprocess.Popen(
            command,
            env=env,
            stdin=stdin,
            stdout=self._stdout,
            stderr=self._stderr,
            start_new_session=True,
        )
        self.seconds = self.ended_at = 0.0
        self._wake_at = 0.0
        self._waker: threading.Timer | None = None
        # An event, since a join that Ctrl-C interrupts may take its thread for ended (python/cpython#90882).
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
        """Wait for the end; False if it has not come in time."""
        return self._ended.wait(timeout)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def interrupt(self) -> None:
        """What Ctrl-C does."""
        self._signal(signal.SIGINT)

    def delay(self, seconds: float) -> None:
        """Stop now, go on after `seconds`; of delays that overlap the one that ends last counts."""
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
        with suppress(ProcessLookupError):  # it has ended just now
            if self._popen.poll() is None:
                os.killpg(self._popen.pid, number)


def _text(file: int) -> str:
    # Read without moving the position, which the command shares and writes at.
    return os.pread(file, os.fstat(file).st_size, 0).decode(errors="replace")

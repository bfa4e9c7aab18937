"""One command on every host, and the process of each."""

import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from .network import Network


class Process:
    """A command in its own process group. Its output goes to files, which unlike pipes never fill up."""

    def __init__(
        self,
        command: Sequence[str],
        env: Mapping[str, str],
        *,
        stdin: int = subprocess.DEVNULL,
        cores: Collection[int] = (),
    ) -> None:
        self._stdout, self._stderr = tempfile.TemporaryFile(), tempfile.TemporaryFile()
        self._began = time.monotonic()
        self.returncode: int | None = None
        before = os.sched_getaffinity(0)
        os.sched_setaffinity(0, cores or before)  # of this thread, and of what it starts
        try:
            self._popen = subprocess.Popen(
                command,
                env=env,
                stdin=stdin,
                stdout=self._stdout,
                stderr=self._stderr,
                start_new_session=True,
            )
        finally:
            os.sched_setaffinity(0, before)
        self.seconds = self.ended_at = self._wake_at = 0.0
        self._waker: threading.Timer | None = None
        # An event: a join that Ctrl-C interrupts may take its thread for ended (python/cpython#90882).
        self._ended = threading.Event()
        threading.Thread(target=self._watch, daemon=True).start()

    def stdout(self) -> str:
        return _read(self._stdout.fileno())

    def stderr(self) -> str:
        return _read(self._stderr.fileno())

    def join(self, timeout: float | None) -> bool:
        """Wait for the end; False after a timeout."""
        return self._ended.wait(timeout)

    def signal(self, number: int) -> None:
        with suppress(ProcessLookupError):  # it has just ended
            if self._popen.poll() is None:
                os.killpg(self._popen.pid, number)

    def delay(self, seconds: float) -> None:
        """Pause for `seconds`. If delays overlap, the one that ends last counts."""
        self.signal(signal.SIGSTOP)
        wake_at = time.monotonic() + seconds
        if wake_at < self._wake_at:
            return
        self._wake_at = wake_at
        if self._waker is not None:
            self._waker.cancel()
        self._waker = threading.Timer(seconds, self.signal, [signal.SIGCONT])
        self._waker.daemon = True
        self._waker.start()

    def close(self) -> None:
        for file in filter(None, (self._stdout, self._stderr, self._popen.stdin)):
            file.close()

    def _watch(self) -> None:
        self.returncode = self._popen.wait()
        self.ended_at = time.monotonic()
        self.seconds = self.ended_at - self._began
        if self._waker is not None:
            self._waker.cancel()
        self._ended.set()


def _read(file: int) -> str:
    # pread does not move the file position, which the command shares.
    return os.pread(file, os.fstat(file).st_size, 0).decode(errors="replace")


def list_cores() -> list[int]:
    """Return the logical cores that this process may use. Those of one physical core are neighbours."""

    def place(core: int) -> tuple[int, ...]:
        about = Path(f"/sys/devices/system/cpu/cpu{core}/topology")
        with suppress(OSError):
            return *(int((about / name).read_text()) for name in ("physical_package_id", "core_id")), core
        return (0, 0, core)

    return sorted(os.sched_getaffinity(0), key=place)


def share_cores(hosts: int, cores: Sequence[int]) -> list[Sequence[int]]:
    """Return the cores of each host: equally many, or all of them if the hosts cannot have equally many.

    On a cluster, no host takes another's processor time. If all hosts share all cores, some compute for a
    tenth of a second while others wait, and every synchronous step waits for the last.
    """
    if hosts <= len(cores):
        share = len(cores) // hosts
        return [cores[host * share : (host + 1) * share] for host in range(hosts)]
    if hosts % len(cores) == 0:
        return [[cores[host % len(cores)]] for host in range(hosts)]
    return [cores] * hosts


@dataclass(frozen=True, kw_only=True)
class Run:
    """The result of one host.

    A negative `returncode` is the signal that ended the command. `sent` and `received` are bytes on the
    interface, headers included, from the start of the job until all hosts have ended. Jobs that overlap count
    each other's bytes.
    """

    rank: int
    returncode: int
    stdout: str
    stderr: str
    sent: int
    received: int
    seconds: float


class Job:
    """A command that runs on every host of a lab. `lab.start` returns one.

        job = lab.start([sys.executable, "train.py"])
        job.delay(rank=1, seconds=0.5)
        job.kill(rank=2)
        runs = job.wait(timeout=60)

    A host that fails or is killed does not end the others.
    """

    def __init__(self, command: Sequence[str], network: Network, envs: Sequence[Mapping[str, str]]) -> None:
        self._network, self._before = network, network.traffic()
        cores = share_cores(len(envs), list_cores())
        self._processes = [
            Process([*network.prefix(rank), *command], env, cores=cores[rank])
            for rank, env in enumerate(envs)
        ]
        self.runs: tuple[Run, ...] | None = None  # once all hosts have ended

    @property
    def running(self) -> tuple[int, ...]:
        """The ranks whose command still runs."""
        return tuple(rank for rank, process in enumerate(self._processes) if not process.join(0))

    def stdout(self, *, rank: int) -> str:
        """The output of a host so far."""
        process = self._process("stdout", rank)
        return process.stdout() if self.runs is None else self.runs[rank].stdout

    def stderr(self, *, rank: int) -> str:
        """The errors of a host so far."""
        process = self._process("stderr", rank)
        return process.stderr() if self.runs is None else self.runs[rank].stderr

    def kill(self, *, rank: int | None = None) -> None:
        """Kill the command of one host, or of all, with SIGKILL."""
        for process in self._processes if rank is None else [self._process("kill", rank)]:
            process.signal(signal.SIGKILL)

    def delay(self, *, rank: int, seconds: float) -> None:
        """Pause the command of a host for `seconds`, and return at once. Its kernel keeps receiving."""
        if not seconds > 0:
            raise ValueError(f"job.delay(rank={rank}, seconds={seconds}): seconds must be positive.")
        self._process("delay", rank).delay(seconds)

    def wait(self, *, timeout: float | None = None) -> tuple[Run, ...]:
        """Wait for all hosts and return one Run for each. After a timeout the commands continue."""
        if self.runs is None:
            deadline = None if timeout is None else time.monotonic() + timeout
            for process in self._processes:
                if not process.join(None if deadline is None else max(0.0, deadline - time.monotonic())):
                    raise TimeoutError(self._describe_timeout(timeout))
            traffic = zip(self._before, self._network.traffic(), strict=True)
            self.runs = tuple(self._collect(rank, *counts) for rank, counts in enumerate(traffic))
        return self.runs

    def close(self) -> None:
        """Kill the commands that still run, and collect the results."""
        self.kill()
        self.wait()

    def _process(self, call: str, rank: int) -> Process:
        if not 0 <= rank < len(self._processes):
            raise ValueError(f"job.{call}(rank={rank}): the ranks are 0 to {len(self._processes) - 1}.")
        return self._processes[rank]

    def _describe_timeout(self, timeout: float | None) -> str:
        sentences = [f"Still running after {timeout} s: rank {', '.join(map(str, self.running))}."]
        for rank, process in enumerate(self._processes):
            if process.returncode:
                last = process.stderr().strip().rpartition("\n")[2]
                sentences.append(f"Rank {rank} had ended with {process.returncode}: {last}")
        return " ".join(sentences)

    def _collect(self, rank: int, before: tuple[int, int], after: tuple[int, int]) -> Run:
        process = self._processes[rank]
        assert process.returncode is not None
        code, out, err = process.returncode, process.stdout(), process.stderr()
        process.close()
        sent, got, seconds = after[0] - before[0], after[1] - before[1], process.seconds
        return Run(
            rank=rank, returncode=code, stdout=out, stderr=err, sent=sent, received=got, seconds=seconds
        )

"""One command on every host."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .network import Network
from .process import Process


@dataclass(frozen=True, kw_only=True)
class Run:
    """What one host did.

    A negative `returncode` is the signal that ended the command. `sent` and `received` are bytes on its
    interface, headers included, from the start of the job until `wait` has seen every host end. Jobs that
    overlap therefore count each other's.
    """

    rank: int
    returncode: int
    stdout: str
    stderr: str
    sent: int
    received: int
    seconds: float


class Job:
    """A command that runs on every host of a lab; made by `lab.start`.

        job = lab.start([sys.executable, "train.py"])
        job.delay(rank=1, seconds=0.5)
        job.kill(rank=2)
        runs = job.wait(timeout=60)

    A host that fails or is killed does not end the others.
    """

    def __init__(
        self, command: Sequence[str], *, network: Network, environments: Sequence[Mapping[str, str]]
    ) -> None:
        self._network = network
        self._before = network.traffic()
        self._processes = [
            Process([*network.inside(rank), *command], env) for rank, env in enumerate(environments)
        ]
        self._runs: tuple[Run, ...] | None = None

    @property
    def running(self) -> tuple[int, ...]:
        """The ranks whose command has not ended."""
        return tuple(rank for rank, process in enumerate(self._processes) if not process.join(0))

    def stdout(self, *, rank: int) -> str:
        """What a host has printed so far."""
        process = self._process("stdout", rank)
        return process.stdout() if self._runs is None else self._runs[rank].stdout

    @property
    def collected(self) -> bool:
        """Whether `wait` has seen every host end."""
        return self._runs is not None

    def kill(self, *, rank: int | None = None) -> None:
        """End a host's command, or every host's, at once and without a word (SIGKILL)."""
        for process in self._processes if rank is None else [self._process("kill", rank)]:
            process.kill()

    def delay(self, *, rank: int, seconds: float) -> None:
        """Stop a host's command now and let it go on after `seconds`; returns at once.

        Its kernel goes on receiving and acknowledging, as it does for any process that is late.
        """
        if not seconds > 0:
            raise ValueError(f"job.delay(rank={rank}, seconds={seconds}): seconds must be positive.")
        self._process("delay", rank).delay(seconds)

    def wait(self, *, timeout: float | None = None) -> tuple[Run, ...]:
        """One Run per host, once every command has ended; TimeoutError if some still run, and they go on."""
        if self._runs is None:
            deadline = None if timeout is None else time.monotonic() + timeout
            for process in self._processes:
                if not process.join(None if deadline is None else max(0.0, deadline - time.monotonic())):
                    raise TimeoutError(self._overdue(timeout))
            self._runs = self._collect()
        return self._runs

    def close(self) -> None:
        """Kill what still runs and collect the rest."""
        self.kill()
        self.wait()

    def _process(self, call: str, rank: int) -> Process:
        if not 0 <= rank < len(self._processes):
            raise ValueError(f"job.{call}(rank={rank}): the ranks are 0 to {len(self._processes) - 1}.")
        return self._processes[rank]

    def _overdue(self, timeout: float | None) -> str:
        sentences = [f"Still running after {timeout} s: rank {', '.join(map(str, self.running))}."]
        for rank, process in enumerate(self._processes):
            if process.returncode:
                last = process.stderr().strip().rpartition("\n")[2]
                sentences.append(f"Rank {rank} had ended with {process.returncode}: {last}")
        return " ".join(sentences)

    def _collect(self) -> tuple[Run, ...]:
        runs = []
        for rank, (before, after) in enumerate(zip(self._before, self._network.traffic(), strict=True)):
            process = self._processes[rank]
            assert process.returncode is not None
            run = Run(
                rank=rank,
                returncode=process.returncode,
                stdout=process.stdout(),
                stderr=process.stderr(),
                sent=after.sent - before.sent,
                received=after.received - before.received,
                seconds=process.seconds,
            )
            process.close()
            runs.append(run)
        return tuple(runs)

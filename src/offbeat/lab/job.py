"""One command on every host."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .network import Network
from .process import Process


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

    def __init__(
        self, command: Sequence[str], *, network: Network, environments: Sequence[Mapping[str, str]]
    ) -> None:
        self._network = network
        self._before = network.traffic()
        self._processes = [
            Process([*network.prefix(rank), *command], env) for rank, env in enumerate(environments)
        ]
        self._runs: tuple[Run, ...] | None = None

    @property
    def running(self) -> tuple[int, ...]:
        """The ranks whose command still runs."""
        return tuple(rank for rank, process in enumerate(self._processes) if not process.join(0))

    def stdout(self, *, rank: int) -> str:
        """The output of a host so far."""
        process = self._process("stdout", rank)
        return process.stdout() if self._runs is None else self._runs[rank].stdout

    @property
    def collected(self) -> bool:
        """Whether `wait` has returned the runs."""
        return self._runs is not None

    def kill(self, *, rank: int | None = None) -> None:
        """Kill the command of one host, or of all, with SIGKILL."""
        for process in self._processes if rank is None else [self._process("kill", rank)]:
            process.kill()

    def delay(self, *, rank: int, seconds: float) -> None:
        """Pause the command of a host for `seconds`, and return at once.

        Its kernel keeps receiving and acknowledging, as for any slow process.
        """
        if not seconds > 0:
            raise ValueError(f"job.delay(rank={rank}, seconds={seconds}): seconds must be positive.")
        self._process("delay", rank).delay(seconds)

    def wait(self, *, timeout: float | None = None) -> tuple[Run, ...]:
        """Wait for all hosts and return one Run for each. After a timeout the commands continue."""
        if self._runs is None:
            deadline = None if timeout is None else time.monotonic() + timeout
            for process in self._processes:
                if not process.join(None if deadline is None else max(0.0, deadline - time.monotonic())):
                    raise TimeoutError(self._describe_timeout(timeout))
            self._runs = self._collect()
        return self._runs

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

"""The lab: a network and the jobs that run in it."""

import atexit
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack

from offbeat.base.checks import is_whole
from offbeat.base.errors import BadArgument
from offbeat.base.units import parse_rate

from .job import Job, Run
from .network import INTERFACE, MOST_HOSTS, Network, remove_stale, unavailable
from .signals import exit_on_signals, hold_signals

_FIRST_PORT = 29500


class Lab:
    """A cluster of `hosts` on one Linux machine, each with its own network interface on a shared switch.

    `rate` limits every link in both directions, in the units of `tc`; None leaves the links unlimited. A
    token bucket of 256 kB lets short bursts through at full speed. Each host keeps to its share of the cores,
    unless that would be uneven; with more hosts than cores, several share one.

        with Lab(4, rate="100mbit") as lab:
            runs = lab.run([sys.executable, "train.py"], timeout=120)
            print(sum(run.sent for run in runs), "bytes")

    Leaving the block kills every process in the lab and deletes every namespace. Inside the block SIGTERM and
    SIGHUP raise SystemExit, unless the program handles them itself.
    """

    def __init__(self, hosts: int, *, rate: str | None = None) -> None:
        if not is_whole(hosts):
            raise TypeError(f"Lab(hosts={hosts!r}): hosts must be a whole number.")
        if hosts < 1:
            raise BadArgument("hosts", hosts, "hosts must be at least 1.", call="Lab")
        if hosts > MOST_HOSTS:
            raise BadArgument("hosts", hosts, f"a bridge has {MOST_HOSTS} ports, one per host.", call="Lab")
        self._bits = None if rate is None else _check_rate(rate, "Lab")
        self.hosts, self.rate, self._started, self._closing = hosts, rate, 0, ExitStack()
        self._network: Network | None = None
        self._jobs: list[Job] = []

    def __repr__(self) -> str:
        return f"Lab({self.hosts}, rate={self.rate!r})"

    def __enter__(self) -> "Lab":
        if reason := unavailable():
            raise RuntimeError(reason)
        if self._network is not None:
            raise RuntimeError(f"{self!r} is already open.")
        self._closing.enter_context(exit_on_signals())
        self._closing.callback(self._close, owner=os.getpid())
        # A second Ctrl-C can arrive before the first line of __exit__.
        atexit.register(self._close, owner=os.getpid())
        try:
            with hold_signals():
                remove_stale()
                self._network = Network(self.hosts)
                self._network.build()
                if self._bits is not None:
                    self._network.shape(self._bits)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self._closing.close()
        atexit.unregister(self._close)

    @property
    def addresses(self) -> tuple[str, ...]:
        """The address of each host, by rank. They are valid only inside the lab."""
        return self._open().addresses

    def start(self, command: Sequence[str], *, env: Mapping[str, str] | None = None) -> Job:
        """Start the command on every host, with torchrun's variables and `env`, and return at once."""
        network = self._open()
        if isinstance(command, str) or not command:
            raise TypeError(f"command={command!r}: a command is a list, such as ['python', 'train.py'].")
        ours = {
            "MASTER_ADDR": network.addresses[0],
            "MASTER_PORT": str(_FIRST_PORT + self._started % 1000),
            "LOCAL_RANK": "0",
            "WORLD_SIZE": str(self.hosts),
            "LOCAL_WORLD_SIZE": "1",
            "GLOO_SOCKET_IFNAME": INTERFACE,
        }
        shared = {"OMP_NUM_THREADS": "1"} | os.environ | ours
        environments = [{**shared, "RANK": str(rank), **(env or {})} for rank in range(self.hosts)]
        self._started += 1
        with hold_signals():
            self._jobs = [job for job in self._jobs if job.runs is None]
            job = Job(command, network, environments)
            self._jobs.append(job)
        return job

    def run(
        self, command: Sequence[str], *, env: Mapping[str, str] | None = None, timeout: float | None = None
    ) -> tuple[Run, ...]:
        """Run the command on every host. After `timeout` seconds, kill it and raise TimeoutError."""
        job = self.start(command, env=env)
        try:
            return job.wait(timeout=timeout)
        finally:
            job.close()

    def set_rate(self, rate: str) -> None:
        """Limit every link to another rate from now on, also while a job runs."""
        self._open().shape(_check_rate(rate, "lab.set_rate"))
        self.rate = rate

    def _open(self) -> Network:
        if self._network is None:
            raise RuntimeError(f"{self!r} is not open: use it in a `with` block.")
        return self._network

    def _close(self, *, owner: int) -> None:
        if self._network is None or os.getpid() != owner:  # a fork of this process owns nothing
            return
        with hold_signals():
            try:
                for job in self._jobs:
                    job.close()
            finally:
                self._network.remove()
                self._network, self._jobs = None, []


def _check_rate(rate: str, call: str) -> int:
    """Return bits per second."""
    bits = parse_rate(rate)
    if not 8_000 <= bits <= 100 * 10**9:  # outside these bounds tbf silently uses another rate
        raise BadArgument("rate", rate, "rate must be from 8kbit to 100gbit, or None.", call=call)
    return bits

"""Workers for runs: processes on this machine, hosts of a lab, or a simulation.

torch's elastic launcher is not used: its rendezvous listens on every interface and unpickles what it is sent.
"""

from __future__ import annotations

import math
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from offbeat.app.runs.folder import cache_of, finished, setting_of
from offbeat.app.runs.loop import Loop
from offbeat.app.runs.setting import Setting
from offbeat.app.runs.worker import LOST, STOPPED, work
from offbeat.base.errors import OffbeatError
from offbeat.base.units import parse_link
from offbeat.comm.communicator import Communicator
from offbeat.lab import Lab
from offbeat.lab.process import Process
from offbeat.simulate import Network, simulate

HERE = "127.0.0.1"
LOOK = 0.05  # seconds between looks at the workers
SAVING = 120.0  # seconds to save after Ctrl-C: the slowest rank has steps to catch up
LAST_WORDS = 10.0  # seconds the others have after a worker has failed


class RunFailed(OffbeatError):
    """A worker ended with an error, which the message repeats."""


def launch(folders: Sequence[Path], *, resume: bool = False) -> bool:
    """Train in all of the folders, whose runs have the same workers; False if Ctrl-C came first."""
    setting = setting_of(folders[0])
    if setting.where == "simulation":
        return all(_simulated(folder, resume=resume) for folder in folders)
    if setting.where == "netns":
        return _in_lab(folders, setting, resume=resume)
    return _started(folders, setting.workers, resume=resume)


def joined() -> bool:
    """Whether torchrun, or something like it, has started this process as one of several."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def agreed(text: str) -> str:
    """Rank 0's text, where torchrun has started this process: clocks differ from rank to rank."""
    if not joined():
        return text
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    said = text.encode()  # as bytes: torch's broadcast of objects unpickles what arrives
    room = torch.zeros(2**12, dtype=torch.uint8)
    room[: len(said)] = torch.frombuffer(bytearray(said), dtype=torch.uint8)
    dist.broadcast(room, src=0)
    return bytes(room.tolist()).rstrip(b"\0").decode()


def join(folder: Path, *, resume: bool = False) -> bool:
    """Be one of the workers that torchrun started."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    try:
        return work([folder], resume=resume)
    finally:
        dist.destroy_process_group()


# Without the current folder in the path of modules, where a file called queue.py would be taken for Python's.
_WORKER = "import sys; sys.path[:] = filter(None, sys.path); from offbeat.app.runs.worker import main; main()"


def _command(folders: Sequence[Path], resume: bool) -> list[str]:
    """The command of one worker; its options come from the environment, as torchrun sets it."""
    return [sys.executable, "-c", _WORKER, *map(str, folders), *(["--resume"] if resume else [])]


def _started(folders: Sequence[Path], workers: int, *, resume: bool) -> bool:
    store = _store()
    shared = {
        "OMP_NUM_THREADS": "1",
        **os.environ,
        "MASTER_ADDR": HERE,
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the store is ours, and outlives rank 0
        "GLOO_SOCKET_IFNAME": _loopback(),
        "WORLD_SIZE": str(workers),
        "LOCAL_WORLD_SIZE": str(workers),
    }
    crew: list[Process] = []
    command = [*_command(folders, resume), "--tied"]
    with _signals() as heard:
        try:
            for rank in range(workers):
                own = {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
                crew.append(Process(command, own, stdin=subprocess.PIPE))
            _watch(crew, heard)
        finally:
            for process in crew:
                process.kill()
                process.join(None)
            ended = {rank: Ended.of(process) for rank, process in enumerate(crew)}
            for process in crew:
                process.close()
    if heard:
        return all(finished(folder) for folder in folders)
    bad = {rank: end for rank, end in ended.items() if end.code not in (0, STOPPED)}
    if bad:
        raise RunFailed(_why(bad))
    return all(end.code == 0 for end in ended.values())


def _store() -> TCPStore:
    """Where local workers find each other: on this machine alone, while torch's own listens everywhere.

    It holds addresses and short notes. Nobody unpickles anything from it.
    """
    listening = socket.create_server((HERE, 0), backlog=1024)
    port = listening.getsockname()[1]
    return TCPStore(HERE, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach())


def _loopback() -> str:
    """The name of the interface that leads back to this machine: lo on Linux, lo0 on a Mac."""
    return next(name for _, name in socket.if_nameindex() if name in ("lo", "lo0"))


@contextmanager
def _signals() -> Iterator[list[int]]:
    """The signals that asked for an end inside, of which none interrupts anything."""
    heard: list[int] = []
    before = {}
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            before[number] = signal.signal(number, lambda number, frame: heard.append(number))
    try:
        yield heard
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _watch(crew: Sequence[Process], heard: Sequence[int]) -> None:
    """Until all workers have ended. A signal is passed on, and a second one ends the patience with them.

    Once a worker has failed, the others have a little time to say what they lost.
    """
    passed, deadline = False, math.inf
    while any(not process.join(0) for process in crew):
        if heard and not passed:
            passed = True
            for process in crew:
                process.interrupt()
            deadline = min(deadline, time.monotonic() + SAVING)
        if any(process.returncode not in (None, 0, STOPPED) for process in crew):
            deadline = min(deadline, time.monotonic() + LAST_WORDS)
        if len(heard) > 1 or time.monotonic() > deadline:
            return
        time.sleep(LOOK)


@dataclass(frozen=True)
class Ended:
    """How a worker ended, when, and what it had said."""

    code: int
    at: float
    said: str

    @classmethod
    def of(cls, process: Process) -> Ended:
        assert process.returncode is not None
        return cls(process.returncode, process.ended_at, process.stderr())


def _why(ended: dict[int, Ended]) -> str:
    """The last words of the first to fail; who merely lost another is asked only if there is nobody else."""
    rank, end = min(ended.items(), key=lambda item: (item[1].code == LOST, item[1].at))
    last = re.sub(r"^\[rank\d+\]: ", "", end.said.strip().rpartition("\n")[2])
    if end.code < 0:
        last = ": ".join(filter(None, [f"ended by {signal.Signals(-end.code).name}", last]))
    return f"Rank {rank}: {last or f'ended with code {end.code}'}"


def _in_lab(folders: Sequence[Path], setting: Setting, *, resume: bool) -> bool:
    rate = None if setting.link is None else f"{round(8 * parse_link(setting.link).rate)}bit"
    with Lab(setting.workers, rate=rate) as lab:
        job = lab.start(_command(folders, resume))
        while job.running:
            time.sleep(0.1)
        runs = job.wait()
    bad = {
        run.rank: Ended(run.returncode, run.seconds, run.stderr)
        for run in runs
        if run.returncode not in (0, STOPPED)
    }
    if bad:
        raise RunFailed(_why(bad))
    return all(run.returncode == 0 for run in runs)


def _simulated(folder: Path, *, resume: bool) -> bool:
    setting = setting_of(folder)
    task = setting.find_task(cache_of(folder))
    network = Network()
    if setting.link is not None:
        link = parse_link(setting.link)
        network = Network(latency=link.latency, bandwidth=link.rate)

    def worker(comm: Communicator) -> bool:
        return Loop(comm, setting, task, folder).run(resume=resume)

    state = torch.get_rng_state()
    torch.manual_seed(setting.seed)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        late = setting.late
        return all(
            simulate(
                worker, setting.workers, network=network, compute=lambda r, s: setting.compute + late(r, s)
            )
        )
    finally:
        torch.set_num_threads(threads)
        torch.set_rng_state(state)

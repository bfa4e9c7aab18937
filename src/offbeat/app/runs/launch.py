"""Starts the workers of runs: processes on this machine, hosts of a lab, or a simulation.

It does not use torch's elastic launcher, whose rendezvous listens on every interface and unpickles what it
gets.
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
from offbeat.lab.job import Process
from offbeat.simulate import Network, simulate

HERE = "127.0.0.1"
LOOK = 0.05  # seconds between looks at the workers
SAVING = 120.0  # seconds to save after Ctrl-C; the slowest rank has to catch up first
LAST_WORDS = 10.0  # seconds the others have to report after a worker has failed


class RunFailed(OffbeatError):
    """A worker failed; the message is its error."""


def launch(folders: Sequence[Path], *, resume: bool = False) -> bool:
    """Train in all of the folders, whose runs have the same workers; False after Ctrl-C."""
    setting = setting_of(folders[0])
    if setting.where == "simulation":
        return all(_simulate(folder, resume=resume) for folder in folders)
    if setting.where == "netns":
        return _run_in_lab(folders, setting, resume=resume)
    return _run_processes(folders, setting.workers, resume=resume)


def under_torchrun() -> bool:
    """Whether torchrun, or something like it, started this process as one of several."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def share_text(text: str) -> str:
    """Under torchrun, the text of rank 0."""
    if not under_torchrun():
        return text
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    content = text.encode()  # as bytes: torch's broadcast of objects unpickles what it gets
    buffer = torch.zeros(2**12, dtype=torch.uint8)
    buffer[: len(content)] = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    dist.broadcast(buffer, src=0)
    return bytes(buffer.tolist()).rstrip(b"\0").decode()


def join(folder: Path, *, resume: bool = False) -> bool:
    """Train as one of the workers that torchrun started."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    try:
        return work([folder], resume=resume)
    finally:
        dist.destroy_process_group()


# Without the current folder in sys.path, where a file queue.py would hide Python's own module.
_WORKER = "import sys; sys.path[:] = filter(None, sys.path); from offbeat.app.runs.worker import main; main()"


def _command(folders: Sequence[Path], resume: bool) -> list[str]:
    """The command of one worker, whose rank comes from the environment, as under torchrun."""
    return [sys.executable, "-c", _WORKER, *map(str, folders), *(["--resume"] if resume else [])]


def _run_processes(folders: Sequence[Path], workers: int, *, resume: bool) -> bool:
    store = _store()
    shared = {
        "OMP_NUM_THREADS": "1",
        **os.environ,
        "MASTER_ADDR": HERE,
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # this process holds the store, so it outlives rank 0
        "GLOO_SOCKET_IFNAME": _loopback(),
        "WORLD_SIZE": str(workers),
        "LOCAL_WORLD_SIZE": str(workers),
    }
    crew: list[Process] = []
    command = [*_command(folders, resume), "--tied"]
    with _catch_signals() as caught:
        try:
            for rank in range(workers):
                own = {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
                crew.append(Process(command, own, stdin=subprocess.PIPE))
            _watch(crew, caught)
        finally:
            for process in crew:
                process.signal(signal.SIGKILL)
                process.join(None)
            ended = {rank: Ended.of(process) for rank, process in enumerate(crew)}
            for process in crew:
                process.close()
    if not caught:
        return _check(ended)
    # A worker that Ctrl-C ended before it could listen has not failed; one that could not save has.
    cut_off = {rank for rank, end in ended.items() if end.code < 0 or "KeyboardInterrupt" in end.stderr}
    _check({rank: end for rank, end in ended.items() if rank not in cut_off and end.code != LOST})
    return all(finished(folder) for folder in folders)


def _store() -> TCPStore:
    """A store for local workers. It listens on the loopback; torch's own listens everywhere."""
    server = socket.create_server((HERE, 0), backlog=1024)
    port = server.getsockname()[1]
    return TCPStore(HERE, port, is_master=True, wait_for_workers=False, master_listen_fd=server.detach())


def _loopback() -> str:
    """The name of the loopback interface: lo on Linux, lo0 on a Mac."""
    return next(name for _, name in socket.if_nameindex() if name in ("lo", "lo0"))


@contextmanager
def _catch_signals() -> Iterator[list[int]]:
    """Collect the signals that ask this process to end."""
    caught: list[int] = []
    before = {}
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            before[number] = signal.signal(number, lambda number, frame: caught.append(number))
    try:
        yield caught
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _watch(crew: Sequence[Process], caught: Sequence[int]) -> None:
    """Wait until all workers have ended. Pass a signal on to them; return at once on a second one.

    After a worker has failed, the others get a little time to report.
    """
    passed, deadline = False, math.inf
    while any(not process.join(0) for process in crew):
        if caught and not passed:
            passed = True
            for process in crew:
                process.signal(signal.SIGINT)
            deadline = min(deadline, time.monotonic() + SAVING)
        if any(process.returncode not in (None, 0, STOPPED) for process in crew):
            deadline = min(deadline, time.monotonic() + LAST_WORDS)
        if len(caught) > 1 or time.monotonic() > deadline:
            return
        time.sleep(LOOK)


@dataclass(frozen=True)
class Ended:
    """The exit code of a worker, when it ended, and what it wrote to standard error."""

    code: int
    at: float
    stderr: str

    @classmethod
    def of(cls, process: Process) -> Ended:
        assert process.returncode is not None
        return cls(process.returncode, process.ended_at, process.stderr())


def _check(ended: dict[int, Ended]) -> bool:
    """Whether all have finished. Raise the error of the first to fail; workers that lost a peer come last."""
    failed = {rank: end for rank, end in ended.items() if end.code not in (0, STOPPED)}
    if not failed:
        return all(end.code == 0 for end in ended.values())
    rank, end = min(failed.items(), key=lambda item: (item[1].code == LOST, item[1].at))
    last = re.sub(r"^\[rank\d+\]: ", "", end.stderr.strip().rpartition("\n")[2])
    if end.code < 0:
        last = ": ".join(filter(None, [f"ended by {signal.Signals(-end.code).name}", last]))
    raise RunFailed(f"Rank {rank}: {last or f'ended with code {end.code}'}")


def _run_in_lab(folders: Sequence[Path], setting: Setting, *, resume: bool) -> bool:
    rate = None if setting.link is None else f"{round(8 * parse_link(setting.link).rate)}bit"
    with Lab(setting.workers, rate=rate) as lab:
        job = lab.start(_command(folders, resume))
        while job.running:
            time.sleep(0.1)
        runs = job.wait()
    return _check({run.rank: Ended(run.returncode, run.seconds, run.stderr) for run in runs})


def _simulate(folder: Path, *, resume: bool) -> bool:
    setting = setting_of(folder)
    task = setting.find_task(cache_of(folder))
    network = Network()
    if setting.link is not None:
        link = parse_link(setting.link)
        network = Network(latency=link.latency, bandwidth=link.rate)

    def worker(comm: Communicator) -> bool:
        return Loop(comm, setting, task, folder).run(resume=resume)

    def seconds(rank: int, step: int) -> float:
        return setting.compute + setting.late(rank, step)

    state = torch.get_rng_state()
    torch.manual_seed(setting.seed)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return all(simulate(worker, setting.workers, network=network, compute=seconds))
    finally:
        torch.set_num_threads(threads)
        torch.set_rng_state(state)

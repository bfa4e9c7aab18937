"""Workers for runs: processes under torch's elastic launcher, hosts of a lab, or a simulation."""

from __future__ import annotations

import logging
import os
import re
import signal
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, SignalException, Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from offbeat.comm import Communicator
from offbeat.errors import OffbeatError
from offbeat.lab import Lab
from offbeat.runs.folder import cache_of, finished, setting_of
from offbeat.runs.loop import Loop
from offbeat.runs.setting import Setting
from offbeat.runs.worker import STOPPED, work
from offbeat.simulate import Network, simulate
from offbeat.units import parse_link


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
    heard = [text]
    dist.broadcast_object_list(heard, src=0)
    return heard[0]


def join(folder: Path, *, resume: bool = False) -> bool:
    """Be one of the workers that torchrun started."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    try:
        return work([folder], resume=resume)
    finally:
        dist.destroy_process_group()


def _words(folders: Sequence[Path], resume: bool) -> list[str]:
    return ["-m", "offbeat.runs.worker", *map(str, folders), *(["--resume"] if resume else [])]


def _started(folders: Sequence[Path], workers: int, *, resume: bool) -> bool:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "120")  # the slowest rank has steps to catch up
    for name in logging.root.manager.loggerDict:  # of which most have a level of their own
        if name.startswith("torch.distributed"):
            logging.getLogger(name).setLevel(logging.CRITICAL)  # our sentence is enough
    with tempfile.TemporaryDirectory() as logs:
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=workers,
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            max_restarts=0,
            local_addr="localhost",
            logs_specs=DefaultLogsSpecs(log_dir=logs, redirects=Std.ALL),
        )
        try:
            with _own_signals():
                elastic_launch(config, sys.executable)(*_words(folders, resume))
        except SignalException:
            return all(finished(folder) for folder in folders)
        except ChildFailedError as failed:
            return _failed({rank: f.exitcode for rank, f in failed.failures.items()}, Path(logs))
    return True


@contextmanager
def _own_signals() -> Iterator[None]:
    """The elastic launcher leaves its handlers behind: put back those that were there."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
    before = {number: signal.getsignal(number) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _failed(codes: dict[int, int], logs: Path) -> bool:
    """False if Ctrl-C has ended the workers; otherwise raise what one of them said."""
    if STOPPED in codes.values():
        return False
    said = {int(path.parent.name): path.read_text() for path in logs.rglob("stderr.log")}
    raise RunFailed(_why({rank: (code, said.get(rank, "")) for rank, code in codes.items()}))


def _why(ended: dict[int, tuple[int, str]]) -> str:
    """The last words of the first rank that had some."""
    for rank, (code, said) in sorted(ended.items(), key=lambda item: not item[1][1].strip()):
        last = re.sub(r"^\[rank\d+\]: ", "", said.strip().rpartition("\n")[2]) or f"ended with code {code}"
        return f"Rank {rank}: {last}"
    raise AssertionError("somebody failed")


def _in_lab(folders: Sequence[Path], setting: Setting, *, resume: bool) -> bool:
    rate = None if setting.link is None else f"{round(8 * parse_link(setting.link).rate)}bit"
    with Lab(setting.workers, rate=rate) as lab:
        job = lab.start([sys.executable, *_words(folders, resume)])
        while job.running:
            time.sleep(0.1)
        runs = job.wait()
    bad = {run.rank: (run.returncode, run.stderr) for run in runs if run.returncode not in (0, STOPPED)}
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

"""Starts the workers of runs: processes on this machine, hosts of a lab, or a simulation.

It avoids torch's elastic launcher, whose rendezvous listens on every interface and unpickles what it gets.
"""

import json
import math
import os
import re
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from offbeat.app.runs.folder import cache_of, finished, output_path, setting_of
from offbeat.app.runs.frames import describe, own_frames
from offbeat.app.runs.loop import Loop
from offbeat.app.runs.setting import Setting
from offbeat.app.runs.worker import ENDED, LOST, STOPPED
from offbeat.base.errors import OffbeatError
from offbeat.base.units import parse_link
from offbeat.comm.communicator import Communicator
from offbeat.lab import Lab
from offbeat.lab.job import Process
from offbeat.lab.signals import collect_signals
from offbeat.simulate import Network, simulate

HERE = "127.0.0.1"
LOOK = 0.05  # seconds between looks at the workers
SAVING = 120.0  # seconds to save after Ctrl-C; the slowest rank has to catch up first
LAST_WORDS = 10.0  # seconds the others have to report after a worker has failed

Ended = dict[int, tuple[int, str]]  # by rank, in the order of their end: exit code and standard error


class WorkerFailed(OffbeatError):
    """A worker has failed. `below` has the frames of the user's code, and where its output is."""

    def __init__(self, sentence: str, below: str = "") -> None:
        super().__init__(sentence)
        self.below = below


def launch(folders: Sequence[Path], *, resume: bool = False, single: bool = False) -> bool:
    """Train in all of the folders, whose runs have the same workers; False after Ctrl-C.

    A `single` run is not part of a comparison: its model is saved, and a loss that is NaN is an error.
    """
    setting = setting_of(folders[0])
    if setting.where == "simulation":
        return all(_simulate(folder, resume=resume) for folder in folders)
    options = [*(["--resume"] if resume else []), *(["--single"] if single else [])]
    run = _run_in_lab if setting.where == "netns" else _run_processes
    return run(folders, setting, options)


# Without the current folder in sys.path, where a file queue.py would hide Python's own module.
_PATH = "import sys; sys.path[:] = filter(None, sys.path); "
_TIED = "from offbeat.app.runs.tied import tie; tie(); "
_WORKER = "from offbeat.app.runs.worker import main; main()"


def _command(folders: Sequence[Path], options: Sequence[str], *, before: str = "") -> list[str]:
    return [sys.executable, "-c", _PATH + before + _WORKER, *options, "--", *map(str, folders)]


def _run_processes(folders: Sequence[Path], setting: Setting, options: Sequence[str]) -> bool:
    # A store that listens on the loopback; torch's own listens everywhere.
    server = socket.create_server((HERE, 0), backlog=1024)
    port = server.getsockname()[1]
    store = TCPStore(HERE, port, is_master=True, wait_for_workers=False, master_listen_fd=server.detach())
    environment = {
        "OMP_NUM_THREADS": "1", **os.environ, "MASTER_ADDR": HERE, "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # this process holds the store, so it outlives rank 0
        # The loopback interface: lo on Linux, lo0 on a Mac.
        "GLOO_SOCKET_IFNAME": next(name for _, name in socket.if_nameindex() if name in ("lo", "lo0")),
        "WORLD_SIZE": str(setting.workers), "LOCAL_WORLD_SIZE": str(setting.workers),
    }  # fmt: skip
    command = _command(folders, [*options, "--fork", str(setting.workers)], before=_TIED)
    with collect_signals() as caught:
        crew = Process(command, environment, stdin=subprocess.PIPE)
        try:
            _watch(crew, caught)
        finally:
            crew.signal(signal.SIGKILL)
            crew.join(None)
            ended, complaint = _read_ended(crew), crew.stderr()
            crew.close()
    if caught:
        # A worker that Ctrl-C ended before it could listen has not failed; one that could not save has.
        cut_off = [rank for rank, (code, _) in ended.items() if code < 0]
        _check({r: end for r, end in ended.items() if r not in cut_off and end[0] != LOST}, folders)
        return all(finished(folder) for folder in folders)
    complete = _check(ended, folders)
    if len(ended) < setting.workers:
        reason = _last_line(complaint) or f"exit code {crew.returncode}"
        raise OffbeatError(f"The process of the workers ended early: {reason}")
    return complete


def _watch(crew: Process, caught: Sequence[int]) -> None:
    """Wait for all workers, or after a failure a little longer. Pass on a signal; a second one ends this."""
    passed, deadline = False, math.inf
    while not crew.join(LOOK):
        if caught and not passed:
            passed = True
            crew.signal(signal.SIGINT)
            deadline = min(deadline, time.monotonic() + SAVING)
        if any(code not in (0, STOPPED) for code, _ in _read_ended(crew).values()):
            deadline = min(deadline, time.monotonic() + LAST_WORDS)
        if len(caught) > 1 or time.monotonic() > deadline:
            return


def _read_ended(crew: Process) -> Ended:
    """How the workers that have ended so far did so, from the lines of the process that forked them."""
    lines = crew.stdout().rpartition("\n")[0].splitlines()
    ends = [json.loads(line.removeprefix(ENDED)) for line in lines if line.startswith(ENDED)]
    return {rank: (code, stderr) for rank, code, stderr in ends}


def _check(ended: Ended, folders: Sequence[Path]) -> bool:
    """Whether all have finished. Raise the error of the first to fail; workers that lost a peer come last."""
    failed = [(code == LOST, rank) for rank, (code, _) in ended.items() if code not in (0, STOPPED)]
    if not failed:
        return all(code == 0 for code, _ in ended.values())
    rank = min(failed, key=lambda item: item[0])[1]
    code, stderr = ended[rank]
    last = re.sub(r"^\[rank\d+\]: ", "", _last_line(stderr))
    below = [stderr.rstrip().removesuffix(_last_line(stderr)).strip("\n")] if code == 1 else []
    if code < 0:
        last = ": ".join(filter(None, [f"ended by {signal.Signals(-code).name}", last]))
    output = output_path(next((f for f in folders if not finished(f)), folders[-1]), rank)
    if output.exists() and output.stat().st_size:
        below.append(f"The output of rank {rank} is in {output}")
    raise WorkerFailed(f"Rank {rank}: {last or f'ended with code {code}'}", "\n".join(filter(None, below)))


def _last_line(text: str) -> str:
    return text.strip().rpartition("\n")[2]


def _run_in_lab(folders: Sequence[Path], setting: Setting, options: Sequence[str]) -> bool:
    rate = None if setting.link is None else f"{round(8 * parse_link(setting.link).rate)}bit"
    with collect_signals() as caught, Lab(setting.workers, rate=rate) as lab:
        job = lab.start(_command(folders, options))
        while job.running:
            if caught:
                return False
            time.sleep(0.1)
        runs = sorted(job.wait(), key=lambda run: run.seconds)
    return _check({run.rank: (run.returncode, run.stderr) for run in runs}, folders)


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
        return setting.load * setting.compute + setting.late(rank, step)

    state, threads = torch.get_rng_state(), torch.get_num_threads()
    torch.manual_seed(setting.seed)
    torch.set_num_threads(1)
    try:
        return all(simulate(worker, setting.workers, network=network, compute=seconds))
    except OffbeatError:
        raise
    except Exception as error:
        output = output_path(folder, 0)
        output.write_text(traceback.format_exc())
        below = f"{own_frames(error)}\nThe traceback is in {output}".strip("\n")
        raise WorkerFailed(describe(error), below) from error
    finally:
        torch.set_num_threads(threads)
        torch.set_rng_state(state)

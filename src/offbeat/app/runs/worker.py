"""The processes of workers. Each worker trains the given runs, one after the other.

    python -m offbeat.app.runs.worker [--resume] [--single] [--fork K] -- FOLDER FOLDER ...

`offbeat.app.runs.launch` starts them. In a lab, each worker has a process of its own and finds its rank in
the environment. On this machine, `--fork` imports everything once and forks the workers. These end when
their standard input closes, that is, when the launcher has ended for whatever reason. What a worker prints
goes to `rank-0.txt` in the folder of its run. Only the error that ends it goes to the launcher.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path

import torch
import torch.distributed as dist

from offbeat.app.runs.folder import cache_of, output_path, setting_of
from offbeat.app.runs.frames import describe, own_frames
from offbeat.app.runs.loop import Loop
from offbeat.app.runs.tied import end_with_launcher
from offbeat.base.errors import OffbeatError, PeerLost
from offbeat.base.units import parse_link
from offbeat.comm.communicator import Communicator
from offbeat.comm.throttled import Throttled
from offbeat.comm.torch_backend import Torch

STOPPED = 3  # exit code: Ctrl-C, and the checkpoint is saved
ENDED = "offbeat worker ended: "  # begins the lines of the forking process; imports may print others
LOST = 4  # exit code: another worker was lost, and that one knows why
SLOW = ("torch._dynamo", "sklearn.datasets")  # imports of every optimizer and of the digits


def work(folders: Sequence[Path], *, resume: bool, single: bool = False, to_files: bool = False) -> bool:
    """Train in each of the folders; False after Ctrl-C. Needs a process group. `single` is
    as in `launch`; `to_files` writes what this process prints into the folder."""
    torch.set_num_threads(1)
    base, called = Torch(), threading.Event()
    for folder in folders:
        # Ctrl-C after the last step of a run stops the runs after it.
        if any(word[0] for word in base.tell([int(called.is_set())]).wait()):
            return False
        setting = setting_of(folder)
        if to_files:
            _print_to(output_path(folder, base.rank))
        task = setting.find_task(cache_of(folder))
        torch.manual_seed(setting.seed)
        comm: Communicator = base
        if setting.link is not None and setting.where == "processes":
            link = parse_link(setting.link)
            comm = Throttled(base, rate=link.rate, latency=link.latency)
        if not Loop(comm, setting, task, folder, called=called, single=single).run(resume=resume):
            return False
    return True


def _print_to(path: Path) -> None:
    """Send standard output and error to this file."""
    sys.stdout.flush()
    sys.stderr.flush()
    with path.open("a") as file:
        for number in (1, 2):
            os.dup2(file.fileno(), number)


def fork(workers: int) -> None:
    """Return in every worker. This process reports how each worker ended, one JSON line each, and exits.

    Nothing here may start a thread before the last fork. Ctrl-C is passed on: one that comes in between
    would miss the workers that are not there yet.
    """
    crew = {}
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    for rank in range(workers):
        stderr = tempfile.TemporaryFile()
        if (process := os.fork()) == 0:
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            os.dup2(stderr.fileno(), 2)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
            threading.Thread(target=end_with_launcher, name="offbeat-tied", daemon=True).start()
            return
        crew[process] = rank, stderr

    def pass_on(number: int, frame: object) -> None:
        for process in tuple(crew):
            with suppress(ProcessLookupError):  # it has just ended
                os.kill(process, number)

    signal.signal(signal.SIGINT, pass_on)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    while crew:
        process, status = os.wait()
        rank, stderr = crew.pop(process)
        stderr.seek(0)
        text = stderr.read().decode(errors="replace")
        print(ENDED + json.dumps([rank, os.waitstatus_to_exitcode(status), text]), flush=True)
    sys.exit(0)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--single", action="store_true")
    parser.add_argument("--fork", type=int, default=0)
    parser.add_argument("folders", nargs="+", type=Path)
    given = parser.parse_args()
    logging.basicConfig(level=os.environ.get("OFFBEAT_LOG", "WARNING"), format="%(message)s")
    if given.fork:
        digits = setting_of(given.folders[0]).task == "digits"
        for name in SLOW if digits else SLOW[:1]:
            import_module(name)
        fork(given.fork)
    launcher = os.fdopen(os.dup(2), "w")
    try:
        dist.init_process_group("gloo")
        done = work(given.folders, resume=given.resume, single=given.single, to_files=True)
        code = 0 if done else STOPPED
        dist.destroy_process_group()
    except OffbeatError as error:
        print(error, file=launcher)
        code = LOST if isinstance(error, PeerLost) else 1
    except Exception as error:
        print(own_frames(error), describe(error), sep="\n", file=launcher, flush=True)
        with suppress(OSError):  # the disk may be full
            traceback.print_exc()
        code = 1
    for stream in (launcher, sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()
    os._exit(code)  # a fork that frees its objects first copies all of its parent's memory


if __name__ == "__main__":
    main()

"""The process of one worker. It trains the given runs, one after the other.

    python -m offbeat.app.runs.worker FOLDER FOLDER ... [--resume] [--tied]

`offbeat.app.runs.launch` starts it, on this machine or in a lab. With `--tied` the worker ends when its
standard input closes, that is, when the launcher has ended for whatever reason.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from offbeat.app.runs.folder import cache_of, setting_of
from offbeat.app.runs.loop import Loop
from offbeat.app.runs.setting import Setting
from offbeat.base.errors import OffbeatError, PeerLost
from offbeat.base.units import parse_link
from offbeat.comm.communicator import Communicator
from offbeat.comm.throttled import Throttled
from offbeat.comm.torch_backend import Torch

STOPPED = 3  # exit code: Ctrl-C, and the checkpoint is saved
LOST = 4  # exit code: another worker was lost, and that one knows why


def work(folders: Sequence[Path], *, resume: bool) -> bool:
    """Train in each of the folders; False after Ctrl-C. Needs a process group."""
    torch.set_num_threads(1)
    base, called = Torch(), threading.Event()
    for folder in folders:
        # Ctrl-C after the last step of a run stops the runs after it.
        if any(word[0] for word in base.tell([int(called.is_set())]).wait()):
            return False
        setting = setting_of(folder)
        task = setting.find_task(cache_of(folder))
        torch.manual_seed(setting.seed)
        if not Loop(throttle(base, setting), setting, task, folder, called=called).run(resume=resume):
            return False
    return True


def throttle(comm: Communicator, setting: Setting) -> Communicator:
    """The communicator behind the emulated link of the setting, unless the network itself is shaped."""
    if setting.link is None or setting.where != "processes":
        return comm
    link = parse_link(setting.link)
    return Throttled(comm, rate=link.rate, latency=link.latency)


def tie() -> None:
    """End this process as soon as its standard input closes."""

    def wait() -> None:
        while os.read(0, 1):
            pass
        os._exit(1)

    threading.Thread(target=wait, name="offbeat-tied", daemon=True).start()


def main() -> None:
    logging.basicConfig(level=os.environ.get("OFFBEAT_LOG", "WARNING"), format="%(message)s")
    options = {word for word in sys.argv[1:] if word in ("--resume", "--tied")}
    folders = [Path(word) for word in sys.argv[1:] if word not in options]
    if "--tied" in options:
        tie()
    try:
        dist.init_process_group("gloo")
        finished = work(folders, resume="--resume" in options)
    except OffbeatError as error:
        print(error, file=sys.stderr, flush=True)
        sys.exit(LOST if isinstance(error, PeerLost) else 1)
    dist.destroy_process_group()
    sys.exit(0 if finished else STOPPED)


if __name__ == "__main__":
    main()

"""The command that continues a run that was stopped."""

import os
import shlex
from pathlib import Path
from types import SimpleNamespace

from offbeat.app.commands.join import Launch

OUTPUT = ("tensorboard", "quiet", "verbose", "json")  # options that a run does not remember


def resume_command(place: Path, given: SimpleNamespace, started: Launch | None = None) -> str:
    """How to continue a run as it was started: alone, by torchrun, or by something else."""
    words = ["offbeat", "train", *(["--elastic"] if given.elastic else [])]
    words += ["--resume", "--checkpoint-dir", str(place)]
    words += [f"--{name}" for name in OUTPUT if getattr(given, name)]
    for name in ("lighthouse", "token"):
        if (value := getattr(given, name)) is not None:
            words += [f"--{name}", str(value)]
    command, here = shlex.join(words), os.environ.get("LOCAL_WORLD_SIZE")
    if started is None:
        return command
    if "TORCHELASTIC_RUN_ID" in os.environ and here == str(started.workers):
        return f"torchrun --nproc-per-node {here} -m {command}"
    return f"{command} as each of the {started.workers} workers"

"""Starts scripts of frameworks: with torchrun, or on the hosts of a lab."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import warm

ROOT = Path(__file__).parent.parent
NEEDED = "transformers.trainer transformers.models.gpt2.modeling_gpt2 accelerate.local_sgd lightning.pytorch"
# The frameworks take long to import: one process runs all of these tests, and those with hosts of a lab.
GROUP = "lab"
PATHS = [os.environ.get("PYTHONPATH", ""), str(ROOT / "src")]
ENVIRONMENT = {"PYTHONPATH": os.pathsep.join(filter(None, PATHS)), "OMP_NUM_THREADS": "1"}


def alone(*words: str) -> subprocess.CompletedProcess[str]:
    """`python WORDS`."""
    return warm.run(*words, also=NEEDED, cwd=ROOT, env={**os.environ, **ENVIRONMENT})


def torchrun(workers: int, *words: str) -> subprocess.CompletedProcess[str]:
    """`torchrun --nproc-per-node WORKERS WORDS`."""
    return alone("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={workers}", *words)


def report(folder: str, results: dict[str, Any]) -> None:
    """Leave the results of this rank for the test that started it."""
    torch.save(results, Path(folder) / f"results-{os.environ['RANK']}.pt")


def gather(workers: int, folder: Path, *words: str) -> list[dict[str, Any]]:
    """Run a script that reports into the folder. Return the results of every rank."""
    done = torchrun(workers, *words, str(folder))
    assert done.returncode == 0, done.stderr
    return [torch.load(folder / f"results-{rank}.pt") for rank in range(workers)]


def refused(build: Any) -> tuple[str, str]:
    """The kind of the error that a call raises, and its sentence."""
    try:
        build()
    except Exception as error:
        return type(error).__name__, str(error)
    return "", f"{sys.argv}: nothing was raised"

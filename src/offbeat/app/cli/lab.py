"""`offbeat lab`"""

import shutil
import sys
import time
from typing import Annotated

import typer

from offbeat.app.cli import options, show
from offbeat.app.cli.refusal import Refused, option, reading
from offbeat.base.checks import check_number
from offbeat.base.units import LONGEST
from offbeat.lab import Job, Lab, unavailable


def lab(
    command: Annotated[
        list[str], typer.Argument(help="After --: what runs on every host, as under torchrun.")
    ],
    workers: Annotated[int, typer.Option(help="How many hosts.")] = 4,
    rate: Annotated[
        str | None, typer.Option(help="Of every link, such as 100mbit; unshaped by default.")
    ] = None,
    timeout: Annotated[float | None, typer.Option(help="Seconds after which everything is ended.")] = None,
    json: options.Json = False,
) -> int:
    """Run a command on a cluster of network namespaces with shaped links (Linux, root).

    Each host has an interface of its own and runs the command once, with the environment that torchrun would
    give it. What rank 0 prints is shown as it comes. At the end the bytes that the kernel counted are
    printed, and nothing of the cluster is left, whatever way the command ends.

    Examples:

        sudo offbeat lab --workers 4 --rate 100mbit -- python my_train.py

        sudo offbeat lab --workers 2 --json -- python -m offbeat train 'local_sgd(every=8)' --steps 100
    """
    with reading():
        if reason := unavailable():
            raise Refused(reason)
        if shutil.which(command[0]) is None:
            raise Refused(f"There is no command {command[0]!r} to run.")
        with option("--workers", workers):
            Lab(workers)
        with option("--rate", rate):
            cluster = Lab(workers, rate=rate)
        if timeout is not None:
            check_number("timeout", timeout, LONGEST, "a positive number of seconds")
    with cluster:
        job = cluster.start(command)
        ended = _follow(job, quiet=json, timeout=timeout)
        if not ended:
            job.kill()
        runs = job.wait()
    for run in runs:
        if run.returncode and run.stderr.strip():
            last = run.stderr.strip().rpartition("\n")[2]
            print(f"offbeat: rank {run.rank} ended with {run.returncode}: {last}", file=sys.stderr)
    if not ended:
        print(f"offbeat: ended after {timeout:g} s, as --timeout asked", file=sys.stderr)
    fields = ("rank", "returncode", "seconds", "sent", "received")
    if json:
        show.as_json([{field: getattr(run, field) for field in fields} for run in runs])
    else:
        figures = [
            [str(run.rank), str(run.returncode), f"{run.seconds:.2f}", f"{run.sent:,}", f"{run.received:,}"]
            for run in runs
        ]
        headings = dict.fromkeys(["rank", "exit code", "seconds", "bytes sent", "bytes received"], "right")
        show.print_table(show.console(), f"{cluster!r}, as the kernel counted", headings, figures)
    return 0 if ended and not any(run.returncode for run in runs) else 1


def _follow(job: Job, *, quiet: bool, timeout: float | None) -> bool:
    """Print what rank 0 prints until all have ended; False if the time was up first."""
    shown, start = 0, time.monotonic()
    while True:
        running = bool(job.running)
        text = job.stdout(rank=0)
        if not quiet:
            print(text[shown:], end="", flush=True)
        shown = len(text)
        if not running:
            return True
        if timeout is not None and time.monotonic() - start > timeout:
            return False
        time.sleep(0.1)

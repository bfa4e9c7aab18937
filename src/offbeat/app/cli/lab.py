"""`offbeat lab`"""

import math
import shutil
import sys
import time
from typing import Annotated

import typer

from offbeat.app.cli import options, show
from offbeat.base.checks import check_number
from offbeat.base.units import LONGEST
from offbeat.lab import Job, Lab, unavailable


def lab(
    command: Annotated[list[str], typer.Argument(help="After --: the command to run on every host.")],
    workers: Annotated[int, typer.Option(help="Number of hosts.")] = 4,
    rate: Annotated[
        str | None, typer.Option(help="Rate of every link, such as 100mbit; unlimited by default.")
    ] = None,
    timeout: Annotated[float | None, typer.Option(help="End everything after this many seconds.")] = None,
    json: options.Json = False,
) -> int:
    """Run a command on a cluster of network namespaces with shaped links (Linux, root).

    Each host has its own network interface and runs the command once, with the environment that torchrun
    would set. The output of rank 0 is shown live. At the end the command prints the bytes that the kernel
    counted, and removes the cluster, however the run ended.

    Examples:

        sudo offbeat lab --workers 4 --rate 100mbit -- python my_train.py

        sudo offbeat lab --workers 2 --json -- python -m offbeat train 'local_sgd(every=8)' --steps 100
    """
    with options.reading():
        if reason := unavailable():
            raise options.Refused(reason)
        if shutil.which(command[0]) is None:
            raise options.Refused(f"The command {command[0]!r} does not exist.")
        cluster = Lab(workers, rate=rate)
        if timeout is not None:
            check_number("timeout", timeout, LONGEST, "a positive number of seconds")
    with cluster:
        job = cluster.start(command)
        if not (ended := _follow(job, quiet=json, timeout=timeout)):
            job.kill()
        runs = job.wait()
    for run in runs:
        if run.returncode and run.stderr.strip():
            last = run.stderr.strip().rpartition("\n")[2]
            print(f"offbeat: rank {run.rank} ended with {run.returncode}: {last}", file=sys.stderr)
    if not ended:
        print(f"offbeat: ended after {timeout:g} s (--timeout)", file=sys.stderr)
    fields = ("rank", "returncode", "seconds", "sent", "received")
    rows = [{field: getattr(run, field) for field in fields} for run in runs]
    if json:
        show.print_json(rows)
    else:
        columns = dict.fromkeys(["rank", "exit code", "seconds", "bytes sent", "bytes received"], "right")
        row = "{rank}|{returncode}|{seconds:.2f}|{sent:,}|{received:,}"
        cells = [row.format(**values).split("|") for values in rows]
        show.print_table(show.console(), f"{cluster!r}, as the kernel counted", columns, cells)
    return 0 if ended and not any(run.returncode for run in runs) else 1


def _follow(job: Job, *, quiet: bool, timeout: float | None) -> bool:
    """Print the output of rank 0 until all hosts have ended; False after a timeout."""
    shown, deadline = 0, time.monotonic() + (math.inf if timeout is None else timeout)
    while True:
        running = bool(job.running)
        text = job.stdout(rank=0)
        if not quiet:
            print(text[shown:], end="", flush=True)
        shown = len(text)
        if not running or time.monotonic() > deadline:
            return not running
        time.sleep(0.1)

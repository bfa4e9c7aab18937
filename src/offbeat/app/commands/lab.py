"""`offbeat lab`"""

import math
import os
import shutil
import sys
import time
from collections.abc import Sequence
from types import SimpleNamespace

from offbeat.app.cli.options import Refused, plain, reading
from offbeat.app.commands import show
from offbeat.base.checks import check_number
from offbeat.base.errors import BadArgument
from offbeat.base.units import LONGEST, parse_link
from offbeat.lab import Job, Lab, Run, unavailable
from offbeat.lab.signals import collect_signals

LAST = 40  # lines of standard error of a host that failed


def run(given: SimpleNamespace) -> int:
    """Build the cluster, run the command on every host, and print what the kernel has counted."""
    with reading():
        if reason := unavailable():
            raise Refused(reason)
        if shutil.which(given.command[0]) is None:
            raise Refused(f"The command {given.command[0]!r} does not exist.")
        if given.link is not None and parse_link(given.link).latency:
            reason = "the links of a lab have a rate and no latency; `offbeat compare --link` emulates both."
            raise BadArgument("link", given.link, reason)
        cluster = Lab(given.workers, rate=given.link and given.link.partition(",")[0].strip())
        if given.timeout is not None:
            check_number("timeout", given.timeout, LONGEST, "a positive number of seconds")
    with collect_signals() as caught, cluster:
        # torch would warn that the names of the hosts cannot be looked up.
        level = {"TORCH_CPP_LOG_LEVEL": os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR")}
        job = cluster.start(given.command, env=level)
        if not (ended := _follow(job, caught, quiet=given.json, timeout=given.timeout)):
            job.kill()
        runs = job.wait()
    if caught and not ended:
        print("offbeat: stopped", file=sys.stderr)
        return 128 + caught[0]
    _show_errors(runs, seen=() if given.json else (0,))
    if not ended:
        print(f"offbeat: ended after {given.timeout:g} s (--timeout)", file=sys.stderr)
    fields = ("rank", "returncode", "seconds", "sent", "received")
    rows = [{field: getattr(run, field) for field in fields} for run in runs]
    if given.json:
        show.print_json(rows)
    else:
        columns = dict.fromkeys(["rank", "exit code", "seconds", "bytes sent", "bytes received"], "right")
        row = "{rank}|{returncode}|{seconds:.2f}|{sent:,}|{received:,}"
        cells = [row.format(**values).split("|") for values in rows]
        show.print_table(show.console(), f"{cluster!r}, as the kernel counted", columns, cells)
    return 0 if ended and not any(run.returncode for run in runs) else 1


def _show_errors(runs: Sequence[Run], *, seen: Sequence[int]) -> None:
    """Print the standard error of the first host that failed, unless it was seen, and the last of all."""
    failed = [run for run in runs if run.returncode and run.stderr.strip()]
    for place, run in enumerate(failed):
        lines = run.stderr.strip().splitlines()
        if place == 0 and run.rank not in seen:
            for line in lines[-LAST:]:
                print(plain(f"rank {run.rank}: {line}"), file=sys.stderr)
        print(plain(f"offbeat: rank {run.rank} ended with {run.returncode}: {lines[-1]}"), file=sys.stderr)


def _follow(job: Job, caught: Sequence[int], *, quiet: bool, timeout: float | None) -> bool:
    """Print the output of rank 0 until all hosts have ended; False after a timeout or a signal."""
    shown, deadline = [0, 0], time.monotonic() + (math.inf if timeout is None else timeout)
    while True:
        running = bool(job.running)
        for place, (read, stream) in enumerate([(job.stdout, sys.stdout), (job.stderr, sys.stderr)]):
            text = "" if quiet else read(rank=0)
            print(text[shown[place] :], end="", flush=True, file=stream)
            shown[place] = len(text)
        if not running or caught or time.monotonic() > deadline:
            return not running
        time.sleep(0.1)

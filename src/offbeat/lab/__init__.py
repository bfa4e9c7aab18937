"""A cluster on one Linux machine: hosts in network namespaces, on links with the rate you choose.

    >>> import sys
    >>> from offbeat.lab import Lab
    >>> with Lab(2, rate="100mbit") as lab:
    ...     runs = lab.run([sys.executable, "-c", "import os; print(os.environ['RANK'])"], timeout=60)
    >>> [run.stdout.strip() for run in runs]
    ['0', '1']

Each host sees its own loopback, one interface and the other hosts; no traffic leaves the lab. The command
runs once per host, as torchrun would run it with one worker per node. The kernel counts each host's bytes.

You can inject faults while a job runs: `job.kill(rank=2)`, `job.delay(rank=1, seconds=0.5)`. The end of the
`with` block, even by Ctrl-C or SIGTERM, removes all processes and namespaces; after a SIGKILL, the next lab
does. A lab needs Linux, root and iproute2 (`ip` and `tc`); `unavailable()` says what is missing.
"""

from offbeat.base.units import parse_rate

from .job import Job, Run
from .lab import Lab
from .network import unavailable

__all__ = ["Job", "Lab", "Run", "parse_rate", "unavailable"]

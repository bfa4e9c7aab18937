"""A cluster on one Linux box: hosts in network namespaces, on links as slow as you like.

    >>> import sys
    >>> from offbeat.lab import Lab
    >>> with Lab(2, rate="100mbit") as lab:
    ...     runs = lab.run([sys.executable, "-c", "import os; print(os.environ['RANK'])"], timeout=60)
    >>> [run.stdout.strip() for run in runs]
    ['0', '1']

Each host sees one interface, its own loopback and the other hosts, and nothing else: no traffic leaves the
lab. The command runs once per host, as torchrun would run it with one worker per node. What each host sent
and received is what the kernel counted on its interface.

A job takes faults while it runs: `job.kill(rank=2)`, `job.delay(rank=1, seconds=0.5)`. Whatever way the
`with` block ends, also by Ctrl-C or SIGTERM, processes and namespaces are gone afterwards. What a lab that
SIGKILL ended has left behind goes when the next one opens.

A lab needs Linux, root and iproute2 (`ip` and `tc`); `unavailable()` says which of them is missing.
"""

from offbeat.base.units import parse_rate

from .job import Job, Run
from .lab import Lab
from .network import unavailable

__all__ = ["Job", "Lab", "Run", "parse_rate", "unavailable"]

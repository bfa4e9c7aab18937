"""`offbeat lab`"""

from types import SimpleNamespace
from typing import Annotated

import typer

from offbeat.app.cli import options


def lab(
    command: Annotated[list[str], typer.Argument(help="After --: the command to run on every host.")],
    workers: Annotated[int, typer.Option(help="Number of hosts.")] = 4,
    link: Annotated[
        str | None,
        typer.Option("--link", "--rate", help="Rate of every link, such as 100mbit; unlimited by default."),
    ] = None,
    timeout: Annotated[float | None, typer.Option(help="End everything after this many seconds.")] = None,
    json: options.Json = False,
) -> int:
    """Run a command on a cluster of network namespaces with shaped links (Linux, root).

    Each host has its own network interface and runs the command once, with the environment that torchrun
    would set. The output and errors of rank 0 are shown live. At the end the command prints the bytes that
    the kernel counted, and removes the cluster, however the run ended.

    Examples:

        sudo offbeat lab --workers 4 --link 100mbit -- python my_train.py

        sudo offbeat lab --workers 2 --json -- python -m offbeat train 'local_sgd(every=8)' --steps 100
    """
    given = SimpleNamespace(**locals())
    from offbeat.app.commands.lab import run

    return run(given)

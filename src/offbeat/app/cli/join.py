"""`offbeat join`"""

from typing import Annotated

import typer

from offbeat.app.cli import options


def join(
    url: Annotated[str, typer.Argument(help="The address that `offbeat train --elastic` has printed.")],
    token: options.Token = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Do not say which worker this is.")] = False,
    tied: Annotated[bool, typer.Option("--tied", hidden=True)] = False,
    load: Annotated[bool, typer.Option("--load", hidden=True)] = False,
) -> int:
    """Join an elastic run as one more worker.

    The worker receives the state of the others, takes a free part of the data, and trains until the run ends.
    It may be killed at any moment.

    Examples:

        offbeat train 'diloco(every=16)' --elastic --workers 2:4

        offbeat join http://127.0.0.1:29510/home/me/runs/mine
    """
    from offbeat.app.commands.elastic import join

    return join(url, token=token, quiet=quiet, tied=tied, load=load)

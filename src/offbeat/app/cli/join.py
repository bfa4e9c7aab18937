"""`offbeat join`"""

from typing import Annotated

import typer


def join(
    url: Annotated[str, typer.Argument(help="The address that `offbeat train --elastic` has printed.")],
    quiet: Annotated[bool, typer.Option("--quiet", help="Do not say which worker this is.")] = False,
    tied: Annotated[bool, typer.Option("--tied", hidden=True)] = False,
) -> int:
    """Join an elastic run as one more worker.

    The worker receives the state of the others, takes a free part of the data, and trains until the run ends.
    It may be killed at any moment.

    Examples:

        offbeat train 'diloco(every=16)' --elastic --workers 2:4

        offbeat join http://127.0.0.1:29510/home/me/runs/mine
    """
    from offbeat.app.commands.elastic import join

    return join(url, quiet=quiet, tied=tied)

"""`offbeat methods`"""

from types import SimpleNamespace
from typing import Annotated

import typer

from offbeat.app.cli import options


def methods(
    name: Annotated[
        str | None, typer.Argument(help="Show this method.", autocompletion=options.complete_name)
    ] = None,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="Show the parts of each method, its bytes and its memory.")
    ] = False,
    json: options.Json = False,
) -> int:
    """List the methods by family, or explain one: rule, arguments, costs, losses, when to use it.

    With --verbose or --json, each row is the example in a method's documentation. Bytes per step are relative
    to ddp. Memory is in copies of the model and includes messages in flight, but not the model, its
    gradients and the optimizer. Both are computed as in `offbeat plan`, after the warm-up, for 124 M
    parameters in float32 on eight workers. This takes a few seconds.

    Examples:

        offbeat methods

        offbeat methods diloco

        offbeat methods --verbose
    """
    given = SimpleNamespace(**locals())
    from offbeat.app.commands.methods import run

    return run(given)

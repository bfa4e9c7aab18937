"""`offbeat init`"""

from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Literal

import typer


def init(
    what: Annotated[Literal["task"], typer.Argument(help="task: a file with your own model and data.")],
    file: Annotated[Path, typer.Argument(help="The file to write.")] = Path("task.py"),
) -> int:
    """Write a commented Python file to start from. It runs as it is.

    Examples:

        offbeat init task

        offbeat train 'diloco(every=16)' --task task.py --workers 2
    """
    given = SimpleNamespace(**locals())
    from offbeat.app.commands.init import run

    return run(given)

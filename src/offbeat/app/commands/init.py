"""`offbeat init`"""

from importlib.resources import files
from types import SimpleNamespace

from offbeat.app.cli.options import Refused, plain, reading
from offbeat.base.errors import BadArgument


def run(given: SimpleNamespace) -> int:
    """Write the template, never over a file that is there."""
    with reading():
        if given.file.suffix != ".py":
            raise BadArgument("file", str(given.file), "name a file that ends in .py.")
        try:
            with given.file.open("x") as file:
                file.write((files("offbeat.app.commands") / "task.txt").read_text())
        except FileExistsError:
            raise Refused(f"{str(given.file)!r} exists already: name another file.") from None
    print(plain(f"wrote {given.file}; try it with"))
    print(plain(f"    offbeat train 'diloco(every=16)' --task {given.file} --workers 2 --steps 200"))
    return 0

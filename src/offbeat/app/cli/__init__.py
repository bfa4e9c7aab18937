"""The command line. It is an extra: the library itself needs torch alone."""

import atexit
import os
import sys


def main() -> None:
    """What `offbeat` runs."""
    try:
        import rich  # noqa: F401
        import typer  # noqa: F401
    except ImportError:
        print("offbeat: the command line is an extra: pip install 'offbeat[cli]'", file=sys.stderr)
        sys.exit(2)
    from offbeat.app.cli.app import run

    code = run(sys.argv[1:])
    if code == 130:  # workers of a simulation may be anywhere, and would abort an orderly exit
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)

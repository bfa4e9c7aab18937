"""The command line. It is an extra: the library needs only torch."""

import atexit
import os
import signal
import sys

from offbeat.app.cli.interrupt import end_at_once


def main() -> None:
    """The entry point of `offbeat`."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not in a background job of a shell
        signal.signal(signal.SIGINT, end_at_once)
    try:
        import rich  # noqa: F401
        import typer  # noqa: F401
    except ImportError:
        sys.stderr.write("offbeat: the command line is an extra: pip install 'offbeat[cli]'\n")
        sys.exit(2)
    from offbeat.app.cli.app import run

    code = run(sys.argv[1:])
    if code == 130:  # threads of a simulation may still run, and would abort a normal exit
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)

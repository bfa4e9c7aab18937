"""The command line. It is an extra: the library needs only torch."""

# As little as possible is imported before `main` takes over Ctrl-C, which Python answers with a traceback.
import os
import signal
import sys


def end_at_once(*_: object) -> None:
    """Answer Ctrl-C while there is nothing to clean up: one line, the terminal's cursor, and the end."""
    os.write(2, b"\x1b[?25h\noffbeat: stopped\n" if os.isatty(2) else b"offbeat: stopped\n")
    os._exit(130)


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
        import atexit

        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)

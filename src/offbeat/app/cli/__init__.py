"""The command line. It is an extra: the library needs only torch."""

# As little as possible is imported before `main` takes over Ctrl-C, which Python answers with a traceback.
import os
import signal
import sys

_farewell = ["offbeat: stopped"]  # the last one is said


def end_at_once(*_: object) -> None:
    """Answer Ctrl-C while there is nothing to clean up: one line, the terminal's cursor, and the end.

    No exception is raised, which an import or a destructor might swallow.
    """
    if os.environ.get("RANK", "0") == "0":  # all ranks of torchrun get the signal
        line = f"{_farewell[-1]}\n".encode(errors="replace")
        os.write(2, b"\x1b[?25h\n" + line if os.isatty(2) else line)
    os._exit(130)


class saying:
    """Within the block, Ctrl-C that ends the process at once says more."""

    def __init__(self, words: str) -> None:
        self.words = f"offbeat: {words}"

    def __enter__(self) -> None:
        _farewell.append(self.words)

    def __exit__(self, *error: object) -> None:
        _farewell.pop()


def main() -> None:
    """The entry point of `offbeat`."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not in a background job of a shell
        signal.signal(signal.SIGINT, end_at_once)
    try:
        import rich  # noqa: F401
        import typer  # noqa: F401
    except ImportError:
        remedy = "pip install -c constraints.txt '.[cli]' in Offbeat's folder"
        sys.stderr.write(f"offbeat: the command line is an extra: {remedy}\n")
        sys.exit(2)
    from offbeat.app.cli.app import run

    code = run(sys.argv[1:])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # all is done and said
    sys.exit(code)

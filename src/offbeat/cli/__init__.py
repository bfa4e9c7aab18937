"""The command line. It is an extra: the library itself needs torch alone."""

import sys


def main() -> None:
    """What `offbeat` runs."""
    try:
        import rich  # noqa: F401
        import typer  # noqa: F401
    except ImportError:
        print("offbeat: the command line is an extra: pip install 'offbeat[cli]'", file=sys.stderr)
        sys.exit(2)
    from offbeat.cli.app import run

    sys.exit(run(sys.argv[1:]))

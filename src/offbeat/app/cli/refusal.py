"""Bad input: one sentence, and exit code 2."""

from collections.abc import Iterator
from contextlib import contextmanager

from offbeat.base.errors import BadArgument, show

OPTIONS = {"size": "model", "hosts": "workers", "per_hour": "failures"}  # arguments with other options


class Refused(Exception):
    """The user's input cannot be used. The message is one sentence."""


@contextmanager
def reading() -> Iterator[None]:
    """Turn errors about the user's input into `Refused`."""
    try:
        yield
    except BadArgument as error:
        name = OPTIONS.get(error.name, error.name).replace("_", "-")
        raise Refused(f"--{name} {show(error.value)}: {error.reason}") from error
    except (ValueError, TypeError) as error:
        raise Refused(str(error)) from error
    except OSError as error:
        where = f" {error.filename!r}" if error.filename else ""
        raise Refused(f"{error.strerror or error}:{where}.") from error


@contextmanager
def option(name: str, given: object) -> Iterator[None]:
    """Turn an error about one option into a `Refused` that repeats the option as it was typed."""
    try:
        yield
    except (ValueError, TypeError) as error:
        reason = error.reason if isinstance(error, BadArgument) else str(error)
        raise Refused(f"{name} {show(given)}: {reason}") from error

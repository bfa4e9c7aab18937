"""Bad input: one sentence, and exit code 2."""

from collections.abc import Iterator
from contextlib import contextmanager


class Refused(Exception):
    """What the user gave cannot be used, in one sentence."""


@contextmanager
def reading() -> Iterator[None]:
    """Around the reading of what the user gave: errors inside are theirs, and are told in a sentence."""
    try:
        yield
    except (ValueError, TypeError) as error:
        raise Refused(str(error)) from error
    except OSError as error:
        where = f" {error.filename!r}" if error.filename else ""
        raise Refused(f"{error.strerror or error}:{where}.") from error


@contextmanager
def option(name: str, given: object) -> Iterator[None]:
    """Around the reading of one option: a refusal begins with the option as it was typed."""
    try:
        yield
    except (ValueError, TypeError) as error:
        call, _, reason = str(error).partition(": ")
        # Most sentences begin with the call and its values, which the user has not written.
        told = reason if reason and (str(given) in call or call.endswith(")")) else str(error)
        raise Refused(f"{name} {given}: {told}") from error

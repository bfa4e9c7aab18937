"""Bad input: one sentence, and exit code 2."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

from offbeat.base.errors import BadArgument, show


class Refused(Exception):
    """What the user gave cannot be used, in one sentence."""


@contextmanager
def reading() -> Iterator[None]:
    """Around the reading of what the user gave: errors inside are theirs, and are told in a sentence."""
    try:
        yield
    except BadArgument as error:
        raise Refused(f"--{error.name.replace('_', '-')} {show(error.value)}: {error.reason}") from error
    except (ValueError, TypeError) as error:
        raise Refused(_as_options(str(error))) from error
    except OSError as error:
        where = f" {error.filename!r}" if error.filename else ""
        raise Refused(f"{error.strerror or error}:{where}.") from error


_TASK = re.compile(r"^(?:\w+_task|batches)\((size|data|workers)='?([^')]*)'?\): ")
_OPTIONS = {"size": "--model", "data": "--data", "workers": "--workers"}


def _as_options(sentence: str) -> str:
    """What the arguments of tasks are called on the command line."""
    return _TASK.sub(lambda found: f"{_OPTIONS[found[1]]} {found[2]}: ", sentence)


@contextmanager
def option(name: str, given: object) -> Iterator[None]:
    """Around the reading of one option: a refusal begins with the option as it was typed."""
    try:
        yield
    except BadArgument as error:
        raise Refused(f"{name} {show(given)}: {error.reason}") from error
    except (ValueError, TypeError) as error:
        call, _, reason = str(error).partition(": ")
        # Most sentences begin with the call and its values, which the user has not written.
        told = reason if reason and (str(given) in call or call.endswith(")")) else str(error)
        raise Refused(f"{name} {show(given)}: {told}") from error

"""Random numbers that are functions of what they are for, so that there is no random state to lose."""

from __future__ import annotations

import hashlib


def whole(*key: object) -> int:
    """A number below 2⁶⁴ from a seed, a step or round, and a name; the same everywhere."""
    return int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=8).digest(), "little")


def uniform(*key: object) -> float:
    """A number in [0, 1)."""
    return (whole(*key) >> 11) * 2.0**-53


def shuffled(length: int, *key: object) -> list[int]:
    """The numbers below `length` in random order."""
    return sorted(range(length), key=lambda i: whole(*key, i))

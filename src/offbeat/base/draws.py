"""Random numbers as pure functions of a key: equal on all workers, with no generator state to save."""

from __future__ import annotations

import hashlib
from functools import lru_cache

import torch
from torch import Tensor


def draw_whole(*key: object) -> int:
    """Return a whole number below 2⁶⁴ that depends on the key: a seed, a step or round, and a name."""
    return int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=8).digest(), "little")


def uniform(*key: object) -> float:
    """Return a number in [0, 1)."""
    return (draw_whole(*key) >> 11) * 2.0**-53


@lru_cache(maxsize=8, typed=True)
def draw_order(length: int, *key: object) -> tuple[int, ...]:
    """Return the numbers below `length` in a random order, sorted by draw_whole(*key, i)."""
    # The prefix that all keys share is hashed once.
    start = hashlib.blake2b(repr(key).removesuffix(")").removesuffix(",").encode() + b", ", digest_size=8)

    def draw(i: int) -> int:
        own = start.copy()
        own.update(b"%d)" % i)
        return int.from_bytes(own.digest(), "little")

    return tuple(sorted(range(length), key=draw))


def uniforms(these: Tensor, those: Tensor, *key: object) -> Tensor:
    """Return numbers in (0, 1), one for each pair of whole numbers after broadcasting."""
    bits = _mix(_mix(these * _ODD + _signed(draw_whole(*key))) + those)
    return bits.bitwise_right_shift_(11).bitwise_and_(2**53 - 1).double().add_(0.5).mul_(2.0**-53)


def _mix(x: Tensor) -> Tensor:
    """Mix the bits of 64-bit numbers in place with SplitMix64's finalizer. Products wrap around."""
    x.add_(_signed(0x9E3779B97F4A7C15))
    shifted = torch.empty_like(x)
    for shift, factor in _ROUNDS:
        # The shift copies the sign bit in from the left; the mask removes those copies.
        torch.bitwise_right_shift(x, shift, out=shifted)
        x.bitwise_xor_(shifted.bitwise_and_(2 ** (64 - shift) - 1))
        if factor:
            x.mul_(factor)
    return x


def _signed(number: int) -> int:
    return number - 2**64 if number >= 2**63 else number


_ODD = _signed(0xD1342543DE82EF95)  # spreads neighbouring ranks over all bits
_ROUNDS = ((30, _signed(0xBF58476D1CE4E5B9)), (27, _signed(0x94D049BB133111EB)), (31, 0))

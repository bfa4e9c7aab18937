"""Rates as `tc` writes them."""

import re
from decimal import Decimal

_THOUSANDS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_SCALES = _THOUSANDS | {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def parse_rate(rate: str) -> int:
    """Bits per second of a rate in the units of `tc`.

    `kbit mbit gbit tbit` count bits in thousands, `kbps mbps gbps tbps` bytes in thousands, and `kibit`,
    `kibps` and so on count in 1024s. A bare number is bits. Upper and lower case are alike.

        >>> parse_rate("100mbit")
        100000000
        >>> parse_rate("1.5kbps")
        12000
    """
    if not isinstance(rate, str):
        raise TypeError(f"rate={rate!r}: a rate is text, such as '100mbit'.")
    match = re.fullmatch(r"([0-9]+\.?[0-9]*|\.[0-9]+)(?:(|[kmgt]i?)(bit|bps))?", rate.lower())
    if match is None:
        raise ValueError(
            f"rate={rate!r}: a rate is a number and a unit of tc, such as '100mbit', or '12.5mbps' in bytes."
        )
    number, scale, unit = match.groups()
    bits = round(Decimal(number) * _SCALES[scale or ""] * (8 if unit == "bps" else 1))
    if bits < 1:
        raise ValueError(f"rate={rate!r}: a rate must be at least 1bit.")
    return bits

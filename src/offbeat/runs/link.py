"""Links as one types them: 100mbit, or 100mbit,20ms."""

import re
from dataclasses import dataclass

from offbeat.lab import parse_rate


@dataclass(frozen=True)
class Link:
    """Bytes per second each way, and seconds per hop."""

    rate: float
    latency: float = 0.0


def parse_link(text: str) -> Link:
    """The link that text such as `100mbit` or `100mbit,20ms` describes.

    >>> parse_link("100mbit,20ms")
    Link(rate=12500000.0, latency=0.02)
    """
    rate, comma, latency = text.partition(",")
    try:
        bits = parse_rate(rate.strip())
    except ValueError:
        raise ValueError(
            f"--link {text!r}: a link is a rate and perhaps a latency, such as 100mbit or 100mbit,20ms."
        ) from None
    return Link(bits / 8, parse_seconds(f"--link {text!r}", latency) if comma else 0.0)


def parse_seconds(call: str, text: str) -> float:
    """Seconds of `20ms`, `0.5s` or `0.5`."""
    match = re.fullmatch(r"\s*([0-9]+\.?[0-9]*|\.[0-9]+)\s*(us|ms|s)?\s*", text)
    if match is None:
        raise ValueError(f"{call}: {text!r} is no time; write it as 20ms or 0.5s.")
    return float(match[1]) * {"us": 1e-6, "ms": 1e-3, "s": 1.0, None: 1.0}[match[2]]

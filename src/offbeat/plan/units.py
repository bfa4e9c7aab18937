"""Figures as people type them: 124M, 100mbit, 20ms."""

from __future__ import annotations

import re

from offbeat.lab import parse_rate
from offbeat.simulate import Level

_COUNTS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9, "t": 10**12}
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "": 1.0}


def parse_count(text: str) -> int:
    """A whole number such as 350000, 124M or 1.3B."""
    found = re.fullmatch(r"\s*([\d_.]+)\s*([a-zA-Z]?)\s*", text)
    if found and found[2].lower() in _COUNTS and found[1].count(".") <= 1 and found[1].strip("._"):
        return round(float(found[1].replace("_", "")) * _COUNTS[found[2].lower()])
    raise ValueError(f"{text!r} is no number: write 350000, 124M or 1.3B.")


def parse_seconds(text: str) -> float:
    """A time such as 0.25, 20ms, 5us, 10min or 2h."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d*)?(?:e-?\d+)?|\.\d+)\s*([a-z]*)\s*", text)
    if found and found[2] in _SECONDS:
        return float(found[1]) * _SECONDS[found[2]]
    raise ValueError(f"{text!r} is no time: write 0.25, 20ms, 5us, 10min or 2h.")


def parse_link(text: str) -> tuple[float, float]:
    """Bytes per second and seconds of latency, from a link such as 100mbit or 100mbit,20ms."""
    rate, _, latency = text.partition(",")
    return parse_rate(rate.strip()) / 8, parse_seconds(latency) if latency else 0.0


def parse_level(text: str) -> Level:
    """Groups that share an uplink, such as 8:100gbit,5us."""
    workers, _, link = text.partition(":")
    if not workers.strip().isdigit() or not link:
        raise ValueError(
            f"{text!r} is no level: write the workers in a group and their uplink, 8:100gbit,5us."
        )
    bandwidth, latency = parse_link(link)
    return Level(int(workers), bandwidth, latency)


def as_rate(bandwidth: float) -> str:
    """Bytes per second as a link is sold."""
    bits = bandwidth * 8
    for unit, size in (("Tbit/s", 1e12), ("Gbit/s", 1e9), ("Mbit/s", 1e6), ("kbit/s", 1e3)):
        if bits >= size:
            return f"{bits / size:.3g} {unit}"
    return f"{bits:.3g} bit/s"


def as_time(seconds: float) -> str:
    """Seconds in the unit in which one would say them."""
    for unit, size in (("d", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.3g} s"


def as_bytes(number: float) -> str:
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number:.0f} B"

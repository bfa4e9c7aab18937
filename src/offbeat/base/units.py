"""Numbers with units, as people type them: 124M, 100mbit, 20ms, share=0.1,delay=300ms."""

import re
from dataclasses import dataclass
from decimal import Decimal

from offbeat.base.draws import uniform
from offbeat.base.errors import BadArgument, show

LONGEST = 365 * 24 * 3600.0  # seconds
FASTEST = 10**15  # bits per second
MOST = 10**15  # of anything counted with a unit

_NUMBER = r"[0-9]{1,300}(?:\.[0-9]{0,300})?|\.[0-9]{1,300}"
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "": 1.0}
_THOUSANDS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_COUNTS = _THOUSANDS | {"b": 10**9}
_BITS = _THOUSANDS | {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}

_STRAGGLER = "write rank=1,delay=300ms,every=4 for one worker, or share=0.1,delay=300ms for any"


@dataclass(frozen=True)
class Link:
    """Bytes per second each way, and seconds per hop."""

    rate: float
    latency: float = 0.0


@dataclass(frozen=True)
class Straggler:
    """`delay` extra seconds for every `every`-th step of `rank`, or for any step with probability `share`."""

    delay: float
    rank: int | None = None
    every: int = 1
    share: float | None = None
    seed: int = 0

    def seconds(self, rank: int, step: int) -> float:
        """Return the delay of a rank in the step after `step` completed ones."""
        if self.share is not None:
            return self.delay if uniform(self.seed, step, f"straggler/{rank}") < self.share else 0.0
        return self.delay if rank == self.rank and (step + 1) % self.every == 0 else 0.0


def parse_seconds(text: str, name: str = "time", *, within: str | None = None) -> float:
    """A time in seconds. If the time is part of a longer text, an error quotes both.

    >>> parse_seconds("20ms"), parse_seconds("2h"), parse_seconds("0.25")
    (0.02, 7200.0, 0.25)
    """
    reason = "a time is a number and perhaps a unit, such as 0.25, 5us, 20ms, 0.5s, 10min or 2h."
    match = re.fullmatch(rf"\s*((?:{_NUMBER})(?:e[+-]?[0-9]{{1,4}})?)\s*([a-z]*)\s*", text)
    if match is not None and match[2] in _SECONDS:
        seconds = float(match[1]) * _SECONDS[match[2]]
        if seconds <= LONGEST:
            return seconds
        reason = "a time must be at most a year, 8760h."
    raise BadArgument(name, within or text, f"{show(text)}: {reason}" if within else reason)


def parse_count(text: str, name: str = "count") -> int:
    """A whole number.

    >>> parse_count("350_000"), parse_count("1.3B")
    (350000, 1300000000)
    """
    match = re.fullmatch(rf"\s*({_NUMBER})\s*([a-zA-Z]?)\s*", text.replace("_", ""))
    if match is None or match[2].lower() not in _COUNTS:
        raise BadArgument(name, text, "a count is a number and perhaps a unit, such as 350000, 124M or 1.3B.")
    count = round(Decimal(match[1]) * _COUNTS[match[2].lower()])
    if count > MOST:
        raise BadArgument(name, text, "a count must be at most 1000T.")
    return count


def parse_rate(text: str, name: str = "rate") -> int:
    """A rate in bits per second, from the units of `tc`.

    `kbit mbit gbit tbit` are multiples of 1000 bits, `kbps mbps gbps tbps` multiples of 1000 bytes; `kibit`,
    `kibps` and so on are multiples of 1024. A number without a unit means bits, and must be at
    least 1000: a smaller one is a forgotten unit. Case does not matter.

    >>> parse_rate("100mbit"), parse_rate("1.5kbps")
    (100000000, 12000)
    """
    if not isinstance(text, str):
        raise TypeError(f"{name}={text!r}: a rate is text, such as '100mbit'.")
    form = "a rate is a number and a unit of tc, such as '100mbit', or '12.5mbps' in bytes."
    return _parse_bits(text, name, text, form)


def parse_link(text: str, name: str = "link", *, within: str | None = None) -> Link:
    """A rate and an optional latency per hop. If the link is part of a longer text, an error quotes that.

    A latency without a unit means seconds, and must be below 1: a larger one is a forgotten unit.

    >>> parse_link("100mbit,20ms")
    Link(rate=12500000.0, latency=0.02)
    """
    rate, comma, latency = text.partition(",")
    form = "a link is a rate and perhaps a latency, such as 100mbit or 100mbit,20ms."
    bits = _parse_bits(rate.strip(), name, within or text, form)
    seconds = parse_seconds(latency, name, within=within or text) if comma else 0.0
    if seconds >= 1 and latency.strip()[-1] in "0123456789.":
        plain = latency.strip()
        reason = f"a latency without a unit means seconds: write {plain}ms or {plain}s."
        raise BadArgument(name, within or text, reason)
    return Link(bits / 8, seconds)


def parse_level(text: str, name: str = "level") -> tuple[int, Link]:
    """The number of workers that share an uplink, and the uplink.

    >>> parse_level("8:100gbit,5us")
    (8, Link(rate=12500000000.0, latency=4.9999999999999996e-06))
    """
    match = re.fullmatch(r"\s*([0-9]{1,9})\s*:(.+)", text)
    if match is None:
        reason = "a level is the workers in a group and their uplink, such as 8:100gbit,5us."
        raise BadArgument(name, text, reason)
    return int(match[1]), parse_link(match[2], name, within=text)


def parse_straggler(text: str, name: str = "straggler", *, workers: int | None = None) -> Straggler:
    """One worker that is late at regular steps, or all workers late at random ones.

    >>> parse_straggler("rank=1,delay=300ms,every=4")
    Straggler(delay=0.3, rank=1, every=4, share=None, seed=0)
    """
    pairs = [item.partition("=")[::2] for item in text.replace(" ", "").split(",")]
    given = dict(pairs)
    whole = {key: given[key] for key in ("rank", "every", "seed") if key in given}
    known = given.keys() <= {"rank", "delay", "every", "share", "seed"} and len(given) == len(pairs)
    reason = ""
    if not known or "delay" not in given or ("rank" in given) == ("share" in given):
        reason = f"{_STRAGGLER}."
    elif any(not re.fullmatch(r"[0-9]{1,9}", value) for value in whole.values()):
        reason = f"{_STRAGGLER}; rank, every and seed are whole numbers."
    elif "share" in given and not re.fullmatch(_NUMBER, given["share"]):
        reason = f"{_STRAGGLER}; share is a number from 0 to 1."
    elif workers is not None and int(given.get("rank", 0)) >= workers:
        reason = f"the ranks are 0 to {workers - 1}."
    elif int(given.get("every", 1)) == 0 or float(given.get("share", 0)) > 1:
        reason = "every must be at least 1, and share between 0 and 1."
    if reason:
        raise BadArgument(name, text, reason)
    delay = parse_seconds(given["delay"], name, within=text)
    share = float(given["share"]) if "share" in given else None
    return Straggler(delay, share=share, **{key: int(value) for key, value in whole.items()})


def as_rate(bandwidth: float) -> str:
    """Write bytes per second as bits per second, in a readable unit."""
    return _scale(bandwidth * 8, {"Tbit/s": 1e12, "Gbit/s": 1e9, "Mbit/s": 1e6, "kbit/s": 1e3, "bit/s": 1.0})


def as_time(seconds: float) -> str:
    """Write seconds in a readable unit. Less than half a nanosecond is a rounding error, shown as 0."""
    if abs(seconds) < 5e-10:
        return "0 s"
    if _round(seconds / 60) >= 2:
        return _scale(seconds, {"y": 31_557_600.0, "d": 86400.0, "h": 3600.0, "min": 60.0}, least=2)
    return _scale(seconds, {"s": 1.0} if _round(seconds) >= 1e-3 else {"µs": 1e-6, "ns": 1e-9})


def as_bytes(number: float) -> str:
    units = {"TB": 1e12, "GB": 1e9, "MB": 1e6, "kB": 1e3, "B": 1.0}
    return _scale(number if number >= 1e3 else round(number), units)


def _scale(number: float, units: dict[str, float], *, least: float = 1) -> str:
    """Write three digits, no exponent, in the first unit that gives `least` or more, or in the last."""
    scaled = [(number / size, unit) for unit, size in units.items()]
    value, unit = next((pair for pair in scaled if _round(pair[0]) >= least), scaled[-1])
    return f"{value:,.0f} {unit}" if value >= 999.5 else f"{Decimal(f'{value:.3g}'):f} {unit}"


def _round(number: float) -> float:
    """Round to three digits, as printed: 999.9 of a unit is 1 of the next."""
    return float(f"{number:.3g}")


def _parse_bits(rate: str, name: str, text: str, form: str) -> int:
    """Return bits per second. An error quotes the whole text and shows its form."""
    match = re.fullmatch(rf"({_NUMBER})(?:(|[kmgt]i?)(bit|bps))?", rate.lower(), re.ASCII)
    if match is None:
        raise BadArgument(name, text, form)
    bits = round(Decimal(match[1]) * _BITS[match[2] or ""] * (8 if match[3] == "bps" else 1))
    if match[3] is None and 0 < Decimal(match[1]) < 1000:
        reason = f"a number without a unit means bits per second: write {match[1]}mbit or {match[1]}gbit."
        raise BadArgument(name, text, reason)
    if not 1 <= bits <= FASTEST:
        raise BadArgument(name, text, "a rate must be from 1bit to 1000tbit.")
    return bits

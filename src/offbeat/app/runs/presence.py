"""Who was there in an elastic run: which workers were alive, and which of them counted in its rounds."""

from dataclasses import dataclass
from typing import Any

from offbeat.app.runs.schema import Entry
from offbeat.app.runs.summary import Logged


@dataclass(frozen=True)
class Presence:
    """One worker. A worker that is alive may still not count: it joins, or the others have gone on."""

    name: str
    alive: float  # share of the seconds since the first worker was there
    counted: float  # share of the rounds of the run
    rounds: list[bool]  # of all rounds, whether it counted


def list_presence(run: Logged) -> list[Presence]:
    """The workers of an elastic run, in the order of their seats; empty for any other run."""
    if "elastic" not in run.origin:
        return []
    own = [{(e["begun_after"], e["round"]): e for e in rank if e["kind"] == "round"} for rank in run.ranks]
    rounds = sorted({key for rounds in own for key in rounds})
    times = [float(entry["t"]) for rank in run.ranks for entry in rank]
    seconds = max(times, default=0.0) - min(times, default=0.0)
    found = []
    for seat, (entries, mine) in enumerate(zip(run.ranks, own, strict=True)):
        if entries:
            counts = [key in mine and bool(mine[key].get("counts", True)) for key in rounds]
            alive = _seconds_alive(entries) / seconds if seconds else 0.0
            found.append(Presence(f"worker-{seat}", alive, sum(counts) / max(1, len(rounds)), counts))
    return found


def _seconds_alive(entries: list[Entry]) -> float:
    """The seconds between the first and the last line of each process that had the seat."""
    total, start, last = 0.0, None, 0.0
    for entry in entries:
        if entry["kind"] == "life" and entry["alive"]:
            total += 0.0 if start is None else last - start
            start = entry["t"]
        last = entry["t"]
    return total if start is None else total + last - start


def shares(run: Logged) -> list[list[Any]]:
    """Name, share alive, share counted of each worker, as a table shows them."""
    return [[p.name, f"{p.alive:.0%}", f"{p.counted:.0%}"] for p in list_presence(run)]

"""What the kernel has counted on this worker's interface, where it has a network of its own."""

from pathlib import Path

from offbeat.lab.network import INTERFACE


def wire() -> int | None:
    """Bytes sent since the interface was made; None outside of a lab."""
    table = Path("/proc/net/dev")
    if not table.exists():
        return None
    for line in table.read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == INTERFACE:
            return int(counters.split()[8])
    return None

"""Hosts on a switch, each in its own network namespace."""

import ipaddress
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

INTERFACE = "eth0"
MOST_HOSTS = 1023  # a Linux bridge has no more ports
_ADDRESSES = ipaddress.ip_network("198.18.0.0/15")  # set aside for tests of networks, RFC 2544
_NAMES = Path("/run/netns")
_CAPABILITIES = 1 << 12 | 1 << 21  # CAP_NET_ADMIN and CAP_SYS_ADMIN
_serial = itertools.count()


def unavailable() -> str | None:
    """The reason why no lab can run here; None if one can."""
    if sys.platform != "linux":
        return f"A lab needs Linux, and this is {sys.platform}."
    status = Path("/proc/self/status").read_text()
    effective = int(re.findall(r"^CapEff:\s*(\w+)", status, re.MULTILINE)[0], 16)
    if os.geteuid() != 0 or effective & _CAPABILITIES != _CAPABILITIES:
        return "A lab needs root (in a container, CAP_NET_ADMIN and CAP_SYS_ADMIN): run it with sudo."
    if missing := [tool for tool in ("ip", "tc") if shutil.which(tool) is None]:
        return f"A lab needs {' and '.join(missing)} of iproute2 on the PATH: install the package iproute2."
    return None


class Network:
    """A switch and its hosts, in namespaces named after this process."""

    def __init__(self, hosts: int) -> None:
        prefix = f"offbeat-{os.getpid()}-{next(_serial)}-"
        self._switch = prefix + "switch"
        self._hosts = [f"{prefix}{rank}" for rank in range(hosts)]
        self.addresses = tuple(str(_ADDRESSES[rank + 1]) for rank in range(hosts))

    def build(self) -> None:
        _call("ip", batch=[f"netns add {name}" for name in (self._switch, *self._hosts)])
        _call("ip", "-n", self._switch, batch=["link add br0 type bridge mcast_snooping 0", *_up("br0")])
        for rank, (host, address) in enumerate(zip(self._hosts, self.addresses, strict=True)):
            port = f"port{rank}"
            link = f"link add {port} type veth peer name {INTERFACE} netns {host}"
            _call("ip", "-n", self._switch, batch=[link, f"link set {port} master br0", *_up(port)])
            own = f"address add {address}/{_ADDRESSES.prefixlen} dev {INTERFACE}"
            _call("ip", "-n", host, batch=["link set lo up", own, *_up(INTERFACE)])

    def shape(self, rate: int) -> None:
        """Limit every link to `rate` bits per second in each direction."""
        shaper = f"root tbf rate {rate}bit burst 256kb latency 200ms"
        for rank, host in enumerate(self._hosts):
            _call("tc", "-n", self._switch, batch=[f"qdisc replace dev port{rank} {shaper}"])
            _call("tc", "-n", host, batch=[f"qdisc replace dev {INTERFACE} {shaper}"])

    def prefix(self, rank: int) -> list[str]:
        """The words to put before a command to run it on a host."""
        return [shutil.which("ip") or "ip", "netns", "exec", self._hosts[rank]]

    def traffic(self) -> list[tuple[int, int]]:
        """The bytes that each host has sent and received so far, as the kernel counts them."""
        counts = []
        for host in self._hosts:
            (link,) = json.loads(_call("ip", "-n", host, "-s", "-j", "link", "show", "dev", INTERFACE))
            counts.append((link["stats64"]["tx"]["bytes"], link["stats64"]["rx"]["bytes"]))
        return counts

    def remove(self) -> None:
        _remove({self._switch, *self._hosts} & _names())


def remove_stale() -> None:
    """Remove the networks of processes that have ended."""
    owners = {name: re.fullmatch(r"offbeat-([0-9]+)-[0-9]+-\w+", name) for name in _names()}
    _remove({name for name, owner in owners.items() if owner and not Path("/proc", owner[1]).exists()})


def _names() -> set[str]:
    return {path.name for path in _NAMES.iterdir()} if _NAMES.exists() else set()


def _up(device: str) -> list[str]:
    # Without an IPv6 address an interface is silent, so an idle host sends 0 bytes.
    silent = [f"link set {device} addrgenmode none"] if Path("/proc/sys/net/ipv6").exists() else []
    return [*silent, f"link set {device} up"]


def _remove(names: set[str]) -> None:
    """Kill the processes in the namespaces, even those that left their process group, then delete them."""
    for _ in range(100):
        if not (inside := _processes(names)):
            break
        for process in inside:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        time.sleep(0.01)  # the kernel may need a moment to end one
    for name in names:
        # Another lab may remove the same stale name, so only the outcome counts.
        subprocess.run(["ip", "netns", "del", name], capture_output=True, start_new_session=True)
    if left := names & _names():
        raise RuntimeError(f"The network namespaces {', '.join(sorted(left))} cannot be deleted.")


def _processes(names: set[str]) -> list[int]:
    """The processes inside the namespaces, but never those in our own namespace."""
    spaces = set()
    for name in names:
        with suppress(FileNotFoundError):
            spaces.add(os.stat(_NAMES / name).st_ino)
    spaces.discard(os.stat("/proc/self/ns/net").st_ino)
    inside = []
    for process in filter(str.isdecimal, os.listdir("/proc")):
        with suppress(OSError):  # the process has ended
            if os.stat(f"/proc/{process}/ns/net").st_ino in spaces:
                inside.append(int(process))
    return inside


def _call(*command: str, batch: list[str] | None = None) -> str:
    """The output of `ip` or `tc`, which reads further commands from `batch`."""
    command = command if batch is None else (*command, "-batch", "-")
    lines = "\n".join(batch or [])
    # A session of its own: Ctrl-C in the terminal is meant for this process, not for the tool.
    done = subprocess.run(command, input=lines, capture_output=True, text=True, start_new_session=True)
    if done.returncode != 0:
        raise RuntimeError(f"`{' '.join(command)}` failed: {' '.join(done.stderr.split())}")
    return done.stdout

"""Hosts on a switch, each in a network namespace of its own."""

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
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

INTERFACE = "eth0"
MOST_HOSTS = 1023  # a Linux bridge has no more ports
_ADDRESSES = ipaddress.ip_network("198.18.0.0/15")  # set aside for tests of networks, RFC 2544
_NAMES = Path("/run/netns")
_CAPABILITIES = 1 << 12 | 1 << 21  # CAP_NET_ADMIN and CAP_SYS_ADMIN
_serial = itertools.count()


class Traffic(NamedTuple):
    """Bytes that the kernel counted on a host's interface."""

    sent: int
    received: int


def unavailable() -> str | None:
    """Why no lab can be built here, in a sentence; None where it can."""
    if sys.platform != "linux":
        return f"A lab is made of Linux network namespaces, and this is {sys.platform}."
    status = Path("/proc/self/status").read_text()
    effective = int(re.findall(r"^CapEff:\s*(\w+)", status, re.MULTILINE)[0], 16)
    if os.geteuid() != 0 or effective & _CAPABILITIES != _CAPABILITIES:
        return "A lab needs root, with CAP_NET_ADMIN and CAP_SYS_ADMIN in a container: run it with sudo."
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"A lab needs {' and '.join(missing)} of iproute2 on the PATH: install the package iproute2."
    return None


class Network:
    """A switch and its hosts, in namespaces whose names carry the process they belong to."""

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
        """Hold every link to `rate` bits per second, either way."""
        shaper = f"root tbf rate {rate}bit burst 256kb latency 200ms"
        ports = [f"qdisc add dev port{rank} {shaper}" for rank in range(len(self._hosts))]
        _call("tc", "-n", self._switch, batch=ports)
        for host in self._hosts:
            _call("tc", "-n", host, batch=[f"qdisc add dev {INTERFACE} {shaper}"])

    def inside(self, rank: int) -> list[str]:
        """The words before a command that make it run on a host."""
        return [_path("ip"), "netns", "exec", self._hosts[rank]]

    def traffic(self) -> list[Traffic]:
        """What each host has sent and received so far."""
        counted = []
        for host in self._hosts:
            (link,) = json.loads(_call("ip", "-n", host, "-s", "-j", "link", "show", "dev", INTERFACE))
            counted.append(Traffic(link["stats64"]["tx"]["bytes"], link["stats64"]["rx"]["bytes"]))
        return counted

    def remove(self) -> None:
        _remove({self._switch, *self._hosts} & _names())


def remove_stale() -> None:
    """Remove the networks of processes that no longer live."""
    owned = {name: re.fullmatch(r"offbeat-([0-9]+)-[0-9]+-\w+", name) for name in _names()}
    _remove({name for name, owner in owned.items() if owner and not Path("/proc", owner[1]).exists()})


def _names() -> set[str]:
    return {path.name for path in _NAMES.iterdir()} if _NAMES.exists() else set()


def _up(device: str) -> list[str]:
    # Without an IPv6 address of its own an interface is silent until used: an idle host sends 0 bytes.
    silent = [f"link set {device} addrgenmode none"] if Path("/proc/sys/net/ipv6").exists() else []
    return [*silent, f"link set {device} up"]


def _remove(names: set[str]) -> None:
    """End what runs in the namespaces, then delete them.

    A process that left its group is still in its namespace. One that the kernel holds up ends later.
    """
    for _ in range(100):
        inside = _processes(names)
        for process in inside:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        if not inside:
            break
        time.sleep(0.01)
    for name in names:
        # Another lab may be removing the same stale name, so that only the outcome counts.
        subprocess.run([_path("ip"), "netns", "del", name], capture_output=True, start_new_session=True)
    if left := names & _names():
        raise RuntimeError(f"The network namespaces {', '.join(sorted(left))} cannot be deleted.")


def _processes(names: Iterable[str]) -> list[int]:
    """The processes inside the namespaces; never those of the namespace we are in ourselves."""
    spaces = set()
    for name in names:
        with suppress(FileNotFoundError):
            spaces.add(os.stat(_NAMES / name).st_ino)
    spaces.discard(os.stat("/proc/self/ns/net").st_ino)
    found = []
    for process in os.listdir("/proc"):
        with suppress(OSError):  # the process has ended meanwhile
            if process.isdecimal() and os.stat(f"/proc/{process}/ns/net").st_ino in spaces:
                found.append(int(process))
    return found


def _call(tool: str, *words: str, batch: list[str] | None = None) -> str:
    """The output of `ip` or `tc`, given one command in `words` or several in `batch`."""
    command = [tool, *words, *([] if batch is None else ["-batch", "-"])]
    done = subprocess.run(
        [_path(tool), *command[1:]],
        input="\n".join(batch or []),
        capture_output=True,
        text=True,
        start_new_session=True,  # a Ctrl-C in the terminal is for us, not for the tool at its work
    )
    if done.returncode != 0:
        raise RuntimeError(f"`{' '.join(command)}` failed: {' '.join(done.stderr.split())}")
    return done.stdout


def _path(tool: str) -> str:
    path = shutil.which(tool)
    assert path is not None, "unavailable() has found it"
    return path

"""Starts Python programs as forks of a server that has already imported torch and offbeat.

A new Python spends several seconds of CPU time on imports. A fork skips them, and otherwise runs like a new
Python, from its command line to the end of its interpreter. Python programs that it starts, such as workers,
are forks as well, also on the hosts of a lab. Tests of imports, or of how workers are launched, use a real
Python instead. The processes of pytest-xdist are forks too.
"""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import functools
import gc
import importlib
import json
import os
import pkgutil
import re
import runpy
import signal
import socket
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

IMPORTED = ["sklearn.datasets", "torch._dynamo", "torch.distributed.run"]
PR_SET_CHILD_SUBREAPER = 36
CLONE_NEWNS, CLONE_NEWNET = 0x20000, 0x40000000
MNT_DETACH, MS_REC, MS_SLAVE = 2, 1 << 14, 1 << 19
OWN: list[Forker] = []  # in a fork, that of its own server
HEAVY: set[str] = set()  # names of modules that the server has imported
EXECUTE = subprocess.Popen._execute_child  # type: ignore[attr-defined]


def run(*words: str, timeout: float = 240, **options: Any) -> subprocess.CompletedProcess[str]:
    """`python WORDS`, like `subprocess.run`."""
    with start(*words, **options) as process:
        try:
            out, error = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(words, process.returncode, out, error)


def start(*words: str, also: str = "", **options: Any) -> subprocess.Popen[str]:
    """`python WORDS`, like `subprocess.Popen`. Its server has imported the modules in `also` as well."""
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **options}
    popen = forked(also) if sys.platform == "linux" else subprocess.Popen
    return popen([sys.executable, *words], **options)


class Forker:
    """Asks a server for forks. Each becomes a child of this process."""

    def __init__(self, door: socket.socket) -> None:
        self.door, self.lock = door, threading.Lock()
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)

    def take_over(self) -> None:
        """From now on, fork all Python programs that this process starts."""
        subprocess.Popen._execute_child = lambda *args: self.execute(*args)  # type: ignore[attr-defined]

    def execute(
        self, popen: Any, args: Any, executable: Any, preexec: Any, close: Any, passed: Any, cwd: Any,
        env: Any, startup: Any, flags: Any, shell: Any, stdin: int, p2cwrite: int, c2pread: int,
        stdout: int, errread: int, stderr: int, *rest: Any,
    ) -> None:  # fmt: skip
        """Replace `Popen._execute_child`: fork if the command is a Python program."""
        words = [os.fsdecode(word) for word in args] if isinstance(args, list | tuple) else []
        host = words[3] if words[1:3] == ["netns", "exec"] else None
        words = words[4:] if host else words
        words = [word for word in words[:3] if word not in ("-u", "-B")] + words[3:]
        if not re.fullmatch(rf"{re.escape(sys.executable)} (-c|-m|[^-].*)", " ".join(words[:2])):
            return EXECUTE(
                popen, args, executable, preexec, close, passed, cwd, env, startup, flags, shell, stdin,
                p2cwrite, c2pread, stdout, errread, stderr, *rest,
            )  # fmt: skip
        new_session = rest[5]
        request = {
            "words": words[1:],
            "cwd": os.fspath(cwd or os.getcwd()),
            "env": dict(os.environ if env is None else env),
            "session": bool(new_session),
            "host": host,
            "fds": [0, 1, 2, *passed],
        }
        fds = [own if fd == -1 else fd for own, fd in enumerate((stdin, stdout, stderr))]
        fds += passed
        with self.lock:
            socket.send_fds(self.door, [json.dumps(request).encode()], fds)
            answer = self.door.recv(64)
        assert answer, "the server has ended: its error is on standard error"
        popen.pid = int(answer)
        popen._child_created = True
        popen._close_pipe_fds(stdin, p2cwrite, c2pread, stdout, errread, stderr)
        return None


class Forked(subprocess.Popen[str]):
    """Starts the server with the first program."""

    _forker: Forker | None = None
    also = ""
    levels = 1

    def _execute_child(self, *args: Any) -> None:
        self.forker().execute(self, *args)

    @classmethod
    def forker(kind) -> Forker:
        if kind._forker is None and OWN and not kind.also:
            kind._forker = OWN[0]
        elif kind._forker is None:
            ours, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
            command = [sys.executable, __file__, str(theirs.fileno()), str(kind.levels), *kind.also.split()]
            alone = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}  # a fork has no other threads
            options: Any = {"stdin": subprocess.DEVNULL, "pass_fds": [theirs.fileno()]}
            popen = forked("") if OWN else subprocess.Popen
            server = popen(command, env={**os.environ, **alone}, **options)
            theirs.close()
            server.returncode = 0  # it ends with this process, so nobody waits for it
            kind._forker = Forker(ours)
        return kind._forker


@functools.cache
def forked(also: str, levels: int = 1) -> type[Forked]:
    """Programs that are forked from one server, as are those that they start: programs of so many levels."""
    return type("Forked", (Forked,), {"also": also, "levels": levels})


def spawn(path: str, words: Sequence[str], fds: Sequence[int]) -> int:
    """Start a Python program with these files, like `multiprocessing.util.spawnv_passfds`. Return its id."""
    process = forked("")(words, pass_fds=fds)
    process.returncode = 0  # whoever has the id waits for it
    return process.pid


@contextmanager
def on_hosts(also: str = "") -> Iterator[None]:
    """Within it, Python programs that a lab of this process starts are forks."""
    forked(also).forker().take_over()
    try:
        yield
    finally:
        subprocess.Popen._execute_child = EXECUTE  # type: ignore[attr-defined]


def on_demand() -> None:
    """In a fork, start Python programs as a new Python does, except those of this module."""
    subprocess.Popen._execute_child = EXECUTE  # type: ignore[attr-defined]


def enter_host(name: str) -> None:
    """Do as `ip netns exec NAME`: take over the network of a host, and show it in /sys."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{name}") as network:
        done = [libc.setns(network.fileno(), CLONE_NEWNET), libc.unshare(CLONE_NEWNS)]
    done += [libc.mount(b"", b"/", b"none", MS_SLAVE | MS_REC, None), libc.umount2(b"/sys", MNT_DETACH)]
    done += [libc.mount(name.encode(), b"/sys", b"sysfs", 0, None)]
    assert not any(done), os.strerror(ctypes.get_errno())


def serve(door: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Fork for every request. Only the fork returns, with its request.

    The process between ends at once, so the fork is adopted by the nearest subreaper: the one that asked.
    """
    while True:
        message, fds, _, _ = socket.recv_fds(door, 1 << 20, 32)
        if not message:
            os._exit(0)
        read, write = os.pipe()
        if not (between := os.fork()):
            if child := os.fork():
                os.write(write, str(child).encode())
                os._exit(0)
            for fd in (read, write):
                os.close(fd)
            door.close()
            return json.loads(message), fds
        os.waitpid(between, 0)
        door.send(os.read(read, 64))
        for fd in (read, write, *fds):
            os.close(fd)


def become(request: dict[str, Any], fds: list[int]) -> None:
    """Take over the session, files, directory and environment of the request."""
    if request["session"]:
        os.setsid()
    above = max(*fds, *request["fds"]) + 1  # where no file is in the way of another
    moved = [fcntl.fcntl(fd, fcntl.F_DUPFD, above) for fd in fds]
    for fd in fds:
        os.close(fd)
    for number, fd in zip(request["fds"], moved, strict=True):
        os.dup2(fd, number)
        os.close(fd)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if request["host"]:
        enter_host(request["host"])


def start_own_server(fds: list[int]) -> tuple[dict[str, Any], list[int]] | None:
    """Fork a server for the Python programs that this process starts. Return a request in those only.

    `fds` are files of this process alone.
    """
    ours, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
    if not os.fork():
        ours.close()
        quiet = os.open(os.devnull, os.O_RDWR)
        for fd in fds:
            os.dup2(quiet, fd)
        return serve(theirs)
    theirs.close()
    OWN[:] = [Forker(ours)]
    OWN[0].take_over()
    return None


def execute(words: list[str]) -> None:
    """Run the program as `python WORDS` would."""
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if words[0] == "-c":
        sys.argv, code = ["-c", *words[2:]], words[1]
        sys.path[:1] = ["", *filter(None, paths)]
        program = sys.modules["__main__"] = ModuleType("__main__")
        exec(compile(code, "<string>", "exec"), vars(program))
    elif words[0] == "-m":
        sys.argv = words[1:]
        sys.path[:1] = [os.getcwd(), *filter(None, paths)]
        sys.modules.pop(words[1], None)
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        sys.path[:1] = [os.path.dirname(os.path.abspath(words[0])), *filter(None, paths)]
        runpy.run_path(words[0], run_name="__main__")


def spare(light: set[str]) -> None:
    """At the end of a fork, leave the modules of its server alone, except light ones.

    To take them apart would take longer than most programs. All else ends as in a new Python.
    """
    for name in HEAVY - light:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(sys.modules.pop(name, None)))


def main(door: int, levels: int, *modules: str) -> None:
    """Import the modules, and serve. Only forks return from here, after their programs."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
    atexit.register(spare, {*sys.modules})  # the last of all that run at the end
    for name in [*IMPORTED, *modules]:
        importlib.import_module(name)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", module="offbeat")  # as in tests, which see none of these imports
        app = importlib.import_module("offbeat.app")
        for module in pkgutil.walk_packages(app.__path__, "offbeat.app."):
            importlib.import_module(module.name)
    HEAVY.update(sys.modules)
    gc.freeze()  # otherwise each fork would go through all modules, and copy their memory, when it ends
    order = serve(socket.socket(fileno=door))
    become(*order)
    for _ in range(levels):
        if (below := start_own_server(order[0]["fds"])) is None:
            break
        order = below
        become(*order)
    execute(order[0]["words"])


if __name__ == "__main__":
    import warm  # under this name, a fork that imports it finds its own server

    warm.main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])

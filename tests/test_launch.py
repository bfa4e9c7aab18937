"""What the commands that start workers expose: where they listen, what they unpickle, what they import."""

from __future__ import annotations

import ipaddress
import os
import pickle
import re
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import warm
from torch.distributed import TCPStore

ROOT = Path(__file__).parent.parent
needs_proc = pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="reads Linux's /proc")
SMALL = ["--model", "tiny"]
FEW = ["--workers", "2", "--steps", "60", "--evaluations", "1"]
LATE = ["--straggler", "share=1,delay=40ms"]  # long enough to be looked at
TRAIN = ["train", "--quiet", "wagma(group_size=2, every=4)", *SMALL, *FEW, *LATE, "--checkpoint-dir", "run"]
COMMANDS = {
    "processes": [
        *[*TRAIN, "then", "compare", "torch_ddp", "local_sgd(every=8)", *SMALL, *FEW, *LATE],
        *["--link", "100mbit", "--out", "compared"],
    ],
    "simulation": [
        *["compare", "local_sgd(every=8)", *SMALL, *FEW, "--simulate", "then"],
        *["study", "local_sgd", *SMALL, "--workers", "2", "--every", "4", "--samples", "2000"],
    ],
}

# The command line; `then` stands between two commands.
SCRIPT = """
import sys
from itertools import groupby
from offbeat.app.cli import main
commands = [list(words) for then, words in groupby(sys.argv[1:], lambda word: word == "then") if not then]
for last, words in enumerate(commands, 1 - len(commands)):
    sys.argv[1:] = words
    try:
        main()
    except SystemExit as end:
        if end.code or not last:
            raise
"""

# Notes whoever unpickles a class, in whatever process has this folder in its PYTHONPATH.
WATCH = """
import os, sys

def hook(event, arguments, here=os.path.dirname(__file__)):
    if event == "pickle.find_class":
        with open(os.path.join(here, "unpickled"), "a") as file:
            file.write(f"{arguments}\\n")

sys.addaudithook(hook)
open(os.path.join(os.path.dirname(__file__), "watched"), "a").write("x")
"""


class Scene:
    """A command in a folder that holds modules with the names of others' modules."""

    def __init__(self, folder: Path, words: list[str], start: Callable[..., subprocess.Popen[str]]) -> None:
        self.modules, self.cwd = folder / "modules", folder / "cwd"
        for place in (self.modules, self.cwd, folder / "bin"):
            place.mkdir()
        for name in ("queue", "sklearn", "torch"):
            (self.cwd / f"{name}.py").write_text(f"open({str(folder / 'imported')!r}, 'a').write({name!r})\n")
        (self.modules / "sitecustomize.py").write_text(WATCH)
        (folder / "bin/offbeat").write_text(SCRIPT)
        self.imported = folder / "imported"
        environment = {**os.environ, "PYTHONPATH": f"{self.modules}{os.pathsep}{ROOT / 'src'}"}
        options: Any = {"cwd": self.cwd, "env": environment, "start_new_session": True}
        self.process = start(str(folder / "bin/offbeat"), *words, **options)

    def family(self) -> list[int]:
        """The command's process and all below it."""
        found = [self.process.pid]
        for process in found:
            with suppress(OSError):
                children = Path(f"/proc/{process}/task/{process}/children").read_text()
                found += map(int, children.split())
        return found

    def workers(self) -> list[int]:
        """The processes of the ranks, which are those that write the logs."""
        found = {}
        for process in self.family():
            with suppress(OSError):
                files = [os.readlink(fd) for fd in Path(f"/proc/{process}/fd").iterdir()]
                found |= {file: process for file in files if file.endswith(".jsonl")}
        return [found[log] for log in sorted(found)]

    def listening(self) -> set[tuple[bool, str, int]]:
        """Who listens where at this moment: the first process or another, the address, the port."""
        at = {}
        for table in ("tcp", "tcp6"):
            for line in Path("/proc/net", table).read_text().splitlines()[1:]:
                _, local, _, state, *rest = line.split()
                if state == "0A":
                    at[rest[5]] = local.split(":")
        found = set()
        for process in self.family():
            with suppress(OSError):
                for fd in Path("/proc", str(process), "fd").iterdir():
                    with suppress(OSError):
                        kind, _, inode = os.readlink(fd).rstrip("]").partition(":[")
                        if kind == "socket" and inode in at:
                            found.add(
                                (process == self.process.pid, _address(at[inode][0]), int(at[inode][1], 16))
                            )
        return found

    def end(self) -> tuple[int, str]:
        _, error = self.process.communicate(timeout=240)
        return self.process.returncode, error

    def close(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.communicate(timeout=60)


def _address(text: str) -> str:
    words = struct.pack(f"={len(text) // 8}I", *[int(text[i : i + 8], 16) for i in range(0, len(text), 8)])
    address = ipaddress.ip_address(words)
    return str(getattr(address, "ipv4_mapped", None) or address)


def start_python(*words: str, **options: Any) -> subprocess.Popen[str]:
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, *words], **pipes, **options)


@pytest.fixture
def scene(tmp_path: Path) -> Any:
    made: list[Scene] = []

    def make(words: list[str], start: Callable[..., subprocess.Popen[str]] = start_python) -> Scene:
        made.append(Scene(tmp_path, words, start))
        return made[-1]

    yield make
    for one in made:
        one.close()


def until(condition: Callable[[], Any], process: subprocess.Popen[str]) -> Any:
    deadline = time.monotonic() + 300
    while not (found := condition()):
        assert time.monotonic() < deadline
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
    return found


class Bomb:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.marker),)


def put_into_the_store(port: int, bomb: bytes) -> None:
    """The elastic launcher's rendezvous loaded what stood under such keys."""
    store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    for prefix in ("", "/worker/attempt_0/", "/worker/attempt_0/default_pg/"):
        for key in ("torch.rendezvous.", "torch.rendezvous.none", "left", "0", "1"):
            store.set(prefix + key, bomb)
        store.queue_push(f"{prefix}queue", bomb)


@pytest.mark.slow
@needs_proc
@pytest.mark.parametrize("command", COMMANDS)
def test_nothing_listens_beyond_this_machine_and_no_pickle_is_loaded(
    scene: Any, tmp_path: Path, command: str
) -> None:
    bomb = pickle.dumps(Bomb(tmp_path / "marker"))
    pickle.loads(bomb)
    (tmp_path / "marker").rmdir()  # it works
    run = scene(COMMANDS[command])
    heard: set[tuple[bool, str, int]] = set()
    stores: set[int] = set()
    while run.process.poll() is None:
        heard |= run.listening()
        ports = {port for first, _, port in heard if first and not (run.cwd / "compared").exists()}
        for port in ports - stores:
            put_into_the_store(port, bomb)
            stores.add(port)
        time.sleep(0.2)
    code, error = run.end()
    assert code == 0, error
    assert all(ipaddress.ip_address(address).is_loopback for _, address, _ in heard), heard
    processes = command == "processes"
    assert {first for first, _, _ in heard} == ({True, False} if processes else set()), heard
    assert bool(stores) == processes
    assert not (tmp_path / "marker").exists()
    assert (run.modules / "watched").read_text() == ("xxx" if processes else "x"), "the workers are forks"
    assert not (run.modules / "unpickled").exists(), (run.modules / "unpickled").read_text()
    assert not run.imported.exists(), run.imported.read_text()


def test_no_code_of_ours_unpickles_what_it_did_not_write() -> None:
    """torch's collectives of objects unpickle what arrives; torch.load may run code unless told not to."""
    for path in (ROOT / "src").rglob("*.py"):
        text = path.read_text()
        assert not re.search(r"(?:object_list|gather_object|pickle\.loads?\b|elastic_launch)\(?", text), path
        for call in re.findall(r"torch\.load\(.*?\n", text):
            assert "weights_only=True" in call, (path, call)


def alive(process: int) -> bool:
    with suppress(OSError):
        return "(" in (stat := Path(f"/proc/{process}/stat").read_text()) and ") Z" not in stat
    return False


def parent_of(process: int) -> int:
    return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])


def all_end(processes: list[int]) -> None:
    deadline = time.monotonic() + 60
    while any(map(alive, processes)):
        assert time.monotonic() < deadline, "they live on"
        time.sleep(0.05)


@pytest.mark.slow
@needs_proc
def test_workers_end_with_their_launcher(scene: Any) -> None:
    run = scene([*TRAIN[:-4], "--straggler", "share=1,delay=1", *TRAIN[-2:]], warm.start)
    workers = until(lambda: len(found := run.workers()) == 2 and found, run.process)
    run.process.kill()
    run.process.wait()
    all_end(workers)


# What stands before the imports of a worker, and a moment in the middle of them.
TIED = "from offbeat.app.runs.tied import tie; tie(); import ctypes; print(flush=True); "
TIED += "ctypes.CDLL(None).sleep(99)"


def start_tied(**options: Any) -> subprocess.Popen[str]:
    process = start_python("-c", TIED, start_new_session=True, **options)
    assert process.stdout is not None
    process.stdout.readline()
    return process


def test_a_worker_that_still_imports_ends_with_its_launcher() -> None:
    """Also in C code, where no thread and no handler of Python could end it."""
    process = start_tied(stdin=subprocess.PIPE)
    assert process.poll() is None
    process.communicate(timeout=60)  # closes the pipe, as the end of the launcher does
    assert process.returncode == -signal.SIGIO


def test_a_worker_whose_launcher_has_ended_before_it_began_ends_too() -> None:
    process = start_tied(stdin=subprocess.DEVNULL)
    assert (process.communicate(timeout=60), process.returncode) == (("", ""), 1)


def test_ctrl_c_ends_a_worker_that_still_imports_without_a_traceback() -> None:
    process = start_tied(stdin=subprocess.PIPE)
    process.send_signal(signal.SIGINT)
    process.wait(timeout=60)
    assert (process.communicate(), process.returncode) == (("", ""), -signal.SIGINT)


FORKS = """
import os, signal, sys, time
from offbeat.app.runs import tied, worker

tied.tie()
fork = os.fork
def fork_and_press():
    child = fork()
    if child:
        os.kill(os.getpid(), signal.SIGINT)
    return child
os.fork = fork_and_press
worker.fork(3)
time.sleep(99)
"""


@pytest.mark.slow
def test_ctrl_c_between_two_forks_reaches_all_workers() -> None:
    """The terminal's signal comes once, and a worker that is forked after it does not get it."""
    process = warm.start("-c", FORKS, stdin=subprocess.PIPE)
    assert process.stdout is not None
    lines = process.stdout.read().splitlines()
    _, error = process.communicate(timeout=60)
    ends = sorted(line.removeprefix("offbeat worker ended: ") for line in lines)
    assert (process.returncode, ends, error) == (0, [f'[{rank}, -2, ""]' for rank in range(3)], "")


@pytest.mark.slow
@needs_proc
def test_workers_end_with_the_process_that_forked_them(scene: Any) -> None:
    run = scene([*TRAIN[:-4], "--straggler", "share=1,delay=0.2", *TRAIN[-2:]], warm.start)
    workers = until(lambda: len(found := run.workers()) == 2 and found, run.process)
    (parent,) = set(map(parent_of, workers))
    os.kill(parent, signal.SIGKILL)
    assert run.end() == (1, "offbeat: The process of the workers ended early: exit code -9\n")
    all_end(workers)


@pytest.mark.slow
@needs_proc
def test_a_worker_that_is_killed_is_named_and_the_others_end(scene: Any) -> None:
    run = scene([*TRAIN[:-4], "--straggler", "share=1,delay=0.2", *TRAIN[-2:]], warm.start)
    workers = until(lambda: len(found := run.workers()) == 2 and found, run.process)
    os.kill(workers[1], signal.SIGKILL)
    assert run.end() == (1, "offbeat: Rank 1: ended by SIGKILL\n")
    assert not any(map(alive, workers))

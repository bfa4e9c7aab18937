"""Gloo workers for tests that need real processes, and the order of tests."""

from __future__ import annotations

import functools
import gc
import io
import os
import random
import re
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from math import inf
from multiprocessing import forkserver, resource_tracker, util
from multiprocessing.connection import Connection
from typing import Any

import pytest
import warm

# ruff: noqa: E402
# With several test processes, their server imports torch while this process does.
FORKS = warm.forked("pytest torch.distributed.fsdp torch.distributed.tensor", levels=2)
COUNTS = re.findall(r" (?:-n[ =]?|--numprocesses[ =])(\w+)", " ".join(["", *sys.argv[1:]]))
if sys.platform == "linux" and "PYTEST_XDIST_WORKER" not in os.environ and COUNTS[-1:] not in ([], ["0"]):
    FORKS.forker()
warm.on_demand()

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import typer
from ports import free_port

import offbeat
from offbeat.app.cli import waiting
from offbeat.app.commands import progress

SIZE = 4
PATIENCE = 240  # seconds; less than the time limit of a test

torch.set_num_threads(1)


@functools.cache
def processes() -> Any:
    """A context whose processes start quickly: they are forked from one that has only imported modules."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["preloaded"])
    resource_tracker.ensure_running()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.path.dirname(__file__), prepend=os.pathsep)
        if warm.OWN:
            patch.setattr(util, "spawnv_passfds", warm.spawn)
        forkserver.ensure_running()
    return context


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """A shell starts what runs in the background deaf to it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(autouse=True)
def any_width(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables have their own width: pytest-xdist sets that of a terminal for its workers."""
    monkeypatch.delenv("COLUMNS", raising=False)


@pytest.fixture(autouse=True)
def no_lines_of_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    """A command that takes long on a busy machine would print some."""
    monkeypatch.setattr(progress, "LINE", inf)
    monkeypatch.setattr(waiting, "SILENT", 1e6)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes() -> None:
    """Test processes are forks of one process that has imported torch, and so are the servers they start."""
    if sys.platform == "linux":
        FORKS.forker().take_over()


@pytest.fixture(autouse=True, scope="session")
def commands_are_built_once() -> Iterator[None]:
    """Typer would build them again in every call."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(typer.main, "get_command", functools.cache(typer.main.get_command))
        yield


class Pool:
    """Four gloo processes that run functions of a communicator. They start with the first function."""

    def __init__(self) -> None:
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []
        self._blocked: Callable[..., Any] | None = None  # the function that left the store blocked

    def _start(self) -> None:
        port = free_port()
        context = processes()
        self._blocked = None
        for rank in range(SIZE):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, port, theirs), daemon=True)
            process.start()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(
        self, function: Callable[..., Any], *args: Any, workers: int = SIZE, fresh: bool = False
    ) -> list[Any]:
        """Run `function(communicator, *args)` on the first workers and return their answers by rank.

        Raises the first error. A function that may break its communicator gets a `fresh` one.
        """
        answers = self.attempt(function, *args, workers=workers, fresh=fresh)
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
        return answers

    def attempt(
        self, function: Callable[..., Any], *args: Any, workers: int = SIZE, fresh: bool = True
    ) -> list[Any]:
        """Like `run`, but return errors as values."""
        if self._blocked not in (None, function):
            self.close()
        if not self._processes:
            self._start()
        for pipe in self._pipes[:workers]:
            pipe.send((function, args, workers, fresh))
        answers = []
        for pipe in self._pipes[:workers]:
            if not pipe.poll(PATIENCE):
                self.close()
                raise AssertionError(f"{function}: a worker hangs")
            answer, blocked = torch.load(io.BytesIO(pipe.recv_bytes()), weights_only=False)
            answers.append(answer)
            if blocked:
                self._blocked = function
        return answers

    def close(self) -> None:
        """End the processes until there is another function: idle ones would wake very often."""
        for process in self._processes:
            process.kill()
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._pipes, self._processes = [], []


def _serve(rank: int, port: int, pipe: Connection) -> None:
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(SIZE))
    dist.init_process_group("gloo")
    groups = {workers: dist.new_group(range(workers)) for workers in range(1, SIZE + 1)}
    communicators: dict[int, offbeat.Torch] = {}
    gc.freeze()  # so that a collection is quick
    while True:
        function, args, workers, fresh = pipe.recv()
        if fresh:
            gc.collect()  # ends threads that earlier orders left behind
        try:
            comm = offbeat.Torch(groups[workers], timeout=60) if fresh else communicators.get(workers)
            if comm is None:
                comm = communicators[workers] = offbeat.Torch(groups[workers], timeout=60)
            answer = function(comm, *args)
        except Exception as error:
            error.__cause__ = error.__context__ = None
            traceback.print_exc()
            answer = error
        # A thread that still connects to ranks that gave up keeps the store from making process groups.
        blocked = any(thread.name == "offbeat-connect" for thread in threading.enumerate())
        data = io.BytesIO()  # a pipe would send every tensor as shared memory of its own, which takes longer
        torch.save((answer, blocked), data)
        pipe.send_bytes(data.getbuffer())
        del answer


@pytest.hookimpl(wrapper=True)  # before that of xdist, which reads the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Iterator[None]:
    """With several test processes, one of them runs all tests that share a run, or a pool in one file.

    Groups begin first, then slow tests. The quick ones fill what is left, so that all processes end together.
    """
    for item in items:
        for shared in {"pool", "whole", "entries"}.intersection(getattr(item, "fixturenames", ())):
            name = f"{shared} of {item.path.stem}"
            item.add_marker(pytest.mark.xdist_group(name))
    leave_some_fast(items)
    yield
    if "PYTEST_XDIST_WORKER" in os.environ:
        items.sort(key=lambda item: item.get_closest_marker("slow") is None)


def leave_some_fast(items: list[pytest.Item]) -> None:
    """Of the cases of a test that is marked with `few(n)`, n are drawn and fast. The others are slow."""
    families: dict[Any, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("few") and not item.get_closest_marker("slow"):
            families.setdefault(item.function, []).append(item)
    for cases in families.values():
        few = min(cases[0].get_closest_marker("few").args[0], len(cases))
        fast = random.Random(cases[0].name).sample(range(len(cases)), few)  # the same in every process
        for i, case in enumerate(cases):
            if i not in fast:
                case.add_marker(pytest.mark.slow)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Take all that is there after the collection out of every garbage collection."""
    gc.disable()
    yield
    gc.collect()
    gc.freeze()
    gc.enable()


@functools.cache
def shared_pool() -> Pool:
    return Pool()


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    yield shared_pool()
    shared_pool().close()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(nextitem: pytest.Item | None) -> Iterator[None]:
    """With several test processes, each runs tests with a pool one after the other, then those without."""
    yield
    if "PYTEST_XDIST_WORKER" in os.environ and "pool" not in getattr(nextitem, "fixturenames", ()):
        shared_pool().close()

"""Training in processes that may be killed: what starts them, and what they run."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from ports import free_port
from problems import Dyadic, Realistic, data, optimizer_for, snapshot, take_step
from ticking import clocked
from torch import Tensor, nn

import offbeat

PATIENCE = 240  # seconds without a word after which a process is taken to hang; far below the timeout


class Crew:
    """Processes that run `function(pipe, *args)` in a process group and report through their pipes."""

    def __init__(self, context: Any, size: int, function: Callable[..., Any], *args: Any) -> None:
        port = free_port()
        pipes = [context.Pipe() for _ in range(size)]
        self.pipes: list[Connection] = [ours for ours, _ in pipes]
        self.ends: dict[int, Any] = {}  # the last word of each rank that has ended
        self.processes = [
            context.Process(target=_work, args=(rank, size, port, theirs, function, args), daemon=True)
            for rank, (_, theirs) in enumerate(pipes)
        ]
        for process, (_, theirs) in zip(self.processes, pipes, strict=True):
            process.start()
            theirs.close()

    def hear(self, rank: int, wanted: Callable[[Any], bool]) -> Any:
        """The first wanted word of a rank, or its last word if it ends without one."""
        word = self.ends.get(rank)
        if word is not None:
            return word
        try:
            while self.pipes[rank].poll(PATIENCE):
                word = self.pipes[rank].recv()
                if word[0] in ("result", "error"):
                    self.ends[rank] = word
                    break
                if wanted(word):
                    break
            else:
                raise AssertionError(f"rank {rank} hangs")
        except (EOFError, OSError):  # OSError: killed in the middle of a word
            pass
        return word

    def tell(self, order: Any) -> None:
        """Send the same to all ranks."""
        for pipe in self.pipes:
            pipe.send(order)

    def kill(self, ranks: Sequence[int]) -> None:
        for rank in ranks:
            self.processes[rank].kill()

    def last_words(self) -> list[tuple[str, Any]]:
        """What each rank ended with. Every rank stays until all have reported, so no exit is noticed."""
        words = [self.hear(rank, lambda word: False) for rank in range(len(self.processes))]
        for pipe in self.pipes:
            with suppress(OSError):
                pipe.send("goodbye")
        for rank, process in enumerate(self.processes):
            process.join(PATIENCE)
            assert not process.is_alive(), f"rank {rank} hangs"
        return [word if word and word[0] in ("result", "error") else ("killed", None) for word in words]


def _work(
    rank: int, size: int, port: int, pipe: Connection, function: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)
    try:
        pipe.send(("result", function(pipe, *args)))
    except Exception as error:
        pipe.send(("error", (type(error).__name__, str(error))))
    pipe.poll(PATIENCE)


class Training:
    """A loop that saves into a directory, and continues from there."""

    def __init__(self, expression: str, directory: Path) -> None:
        self.rank = dist.get_rank()
        self.directory = directory
        torch.manual_seed(self.rank)
        self.net = Realistic(self.rank)
        self.opt = optimizer_for(self.net, "adamw")
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.opt, 0.9)
        self.sync = offbeat.method(expression)(self.net, self.opt, group=clocked(offbeat.Torch(), expression))
        self.step = 0  # passes; some methods make steps of their own
        self.sync.load(directory, scheduler=self.scheduler, place=self)
        self.first = self.step

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step = state["step"]

    def save(self) -> None:
        self.sync.save(self.directory, scheduler=self.scheduler, place=self)

    def one(self) -> dict[str, Tensor]:
        take_step(self.net, self.opt, self.sync, self.rank, self.step)
        self.scheduler.step()
        self.step += 1
        return snapshot(self.net)


def train(pipe: Connection, expression: str, directory: Path, steps: int, often: int | None) -> Any:
    """Train; return the first step and the weights after each step and after `finish`.

    Reports every step and every checkpoint.
    """
    run = Training(expression, directory)
    trace = []
    pipe.send(("step", run.step))
    while run.step < steps:
        trace.append(run.one())
        pipe.send(("step", run.step))
        if often and run.step % often == 0:
            run.save()
            pipe.send(("saved", run.step))
    run.sync.finish()
    trace.append(snapshot(run.net))
    moments = {f"{i}.{k}": v for i, s in run.opt.state_dict()["state"].items() for k, v in s.items()}
    return run.first, [{k: v.numpy() for k, v in state.items()} for state in [*trace, moments]]


def train_many(pipe: Connection, steps: int) -> None:
    """Train every method that is asked for, one after the other and undisturbed."""
    while (order := pipe.recv()) is not None:
        expression, directory = order
        pipe.send(("trained", train(pipe, expression, directory, steps, None)))


def stall(pipe: Connection, expression: str, where: str, victim: int, steps: int) -> None:
    """The victim stops at a given place of its last step; the others wait for it."""
    rank = dist.get_rank()
    net = Dyadic()
    opt = optimizer_for(net)
    sync = offbeat.method(expression)(net, opt)

    def pause(here: str) -> None:
        if here == where and rank == victim and sync.steps >= steps - 1:
            pipe.send(("here", None))
            time.sleep(60)

    for step in range(steps):
        loss = net(data(rank, step))
        loss.backward()
        sync.observe(loss)
        pause("backward")
        sync.step(lambda: (opt.step(), pause("local")))
    pause("averaged")
    if where == "averaged":
        with sync.averaged():
            pass
    pause("finish")
    sync.finish()


def send_much(pipe: Connection, values: int) -> None:
    """Average a large model again and again."""
    net = nn.Linear(values, 1, bias=False)
    sync = offbeat.local_sgd(net, torch.optim.SGD(net.parameters(), lr=0.1), every=1)
    while True:
        sync.step()
        pipe.send(("step", sync.steps))


def halt(pipe: Connection, expression: str, victim: int, timeout: float) -> None:
    """The victim stops after three steps; the others wait until the timeout."""
    net = Dyadic()
    opt = optimizer_for(net)
    sync = offbeat.method(expression)(net, opt, group=offbeat.Torch(timeout=timeout))
    for step in range(12):
        if dist.get_rank() == victim and step == 3:
            pipe.send(("here", None))
            time.sleep(120)
        net(data(dist.get_rank(), step)).backward()
        sync.step()


def stay_away(pipe: Connection, victim: int, timeout: float, way: str = "Torch") -> None:
    """The victim never connects, in one of the ways to connect."""
    comm = None if way == "Torch" else offbeat.Torch(timeout=timeout)
    if dist.get_rank() == victim:
        pipe.send(("here", None))
        time.sleep(120)
    if comm is None:
        offbeat.Torch(timeout=timeout)
    elif way == "duplicate":
        comm.worker.duplicate()
    else:
        (comm.worker.sidecar().comm if way == "sidecar" else comm).split([[2, 1, 0]])

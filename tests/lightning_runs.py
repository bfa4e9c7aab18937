"""What the workers of tests/test_lightning.py do. It imports Lightning, so the tests import it late."""

from __future__ import annotations

import logging
import multiprocessing
import os
import pickle
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from ports import free_port
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import offbeat
from offbeat.integrations.lightning import OffbeatFabricStrategy, OffbeatStrategy

PATIENCE = 120  # seconds
QUIET = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}


class Workers:
    """Two forks of this process, which Lightning takes for those of torchrun."""

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        port = free_port()
        context = multiprocessing.get_context("fork")
        self.pipes, self.processes = [], []
        for rank in range(2):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, port, theirs, function, args), daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def results(self) -> list[Any]:
        """What the function returned or raised, by rank; the exit code of a process that sent nothing."""
        found: list[Any] = []
        deadline = time.monotonic() + PATIENCE
        for pipe, process in zip(self.pipes, self.processes, strict=True):
            try:
                assert pipe.poll(max(0.0, deadline - time.monotonic())), "a worker hangs"
                found.append(pickle.loads(pipe.recv_bytes()))
            except EOFError:
                found.append(None)
            except AssertionError:
                for other in self.processes:
                    other.kill()
                raise
            process.join()
            found[-1] = process.exitcode if found[-1] is None else found[-1]
        return found


def run(function: Callable[..., Any], *args: Any) -> list[Any]:
    """Run function(rank, *args) on two workers."""
    found = Workers(function, *args).results()
    for answer in found:
        if isinstance(answer, BaseException):
            raise answer
    return found


def _serve(
    rank: int, port: int, pipe: Connection, function: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    warnings.simplefilter("ignore")
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in ranks.items()})
    os.environ.update(MASTER_ADDR="127.0.0.1", TORCHELASTIC_RUN_ID="tests")
    try:
        answer = function(rank, *args)
    except BaseException as error:
        traceback.print_exc()
        error.__cause__ = error.__context__ = None
        answer = error
    pipe.send_bytes(pickle.dumps(answer))  # a tensor in shared memory would be lost with this process
    os._exit(0)


class Regression(LightningModule):
    """With dropout, if asked, so that random numbers matter."""

    def __init__(self, dropout: float = 0.0, adam: bool = False, seed: int = 3) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 1))
        self.adam = adam
        self.validated: list[Tensor] = []

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        return loss(self.net, batch)

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        self.validated.append(weights(self))
        self.log("val", loss(self.net, batch), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer, scheduler = optimizer_of(self.net, adam=self.adam)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def optimizer_of(net: nn.Module, *, adam: bool = False) -> tuple[torch.optim.Optimizer, Any]:
    optimizer: torch.optim.Optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    if adam:
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    return optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95)


def loss(net: nn.Module, batch: list[Tensor]) -> Tensor:
    return nn.functional.mse_loss(net(batch[0]).squeeze(1), batch[1])


def weights(module: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in module.parameters()]).clone()


def data(size: int = 22) -> DataLoader[Any]:
    """Each of two workers gets 11 samples of 22: batches of 3, 3, 3 and 2."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(size, 6, generator=draw)
    return DataLoader(TensorDataset(x, x.sum(1).sin()), batch_size=3, shuffle=True)


class Resumable:
    """Batches of a rank that continue anywhere. Each pass draws a random number, as a DataLoader does."""

    def __init__(self, rank: int) -> None:
        self.rank, self.seen = rank, 0

    def __len__(self) -> int:
        return 5

    def __iter__(self) -> Iterator[list[Tensor]]:
        torch.rand(1)
        self.seen %= len(self)
        while self.seen < len(self):
            draw = torch.Generator().manual_seed(10 * self.rank + self.seen)
            x = torch.randn(3, 6, generator=draw)
            self.seen += 1
            yield [x, x.sum(1)]

    def state_dict(self) -> dict[str, int]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.seen = state["seen"]


class Watch(Callback):
    """Notes after every batch the weights, and how many broadcasts the process has made since the first."""

    def __init__(self) -> None:
        self.weights: list[Tensor] = []
        self.broadcasts: list[int] = []
        self.restored: list[bool] = []  # whether validation has left the weights as they were
        self.calls = 0

    def on_fit_start(self, trainer: Any, module: Any) -> None:
        original = dist.broadcast

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            return original(*args, **kwargs)

        dist.broadcast = counted

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, index: int) -> None:
        self.calls *= index > 0  # an epoch may begin with a few

    def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
        self.weights.append(weights(module))
        self.broadcasts.append(self.calls)

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        if self.weights:
            self.restored.append(bool((weights(module) == self.weights[-1]).all()))


def fit(
    strategy: Any, *callbacks: Callback, model: Any = None, loader: Any = None, **options: Any
) -> Trainer:
    model = Regression() if model is None else model
    checkpoints = any(isinstance(callback, Checkpoint) for callback in callbacks)
    path = options.pop("ckpt_path", None)
    options = {"max_epochs": 3, "enable_checkpointing": checkpoints, **QUIET, **options}
    trainer = Trainer(accelerator="cpu", devices=2, strategy=strategy, callbacks=list(callbacks), **options)
    trainer.fit(model, data() if loader is None else loader, data(), ckpt_path=path)
    return trainer


LAWS: list[tuple[str, dict[str, Any]]] = [
    ("local_sgd(every=1)", {}),
    ("local_sgd(every=1)", {"accumulate_grad_batches": 3}),
    ("ddp", {"gradient_clip_val": 0.3}),
    ("ddp", {"gradient_clip_val": 0.3, "accumulate_grad_batches": 3, "precision": "bf16-mixed"}),
]


def laws(rank: int) -> dict[str, tuple[Tensor, Tensor]]:
    """The weights after each run with DDP, and with Offbeat. Workers begin with those of rank 0."""
    found = {}
    for method, options in LAWS:
        models = Regression(seed=rank), Regression(seed=rank)
        for strategy, model in zip((DDPStrategy(), OffbeatStrategy(method)), models, strict=True):
            fit(strategy, model=model, num_sanity_val_steps=0, **options)
        found[f"{method} {options}"] = weights(models[0]), weights(models[1])
    for method, clip in (("local_sgd(every=1)", None), ("ddp", 0.3)):
        pair = [fabric_run(strategy, clip) for strategy in ("ddp", OffbeatFabricStrategy(method))]
        found[f"Fabric {method}"] = pair[0], pair[1]
    return found


def fabric_run(strategy: Any, clip: float | None) -> Tensor:
    """Two epochs, in steps of two batches or of the one that is left."""
    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy)
    fabric.launch()
    net = Regression(seed=fabric.global_rank).net
    optimizer, scheduler = optimizer_of(net)
    net, optimizer = fabric.setup(net, optimizer)
    loader = fabric.setup_dataloaders(data())
    for epoch in range(2):
        loader.sampler.set_epoch(epoch)
        for index, batch in enumerate(loader):
            wait = index % 2 == 0 and index + 1 < len(loader)
            with fabric.no_backward_sync(net, enabled=wait):
                fabric.backward(loss(net, batch))
            if not wait:
                if clip is not None:
                    fabric.clip_gradients(net, optimizer, max_norm=clip)
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
    if strategy != "ddp":
        fabric.strategy.sync.finish()
    return weights(net)


METHODS = ["local_sgd(every=3)", "diloco(every=2)", "ddp(delay=1)", "od_sgd", "palsgd(every=4)"]
METHODS += [
    "adacomm(start=4, interval=4)",
    "streaming_diloco(every=6, fragments=2)",
    "dasgd(every=4)",
    "sparse_loco(every=3)",
]


def clipped_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()


def by_hand(rank: int) -> dict[str, tuple[Tensor, Tensor]]:
    """The weights of the Trainer and of a loop without it, and the size of the optimizer's state."""
    found = {}
    for method in METHODS:
        options: dict[str, Any] = {"loader": Resumable(rank), "max_epochs": 2, "gradient_clip_val": 0.5}
        options["limit_val_batches"] = 0
        trainer = fit(OffbeatStrategy(method), model=Regression(0.2), **options)
        model = Regression(0.2)
        optimizer, scheduler = optimizer_of(model.net)
        sync = offbeat.method(method)(model, optimizer)
        for batches in (Resumable(rank), Resumable(rank)):
            for batch in batches:
                optimizer.zero_grad()
                value = loss(model.net, batch)
                value.backward()
                sync.observe(value)
                sync.step(partial(clipped_step, model, optimizer))
                scheduler.step()
        sync.finish()
        used = [torch.tensor([float(len(o.state))]) for o in (*trainer.optimizers, optimizer)]
        both = [weights(trainer.lightning_module), weights(model)]
        found[method] = torch.cat([both[0], used[0]]), torch.cat([both[1], used[1]])
    return found


def rounds(rank: int) -> dict[str, Any]:
    """Twelve batches and three validations. A round comes after every third batch."""
    watch, model = Watch(), Regression()
    strategy = OffbeatStrategy("local_sgd(every=3)")
    trainer = fit(strategy, watch, model=model, log_every_n_steps=5)
    return {
        "live": watch.weights,
        "shown": model.validated,
        "restored": watch.restored,
        "broadcasts": watch.broadcasts,
        "metrics": {name: float(value) for name, value in trainer.logged_metrics.items()},
        "totals": strategy._started().totals,
        "final": weights(model),
    }


class Kill(Callback):
    """Ends the process right after a checkpoint of this step has been saved, as kill -9 would."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
        if trainer.global_step == self.step:
            os._exit(9)


def training(
    rank: int, folder: Path, resumed: int | None, killed: int | None, step: int | None = None
) -> Tensor:
    """Four epochs of four or five steps, of which some are saved; killed after one, or resumed from it."""
    step = step or resumed or killed
    save = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=step, save_top_k=-1)
    kill = [] if killed is None else [Kill(killed)]
    trainer = fit(
        OffbeatStrategy("diloco(every=3)"),
        *kill,
        save,
        model=Regression(0.3, adam=True),
        loader=data() if step == 8 else Resumable(rank),
        max_epochs=4,
        ckpt_path=None if resumed is None else str(folder / f"step={resumed}.ckpt"),
    )
    return weights(trainer.lightning_module)


def until_stopped(rank: int, folder: Path) -> None:
    """Train without an end. A file says that steps are being made."""

    class Ready(Callback):
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            time.sleep(0.005)
            if trainer.global_step == 5:
                (folder / f"ready-{rank}").touch()

    save = OnExceptionCheckpoint(folder, "stopped")
    fit(OffbeatStrategy("local_sgd(every=20)"), Ready(), save, max_epochs=-1)


class Two(Regression):
    """Manual optimization with two optimizers."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.net[i].parameters(), lr=0.1) for i in (0, 3)]


class Curved(Regression):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters())


class Wrapped(Regression):
    def configure_model(self) -> None:
        self.inner = nn.parallel.DistributedDataParallel(nn.Linear(2, 2))


class Chatty(Regression):
    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        value = super().training_step(batch, index)
        self.log("loss", value, sync_dist=True)
        return value


SENTENCES: dict[str, tuple[Callable[[], Any], str]] = {
    "two optimizers": (
        lambda: fit(OffbeatStrategy(), model=Two()),
        "2 optimizers: Offbeat cannot tell which of their steps ends an iteration: use one, with a group",
    ),
    "LBFGS": (lambda: fit(OffbeatStrategy(), model=Curved()), "LBFGS computes the loss several times in one"),
    "DDP": (
        lambda: fit(OffbeatStrategy(), model=Wrapped()),
        "The model is wrapped in DistributedDataParallel, which averages gradients at every step: ",
    ),
    "sync_dist": (
        lambda: fit(OffbeatStrategy(), model=Chatty()),
        "self.log(..., sync_dist=True) in training_step() averages over the workers at every step: omit",
    ),
    "batch norm": (
        lambda: fit(OffbeatStrategy(), sync_batchnorm=True),
        "Trainer(sync_batchnorm=True) communicates in every forward pass: leave it out",
    ),
    "max_time": (
        lambda: fit(OffbeatStrategy(), max_time="00:01:00:00"),
        "Timer and Trainer(max_time=...) ask rank 0 after every batch: use Timer(interval='epoch').",
    ),
    "train_time_interval": (
        lambda: fit(OffbeatStrategy(), ModelCheckpoint(train_time_interval=timedelta(hours=1))),
        "ModelCheckpoint(train_time_interval=...) asks rank 0 after every batch: use every_n_train_steps.",
    ),
    "URL": (
        lambda: fit(OffbeatStrategy()).save_checkpoint("s3://bucket/a.ckpt"),
        "s3://bucket/a.ckpt: Offbeat saves to a path that every rank can write to, not to a URL.",
    ),
    "an option of DDP": (
        lambda: OffbeatStrategy("diloco", find_unused_parameters=True),
        "OffbeatStrategy(find_unused_parameters=...): the model is not wrapped in DDP, so it has no such",
    ),
    "a typing error": (lambda: OffbeatStrategy("diloco(evry=8)"), "method('diloco(evry=8)'): diloco has no"),
    "Fabric, two optimizers": (
        lambda: fabric_two(),
        "2 optimizers: Offbeat cannot tell which of their steps ends an iteration: use one, with a group",
    ),
}


def fabric_two() -> None:
    fabric = Fabric(accelerator="cpu", devices=2, strategy="offbeat_diloco")
    fabric.launch()
    net = Regression().net
    fabric.setup(net, *[torch.optim.SGD(net[i].parameters(), lr=0.1) for i in (0, 3)])


def errors(rank: int) -> dict[str, str]:
    """What each wrong use says on this rank."""
    found = {}
    for name, (use, _) in SENTENCES.items():
        try:
            use()
        except (TypeError, ValueError, RuntimeError) as error:
            found[name] = str(error)
    return found

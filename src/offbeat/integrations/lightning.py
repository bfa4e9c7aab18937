"""A strategy for Lightning's Trainer with any method in place of DDP."""

from __future__ import annotations

import copy
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from importlib import import_module
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from offbeat.base.errors import CheckpointMismatch, PeerLost
from offbeat.engine.synchronizer import Synchronizer
from offbeat.integrations.fabric import FABRIC, TRAINER, check_optimizers, read_call, register
from offbeat.integrations.fabric import OffbeatFabricStrategy as OffbeatFabricStrategy

pl: Any = import_module(TRAINER)
seeds = import_module(f"{FABRIC}.utilities.seed")


class OffbeatStrategy(pl.strategies.DDPStrategy):  # type: ignore[misc]
    """A strategy of the Trainer: its processes train with a method of Offbeat.

        trainer = Trainer(strategy=OffbeatStrategy("diloco(every=64)"), devices=2)

    `options` are those of Lightning's DDPStrategy that are not for DDP itself, such as `start_method`. While
    `fit` runs and afterwards, `sync` is the synchronizer; with `start_method="fork"` or "spawn", it is None
    in the process that calls `fit`. Validation and checkpoints have the averaged weights. Beside `x.ckpt`,
    the folder `x.ckpt.offbeat` has a file for each rank, from which `fit` resumes.
    """

    def __init__(self, method: str = "diloco", **options: Any) -> None:
        self.method = read_call(type(self), method, options)
        super().__init__(**options)
        self.sync: Synchronizer | None = None
        self._hooks = _Hooks(self)
        self._loaded = ""  # the path of the checkpoint
        self._computing = False  # inside training_step()

    def setup(self, trainer: Any) -> None:
        fitting = trainer.state.fn == pl.trainer.states.TrainerFn.FITTING
        if fitting:
            _check_silent(trainer, self._layer_sync)
        super().setup(trainer)
        if fitting:
            check_optimizers(self.optimizers)
            self.sync = self.method(self.lightning_module, self.optimizers)
            if self._hooks not in trainer.callbacks:
                trainer.callbacks.insert(0, self._hooks)
            _stop_broadcasts(trainer)

    def configure_ddp(self) -> None:
        """Leave the model as it is: DDP would average gradients in every step."""

    def block_backward_sync(self) -> AbstractContextManager[None]:
        return self._started().accumulate()

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        self._computing = True
        try:
            return super().training_step(*args, **kwargs)
        finally:
            self._computing = False

    def reduce(self, *args: Any, **kwargs: Any) -> Any:
        if self._computing:
            raise ValueError(
                "self.log(..., sync_dist=True) in training_step() averages over the workers at every step: "
                "omit sync_dist, or add on_step=False and on_epoch=True."
            )
        return super().reduce(*args, **kwargs)

    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Any:
        # Lightning has divided the loss of the batch by the number of batches in a step.
        batches = self.lightning_module.trainer.accumulate_grad_batches
        self._started().observe(closure_loss.detach() * batches)
        return super().backward(closure_loss, optimizer, *args, **kwargs)

    def optimizer_step(
        self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any
    ) -> Any:
        sync = self._started()
        loss = closure()  # gradients must be ready before they are unscaled and clipped
        with self._stopping():
            with nullcontext() if sync.before_step() else sync.still():
                output = super().optimizer_step(optimizer, lambda: loss, model, **kwargs)
            sync.after_step()
        return output

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The averaged weights, for a checkpoint. After an error, those of this worker."""
        with self._stopping(), self._hooks.averaged():
            return copy.deepcopy(super().lightning_module_state_dict())

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        exact = "optimizer_states" in checkpoint and self._hooks.together and self.sync is not None
        if exact:
            checkpoint["offbeat"] = f"step-{self._started().steps}"
            folder = _folder(filepath)
            self._started().save(folder / checkpoint["offbeat"])
        super().save_checkpoint(checkpoint, filepath, storage_options)
        if exact:  # the checkpoint of this name was replaced, so its files are obsolete
            self.barrier()
            for other in folder.iterdir() if self.local_rank == 0 else ():
                if other.name != checkpoint["offbeat"]:
                    shutil.rmtree(other, ignore_errors=True)

    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        self._loaded = checkpoint_path
        return super().load_checkpoint(checkpoint_path, *args, **kwargs)  # type: ignore[no-any-return]

    def load_optimizer_state_dict(self, checkpoint: Any) -> None:
        """Also load this rank's weights and the method's state, if this strategy saved the checkpoint."""
        super().load_optimizer_state_dict(checkpoint)
        if "offbeat" in checkpoint:
            folder = _folder(os.path.realpath(self._loaded))  # last.ckpt may be a link
            if not self._started().load(folder / checkpoint["offbeat"]):
                raise CheckpointMismatch(
                    f"{self._loaded}: the files of its ranks are missing: put {folder.name} beside it."
                )
            self._hooks.random = self._hooks.resumed = seeds._collect_rng_states()

    def remove_checkpoint(self, filepath: Any) -> None:
        super().remove_checkpoint(filepath)
        if self.local_rank == 0:
            shutil.rmtree(f"{filepath}.offbeat", ignore_errors=True)

    @contextmanager
    def _stopping(self) -> Iterator[None]:
        """After SIGTERM, a worker whose peers have left stops as they do."""
        try:
            yield
        except PeerLost:
            if self.lightning_module.trainer.received_sigterm:
                raise pl.utilities.exceptions.SIGTERMException from None
            raise

    def _started(self) -> Synchronizer:
        if self.sync is None:
            raise RuntimeError(f"{self.method}: there is no synchronizer before Trainer.fit().")
        return self.sync


class _Hooks(pl.Callback):  # type: ignore[misc]
    """The first callback of the Trainer."""

    def __init__(self, strategy: OffbeatStrategy) -> None:
        self.strategy = strategy
        self.random: dict[str, Any] | None = None  # the state of random numbers after the last batch
        self.resumed: dict[str, Any] | None = None  # that state when training resumes
        self.shown = ExitStack()  # holds averaged() during validation
        self.validating, self.together, self.logged = False, True, 0

    def averaged(self) -> AbstractContextManager[None]:
        """Show the averaged weights, unless they are shown already, or this worker has left the others."""
        show = self.together and not self.validating and self.strategy.sync is not None
        return self.strategy._started().averaged() if show else nullcontext()

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.together = True
        self.strategy._started().start()
        if self.resumed is not None:
            self.resumed = seeds._collect_rng_states()  # an iterator over the data has drawn since

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if self.resumed is not None:  # within an epoch, the iterator had already drawn
            seeds._set_rng_states(self.random if batch_idx > 0 else self.resumed)
            self.resumed = None

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        self.random, step = seeds._collect_rng_states(), trainer.global_step
        if step != self.logged and step % trainer.log_every_n_steps == 0:
            self.logged = step
            pl_module.log_dict(self.strategy._started().metrics(), on_step=True, on_epoch=False)

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.state.fn == pl.trainer.states.TrainerFn.FITTING:
            with self.strategy._stopping():
                self.shown.enter_context(self.averaged())
            self.validating = True

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Restore the live weights and random states before checkpoints are saved.

        A run that resumes from a checkpoint of the last batch skips the validation, and must not differ.
        """
        self.shown.close()
        if self.validating and self.random is not None:
            seeds._set_rng_states(self.random)
        self.validating = False

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.strategy._started().finish()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self.on_validation_end(trainer, pl_module)
        self.together = False
        if self.strategy.sync is not None:
            self.strategy.sync.__exit__(type(exception), exception, exception.__traceback__)


def _check_silent(trainer: Any, layer_sync: Any) -> None:
    """Raise if the Trainer is set up to communicate in every step."""
    if layer_sync:
        raise ValueError(
            "Trainer(sync_batchnorm=True) communicates in every forward pass: leave it out; rounds average "
            "the buffers."
        )
    for callback in trainer.callbacks:
        if isinstance(callback, pl.callbacks.Timer) and callback._interval == "step":
            raise ValueError(
                "Timer and Trainer(max_time=...) ask rank 0 after every batch: use Timer(interval='epoch')."
            )
        if isinstance(callback, pl.callbacks.ModelCheckpoint) and callback._train_time_interval is not None:
            raise ValueError(
                "ModelCheckpoint(train_time_interval=...) asks rank 0 after every batch: use "
                "every_n_train_steps."
            )


def _folder(filepath: Any) -> Path:
    """Return the folder with the files of the ranks. A link is not followed: saving replaces it."""
    if "://" in str(filepath):
        raise ValueError(f"{filepath}: Offbeat saves to a path that every rank can write to, not to a URL.")
    return Path(f"{filepath}.offbeat")


def _stop_broadcasts(trainer: Any) -> None:
    """Stop the broadcasts of SIGTERM, which Lightning makes before every batch and when the signal arrives.

    Instead, a worker stops after the batch in which it gets the signal. Others that wait for it stop as well.
    """
    connector = trainer._signal_connector

    def notice(number: int, frame: Any) -> None:
        if not connector.received_sigterm and trainer.strategy.launcher is not None:
            trainer.strategy.launcher.kill(number)
        connector.received_sigterm = True

    connector._sigterm_notifier_fn = notice
    trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None


register(pl.strategies.StrategyRegistry, OffbeatStrategy)

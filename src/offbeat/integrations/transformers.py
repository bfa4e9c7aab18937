"""Offbeat inside transformers: `OffbeatTrainer`, and `OffbeatMixin` for other trainers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import IterableDataset

from offbeat.base.errors import CheckpointMismatch, how_to_install
from offbeat.engine.optimizers import check_unwrapped
from offbeat.engine.report import logger
from offbeat.engine.synchronizer import Synchronizer
from offbeat.methods.expression import method as parse

try:
    from accelerate import Accelerator
    from transformers import Trainer, TrainerCallback, TrainingArguments
    from transformers.trainer import TRAINER_STATE_NAME

    from offbeat.integrations.accelerate import LocalSGD, check_accelerator, refuse_both
except ImportError as error:
    needed = f"offbeat.integrations.transformers needs transformers: {how_to_install('transformers')}"
    raise ImportError(needed) from error

if TYPE_CHECKING:
    Base = Trainer
else:
    Base = object


class OffbeatMixin(Base):
    """Gives a trainer a method of Offbeat in place of DDP: `class Mine(OffbeatMixin, SFTTrainer)`.

    `method` is any expression of Offbeat. Evaluation and saved models show the consensus of the workers.
    Checkpoints have one more file per rank, so that a resumed run continues bit for bit. Logs carry
    `sync.metrics()`. `sync` is the synchronizer of the current or last `train()`; None with one process.
    """

    _rounds: LocalSGD | None = None
    _shown = False  # whether the model is the consensus now

    def __init__(self, *args: Any, method: str = "diloco(every=64)", **options: Any) -> None:
        self._method = str(parse(method))
        super().__init__(*args, **options)
        assert self.model is not None
        check_unwrapped(self.model)
        check_data(self.train_dataset, self.args)
        self.callback_handler.callbacks.insert(0, _Updates(self))  # before those that look at the weights

    @property
    def sync(self) -> Synchronizer | None:
        return None if self._rounds is None else self._rounds.sync

    def create_accelerator_and_postprocess(self) -> None:
        check_arguments(self.args, type(self).__name__)
        super().create_accelerator_and_postprocess()
        check_accelerator(self.accelerator, type(self).__name__, "TrainingArguments(use_cpu=True)")
        unwrapped = partial(self.accelerator.prepare_model, evaluation_mode=True)  # places it, without DDP
        vars(self.accelerator)["prepare_model"] = unwrapped

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **options: Any) -> Any:
        if resume_from_checkpoint is True:
            resume_from_checkpoint = find_newest(str(self.args.output_dir)) or True
        try:
            return super().train(resume_from_checkpoint, *args, **options)
        except BaseException as error:
            self._end(error)
            self._rounds = None
            raise

    def _begin(self) -> None:
        """Make the synchronizer of this `train()`. Model and optimizer are prepared."""
        if self._rounds is None or (self.sync is not None and self.sync.finished):
            assert self.model is not None
            self._rounds = LocalSGD(self.accelerator, self.model, method=self._method)
            self._rounds.__enter__()

    def _end(self, error: BaseException | None = None) -> None:
        if self._rounds is not None:
            self._rounds.__exit__(None if error is None else type(error), error, None)

    @contextmanager
    def _consensus(self) -> Iterator[None]:
        """Inside, the model is the consensus of the workers. Calls may be nested."""
        sync = self.sync
        if sync is None or sync.finished or self._shown:
            yield
            return
        self._shown = True
        try:
            with sync.averaged():
                yield
        finally:
            self._shown = False

    def evaluate(self, *args: Any, **options: Any) -> Any:
        with self._consensus():
            return super().evaluate(*args, **options)

    def predict(self, *args: Any, **options: Any) -> Any:
        with self._consensus():
            return super().predict(*args, **options)

    def save_model(self, *args: Any, **options: Any) -> None:
        """Save the consensus. While the trainer trains, every rank calls it."""
        with self._consensus():
            super().save_model(*args, **options)

    def log(self, logs: dict[str, float], *args: Any, **options: Any) -> None:
        if self.sync is not None and logs.keys() & {"loss", "train_loss"}:
            logs.update(self.sync.metrics())
        super().log(logs, *args, **options)

    def _save_rng_state(self, output_dir: str) -> None:
        """Each rank's last file. All are complete when rank 0 writes the description of the folder."""
        super()._save_rng_state(output_dir)
        if self.sync is not None:
            assert self.lr_scheduler is not None
            self.sync.save(output_dir, scheduler=self.lr_scheduler)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        self._begin()
        if self.sync is None or checkpoint is None:
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        assert self.lr_scheduler is not None
        if self.sync.load(checkpoint, scheduler=self.lr_scheduler):
            return
        check_absent(checkpoint, self.accelerator)
        if self.args.process_index == 0:
            logger.warning("%s has no files of Offbeat: all workers start from its weights.", checkpoint)
        super()._load_optimizer_and_scheduler(checkpoint)

    def _load_best_model(self) -> None:
        self._end()  # what is in flight lands before the best model takes its place
        super()._load_best_model()


class OffbeatTrainer(OffbeatMixin, Trainer):
    """A `transformers.Trainer` whose workers rarely communicate.

    trainer = OffbeatTrainer(model, args, train_dataset=data, method="diloco(every=64)")
    trainer.train()
    """


class _Updates(TrainerCallback):
    """Tells the synchronizer of its trainer where the loop is."""

    def __init__(self, trainer: OffbeatMixin) -> None:
        self.trainer = trainer

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self.trainer._begin()

    def on_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        assert self.trainer._rounds is not None
        self.trainer._rounds.step()

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        self.trainer._end()


def find_newest(folder: str) -> str | None:
    """Return the newest complete checkpoint: one with a description, which is written last."""
    found = {path: path.name.rpartition("-")[2] for path in Path(folder).glob("checkpoint-*")}
    for path in sorted((p for p in found if found[p].isdigit()), key=lambda p: -int(found[p])):
        with suppress(OSError, ValueError):
            json.loads((path / TRAINER_STATE_NAME).read_text())
            return str(path)
    return None


def check_absent(checkpoint: str, accelerator: Accelerator) -> None:
    """Raise on every rank if one of them has a file of Offbeat in the checkpoint. Every rank calls it."""
    own = any(Path(checkpoint).glob(f"offbeat-step-*-rank-{accelerator.process_index}-of-*.pt"))
    found = accelerator.gather(torch.tensor([own], device=accelerator.device)).tolist()
    if any(found):
        ranks = [rank for rank, has in enumerate(found) if has]
        raise CheckpointMismatch(
            f"{checkpoint} has files of Offbeat, but no step of which every rank has one (ranks with a file: "
            f"{ranks}): put back the missing ones, or delete offbeat-step-* to start from its weights."
        )


def check_arguments(args: TrainingArguments, call: str) -> None:
    """Refuse arguments that make workers communicate at every step, or restart a worker alone."""
    for name in ("deepspeed", "fsdp"):
        if getattr(args, name):
            raise refuse_both(call, name.upper())
    if args.auto_find_batch_size:
        raise ValueError(
            "TrainingArguments(auto_find_batch_size=True): a worker that starts again leaves the others "
            "waiting: pass False."
        )
    everywhere = {
        "average_tokens_across_devices": args.average_tokens_across_devices,
        "include_num_input_tokens_seen": args.include_num_input_tokens_seen not in (False, "no"),
    }
    for name, gathers in everywhere.items():
        if gathers and args.world_size > 1:
            raise ValueError(
                f"TrainingArguments({name}={getattr(args, name)!r}): workers would gather their numbers of "
                "tokens at every step: pass False."
            )


def check_data(dataset: Any, args: TrainingArguments) -> None:
    """Refuse data that rank 0 would read and send to the others, batch by batch."""
    config: Any = args.accelerator_config
    dispatched = isinstance(dataset, IterableDataset) and config.dispatch_batches is not False
    if dispatched and args.world_size > 1:
        raise ValueError(
            "train_dataset is an IterableDataset, which rank 0 reads and sends to all at every step: pass "
            'TrainingArguments(accelerator_config={"dispatch_batches": False}).'
        )

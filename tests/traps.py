"""Training in real frameworks, each with what it sends at every step: `torchrun --nproc-per-node 2 traps.py`.

The watch names all of them. What it says goes to standard error.
"""

from __future__ import annotations

import functools
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

import offbeat

STEPS = 20


class Stream(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        return iter(torch.randn(400, 3))


def accelerate() -> None:
    """The batches of an iterable dataset are read on rank 0. Another wrapper averages gradients as well."""
    from accelerate import Accelerator

    accelerator, model = Accelerator(cpu=True), nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wrapped, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(Stream(), batch_size=4))
    sync = offbeat.local_sgd(wrapped.module, optimizer.optimizer, every=8)
    for batch, _ in zip(loader, range(STEPS), strict=False):
        accelerator.backward(wrapped(batch).square().mean())
        sync.step(optimizer.step)
        optimizer.zero_grad()
    sync.finish()


def transformers() -> None:
    """Token counts are gathered at every step."""
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

    class Hooks(TrainerCallback):  # type: ignore[misc]
        sync: offbeat.Synchronizer | None = None

        def on_pre_optimizer_step(self, *_: Any, model: Any, optimizer: Any, **__: Any) -> None:
            self.sync = self.sync or offbeat.local_sgd(model, optimizer.optimizer, every=8)
            self.sync.before_step()

        def on_optimizer_step(self, *_: Any, **__: Any) -> None:
            assert self.sync is not None
            self.sync.after_step()

    config = GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=16, n_positions=8, bos_token_id=0)
    tokens = torch.randint(0, 16, (400, 8))
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, use_cpu=True, max_steps=STEPS, report_to=[], save_strategy="no", disable_tqdm=True
        )
        trainer = Trainer(
            GPT2LMHeadModel(config), arguments, callbacks=[Hooks()],
            train_dataset=[{"input_ids": row, "labels": row} for row in tokens],
        )  # fmt: skip
        prepare = trainer.accelerator.prepare_model
        trainer.accelerator.prepare_model = functools.partial(prepare, evaluation_mode=True)
        trainer.train()


def lightning() -> None:
    """A flag is broadcast before every batch, and a logged value is averaged."""
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.strategies import DDPStrategy

    class Plain(DDPStrategy):  # type: ignore[misc]
        def _setup_model(self, model: nn.Module) -> nn.Module:
            return model

        def _register_ddp_hooks(self) -> None:
            pass

        def setup(self, trainer: Any) -> None:
            super().setup(trainer)
            self.sync = offbeat.local_sgd(self.lightning_module, self.optimizers, every=8)

        def optimizer_step(self, optimizer: Any, closure: Any, model: Any = None, **options: Any) -> Any:
            result = super().optimizer_step(
                optimizer, lambda: (closure(), self.sync.before_step())[0], model, **options
            )
            self.sync.after_step()
            return result

    class Module(LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 1)

        def training_step(self, batch: Tensor, index: int) -> Tensor:
            loss = self.layer(batch).square().mean()
            self.log("loss", loss, sync_dist=True, on_step=True)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    trainer = Trainer(
        accelerator="cpu", devices=2, strategy=Plain(), max_steps=STEPS, logger=False,
        enable_progress_bar=False, enable_checkpointing=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Module(), DataLoader(torch.randn(400, 3), batch_size=4))


if __name__ == "__main__":
    torch.set_num_threads(1)
    for name in sys.argv[1:]:
        print(name, file=sys.stderr, flush=True)
        globals()[name]()

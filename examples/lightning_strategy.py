"""Lightning with DiLoCo on two CPU processes: an MLP learns handwritten digits and meets every 16 steps.

torchrun --standalone --nproc-per-node 2 examples/lightning_strategy.py

Without torchrun, Lightning starts the second process itself: python examples/lightning_strategy.py
"""

import logging
import os
import tempfile
import warnings

import lightning.pytorch as pl
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from offbeat.integrations.lightning import OffbeatStrategy  # 1

torch.set_num_threads(1)
warnings.simplefilter("ignore")  # of Lightning: few workers for the loader, and old calls of torch
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
logging.getLogger("lightning.fabric").setLevel(logging.ERROR)


class Digits(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        pictures, labels = batch
        return nn.functional.cross_entropy(self.net(pictures), labels)

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        pictures, labels = batch  # the weights are the averaged ones
        right = (self.net(pictures).argmax(1) == labels).float().mean()
        self.log("accuracy", right, sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.003)


def loader(first: int, last: int) -> DataLoader:
    """Lightning gives each process its own part of the samples."""
    pictures, labels = load_digits(return_X_y=True)
    samples = TensorDataset(torch.tensor(pictures[first:last] / 16).float(), torch.tensor(labels[first:last]))
    return DataLoader(samples, batch_size=32, shuffle=first == 0)


def main() -> None:
    pl.seed_everything(0, verbose=False)
    with tempfile.TemporaryDirectory() as folder:
        save = pl.callbacks.ModelCheckpoint(folder, monitor="accuracy", mode="max")
        trainer = pl.Trainer(
            strategy=OffbeatStrategy("diloco(every=16)"),  # 2
            accelerator="cpu",
            devices=int(os.environ.get("LOCAL_WORLD_SIZE", "2")),
            num_nodes=int(os.environ.get("GROUP_WORLD_SIZE", "1")),
            max_epochs=6,
            callbacks=[save],
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(Digits(), loader(0, 1437), loader(1437, 1797))
        trainer.strategy.barrier()  # rank 0 deletes its folder when all have finished
    if trainer.is_global_zero:
        sync = trainer.strategy.sync
        print(f"accuracy {trainer.callback_metrics['accuracy']:.3f} after {trainer.global_step} steps")
        print(sync, "cost", sync.totals)


if __name__ == "__main__":
    main()

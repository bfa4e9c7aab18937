"""Lightning with DiLoCo on two CPU processes: an MLP learns handwritten digits and meets every 16 steps.

    torchrun --standalone --nproc-per-node 2 examples/lightning_strategy.py

Any method of Offbeat may follow, and "ddp" trains with Lightning's DDP instead. Without torchrun, Lightning
starts the second process itself.
"""

import argparse
import logging
import os
import tempfile
import time
import warnings

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins.environments import TorchElasticEnvironment
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from offbeat.integrations.lightning import OffbeatStrategy  # 1

warnings.simplefilter("ignore")  # of Lightning: few workers for the loader, and old calls of torch
for name in ("lightning.pytorch", "lightning.fabric"):
    logging.getLogger(name).setLevel(logging.ERROR)


class Digits(pl.LightningModule):
    def __init__(self, width: int) -> None:
        super().__init__()
        sizes = nn.Linear(64, width), nn.Linear(width, width), nn.Linear(width, 10)
        self.net = nn.Sequential(sizes[0], nn.ReLU(), sizes[1], nn.ReLU(), sizes[2])

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        right = self.net(batch[0]).argmax(1) == batch[1]  # with Offbeat, the weights are the averaged ones
        self.log("accuracy", right.float().mean(), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.003)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("method", nargs="?", default="diloco(every=16)")
    parser.add_argument("--steps", type=int, default=92)
    parser.add_argument("--width", type=int, default=64)
    args = parser.parse_args()
    torch.set_num_threads(1)
    pictures, labels = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(pictures / 16).float(), torch.tensor(labels))
    seen, held = torch.utils.data.random_split(data, [1437, 360], torch.Generator().manual_seed(0))
    processes, folder = int(os.environ.get("LOCAL_WORLD_SIZE", "2")), tempfile.TemporaryDirectory()
    trainer = pl.Trainer(
        strategy=OffbeatStrategy(args.method) if args.method != "ddp" else "ddp",  # 2
        accelerator="cpu",
        devices=processes,
        num_nodes=int(os.environ.get("WORLD_SIZE", processes)) // processes,
        plugins=TorchElasticEnvironment() if "RANK" in os.environ else None,
        max_steps=args.steps,
        callbacks=[pl.callbacks.ModelCheckpoint(folder.name, monitor="accuracy", mode="max")],
        **dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False),
    )
    model, unseen, ddp = Digits(args.width), DataLoader(held, batch_size=32), args.method == "ddp"
    began = time.perf_counter()
    trainer.fit(model, DataLoader(seen, batch_size=32, shuffle=True), unseen)
    seconds = time.perf_counter() - began
    accuracy = trainer.validate(model, unseen, verbose=False)[0]["accuracy"]
    if trainer.is_global_zero:
        sent = "" if ddp else f", {trainer.strategy.sync.totals.bytes_sent / 1e6:.2f} MB sent"
        print(f"{args.method}: accuracy {accuracy:.3f}{sent} in {seconds:.2f} s")
    folder.cleanup()


if __name__ == "__main__":
    main()

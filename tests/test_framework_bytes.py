"""Between rounds, frameworks send nothing: the kernel counts what Offbeat accounts for."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import frameworks
import pytest
import torch
import warm
from test_lab import needs_lab
from torch import nn

from offbeat.lab import Lab

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group(frameworks.GROUP)]
METHOD = "local_sgd(every=50)"
UPDATES = 100
COUNTER = Path("/sys/class/net/eth0/statistics/tx_bytes")


class Words(nn.Module):
    """Much to send, little to compute."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(60_000, 16), nn.Linear(16, 2)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": nn.functional.cross_entropy(self.head(self.table(x)), labels)}


def data() -> list[dict[str, int]]:
    return [{"x": i * 7 % 60_000, "labels": i % 2} for i in range(2 * UPDATES * 2 * 2)]


def trainer(folder: str) -> Any:
    from transformers import TrainingArguments

    from offbeat.integrations.transformers import OffbeatTrainer

    args = TrainingArguments(
        folder,
        use_cpu=True,
        average_tokens_across_devices=False,
        max_steps=UPDATES,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        logging_steps=50,
        optim="sgd",
        report_to="none",
        disable_tqdm=True,
        save_strategy="no",
        dataloader_pin_memory=False,
    )
    run = OffbeatTrainer(Words(), args, train_dataset=data(), method=METHOD)
    run.train()
    return run.sync


def accelerated(folder: str) -> Any:
    from accelerate import Accelerator

    from offbeat.integrations.accelerate import LocalSGD

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = accelerator.prepare_model(Words(), evaluation_mode=True)
    loader = torch.utils.data.DataLoader(data(), batch_size=2)  # type: ignore[arg-type]
    optimizer, loader = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.1), loader)
    with LocalSGD(accelerator, model, method=METHOD) as local_sgd:
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(**batch)["loss"])
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                local_sgd.step()
    return local_sgd.sync


RUNS = {"trainer": trainer, "accelerated": accelerated}


@needs_lab
def test_only_rounds_send(tmp_path: Path) -> None:
    with Lab(2) as lab, warm.on_hosts(frameworks.NEEDED):
        command = [sys.executable, __file__, str(tmp_path)]
        hosts = lab.run(command, env=frameworks.ENVIRONMENT, timeout=300)
    assert [host.returncode for host in hosts] == [0, 0], hosts[0].stderr
    found = [json.loads(host.stdout.splitlines()[-1]) for host in hosts]
    for name in RUNS:
        steps, counted, accounted = zip(*[host[name] for host in found], strict=True)
        assert steps == (UPDATES, UPDATES)
        assert sum(accounted) > 4 * 60_000 * 16 * (2 * 2 + 1)  # two rounds of two workers, and the start
        # In the sum: the bytes of the start are rank 0's, but are accounted for in equal shares.
        # A further message of the model would be a fifth. On a busy machine, TCP sends some packets twice.
        assert sum(accounted) < sum(counted) < 1.1 * sum(accounted), name


LIGHTNING = """
import logging, os, warnings
warnings.simplefilter("ignore")
import torch
torch.set_num_threads(1)
import lightning.pytorch as pl
from torch import nn
from offbeat.integrations.lightning import OffbeatStrategy
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

def counted():
    with open("/sys/class/net/eth0/statistics/tx_bytes") as file:
        return int(file.read())

class Wide(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(600, 600)
    def training_step(self, batch, index):
        return self.net(batch).square().mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

class Count(pl.Callback):
    def on_train_batch_end(self, trainer, module, outputs, batch, index):
        if index in (49, 149):  # right after a round
            self.notes = getattr(self, "notes", []) + [trainer.strategy.sync.totals.bytes_sent, counted()]

count = Count()
trainer = pl.Trainer(
    strategy=OffbeatStrategy("local_sgd(every=50)"), accelerator="cpu", devices=1, num_nodes=2, max_steps=150,
    logger=False, enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
    callbacks=[count], use_distributed_sampler=False,
)
trainer.fit(Wide(), torch.utils.data.DataLoader(torch.randn(150, 600)))
print(count.notes[2] - count.notes[0], count.notes[3] - count.notes[1])
"""


@needs_lab
def test_only_rounds_of_lightning_send(tmp_path: Path) -> None:
    """From the end of one round to that of the second after it: 100 steps."""
    script = tmp_path / "worker.py"
    script.write_text(LIGHTNING)
    with Lab(2) as lab, warm.on_hosts(frameworks.NEEDED):
        hosts = lab.run([sys.executable, str(script)], env={"TORCHELASTIC_RUN_ID": "lab"}, timeout=240)
    assert [host.returncode for host in hosts] == [0, 0], hosts[0].stderr
    reported, counted = (sum(int(host.stdout.split()[i]) for host in hosts) for i in (0, 1))
    assert reported == pytest.approx(counted, rel=0.05)


if __name__ == "__main__":
    torch.manual_seed(0)
    result = {}
    torch.distributed.init_process_group("gloo")
    for name, run in RUNS.items():
        torch.distributed.barrier()
        before = int(COUNTER.read_text())
        sync = run(sys.argv[1])
        torch.distributed.barrier()
        result[name] = sync.steps, int(COUNTER.read_text()) - before, sync.totals.bytes_sent
    print(json.dumps(result))

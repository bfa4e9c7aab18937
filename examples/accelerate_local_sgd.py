"""Local SGD inside accelerate: a script for accelerate's own LocalSGD, with one import changed.

    torchrun --nproc-per-node 2 examples/accelerate_local_sgd.py

Any method of Offbeat may follow, and "ddp" trains with accelerate's DDP instead. On CPUs it runs as it is.
"""

import argparse
import time

import torch
from accelerate import Accelerator
from torch import nn

from offbeat.integrations.accelerate import LocalSGD  # was: from accelerate.local_sgd import LocalSGD


def batches(count: int, width: int) -> torch.utils.data.DataLoader:
    """Noisy observations of a rotation."""
    draw = torch.Generator().manual_seed(0)
    rotation = torch.linalg.qr(torch.randn(width, width, generator=draw))[0]
    x = torch.randn(count, width, generator=draw)
    y = x @ rotation + 0.1 * torch.randn(count, width, generator=draw)
    data = torch.utils.data.TensorDataset(x, y)
    return torch.utils.data.DataLoader(data, batch_size=16, shuffle=True, generator=draw)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("method", nargs="?", default="local_sgd(every=16)")
    parser.add_argument("--updates", type=int, default=64)
    parser.add_argument("--width", type=int, default=64)
    args = parser.parse_args()
    accelerator = Accelerator(cpu=not torch.cuda.is_available(), gradient_accumulation_steps=2)
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(args.width, 4 * args.width), nn.GELU(), nn.Linear(4 * args.width, args.width)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loader = batches(2 * 16 * accelerator.num_processes * args.updates, args.width)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(
        optimizer, args.updates * accelerator.num_processes
    )
    local = args.method != "ddp"
    # Without DDP there are no buckets of gradients; a model that prepare() has wrapped works as well.
    model = accelerator.prepare_model(model, evaluation_mode=local)
    optimizer, loader, scheduler = accelerator.prepare(optimizer, loader, scheduler)
    method = args.method if local else "local_sgd(every=16)"
    losses, began = [], time.perf_counter()
    with LocalSGD(accelerator, model, enabled=local, method=method) as local_sgd:
        for x, y in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.mse_loss(model(x), y)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                local_sgd.step()
            losses.append(loss.detach())
    first, last = (torch.stack(part).mean().item() for part in (losses[:8], losses[-8:]))
    seconds = time.perf_counter() - began
    sent = f", {local_sgd.sync.totals.bytes_sent / 1e6:.2f} MB sent" if local_sgd.sync else ""
    accelerator.print(f"{args.method}: loss {first:.3f} -> {last:.3f}{sent} in {seconds:.2f} s")
    accelerator.end_training()


if __name__ == "__main__":
    main()

"""How much loss codes cost: the same training with and without them, seed by seed.

    python benchmarks/codes/study.py --data tinyshakespeare.txt
    python benchmarks/codes/study.py                               # only prints the table

Four workers, simulated except for `ddp_hook`. A run with a code starts from the same weights and sees the
same batches as the run without one. Appends one line per run to study.jsonl beside this file, skips what is
there already, and prints the table: the mean difference to the exact mean over the seeds, with its standard
error.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import offbeat
from offbeat.tasks import bytes as text
from offbeat.tasks import bytes_task, digits_task

RESULTS = Path(__file__).parent / "study.jsonl"
WORKERS = 4
WINDOWS = 1024  # held-out windows of text; 64 would add noise
DIGITS, BYTES, LOW = "digits, SGD 0.05", "bytes, AdamW 0.003", "bytes, AdamW 0.001"
SETTINGS = {  # task, optimizer, learning rate and steps
    DIGITS: ("digits", "SGD", 0.05, 200),
    BYTES: ("bytes", "AdamW", 0.003, 200),
    LOW: ("bytes", "AdamW", 0.001, 400),
}
FEEDBACK = [f"ErrorFeedback(Quantized({bits}))" for bits in (4, 3, 2)]
HALF, WHOLE = (
    [f"ErrorFeedback(Quantized({bits}), decay={decay})" for bits in (4, 3, 2)] for decay in (0.5, 1.0)
)
UNLIMITED = [f"ErrorFeedback(Quantized({bits}), decay=1.0, limit=1e9)" for bits in (4, 3, 2)]
CODES = ["Mean()", "Mean('bfloat16')", *FEEDBACK, *HALF, *WHOLE, *UNLIMITED, "Quantized(4)", "Quantized(2)"]
DDP, LOCAL, HOOK = "ddp(reduce={})", "local_sgd(every=4, reduce={})", "ddp_hook({})"
# What is run: a setting, a method, its codes, and the number of seeds. What answers most comes first.
PLAN = [
    (LOW, DDP, [CODES[0], *WHOLE[:2]], 8),
    (LOW, DDP, [CODES[1], *FEEDBACK, WHOLE[2]], 5),
    (LOW, DDP, CODES[-2:], 3),
    (LOW, HOOK, [CODES[0], FEEDBACK[0]], 3),
    (LOW, LOCAL, [CODES[0], *FEEDBACK, *HALF], 5),
    (DIGITS, DDP, [CODES[0], FEEDBACK[0], WHOLE[0], UNLIMITED[0]], 20),
    (DIGITS, DDP, [*FEEDBACK[1:], *WHOLE[1:], *UNLIMITED[1:], *CODES[-2:]], 10),
    (DIGITS, LOCAL, [CODES[0], *FEEDBACK, *HALF], 5),
    (BYTES, DDP, CODES[:2], 5),
]


def rate(step: int, steps: int, warmup: int = 40) -> float:
    """A linear warm-up, then a cosine down to a tenth."""
    if step < warmup:
        return (step + 1) / warmup
    return 0.55 + 0.45 * math.cos(math.pi * (step - warmup) / (steps - warmup))


def build_optimizer(model: nn.Module, name: str, lr: float) -> torch.optim.Optimizer:
    if name == "AdamW":
        return torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.1)
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)


@dataclass(frozen=True)
class Training:
    """What the workers of a run have in common."""

    setting: str
    expression: str
    seed: int
    data: str | None

    def train(self, rank: int, comm: offbeat.Communicator | None) -> dict:
        """What one worker does. Without a communicator, `DistributedDataParallel` trains with our hook."""
        kind, name, lr, steps = SETTINGS[self.setting]
        text.EVALUATED = WINDOWS
        torch.set_num_threads(1)
        torch.manual_seed(self.seed)
        digits = kind == "digits"
        task = (
            digits_task(seed=self.seed)
            if digits
            else bytes_task("tiny", data=self.data, context=32, seed=self.seed)
        )
        model = task.model()
        optimizer = build_optimizer(model, name, lr)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate(step, steps))
        batches = task.batches(rank, WORKERS, task.batch_size, self.seed)

        def local() -> None:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()

        if comm is None:
            hook = offbeat.ddp_hook(find_reducer(self.expression))
            trained: nn.Module = DistributedDataParallel(model)
            trained.register_comm_hook(None, hook)
            step = local
        else:
            sync = offbeat.method(self.expression)(model, optimizer, group=comm)
            trained, step = model, lambda: sync.step(local)
        for _ in range(steps):
            task.loss(trained, next(batches)).backward()
            step()
            optimizer.zero_grad()
            scheduler.step()
        sent = hook.sent if comm is None else sync.totals.bytes_sent
        if comm is not None:
            sync.finish()
        return {"loss": task.evaluate(model) if rank == 0 else 0.0, "megabytes": sent / 1e6}


def find_reducer(expression: str) -> offbeat.Reducer:
    """The reducer in `ddp_hook(...)`."""
    inside = expression.removeprefix("ddp_hook(").removesuffix(")")
    return offbeat.method(f"ddp(reduce={inside})").arguments["reduce"]


def train_for_real(rank: int, training: Training, folder: str) -> None:
    """One process of a run over gloo. Rank 0 writes its result to a file."""
    dist.init_process_group(
        "gloo", store=dist.FileStore(f"{folder}/store", WORKERS), rank=rank, world_size=WORKERS
    )
    result = training.train(rank, None)
    if rank == 0:
        Path(folder, "result").write_text(json.dumps(result))
    dist.destroy_process_group()


def run(setting: str, expression: str, seed: int, data: str | None) -> dict:
    training = Training(setting, expression, seed, data)
    start = time.perf_counter()
    if expression.startswith("ddp_hook"):  # torch's DDP is not simulated
        with tempfile.TemporaryDirectory() as folder:
            torch.multiprocessing.spawn(train_for_real, (training, folder), WORKERS)
            result = json.loads(Path(folder, "result").read_text())
    else:
        result = offbeat.simulate(lambda comm: training.train(comm.rank, comm), WORKERS)[0]
    row = {"setting": setting, "method": expression, "seed": seed, "steps": SETTINGS[setting][-1], **result}
    return {**row, "seconds": round(time.perf_counter() - start, 1)}


def table(rows: list[dict]) -> str:
    """One line per setting, method and code, with the exact mean first."""
    found = {(row["setting"], row["method"], row["seed"]): row for row in rows}
    lines = ["| task | method | loss | difference | seeds | bytes ÷ fp32 |", "|---|---|---|---|---|---|"]
    for setting, method, code in cells():
        exact, coded = method.format(CODES[0]), method.format(code)
        seeds = [s for t, m, s in found if (t, m) == (setting, coded) and (setting, exact, s) in found]
        pairs = [(found[setting, coded, s], found[setting, exact, s]) for s in seeds]
        if pairs:
            loss = statistics.mean(row["loss"] for row, _ in pairs)
            share = statistics.mean(row["megabytes"] / base["megabytes"] for row, base in pairs)
            shown = "" if code == CODES[0] else difference(pairs)
            lines.append(f"| {setting} | `{coded}` | {loss:.4f} | {shown} | {len(pairs)} | {share:.3f} |")
    return "\n".join(lines)


def cells() -> list[tuple[str, str, str]]:
    """Setting, method and code of each line of the table."""
    planned = [(setting, method, code) for setting, method, codes, _ in PLAN for code in codes]
    settings, methods = list(SETTINGS), [DDP, LOCAL, HOOK]
    return sorted(
        planned, key=lambda cell: (settings.index(cell[0]), methods.index(cell[1]), CODES.index(cell[2]))
    )


def difference(pairs: list[tuple[dict, dict]]) -> str:
    """The mean of (coded − exact) ÷ exact in percent, and its standard error."""
    shares = [100 * (row["loss"] / base["loss"] - 1) for row, base in pairs]
    error = statistics.stdev(shares) / math.sqrt(len(shares)) if len(shares) > 1 else math.nan
    return f"{statistics.mean(shares):+.2f} ± {error:.2f} %"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", help="a text file; nothing is run without it")
    parser.add_argument("--only", default="", help="run only the methods that contain this")
    args = parser.parse_args()
    for setting, method, codes, seeds in PLAN if args.data else []:
        for seed, code in itertools.product(range(seeds), codes):
            expression = method.format(code)
            if args.only in expression and (setting, expression, seed) not in done(read()):
                row = run(setting, expression, seed, args.data)
                with RESULTS.open("a") as file:
                    file.write(json.dumps(row) + "\n")
                print(row, flush=True)
    print(table(read()))


def read() -> list[dict]:
    return [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []


def done(rows: list[dict]) -> set[tuple[str, str, int]]:
    return {(row["setting"], row["method"], row["seed"]) for row in rows}


if __name__ == "__main__":
    main()

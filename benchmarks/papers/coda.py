"""CoDA: the AUC on held-out digits, one class against nine, for longer and longer periods, in simulation.

    python benchmarks/papers/coda.py              # three seeds of each row
    python benchmarks/papers/coda.py --table      # what the log says, without a run

Four workers, each with a quarter of scikit-learn's digits, of which a tenth are positive. All rows of a seed
have the same weights and batches. Each run is a line of coda.jsonl beside this file; runs that are there are
not repeated.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

import torch
from torch import Tensor, nn

import offbeat
from offbeat.tasks.pictures import load_digits

RESULTS = Path(__file__).parent / "coda.jsonl"
METHODS = [f"coda(every={every}, stages=160)" for every in (1, 8, 32, 128)]
DIGIT, WORKERS, STEPS, BATCH, RATE = 8, 4, 640, 32, 0.1


def split() -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Pictures as vectors and whether they show the digit: four fifths for training, the rest held out."""
    pictures, labels = load_digits()
    x, y = pictures.flatten(1).float() / 255, (labels == DIGIT).float()
    cut = len(y) - len(y) // 5
    return (x[:cut], y[:cut]), (x[cut:], y[cut:])


def area(scores: Tensor, labels: Tensor) -> float:
    """The share of pairs in which the positive has the higher score; ties count half."""
    gaps = scores[labels > 0][:, None] - scores[labels == 0][None, :]
    return float(((gaps > 0).double() + (gaps == 0).double() / 2).mean())


def worker(comm: offbeat.Communicator, expression: str, seed: int) -> dict:
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 1))
    (x, y), (held, truth) = split()
    x, y = x[comm.rank :: comm.size], y[comm.rank :: comm.size]
    model = nn.ModuleDict({"net": net, "auc": offbeat.AUCLoss(float(y.mean()))})
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    sync = offbeat.method(expression)(model, optimizer, group=comm)
    draw = torch.Generator().manual_seed(1000 * seed + comm.rank)
    for _ in range(STEPS):
        chosen = torch.randint(len(y), (BATCH,), generator=draw)
        model["auc"](net(x[chosen]), y[chosen]).backward()
        sync.step()
        optimizer.zero_grad()
    totals = sync.totals
    sync.finish()
    with torch.no_grad():
        auc = area(net(held).squeeze(1), truth)
    return {"auc": auc, "rounds": totals.rounds, "megabytes": totals.bytes_sent / 1e6}


def table(rows: list[dict]) -> str:
    """The mean AUC of each method and its spread over the seeds."""
    lines = ["| method | AUC | ± | seeds | rounds | MB per worker |", "|---|---|---|---|---|---|"]
    for method in METHODS:
        own = [row for row in rows if row["method"] == method]
        if own:
            found = [row["auc"] for row in own]
            spread = f"{statistics.stdev(found):.4f}" if len(found) > 1 else ""
            cells = [f"`{method}`", f"{statistics.mean(found):.4f}", spread, len(own), own[0]["rounds"]]
            lines.append(f"| {' | '.join(map(str, cells))} | {own[0]['megabytes']:.2f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--table", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []
    for seed in range(0 if args.table else args.seeds):
        for method in METHODS:
            if not any((row["method"], row["seed"]) == (method, seed) for row in rows):
                found = offbeat.simulate(lambda comm, m=method, s=seed: worker(comm, m, s), WORKERS)[0]
                rows.append(
                    {"method": method, "seed": seed, **found, "steps": STEPS, "lr": RATE, "batch": BATCH}
                )
                with RESULTS.open("a") as file:
                    file.write(json.dumps(rows[-1]) + "\n")
                print(f"seed {seed}, {method}: {found['auc']:.4f}", flush=True)
    print(table(rows))


if __name__ == "__main__":
    main()

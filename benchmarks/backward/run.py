"""How much of a step do gradients cost that leave during the backward pass?

    sudo python benchmarks/backward/run.py                    # all links; about an hour
    sudo python benchmarks/backward/run.py --links 100mbit --repetitions 4 --steps 4
    sudo python benchmarks/backward/run.py DistributedDataParallel 'ddp()@8' 'ddp()@2' --results parts.jsonl

A byte GPT of 1.85 M parameters, 4 workers. First `ddp` against DistributedDataParallel, whose buckets have
their default size; then codes and a delay against steps without communication, at 50 Mbit/s. Contenders take
turns. With '@4', a bucket is a quarter of the model, whatever is usual. A ratio is the median over the
repetitions of the step time over that of the first contender in the same repetition, with the quartiles.
Appends one line per contender to results.jsonl, and prints the tables.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path

from offbeat.lab import Lab, unavailable

WORKER = Path(__file__).parent / "worker.py"
DDP, ALONE = "DistributedDataParallel", "no communication"
FEEDBACK = "ErrorFeedback(Quantized(4))"
EXACT = [DDP, "ddp()", "ddp(delay=1)"]
CODED = [ALONE, f"ddp(reduce={FEEDBACK})", f"ddp(reduce={FEEDBACK}, delay=1)"]
LINKS = {"loopback": EXACT, "1gbit": EXACT, "100mbit": EXACT, "50mbit": CODED}


def measure(link: str, contenders: list[str], args: argparse.Namespace) -> list[dict]:
    sizes = [str(args.repetitions), str(args.steps), str(args.batch)]
    with Lab(args.workers, rate=None if link == "loopback" else link) as lab:
        runs = lab.run([sys.executable, str(WORKER), *sizes, *contenders], timeout=7200)
    rows = [json.loads(line) for line in runs[0].stdout.splitlines() if line.startswith("{")]
    return [{"link": link, **vars(args), **row} for row in rows]


def table(rows: list[dict]) -> str:
    lines = ["| link | contender | step (s) | ratio | quartiles | CPU (s) | waited (s) | hidden (s) |"]
    lines.append("|---|---|---|---|---|---|---|---|")
    for row in rows:
        low, _, high = statistics.quantiles(row["ratios"], n=4)
        times = f"{row['step']:.3f} | {row['ratio']:.3f} | {low:.3f}–{high:.3f}"
        seconds = f"{row['cpu']:.3f} | {row['waited']:.3f} | {row['hidden']:.3f}"
        lines.append(f"| {row['link']} | `{row['contender']}` | {times} | {seconds} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("contenders", nargs="*", help="the first is what the others are divided by")
    parser.add_argument("--links", nargs="+", default=list(LINKS))
    parser.add_argument("--repetitions", type=int, default=12)
    parser.add_argument("--steps", type=int, default=8, help="of each contender in a repetition")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--results", type=Path, default=WORKER.parent / "results.jsonl")
    args = parser.parse_args()
    if reason := unavailable():
        raise SystemExit(reason)
    given, links, results = args.contenders, args.links, args.results
    del args.contenders, args.links, args.results
    for link in links:
        rows = measure(link, given or LINKS.get(link, EXACT), args)
        with results.open("a") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
        print(table(rows), flush=True)


if __name__ == "__main__":
    main()

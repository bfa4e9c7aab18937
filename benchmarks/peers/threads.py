"""Where the processors' time goes: CPU milliseconds of a step, by thread, of one worker of each contender.

    sudo python benchmarks/peers/run.py report                  # once, for the environment
    sudo benchmarks/peers/.venv/bin/python benchmarks/peers/threads.py --data tinyshakespeare.txt

Reads /proc while four workers train on two cores. Appends a line per contender to threads.jsonl.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path

from contenders import BY_NAME, DDP, FLOOR, FOUR, TWO
from measure import HERE, run_in, told
from training import WORKERS, Setting

from offbeat.lab import Lab

NAMES = (FLOOR, DDP, "`ddp()`", FOUR.name, TWO.name)
TICK = 10.0  # milliseconds; the kernel counts in hundredths of a second


def read_threads() -> dict[tuple[str, str, str], int]:
    """CPU ticks by process, thread and name, of all workers."""
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if "worker.py" not in (process / "cmdline").read_text():
                continue
            for task in (process / "task").iterdir():
                text = (task / "stat").read_text()
                name, fields = (
                    text[text.index("(") + 1 : text.rindex(")")],
                    text[text.rindex(")") + 2 :].split(),
                )
                name = "main" if task.name == process.name else name
                found[process.name, task.name, name] = int(fields[11]) + int(fields[12])
        except OSError:
            continue  # it has ended
    return found


def watch(over: threading.Event, seen: list[tuple[float, dict[tuple[str, str, str], int]]]) -> None:
    while not over.wait(1.0):
        seen.append((time.perf_counter(), read_threads()))


def profile(name: str, setting: Setting, link: str, steps: int) -> dict[str, object]:
    seen: list[tuple[float, dict[tuple[str, str, str], int]]] = []
    over = threading.Event()
    watcher = threading.Thread(target=watch, args=(over, seen))
    with Lab(WORKERS, rate=link) as lab:
        watcher.start()
        order = {"contender": name, "setting": asdict(setting), "warm": 4, "steps": steps}
        step = max(one["seconds"] for one in told(run_in(lab, order, timeout=900)))
        over.set()
        watcher.join()
    # The last seconds before the end, when all workers train.
    end = len(seen) - 3
    start = end - min(12, int(steps * step) - 3)
    (began, before), (ended, after) = seen[start], seen[end]
    spent: Counter[str] = Counter()
    for key, ticks in after.items():
        spent[key[2]] += ticks - before.get(key, ticks)
    share = step / (ended - began) / WORKERS * TICK  # ticks of all workers to milliseconds of one and a step
    threads = {name: round(ticks * share, 1) for name, ticks in spent.most_common() if ticks * share >= 0.3}
    return {"contender": name, "link": link, "seconds": round(step, 4), "threads": threads}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", default=NAMES)
    parser.add_argument("--link", default="50mbit")
    parser.add_argument("--data")
    parser.add_argument("--steps", type=int, default=50)
    args = parser.parse_args()
    unknown = [name for name in args.names if name not in BY_NAME]
    if unknown:
        sys.exit(f"No contender is named {unknown[0]}: {', '.join(BY_NAME)}.")
    setting = Setting(data=str(Path(args.data).resolve()) if args.data else None)
    for name in args.names:
        row = profile(name, setting, args.link, args.steps)
        print(json.dumps(row), flush=True)
        with (HERE / "threads.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()

"""How long the road of a round is: the functions of ours that a step enters, counted by `sys.setprofile`.

    python benchmarks/hops/run.py [--list]

Two gloo workers, a `Linear(64, 64)`: a step of `local_sgd(every=1)`, and a period of a delayed code. Sixteen
rounds come before it, because the first few are watched for mistakes.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import offbeat

HERE = Path(offbeat.__file__).parent
WARM = 16  # rounds
CASES = {
    "local_sgd(every=1)": (1, "a step"),
    "local_sgd(every=8, delay=4, reduce=Quantized(8, least=1))": (8, "a period"),
}


def count(rank: int, folder: str, call: str, steps: int) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 64)
    sync = offbeat.method(call)(model, torch.optim.SGD(model.parameters(), lr=0.1))
    torch.manual_seed(rank)  # workers with the same data would be warned
    seen: Counter[tuple[str, str]] = Counter()

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(str(HERE)):
            seen[frame.f_code.co_filename[len(str(HERE)) + 1 :], frame.f_code.co_name] += 1

    for step in range((WARM + 1) * steps):
        model(torch.randn(8, 64)).square().mean().backward()
        if step == WARM * steps:
            sys.setprofile(note)
        sync.step()
    sys.setprofile(None)
    sync.finish()
    if rank == 0:
        rows = [[file, name, number] for (file, name), number in sorted(seen.items())]
        Path(folder, "seen.json").write_text(json.dumps(rows))
    dist.destroy_process_group()


def main() -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    for call, (steps, what) in CASES.items():
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(count, (folder, call, steps), nprocs=2)
            rows = json.loads(Path(folder, "seen.json").read_text())
        files = {file for file, _, _ in rows}
        calls = sum(number for _, _, number in rows)
        print(f"{what} of {call}: {len(rows)} functions in {len(files)} files, {calls} calls")
        if "--list" in sys.argv:
            for file, name, number in rows:
                print(f"    {number:4} {file}: {name}")


if __name__ == "__main__":
    main()

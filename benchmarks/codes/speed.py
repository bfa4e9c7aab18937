"""How fast one core encodes and decodes.

    python benchmarks/codes/speed.py

Prints a table. GB/s are of float32 values, in the CPU time of one thread; the fastest of nine passes counts.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable

import torch
from torch import Tensor

from offbeat import Quantized
from offbeat.reduce.wire import BlockCodec

VALUES = 2**22
CODES = [
    Quantized(8),
    Quantized(4),
    Quantized(4, block=64),
    Quantized(4, block=256),
    Quantized(4, stochastic=True),
    Quantized(3),
    Quantized(2),
]


def measure_speed(work: Callable[[], None], repetitions: int = 9) -> float:
    """GB/s of the fastest repetition."""
    times = []
    for _ in range(repetitions):
        start = time.thread_time()
        work()
        times.append(time.thread_time() - start)
    return 4 * VALUES / min(times) / 1e9


def room(codec: BlockCodec, values: Tensor) -> Tensor:
    return torch.zeros(-(-values.numel() // codec.unit) * codec.width, dtype=torch.uint8)


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print(f"torch {torch.__version__}, Python {platform.python_version()}, {platform.system()}, one thread\n")
    normal = torch.randn(VALUES)
    print("| code | bytes ÷ fp32 | encode, GB/s | decode | decode and add |")
    print("|---|---|---|---|---|")
    for code in CODES:
        codec = BlockCodec(code.bits, code.block)
        rng = torch.Generator().manual_seed(0) if code.stochastic else None
        wire, out = room(codec, normal), torch.empty_like(normal)
        opened = codec.open(wire)
        encode = measure_speed(lambda c=codec, w=opened, r=rng: c.encode(normal, w, r))
        decode = measure_speed(lambda c=codec, w=opened, o=out: c.decode(w, o))
        add = measure_speed(lambda c=codec, w=wire, o=out: c.add([w], o, 0.25))
        shown = f"`Quantized({code.bits}, block={code.block}{', stochastic=True' * code.stochastic})`"
        share = codec.width / codec.unit / 4
        print(f"| {shown} | {share:.3f} | {encode:.1f} | {decode:.1f} | {add:.1f} |", flush=True)


if __name__ == "__main__":
    main()

"""What rounding loses, by the way of rounding: the error ‖x − q‖/‖x‖ for values of real training.

    python benchmarks/codes/errors.py

The values are gradients and displacements over 16 steps of a byte GPT with AdamW and of a network for digits
with SGD. Prints one table per number of bits. `signed` is what `Quantized` does.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from offbeat.reduce.wire import BlockCodec
from offbeat.tasks import bytes_task, digits_task

NF4 = [-1.0, -0.6962, -0.5251, -0.3949, -0.2844, -0.1848, -0.0911, 0.0]
NF4 += [0.0796, 0.1609, 0.2461, 0.3379, 0.4407, 0.5626, 0.7230, 1.0]


def train(steps: int = 64) -> Iterator[tuple[str, Tensor]]:
    """Gradients and displacements, with a name for their kind."""
    tasks = [("bytes, AdamW", bytes_task("tiny"), torch.optim.AdamW, 3e-3)]
    tasks.append(("digits, SGD", digits_task(), torch.optim.SGD, 0.05))
    for name, task, kind, lr in tasks:
        model, batches = task.model(), task.batches(0, 4, task.batch_size, 0)
        optimizer = kind(model.parameters(), lr=lr)
        large = [p for p in model.parameters() if p.numel() >= 1024]
        for step in range(steps):
            if step % 16 == 0:
                before = torch.cat([p.detach().flatten() for p in large])
            optimizer.zero_grad()
            task.loss(model, next(batches)).backward()
            optimizer.step()
            if step % 16 == 15:
                yield f"{name}: gradients", torch.cat([p.grad.flatten() for p in large])
                yield f"{name}: displacements", before - torch.cat([p.detach().flatten() for p in large])


def in_blocks(values: Tensor, block: int) -> Tensor:
    return torch.nn.functional.pad(values, (0, -values.numel() % block)).view(-1, block)


def round_to(levels: list[float], block: int, clip: float | None = None) -> Callable[[Tensor], Tensor]:
    """To the nearest level times the largest magnitude of a block, or times `clip` standard deviations."""
    book = torch.tensor(sorted(levels))
    edges = (book[1:] + book[:-1]) / 2

    def rounded(values: Tensor) -> Tensor:
        rows = in_blocks(values, block)
        top = rows.abs().amax(1, keepdim=True)
        scale = (top if clip is None else clip * rows.square().mean(1, keepdim=True).sqrt()).clamp(min=1e-38)
        return (book[torch.bucketize(rows / scale, edges)] * scale).flatten()[: values.numel()]

    return rounded


def signed(bits: int, block: int) -> Callable[[Tensor], Tensor]:
    codec = BlockCodec(bits, block)

    def rounded(values: Tensor) -> Tensor:
        whole = torch.nn.functional.pad(values, (0, -values.numel() % block))
        out, wire = torch.empty_like(whole), torch.zeros(len(whole) // block * codec.width, dtype=torch.uint8)
        codec.encode(whole, codec.open(wire))
        codec.decode(codec.open(wire), out)
        return out[: values.numel()]

    return rounded


def ways(bits: int) -> dict[str, Callable[[Tensor], Tensor]]:
    """The ways of rounding, by name."""
    top = 2 ** (bits - 1) - 1
    uniform = [k / top for k in range(-top, top + 1)]
    halves = [k / (2 * top + 1) for k in range(-2 * top - 1, 2 * top + 2, 2)]
    found = {f"{top} levels each side and zero, blocks of {n}": round_to(uniform, n) for n in (256, 64, 32)}
    found["their squares, blocks of 32"] = round_to([k * abs(k) for k in uniform], 32)
    found[f"{2**bits} levels without zero, blocks of 32"] = round_to(halves, 32)
    found["the same to the power 1.25"] = round_to([k * abs(k) ** 0.25 for k in halves], 32)
    found["the same, clipped at 2 deviations"] = round_to(halves, 32, 2.0)
    if bits == 4:
        found["NF4, blocks of 32"] = round_to(NF4, 32)
    found.update({f"signed, blocks of {n}": signed(bits, n) for n in (256, 64, 32)})
    return found


def main() -> None:
    torch.set_num_threads(1)
    real: dict[str, list[Tensor]] = {}
    for kind, values in train():
        real.setdefault(kind, []).append(values)
    for bits in (4, 3, 2):
        print(f"| {bits} bits | {' | '.join(real)} |\n|{'---|' * (1 + len(real))}")
        for name, rounded in ways(bits).items():
            errors = [
                statistics.mean(float((x - rounded(x)).norm() / x.norm()) for x in values)
                for values in real.values()
            ]
            print(f"| {name} | {' | '.join(f'{error:.3f}' for error in errors)} |", flush=True)
        print()


if __name__ == "__main__":
    main()

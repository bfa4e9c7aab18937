"""What codes of gradients do to AdamW's updates: their direction and length, beside those of the exact mean.

    python benchmarks/codes/adam.py --data tinyshakespeare.txt

Four simulated workers train the byte GPT of benchmarks/peers with exact means. In every step, each code also
averages the same gradients, and a copy of AdamW's moments follows its means. Prints the mean over the steps
from a third of the run on, for the update m/(√v + ε) and for the mean itself, and how much longer than usual
the longest gradient of a worker was.
"""

from __future__ import annotations

import argparse
import platform
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

import offbeat
from offbeat.base.clock import Clock, State
from offbeat.base.packed import Packed
from offbeat.tasks import Task, bytes_task

WORKERS, BATCH, LR, WARMUP, CLIP = 4, 8, 3e-3, 40, 1.0
BETAS, EPSILON = (0.9, 0.95), 1e-8
FEEDBACK = [f"ErrorFeedback(Quantized({bits}))" for bits in (4, 3, 2)]
WHOLE = [f"ErrorFeedback(Quantized({bits}), decay=1.0)" for bits in (4, 3, 2)]
UNLIMITED = [f"ErrorFeedback(Quantized({bits}), decay=1.0, limit=1e9)" for bits in (4, 3, 2)]
ALONE = [f"Quantized({bits})" for bits in (4, 3, 2)]
CODES = ["Mean('bfloat16')", "Quantized(8)", *FEEDBACK, *WHOLE, *UNLIMITED, *ALONE]


@dataclass
class Moments:
    """AdamW's moments, which follow the gradients they are given."""

    first: Tensor | None = None
    second: Tensor | None = None
    steps: int = 0

    def update(self, gradient: Tensor) -> Tensor:
        """The direction of the next step, after clipping as in training."""
        gradient = gradient * min(1.0, CLIP / float(gradient.norm() + 1e-6))
        if self.first is None or self.second is None:
            self.first, self.second = torch.zeros_like(gradient), torch.zeros_like(gradient)
        self.steps += 1
        self.first.lerp_(gradient, 1 - BETAS[0])
        self.second.lerp_(gradient.square(), 1 - BETAS[1])
        first, second = (
            m / (1 - b**self.steps) for m, b in zip((self.first, self.second), BETAS, strict=True)
        )
        return first / (second.sqrt() + EPSILON)


@dataclass
class Shadow:
    """One code, and what AdamW would do with its means."""

    reducer: offbeat.Reducer
    room: Packed
    moments: Moments = field(default_factory=Moments)
    rows: list[tuple[float, float, float]] = field(default_factory=list)  # cosine, length, error of the mean
    state: State = field(init=False)

    def __post_init__(self) -> None:
        self.state = self.reducer.init()

    def follow(
        self, own: list[Tensor], exact: Tensor, update: Tensor, comm: offbeat.Communicator, step: int
    ) -> None:
        self.room.read(own)
        mean = self.reducer.start(self.room, comm, Clock(step, step, LR), self.state).wait().flats[0]
        theirs = self.moments.update(mean)
        cosine = float(torch.cosine_similarity(update.double(), theirs.double(), 0))
        lengths = float(theirs.norm() / update.norm()), float((mean - exact).norm() / exact.norm())
        self.rows.append((cosine, *lengths))


def train(comm: offbeat.Communicator, task: Task, steps: int) -> tuple[list[tuple[float, ...]], list[float]]:
    """Train with exact means. Return each code's means over the later steps, and the lengths of this worker's
    gradients in all steps."""
    torch.manual_seed(0)
    model = task.model()
    parameters = dict(model.named_parameters())
    optimizer = torch.optim.AdamW(parameters.values(), lr=LR, betas=BETAS, eps=EPSILON, weight_decay=0.1)
    batches = task.batches(comm.rank, WORKERS, BATCH, 0)
    exact, moments = Packed.like(parameters), Moments()
    given = [offbeat.method(f"ddp(reduce={code})").arguments["reduce"] for code in CODES]
    reducers = [reducer.for_gradients() for reducer in given]
    shadows = [Shadow(reducer, Packed.like(parameters)) for reducer in reducers]
    lengths = []
    for step in range(steps):
        task.loss(model, next(batches)).backward()
        own = [p.grad for p in parameters.values() if p.grad is not None]
        exact.read(own)
        lengths.append(float(exact.flats[0].norm()))
        mean = comm.mean(exact.flats).wait()[0]
        update = moments.update(mean)
        for shadow in shadows:
            shadow.follow(own, mean, update, comm, step)
        exact.write(own)
        nn.utils.clip_grad_norm_(parameters.values(), CLIP)
        for group in optimizer.param_groups:
            group["lr"] = LR * min(1.0, (step + 1) / WARMUP)
        optimizer.step()
        optimizer.zero_grad()
    return [tuple(torch.tensor(shadow.rows[steps // 3 :]).mean(0).tolist()) for shadow in shadows], lengths


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", help="a text file; the standard library's source if not given")
    parser.add_argument("--model", default="medium")
    parser.add_argument("--steps", type=int, default=90)
    args = parser.parse_args()
    torch.set_num_threads(1)
    task = bytes_task(args.model, data=args.data, seed=0)
    answers = offbeat.simulate(lambda comm: train(comm, task, args.steps), WORKERS)
    lengths = torch.tensor([own for _, own in answers])
    longest = int(lengths.amax(0).argmax())
    ratio = float(lengths.max() / lengths.median())
    print(
        f"torch {torch.__version__}, Python {platform.python_version()}, {args.model}, {args.steps} steps\n\n"
        f"The longest gradient, in step {longest + 1}, was {ratio:.0f} times as long as the median.\n"
    )
    print("| reducer | cosine of the update | its length | error of the mean |\n|---|---|---|---|")
    for code, (cosine, length, error) in zip(CODES, answers[0][0], strict=True):
        print(f"| `{code}` | {cosine:.4f} | {length:.3f} | {error:.3f} |")


if __name__ == "__main__":
    main()

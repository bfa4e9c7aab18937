"""Do published wall-clocks come out of published inputs?

    python benchmarks/plan/published.py

`fit` marks what the inputs were taken from; the rest is predicted. docs/plan.md says where the figures stand.
"""

from __future__ import annotations

from offbeat import Constant, Network
from offbeat.plan import Cluster, Cosine, Job, predict

HOUR, STEPS, WARMUP, VIT = 3600.0, 93_600, 10_000, 86_600_000
QSR = f"qsr(alpha=0.0175, base=4, warmup={WARMUP}, total={STEPS})"
ROUNDS = 9_711


def row(run: str, method: str, given: str, published: float, told: float, unit: str) -> None:
    error = f"{told / published - 1:+.0%}"
    print(f"| {run} | `{method}` | {given} | {published:g} {unit} | {told:.3g} {unit} | {error} |")


def vit() -> None:
    """Two published runs on 16 GPUs give the seconds of a step and of a mean that shows:

        ddp = steps·(step + mean)        qsr = steps·step + rounds·mean

    On 64 GPUs of the same kind a quarter of the batch takes a quarter of the step, and a ring as long.
    """
    # The mean is its exposed part, so nothing more of it is hidden by the backward pass.
    job = Job(STEPS, VIT, rate=Cosine(0.008, STEPS, WARMUP, floor=1e-6), backward=0)
    mean = (26.7 - 20.2) * HOUR / (STEPS - ROUNDS)
    step = 26.7 * HOUR / STEPS - mean
    link = 2 * 4 * VIT * 15 / 16 / mean
    published = {(16, "ddp()"): 26.7, (16, QSR): 20.2, (64, "ddp()"): 8.6, (64, QSR): 5.5}
    for (gpus, method), hours in published.items():
        cluster = Cluster(gpus, Constant(step * 16 / gpus), Network(bandwidth=link))
        told = predict(method, job, cluster).seconds / HOUR
        given = "fit" if gpus == 16 else f"{step / 4:.3f} s a step, {mean:.3f} s a mean"
        row(f"ViT-B, {gpus} GPUs", method.split("(")[0], given, hours, told, "h")


def traffic() -> None:
    """DiLoCo's 500 steps to a round."""
    job, cluster = Job(88_000, 150_000_000), Cluster(8, Constant(1.0), Network(bandwidth=1e9))
    sent = {e: predict(e, job, cluster).bytes_sent for e in ("ddp()", "diloco(every=500)")}
    ratio = sent["ddp()"] / sent["diloco(every=500)"]
    row("DiLoCo, 88 000 steps", "diloco(every=500)", "150 M parameters", 500, ratio, "times fewer bytes")


def wan() -> None:
    """Two workers that share a GPU, 51.2 M parameters, batches of 32 × 512 tokens, 20 ms there and back.

    They average gradients once the backward pass has ended.
    """
    tokens, step = 2 * 32 * 512, 0.86
    links = {"1 Gbit/s": (1e9, 5.3, 37.4), "100 Mbit/s": (1e8, 1.6, 32.0), "50 Mbit/s": (5e7, 0.9, 27.4)}
    for name, (bits, ddp, diloco) in links.items():
        cluster = Cluster(2, Constant(step), Network(0.01, bits / 8, reduce="ring"))
        for method, published in (("ddp()", ddp), ("diloco(every=100)", diloco)):
            told = 1000 * tokens / predict(method, Job(1000, 51_200_000, backward=0), cluster).seconds / 1000
            given = "fit" if published == 37.4 else f"{step} s a step"
            row(f"WAN, {name}", method, given, published, told, "k tokens/s")


if __name__ == "__main__":
    print("| run | method | given | published | predicted | error |\n|---|---|---|---|---|---|")
    vit()
    traffic()
    wan()

"""Throttled: messages are as late as a slow link makes them, and otherwise the same."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import pytest
import torch
from conftest import Pool

import offbeat
from offbeat.throttle import FRAMING

MEGABYTE = 250_000  # values of four bytes


def takes(expected: float, measured: Callable[[], list[float]], *, slack: float = 0.002) -> None:
    """Never less than expected, and not much more; a busy machine has several tries."""
    for _ in range(5):
        seconds = measured()
        assert min(seconds) >= expected - slack
        if max(seconds) <= expected + 0.1:
            return
    raise AssertionError(f"{seconds}, not {expected:.3f} s")


def timed(
    comm: offbeat.Communicator, kind: str, rate: float, latency: float, burst: int
) -> tuple[float, float]:
    """Seconds of one message, and its value."""
    slow = offbeat.Throttled(comm, rate=rate, latency=latency, burst=burst)
    comm.tell([0]).wait()
    tensor = torch.full((MEGABYTE,), float(comm.rank))
    start = time.perf_counter()
    if kind == "mean":
        value = slow.mean([tensor]).wait()[0]
    elif kind == "gather":
        value = slow.gather(tensor).wait()[-1]
    elif kind == "exchange":
        value = slow.exchange(list(tensor.chunk(comm.size))).wait()[-1]
    elif kind == "broadcast":
        value = slow.broadcast([tensor], src=1).wait()[0]
    else:
        value = torch.tensor(slow.tell([comm.rank]).wait())[:, :1].float()
    return time.perf_counter() - start, value.mean().item()


@pytest.mark.parametrize(
    ("kind", "latency", "burst", "expected", "value"),
    [
        ("mean", 0.0, 0, 1.5 * FRAMING, 1.5),
        ("mean", 0.1, 0, 1.5 * FRAMING + 6 * 0.1, 1.5),
        ("mean", 0.0, 1_000_000, 1.5 * FRAMING - 1.0, 1.5),
        ("gather", 0.0, 0, 3 * FRAMING, 3.0),
        ("exchange", 0.2, 0, 0.75 * FRAMING + 0.2, 3.0),
        ("broadcast", 0.2, 0, 0.75 * FRAMING + 0.4, 1.0),
        ("tell", 0.2, 0, 0.6, 1.5),
    ],
)
def test_a_message_takes_its_time(
    pool: Pool, kind: str, latency: float, burst: int, expected: float, value: float
) -> None:
    """One megabyte at four megabytes per second, among four."""

    def seconds() -> list[float]:
        answers = pool.run(timed, kind, 4e6, latency / 4, burst, workers=4)
        assert [mean for _, mean in answers] == [value] * 4
        return [seconds for seconds, _ in answers]

    takes(expected / 4, seconds)


def queued(comm: offbeat.Communicator) -> list[float]:
    slow = offbeat.Throttled(comm, rate=4e6)
    comm.tell([0]).wait()
    start = time.perf_counter()
    first, second = (slow.mean([torch.zeros(MEGABYTE)]) for _ in range(2))
    early = second.done()
    second.wait()
    assert first.done()
    arrivals = [message.arrived() - start for message in (first, second)]
    return [float(early), *arrivals, time.perf_counter() - start]


def test_messages_queue_on_the_link(pool: Pool) -> None:
    one = 1.0 * FRAMING / 4  # between two workers an average sends every byte once

    def arrivals() -> list[float]:
        answers = pool.run(queued, workers=2)
        for early, _, second, waited in answers:
            assert not early
            assert waited >= second
        return [time for _, first, second, _ in answers for time in (first, second - one)]

    takes(one, arrivals)


def late(comm: offbeat.Communicator) -> float:
    slow = offbeat.Throttled(comm, rate=4e6)
    comm.tell([0]).wait()
    start = time.perf_counter()
    if comm.rank == 1:
        time.sleep(0.5)
    slow.mean([torch.zeros(MEGABYTE)]).wait()
    return time.perf_counter() - start


def test_a_message_begins_with_its_last_rank(pool: Pool) -> None:
    # The ranks do not begin to count at quite the same time.
    takes(0.5 + FRAMING / 4, lambda: pool.run(late, workers=2), slack=0.1)


def hidden(comm: offbeat.Communicator) -> tuple[float, bool]:
    slow = offbeat.Throttled(comm, rate=4e6)
    comm.tell([0]).wait()
    message = slow.mean([torch.zeros(MEGABYTE)])
    time.sleep(0.5)
    start, done = time.perf_counter(), message.done()
    message.wait()
    return time.perf_counter() - start, done


def test_time_behind_computation_is_not_waited_for(pool: Pool) -> None:
    def seconds() -> list[float]:
        return [seconds if done else math.inf for seconds, done in pool.run(hidden, workers=2)]

    takes(0, seconds)


def shared(comm: offbeat.Communicator) -> tuple[bool, float]:
    slow = offbeat.Throttled(comm, rate=4e6)
    part = slow.split([[0, 1], [2, 3]])
    comm.tell([0]).wait()
    start = time.perf_counter()
    everyone, pair = slow.mean([torch.zeros(MEGABYTE)]), part.mean([torch.zeros(MEGABYTE)])
    everyone.wait(), pair.wait()
    return part is slow.split([[0, 1], [2, 3]]), time.perf_counter() - start


def test_groups_share_the_link(pool: Pool) -> None:
    for same, seconds in pool.run(shared, workers=4):
        assert same
        assert seconds >= (1.5 + 1.0) * FRAMING / 4 - 0.002


def trained(comm: offbeat.Communicator, expression: str, throttled: bool) -> tuple[list[float], int, float]:
    torch.manual_seed(0)
    model = torch.nn.Linear(100, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    group = offbeat.Throttled(comm, rate=1e6, latency=0.001) if throttled else comm
    sync = offbeat.method(expression)(model, optimizer, group=group)
    torch.manual_seed(comm.rank)
    for _ in range(6):
        model(torch.randn(4, 100)).square().mean().backward()
        sync.step()
        optimizer.zero_grad()
    sync.finish()
    return model.weight.flatten().tolist(), sync.totals.bytes_sent, sync.totals.seconds_waited


@pytest.mark.parametrize("expression", ["ddp()", "local_sgd(every=2, delay=1)", "noloco(every=2)"])
def test_training_is_the_same_but_slower(pool: Pool, expression: str) -> None:
    plain = pool.run(trained, expression, False, workers=2)
    slow = pool.run(trained, expression, True, workers=2)
    for (weights, sent, _), (late_weights, late_sent, waited) in zip(plain, slow, strict=True):
        assert weights == late_weights
        assert sent == late_sent
        assert waited > 0.004


def test_alone_nothing_is_late() -> None:
    solo = offbeat.Throttled(offbeat.Solo(), rate=1.0, latency=100.0)
    assert solo.mean([torch.ones(3)]).wait()[0].tolist() == [1, 1, 1]
    assert solo.tell([7]).wait()[0][0] == 7


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rate": 0}, r"Throttled\(rate=0\): rate must be a positive number of bytes per second\."),
        ({"rate": 1, "latency": -1}, r"Throttled\(latency=-1, burst=0\): neither may be negative\."),
    ],
)
def test_bad_links(arguments: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}$"):
        offbeat.Throttled(offbeat.Solo(), **arguments)

"""Throttled: messages are as late as a slow link makes them, and otherwise the same. In virtual time."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from calls import SENDS
from conftest import Pool
from links import throttled

import offbeat
from offbeat import Communicator
from offbeat.comm.collective import LONG
from offbeat.comm.throttled import FRAMING

MEGABYTE = 250_000  # values of four bytes
RATE = 4e6
ONE = 1e6 * FRAMING / RATE  # seconds of a megabyte


def megabyte(comm: Communicator) -> torch.Tensor:
    return torch.full((MEGABYTE,), float(comm.rank))


# Every message of a megabyte among four: how many megabytes one worker sends, how many hops follow each
# other, and what arrives, on average over its values and the workers.
MESSAGES: dict[str, tuple[Callable[[Communicator], Any], float, int, float]] = {
    "total": (lambda comm: comm.total([megabyte(comm)]).then(lambda sums: sums[0]), 1.5, 6, 6.0),
    "mean": (lambda comm: comm.mean([megabyte(comm)]).then(lambda means: means[0]), 1.5, 6, 1.5),
    "gather": (lambda comm: comm.gather(megabyte(comm)).then(torch.cat), 3, 3, 1.5),
    "exchange": (lambda comm: comm.exchange(list(megabyte(comm).chunk(4))).then(torch.cat), 0.75, 1, 1.5),
    "broadcast": (lambda comm: comm.broadcast([megabyte(comm)], 1).then(lambda got: got[0]), 0.75, 2, 1.0),
    "shift": (lambda comm: comm.shift(megabyte(comm)), 1, 1, 1.5),
    # Words pass the queue by.
    "tell": (lambda comm: comm.tell([comm.rank]).then(lambda heard: torch.tensor(heard)[:, :1]), 0, 1, 1.5),
}


def test_no_message_is_forgotten() -> None:
    assert set(MESSAGES) == SENDS - {"run"}


def landing(send: Callable[[Communicator], Any], *, latency: float = 0.0, burst: int = 0) -> list[float]:
    """When a message of four workers arrives, which begin one after the other, the last at 3 s."""

    def worker(comm: Communicator) -> tuple[float, float]:
        comm.worker.computed(comm.rank)
        message = send(throttled(comm, rate=RATE, latency=latency, burst=burst))
        value = message.wait()
        assert message.arrived() == pytest.approx(comm.now())
        return comm.now(), value.float().mean().item()

    ends, values = zip(*offbeat.simulate(worker, 4, compute=lambda rank, step: float(step)), strict=True)
    return [*ends, sum(values) / 4]


def test_a_short_gather_is_sent_to_all_at_once() -> None:
    """A megabyte, all ranks together, goes along a ring; one word less does not."""
    for words, hops in ((LONG // 16, 3), (LONG // 16 - 1, 1)):
        (end, *_) = landing(
            lambda comm, words=words: comm.gather(torch.zeros(words)).then(torch.cat), latency=1.0
        )
        assert end == pytest.approx(3 + 3 * 4 * words * FRAMING / RATE + hops, abs=1e-6)


@pytest.mark.parametrize("latency", [0.0, 0.125])
@pytest.mark.parametrize("call", MESSAGES)
def test_a_message_takes_its_time_from_its_last_rank_on(call: str, latency: float) -> None:
    send, megabytes, hops, value = MESSAGES[call]
    expected = 3 + megabytes * ONE + hops * latency
    assert landing(send, latency=latency) == pytest.approx([*[expected] * 4, value], abs=1e-6)


def test_a_burst_passes_at_once() -> None:
    send = MESSAGES["mean"][0]
    assert landing(send, burst=1_000_000)[0] == pytest.approx(3 + 1.5 * ONE - 0.25)
    assert landing(send, burst=10_000_000)[0] == pytest.approx(3)


def queued(comm: Communicator) -> tuple[list[bool], list[float]]:
    slow = throttled(comm, rate=RATE)
    first, second = (slow.mean([megabyte(comm)]) for _ in range(2))
    seen = [first.done(), second.done()]
    second.wait()
    seen += [first.done(), second.done()]
    return seen, [first.arrived(), second.arrived(), comm.now()]


def test_messages_queue_on_the_link() -> None:
    for seen, times in offbeat.simulate(queued, 2):
        assert seen == [False, False, True, True]
        # Between two workers an average sends every byte once.
        assert times == pytest.approx([ONE, 2 * ONE, 2 * ONE], abs=1e-6)


def hidden(comm: Communicator) -> tuple[list[bool], list[float]]:
    slow = throttled(comm, rate=RATE)
    message, seen, times = slow.mean([megabyte(comm)]), [], []
    for step in (0, 1):
        comm.worker.computed(step)
        seen.append(message.done())
    message.wait()
    times += [comm.now(), message.arrived()]
    return seen, times


def test_time_behind_computation_is_not_waited_for() -> None:
    for seen, times in offbeat.simulate(hidden, 2, compute=lambda rank, step: ONE * (0.5 + step)):
        assert seen == [False, True]
        assert times == pytest.approx([2 * ONE, ONE], abs=1e-6)


def shared(comm: Communicator, kind: str) -> tuple[bool, list[float]]:
    slow = throttled(comm, rate=RATE)
    groups = [[0, 1], [2, 3]]
    other = slow.split(groups) if kind == "split" else slow.worker.duplicate()
    messages = [slow.mean([megabyte(comm)]), other.mean([megabyte(comm)])]
    for message in messages:
        message.wait()
    return slow.split(groups) is slow.split(groups), [message.arrived() for message in messages]


@pytest.mark.parametrize(("kind", "second"), [("split", 1.0), ("duplicate", 1.5)])
def test_groups_and_duplicates_share_the_link(kind: str, second: float) -> None:
    for same, times in offbeat.simulate(lambda comm: shared(comm, kind), 4):
        assert same
        assert times == pytest.approx([1.5 * ONE, (1.5 + second) * ONE], abs=1e-6)


def accompanied(comm: Communicator) -> list[float]:
    slow = throttled(comm, rate=RATE)
    sidecar, lands = slow.worker.sidecar(), []

    def work() -> None:
        message = sidecar.comm.split([[0, 1]]).mean([megabyte(comm)])
        message.wait()
        with sidecar.locked():
            lands.append(message.arrived())

    sidecar.start(work)
    with sidecar.locked():
        sidecar.until(lambda: bool(lands), "the sidecar")
    mine = slow.mean([megabyte(comm)])
    mine.wait()
    sidecar.stop()
    return [*lands, mine.arrived()]


def test_sidecars_share_the_link() -> None:
    assert offbeat.simulate(accompanied, 2) == [pytest.approx([ONE, 2 * ONE], abs=1e-6)] * 2


def really(comm: Communicator) -> list[tuple[float, float, float]]:
    """Every message on the real clock: when it began, when it should be here, and when it was."""
    slow, times = offbeat.Throttled(comm, rate=1e9, latency=0.001), []
    for send, _, _, _ in MESSAGES.values():
        began = time.perf_counter()
        message = send(slow)
        message.wait()
        times.append((began, message.arrived(), time.perf_counter()))
    return times


def test_real_workers_see_nothing_before_its_time(pool: Pool) -> None:
    for times in pool.run(really):
        for (began, arrived, ended), (_, megabytes, hops, _) in zip(times, MESSAGES.values(), strict=True):
            assert ended >= arrived
            assert arrived - began >= megabytes * 1e6 * FRAMING / 1e9 + hops * 0.001 - 1e-6


def trained(comm: Communicator, expression: str, slow: bool) -> tuple[list[float], int, float]:
    torch.manual_seed(0)
    model = torch.nn.Linear(100, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    group = throttled(comm, rate=1e6, latency=0.001) if slow else comm
    sync = offbeat.method(expression)(model, optimizer, group=group)
    torch.manual_seed(comm.rank)
    for _ in range(6):
        model(torch.randn(4, 100)).square().mean().backward()
        sync.step()
        optimizer.zero_grad()
    sync.finish()
    return model.weight.flatten().tolist(), sync.totals.bytes_sent, sync.totals.seconds_waited


def assert_same(plain: Sequence[Any], slow: Sequence[Any]) -> None:
    for (weights, sent, _), (late_weights, late_sent, _) in zip(plain, slow, strict=True):
        assert weights == late_weights
        assert sent == late_sent


EXPRESSIONS = ["ddp()", "local_sgd(every=2, delay=1)", "noloco(every=2)", "ssd_sgd(every=2, warmup=2)"]


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_training_is_the_same_but_slower(expression: str) -> None:
    plain, slow = (
        offbeat.simulate(lambda comm, slow=slow: trained(comm, expression, slow), 2) for slow in (False, True)
    )
    assert_same(plain, slow)
    assert all(waited > 0.004 for _, _, waited in slow)


def test_training_of_processes_behind_a_link_is_the_same(pool: Pool) -> None:
    plain, slow = (pool.run(trained, EXPRESSIONS[-1], slow, workers=2) for slow in (False, True))
    assert_same(plain, slow)


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

"""Many workers in one process: deterministic, in virtual time, and never silent when stuck."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from problems import Realistic, data, optimizer_for, same, snapshot
from sentences import says
from torch import Tensor, nn

import offbeat
from offbeat import Communicator, Deadlock, Disagreement, Network, PeerLost, simulate


def test_results_are_in_rank_order() -> None:
    assert simulate(lambda comm: (comm.rank, comm.size), 3) == [(0, 3), (1, 3), (2, 3)]
    assert simulate(lambda comm: type(comm), 1) == [offbeat.Virtual]


def noisy(comm: Communicator) -> list[dict[str, Tensor]]:
    """Dropout, data drawn from torch's random numbers, and another number of draws on every rank."""
    torch.manual_seed(100 + comm.rank)
    model = Realistic(seed=0)
    optimizer = optimizer_for(model, "momentum")
    trace = []
    with offbeat.local_sgd(model, optimizer, every=2, delay=1, group=comm) as sync:
        for _ in range(6):
            torch.rand(comm.rank + 1)
            model(torch.randn(7)).backward()
            sync.step()
            optimizer.zero_grad()
            trace.append(snapshot(model))
    return [*trace, snapshot(model), {"next": torch.rand(3)}]


def test_a_repeated_run_is_equal_to_the_bit() -> None:
    first = simulate(noisy, 3)
    torch.manual_seed(12345)
    second = simulate(noisy, 3)
    for a, b in zip(first, second, strict=True):
        assert all(same(x, y) for x, y in zip(a, b, strict=True))
    assert not same(first[0][0], first[1][0])  # and the workers are not the same


def test_time_does_not_change_the_numbers() -> None:
    slow = simulate(
        noisy, 3, network=Network(0.3, 1000.0), compute=lambda rank, step: (rank * 7 + step * 5) % 4 + 0.1
    )
    for a, b in zip(simulate(noisy, 3), slow, strict=True):
        assert all(same(x, y) for x, y in zip(a, b, strict=True))


def test_each_worker_has_its_own_stream_of_random_numbers() -> None:
    """It begins at the caller's state, and no other worker draws from it."""
    torch.manual_seed(7)
    expected = torch.rand(6)
    after = torch.rand(1)

    def worker(comm: Communicator) -> Tensor:
        drawn = [torch.rand(2)]
        comm.mean([torch.zeros(1)]).wait()
        drawn.append(torch.rand(1))
        message = comm.tell([comm.rank])
        message.done()
        drawn.append(torch.rand(1))
        message.wait()
        return torch.cat([*drawn, torch.rand(2)])

    torch.manual_seed(7)
    torch.rand(6)
    state = torch.get_rng_state()
    torch.manual_seed(7)
    for stream in simulate(worker, 3):
        assert torch.equal(stream, expected)
    torch.set_rng_state(state)
    simulate(worker, 3)
    assert torch.equal(torch.rand(1), after)  # the caller's own is where it was


def test_the_callers_random_numbers_survive_a_failure() -> None:
    def worker(comm: Communicator) -> None:
        torch.rand(10)
        raise ValueError("no")

    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    with says(ValueError, "no"):
        simulate(worker, 2)
    assert torch.equal(torch.rand(1), expected)


def test_workers_change_places_only_where_one_waits() -> None:
    events: list[str] = []

    def worker(comm: Communicator) -> None:
        events.append(f"{comm.rank} sends")
        message = comm.mean([torch.zeros(1)])
        events.append(f"{comm.rank} waits")
        message.wait()
        events.append(f"{comm.rank} has it")

    simulate(worker, 3)
    # Rank 2's message is complete when it waits, so it goes on to its end; then the others, in rank order.
    assert events == [
        *("0 sends", "0 waits", "1 sends", "1 waits", "2 sends", "2 waits"),
        *("2 has it", "0 has it", "1 has it"),
    ]


# What cannot work: who hears what.


def heard(worker: Callable[[Communicator], Any]) -> Callable[[Communicator], str]:
    def careful(comm: Communicator) -> str:
        try:
            return f"returned {worker(comm)}"
        except Exception as error:
            return f"{type(error).__name__}: {error}"

    return careful


def crossed(comm: Communicator) -> None:
    left, right = comm.split([[0, 1], [2]]), comm.split([[0], [1, 2]])
    if comm.rank == 0:
        left.mean([torch.zeros(2), torch.zeros(3, 1).double()]).wait()
    elif comm.rank == 1:
        right.gather(torch.zeros(1)).wait()
    else:
        comm.tell([1]).wait()


STANDSTILL = (
    "No worker can continue: rank 0 waits for mean of float32[2], float64[3, 1] from rank 1; "
    "rank 1 waits for gather of float32[1] from rank 2; "
    "rank 2 waits for gather of int64[8] from rank 0, rank 1."
)


def test_a_deadlock_is_named() -> None:
    with says(Deadlock, STANDSTILL):
        simulate(crossed, 3)


def test_a_deadlock_that_was_caught_is_not_forgotten() -> None:
    said: dict[int, str] = {}

    def worker(comm: Communicator) -> None:
        said[comm.rank] = heard(crossed)(comm)

    with says(Deadlock, STANDSTILL):
        simulate(worker, 3)
    # The first to be woken hears it; the others wait for those who gave up.
    assert said == {
        0: f"Deadlock: {STANDSTILL}",
        1: "PeerLost: Waiting for the gather of float32[1]: rank 2 has returned.",
        2: "PeerLost: Waiting for the gather of int64[8]: rank 0 has returned.",
    }


def test_a_worker_that_returns_early() -> None:
    def worker(comm: Communicator) -> str:
        comm.mean([torch.zeros(1)]).wait()
        if comm.rank == 1:
            return "early"
        comm.mean([torch.zeros(2)]).wait()
        return "late"

    sentence = "Waiting for the mean of float32[2]: rank 1 has returned."
    with says(PeerLost, sentence):
        simulate(worker, 3)
    expected = [f"PeerLost: {sentence}", "returned early", f"PeerLost: {sentence}"]
    assert simulate(heard(worker), 3) == expected


def test_a_worker_that_fails() -> None:
    said: dict[int, str] = {}

    def worker(comm: Communicator) -> None:
        comm.mean([torch.zeros(1)]).wait()
        if comm.rank == 1:
            raise ZeroDivisionError("no data")
        said[comm.rank] = heard(lambda comm: comm.gather(torch.zeros(2).long()).wait())(comm)

    with says(ZeroDivisionError, "no data"):
        simulate(worker, 3)
    sentence = "Waiting for the gather of int64[2]: rank 1 failed (ZeroDivisionError: no data)."
    assert said == dict.fromkeys((0, 2), f"PeerLost: {sentence}")


def test_the_first_failure_is_raised() -> None:
    """The others fail too, because of it; theirs is not the news."""

    def worker(comm: Communicator) -> None:
        if comm.rank == 2:
            raise ZeroDivisionError("no data")
        comm.mean([torch.zeros(1)]).wait()

    with says(ZeroDivisionError, "no data"):
        simulate(worker, 4)


def test_what_was_sent_before_a_failure_still_arrives() -> None:
    def worker(comm: Communicator) -> float:
        message = comm.mean([torch.tensor([float(comm.rank)])])
        if comm.rank == 1:
            return 0.0
        return message.wait()[0].item()

    assert simulate(worker, 3) == [1.0, 0.0, 1.0]


def test_a_failure_in_training_reaches_all() -> None:
    said: dict[int, str] = {}

    def train(comm: Communicator) -> None:
        model = nn.Linear(1, 1)
        with offbeat.local_sgd(model, optimizer_for(model), every=2, group=comm) as sync:
            for step in range(4):
                if comm.rank == 1 and step == 3:
                    raise ZeroDivisionError("no data")
                sync.step()

    def worker(comm: Communicator) -> None:
        said[comm.rank] = heard(train)(comm)

    simulate(worker, 3)
    sentence = (
        "Round 1 (step 4): Waiting for the gather of int64[8]: rank 1 failed (ZeroDivisionError: no data)."
    )
    assert said[0] == said[2] == f"PeerLost: {sentence}"
    assert said[1] == "ZeroDivisionError: no data"


@pytest.mark.parametrize(
    ("call", "other", "these", "those"),
    [
        (
            lambda comm: comm.mean([torch.zeros(2)]),
            lambda comm: comm.gather(torch.zeros(2)),
            "mean of float32[2]",
            "gather of float32[2]",
        ),
        (
            lambda comm: comm.mean([torch.zeros(2)]),
            lambda comm: comm.mean([torch.zeros(3)]),
            "mean of float32[2]",
            "mean of float32[3]",
        ),
        (
            lambda comm: comm.broadcast([torch.zeros(2)]),
            lambda comm: comm.broadcast([torch.zeros(2, dtype=torch.int64)]),
            "broadcast of float32[2]",
            "broadcast of int64[2]",
        ),
        (
            lambda comm: comm.mean([torch.zeros(2), torch.zeros(())]),
            lambda comm: comm.mean([torch.zeros(2)]),
            "mean of float32[2], float32[]",
            "mean of float32[2]",
        ),
        (
            lambda comm: comm.exchange([torch.zeros(2)] * 3),
            lambda comm: comm.exchange(list(torch.zeros(3).chunk(3))),
            "exchange of float32[2], float32[2], float32[2]",
            "exchange of float32[1], float32[1], float32[1]",
        ),
    ],
)
def test_calls_that_do_not_match_name_both(call: Any, other: Any, these: str, those: str) -> None:
    def worker(comm: Communicator) -> None:
        (other if comm.rank == 2 else call)(comm).wait()

    sentence = f"Workers disagree: rank 0 sends {these}, rank 2 {those}."
    with says(Disagreement, sentence):
        simulate(worker, 3)
    assert simulate(heard(worker), 3) == [f"Disagreement: {sentence}"] * 3


def test_in_a_group_ranks_are_named_as_in_the_world() -> None:
    def worker(comm: Communicator) -> None:
        part = comm.split([[0], [1, 2]])
        part.mean([torch.zeros(comm.rank)]).wait()

    with says(Disagreement, "Workers disagree: rank 1 sends mean of float32[1], rank 2 mean of float32[2]."):
        simulate(worker, 3)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (
            lambda: Network(latency=-1.0),
            "Network(latency=-1.0, bandwidth=inf): latency must not be negative.",
        ),
        (
            lambda: Network(latency=float("nan")),
            "Network(latency=nan, bandwidth=inf): latency must not be negative.",
        ),
        (lambda: Network(bandwidth=0.0), "Network(latency=0.0, bandwidth=0.0): bandwidth must be positive."),
        (lambda: simulate(print, 0), "simulate(workers=0): workers must be at least 1."),
        (lambda: simulate(print, -2), "simulate(workers=-2): workers must be at least 1."),
    ],
)
def test_sentences(make: Callable[[], object], sentence: str) -> None:
    with says(ValueError, sentence):
        make()


# Virtual time, by hand.


def test_a_network_by_hand() -> None:
    assert Network().seconds(10**12) == 0.0
    assert Network(latency=0.5).seconds(10**12) == 0.5
    assert Network(latency=0.5, bandwidth=8.0).seconds(16) == 2.5


def test_a_message_lands_after_the_last_has_sent() -> None:
    """Ranks are ready at 0, 3 and 6. Eight bytes among three are 2·8·2/3 = 10.67, rounded to 11."""

    def worker(comm: Communicator) -> list[float]:
        comm.worker.computed(0)
        began = comm.now()
        first = comm.mean([torch.zeros(2)])
        second = comm.gather(torch.zeros(11))  # 44 bytes to two others: 88
        sent = comm.now()  # sending takes no time
        first.wait()
        there = comm.now()
        second.wait()
        return [began, sent, there, first.arrived(), comm.now(), second.arrived()]

    results = simulate(
        worker, 3, network=Network(latency=0.5, bandwidth=44.0), compute=lambda rank, step: 3.0 * rank
    )
    # 6 + 11/44 + 0.5 = 6.75; the second follows on the same links: 6 + 11/44 + 88/44 + 0.5 = 8.75.
    assert results == [[ready, ready, 6.75, 6.75, 8.75, 8.75] for ready in (0.0, 3.0, 6.0)]


def test_waiting_for_what_is_long_here_takes_no_time() -> None:
    def worker(comm: Communicator) -> float:
        message = comm.mean([torch.zeros(1)])
        comm.worker.computed(0)
        message.wait()
        return comm.now()

    assert simulate(worker, 2, network=Network(latency=1.0), compute=lambda rank, step: 5.0) == [5.0, 5.0]


def test_done_asks_the_clock() -> None:
    """In flight for one second; each worker computes for two between its questions."""

    def worker(comm: Communicator) -> list[bool]:
        message = comm.mean([torch.zeros(1)])
        answers = [message.done()]
        comm.worker.computed(0)
        answers.append(message.done())
        message.wait()
        assert comm.now() == 2.0
        return answers

    results = simulate(worker, 2, network=Network(latency=1.0), compute=lambda rank, step: 2.0)
    assert results == [[False, True]] * 2


def test_done_waits_for_nobody_who_is_ahead() -> None:
    """Rank 1 sends at 5 only: asked at 2, the message is not there; at 4 neither."""

    def worker(comm: Communicator) -> list[bool]:
        if comm.rank == 1:
            comm.worker.computed(0)
            comm.mean([torch.zeros(1)]).wait()
            return []
        message = comm.mean([torch.zeros(1)])
        answers = []
        for step in range(3):
            comm.worker.computed(step)
            answers.append(message.done())
        return answers

    assert simulate(worker, 2, compute=lambda rank, step: [2.0, 5.0][rank])[0] == [False, False, True]


def test_compute_is_asked_with_rank_and_step() -> None:
    asked: list[tuple[int, int]] = []

    def compute(rank: int, step: int) -> float:
        asked.append((rank, step))
        return 1.0

    def worker(comm: Communicator) -> float:
        model = nn.Linear(1, 1)
        sync = offbeat.local_sgd(model, optimizer_for(model), every=10, group=comm)
        for _ in range(3):
            sync.step()
        return comm.now()

    assert simulate(worker, 2, compute=compute) == [3.0, 3.0]
    assert sorted(asked) == [(rank, step) for rank in (0, 1) for step in range(3)]


def timed(
    expression: str,
    *,
    latency: float,
    compute: Callable[[int, int], float] = lambda rank, step: 1.0,
    steps: int = 8,
    workers: int = 2,
) -> list[list[tuple[float, float]]]:
    """Seconds waited and in flight of each round, per rank.

    64 floats are 256 bytes, and so is what each of two workers sends in an all-reduce: one second at 256
    bytes per second. The header, 64 bytes, is there before. A step takes one second.
    """

    def worker(comm: Communicator) -> list[tuple[float, float]]:
        model = nn.Linear(64, 1, bias=False)
        optimizer = optimizer_for(model)
        sync = offbeat.method(expression)(model, optimizer, group=comm)
        for step in range(steps):
            model(data(comm.rank, step).repeat(10)[:64]).sum().backward()
            sync.step()
            optimizer.zero_grad()
        reports = sync.reports
        totals = sync.totals
        start = latency + (comm.size - 1) / comm.size  # rank 0's weights, at the average of a broadcast
        assert totals.seconds_waited == pytest.approx(start + sum(r.seconds_waited for r in reports))
        assert totals.seconds_in_air == pytest.approx(start + sum(r.seconds_in_air for r in reports))
        assert totals.seconds_hidden == max(0.0, totals.seconds_in_air - totals.seconds_waited)
        return [(r.seconds_waited, r.seconds_in_air) for r in reports]

    return simulate(worker, workers, network=Network(latency=latency, bandwidth=256.0), compute=compute)


def test_a_blocking_round() -> None:
    # Half a second of latency and one of bytes, all of it waited for.
    assert timed("local_sgd(every=4)", latency=0.5) == [[(1.5, 1.5)] * 2] * 2


def test_a_flight_that_is_hidden() -> None:
    # In flight for 1.5 s, behind two steps of one second.
    assert timed("local_sgd(every=4, delay=2)", latency=0.5, steps=10) == [[(0.0, 1.5)] * 2] * 2


def test_a_flight_that_is_hidden_exactly() -> None:
    assert timed("local_sgd(every=4, delay=2)", latency=1.0, steps=10) == [[(0.0, 2.0)] * 2] * 2


def test_a_flight_that_is_hidden_partly() -> None:
    # In flight for four seconds, two of them behind the steps.
    assert timed("local_sgd(every=4, delay=2)", latency=3.0, steps=10) == [[(2.0, 4.0)] * 2] * 2


def test_a_flight_as_long_as_the_period() -> None:
    # Five seconds in flight, four behind the steps. The third round is still in flight at the end. The
    # drift of the first, 16 bytes, is on the link when the second begins: 1/16 s.
    found = timed("local_sgd(every=4, delay='round')", latency=4.0, steps=12)
    assert found == [[(1.0, 5.0), (1.0625, 5.0625)]] * 2


def test_a_straggler() -> None:
    # Steps of one second, of three on rank 1. Rank 0 begins its first round after 4 s, rank 1 after 12, and
    # it lands 1.5 s later: rank 0 waits 8 + 1.5, rank 1 its own 1.5. So it is in each round.
    found = timed("local_sgd(every=4)", latency=0.5, compute=lambda rank, step: [1.0, 3.0][rank])
    assert found == [[(9.5, 9.5)] * 2, [(1.5, 1.5)] * 2]


def test_a_straggler_behind_a_delay() -> None:
    # Rank 0 begins after 4 s; at 6 it must land what rank 1 sends at 12: it arrives at 13.5, a wait of 7.5.
    # Rank 1 goes on to 18 meanwhile and waits for nothing. Second round: rank 0 goes on from 13.5 and begins
    # at 15.5, rank 1 at 24, and it lands at 25.5; rank 0, ready for it at 17.5, waits 8.
    found = timed(
        "local_sgd(every=4, delay=2)", latency=0.5, compute=lambda rank, step: [1.0, 3.0][rank], steps=10
    )
    assert found == [[(7.5, 9.5), (8.0, 10.0)], [(0.0, 1.5), (0.0, 1.5)]]


def test_one_late_step() -> None:
    # Rank 0's third step takes five seconds instead of one: only the first round waits for it.
    found = timed(
        "local_sgd(every=4)",
        latency=0.5,
        compute=lambda rank, step: 5.0 if (rank, step) == (0, 2) else 1.0,
    )
    assert found == [[(1.5, 1.5), (1.5, 1.5)], [(5.5, 5.5), (1.5, 1.5)]]


def test_ddp_waits_at_every_step() -> None:
    # 256 bytes of gradients and 4 of the note which exist: 260, two of the floats more than a second.
    found = timed("ddp()", latency=0.5, steps=3)
    assert found == [[(1.515625, 1.515625)] * 3] * 2


def test_time_of_moments_is_waited_for() -> None:
    # The word which moments exist is waited for first: 0.5 + 64/256 = 0.75. Then all begins: 1.5 more.
    found = timed("local_sgd(every=4, moments='average')", latency=0.5)
    assert found == [[(2.25, 2.25)] * 2] * 2

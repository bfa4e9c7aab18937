"""One contract for every communicator: alone, simulated, over gloo, and inside each of the wrappers."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
from calls import CALLS, OWN, SENDS
from conftest import Pool
from links import throttled
from torch import Tensor

import offbeat
from offbeat import Communicator
from offbeat.app.runs.trainer import Watched
from offbeat.comm.collective import COLLECTIVES, traffic
from offbeat.comm.presence import Departure, Track
from offbeat.plan.recording import RecordingComm, Sent


class Noting:
    """Another communicator, and a note of what it was asked for."""

    def __init__(self, comm: Communicator) -> None:
        self._comm, self.asked = comm, set[str]()

    def __getattr__(self, name: str) -> Any:
        self.asked.add(name)
        if name != "worker":
            return getattr(self._comm, name)
        worker = Noting(self._comm.worker)  # type: ignore[arg-type]
        worker.asked = self.asked
        return worker


def ranks_sum(comm: Communicator) -> int:
    """1 + 2 + … + size."""
    return comm.size * (comm.size + 1) // 2


def mean_is_the_sum_times_one_over_the_number(comm: Communicator) -> None:
    base, mine = torch.arange(1.0, 8.0), 1 if comm.rank == 0 else 2  # the sum is (2·size − 1) × base
    given = [base * mine, (base * mine).double().view(7, 1), torch.tensor(float(mine))]
    places = [t.data_ptr() for t in given]
    result = comm.mean(given).wait()
    total = 2 * comm.size - 1
    expected = [base * total, (base * total).double().view(7, 1), torch.tensor(float(total))]
    for got, here, whole in zip(result, given, expected, strict=True):
        assert torch.equal(got, whole * (1 / comm.size))
        assert torch.equal(here, got)  # in place
        assert got.dtype == whole.dtype
    assert [t.data_ptr() for t in given] == places


def total_is_the_sum(comm: Communicator) -> None:
    given = [torch.arange(3.0) + comm.rank, torch.tensor([comm.rank + 1], dtype=torch.int64)]
    places = [t.data_ptr() for t in given]
    result = comm.total(given).wait()
    others = ranks_sum(comm) - comm.size  # 0 + 1 + … + (size − 1)
    assert torch.equal(result[0], torch.arange(3.0) * comm.size + others)
    assert result[1].tolist() == [ranks_sum(comm)]
    assert [t.data_ptr() for t in result] == places == [t.data_ptr() for t in given]


def run_carries_every_collective(comm: Communicator) -> None:
    """Each kind of the table gives every rank what the table says."""
    for kind in COLLECTIVES.values():
        posts = [[torch.arange(2.0) + 10 * rank + j for j in range(comm.size)] for rank in range(comm.size)]
        [want] = kind.results([[t.clone() for t in post] for post in posts], comm.size - 1, [comm.rank])
        given = posts[comm.rank]
        got = comm.run(kind, given, src=comm.size - 1).wait()
        assert all(map(torch.equal, got, want)), kind.name
        assert len(got) == len(want)
        assert all(map(torch.equal, given, want)) or not kind.in_place, kind.name


def gather_is_in_rank_order(comm: Communicator) -> None:
    mine = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]).t() * (comm.rank + 1)  # not contiguous
    parts = comm.gather(mine).wait()
    assert len(parts) == comm.size
    for rank, part in enumerate(parts):
        assert torch.equal(part, torch.tensor([[1.0, 4.0], [2.0, 5.0], [3.0, 6.0]]) * (rank + 1))


def exchange_delivers_chunk_j_to_rank_j(comm: Communicator) -> None:
    chunks = [torch.tensor([10.0 * comm.rank + j, -j]) for j in range(comm.size)]
    parts = comm.exchange(chunks).wait()
    assert [part.tolist() for part in parts] == [[10.0 * i + comm.rank, -comm.rank] for i in range(comm.size)]


def exchange_of_turned_matrices(comm: Communicator) -> None:
    matrix = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    parts = comm.exchange([(matrix + 10 * comm.rank + 100 * j).t() for j in range(comm.size)]).wait()
    for i, part in enumerate(parts):
        assert torch.equal(part, (matrix + 10 * i + 100 * comm.rank).t())


def exchange_of_long_chunks(comm: Communicator) -> None:
    """So long that they go in turns, and each in pieces."""
    count = torch.arange(150_001, dtype=torch.int32)
    chunks = [count + 10 * comm.rank + j for j in range(comm.size)]
    parts = comm.exchange(chunks).wait()
    assert len(parts) == comm.size
    assert all(torch.equal(part, count + 10 * i + comm.rank) for i, part in enumerate(parts))
    assert all(torch.equal(chunk, count + 10 * comm.rank + j) for j, chunk in enumerate(chunks))


def broadcast_from_every_rank(comm: Communicator) -> None:
    for src in range(comm.size):
        floats, whole = torch.full((3,), comm.rank + 0.5), torch.full((2, 2), comm.rank, dtype=torch.int64)
        scalar = torch.tensor(float(comm.rank), dtype=torch.float64)
        result = comm.broadcast([floats, whole, scalar], src).wait()
        assert [t.data_ptr() for t in result] == [t.data_ptr() for t in (floats, whole, scalar)]
        assert floats.tolist() == [src + 0.5] * 3
        assert whole.tolist() == [[src, src], [src, src]]
        assert scalar.item() == src
    one = torch.tensor([float(comm.rank)])
    assert comm.broadcast([one]).wait()[0].item() == 0.0  # rank 0 unless said otherwise


def shift_passes_to_the_next_rank(comm: Communicator) -> None:
    before = (comm.rank - 1) % comm.size
    mine = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]) + comm.rank
    kept = mine.clone()
    for given in (mine, mine.t(), mine[:, 1:], mine[0, 0], mine[:0], mine.bfloat16(), mine.to(torch.uint8)):
        got = comm.shift(given).wait()
        assert got.dtype == given.dtype
        assert torch.equal(got, given + (before - comm.rank))
    assert torch.equal(mine, kept)


def shift_goes_round(comm: Communicator) -> None:
    now = torch.full((2,), float(comm.rank))
    for step in range(1, comm.size + 1):
        now = comm.shift(now).wait()
        assert now.tolist() == [float((comm.rank - step) % comm.size)] * 2


def tell_carries_whole_numbers(comm: Communicator) -> None:
    big = 2**62 + 1
    heard = comm.tell([comm.rank, -big, big - comm.rank]).wait()
    assert heard == [[rank, -big, big - rank, 0, 0, 0, 0, 0] for rank in range(comm.size)]
    assert comm.tell([]).wait() == [[0] * 8] * comm.size
    assert comm.tell(list(range(8))).wait() == [list(range(8))] * comm.size


def split_makes_worlds_of_their_own(comm: Communicator) -> None:
    halves = [list(range(0, comm.size, 2)), list(range(1, comm.size, 2))]
    groups = [group for group in halves if group]
    mine = halves[comm.rank % 2]
    part = comm.split(groups)
    assert (part.rank, part.size) == (mine.index(comm.rank), len(mine))
    assert part.mean([torch.tensor([float(comm.rank)])]).wait()[0].item() == sum(mine) * (1 / len(mine))
    assert [word[0] for word in part.tell([comm.rank]).wait()] == mine
    assert part.broadcast([torch.tensor([comm.rank])], len(mine) - 1).wait()[0].item() == mine[-1]
    again = comm.split(groups)
    assert again.mean([torch.tensor([float(comm.rank)])]).wait()[0].item() == sum(mine) * (1 / len(mine))
    alone = part.split([[rank] for rank in range(part.size)])
    assert (alone.rank, alone.size) == (0, 1)
    assert alone.mean([torch.tensor([float(comm.rank)])]).wait()[0].item() == comm.rank
    assert comm.mean([torch.ones(1)]).wait()[0].item() == comm.size * (
        1 / comm.size
    )  # the parent still works


def split_takes_the_order_of_the_list(comm: Communicator) -> None:
    turned = comm.split([list(reversed(range(comm.size)))])
    assert turned.rank == comm.size - 1 - comm.rank
    heard = [word[0] for word in turned.tell([comm.rank]).wait()]
    assert heard == list(reversed(range(comm.size)))


def messages_are_waited_for_in_any_order(comm: Communicator) -> None:
    rank = float(comm.rank)
    first = comm.mean([torch.tensor([rank])])
    told = comm.tell([comm.rank])
    second = comm.gather(torch.tensor([rank * 2]))
    third = comm.broadcast([torch.tensor([rank + 7])], comm.size - 1)
    fourth = comm.mean([torch.tensor([rank * 4])])
    total = ranks_sum(comm) - comm.size  # 0 + 1 + … + (size − 1)
    assert fourth.wait()[0].item() == torch.tensor(4.0 * total).mul(1 / comm.size).item()
    assert third.wait()[0].item() == comm.size - 1 + 7
    assert [part.item() for part in second.wait()] == [2.0 * r for r in range(comm.size)]
    assert first.wait()[0].item() == torch.tensor(float(total)).mul(1 / comm.size).item()
    assert [word[0] for word in told.wait()] == list(range(comm.size))


def waiting_twice_is_waiting_once(comm: Communicator) -> None:
    calls = []
    message = comm.mean([torch.tensor([float(comm.rank + 1)])])
    changed = message.then(lambda tensors: calls.append(1) or tensors[0] + 1)
    first = changed.wait()
    assert changed.wait() is first
    assert calls == [1]
    expected = torch.tensor(float(ranks_sum(comm))).mul(1 / comm.size)
    assert first.item() == (expected + 1).item()
    assert message.wait()[0].item() == expected.item()
    assert message.wait() is message.wait()


def done_after_waiting(comm: Communicator) -> None:
    for message in (comm.mean([torch.ones(2)]), comm.gather(torch.ones(2)), comm.tell([1])):
        message.wait()
        assert message.done() is True
        assert message.then(lambda value: value).done() is True


def not_done_before_all_have_sent(comm: Communicator) -> None:
    if comm.size == 1:
        assert comm.gather(torch.ones(1)).done()
        return
    signal = comm.worker.duplicate()
    if comm.rank == 0:
        message = comm.gather(torch.ones(1))
        assert not message.done()
        signal.tell([]).wait()
    else:
        signal.tell([]).wait()  # rank 0 has looked
        message = comm.gather(torch.ones(1))
    message.wait()


def the_kinds_of_numbers(comm: Communicator) -> None:
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        given = torch.tensor([comm.rank + 1.0, 2.0], dtype=dtype)
        want = torch.tensor([ranks_sum(comm), 2.0 * comm.size], dtype=dtype).mul_(1 / comm.size)
        assert torch.equal(comm.mean([given]).wait()[0], want)
    for dtype in (
        torch.float32,
        torch.bfloat16,
        torch.int64,
        torch.int32,
        torch.uint8,
        torch.int8,
        torch.bool,
    ):
        given = torch.tensor([comm.rank % 2, 1], dtype=dtype)
        want = [torch.tensor([rank % 2, 1], dtype=dtype) for rank in range(comm.size)]
        assert all(map(torch.equal, comm.gather(given).wait(), want))
        assert torch.equal(comm.broadcast([given], comm.size - 1).wait()[0], want[-1])


def nothing_at_all(comm: Communicator) -> None:
    assert comm.mean([]).wait() == []
    assert comm.broadcast([]).wait() == []
    empty, full = comm.mean([torch.zeros(0), torch.tensor([comm.rank + 1.0])]).wait()
    assert empty.shape == (0,)
    assert full.item() == torch.tensor(float(ranks_sum(comm))).mul(1 / comm.size).item()
    assert [part.shape for part in comm.gather(torch.zeros(0, 3)).wait()] == [(0, 3)] * comm.size
    assert [part.shape for part in comm.exchange([torch.zeros(0)] * comm.size).wait()] == [(0,)] * comm.size
    assert comm.broadcast([torch.zeros(2, 0)], comm.size - 1).wait()[0].shape == (2, 0)


def the_given_is_kept_by_gather(comm: Communicator) -> None:
    """Neither gather nor exchange changes the tensors given."""
    mine = torch.arange(float(comm.size)) + comm.rank
    before = mine.clone()
    comm.gather(mine).wait()
    comm.exchange(list(mine.chunk(comm.size))).wait()
    assert torch.equal(mine, before)


def duplicates_have_an_order_of_their_own(comm: Communicator) -> None:
    one, two = comm.worker.duplicate(), comm.worker.duplicate()
    for other in (one, two):
        assert (other.rank, other.size) == (comm.rank, comm.size)
    worlds = {"comm": comm, "one": one, "two": two}
    order = list(worlds) if comm.rank % 2 else list(reversed(worlds))
    base = {"comm": 0, "one": 100, "two": 200}
    messages = {name: worlds[name].gather(torch.tensor([base[name] + comm.rank])) for name in order}
    for name in sorted(messages):
        assert [part.item() for part in messages[name].wait()] == [base[name] + r for r in range(comm.size)]


def a_task_queue_works_in_order(comm: Communicator) -> None:
    task_queue, duplicate, done = comm.worker.task_queue(), comm.worker.duplicate(), []

    def job(number: int) -> float:
        total = duplicate.total([torch.tensor([float(number)])]).wait()[0].item()
        done.append(number)
        return total

    jobs = [task_queue.give(lambda n=n: job(n)) for n in range(3)]
    assert comm.total([torch.ones(1)]).wait()[0].item() == comm.size
    assert jobs[2].wait() == 2.0 * comm.size
    assert done == [0, 1, 2]
    assert [job.wait() for job in jobs] == [0.0, 1.0 * comm.size, 2.0 * comm.size]

    def bad() -> None:
        raise KeyError("trouble")

    for later in (bad, lambda: done.append(9)):
        with pytest.raises(KeyError, match="trouble"):
            task_queue.give(later).wait()
    assert done == [0, 1, 2]
    task_queue.close()


def a_sidecar_works_beside(comm: Communicator) -> None:
    if comm.size == 1:
        with pytest.raises(NotImplementedError, match=r"^Solo\.sidecar\(\): a world of one"):
            comm.worker.sidecar()
        return
    sidecar, found = comm.worker.sidecar(), []
    assert (sidecar.comm.rank, sidecar.comm.size, sidecar.heard) == (comm.rank, comm.size, -1)

    def work() -> None:
        world = sidecar.comm.split([list(range(comm.size))])
        total = world.total([torch.tensor([comm.rank + 1.0])]).wait()[0].item()
        with sidecar.locked():
            found.append(total)
            sidecar.until(lambda: sidecar.heard >= 7, "a call")
            found.append(sidecar.heard)

    sidecar.start(work)
    with sidecar.locked():
        sidecar.until(lambda: len(found) >= 1, "the sum")
        if comm.rank == comm.size - 1:
            sidecar.announce(6, to=0)
            sidecar.announce(7)
        sidecar.until(lambda: len(found) == 2, "the call")
        assert [sidecar.heard_from(rank) for rank in range(comm.size)] == [-1] * (comm.size - 1) + [7]
    comm.tell([]).wait()  # everyone has heard the first call and not yet the next
    with sidecar.locked():
        if comm.rank == 0:
            sidecar.announce(9, to=comm.size - 1)
        if comm.rank == comm.size - 1:
            sidecar.until(lambda: sidecar.heard_from(0) == 9, "a call to one")
    sidecar.check()
    sidecar.stop()
    assert found == [ranks_sum(comm), 7]


def messages_arrive_between_the_beginning_and_now(comm: Communicator) -> None:
    for call, send, _ in ROWS:
        began = comm.now()
        message = send(comm)
        message.wait()
        assert message.then(lambda value: value).arrived() == message.arrived(), call
        assert comm.size == 1 or began <= message.arrived() <= comm.now(), call


def computing_takes_virtual_time(comm: Communicator) -> None:
    """Where time is virtual; others look at what has arrived meanwhile."""
    message, began = comm.gather(torch.ones(1)), comm.now()
    assert comm.worker.computed(3) is None
    base = inner(comm)
    if base == "Virtual":
        assert comm.now() == began + 3
    elif base == "Torch" and "Throttled" not in layers(comm):
        deadline = time.monotonic() + 120
        while not message.arrived():
            assert time.monotonic() < deadline
            time.sleep(0.001)
            comm.worker.computed(4)
    message.wait()


def a_run_that_is_followed_has_a_name(comm: Communicator) -> None:
    tracks = [Track(comm.rank), Track(comm.rank)]
    for track in tracks:
        assert comm.worker.follow(track) is None
    assert comm.size == 1 or len({track.key for track in tracks} - {""}) == 2


def what_is_skipped_takes_no_time(comm: Communicator) -> None:
    before = comm.now()
    comm.worker.skip()
    comm.worker.computed(3)
    if inner(comm) == "Virtual":
        assert comm.now() == before
    comm.worker.computed(3)
    if inner(comm) == "Virtual":
        assert comm.now() > before


def who_leaves_is_not_waited_for(comm: Communicator) -> None:
    """Rank 1 leaves after a message that still arrives; the others wait for one that never will."""
    early = comm.mean([torch.tensor([float(comm.rank)])])
    if comm.size == 1:
        assert comm.worker.leave(Departure("leaves")) is None
        return
    if comm.rank == 1:
        comm.worker.leave(Departure.of(ValueError("no more data")))
        comm.worker.leave(Departure("says something else"))  # only the first counts
    expected = torch.tensor(float(ranks_sum(comm) - comm.size)).mul(1 / comm.size).item()
    assert early.wait()[0].item() == expected
    if comm.rank != 1:
        with pytest.raises(offbeat.PeerLost, match=r"rank 1 failed \(ValueError: no more data\)\.$"):
            comm.gather(torch.zeros(2)).wait()


def connections_are_closed_once(comm: Communicator) -> None:
    """After a failure. Who was not told in time may take a moment to notice, and nobody waits for it."""
    assert comm.worker.disconnect() is None
    assert comm.worker.disconnect() is None


def layers(comm: Any) -> list[str]:
    """What a communicator is made of, from the outside."""
    comm = comm._comm if isinstance(comm, Noting) else comm
    names = [type(comm).__name__]
    while hasattr(comm, "comm"):
        comm = comm.comm
        names.append(type(comm).__name__)
    return names


def inner(comm: Any) -> str:
    return layers(comm)[-1]


# Every call, and what holds of it. After who has left, nothing works any more.
LAWS: dict[str, list[Callable[[Communicator], None]]] = {
    "run": [run_carries_every_collective],
    "total": [total_is_the_sum],
    "mean": [
        mean_is_the_sum_times_one_over_the_number,
        messages_are_waited_for_in_any_order,
        waiting_twice_is_waiting_once,
        done_after_waiting,
        the_kinds_of_numbers,
        nothing_at_all,
    ],
    "gather": [gather_is_in_rank_order, the_given_is_kept_by_gather, not_done_before_all_have_sent],
    "exchange": [exchange_delivers_chunk_j_to_rank_j, exchange_of_turned_matrices, exchange_of_long_chunks],
    "broadcast": [broadcast_from_every_rank],
    "shift": [shift_passes_to_the_next_rank, shift_goes_round],
    "tell": [tell_carries_whole_numbers],
    "split": [split_makes_worlds_of_their_own, split_takes_the_order_of_the_list],
    "duplicate": [duplicates_have_an_order_of_their_own],
    "task_queue": [a_task_queue_works_in_order],
    "sidecar": [a_sidecar_works_beside],
    "now": [messages_arrive_between_the_beginning_and_now],
    "computed": [computing_takes_virtual_time],
    "skip": [what_is_skipped_takes_no_time],
    "follow": [a_run_that_is_followed_has_a_name],
    "leave": [who_leaves_is_not_waited_for],
    "disconnect": [connections_are_closed_once],
}

# Bytes one of three or four ranks hands over: an all-reduce of n bytes 4n/3 or 6n/4, a gather of n bytes 2n
# or 3n, an all-to-all and a broadcast of n bytes 2n/3 or 3n/4, a shift n; a word is 64 bytes to each other.
ROWS: list[tuple[str, Callable[[Communicator], Any], dict[int, int]]] = [
    ("total", lambda comm: comm.total([torch.ones(2), torch.ones(1)]), {1: 0, 3: 16, 4: 18}),
    ("mean", lambda comm: comm.mean([torch.ones(2), torch.ones(1)]), {1: 0, 3: 16, 4: 18}),
    ("mean", lambda comm: comm.mean([torch.ones(3).double()]), {1: 0, 3: 32, 4: 36}),
    ("gather", lambda comm: comm.gather(torch.ones(3)), {1: 0, 3: 24, 4: 36}),
    ("gather", lambda comm: comm.gather(torch.ones(3).byte()), {1: 0, 3: 6, 4: 9}),
    ("exchange", lambda comm: comm.exchange(list(torch.ones(12).chunk(comm.size))), {1: 0, 3: 32, 4: 36}),
    (
        "broadcast",
        lambda comm: comm.broadcast([torch.ones(2), torch.ones(1)], 1 % comm.size),
        {1: 0, 3: 8, 4: 9},
    ),
    ("shift", lambda comm: comm.shift(torch.ones(3)), {1: 0, 3: 12, 4: 12}),
    ("tell", lambda comm: comm.tell([1, 2]), {1: 0, 3: 128, 4: 192}),
]


def test_no_call_is_forgotten() -> None:
    assert set(LAWS) == CALLS | OWN
    assert {call for call, _, _ in ROWS} == SENDS - {"run"}


WORLDS = [("Solo", 1), *[(kind, size) for kind in ("Virtual", "Torch") for size in (2, 3, 4)]]
WRAPPERS: dict[str, Callable[[Communicator], Communicator]] = {
    "plain": lambda comm: comm,
    "metered": offbeat.Metered,
    "throttled": lambda comm: throttled(comm, rate=1e9, latency=1e-5),
    "watched": Watched,
    # As rounds of `offbeat train --link` see it.
    "all": lambda comm: offbeat.Metered(Watched(throttled(comm, rate=1e9, latency=1e-5))),
}


def held(comm: Communicator, wrapper: str) -> tuple[list[str], set[str]]:
    """Every law on one communicator: what it is made of, and which laws made the calls they are about."""
    wrapped, made = WRAPPERS[wrapper](comm), set()
    for call, laws in LAWS.items():
        for law in laws:
            noting = Noting(wrapped)
            try:
                law(noting)  # type: ignore[arg-type]
            except BaseException as error:
                comm.worker.leave(Departure.of(error))  # so that the others do not wait
                raise AssertionError(f"{law.__name__}: {traceback.format_exc()}") from None
            made |= {law.__name__} if call in noting.asked else set()
    return layers(wrapped), made


@pytest.mark.few(14)
@pytest.mark.parametrize(
    ("kind", "workers", "wrapper"),
    [  # the fast part tries real workers without wrappers, and with all
        pytest.param(*world, wrapper, marks=pytest.mark.slow if slow else [])
        for world in WORLDS
        for wrapper in WRAPPERS
        for slow in [world[0] == "Torch" and wrapper not in ("plain", "all")]
    ],
)
def test_contract(pool: Pool, kind: str, workers: int, wrapper: str) -> None:
    if kind == "Solo":
        found = [held(offbeat.Solo(), wrapper)]
    elif kind == "Virtual":
        network = offbeat.Network(latency=0.25, bandwidth=1e6)
        found = offbeat.simulate(
            lambda comm: held(comm, wrapper), workers, network=network, compute=lambda rank, step: float(step)
        )
    else:
        found = pool.run(held, wrapper, workers=workers, fresh=True)
    assert [names[-1] for names, _ in found] == [kind] * workers
    assert len(found[0][0]) == {"plain": 1, "all": 4}.get(wrapper, 2)
    made = set[str]().union(*(made for _, made in found))
    assert made == {law.__name__ for laws in LAWS.values() for law in laws}


def test_a_mean_is_not_a_division() -> None:
    """5 × (1/3) and 5 / 3 are different floats: the contract above can tell them apart."""
    total = torch.arange(1.0, 8.0) * 5
    assert not torch.equal(total * (1 / 3), total / 3)


def polled(comm: Communicator) -> bool:
    message = comm.mean([torch.tensor([float(comm.rank)])])
    deadline = time.monotonic() + 120
    while not message.done():
        assert time.monotonic() < deadline
        time.sleep(0.001)
    return message.wait()[0].item() == 1.5


def test_gloo_messages_arrive_without_being_waited_for(pool: Pool) -> None:
    assert pool.run(polled) == [True] * 4


@pytest.mark.parametrize("workers", [1, 3, 4])
@pytest.mark.parametrize("row", range(len(ROWS)), ids=[call for call, _, _ in ROWS])
def test_metered_bytes(row: int, workers: int) -> None:
    _, send, expected = ROWS[row]

    def worker(comm: Communicator) -> list[int]:
        metered = offbeat.Metered(comm)
        assert (metered.sent, metered.received) == (0, 0)
        send(metered).wait()
        once = (metered.sent, metered.received)
        send(metered).wait()
        assert (metered.sent, metered.received) == (2 * once[0], 2 * once[1])
        return list(once)

    assert offbeat.simulate(worker, workers) == [[expected[workers]] * 2] * workers


@pytest.mark.parametrize("row", range(len(ROWS)), ids=[call for call, _, _ in ROWS])
def test_waiting_for_any_message_is_watched(row: int) -> None:
    def worker(comm: Communicator) -> tuple[float, float]:
        watched = Watched(comm)
        ROWS[row][1](watched).wait()
        return watched.waited, comm.now()

    for waited, now in offbeat.simulate(worker, 3, network=offbeat.Network(latency=0.25)):
        assert waited == now == 0.25


def plain(value: Any) -> Any:
    """Tensors as lists, with their dtypes."""
    if isinstance(value, Tensor):
        return [str(value.dtype), value.tolist()]
    return [plain(entry) for entry in value] if isinstance(value, list) else value


@pytest.mark.parametrize("workers", [1, 3, 4])
@pytest.mark.parametrize("row", range(len(ROWS)), ids=[call for call, _, _ in ROWS])
def test_imagined_workers_answer_as_simulated_ones(row: int, workers: int) -> None:
    """All send the same; the bytes they note are those that a meter counts."""
    _, send, sent = ROWS[row]
    imagined = RecordingComm(workers)
    found = send(imagined)
    assert not found.done()
    expected = offbeat.simulate(lambda comm: plain(send(comm).wait()), workers)
    assert plain(found.wait()) == expected[0]
    (noted,) = [event for event in imagined.log.events if isinstance(event, Sent)]
    assert traffic(noted.kind, noted.size, noted.given.at(workers)) == sent[workers]


def test_a_split_meter_counts_for_itself() -> None:
    def worker(comm: Communicator) -> tuple[int, int]:
        metered = offbeat.Metered(comm)
        part = metered.split([[0, 1], [2, 3]])
        assert isinstance(part, offbeat.Metered)
        part.mean([torch.ones(3)]).wait()
        return metered.sent, part.sent

    assert offbeat.simulate(worker, 4) == [(0, 12)] * 4


def test_a_meter_passes_time_through() -> None:
    def worker(comm: Communicator) -> float:
        metered = offbeat.Metered(comm)
        metered.worker.computed(3)
        assert metered.now() == comm.now()
        return metered.now()

    assert offbeat.simulate(worker, 2, compute=lambda rank, step: 10.0 * rank + step) == [3.0, 13.0]


def left(comm: Communicator, departure: Departure) -> str:
    """Rank 1 leaves after a message that still arrives; the others wait for one that never will."""
    metered = offbeat.Metered(comm)
    early = metered.mean([torch.tensor([float(comm.rank)])])
    if comm.rank == 1:
        metered.worker.leave(departure)
        metered.worker.leave(Departure("says something else"))  # only the first counts
        assert early.wait()[0].item() == 0.5
        return "gone"
    assert early.wait()[0].item() == 0.5
    with pytest.raises(offbeat.OffbeatError) as caught:
        metered.mean([torch.zeros(2)]).wait()
    return f"{caught.type.__name__}: {caught.value}"


@pytest.mark.parametrize("kind", ["Virtual", "Torch"])
def test_leaving(pool: Pool, kind: str) -> None:
    def run(departure: Departure) -> list[str]:
        if kind == "Virtual":
            return offbeat.simulate(lambda comm: left(comm, departure), 2)
        return pool.run(left, departure, workers=2, fresh=True)

    what = "the mean of float32[2]" if kind == "Virtual" else "the mean of 8 bytes"
    failed = Departure.of(ValueError("no more data"))
    sentence = f"PeerLost: Waiting for {what}: rank 1 failed (ValueError: no more data)."
    assert run(failed) == [sentence, "gone"]
    shared = Departure.of(offbeat.Disagreement("Workers disagree."))
    assert run(shared) == ["Disagreement: Workers disagree.", "gone"]


def test_solo_leaves_in_peace() -> None:
    assert offbeat.Solo().worker.leave(Departure("leaves")) is None
    with pytest.raises(TypeError, match="abstract"):
        Communicator()


def torch_refuses(comm: Communicator) -> list[str]:
    sentences = []
    for timeout in (0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="timeout") as caught:
            offbeat.Torch(timeout=timeout)
        sentences.append(str(caught.value))
    return sentences


def test_torch_sentences(pool: Pool) -> None:
    values = ("0", "-1.0", "nan")
    expected = [f"Torch(timeout={v}): timeout must be a positive number of seconds." for v in values]
    assert pool.run(torch_refuses, workers=1) == [expected]
    with pytest.raises(
        RuntimeError, match=r"^Torch\(\): there is no process group: call init_process_group first.$"
    ):
        offbeat.Torch()


def test_a_message_that_is_here_has_arrived() -> None:
    message = offbeat.Solo().mean([torch.ones(2)])
    assert message.done()
    assert message.then(lambda tensors: tensors[0].tolist()).wait() == [1.0, 1.0]

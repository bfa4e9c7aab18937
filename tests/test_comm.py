"""One contract for every communicator: alone, simulated, over gloo, and metered."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch
from conftest import Pool

import offbeat
from offbeat import Communicator
from offbeat.farewell import Farewell


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


def scatter_mean_gives_each_rank_its_slice(comm: Communicator) -> None:
    whole = torch.arange(2.0 * comm.size)
    got = comm.scatter_mean(whole * (comm.rank + 1)).wait()
    mine = whole[2 * comm.rank : 2 * comm.rank + 2]
    assert torch.equal(got, mine * ranks_sum(comm) * (1 / comm.size))


def scatter_mean_refuses_uneven_slices(comm: Communicator) -> None:
    if comm.size == 1:
        return
    n = comm.size + 1
    sentence = f"^scatter_mean: {n} values cannot be cut into {comm.size} equal slices: pad.$"
    with pytest.raises(ValueError, match=sentence):
        comm.scatter_mean(torch.zeros(n))


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
        assert message.done() in (True, False)
        message.wait()
        assert message.done() is True
        assert message.then(lambda value: value).done() is True


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
    assert comm.scatter_mean(torch.zeros(0)).wait().shape == (0,)


def the_given_is_kept_by_gather(comm: Communicator) -> None:
    """What gather, exchange and scatter_mean were given stays what it was."""
    mine = torch.arange(float(comm.size)) + comm.rank
    before = mine.clone()
    comm.gather(mine).wait()
    comm.scatter_mean(mine).wait()
    comm.exchange(list(mine.chunk(comm.size))).wait()
    assert torch.equal(mine, before)


def arrival_is_not_before_the_beginning(comm: Communicator) -> None:
    began = comm.now()
    message = comm.mean([torch.ones(1)])
    message.wait()
    assert began <= comm.now()
    assert message.then(lambda value: value).arrived() == message.arrived()
    if comm.size > 1:
        assert message.arrived() == 0.0 or began <= message.arrived() <= comm.now()


LAWS = [
    mean_is_the_sum_times_one_over_the_number,
    gather_is_in_rank_order,
    exchange_delivers_chunk_j_to_rank_j,
    exchange_of_turned_matrices,
    exchange_of_long_chunks,
    scatter_mean_gives_each_rank_its_slice,
    scatter_mean_refuses_uneven_slices,
    broadcast_from_every_rank,
    tell_carries_whole_numbers,
    split_makes_worlds_of_their_own,
    split_takes_the_order_of_the_list,
    messages_are_waited_for_in_any_order,
    waiting_twice_is_waiting_once,
    done_after_waiting,
    the_kinds_of_numbers,
    nothing_at_all,
    the_given_is_kept_by_gather,
    arrival_is_not_before_the_beginning,
]

WORLDS = ["Solo", *[f"{kind}-{size}" for kind in ("Virtual", "Torch") for size in (2, 3, 4)]]


def held(comm: Communicator, law: Callable[[Communicator], None], metered: bool) -> str:
    law(offbeat.Metered(comm) if metered else comm)
    return type(comm).__name__


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
@pytest.mark.parametrize("metered", [False, True], ids=["plain", "metered"])
@pytest.mark.parametrize("world", WORLDS)
def test_contract(pool: Pool, world: str, metered: bool, law: Callable[[Communicator], None]) -> None:
    kind, _, number = world.partition("-")
    workers = int(number or 1)
    if kind == "Solo":
        kinds = [held(offbeat.Solo(), law, metered)]
    elif kind == "Virtual":
        kinds = offbeat.simulate(lambda comm: held(comm, law, metered), workers)
    else:
        kinds = pool.run(held, law, metered, workers=workers)
    assert kinds == [kind] * workers


def test_a_mean_is_not_a_division() -> None:
    """5 × (1/3) and 5 / 3 are different floats: the contract above can tell them apart."""
    total = torch.arange(1.0, 8.0) * 5
    assert not torch.equal(total * (1 / 3), total / 3)


def polled(comm: Communicator) -> bool:
    message = comm.mean([torch.tensor([float(comm.rank)])])
    deadline = time.monotonic() + 20
    while not message.done():
        assert time.monotonic() < deadline
        time.sleep(0.001)
    return message.wait()[0].item() == 1.5


def test_gloo_messages_arrive_without_being_waited_for(pool: Pool) -> None:
    assert pool.run(polled) == [True] * 4


def late(comm: Communicator) -> bool:
    comm.tell([]).wait()
    if comm.rank == 1:
        time.sleep(0.5)
    message = comm.mean([torch.ones(1)])
    done = message.done()
    message.wait()
    return done


def test_gloo_messages_are_not_done_before_all_have_sent(pool: Pool) -> None:
    assert pool.run(late, workers=2)[0] is False


# Bytes one of four ranks hands over: an all-reduce of n bytes 2n·3/4, a gather of n bytes 3n, an all-to-all
# and a broadcast of n bytes n·3/4; a word is 64 bytes to each of the others. Of three: 4n/3, 2n, 2n/3.
BYTES = {
    "mean": (lambda comm: comm.mean([torch.ones(2), torch.ones(1)]), {1: 0, 3: 16, 4: 18}),
    "mean of doubles": (lambda comm: comm.mean([torch.ones(3).double()]), {1: 0, 3: 32, 4: 36}),
    "gather": (lambda comm: comm.gather(torch.ones(3)), {1: 0, 3: 24, 4: 36}),
    "gather of bytes": (lambda comm: comm.gather(torch.ones(3).byte()), {1: 0, 3: 6, 4: 9}),
    "exchange": (lambda comm: comm.exchange(list(torch.ones(12).chunk(comm.size))), {1: 0, 3: 32, 4: 36}),
    "scatter_mean": (lambda comm: comm.scatter_mean(torch.ones(12)), {1: 0, 3: 32, 4: 36}),
    "broadcast": (
        lambda comm: comm.broadcast([torch.ones(2), torch.ones(1)], 1 % comm.size),
        {1: 0, 3: 8, 4: 9},
    ),
    "tell": (lambda comm: comm.tell([1, 2]), {1: 0, 3: 128, 4: 192}),
}


@pytest.mark.parametrize("workers", [1, 3, 4])
@pytest.mark.parametrize("kind", BYTES)
def test_metered_bytes(kind: str, workers: int) -> None:
    call, expected = BYTES[kind]

    def worker(comm: Communicator) -> list[int]:
        metered = offbeat.Metered(comm)
        assert (metered.sent, metered.received) == (0, 0)
        call(metered).wait()
        once = (metered.sent, metered.received)
        call(metered).wait()
        assert (metered.sent, metered.received) == (2 * once[0], 2 * once[1])
        return list(once)

    assert offbeat.simulate(worker, workers) == [[expected[workers]] * 2] * workers


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
        metered.computed(3)
        assert metered.now() == comm.now()
        return metered.now()

    assert offbeat.simulate(worker, 2, compute=lambda rank, step: 10.0 * rank + step) == [3.0, 13.0]


def left(comm: Communicator, farewell: Farewell) -> str:
    """Rank 1 leaves after a message that still arrives; the others wait for one that never will."""
    metered = offbeat.Metered(comm)
    early = metered.mean([torch.tensor([float(comm.rank)])])
    if comm.rank == 1:
        metered.leave(farewell)
        metered.leave(Farewell("says something else"))  # only the first counts
        assert early.wait()[0].item() == 0.5
        return "gone"
    assert early.wait()[0].item() == 0.5
    with pytest.raises(offbeat.OffbeatError) as caught:
        metered.mean([torch.zeros(2)]).wait()
    return f"{caught.type.__name__}: {caught.value}"


@pytest.mark.parametrize("kind", ["Virtual", "Torch"])
def test_leaving(pool: Pool, kind: str) -> None:
    def run(farewell: Farewell) -> list[str]:
        if kind == "Virtual":
            return offbeat.simulate(lambda comm: left(comm, farewell), 2)
        return pool.run(left, farewell, workers=2, fresh=True)

    what = "the mean of float32[2]" if kind == "Virtual" else "the mean of 8 bytes"
    failed = Farewell.of(ValueError("no more data"))
    sentence = f"PeerLost: Waiting for {what}: rank 1 failed (ValueError: no more data)."
    assert run(failed) == [sentence, "gone"]
    shared = Farewell.of(offbeat.Disagreement("Workers disagree."))
    assert run(shared) == ["Disagreement: Workers disagree.", "gone"]


def test_solo_leaves_in_peace() -> None:
    assert offbeat.Solo().leave(Farewell("leaves")) is None
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

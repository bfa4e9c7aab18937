"""Methods made for what is sent, by hand; and reducers inside DistributedDataParallel."""

from __future__ import annotations

import copy
import io
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import warm
from conftest import Pool
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import offbeat
from offbeat import ErrorFeedback, Mean, Quantized, RandomBlock, TopK
from offbeat.base.draws import draw_whole
from offbeat.lab import Lab, unavailable

SLOPES = [torch.tensor([1.0, 2.0, 4.0, 8.0]), torch.tensor([3.0, 2.0, 0.0, -8.0])]


class Slope(nn.Module):
    """A loss with a constant gradient, another one on each worker."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.zeros(4))
        self.slope = SLOPES[rank]

    def forward(self) -> Tensor:
        return (self.x * self.slope).sum()


def walk(
    comm: offbeat.Communicator, expression: str, steps: int, lr: float = 0.5
) -> tuple[list[list[float]], list[list[float]], list[float]]:
    """The weights after each step, what averaged() shows there, and the end."""
    net = Slope(comm.rank)
    opt = torch.optim.SGD(net.parameters(), lr=lr)
    sync = offbeat.method(expression)(net, opt, group=comm)
    live, shown = [], []
    for _ in range(steps):
        net().backward()
        sync.step()
        opt.zero_grad()
        live.append(net.x.tolist())
        with sync.averaged():
            shown.append(net.x.tolist())
    sync.finish()
    return live, shown, net.x.tolist()


def test_def_by_hand() -> None:
    """The rule, written out on lists, for each worker beside the other."""
    steps, lam, lr = 5, 0.25, 0.5
    x, e, anchor = [[0.0] * 4, [0.0] * 4], [[0.0] * 4, [0.0] * 4], [0.0] * 4
    expected: list[Any] = []
    shown: list[Any] = []
    for round in range(steps):
        first = draw_whole(0, round, "x") % 4
        piece = {first, (first + 1) % 4}
        delta = []
        for k in range(2):
            x[k] = [a - lr * float(g) for a, g in zip(x[k], SLOPES[k], strict=True)]
            delta.append([anchor[i] - x[k][i] + (1 - lam) * e[k][i] for i in range(4)])
        anchor = [a - (delta[0][i] + delta[1][i]) / 2 if i in piece else a for i, a in enumerate(anchor)]
        e = [[0.0 if i in piece else delta[k][i] for i in range(4)] for k in range(2)]
        x = [[anchor[i] - lam * e[k][i] for i in range(4)] for k in range(2)]
        expected.append(copy.deepcopy(x))
        mean = [(e[0][i] + e[1][i]) / 2 for i in range(4)]
        shown.append([anchor[i] - mean[i] for i in range(4)])
    code = "RandomBlock(2, least=1)"
    answers = offbeat.simulate(lambda comm: walk(comm, f"def_sgd(lam={lam}, reduce={code})", steps), 2)
    for k, (live, seen, end) in enumerate(answers):
        assert live == [rows[k] for rows in expected]
        assert seen == shown
        assert end == shown[-1]


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("lam", [0.0, 0.25, 1.0])
def test_def_loses_no_progress(lam: float, every: int) -> None:
    """With constant gradients the end is the start less all steps, whatever was sent when."""
    expression = f"def_sgd(lam={lam}, every={every}, reduce=RandomBlock(4, least=1))"
    answers = offbeat.simulate(lambda comm: walk(comm, expression, 7), 2)
    mean = (SLOPES[0] + SLOPES[1]) / 2
    for _, shown, end in answers:
        assert end == (-0.5 * 7 * mean).tolist()
        # What averaged() shows is the same at every step, also between rounds.
        assert shown == [(-0.5 * n * mean).tolist() for n in range(1, 8)]


def test_a2sgd_by_hand() -> None:
    """Rank 0: μ₊ 15/4. Rank 1: μ₊ 5/3 of 3, 2 and 0, μ₋ 8. Means 65/24 and 4."""
    live = [answer[0][0] for answer in offbeat.simulate(lambda comm: walk(comm, "a2sgd(every=2)", 1), 2)]
    above = 65 / 24
    first = [-0.5 * (g + above - 15 / 4) for g in (1, 2, 4, 8)]
    second = [*[-0.5 * (g + above - 5 / 3) for g in (3, 2, 0)], -0.5 * (-8 - (4 - 8))]
    assert live[0] == pytest.approx(first, abs=1e-6)
    assert live[1] == pytest.approx(second, abs=1e-6)


class Partly(nn.Module):
    """Which of three layers a worker uses is its own affair; the gradients of those are all its slope."""

    def __init__(self, slope: float, used: tuple[str, ...]) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Parameter(torch.zeros(n)) for n in (2000, 9000, 1000))
        self.slope, self.used = slope, used

    def forward(self) -> Tensor:
        return sum((self.slope * getattr(self, name).sum() for name in self.used), torch.zeros(()))


@pytest.mark.parametrize(
    ("used", "expected"),
    [
        ((("a",), ("a",)), ([-2, 0, 0], [-2, 0, 0])),
        # Rank 0 has no gradient of c, which is there as zeros: μ₊ 2/3 there and 3 here, 11/6 on average.
        ((("a",), ("a", "c")), ([-1 - 7 / 6, 0, -7 / 6], [-11 / 6, 0, -11 / 6])),
    ],
)
def test_a2sgd_counts_only_gradients_that_exist(
    used: tuple[tuple[str, ...], ...], expected: tuple[list[float], ...]
) -> None:
    def worker(comm: offbeat.Communicator) -> tuple[list[float], bool]:
        net = Partly((1.0, 3.0)[comm.rank], used[comm.rank])
        opt = torch.optim.SGD(net.parameters(), lr=1.0)
        sync = offbeat.a2sgd(net, opt, every=8, group=comm)
        net().backward()
        sync.step()
        ends = [float(p.detach().unique()) for p in (net.a, net.b, net.c)]
        return ends, net.b.grad is None

    for (ends, skipped), wanted in zip(offbeat.simulate(worker, 2), expected, strict=True):
        assert ends == pytest.approx(wanted, abs=1e-6)
        assert skipped


def test_sparse_loco_leaves_weights_without_a_gradient_alone() -> None:
    """Whole chunks of b are zero, and share their levels with small and large values of a."""

    def worker(comm: offbeat.Communicator) -> tuple[bool, bool]:
        net = Partly(1.0, ("a",))
        opt = torch.optim.SGD(net.parameters(), lr=1.0)
        sync = offbeat.sparse_loco(net, opt, every=1, group=comm)
        for step in range(3):
            g = torch.Generator().manual_seed(10 * step + comm.rank)
            net.a.grad = torch.randn(2000, generator=g).pow(3)
            sync.step()
        return bool(net.a.any()), bool(net.b.any())

    assert offbeat.simulate(worker, 2) == [(True, False)] * 2


def test_sparse_loco_by_hand() -> None:
    """One tensor of 4 096: the 64 largest are sent at the mean of their kind, the rest is remembered."""
    values = torch.zeros(4096)
    values[:32], values[32:64], values[64:] = 8.0, -4.0, 1.0

    def worker(comm: offbeat.Communicator) -> tuple[Tensor, Tensor]:
        net = nn.Linear(4096, 1, bias=False)
        with torch.no_grad():
            net.weight.zero_()
        opt = torch.optim.SGD(net.parameters(), lr=1.0)
        sync = offbeat.sparse_loco(net, opt, every=1, group=comm)
        net(values).backward()
        sync.step()
        return net.weight.detach()[0], sync.state_dict()["parts"][0]["states"]["reduce"]["residual"][0]

    for weight, left in offbeat.simulate(worker, 2):
        assert torch.equal(weight[:64], -1.5 * values[:64])
        assert not weight[64:].any()
        assert torch.equal(left, torch.where(values == 1.0, 1.0, 0.0))


def test_sparse_loco_fades_what_waits() -> None:
    """64 values grow in three rounds and are sent in the last: 1 + decay + decay² of a growth arrives."""
    large = torch.zeros(4096)
    large[:64] = 8.0
    small = torch.zeros(4096)
    small[64:128] = -1.0

    def worker(comm: offbeat.Communicator) -> Tensor:
        net = nn.Linear(4096, 1, bias=False)
        with torch.no_grad():
            net.weight.zero_()
        opt = torch.optim.SGD(net.parameters(), lr=1.0)
        sync = offbeat.sparse_loco(net, opt, every=1, group=comm)
        for slope in (large + small, large + small, small):
            opt.zero_grad()
            net(slope).backward()
            sync.step()
        return net.weight.detach()[0]

    for weight in offbeat.simulate(worker, 2):
        torch.testing.assert_close(weight, -1.5 * (2 * large + (1 - 0.95**3) / 0.05 * small))


@pytest.mark.parametrize(("share", "grows"), [(0.03, False), (0.05, False), (0.25, True)])
def test_sparse_loco_is_stable_as_its_page_says(share: float, grows: bool) -> None:
    """4 096 values, each sent every 64 rounds on average: lr·c·(1 − decay⁶⁴)/(1 − decay) is 29·c."""

    def worker(comm: offbeat.Communicator) -> float:
        net = nn.Linear(4096, 1, bias=False)
        with torch.no_grad():
            net.weight.copy_(torch.randn(4096, generator=torch.Generator().manual_seed(0)))
        sync = offbeat.sparse_loco(net, torch.optim.SGD(net.parameters(), lr=share), every=1, group=comm)
        for _ in range(200):
            net.weight.grad = net.weight.detach().clone()
            sync.step()
        return net.weight.square().mean().sqrt().item()

    rms = offbeat.simulate(worker, 2)[0]
    assert rms > 10 if grows else rms < 0.5


def test_codes_of_a_node_are_for_its_outside() -> None:
    """Inside a node the mean is exact: with one node of all there is nothing to round."""

    def worker(comm: offbeat.Communicator) -> tuple[str, str]:
        net = Slope(comm.rank)
        opt = torch.optim.SGD(net.parameters(), lr=0.5)
        sync = offbeat.hierarchical(net, opt, nodes=1, outer=4, reduce=Quantized(8), group=comm)
        return repr(sync.parts[0].reduce), repr(sync.parts[1].reduce)

    assert offbeat.simulate(worker, 2)[0] == ("Mean()", repr(Quantized(8)))


@pytest.mark.parametrize("delay", [4, "round"])
@pytest.mark.parametrize(
    "reduce", ["Quantized(8, least=1)", "LowRank(1, least=1)", "Mean('bfloat16', least=1)"]
)
def test_a_delay_hides_question_and_answer(reduce: str, delay: int | str) -> None:
    """A message takes one and a half steps: two fit into four, if the second goes half-way."""

    def worker(comm: offbeat.Communicator) -> list[float]:
        net = nn.Linear(8, 8)
        opt = torch.optim.SGD(net.parameters(), lr=0.5)
        sync = offbeat.method(f"local_sgd(every=4, delay={delay!r}, reduce={reduce})")(net, opt, group=comm)
        for _ in range(17):
            net(torch.ones(8)).sum().backward()
            sync.step()
            opt.zero_grad()
        return [report.seconds_waited for report in sync.reports]

    network = offbeat.Network(latency=1.5)
    waited = offbeat.simulate(worker, 2, network=network, compute=lambda rank, step: 1.0)[0]
    assert waited == [0.0] * 3  # the last one has not landed yet


def test_streaming_sends_four_bits() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    opt = torch.optim.SGD(net.parameters(), lr=0.5)
    sync = offbeat.streaming_diloco(net, opt, fragments=2)
    assert [part.reduce for part in sync.parts] == [Quantized(4)] * 2
    assert repr(sync) == "streaming_diloco(fragments=2)"
    assert repr(offbeat.streaming_diloco(net, opt, fragments=2, reduce=Mean())).endswith("reduce=Mean())")


def test_expressions() -> None:
    net = nn.Linear(2, 2)
    opt = torch.optim.SGD(net.parameters(), lr=0.5)
    expression = "diloco(every=32, reduce=ErrorFeedback(TopK(64, chunk=4096, bits=2), decay=0.9))"
    (part,) = offbeat.method(expression)(net, opt).parts
    assert part.reduce == ErrorFeedback(TopK(64, chunk=4096, bits=2), decay=0.9)
    (part,) = offbeat.method("local_sgd(reduce=Mean('bfloat16'))")(net, opt).parts
    assert part.reduce == Mean(torch.bfloat16)


def hooked(
    comm: offbeat.Communicator, reducer: offbeat.Reducer | None, steps: int, saved: bytes | None = None
) -> tuple[Tensor, int, bytes]:
    """A model trained by DistributedDataParallel with a hook, and what is kept."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(40, 60), nn.Tanh(), nn.Linear(60, 60), nn.Tanh(), nn.Linear(60, 2))
    model = DistributedDataParallel(net, bucket_cap_mb=0.01)
    hook = None
    if reducer is not None:
        hook = offbeat.ddp_hook(reducer, model=net)
        model.register_comm_hook(None, hook)
        if saved is not None:
            hook.load_state_dict(torch.load(io.BytesIO(saved), weights_only=True))
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    g = torch.Generator().manual_seed(comm.rank)
    for _ in range(steps):
        model(torch.randn(8, 40, generator=g)).square().mean().backward()
        opt.step()
        opt.zero_grad()
    file = io.BytesIO()
    torch.save({} if hook is None else hook.state_dict(), file)
    weights = nn.utils.parameters_to_vector(net.parameters()).detach()
    return weights, 0 if hook is None else hook.sent, file.getvalue()


def test_a_hook_is_distributed_data_parallel_with_fewer_bytes(pool: Pool) -> None:
    plain = pool.run(hooked, None, 6)[0][0]
    exact = pool.run(hooked, Mean(), 6)
    assert torch.equal(exact[0][0], plain)
    coded = pool.run(hooked, ErrorFeedback(Quantized(4)), 6)
    for weights, sent, _ in coded:
        assert torch.equal(weights, coded[0][0])
        assert 0 < (weights - plain).norm() < 0.01 * plain.norm()
        # One pass of six is exact, the others send a bit more than an eighth.
        assert sent < (1 / 6 + 5 / 6 * 0.2) * exact[0][1]


def one_matrix(comm: offbeat.Communicator, expression: str, through_hook: bool) -> Tensor:
    """One matrix, trained with a code. Its first gradient is zero, which the hook sends exactly."""
    torch.manual_seed(0)
    net = nn.Linear(60, 50, bias=False)
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    if through_hook:
        model = DistributedDataParallel(net)
        model.register_comm_hook(None, offbeat.ddp_hook(eval(expression, vars(offbeat))))
        step = opt.step
    else:
        model = net
        step = offbeat.method(f"ddp(reduce={expression})")(net, opt, group=comm).step
    g = torch.Generator().manual_seed(comm.rank)
    for i in range(6):
        model(min(i, 1) * torch.randn(8, 60, generator=g)).square().mean().backward()
        step()
        opt.zero_grad()
    return net.weight.detach()


@pytest.mark.parametrize("bits", [8, 4, 3, 2])
def test_a_hook_is_ddp_to_the_bit(bits: int, pool: Pool) -> None:
    """After the first pass, a hook sends what `ddp` sends; only its buckets are others."""
    code = f"ErrorFeedback(Quantized({bits}))"
    hooks, methods = pool.run(one_matrix, code, True), pool.run(one_matrix, code, False)
    assert all(torch.equal(weight, hooks[0]) for weight in (*hooks, *methods))
    assert not torch.equal(hooks[0], pool.run(one_matrix, "Mean()", False)[0])


def test_a_hook_saves_what_it_keeps(pool: Pool) -> None:
    reducer = ErrorFeedback(RandomBlock(4))
    for rank, (_, _, saved) in enumerate(pool.run(hooked, reducer, 3)):
        state = torch.load(io.BytesIO(saved), weights_only=True)
        assert (state["step"], state["rank"]) == (3, rank)
        residuals = [flat for s in state["states"].values() for flat in s["residual"]]
        assert residuals
        assert all(bool(flat.any()) for flat in residuals)
    saved = pool.run(hooked, reducer, 3)[0][2]
    with pytest.raises(offbeat.CheckpointMismatch, match="this is ddp_hook"):
        pool.run(hooked, ErrorFeedback(RandomBlock(8)), 1, saved, workers=4)
    with pytest.raises(offbeat.CheckpointMismatch, match=r"of 2 workers, this is ddp_hook.* of 4 workers\.$"):
        pool.run(of_two_workers, reducer)
    with pytest.raises(offbeat.CheckpointMismatch, match="is of a model with other parameters"):
        pool.run(of_another_model, reducer)
    assert pool.attempt(resumed, reducer) == [(6, True, True)] * 4


def of_two_workers(comm: offbeat.Communicator, reducer: offbeat.Reducer) -> None:
    hook = Hooked(comm, reducer).hook
    hook.load_state_dict({**hook.state_dict(), "workers": 2})


class Hooked:
    """A model, its hook, and batches by number: what a checkpoint holds, and the way on from there."""

    def __init__(self, comm: offbeat.Communicator, reducer: offbeat.Reducer, layers: int = 3) -> None:
        torch.manual_seed(0)
        self.rank, self.done = comm.rank, 0
        self.net = nn.Sequential(*[layer for _ in range(layers) for layer in (nn.Linear(40, 40), nn.Tanh())])
        self.model = DistributedDataParallel(self.net, bucket_cap_mb=0.01)
        self.hook = offbeat.ddp_hook(reducer, model=self.net)
        self.model.register_comm_hook(None, self.hook)

    def train(self, steps: int) -> Tensor:
        opt = torch.optim.SGD(self.net.parameters(), lr=0.1)
        for _ in range(steps):
            g = torch.Generator().manual_seed(100 * self.done + self.rank)
            opt.zero_grad()
            self.model(torch.randn(8, 40, generator=g)).square().mean().backward()
            opt.step()
            self.done += 1
        return nn.utils.parameters_to_vector(self.net.parameters()).detach().clone()

    def save(self) -> tuple[Any, Any, int]:
        return copy.deepcopy(self.net.state_dict()), self.hook.state_dict(), self.done

    def load(self, saved: tuple[Any, Any, int]) -> None:
        weights, state, self.done = saved
        self.net.load_state_dict(weights)
        self.hook.load_state_dict(state)


def resumed(comm: offbeat.Communicator, reducer: offbeat.Reducer) -> tuple[int, bool, bool]:
    """Three steps, then three more: in one go, by the same hook again, and by a new one."""
    run = Hooked(comm, reducer)
    run.train(3)
    saved = run.save()
    end = run.train(3)
    run.load(saved)
    same = torch.equal(run.train(3), end)
    fresh = Hooked(comm, reducer)
    fresh.load(saved)
    assert fresh.save()[1]["step"] == 3
    assert torch.equal(fresh.train(3), end)
    return run.save()[1]["step"], same, fresh.save()[1]["states"].keys() == saved[1]["states"].keys()


def of_another_model(comm: offbeat.Communicator, reducer: offbeat.Reducer) -> None:
    small, large = Hooked(comm, reducer, 2), Hooked(comm, reducer, 3)
    small.train(2)
    large.hook.load_state_dict(small.hook.state_dict())
    try:
        large.train(1)
    except RuntimeError as error:
        raise offbeat.CheckpointMismatch(str(error)) from None


def hooked_with_nan(comm: offbeat.Communicator) -> tuple[str, bool]:
    torch.manual_seed(0)
    net = nn.Linear(40, 60)
    model = DistributedDataParallel(net)
    model.register_comm_hook(None, offbeat.ddp_hook(Quantized(8), model=net))
    for step in range(3):
        bad = comm.rank == 2 and step == 2
        try:
            model(torch.full((2, 40), float("nan") if bad else 1.0)).sum().backward()
        except RuntimeError as error:
            return str(error), step == 2
    return "nothing", False


def test_a_hook_names_who_sends_no_number(pool: Pool) -> None:
    for text, moment in pool.attempt(hooked_with_nan):
        assert "Round 2 (step 2): 'weight' on rank 2 has a value that is NaN" in text
        assert moment


WORKER = """
import sys, time, torch, torch.distributed as dist, offbeat
from pathlib import Path

def counted():
    lines = Path("/proc/net/dev").read_text().splitlines()[2:]
    return sum(int(line.split()[9]) for line in lines if not line.strip().startswith("lo:"))

def measure(method, width):
    net = torch.nn.Linear(width, 1000)
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    sync = offbeat.method(method)(net, opt)

    def step():
        net(torch.randn(2, width)).square().mean().backward()
        sync.step()
        opt.zero_grad()

    step()
    dist.barrier()
    reported, before = sync.totals.bytes_sent, counted()
    for _ in range(4):
        step()
    dist.barrier()
    time.sleep(0.2)
    print(sync.totals.bytes_sent - reported, counted() - before)
    dist.barrier()

torch.set_num_threads(1)
dist.init_process_group("gloo")
for method, width in zip(sys.argv[1::2], sys.argv[2::2]):
    measure(method, int(width))
dist.destroy_process_group()
"""
METHODS = {
    **{
        f"diloco(every=1, reduce={code})": 700
        for code in (
            "Mean('bfloat16')",
            "Quantized(8)",
            "ErrorFeedback(Quantized(4))",
            "TopK(8)",
            "RandomBlock(8)",
            "LowRank(32)",
        )
    },
    "sparse_loco(every=1)": 4000,
    "a2sgd(every=2)": 700,  # two numbers alone would be lost among the headers of packets
}


@pytest.mark.slow
@pytest.mark.xdist_group("lab")
@pytest.mark.skipif(unavailable() is not None, reason="a lab needs Linux, root and iproute2")
def test_bytes_reported_are_those_the_kernel_counts(tmp_path: Path) -> None:
    """In four steps after the first, which gives the weights out."""
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    words = [str(word) for row in METHODS.items() for word in row]
    with Lab(3) as lab, warm.on_hosts():
        runs = lab.run([sys.executable, str(script), *words], timeout=240)
    lines = [run.stdout.splitlines() for run in runs]
    for method, *of_ranks in zip(METHODS, *lines, strict=True):
        reported, counted = (sum(int(line.split()[i]) for line in of_ranks) for i in (0, 1))
        assert reported == pytest.approx(counted, rel=0.05), method

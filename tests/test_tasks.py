"""Tasks: their sizes, what they learn, who sees which bytes, and what they refuse."""

import math
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from offbeat.tasks import Batches, Task, bytes_task
from offbeat.tasks.bytes import SOURCE_BYTES, standard_library


class Spy(nn.Module):
    """Knows nothing, and remembers what it was shown and how."""

    def __init__(self) -> None:
        super().__init__()
        self.logits = nn.Parameter(torch.zeros(256))
        self.inner = nn.Dropout()
        self.seen: list[Tensor] = []
        self.modes: set[tuple[bool, bool, bool]] = set()

    def forward(self, tokens: Tensor) -> Tensor:
        self.seen.append(tokens)
        self.modes.add((self.training, self.inner.training, torch.is_grad_enabled()))
        return self.logits.expand(*tokens.shape, 256)


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


@pytest.fixture
def counting(tmp_path: Path) -> Path:
    """1 000 bytes, 900 to train on: byte i is i mod 251, so a window of four tells where it is from."""
    return write(tmp_path / "counting", bytes(i % 251 for i in range(1000)))


@pytest.fixture
def parts(tmp_path: Path) -> Path:
    """Three parts of 12 bytes, one per worker, and four held out, each byte its part's number."""
    return write(tmp_path / "parts", b"\x00" * 12 + b"\x01" * 12 + b"\x02" * 12 + b"\x03" * 4)


def take(batches: Batches, count: int) -> Tensor:
    return torch.stack([torch.stack(next(batches)) for _ in range(count)])


@pytest.mark.parametrize(
    ("size", "parameters", "tensors", "context"),
    [
        ("tiny", 254_784, 30, 64),
        ("small", 842_752, 54, 128),
        ("medium", 1_853_952, 54, 128),
        ("large", 10_844_928, 78, 256),
    ],
)
def test_sizes(size: str, parameters: int, tensors: int, context: int) -> None:
    task = bytes_task(size)
    found = list(task.model().parameters())
    assert sum(p.numel() for p in found) == parameters
    assert len(found) == tensors
    assert all(p.requires_grad for p in found)
    assert repr(task) == f"Task(name='bytes-{size}')"
    inputs, targets = next(task.batches(0, 1, 3, 0))
    assert inputs.shape == targets.shape == (3, context)


def test_context_can_be_chosen() -> None:
    task = bytes_task("tiny", context=10)
    assert sum(p.numel() for p in task.model().parameters()) == 254_784 - 54 * 96
    inputs, targets = next(task.batches(0, 1, 2, 0))
    assert inputs.shape == (2, 10)
    assert inputs.dtype == targets.dtype == torch.int64
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    assert task.model()(inputs).shape == (2, 10, 256)


def test_a_later_byte_changes_no_earlier_logits() -> None:
    model = bytes_task("tiny", context=16).model()
    tokens = torch.arange(32).view(2, 16)
    changed = tokens.clone()
    changed[:, 9] = 200
    with torch.no_grad():
        before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :9], after[:, :9])
    assert (before[:, 9:] != after[:, 9:]).any(dim=-1).all()


def test_a_window_may_be_shorter_than_the_context_and_order_matters() -> None:
    model = bytes_task("tiny", context=16).model()
    with torch.no_grad():
        long = model(torch.tensor([[5, 6, 7, 8, 9, 10]]))
        short = model(torch.tensor([[5, 6, 7]]))
        swapped = model(torch.tensor([[6, 5, 7]]))
    torch.testing.assert_close(long[:, :3], short)
    assert not torch.allclose(short[:, 2], swapped[:, 2], rtol=0, atol=1e-5)


def test_blocks_that_write_nothing_leave_the_stream_as_it_was() -> None:
    model = bytes_task("tiny", context=4).model()
    tensors = dict(model.named_parameters())
    tokens = torch.tensor([[1, 2, 3, 4]])
    with torch.no_grad():
        for name, tensor in tensors.items():
            if name.endswith("out.weight"):
                tensor.zero_()
        stream = tensors["tokens.weight"][tokens] + tensors["positions.weight"]
        normed = (stream - stream.mean(-1, keepdim=True)) / stream.std(-1, correction=0, keepdim=True)
        expected = normed @ tensors["tokens.weight"].T
        torch.testing.assert_close(model(tokens), expected, rtol=0, atol=1e-4)


@pytest.mark.slow
def test_tiny_learns() -> None:
    task = bytes_task("tiny")
    model, batches = task.model(), task.batches(rank=0, workers=1, batch_size=16, seed=0)
    before = task.evaluate(model)
    assert abs(before - math.log(256)) < 0.5
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(60):
        task.loss(model, next(batches)).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert task.evaluate(model) < 3.3


def test_every_tensor_gets_a_gradient() -> None:
    task = bytes_task("tiny", context=8)
    model = task.model()
    task.loss(model, next(task.batches(0, 1, 4, 0))).backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())


def test_loss_is_the_mean_cross_entropy() -> None:
    task, spy = bytes_task("tiny", context=3), Spy()
    with torch.no_grad():
        spy.logits[7] = 2.0
    batch = torch.tensor([[1, 2, 3]]), torch.tensor([[7, 0, 0]])
    assert task.loss(spy, batch).item() == pytest.approx(math.log(255 + math.exp(2)) - 2 / 3)


def test_a_batch_follows_the_model_to_its_device() -> None:
    task = bytes_task("tiny", context=3)
    assert task.loss(Spy().to("meta"), next(task.batches(0, 1, 2, 0))).device.type == "meta"


@pytest.mark.slow
def test_the_model_compiles_as_one_graph() -> None:
    model = bytes_task("tiny", context=8).model()
    tokens = torch.arange(8)[None]
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(tokens), model(tokens))


def weights(task: Task) -> Tensor:
    return nn.utils.parameters_to_vector(task.model().parameters()).detach()


def test_weights_follow_the_seed_alone() -> None:
    state = torch.get_rng_state()
    first = weights(bytes_task("tiny", seed=3))
    assert torch.equal(torch.get_rng_state(), state)
    torch.rand(1)
    assert torch.equal(first, weights(bytes_task("tiny", seed=3)))
    assert not torch.equal(first, weights(bytes_task("tiny", seed=4)))
    assert first.isfinite().all()


def test_weights_start_as_in_gpt2() -> None:
    tensors = dict(bytes_task("small").model().named_parameters())
    for name, tensor in tensors.items():
        if tensor.dim() == 2:
            residual = name.endswith(("attention_out.weight", "mlp_out.weight"))
            assert tensor.std().item() == pytest.approx(0.02 / math.sqrt(8) if residual else 0.02, rel=0.05)
        else:
            assert (tensor == (1.0 if name.endswith("norm.weight") else 0.0)).all()


def test_workers_and_evaluation_see_disjoint_bytes_and_all_of_their_own(parts: Path) -> None:
    task = bytes_task("tiny", data=parts, context=3)
    for rank in range(3):
        assert take(task.batches(rank, 3, 8, 0), 20).unique().tolist() == [rank]
    spy = Spy()
    task.evaluate(spy)
    assert torch.cat(spy.seen).unique().tolist() == [3]


def test_uneven_shards_cover_the_training_bytes_to_both_ends(counting: Path) -> None:
    task = bytes_task("tiny", data=counting, context=3)
    firsts: list[int] = []
    for rank in range(7):
        inputs, targets = take(task.batches(rank, 7, 500, 0), 10).unbind(1)
        windows = torch.cat([inputs, targets[..., -1:]], dim=-1).view(-1, 4)
        content = counting.read_bytes()
        low = rank * 900 // 7
        found = {content.index(bytes(window), low) for window in windows.tolist()}
        assert found == set(range(low, (rank + 1) * 900 // 7 - 3))
        firsts.append(min(found))
    assert firsts == [0, 128, 257, 385, 514, 642, 771]


def test_evaluation_spans_the_held_out_tail(counting: Path) -> None:
    task, spy = bytes_task("tiny", data=counting, context=3), Spy()
    task.evaluate(spy)
    seen = torch.cat(spy.seen)
    assert seen.shape == (64, 3)
    assert seen[0].tolist() == [900 % 251, 901 % 251, 902 % 251]
    assert seen[-1].tolist() == [996 % 251, 997 % 251, 998 % 251]


@pytest.mark.parametrize("change", [{"rank": 1}, {"seed": 1}])
def test_batches_differ_by_rank_and_seed(counting: Path, change: dict[str, int]) -> None:
    task = bytes_task("tiny", data=counting, context=3)
    call = {"rank": 0, "workers": 2, "batch_size": 8, "seed": 0}
    first = take(task.batches(**call), 5)
    assert torch.equal(first, take(task.batches(**call), 5))
    assert not torch.equal(first, take(task.batches(**(call | change)), 5))
    assert len(first.unique(dim=0)) == 5


def test_ranks_do_not_draw_the_same_offsets(counting: Path) -> None:
    task = bytes_task("tiny", data=counting, context=3)
    one, two = (take(task.batches(rank, 2, 8, 0), 5) for rank in range(2))
    assert not torch.equal((one + 450) % 251, two)


def test_batches_resume_exactly(counting: Path) -> None:
    task = bytes_task("tiny", data=counting, context=3)
    batches = task.batches(1, 2, 4, seed=5)
    take(batches, 3)
    state = batches.state_dict()
    assert state == {"step": 3}
    rest = take(batches, 4)
    assert state == {"step": 3}
    resumed = task.batches(1, 2, 4, seed=5)
    resumed.load_state_dict(state)
    assert torch.equal(take(resumed, 4), rest)
    assert iter(batches) is batches


def test_evaluate_repeats_itself_without_gradients_and_leaves_each_mode() -> None:
    task, spy = bytes_task("tiny", context=8), Spy()
    spy.inner.eval()
    assert task.evaluate(spy) == task.evaluate(spy) == pytest.approx(math.log(256))
    assert spy.modes == {(False, False, False)}
    assert (spy.training, spy.inner.training) == (True, False)
    spy.eval()
    task.evaluate(spy)
    assert not spy.training
    assert spy.logits.grad is None


def test_evaluate_restores_the_mode_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    spy = Spy()
    monkeypatch.setattr(spy, "forward", lambda tokens: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        bytes_task("tiny").evaluate(spy)
    assert spy.training
    assert torch.is_grad_enabled()


def test_another_default_device_does_not_matter(counting: Path) -> None:
    task = bytes_task("tiny", data=counting, context=3)
    expected, loss = take(task.batches(0, 1, 4, 0), 2), task.evaluate(task.model())
    with torch.device("meta"):
        batches, model = task.batches(0, 1, 4, 0), task.model()
        assert torch.equal(torch.stack(next(batches)), expected[0])
        assert task.evaluate(model) == loss


def test_a_task_can_be_sent_to_another_process(counting: Path) -> None:
    task = bytes_task("tiny", data=str(counting), context=3)
    sent: Task = pickle.loads(pickle.dumps(task))
    assert sent.evaluate(sent.model()) == task.evaluate(task.model())
    assert torch.equal(take(sent.batches(0, 1, 4, 0), 2), take(task.batches(0, 1, 4, 0), 2))


def test_the_standard_library_is_the_default_text() -> None:
    content = standard_library()
    assert 1_000_000 < len(content) <= SOURCE_BYTES == 4_000_000
    inputs, _ = next(bytes_task("tiny").batches(0, 1, 1, 0))
    assert bytes(inputs[0].tolist()) in content


def test_the_standard_library_is_its_single_file_modules_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ["zipfile", "abc", "typing", "heapq", "_sysconfigdata_x86", "json/abc", "test/abc"]:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        write(tmp_path / f"{name}.py", f"{name}\n".encode())
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    assert standard_library() == b"abc\nheapq\ntyping\nzipfile\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"size": "huge"},
            "bytes_task(size='huge'): size must be one of 'tiny', 'small', 'medium', 'large'.",
        ),
        ({"context": 0}, "bytes_task(context=0): context must be at least 1."),
        (
            {"data": "no/such/poem.txt"},
            "bytes_task(data='no/such/poem.txt'): data must be the path of an existing file.",
        ),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        bytes_task(**arguments)


def test_data_too_short_to_hold_out_a_window(tmp_path: Path) -> None:
    message = (
        "bytes_task(context=64): the data has 649 bytes and needs at least 650 to hold out one window; "
        "give more data or a smaller context."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        bytes_task("tiny", data=write(tmp_path / "poem", b"x" * 649))
    task = bytes_task("tiny", data=write(tmp_path / "poem", b"x" * 650))
    assert task.evaluate(Spy()) == pytest.approx(math.log(256))


@pytest.mark.parametrize(
    ("rank", "workers", "batch_size", "message"),
    [
        (0, 0, 1, "batches(workers=0): workers must be at least 1."),
        (-1, 2, 1, "batches(rank=-1, workers=2): rank must be from 0 to 1."),
        (2, 2, 1, "batches(rank=2, workers=2): rank must be from 0 to 1."),
        (0, 2, 0, "batches(batch_size=0): batch_size must be at least 1."),
    ],
)
def test_bad_batches(rank: int, workers: int, batch_size: int, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        bytes_task("tiny").batches(rank, workers, batch_size, seed=0)


def test_too_many_workers_fail_on_all_ranks(counting: Path) -> None:
    task = bytes_task("tiny", data=counting, context=19)
    # 900 = 45 · 20 is just enough; of 46 parts some still have 20 bytes, and their ranks must fail as well.
    for rank in range(45):
        next(task.batches(rank, 45, 2, 0))
    message = (
        "batches(workers=46): each gets 19 bytes and needs at least 20 for one window; "
        "use fewer workers, more data or a smaller context."
    )
    for rank in range(46):
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            task.batches(rank, 46, 2, 0)

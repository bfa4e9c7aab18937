"""Tasks with pictures: digits, and images of one's own; and how tasks are found."""

from __future__ import annotations

import io
import math
import pickle
import re
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from offbeat.tasks import Task, digits_task, find_task, images_task
from offbeat.tasks.pictures import augment


def jpeg(shade: int, *, side: int = 32, kind: str = "JPEG") -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (side, side), (shade, shade, shade)).save(buffer, kind)
    return buffer.getvalue()


def pictures(root: Path, *, each: int = 10, test: int = 3) -> Path:
    """Two classes, dark and light; the picture's number is in its shade."""
    for label, shade in (("dark", 20), ("light", 200)):
        for kind, count in (("train", each), ("test", test)):
            folder = root / kind / label
            folder.mkdir(parents=True, exist_ok=True)
            for number in range(count):
                (folder / f"{number}.jpg").write_bytes(jpeg(shade + number))
    return root


def zipped(root: Path, path: Path, *, inside: str = "") -> Path:
    with zipfile.ZipFile(path, "w") as target:
        for file in sorted(root.rglob("*.jpg")):
            target.write(file, inside + file.relative_to(root).as_posix())
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return pictures(tmp_path / "two")


def drawn(task: Task, rank: int, workers: int, *, seed: int = 0, count: int = 30) -> Tensor:
    batches = task.batches(rank, workers, 16, seed)
    return torch.cat([next(batches)[0] for _ in range(count)])


class Spy(nn.Module):
    """Always says class 0; remembers what it saw and in which mode."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.logits = nn.Parameter(torch.zeros(classes))
        self.seen: list[Tensor] = []
        self.modes: set[tuple[bool, bool]] = set()

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(x)
        self.modes.add((self.training, torch.is_grad_enabled()))
        return self.logits.expand(len(x), -1)


@pytest.mark.parametrize(
    ("size", "parameters"), [("tiny", 9_802), ("small", 38_282), ("medium", 283_786), ("large", 1_128_714)]
)
def test_sizes_of_digits(size: str, parameters: int) -> None:
    task = digits_task(size)
    found = list(task.model().parameters())
    assert (sum(p.numel() for p in found), len(found)) == (parameters, 8)
    assert (repr(task), task.unit) == (f"Task(name='digits-{size}')", "images")


@pytest.mark.parametrize(
    ("size", "parameters", "tensors"),
    [("tiny", 5_130, 20), ("small", 77_522, 29), ("medium", 271_954, 65), ("large", 2_775_618, 47)],
)
def test_sizes_of_images(folder: Path, size: str, parameters: int, tensors: int) -> None:
    model = images_task(size, data=folder).model()  # two classes; the docstring counts ten
    found = list(model.parameters())
    assert (sum(p.numel() for p in found), len(found)) == (parameters, tensors)
    assert any(isinstance(layer, nn.BatchNorm2d) for layer in model.modules())


def test_digits_learn() -> None:
    task = digits_task()
    model, batches = task.model(), task.batches(0, 1, task.batch_size, 0)
    assert task.accuracy is not None
    assert abs(task.evaluate(model) - math.log(10)) < 0.1
    optimizer = task.optimizer(model.parameters(), task.lr)
    for _ in range(200):
        task.loss(model, next(batches)).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert task.accuracy(model) > 0.9
    assert task.evaluate(model) < 0.5


def test_images_learn(folder: Path) -> None:
    task = images_task("tiny", data=folder)
    model, batches = task.model(), task.batches(0, 1, 8, 0)
    optimizer = task.optimizer(model.parameters(), 0.02)
    for _ in range(40):
        task.loss(model, next(batches)).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert task.accuracy is not None
    assert task.accuracy(model) == 1.0


@pytest.mark.parametrize("build", ["digits", "images"])
def test_weights_follow_the_seed_alone(build: str, folder: Path) -> None:
    def weights(seed: int) -> Tensor:
        task = (
            digits_task("tiny", seed=seed)
            if build == "digits"
            else images_task("tiny", data=folder, seed=seed)
        )
        return nn.utils.parameters_to_vector(task.model().parameters()).detach()

    state = torch.get_rng_state()
    first = weights(3)
    assert torch.equal(torch.get_rng_state(), state)
    with torch.device("meta"):
        assert torch.equal(first, weights(3))
    assert not torch.equal(first, weights(4))


def test_workers_share_the_training_pictures_without_overlap(folder: Path) -> None:
    task = images_task("tiny", data=folder)
    shades = [set(drawn(task, rank, 3).amax((1, 2, 3)).mul(255).round().tolist()) for rank in range(3)]
    assert sorted(len(part) for part in shades) == [6, 7, 7]
    together = set().union(*shades)
    assert together == {float(s + n) for s in (20, 200) for n in range(10)}
    assert all({shade < 100 for shade in part} == {True, False} for part in shades), "both classes everywhere"


def test_digits_are_sharded_and_held_out() -> None:
    task, spy = digits_task("tiny"), Spy(10)
    parts = [
        {bytes(p.mul(255).byte().flatten().tolist()) for p in drawn(task, r, 2, count=400)} for r in (0, 1)
    ]
    assert not parts[0] & parts[1]
    assert sum(map(len, parts)) == 1797 - 359
    task.evaluate(spy)
    held_out = {bytes(p.mul(255).byte().flatten().tolist()) for p in torch.cat(spy.seen)}
    assert len(held_out) == 359
    assert not held_out & (parts[0] | parts[1])


@pytest.mark.parametrize("change", [{"rank": 1}, {"seed": 1}])
def test_batches_and_augmentation_follow_rank_and_seed(folder: Path, change: dict[str, int]) -> None:
    task = images_task("tiny", data=folder)
    call = {"rank": 0, "workers": 2, "seed": 0}
    assert torch.equal(drawn(task, **call), drawn(task, **call))
    assert not torch.equal(drawn(task, **call), drawn(task, **(call | change)))


def test_batches_resume_exactly_with_their_augmentation(folder: Path) -> None:
    task = images_task("tiny", data=folder)
    batches = task.batches(1, 2, 4, 5)
    for _ in range(3):
        next(batches)
    resumed = task.batches(1, 2, 4, 5)
    resumed.load_state_dict(batches.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(next(batches), next(resumed), strict=True))


def test_augmentation_mirrors_and_shifts_and_nothing_else() -> None:
    picture = torch.arange(32 * 32.0).view(1, 1, 32, 32).expand(400, 3, 32, 32) + 1
    changed, labels = augment((picture, torch.arange(400)), torch.Generator().manual_seed(0))
    assert labels.tolist() == list(range(400))
    assert changed.shape == picture.shape
    padded = nn.functional.pad(picture[0], (4,) * 4)
    seen = set()
    for one in changed:
        middle = int(one[0, 16, 16].item()) - 1
        mirrored = one[0, 16, 17] < one[0, 16, 16]
        row, column = divmod(middle, 32)
        column = 31 - column if mirrored else column
        down, right = row - 16 + 4, column - 16 + 4
        source = padded.flip(-1) if mirrored else padded
        assert torch.equal(one, source[:, down : down + 32, right : right + 32])
        seen.add((bool(mirrored), down, right))
    assert {mirror for mirror, _, _ in seen} == {True, False}
    assert {down for _, down, _ in seen} == {right for _, _, right in seen} == set(range(9))


def test_a_zip_and_its_folder_are_alike(folder: Path, tmp_path: Path) -> None:
    plain = images_task("tiny", data=folder)
    for inside in ("", "deep/within/"):
        packed = images_task("tiny", data=zipped(folder, tmp_path / "two.zip", inside=inside))
        assert torch.equal(drawn(plain, 0, 2), drawn(packed, 0, 2))
        assert plain.evaluate(plain.model()) == packed.evaluate(packed.model())


def test_sizes_suffixes_and_shades_are_made_alike(folder: Path) -> None:
    (folder / "train/dark/big.png").write_bytes(jpeg(35, side=50, kind="PNG"))
    buffer = io.BytesIO()
    Image.new("L", (20, 32), 36).save(buffer, "PNG")
    (folder / "train/dark/grey.PNG").write_bytes(buffer.getvalue())
    (folder / "train/dark/notes.txt").write_text("no picture")
    task = images_task("tiny", data=folder)
    shades = set(drawn(task, 0, 1, count=60).amax((1, 2, 3)).mul(255).round().tolist())
    assert {35.0, 36.0} <= shades
    assert len(shades) == 22
    small = images_task("tiny", data=folder, pixels=16)
    assert next(small.batches(0, 1, 2, 0))[0].shape == (2, 3, 16, 16)


def test_without_test_pictures_a_tenth_is_held_out(tmp_path: Path) -> None:
    task, spy = images_task("tiny", data=pictures(tmp_path, each=20, test=0)), Spy(2)
    assert task.evaluate(spy) == pytest.approx(math.log(2))
    held_out = set(torch.cat(spy.seen).amax((1, 2, 3)).mul(255).round().tolist())
    trained = set(drawn(task, 0, 1, count=60).amax((1, 2, 3)).mul(255).round().tolist())
    assert (len(held_out), len(trained)) == (4, 36)
    assert not held_out & trained


def test_evaluation_is_of_the_test_pictures_in_eval_mode(folder: Path) -> None:
    task, spy = images_task("tiny", data=folder), Spy(2)
    with torch.no_grad():
        spy.logits[0] = 1.0
    assert task.accuracy is not None
    assert task.accuracy(spy) == 0.5
    assert task.evaluate(spy) == pytest.approx(math.log(1 + math.e) - 0.5)
    assert spy.modes == {(False, False)}
    assert spy.training
    assert sorted(torch.cat(spy.seen[:1]).amax((1, 2, 3)).mul(255).round().tolist()) == [
        20,
        21,
        22,
        200,
        201,
        202,
    ]


def test_decoded_pictures_are_kept_and_follow_changes(folder: Path, tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    first = drawn(images_task("tiny", data=folder, cache=kept), 0, 1)
    (file,) = kept.iterdir()
    before = file.stat().st_mtime_ns
    assert torch.equal(first, drawn(images_task("tiny", data=folder, cache=kept), 0, 1))
    assert file.stat().st_mtime_ns == before
    (folder / "train/dark/0.jpg").write_bytes(jpeg(77))
    assert 77.0 in drawn(images_task("tiny", data=folder, cache=kept), 0, 1).amax((1, 2, 3)).mul(255).round()


def test_a_task_can_be_sent_to_another_process() -> None:
    sent: Task = pickle.loads(pickle.dumps(digits_task("tiny")))
    assert sent.evaluate(sent.model()) == pytest.approx(math.log(10), abs=0.1)


def refused(message: str) -> Any:
    return pytest.raises(ValueError, match=f"^{re.escape(message)}$")


def test_bad_pictures(folder: Path, tmp_path: Path) -> None:
    with refused("images_task(size='huge'): size must be one of 'tiny', 'small', 'medium', 'large'."):
        images_task("huge", data=folder)
    with refused("images_task(pixels=4): pixels must be at least 8."):
        images_task(data=folder, pixels=4)
    with refused("images_task(data='gone'): data must be an existing folder or zip of train/CLASS/*.jpg."):
        images_task(data="gone")
    broken = tmp_path / "broken.zip"
    broken.write_bytes(b"PK and then nothing of use")
    with refused(f"images_task(data={str(broken)!r}): this is not a readable zip (File is not a zip file)."):
        images_task(data=broken)
    whole = zipped(folder, tmp_path / "cut.zip").read_bytes()
    (tmp_path / "cut.zip").write_bytes(whole[:2000] + b"?" * 500 + whole[2500:])
    with pytest.raises(
        ValueError, match=r"^images_task\(data=.*cut\.zip'\): .*\.jpg' cannot be decoded \(.*\); rep"
    ):
        images_task(data=tmp_path / "cut.zip")


def test_one_broken_picture_is_named(folder: Path) -> None:
    whole = (folder / "train/light/4.jpg").read_bytes()
    for content in (b"", b"not a picture", whole[: len(whole) // 2]):
        (folder / "train/light/4.jpg").write_bytes(content)
        with pytest.raises(
            ValueError, match=r"'train/light/4.jpg' cannot be decoded \(.*\); replace or delete it\.$"
        ):
            images_task(data=folder)


def test_classes_that_do_not_fit(folder: Path, tmp_path: Path) -> None:
    (folder / "test/new").mkdir()
    (folder / "test/new/0.jpg").write_bytes(jpeg(5))
    with refused(
        f"images_task(data={str(folder)!r}): 'test/new/0.jpg' has a class that train/ does not have."
    ):
        images_task(data=folder)
    (tmp_path / "none").mkdir()
    with refused(
        f"images_task(data={str(tmp_path / 'none')!r}): found 0 folders train/CLASS with .jpg or .png "
        "files; use at least two."
    ):
        images_task(data=tmp_path / "none")


def test_more_workers_than_pictures(folder: Path) -> None:
    task = images_task("tiny", data=folder)
    message = (
        "batches(workers=21): there are 20 training pictures, and each worker needs at least one; "
        "use fewer workers or more data."
    )
    for rank in range(20):
        next(task.batches(rank, 20, 2, 0))
        with refused(message):
            task.batches(rank, 21, 2, 0)


OWN = """
from offbeat.tasks import Task, digits_task

def task(size="tiny", seed=0):
    base = digits_task(size, seed=seed)
    return Task(model=base.model, loss=base.loss, batches=base.batches, evaluate=base.evaluate)

def other(depth):
    return "no task"
"""


def test_tasks_are_found(tmp_path: Path, folder: Path) -> None:
    assert find_task("digits", size="tiny", seed=1, data=None).name == "digits-tiny"
    assert find_task("bytes", size="tiny").name == "bytes-tiny"
    assert find_task("images", data=folder, size="tiny", cache=tmp_path / "kept").name == "images-tiny"
    own = tmp_path / "mine.py"
    own.write_text(OWN)
    found = find_task(str(own), size=None, seed=2)
    assert found.name == "mine"
    assert found.evaluate(found.model()) == find_task("digits", size="tiny", seed=2).evaluate(found.model())


def test_bad_tasks(tmp_path: Path) -> None:
    own = tmp_path / "mine.py"
    own.write_text(OWN)
    with refused(
        "There is no task 'nope': name one of bytes, digits, images, or a Python file with a function `task`."
    ):
        find_task("nope")
    with refused("The task file 'gone.py' does not exist."):
        find_task("gone.py")
    with refused(f"{str(own)!r} has no function 'third' that returns a Task."):
        find_task(f"{own}:third")
    with refused(f"The task '{own}:other' needs 'depth'."):
        find_task(f"{own}:other")
    with refused(f"The function of the task '{own}:other' must return a Task, not str."):
        find_task(f"{own}:other", depth=3)
    with refused("The task 'digits' has no argument 'data': it takes size, seed."):
        find_task("digits", data="x.txt")
    with refused("The task 'images' needs 'data'."):
        find_task("images")

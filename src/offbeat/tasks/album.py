"""Pictures on disk: found by class and decoded to one size."""

import hashlib
import io
import os
import warnings
import zipfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import torch
from torch import Tensor

from offbeat.base.errors import BadArgument, how_to_install
from offbeat.tasks.task import FilePath as FilePath

SUFFIXES = {".jpg", ".jpeg", ".png"}
HELD_OUT = 10  # one picture in ten, if there is no folder of test pictures


@dataclass(frozen=True)
class Album:
    """Shuffled pictures (count, 3, pixels, pixels) as bytes. The first `trained` are for training."""

    pictures: Tensor
    labels: Tensor
    trained: int
    classes: list[str]


def open_album(data: FilePath, *, pixels: int, cache: FilePath | None = None) -> Album:
    """The decoded pictures of a folder or zip, from the cache if they are there."""
    path = Path(data)
    with _open(path) as (names, read, files):
        if cache is None:
            return _decode_all(names, read, str(path), pixels)
        stamps = [f"{file}/{file.stat().st_size}/{file.stat().st_mtime_ns}" for file in files]
        key = "\n".join([f"{path.resolve()}/{pixels}", *stamps]).encode()
        cached = Path(cache) / f"images-{hashlib.blake2b(key, digest_size=8).hexdigest()}.pt"
        if cached.exists():
            return Album(**torch.load(cached, weights_only=True, mmap=True))
        album = _decode_all(names, read, str(path), pixels)
        cached.parent.mkdir(parents=True, exist_ok=True)
        temporary = cached.with_suffix(f".{os.getpid()}")
        torch.save(vars(album), temporary)
        temporary.replace(cached)
        return album


@contextmanager
def _open(path: Path) -> Iterator[tuple[list[str], Callable[[str], bytes], list[Path]]]:
    """The names inside a folder or zip, a function that reads one, and the files they are in."""
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.suffix.lower() in SUFFIXES)
        names = [file.relative_to(path).as_posix() for file in files]
        yield names, lambda name: (path / name).read_bytes(), files
        return
    if not path.is_file():
        raise _refuse(str(path), "data must be an existing folder or zip of train/CLASS/*.jpg")
    try:
        content = zipfile.ZipFile(path)
    except (zipfile.BadZipFile, OSError) as error:
        raise _refuse(str(path), f"this is not a readable zip ({error})") from None
    with content:
        yield sorted(content.namelist()), content.read, [path]


def _find_pictures(names: Sequence[str], data: str) -> list[tuple[str, str, bool]]:
    """Return name, class, and whether it is held out, of pictures in train/CLASS, test/CLASS, val/CLASS."""
    paths = [(name, path) for name in names if (path := PurePosixPath(name)).suffix.lower() in SUFFIXES]
    found = [
        (name, path.parts[-2], path.parts[-3] != "train")
        for name, path in paths
        if not path.name.startswith(".") and path.parts[-3:-2] in [("train",), ("test",), ("val",)]
    ]
    classes = {label for _, label, held_out in found if not held_out}
    if len(classes) < 2:
        count = f"{len(classes)} folder{'' if len(classes) == 1 else 's'} train/CLASS"
        raise _refuse(data, f"found {count} with .jpg or .png files; use at least two")
    if new := next((name for name, label, _ in found if label not in classes), None):
        raise _refuse(data, f"{new!r} has a class that train/ does not have")
    return found


def _decode_all(names: Sequence[str], read: Callable[[str], bytes], data: str, pixels: int) -> Album:
    found = _find_pictures(names, data)
    classes = sorted({label for _, label, _ in found})
    trained, held_out = ([picture for picture in found if picture[2] is kind] for kind in (False, True))
    order = torch.randperm(len(trained), generator=torch.Generator().manual_seed(0), device="cpu").tolist()
    found = [trained[place] for place in order] + held_out
    with ThreadPoolExecutor(2) as pool:
        decoded = list(pool.map(lambda picture: _decode(read, picture[0], data, pixels), found))
    labels = torch.tensor([classes.index(label) for _, label, _ in found], device="cpu")
    count = len(trained) if held_out else len(trained) - max(1, len(trained) // HELD_OUT)
    return Album(torch.stack(decoded), labels, count, classes)


def _decode(read: Callable[[str], bytes], name: str, data: str, pixels: int) -> Tensor:
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError:
        raise ValueError(f"images_task needs Pillow: {how_to_install('cli')}") from None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # odd metadata in files that decode well
            picture = Image.open(io.BytesIO(read(name))).convert("RGB")
    except Exception as error:  # from a decoder, a zip with a password, or a picture that is too large
        why = "it is not a picture" if isinstance(error, UnidentifiedImageError) else error
        raise _refuse(data, f"{name!r} cannot be decoded ({why}); replace or delete it") from None
    if picture.size != (pixels, pixels):
        picture = picture.resize((pixels, pixels), Image.Resampling.BILINEAR)
    flat = torch.frombuffer(bytearray(picture.tobytes()), dtype=torch.uint8)
    return flat.view(pixels, pixels, 3).permute(2, 0, 1)


def _refuse(data: str, reason: str) -> BadArgument:
    return BadArgument("data", data, f"{reason}.", call="images_task")

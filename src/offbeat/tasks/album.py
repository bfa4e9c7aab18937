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
from typing import NamedTuple

import torch
from torch import Tensor

from offbeat.base.errors import BadArgument

SUFFIXES = {".jpg", ".jpeg", ".png"}
HELD_OUT = 10  # one picture in ten, if there is no folder of test pictures


@dataclass(frozen=True)
class Album:
    """Shuffled pictures (count, 3, pixels, pixels) as bytes. The first `trained` are for training."""

    pictures: Tensor
    labels: Tensor
    trained: int
    classes: tuple[str, ...]


class Source(NamedTuple):
    """Files by name, and a stamp that changes when they do."""

    names: list[str]
    read: Callable[[str], bytes]
    stamp: str


class Picture(NamedTuple):
    name: str
    label: str
    held_out: bool


def open_album(
    data: str | os.PathLike[str], *, pixels: int, cache: str | os.PathLike[str] | None = None
) -> Album:
    """The decoded pictures of a folder or zip, from the cache if they are there."""
    path = Path(data)
    with _open_zip(path) if path.is_file() else _open_folder(path) as source:
        if cache is None:
            return _decode_all(source, str(path), pixels)
        key = f"{path.resolve()}/{pixels}/{source.stamp}".encode()
        cached = Path(cache) / f"images-{hashlib.blake2b(key, digest_size=8).hexdigest()}.pt"
        if not cached.exists():
            album = _decode_all(source, str(path), pixels)
            cached.parent.mkdir(parents=True, exist_ok=True)
            beside = cached.with_suffix(f".{os.getpid()}")
            torch.save({**vars(album), "classes": list(album.classes)}, beside)
            beside.replace(cached)
            return album
    saved = torch.load(cached, weights_only=True, mmap=True)
    return Album(saved["pictures"], saved["labels"], saved["trained"], tuple(saved["classes"]))


@contextmanager
def _open_zip(path: Path) -> Iterator[Source]:
    try:
        content = zipfile.ZipFile(path)
    except (zipfile.BadZipFile, OSError) as error:
        raise _bad_data(str(path), f"this is not a readable zip ({error})") from None
    with content:
        stat = path.stat()
        yield Source(sorted(content.namelist()), content.read, f"{stat.st_size}/{stat.st_mtime_ns}")


@contextmanager
def _open_folder(path: Path) -> Iterator[Source]:
    if not path.is_dir():
        raise _bad_data(str(path), "data must be an existing folder or zip of train/CLASS/*.jpg")
    files = sorted(file for file in path.rglob("*") if file.suffix.lower() in SUFFIXES)
    stamp = "\n".join(f"{file}/{file.stat().st_size}/{file.stat().st_mtime_ns}" for file in files)
    names = [file.relative_to(path).as_posix() for file in files]
    yield Source(names, lambda name: (path / name).read_bytes(), stamp)


def _find_pictures(names: Sequence[str], data: str) -> list[Picture]:
    """The pictures in train/CLASS, test/CLASS or val/CLASS, at any depth."""
    found = []
    for name in names:
        path = PurePosixPath(name)
        if path.suffix.lower() in SUFFIXES and len(path.parts) >= 3 and not path.name.startswith("."):
            kind, label = path.parts[-3:-1]
            if kind in ("train", "test", "val"):
                found.append(Picture(name, label, kind != "train"))
    classes = {picture.label for picture in found if not picture.held_out}
    if len(classes) < 2:
        count = f"{len(classes)} folder{'' if len(classes) == 1 else 's'} train/CLASS"
        raise _bad_data(data, f"found {count} with .jpg or .png files; at least two are needed")
    for picture in found:
        if picture.label not in classes:
            raise _bad_data(data, f"{picture.name!r} has a class that train/ does not have")
    return found


def _decode_all(source: Source, data: str, pixels: int) -> Album:
    found = _find_pictures(source.names, data)
    classes = tuple(sorted({picture.label for picture in found}))
    trained, held_out = ([p for p in found if p.held_out is kind] for kind in (False, True))
    order = torch.randperm(len(trained), generator=torch.Generator().manual_seed(0), device="cpu").tolist()
    found = [trained[place] for place in order] + held_out
    with ThreadPoolExecutor(2) as pool:
        decoded = list(pool.map(lambda picture: _decode(source, picture.name, data, pixels), found))
    labels = torch.tensor([classes.index(picture.label) for picture in found], device="cpu")
    count = len(trained) if held_out else len(trained) - max(1, len(trained) // HELD_OUT)
    return Album(torch.stack(decoded), labels, count, classes)


def _decode(source: Source, name: str, data: str, pixels: int) -> Tensor:
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError:
        raise ValueError("images_task needs Pillow: pip install 'offbeat[cli]'.") from None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # odd metadata in files that decode well
            picture = Image.open(io.BytesIO(source.read(name))).convert("RGB")
    except Exception as error:  # from a decoder, a zip with a password, or a picture that is too large
        why = "it is not a picture" if isinstance(error, UnidentifiedImageError) else error
        raise _bad_data(data, f"{name!r} cannot be decoded ({why}); replace or delete it") from None
    if picture.size != (pixels, pixels):
        picture = picture.resize((pixels, pixels), Image.Resampling.BILINEAR)
    flat = torch.frombuffer(bytearray(picture.tobytes()), dtype=torch.uint8)
    return flat.view(pixels, pixels, 3).permute(2, 0, 1)


def _bad_data(data: str, reason: str) -> BadArgument:
    return BadArgument("data", data, f"{reason}.", call="images_task")

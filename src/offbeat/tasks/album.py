"""Pictures on disk: found by class, decoded to one size, and every broken one named."""

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

SUFFIXES = {".jpg", ".jpeg", ".png"}
HELD_OUT = 10  # one part in so many, where there is no folder of test pictures


@dataclass(frozen=True)
class Album:
    """Shuffled pictures (count, 3, pixels, pixels) as bytes; the first `trained` are for training."""

    pictures: Tensor
    labels: Tensor
    trained: int
    classes: tuple[str, ...]


class Source(NamedTuple):
    """Files by name, and a text that changes when they do."""

    names: list[str]
    read: Callable[[str], bytes]
    stamp: str


class Picture(NamedTuple):
    name: str
    label: str
    tested: bool


def open_album(
    data: str | os.PathLike[str], *, pixels: int, cache: str | os.PathLike[str] | None = None
) -> Album:
    """The pictures of a folder or zip, decoded, or as they were decoded before."""
    path = Path(data)
    with _zipped(path) if path.is_file() else _in_folder(path) as source:
        mark = hashlib.blake2b(
            f"{path.resolve()}/{pixels}/{source.stamp}".encode(), digest_size=8
        ).hexdigest()
        kept = None if cache is None else Path(cache) / f"images-{mark}.pt"
        if kept is not None and kept.exists():
            return _kept(kept)
        album = _decoded(source, str(path), pixels)
    if kept is not None:
        _keep(album, kept)
    return album


@contextmanager
def _zipped(path: Path) -> Iterator[Source]:
    try:
        content = zipfile.ZipFile(path)
    except (zipfile.BadZipFile, OSError) as error:
        raise _refusal(str(path), f"this is no readable zip ({error})") from None
    with content:
        stat = path.stat()
        yield Source(sorted(content.namelist()), content.read, f"{stat.st_size}/{stat.st_mtime_ns}")


@contextmanager
def _in_folder(path: Path) -> Iterator[Source]:
    if not path.is_dir():
        raise _refusal(str(path), "data must be an existing folder or zip of train/CLASS/*.jpg")
    files = sorted(file for file in path.rglob("*") if file.suffix.lower() in SUFFIXES)
    stamp = "\n".join(f"{file}/{file.stat().st_size}/{file.stat().st_mtime_ns}" for file in files)
    names = [file.relative_to(path).as_posix() for file in files]
    yield Source(names, lambda name: (path / name).read_bytes(), stamp)


def _sorted_out(names: Sequence[str], data: str) -> list[Picture]:
    """Those that lie in train/CLASS, test/CLASS or val/CLASS, at whatever depth."""
    found = []
    for name in names:
        path = PurePosixPath(name)
        if path.suffix.lower() in SUFFIXES and len(path.parts) >= 3 and not path.name.startswith("."):
            kind, label = path.parts[-3:-1]
            if kind in ("train", "test", "val"):
                found.append(Picture(name, label, kind != "train"))
    trained = {picture.label for picture in found if not picture.tested}
    if len(trained) < 2:
        raise _refusal(
            data, f"{len(trained)} folders train/CLASS with .jpg or .png in them; two are the least"
        )
    for picture in found:
        if picture.label not in trained:
            raise _refusal(data, f"{picture.name!r} is of a class that train/ does not have")
    return found


def _decoded(source: Source, data: str, pixels: int) -> Album:
    found = _sorted_out(source.names, data)
    classes = tuple(sorted({picture.label for picture in found}))
    trained, tested = ([p for p in found if p.tested is kind] for kind in (False, True))
    order = torch.randperm(len(trained), generator=torch.Generator().manual_seed(0), device="cpu").tolist()
    found = [trained[place] for place in order] + tested
    with ThreadPoolExecutor(2) as pool:
        decoded = list(pool.map(lambda picture: _decode(source, picture.name, data, pixels), found))
    labels = torch.tensor([classes.index(picture.label) for picture in found], device="cpu")
    count = len(trained) if tested else len(trained) - max(1, len(trained) // HELD_OUT)
    return Album(torch.stack(decoded), labels, count, classes)


def _decode(source: Source, name: str, data: str, pixels: int) -> Tensor:
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError:
        raise ValueError("images_task: pictures are read by Pillow: pip install 'offbeat[cli]'.") from None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of odd metadata in files that decode well
            picture = Image.open(io.BytesIO(source.read(name))).convert("RGB")
    except Exception as error:  # a decoder, a zip that wants a password, a picture too large to be one
        why = "it is no picture" if isinstance(error, UnidentifiedImageError) else error
        raise _refusal(data, f"{name!r} cannot be decoded ({why}); replace or delete it") from None
    if picture.size != (pixels, pixels):
        picture = picture.resize((pixels, pixels), Image.Resampling.BILINEAR)
    return (
        torch.frombuffer(bytearray(picture.tobytes()), dtype=torch.uint8)
        .view(pixels, pixels, 3)
        .permute(2, 0, 1)
    )


def _kept(path: Path) -> Album:
    saved = torch.load(path, weights_only=True, mmap=True)
    return Album(saved["pictures"], saved["labels"], saved["trained"], tuple(saved["classes"]))


def _keep(album: Album, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_suffix(f".{os.getpid()}")
    torch.save({**vars(album), "classes": list(album.classes)}, beside)
    beside.replace(path)


def _refusal(data: str, reason: str) -> ValueError:
    return ValueError(f"images_task(data={data!r}): {reason}.")

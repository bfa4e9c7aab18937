"""The newest checkpoint of any number of workers, from the files that each rank sees."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from offbeat.base.errors import CheckpointMismatch
from offbeat.base.files import find_damage
from offbeat.comm.communicator import WORDS, Communicator
from offbeat.engine.report import logger
from offbeat.engine.saving import Folder, tell_shards

Key = tuple[int, int]  # the step of a checkpoint and its number of workers
_MOST = 2**24  # workers
Files = dict[Key, set[int]]  # the ranks whose files of a checkpoint are in reach


class Reach(NamedTuple):
    """A checkpoint of some number of workers, and which of its files this rank reads."""

    step: int
    workers: int
    own: int  # the rank whose optimizer this one takes over
    counted: list[int]  # ranks whose weights only this one adds to the mean


def find(place: Folder, *, resize: bool, unshared: str | None) -> Reach | None:
    """Return the newest checkpoint: of this number of workers, or if `resize` allows it of any number.

    `unshared` says why the number cannot change, if so.
    """
    if resize and unshared is None:
        return find_newest(place)
    advice = ": start as many workers, pass resize=True, or name another folder."
    if unshared is not None:
        advice = f", and {unshared}: start as many workers, or name another folder."
    step = place.newest(advice)
    return None if step is None else Reach(step, place.comm.size, place.comm.rank, [])


def find_newest(place: Folder) -> Reach | None:
    """Return the newest checkpoint whose files all are in reach of some rank, and at least one of each rank.

    Without such a checkpoint, it is the newest one of which each rank sees a file. None if there is no file
    at all. Raise if no checkpoint can be read. Every rank calls this.
    """
    comm, damaged = place.comm, dict[int, str]()
    seen: Files = {}
    for step, rank, workers in place.list_files():
        seen.setdefault((step, workers), set()).add(rank)
    while True:
        reach = _gather(seen, comm)
        key = _choose(reach, place)
        if key is None:
            _refuse(reach, damaged, place)
            return None
        found = _assign(key, [files.get(key, set()) for files in reach], comm.rank)
        bad = 0
        for rank in {found.own, *found.counted}:
            if damage := find_damage(place.path(found.step, rank, found.workers)):
                damaged[found.step] = damage
                seen[key].discard(rank)
                bad = 1
        worst = max(words[0] for words in comm.tell([bad]).wait())
        if not any(words[0] for words in tell_shards([worst], place.mesh)):
            break
    _warn(key, reach, place)
    return found


def _gather(seen: Files, comm: Communicator) -> list[Files]:
    """Return what every rank sees."""
    triples = [(*key, rank) for key, ranks in sorted(seen.items()) for rank in sorted(ranks)]
    most = max(words[0] for words in comm.tell([len(triples)]).wait())
    if not most:
        return [{} for _ in range(comm.size)]
    padded = [*triples, *[(-1, 0, 0)] * (most - len(triples))]
    rows = comm.gather(torch.tensor(padded, dtype=torch.int64)).wait()
    reach: list[Files] = [{} for _ in rows]
    for files, row in zip(reach, rows, strict=True):
        for step, workers, rank in row.tolist():
            if step >= 0:
                files.setdefault((step, workers), set()).add(rank)
    return reach


def _choose(reach: Sequence[Files], place: Folder) -> Key | None:
    """Return the newest checkpoint that all shards of the model can read, a complete one if there is any."""
    usable = set.intersection(*[{key for key, ranks in files.items() if ranks} for files in reach])
    complete = {key for key in usable if not set(range(key[1])) - set().union(*[f[key] for f in reach])}
    for keys in (complete, usable):
        words = [step * _MOST + workers for step, workers in sorted(keys)[-WORDS:]]
        shards = tell_shards([*words, *[-1] * (WORDS - len(words))], place.mesh)
        if common := set.intersection(*map(set, shards)) - {-1}:
            return divmod(max(common), _MOST)
    return None


def _assign(key: Key, reach: Sequence[set[int]], me: int) -> Reach:
    """Divide the files among the ranks. Rank r takes over rank r mod workers, or the next one in reach."""
    (step, workers), size = key, len(reach)
    own = min(reach[me], key=lambda rank: (rank - me) % workers)

    def reader(rank: int) -> int:
        """The first rank, from `rank` on, that sees the file of `rank`."""
        return next((r % size for r in range(rank, rank + size) if rank in reach[r % size]), -1)

    return Reach(step, workers, own, [rank for rank in range(workers) if reader(rank) == me])


def _refuse(reach: Sequence[Files], damaged: dict[int, str], place: Folder) -> None:
    """Raise if there are files, but no checkpoint."""
    where, comm = f"load({str(place.folder)!r}, resize=True)", place.comm
    bad = [rank for rank, words in enumerate(comm.tell([len(damaged)]).wait()) if words[0]]
    blind = [rank for rank, files in enumerate(reach) if not any(files.values())]
    for step, reason in damaged.items():
        raise CheckpointMismatch(
            f"{where}: a file of step {step} that rank {comm.rank} needs is damaged ({reason}), and there is "
            "no other checkpoint: to start over, name another folder."
        )
    if bad:
        raise CheckpointMismatch(f"{where}: a file that rank {bad[0]} needs is damaged: see its error.")
    if 0 < len(blind) < comm.size:
        raise CheckpointMismatch(
            f"{where}: rank {blind[0]} sees no file of a checkpoint: let all ranks share the folder, or copy "
            "any one of the files of the last step to each."
        )
    if len(blind) < comm.size:
        raise CheckpointMismatch(
            f"{where}: there is no step of which every rank and shard sees a file: let all ranks share the "
            "folder, or copy any one of the files of the last step to each."
        )


def _warn(key: Key, reach: Sequence[Files], place: Folder) -> None:
    """Say which newer checkpoint is ignored, and which files are missed."""

    def sentences() -> Iterator[str]:
        newer = max((other for files in reach for other in files), default=key)
        if newer > key:
            yield f"the checkpoint of step {newer[0]} is ignored, because it is not complete"
        if missing := sorted(set(range(key[1])) - set().union(*[files[key] for files in reach])):
            ranks = ", ".join(map(str, missing))
            yield f"no rank sees the file of step {key[0]} of rank {ranks}, whose weights do not count"

    for sentence in sentences() if place.comm.rank == 0 else ():
        logger.warning("%s: %s.", place.folder, sentence)

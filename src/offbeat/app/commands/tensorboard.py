"""Logs for TensorBoard, written while the run writes its own."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from offbeat.app.commands.progress import Tail, calling
from offbeat.app.runs.folder import log_path, setting_of

LOOK = 1.0  # seconds between looks at the logs


@contextmanager
def follow_logs(place: Path) -> Iterator[None]:
    """Write all lines of the logs, and then the new ones in a thread. A resumed run is written again."""
    writer = _Writer(place)
    try:
        with calling(lambda last: writer.poll(), LOOK):
            yield
    finally:
        writer.close()


class _Writer:
    """One writer per rank, and the position in its log."""

    def __init__(self, place: Path) -> None:
        self.folder = place / "tensorboard"
        self.tails = [Tail(log_path(place, rank)) for rank in range(setting_of(place).workers)]
        self.writers: list[Any] = []
        shutil.rmtree(self.folder, ignore_errors=True)

    def poll(self) -> None:
        from torch.utils.tensorboard import SummaryWriter

        replaced = [tail.replaced() for tail in self.tails]
        if any(replaced):  # a resumed run has dropped its last lines
            self.close()
            shutil.rmtree(self.folder, ignore_errors=True)
            for tail in self.tails:
                tail.position = 0
        if not self.writers:
            self.writers = [SummaryWriter(str(self.folder / f"rank-{r}")) for r in range(len(self.tails))]
        for writer, tail in zip(self.writers, self.tails, strict=True):
            for entry in tail.read():
                for key, value in entry.items():
                    if isinstance(value, int | float) and key != "step":
                        writer.add_scalar(f"{entry['kind']}/{key}", value, entry["step"], walltime=entry["t"])
            writer.flush()

    def close(self) -> None:
        for writer in self.writers:
            writer.close()
        self.writers = []

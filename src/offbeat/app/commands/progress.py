"""Progress: a bar for each run on a terminal, and a line from time to time without one."""

import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from rich.console import Console
from rich.progress import Progress, ProgressColumn, TaskID, TextColumn
from rich.table import Column

from offbeat.app.cli.options import plain
from offbeat.app.runs.folder import log_path, origin_of, setting_of
from offbeat.app.runs.schema import Entry, read_entry
from offbeat.base.units import as_time

BAR = 20  # characters
LOOK = 0.2  # seconds between looks at the logs
LINE = 10.0  # seconds until the first line without a terminal; later ones come after a tenth of the time
WIDE = 165  # columns of a run's progress on one line, with a method of the usual length
T = TypeVar("T")


def line_columns(width: int) -> list[ProgressColumn]:
    """The text of a run: one line, or three on a narrow terminal."""
    fields = ["{task.description}", "{task.fields[bar]}", "{task.fields[status]}"]
    if width < WIDE:
        text = "\n  ".join(fields)
        return [TextColumn(text, markup=False, table_column=Column(no_wrap=False))]
    return [TextColumn(field, markup=False) for field in fields]


@contextmanager
def follow_progress(folders: Sequence[Path], *, quiet: bool = False, verbose: bool = False) -> Iterator[None]:
    """Follow the runs of these folders in a thread, on standard error."""
    if quiet:
        yield
        return
    console = Console(stderr=True)
    progress = Progress(*line_columns(console.width), console=console, disable=not console.is_terminal)
    followers = [Follower(folder, progress, verbose=verbose) for folder in folders]
    start = time.monotonic()
    followers[0].start = start  # the others start when their turn comes
    due = start + LINE

    def look(last: bool) -> None:
        nonlocal due
        for follower in followers:
            follower.poll()
        now = time.monotonic()
        if not console.is_terminal and now > due and not last:
            due = now + max(LINE, (now - start) / 10)
            left = [follower for follower in followers if not follower.done]
            for follower in left[:1] if not any(each.started for each in left) else left:
                follower.print_line()

    with progress, calling(look, LOOK):
        yield


@contextmanager
def calling(look: Callable[[bool], None], seconds: float) -> Iterator[None]:
    """Call `look(False)` every so many seconds in a thread, and `look(True)` when the block ends."""
    over = threading.Event()

    def follow() -> None:
        last = False
        while not last:
            last = over.wait(seconds)
            look(last)

    thread = threading.Thread(target=follow, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def track(items: Sequence[T], what: str, *, quiet: bool = False) -> Iterator[T]:
    """Each of the items, with a bar, or a line from time to time if there is no terminal."""
    console, start = Console(stderr=True), time.monotonic()
    columns = [TextColumn("{task.description} {task.fields[bar]}", markup=False)]
    progress = Progress(*columns, console=console, disable=quiet or not console.is_terminal)
    bar = progress.add_task(what, bar=draw_bar(0, len(items), 0.0))
    done, needed, due = 0, 0.0, start + LINE  # `needed` is the seconds of those that are done

    def look(last: bool) -> None:
        nonlocal due
        spent = time.monotonic() - start
        left = max(0.0, needed / done * len(items) - spent) if done else None
        progress.update(bar, bar=(text := draw_bar(done, len(items), spent, left)))
        if not (console.is_terminal or quiet or last) and start + spent > due:
            due = start + spent + max(LINE, spent / 10)
            print(f"offbeat: {what} {text[BAR + 1 :]}", file=sys.stderr)

    with progress, calling(look, LOOK):
        for item in items:
            yield item
            done, needed = done + 1, time.monotonic() - start


def draw_bar(done: int, total: int, spent: float, left: float | None = None) -> str:
    """A bar, the count, the time spent, and how much is left if that is known.

    >>> draw_bar(100, 400, 12.0, 36.0)
    '█████░░░░░░░░░░░░░░░ 100/400, 12 s, about 36 s left'
    """
    full = BAR * done // max(1, total)
    text = f"{'█' * full}{'░' * (BAR - full)} {done}/{total}, {as_time(round(spent))}"
    return text if left is None or done == total else f"{text}, about {as_time(round(left))} left"


class Tail:
    """Reads the new lines of a log that another process writes."""

    def __init__(self, path: Path) -> None:
        self.path, self.position, self._file = path, 0, 0

    def replaced(self) -> bool:
        """Whether the log is another file than before: a resumed run drops its last lines. It is then read
        from the beginning."""
        number = self.path.stat().st_ino if self.path.exists() else self._file
        before, self._file = self._file, number
        if before in (0, number):
            return False
        self.position = 0
        return True

    def read(self) -> list[Entry]:
        """The entries since the last call, without a line that is not complete."""
        if not self.path.exists():
            return []
        with self.path.open("rb") as file:
            file.seek(self.position)
            new = file.read()
        whole = new[: new.rfind(b"\n") + 1]
        self.position += len(whole)
        return [entry for line in whole.splitlines(True) if (entry := read_entry(line)) is not None]


class Follower:
    """Follows one run: the position in its log, and its last entries."""

    def __init__(self, folder: Path, progress: Progress, *, verbose: bool = False) -> None:
        setting, self.verbose = setting_of(folder), verbose
        self.tail, self.progress, self.steps = Tail(log_path(folder, 0)), progress, setting.steps
        self.workers, self.unit = setting.workers, origin_of(folder)["unit"]
        self.name = plain(f"{setting.method} seed {setting.seed}")
        self._sent = 0
        self._steps: deque[Entry] = deque(maxlen=50)
        self._round: Entry = {}
        self.start: float | None = None  # when its turn came
        self._spent = 0.0  # seconds, until the last look before it was done
        self._first = (0, 0.0)  # the step and time of the first look that saw any
        self.bar: TaskID = progress.add_task(
            self.name, total=setting.steps, bar=self._bar(), status=self._status()
        )

    def poll(self) -> None:
        """Read what is new in the log, and show it."""
        finished = self.done
        self._read_new()
        if self.start is None and self.started:
            self.start = time.monotonic()
        if self.start is not None and not finished:
            self._spent = time.monotonic() - self.start
        done = self._steps[-1]["step"] if self._steps else 0
        if done and not self._first[0]:
            self._first = done, time.monotonic()
        self.progress.update(self.bar, completed=done, bar=self._bar(), status=self._status())

    @property
    def started(self) -> bool:
        """Whether the run has written anything."""
        return self.tail.position > 0

    @property
    def done(self) -> bool:
        return bool(self._steps) and self._steps[-1]["step"] >= self.steps

    def print_line(self) -> None:
        """Print how far the run is, if it is its turn."""
        if self.start is not None:
            print(f"offbeat: {self.name}: {self._bar()[BAR + 1 :]}, {self._status()}", file=sys.stderr)

    def _print_loss(self, entry: Entry) -> None:
        text = f"step {entry['step']}: loss {entry['loss']:.4f}, {entry['t']:.2f} s"
        line = f"{self.name}: {text}, {entry['sent'] / 1e6:.2f} MB"
        self.progress.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def _read_new(self) -> None:
        if self.tail.replaced():
            self._sent = 0
            self._steps.clear()
        for entry in self.tail.read():
            if entry["kind"] == "steps":
                self._steps.append(entry)
            elif entry["kind"] == "round":
                self._round = entry
                self._sent += entry["sent"]
            elif entry["kind"] == "eval" and self.verbose:
                self._print_loss(entry)

    def _bar(self) -> str:
        """The bar, with the time that is left at the speed since the first look."""
        done, now = self._steps[-1]["step"] if self._steps else 0, time.monotonic()
        step, since = self._first
        left = (now - since) / (done - step) * (self.steps - done) if step and done > step else None
        return draw_bar(done, self.steps, self._spent, left)

    def _status(self) -> str:
        """Loss, speed, exposed share, bytes, period and drift over the last steps."""
        if not self._steps:
            return (
                "waiting" if self.start is None else "making the first step" if self.started else "starting"
            )
        first, last = self._steps[0], self._steps[-1]
        total = sum(entry["seconds"] for entry in self._steps) or 1.0
        exposed = sum(entry["exposed"] for entry in self._steps) / total
        units, seconds = last["units"], total
        if len(self._steps) > 1:
            units, seconds = units - first["units"], seconds - first["seconds"]
        speed = self.workers * units / (seconds or 1.0)
        words = [f"loss {last['loss']:.3f}", f"{speed:,.0f} {self.unit}/s"]
        words += [f"exposed {exposed:.0%}", f"{self._sent / 1e6:.1f} MB"]
        words += [f"period {self._round['period']}"] if self._round else []
        words += [f"drift {drift:.2g}"] if (drift := self._round.get("drift")) is not None else []
        return "  ".join(words)

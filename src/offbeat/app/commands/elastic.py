"""`offbeat train --elastic` and `offbeat join`: workers that come and go."""

import hashlib
import os
import secrets
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import quote, unquote, urlsplit

import torch

from offbeat.app.cli import saying
from offbeat.app.cli.options import Refused, reading
from offbeat.app.commands import show
from offbeat.app.commands.progress import follow_progress
from offbeat.app.commands.report import show_table
from offbeat.app.commands.resume import resume_command
from offbeat.app.runs import folder as folders
from offbeat.app.runs.elastic import ElasticLoop, saved_steps
from offbeat.app.runs.presence import shares
from offbeat.app.runs.seats import count_taken, take_seat
from offbeat.app.runs.setting import TORCH_DDP, Setting, check
from offbeat.app.runs.summary import read
from offbeat.app.runs.tied import end_with_launcher
from offbeat.base.errors import OffbeatError, RunFinished
from offbeat.elastic import Elastic
from offbeat.elastic.lighthouse import load_torchft
from offbeat.methods.expression import method
from offbeat.tasks import Task

LOOK = 0.2  # seconds between looks at the workers
AFTER = 10.0  # seconds after the end of a run in which a worker that is late may end by itself
ALONE = 10.0  # seconds without any worker after which a run is given up
# Without the current folder in sys.path, as for other workers.
_JOIN = "import sys; sys.path[:] = filter(None, sys.path); from offbeat.app.runs.tied import tie; tie(); "
_JOIN += "from offbeat.app.cli.app import run; sys.exit(run(sys.argv[1:]))"


def train(given: SimpleNamespace, setting: Setting, place: Path, least: int) -> int:
    """Start a lighthouse and the fewest workers; follow the run until it is over. `setting` has the most."""
    with ExitStack() as stack:
        with reading():
            for option in ("link", "straggler", "tensorboard"):
                if getattr(given, option):
                    raise Refused(f"--{option}: not with --elastic.")
            secret = _read_token(given.token)
            if "RANK" in os.environ:
                raise Refused("--elastic: without torchrun; start workers on other terminals with join.")
            task = setting.find_task(folders.cache_of(place))
            full = check(setting, task)
            _check_method(full, task, least)
            stack.enter_context(folders.lock(place))
            lighthouse = given.lighthouse or stack.enter_context(_light())
            began = time.time() - (_cut_logs(place) if given.resume else 0.0)
            elastic = {"lighthouse": lighthouse, "least": least, "began": began, "token": _digest(secret)}
            folders.prepare(place, full, task, elastic=elastic)
        url = lighthouse.rstrip("/") + quote(str(place.resolve()))
        words = [url, *(["--token", str(given.token.resolve())] if given.token else [])]
        print(
            f"offbeat: to start more workers, up to {full.workers}: offbeat join {shlex.join(words)}",
            file=sys.stderr,
        )
        stack.enter_context(saying(f"stopped; continue with {resume_command(place, given)}"))
        stack.enter_context(follow_progress([place], quiet=given.quiet))
        crew = stack.enter_context(_crew([*words, *(["--load"] if given.resume else [])], place, least))
        _watch(crew, place, full, shlex.join(words))
    trained = read(place)
    if given.json:
        show.print_json({name: [alive, counted] for name, alive, counted in shares(trained)})
        return 0
    show_table([trained], write_title(full, least))
    columns = {"worker": "fold", "alive": "right", "counted in rounds": "right"}
    show.print_table(show.console(), "who was there", columns, shares(trained))
    show.say(show.console(), f"logs: {place}; the model: {place / folders.MODEL}")
    return 0


def write_title(setting: Setting, least: int) -> str:
    """The title of a run's table: the task, the fewest workers and the most, and the steps."""
    workers, steps = show.count(setting.workers, "worker"), show.count(setting.steps, "step")
    return f"{setting.task}, {least} to {workers}, {steps}"


def least_of(place: Path) -> int:
    """The fewest workers of the run in a folder."""
    return int(folders.origin_of(place)["elastic"]["least"])


def _read_token(path: Path | None) -> str | None:
    """The secret in a file: on the command line, other users of the machine could read it."""
    if path is None:
        return None
    with reading("--token", str(path)):
        token = path.read_text().strip()
        if not token:
            raise ValueError("the file is empty: write a secret into it.")
    return token


def _digest(secret: str | None, salt: str | None = None) -> list[str] | None:
    """A salt and a digest that tells whether a worker has this token, but not what it is. None for none."""
    if secret is None:
        return None
    salt = salt or secrets.token_hex(16)
    return [salt, hashlib.scrypt(secret.encode(), salt=salt.encode(), n=2**14, r=8, p=1).hex()]


def _check_token(given: Path | None, secret: str | None, wanted: list[str] | None, url: str) -> None:
    """Refuse a worker whose token is not that of the run: it would take a seat, and then wait for nobody."""
    if wanted is not None and secret is None:
        raise Refused(f"join {url}: the run has a token: add --token and the file that holds it.")
    if wanted is None and secret is not None:
        raise Refused(f"--token {str(given)!r}: the run has none: leave it out.")
    if wanted is not None and _digest(secret, wanted[0]) != wanted:
        raise Refused(f"--token {str(given)!r}: the run has another one.")


def _check_method(setting: Setting, task: Task, least: int) -> None:
    """Build the method as each worker does, which connects to nothing: not all can go on without a worker."""
    group, model = Elastic("http://127.0.0.1:1", least=least), task.model()
    if setting.method == TORCH_DDP:
        raise Refused("--elastic: torch_ddp() cannot go on without a worker: use a method such as diloco.")
    try:
        method(setting.method)(model, setting.optimizer_of(task, model), group=group)
    except ValueError as error:
        reason = str(error).replace(f"group={group!r}: the method", setting.method)
        reason = reason.replace(f" with group={group!r}", "")
        raise Refused(f"--elastic: {reason.replace(f'group={group!r}', '--elastic')}") from error


def _cut_logs(place: Path) -> float:
    """Drop what the run has logged since its last checkpoint. Return the seconds until then."""
    after, last = max(saved_steps(place), default=-1), 0.0
    for seat in range(folders.setting_of(place).workers):
        folders.cut(log := folders.log_path(place, seat), after=after)
        last = max([last, *[float(entry["t"]) for entry in folders.entries(log)]])
    return last


@contextmanager
def _light() -> Iterator[str]:
    """A lighthouse of this process, for workers on this machine."""
    try:
        server: Any = load_torchft().LighthouseServer
    except ImportError as error:
        raise Refused(f"--elastic: {error}") from error
    lighthouse = server(bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=20_000, heartbeat_timeout_ms=1500)
    try:
        yield f"http://127.0.0.1:{lighthouse.address().rsplit(':', 1)[1]}"
    finally:
        lighthouse.shutdown()


@contextmanager
def _crew(words: list[str], place: Path, workers: int) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Workers that end with this process, not with its terminal. What they print goes to files."""
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    crew = []
    try:
        for index in range(workers):
            with folders.output_path(place, index).open("ab") as output:
                crew.append(
                    subprocess.Popen(
                        [sys.executable, "-c", _JOIN, "join", *words, "--tied"], env=environment,
                        stdin=subprocess.PIPE, stdout=output, stderr=output, start_new_session=True,
                    )
                )  # fmt: skip
        yield crew
    finally:
        for process in crew:
            process.kill()
            process.wait()


def _watch(crew: list[subprocess.Popen[bytes]], place: Path, setting: Setting, words: str) -> None:
    """Wait until the run is over. Say once of each worker that it has ended early."""
    said, since = set[int](), time.monotonic()
    while True:
        time.sleep(LOOK)
        over = folders.finished(place)
        taken = count_taken(place, setting.workers)
        if over and (not taken or all(process.poll() is not None for process in crew)):
            return  # one that joined too late may still wait for others
        if alive := bool(taken) or any(process.poll() is None for process in crew):
            since = time.monotonic()
        for index, process in enumerate(crew):
            if process.poll() not in (None, 0) and index not in said and not over:
                said.add(index)
                code = process.returncode
                how = f"by {signal.Signals(-code).name}" if code < 0 else f"with code {code}"
                print(f"offbeat: a worker ended {how}; start another: offbeat join {words}", file=sys.stderr)
        patience = ALONE if any((p.returncode or 0) < 0 for p in crew) else LOOK
        if not alive and time.monotonic() - since > patience:  # a busy machine may have stopped this process
            output = folders.output_path(place, max(said, default=0))
            last = output.read_text().strip().rpartition("\n")[2].removeprefix("offbeat: ")
            raise OffbeatError(f"All workers of the run in {str(place)!r} are gone: {last or 'killed'}")


def join(url: str, *, token: Path | None, quiet: bool = False, tied: bool = False, load: bool = False) -> int:
    """Train as one more worker of an elastic run. One that finds nobody else loads the last checkpoint."""
    with reading():
        place = _read_address(url)
        setting, origin = folders.setting_of(place), folders.origin_of(place)
        if "elastic" not in origin:
            raise Refused(f"join {url}: the run in {str(place)!r} was not started with --elastic.")
        if folders.finished(place):
            return _say_finished(place)
        secret = _read_token(token)
        _check_token(token, secret, origin["elastic"].get("token"), url)
        task = setting.find_task(folders.cache_of(place))
    if tied:
        threading.Thread(target=end_with_launcher, name="offbeat-tied", daemon=True).start()
    torch.set_num_threads(1)
    torch.manual_seed(setting.seed)
    with take_seat(place, setting.workers) as seat:
        if not quiet:
            print(f"offbeat: worker-{seat} of {shlex.quote(str(place))}", file=sys.stderr, flush=True)
        alone = count_taken(place, setting.workers) <= 1
        loop = ElasticLoop(setting, task, place, seat, token=secret, load=load or alone)
        threading.Thread(target=_end_with_run, args=(place, loop), name="offbeat-end", daemon=True).start()
        try:
            loop.run()
        except RunFinished:
            return _say_finished(place)
    return 0


def _read_address(url: str) -> Path:
    """The folder in the address that `offbeat train --elastic` has printed."""
    with suppress(ValueError):  # of a port that is not a number, for example
        parts = urlsplit(url)
        if parts.scheme == "http" and parts.port and len(parts.path) > 1:
            return Path(unquote(parts.path))
    raise Refused(
        f"join {url}: the address is that of the lighthouse and the folder of the run, as "
        "`offbeat train --elastic` prints it: http://127.0.0.1:29510/home/me/runs/mine"
    )


def _end_with_run(place: Path, loop: ElasticLoop) -> None:
    """End a worker that still waits for others some time after they have finished the run."""
    while not folders.finished(place):
        time.sleep(AFTER)
    time.sleep(AFTER)
    loop.group.close()


def _say_finished(place: Path) -> int:
    print(f"offbeat: the run in {str(place)!r} is finished")
    return 0

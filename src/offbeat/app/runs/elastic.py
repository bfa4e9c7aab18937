"""The loop of a worker that may come and go. Its state comes from the others, or from a checkpoint."""

import hashlib
import math
import re
import time
from collections import defaultdict
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from offbeat.app.runs.folder import ORIGIN, Record, log_path, origin_of, write_model
from offbeat.app.runs.setting import Setting
from offbeat.app.runs.trainer import Costs
from offbeat.base.errors import NotFinite, OffbeatError
from offbeat.elastic import Elastic
from offbeat.engine.report import Report
from offbeat.methods.expression import method
from offbeat.tasks import Task

CHECKPOINTS = "checkpoints"
_FILE = re.compile(r"offbeat-step-(\d+)-rank-(\d+)-of-(\d+)\.pt")


def is_elastic(folder: Path) -> bool:
    """Whether the workers of the run in a folder may come and go."""
    return (folder / ORIGIN).is_file() and "elastic" in origin_of(folder)


def saved_steps(folder: Path) -> list[int]:
    """The steps with a complete checkpoint of an elastic run, in order."""
    files = defaultdict[tuple[int, int], set[int]](set)
    for path in (folder / CHECKPOINTS).glob("offbeat-step-*.pt"):
        if found := _FILE.fullmatch(path.name):
            files[int(found[1]), int(found[3])].add(int(found[2]))
    return sorted({step for (step, workers), ranks in files.items() if ranks == set(range(workers))})


class ElasticLoop:
    """Trains on the data of one seat, with the workers that are there, until all steps are made.

    With `load`, it continues from the newest checkpoint. Nobody may write one meanwhile.
    """

    def __init__(
        self,
        setting: Setting,
        task: Task,
        folder: Path,
        seat: int,
        *,
        token: str | None = None,
        load: bool = False,
    ) -> None:
        origin = origin_of(folder)
        self._seat, self._load = seat, load
        self.setting, self.task, self.folder, self.name = setting, task, folder, f"worker-{seat}"
        self._began = float(origin["elastic"]["began"])
        assert setting.batch is not None
        self.model = task.model()
        self.optimizer = setting.optimizer_of(task, self.model)
        self.batches = task.batches(seat, setting.workers, setting.batch, setting.seed)
        self.record = Record(log_path(folder, seat), steps=setting.steps)
        elastic = origin["elastic"]
        self.group = Elastic(elastic["lighthouse"], least=int(elastic["least"]), token=token, name=self.name)
        self.sync = method(setting.method)(self.model, self.optimizer, group=self.group)
        self.sync.on_report, self.sync.on_join = self._log_round, self._join
        self._listens = False  # it has joined, and counts for nothing in the coming round

    @property
    def now(self) -> float:
        """Seconds since the run began, on the clock that all workers of this machine share."""
        return max(0.0, time.time() - self._began)

    def run(self) -> None:
        """Train to the end of the run."""
        sync, setting = self.sync, self.setting
        try:
            with sync:
                self.record.write("life", step=0, t=self.now, alive=True)
                self._set_rate()
                begun = self._load_newest() if self._load else 0
                sync.start()
                if sync.steps != begun:
                    self._meet()  # it has joined after a round: so do the others
                while sync.steps < setting.steps:
                    self._step()
                    self._meet()
                if setting.checkpoint_every is not None:
                    self._save()  # before the workers become one, so that the run can be extended
                sync.finish()
                self._end()
        finally:
            self.record.write("life", step=sync.steps, t=self.now, alive=False)
            self.record.close()

    def _meet(self) -> None:
        """After a step: evaluate and save, if it is time. All workers do so after the same steps."""
        step, every = self.sync.steps, self.setting.checkpoint_every
        if self.setting.evaluates(step):
            self._evaluate()
        if every is not None and step % every == 0 and step < self.setting.steps:
            self._save()

    def _save(self) -> None:
        try:
            self.sync.save(self.folder / CHECKPOINTS)
        except OSError as error:
            raise OffbeatError(str(error)) from error

    def _load_newest(self) -> int:
        """Continue from the newest checkpoint, if there is one. Return its step."""
        saved = saved_steps(self.folder)
        if not saved or not self.sync.load(self.folder / CHECKPOINTS, resize=True):
            return 0
        self._move_data()
        torch.manual_seed(self.setting.seed + 1000 * self._seat + saved[-1])  # each draws its own numbers
        return saved[-1]

    def _join(self, sync: Any) -> None:
        """The state of the others has arrived: go on at their step, with other data than before."""
        self._listens = True
        self._set_rate()
        self._move_data()

    def _move_data(self) -> None:
        if "step" in self.batches.state_dict():
            self.batches.load_state_dict({"step": self.sync.steps})

    def _set_rate(self) -> None:
        assert self.setting.lr is not None
        for group in self.optimizer.param_groups:
            group["lr"] = self.setting.lr * self.setting.rate(self.sync.steps)

    def _step(self) -> None:
        start, waited = self.now, self.sync.totals.seconds_waited
        self._set_rate()
        batch = next(self.batches)
        loss = self.task.loss(self.model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        self.sync.observe(loss.detach())
        self.sync.step(self._local)
        self.optimizer.zero_grad()
        if not math.isfinite(loss.item()):
            raise NotFinite(f"The training loss of step {self.sync.steps} is {loss.item()}: lower --lr.")
        exposed = max(0.0, self.sync.totals.seconds_waited - waited)
        units = batch[1].numel()
        self.record.add_step(
            self.sync.steps, start=start, end=self.now, exposed=exposed, loss=loss.item(), units=units
        )

    def _local(self) -> None:
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()

    def _log_round(self, r: Report) -> None:
        values = {
            "round": r.round, "begun_after": r.step, "began": max(0.0, self.now - r.seconds_in_air),
            "exposed": r.seconds_waited, "air": r.seconds_in_air, "sent": r.bytes_sent, "drift": r.drift,
            "norm": r.norm, "period": r.period, "repeats": r.repeats,
            "members": [name.partition(":")[0] for name in r.members], "counts": not self._listens,
        }  # fmt: skip
        self._listens = False
        self.record.write("round", step=self.sync.steps, t=self.now, **values)

    def _costs(self) -> dict[str, Any]:
        totals = self.sync.totals
        costs = Costs(totals.rounds, totals.bytes_sent, totals.seconds_waited, totals.seconds_in_air)
        return {"step": self.sync.steps, "t": self.now, "units": self.record.units, **asdict(costs)}

    def _evaluate(self) -> None:
        """Log the loss of the consensus, on the first of the workers that are there."""
        with self.sync.averaged():
            if self.sync.parts[0].peers.everyone.rank == 0:
                self._write_scores()

    def _write_scores(self) -> None:
        scores = {"loss": self.task.evaluate(self.model)}
        if self.task.accuracy is not None:
            scores["accuracy"] = self.task.accuracy(self.model)
        self.record.write("eval", **self._costs(), **scores)

    def _end(self) -> None:
        if self.sync.parts[0].peers.everyone.rank == 0:
            write_model(self.folder, self.model)
            self._write_scores()
        self.record.write("end", **self._costs(), weights=_checksum(self.model.state_dict()))


def _checksum(tensors: dict[str, Tensor]) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for tensor in tensors.values():
        digest.update(tensor.detach().cpu().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()

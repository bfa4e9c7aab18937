"""The loop of one run on one rank."""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from offbeat.app.runs.checkpoints import CheckpointStore
from offbeat.app.runs.record import Record, cut, log_path
from offbeat.app.runs.setting import TORCH_DDP, Setting
from offbeat.app.runs.stop import Stop
from offbeat.app.runs.tally import Tally
from offbeat.app.runs.torchddp import TorchDDP
from offbeat.app.runs.trainer import Costs, Trainer
from offbeat.app.runs.watch import Stopwatch, Watched
from offbeat.app.runs.wire import wire
from offbeat.comm.communicator import Communicator
from offbeat.tasks import Task


class Loop:
    """Trains by a setting, and writes down what happens.

    The clock stands still during evaluations, and what they send is not counted: they are ours, not the
    method's. Neither is the start, which gives rank 0's weights to all.
    """

    def __init__(
        self,
        comm: Communicator,
        setting: Setting,
        task: Task,
        folder: Path,
        *,
        called: threading.Event | None = None,
    ) -> None:
        assert setting.batch is not None
        self.comm, self.setting, self.task, self.folder = Watched(comm), setting, task, folder
        self.rank, self.real = comm.rank, setting.where != "simulation"
        self.wire = wire() if setting.where == "netns" else None
        self.model = task.model()
        self.optimizer = setting.optimizer_of(task, self.model)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, setting.rate)
        self.batches = task.batches(comm.rank, comm.size, setting.batch, setting.seed)
        kind: Any = TorchDDP if setting.method == TORCH_DDP else Trainer
        self.trainer = kind(setting, task, self.model, self.optimizer, self.comm)
        self.store = CheckpointStore(folder / "checkpoints", rank=self.rank, workers=comm.size)
        self.stop = Stop(folder, rank=self.rank, workers=comm.size, called=called)
        self.step = 0
        self.clock = Stopwatch(comm.now)
        self.earlier = Costs()  # of the processes before this one
        self.uncounted = Costs()  # of evaluations and the start, in this one

    def run(self, *, resume: bool = False) -> bool:
        """Train to the end; False if Ctrl-C came first."""
        saved = self.store.whole() if resume else []
        cut(log_path(self.folder, self.rank), after=saved[-1] if saved else -1)
        self.record = Record(log_path(self.folder, self.rank))
        self.tally = Tally(self.record, steps=self.setting.steps)
        try:
            if self.real:
                self.stop.clear()
                self._meet()
                self.stop.listen(saved[-1] if saved else 0)
            if saved:
                self._load(self.store.load(saved[-1]))
            else:
                self._evaluate()
            return self._train()
        except BaseException as error:
            self.trainer.leave(error)
            raise
        finally:
            self.trainer.close()
            self.record.close()

    def _train(self) -> bool:
        setting = self.setting
        while self.step < setting.steps:
            self._one_step()
            if setting.evaluates(self.step):
                self._evaluate()
            stopped = self.real and self.stop.after(self.step)
            due = bool(setting.checkpoint_every) and self.step % (setting.checkpoint_every or 1) == 0
            if self.step < setting.steps and (due or stopped) and self._save() and stopped:
                self._meet()
                self.stop.forget()
                return False
        self.trainer.finish()
        self._rounds(self.clock.read())
        self._evaluate(last=True)
        if self.real:
            self.stop.forget()
        return True

    def _meet(self) -> None:
        """Wait until all ranks are here, off the clock."""
        self.clock.stop()
        self.comm.tell([self.step]).wait()
        self.clock.go_on()

    def _one_step(self) -> None:
        start, waited = self.clock.read(), self.comm.waited
        if self.real and (late := self.setting.late(self.rank, self.step)):
            time.sleep(late)
        batch = next(self.batches)
        loss = self.trainer.step(batch).item()
        self.schedule.step()
        self.step += 1
        end, waited = self.clock.read(), self.comm.waited - waited
        self.tally.add(self.step, start=start, end=end, waited=waited, loss=loss, units=batch[1].numel())
        self._rounds(end - waited)

    def _rounds(self, ended: float) -> None:
        for told in self.trainer.rounds(ended):
            self.record.write("round", step=self.step, t=self.clock.read(), **told)

    def _evaluate(self, *, last: bool = False) -> None:
        """The loss of the consensus, on rank 0, while the others and the clock wait."""
        self.clock.stop()
        before, found = self.trainer.costs(), {}
        with self.trainer.averaged():
            if self.rank == 0:
                found["loss"] = self.task.evaluate(self.model)
                if self.task.accuracy is not None:
                    found["accuracy"] = self.task.accuracy(self.model)
        # They go on together, at the time of the last to come: waiting here stands for waiting in a round.
        heard = self.comm.tell([round(self.clock.read() * 1e9)]).wait()
        self.clock.put(max(word[0] for word in heard) / 1e9)
        self._rounds(self.clock.read())
        self.uncounted += self.trainer.costs() - before
        values = {
            "step": self.step,
            "t": self.clock.read(),
            "units": self.tally.units,
            **asdict(self._costs()),
        }
        if self.rank == 0:
            self.record.write("eval", **values, **found)
        if last:
            self.record.write("end", **values, weights=self._checksum(), **self._on_the_wire())
        self.clock.go_on()

    def _costs(self) -> Costs:
        """Of training, without evaluations and the start."""
        now: Costs = self.trainer.costs()
        return self.earlier + now - self.uncounted

    def _on_the_wire(self) -> dict[str, int]:
        """All that this process reported as sent, and what the kernel counted, in a network of its own."""
        now = wire() if self.wire is not None else None
        if self.wire is None or now is None:
            return {}
        return {"sent_in_all": self.trainer.costs().sent, "kernel_sent": now - self.wire}

    def _checksum(self) -> str:
        """Of the weights: equal runs end with equal ones."""
        digest = hashlib.blake2b(digest_size=8)
        for tensor in self.model.state_dict().values():
            digest.update(tensor.detach().cpu().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()

    def _save(self) -> bool:
        """Whether a checkpoint could be taken here; a method that cannot says so, alike on all ranks."""
        self.clock.stop()
        try:
            sync = self.trainer.state_dict()
        except RuntimeError as error:
            logging.getLogger("offbeat").info("no checkpoint after step %d: %s", self.step, error)
            return False
        finally:
            self.clock.go_on()
        self.clock.stop()
        self.tally.write(self.step, self.clock.read())
        state = {
            "step": self.step,
            "elapsed": self.clock.read(),
            "units": self.tally.units,
            "costs": asdict(self._costs()),
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
            "batches": self.batches.state_dict(),
            "rng": torch.get_rng_state(),
            "sync": sync,
        }
        self.store.save(self.step, state)
        self.clock.go_on()
        return True

    def _load(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.schedule.load_state_dict(state["schedule"])
        self.batches.load_state_dict(state["batches"])
        self.trainer.load_state_dict(state["sync"])
        torch.set_rng_state(state["rng"])
        self.step, self.earlier = state["step"], Costs(**state["costs"])
        self.uncounted = self.trainer.costs()  # the words with which ranks agree on what they have loaded
        self.tally.units = state["units"]
        self.clock = Stopwatch(self.comm.now, state["elapsed"])

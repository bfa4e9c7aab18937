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
from offbeat.app.runs.folder import Record, cut, log_path
from offbeat.app.runs.setting import TORCH_DDP, Setting
from offbeat.app.runs.stop import Stop
from offbeat.app.runs.trainer import Costs, TorchDDP, Trainer
from offbeat.app.runs.watch import Stopwatch, Watched
from offbeat.base.errors import OffbeatError
from offbeat.comm.communicator import Communicator
from offbeat.lab.network import INTERFACE
from offbeat.tasks import Task


class Loop:
    """Trains with a setting and logs what happens.

    Evaluations stop the clock, and their messages are not counted, since they are not part of the method.
    Neither is the start, which sends rank 0's weights to all.
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
        self.kernel_sent = read_kernel_sent() if setting.where == "netns" else None
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
        self.earlier = Costs()  # in earlier processes of this run
        self.uncounted = Costs()  # of evaluations and the start, in this process

    def run(self, *, resume: bool = False) -> bool:
        """Train to the end; False after Ctrl-C."""
        saved = (self.store.steps() if resume else [])[-1:]
        first = saved[0] if saved else -1
        self.store.delete_after(first)
        log = log_path(self.folder, self.rank)
        cut(log, after=first)
        self.record = Record(log, steps=self.setting.steps)
        try:
            if self.real:
                self.stop.clear()
                self._meet()
                self.stop.listen(max(0, first))
            if saved:
                self._load(self.store.load(first))
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
            due = setting.checkpoint_every is not None and self.step % setting.checkpoint_every == 0
            if self.step < setting.steps and (due or stopped) and self._save() and stopped:
                self._meet()
                self.stop.forget()
                return False
        self.trainer.finish()
        self._log_rounds(self.clock.read())
        self._evaluate(last=True)
        if self.real:
            self.stop.forget()
        return True

    def _meet(self) -> None:
        """Wait for all ranks, with the clock stopped."""
        with self.clock.stopped():
            self.comm.tell([self.step]).wait()

    def _one_step(self) -> None:
        start, waited_before = self.clock.read(), self.comm.waited
        if self.real and (late := self.setting.late(self.rank, self.step)):
            time.sleep(late)
        batch = next(self.batches)
        loss = self.trainer.step(batch).item()
        self.schedule.step()
        self.step += 1
        end, exposed = self.clock.read(), self.comm.waited - waited_before
        units = batch[1].numel()
        self.record.add_step(self.step, start=start, end=end, exposed=exposed, loss=loss, units=units)
        self._log_rounds(end - exposed)

    def _log_rounds(self, ended: float) -> None:
        for values in self.trainer.take_rounds(ended):
            self.record.write("round", step=self.step, t=self.clock.read(), **values)

    def _evaluate(self, *, last: bool = False) -> None:
        """Log the loss of the consensus. Rank 0 evaluates; the others wait, and the clock is stopped."""
        with self.clock.stopped():
            before, scores = self.trainer.costs(), {}
            with self.trainer.averaged():
                if self.rank == 0:
                    scores["loss"] = self.task.evaluate(self.model)
                    if self.task.accuracy is not None:
                        scores["accuracy"] = self.task.accuracy(self.model)
            # All continue at the time of the last to arrive: waiting here replaces waiting in a round.
            clocks = self.comm.tell([round(self.clock.read() * 1e9)]).wait()
            self.clock.put(max(clock[0] for clock in clocks) / 1e9)
            self._log_rounds(self.clock.read())
            self.uncounted += self.trainer.costs() - before
            values = {"step": self.step, "t": self.clock.read(), "units": self.record.units}
            values |= asdict(self._costs())
            if self.rank == 0:
                self.record.write("eval", **values, **scores)
            if last:
                self.record.write("end", **values, weights=self._checksum(), **self._kernel_bytes())

    def _costs(self) -> Costs:
        """The costs of training, without evaluations and the start."""
        now: Costs = self.trainer.costs()
        return self.earlier + now - self.uncounted

    def _kernel_bytes(self) -> dict[str, int]:
        """In a lab: all bytes this process reported as sent, and those that the kernel counted."""
        if self.kernel_sent is None:
            return {}
        sent = (read_kernel_sent() or 0) - self.kernel_sent
        return {"sent_in_all": self.trainer.costs().sent, "kernel_sent": sent}

    def _checksum(self) -> str:
        """A checksum of the weights. Equal runs end with equal weights."""
        digest = hashlib.blake2b(digest_size=8)
        for tensor in self.model.state_dict().values():
            digest.update(tensor.detach().cpu().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()

    def _save(self) -> bool:
        """Save a checkpoint; False if the method cannot be saved at this step, which all ranks agree on."""
        with self.clock.stopped():
            try:
                sync = self.trainer.state_dict()
            except OffbeatError:
                raise
            except RuntimeError as error:
                logging.getLogger("offbeat").info("no checkpoint after step %d: %s", self.step, error)
                return False
            self.record.write_steps(self.step, self.clock.read())
            state = {
                "step": self.step,
                "elapsed": self.clock.read(),
                "units": self.record.units,
                "costs": asdict(self._costs()),
                "model": self.model.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "schedule": self.schedule.state_dict(),
                "batches": self.batches.state_dict(),
                "rng": torch.get_rng_state(),
                "sync": sync,
            }
            self.store.save(self.step, state)
            return True

    def _load(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.schedule.load_state_dict(state["schedule"])
        self.batches.load_state_dict(state["batches"])
        self.trainer.load_state_dict(state["sync"])
        torch.set_rng_state(state["rng"])
        self.step, self.earlier = state["step"], Costs(*state["costs"].values())
        self.uncounted = self.trainer.costs()  # messages that compare what the ranks have loaded
        self.record.units = state["units"]
        self.clock = Stopwatch(self.comm.now, state["elapsed"])


def read_kernel_sent() -> int | None:
    """The bytes that the kernel has sent on a lab's interface; None outside a lab."""
    table = Path("/proc/net/dev")
    for line in table.read_text().splitlines() if table.exists() else []:
        name, _, counters = line.partition(":")
        if name.strip() == INTERFACE:
            return int(counters.split()[8])
    return None

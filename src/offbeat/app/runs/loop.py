"""The loop of one run on one rank, and Ctrl-C, after which all ranks stop at the same step."""

import hashlib
import logging
import math
import signal
import time
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from threading import Event, Lock, Thread, current_thread, main_thread
from typing import Any

import torch

from offbeat.app.runs.coded import CodedTrainer, PartBatches
from offbeat.app.runs.folder import CheckpointStore, Record, cut, log_path, write_model, write_whole
from offbeat.app.runs.setting import TORCH_DDP, Setting
from offbeat.app.runs.trainer import Costs, Stopwatch, TorchDDP, Trainer, Watched
from offbeat.base.errors import CheckpointMismatch, NotFinite, OffbeatError, PeerLost
from offbeat.comm.communicator import Communicator
from offbeat.engine.saving import random_states, set_random_states
from offbeat.lab.network import INTERFACE
from offbeat.tasks import Task

LOOK = 0.05  # seconds between looks for the files of the others
PATIENCE = 120.0  # seconds to wait for a file; a live rank needs about 0.1, even during a long step
STATES = ("model", "optimizer", "schedule", "batches")  # attributes of a loop that a checkpoint holds


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
        called: Event | None = None,
        single: bool = False,
    ) -> None:
        assert setting.batch is not None
        self.comm, self.setting, self.task, self.folder = Watched(comm), setting, task, folder
        self.rank, self.real, self.single = comm.rank, setting.where != "simulation", single
        self.kernel_sent = read_kernel_sent() if setting.where == "netns" else None
        self.model = task.model()
        self.optimizer = setting.optimizer_of(task, self.model)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, setting.rate)
        self.batches: Any = task.batches(comm.rank, comm.size, setting.batch, setting.seed)
        kind: Any = TorchDDP if setting.method == TORCH_DDP else CodedTrainer if setting.load > 1 else Trainer
        self.trainer: Trainer | TorchDDP = kind(setting, task, self.model, self.optimizer, self.comm)
        if isinstance(self.trainer, CodedTrainer):
            self.batches = PartBatches(task, self.trainer.coded, setting.batch, setting.seed)
        self.store = CheckpointStore(folder / "checkpoints", rank=self.rank, workers=comm.size)
        self.stop = Stop(folder, rank=self.rank, workers=comm.size, called=called)
        self.step, self.clock = 0, Stopwatch(comm.now)
        self.earlier = Costs()  # in earlier processes of this run
        self.uncounted = Costs()  # of evaluations and the start, in this process

    def run(self, *, resume: bool = False) -> bool:
        """Train to the end; False after Ctrl-C."""
        saved = (self.store.steps() if resume else [])[-1:]
        first = saved[0] if saved else -1
        self.store.delete_after(first)
        cut(log := log_path(self.folder, self.rank), after=first)
        self.record = Record(log, steps=self.setting.steps)
        with ExitStack() as stack:
            stack.callback(self.record.close)
            stack.push(self.trainer.leave)
            if self.real:
                self.stop.clear()
                self._meet()
                self.stop.listen(max(0, first))
            if saved:
                self._load(first)
            else:
                self.clock = Stopwatch(self.comm.now)  # not from the files and the meeting on
                self._evaluate()
            finished = self._train()
        return finished

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
        if setting.checkpoint_every is not None:
            self._save()  # before the workers become one, so that the run can be extended
        self.trainer.finish()
        self._log_rounds(self.clock.read())
        if self.single and self.rank == 0:
            write_model(self.folder, self.model)
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
        if self.trainer.begin() and self.real and (late := self.setting.late(self.rank, self.step)):
            time.sleep(late)
        batch = next(self.batches)
        loss = self.trainer.step(batch).item()
        if self.single and not math.isfinite(loss):
            advice = "lower the learning rate (--lr), or look for the bad batch or parameter."
            raise NotFinite(f"The training loss of step {self.step + 1} is {loss}: {advice}")
        self.schedule.step()
        self.step += 1
        end, exposed = self.clock.read(), self.comm.waited - waited_before
        units = (next(iter(batch.values())) if isinstance(batch, dict) else batch)[1].numel()
        self.record.add_step(self.step, start=start, end=end, exposed=exposed, loss=loss, units=units)
        self._log_rounds(end - exposed)

    def _log_rounds(self, ended: float) -> None:
        for values in self.trainer.take_rounds(ended):
            self.record.write("round", step=self.step, t=self.clock.read(), **values)

    def _evaluate(self, *, last: bool = False) -> None:
        """Log the loss of the consensus. Rank 0 evaluates; the others wait, and the clock is stopped."""
        with self.clock.stopped():
            before, scores, kernel = self.trainer.costs(), {}, {}
            with self.trainer.averaged():
                if self.rank == 0:
                    scores["loss"] = self.task.evaluate(self.model)
                    if self.task.accuracy is not None:
                        scores["accuracy"] = self.task.accuracy(self.model)
            # All continue at the time of the last to arrive: waiting here replaces waiting in a round.
            clocks = self.comm.tell([round(self.clock.read() * 1e9)]).wait()
            self.clock.elapsed = max(clock[0] for clock in clocks) / 1e9
            self._log_rounds(self.clock.read())
            self.uncounted += self.trainer.costs() - before
            values = {"step": self.step, "t": self.clock.read(), "units": self.record.units}
            values |= asdict(self._costs())
            if self.rank == 0:
                self.record.write("eval", **values, **scores)
            if last and self.kernel_sent is not None:  # all bytes sent by this process, as both counted
                sent = (read_kernel_sent() or 0) - self.kernel_sent
                kernel = {"sent_in_all": self.trainer.costs().sent, "kernel_sent": sent}
            if last:
                self.record.write("end", **values, weights=self._checksum(), **kernel)

    def _costs(self) -> Costs:
        """The costs of training, without evaluations and the start."""
        return self.earlier + self.trainer.costs() - self.uncounted

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
            state: dict[str, Any] = {
                "step": self.step,
                "elapsed": self.clock.read(),
                "units": self.record.units,
            }
            state |= {"costs": asdict(self._costs()), "rng": random_states(self.model), "sync": sync}
            self.store.save(self.step, state | {name: getattr(self, name).state_dict() for name in STATES})
            return True

    def _load(self, step: int) -> None:
        """Continue from a checkpoint. If it has another number of ranks, from that of rank modulo number."""
        number = self.store.workers_of(step)
        state = self.store.load(step, self.rank % number)
        try:
            for name in STATES:
                getattr(self, name).load_state_dict(state[name])
            if number == self.comm.size:
                self.trainer.load_state_dict(state["sync"])
            else:
                counted = range(self.rank, number, self.comm.size)
                models = [self.store.load(step, rank)["model"] for rank in counted]
                self.trainer.resize(state["sync"], models)
            if self.rank < number:  # two ranks must not draw the same numbers
                set_random_states(state["rng"], self.model)
            self.step, self.earlier = int(state["step"]), Costs(**state["costs"])
            self.record.units, elapsed = int(state["units"]), float(state["elapsed"])
        except OffbeatError:
            raise
        except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
            lacks = f"it has no {error}" if isinstance(error, KeyError) else str(error).partition("\n")[0]
            raise CheckpointMismatch(
                f"Rank {self.rank}'s checkpoint does not fit this run: {lacks}."
            ) from error
        self.uncounted = self.trainer.costs()  # messages that compare what the ranks have loaded
        self.clock = Stopwatch(self.comm.now, elapsed)


def read_kernel_sent() -> int | None:
    """The bytes that the kernel has sent on a lab's interface; None outside a lab."""
    table = Path("/proc/net/dev")
    for line in table.read_text().splitlines() if table.exists() else []:
        name, _, counters = line.partition(":")
        if name.strip() == INTERFACE:
            return int(counters.split()[8])
    return None


class Stop:
    """Agrees on the last step. Each rank writes the number of steps it has begun; the largest is the last.

    A thread writes the file once the signal comes or another rank has written its own, so a rank in the
    middle of a step or a round answers at once. The number is never changed, and no step begins while the
    thread writes it: `after` begins the next step under the same lock.
    """

    def __init__(self, folder: Path, *, rank: int, workers: int, called: Event | None = None) -> None:
        self._files = [folder / f".stop-{other}" for other in range(workers)]
        self._mine = self._files[rank]
        self._begun, self._written = 0, False
        self._called = called or Event()  # shared by all runs of a process
        self._lock, self._over = Lock(), Event()
        self._thread = Thread(target=self._watch, daemon=True)

    def clear(self) -> None:
        """Delete the file of an earlier process. All ranks do so before any of them listens."""
        self._mine.unlink(missing_ok=True)

    def listen(self, step: int) -> None:
        """Listen for Ctrl-C and SIGTERM; `step` steps are done, and the next one has begun."""
        self._begun = step + 1
        if current_thread() is main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, self.call)
        self._thread.start()

    def call(self, *signal: object) -> None:
        """Ask all ranks to stop."""
        self._called.set()

    def _watch(self) -> None:
        while not self._over.wait(LOOK):
            if self._called.is_set() or any(file.exists() for file in self._files):
                with self._lock:
                    self._write()
                return

    def _write(self) -> None:
        if not self._written:
            write_whole(self._mine, str(self._begun))
            self._written = True

    def after(self, step: int) -> bool:
        """Whether the step just completed is the last one. If not, the next one begins."""
        with self._lock:
            if not (self._called.is_set() or self._written):
                self._begun = step + 1
                return False
            self._write()
        deadline = time.monotonic() + PATIENCE
        while silent := [rank for rank, file in enumerate(self._files) if not file.exists()]:
            if time.monotonic() > deadline:
                raise PeerLost(f"Ctrl-C: ranks {silent} have not answered within {PATIENCE:g} s.")
            time.sleep(0.01)
        return step >= max(int(file.read_text()) for file in self._files)

    def forget(self) -> None:
        """Stop listening and delete the file, which everybody has read."""
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()
        self.clear()

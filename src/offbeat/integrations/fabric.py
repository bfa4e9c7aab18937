"""A strategy for Lightning Fabric with any method in place of DDP, and code shared with the Trainer's."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from importlib.util import find_spec
from inspect import Parameter
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from offbeat import methods
from offbeat.base.errors import how_to_install
from offbeat.engine.synchronizer import Synchronizer
from offbeat.integrations.optimizers import check_steps
from offbeat.methods.expression import Call
from offbeat.methods.expression import method as read_method


def _find() -> tuple[str, str]:
    """Return the names of the packages of Trainer and Fabric: those imported, or else those installed."""
    names = [("lightning.pytorch", "lightning.fabric"), ("pytorch_lightning", "lightning_fabric")]
    if "lightning_fabric" in sys.modules and "lightning.fabric" not in sys.modules:
        names.reverse()
    for trainer, fabric in names:
        if find_spec(fabric.split(".")[0]) is not None:
            return trainer, fabric
    raise ImportError(f"offbeat.integrations.lightning needs Lightning: {how_to_install('lightning')}")


TRAINER, FABRIC = _find()
strategies: Any = import_module(f"{FABRIC}.strategies")
OPTIONS = ["accelerator", "parallel_devices", "cluster_environment", "checkpoint_io", "precision_plugin"]
OPTIONS += ["precision", "process_group_backend", "timeout", "start_method"]


class OffbeatFabricStrategy(strategies.DDPStrategy):  # type: ignore[misc]
    """A strategy of Fabric: `optimizer.step()` is a step of a method of Offbeat.

        fabric = Fabric(strategy=OffbeatFabricStrategy("diloco(every=64)"), devices=2)

    `sync` is the synchronizer: call `fabric.strategy.sync.finish()` after the last step, and evaluate and
    save inside `fabric.strategy.sync.averaged()`.
    """

    def __init__(self, method: str = "diloco", **options: Any) -> None:
        self.method = read_call(type(self), method, options)
        super().__init__(**options)
        self._backward_sync_control = self
        self._modules: list[nn.Module] = []
        self._sync: Synchronizer | None = None
        self._still: AbstractContextManager[None] | None = None  # set while a step is under way

    @property
    def sync(self) -> Synchronizer:
        """The synchronizer, once a model and its optimizer are set up."""
        if self._sync is None:
            raise RuntimeError(f"{self.method}: call fabric.setup(model, optimizer) first.")
        return self._sync

    def setup_module(self, module: nn.Module) -> nn.Module:
        self._modules.append(module)
        return module

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Build the synchronizer, and give rank 0's weights to all workers, as DDP would."""
        check_optimizers([*([] if self._sync is None else self._sync.optimizers), optimizer])
        trained = optimizer.param_groups[0]["params"][0]
        models = [m for m in self._modules if any(p is trained for p in m.parameters())]
        if not models:
            raise RuntimeError(f"{self.method}: set up the model before its optimizer, or both together.")
        self._sync = self.method(models[0], optimizer)
        self._sync.start()
        return optimizer

    def no_backward_sync(self, module: nn.Module, enabled: bool = True) -> AbstractContextManager[None]:
        return self.sync.accumulate() if enabled else nullcontext()

    def backward(self, tensor: Tensor, *args: Any, **kwargs: Any) -> None:
        self.sync.observe(tensor)
        super().backward(tensor, *args, **kwargs)

    def clip_gradients_norm(self, *args: Any, **kwargs: Any) -> Any:
        self._begin()
        return super().clip_gradients_norm(*args, **kwargs)

    def clip_gradients_value(self, *args: Any, **kwargs: Any) -> Any:
        self._begin()
        return super().clip_gradients_value(*args, **kwargs)

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        loss = None if closure is None else closure()
        with self._begin():
            output = super().optimizer_step(optimizer, **kwargs)
        self._still = None
        self.sync.after_step()
        return output if closure is None else loss

    def _begin(self) -> AbstractContextManager[None]:
        """Gradients are ready and not clipped yet. Return the context for the optimizer's step."""
        if self._still is None:
            self._still = nullcontext() if self.sync.before_step() else self.sync.still()
        return self._still


def read_call(strategy: type, method: str, options: dict[str, Any]) -> Call:
    """Return the method of an expression. Refuse options of DDP."""
    for option in options:
        if option not in OPTIONS:
            raise TypeError(
                f"{strategy.__name__}({option}=...): the model is not wrapped in DDP, so it has no such "
                f"option; it takes {', '.join(OPTIONS)}."
            )
    return read_method(method)


def check_optimizers(optimizers: Sequence[Optimizer]) -> None:
    """Raise unless there is one optimizer that steps once per iteration."""
    if len(optimizers) != 1:
        raise ValueError(
            f"{len(optimizers)} optimizers: Offbeat cannot tell which of their steps ends an iteration: use "
            "one, with a group for each set of parameters."
        )
    check_steps(optimizers)


def register(registry: Any, strategy: type) -> None:
    """Register the strategy as "offbeat_diloco" and so on, for every method that needs no argument."""
    for name in methods.__all__:
        if Parameter.empty not in methods.arguments(getattr(methods, name)).values():
            text = f"{name}() of Offbeat"
            registry.register(f"offbeat_{name}", strategy, description=text, override=True, method=name)


register(strategies.STRATEGY_REGISTRY, OffbeatFabricStrategy)

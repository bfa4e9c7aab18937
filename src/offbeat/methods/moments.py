"""Methods that average the optimizer's moments in rounds of their own."""

from __future__ import annotations

from torch import nn
from typing_extensions import Unpack

from offbeat.among import Group
from offbeat.base.checks import is_whole
from offbeat.base.tensors import moments, params
from offbeat.engine.exchange import Exchange
from offbeat.engine.synchronizer import Synchronizer
from offbeat.methods.parts import Optimizers, Options, average, record_call
from offbeat.when import Every, Schedule, schedule

__all__ = ["desloc"]

# The names of the moments in torch's optimizers.
_FIRST = ("exp_avg", "momentum_buffer")
_SECOND = ("exp_avg_sq", "square_avg", "exp_inf")


@record_call
def desloc(
    model: nn.Module,
    optimizer: Optimizers,
    *,
    every: int | Schedule = 64,
    first: int | Schedule | None = None,
    second: int | Schedule | None = None,
    group: Group = None,
    **options: Unpack[Options],
) -> Synchronizer:
    """Local SGD that also averages the optimizer's moments, each kind with a period of its own.

        x ← mean(x) every `every` steps        m ← mean(m) every `first`        v ← mean(v) every `second`

    m and v are the first and second moments of Adam; the buffer of SGD with momentum is m. They change more
    slowly than the weights, so their periods may be longer: by default 3 and 6 times `every`. Larger `first`
    and `second` communicate less.

        sync = offbeat.desloc(model, optimizer, every=64)
        sync = offbeat.desloc(model, optimizer, every=64, first=64, second=offbeat.Never())

    Iacob et al., "DES-LOC", 2025, arXiv 2505.22549.
    """
    return Synchronizer(
        optimizer,
        [
            Exchange(params(model), when=schedule(every), among=group, update=average(options), **options),
            Exchange(moments(model, *_FIRST), when=_stretch(every, first, 3), among=group, buffers="keep"),
            Exchange(moments(model, *_SECOND), when=_stretch(every, second, 6), among=group, buffers="keep"),
        ],
    )


def _stretch(every: int | Schedule, given: int | Schedule | None, times: int) -> Schedule:
    """Return the schedule given, or a multiple of the period."""
    if given is not None:
        return schedule(given)
    steps = every.steps if isinstance(every, Every) and every == Every(every.steps) else every
    if not is_whole(steps):
        raise ValueError(
            f"desloc(every={every!r}): 3 and 6 times this are not defined: give first= and second= too."
        )
    return Every(times * steps)

"""What a worker tells the others when a round or a common call begins: where it is, and its weight."""

from __future__ import annotations

import struct
from collections.abc import Sequence

from offbeat.base.errors import Disagreement, PeerLost
from offbeat.comm.presence import BATCHES
from offbeat.engine.weights import COUNTED, PLACE, RATES, ROUND, TIMED, Headers, read_words, unit

KINDS = ("round {round}", "averaged()", "finish()", "save()", "load()")
AVERAGED, FINISH, SAVE, LOAD = range(ROUND + 1, 5)

# One sentence for each word of a header in which all ranks must agree.
_SENTENCES = (
    "Workers disagree: rank {rank} is in {kind} at step {step}, rank {o_rank} in {o_kind} at step {o_step}. "
    f"{BATCHES}",
    "Workers disagree: rank {rank} is at exchange {part} of the method, rank {o_rank} at {o_part}.",
    "Workers disagree: rank {rank} is at round {round} (step {step}), rank {o_rank} at round {o_round} "
    "(step {o_step}).",
    "Workers disagree at round {round}: rank {rank} is at step {step}, rank {o_rank} at step {o_step}. "
    "Does every worker use the same schedule?",
    "Workers disagree in {kind} at step {step}: rank {rank} has learning rate {lr}, rank {o_rank} {o_lr}. "
    "Step the learning-rate scheduler on every worker.",
    "Workers disagree in {kind} at step {step}: the learning rates of rank {rank} and rank {o_rank} differ "
    "in a parameter group. Step the learning-rate scheduler on every worker.",
    "Workers disagree in {kind} at step {step}: rank {rank} steps with samples={weight}, rank {o_rank} with "
    "samples={o_weight}. Pass samples on every worker or on none.",
)


def compare_headers(headers: Headers) -> None:
    """Raise unless all ranks are at the same point."""
    units = [unit(head, weight) for head, weight in zip(headers, read_words(headers), strict=True)]
    known = next((i for i, found in enumerate(units) if found is not None), 0)
    for other, own in zip(headers, units, strict=True):
        odd = own is not None and own != units[known]  # a worker of weight zero fits any unit
        first = headers[known] if odd else headers[0]
        different = [other[i] != first[i] for i in range(6)] + [odd]
        different[0], different[1] = (other[0] - first[0]) % 8 != 0, (other[1] - first[1]) % 2**PLACE != 0
        if first[0] & TIMED:  # workers may make different numbers of steps
            different[3:6] = [False, *[rate and bool(first[0] & RATES) for rate in different[4:6]]]
        if True in different:
            field = different.index(True)
            if first[0] % 8 != ROUND and field == 3:
                field = 0  # both in finish(), but not after the same step
            words = _name_words(first) | {f"o_{name}": word for name, word in _name_words(other).items()}
            raise Disagreement(_SENTENCES[field].format(**words))


def compare_members(rows: Headers, own: int, entered: Sequence[int]) -> None:
    """The same in an elastic run: a worker that differs raises, and the others continue without it.

    The members of longest standing are right, or most of them if they differ. One whose weight is zero fits
    any unit, so it decides only if all have weight zero. `own` is the rank of this worker. `entered` says
    when each entered.
    """
    try:
        compare_headers(rows)
    except Disagreement:
        oldest = [rank for rank, since in enumerate(entered) if since == min(entered)]
        words = read_words(rows)
        oldest = [rank for rank in oldest if unit(rows[rank], words[rank]) is not None] or oldest
        votes = [sum(_find_difference(rows[one], rows[other]) is None for other in oldest) for one in oldest]
        first = oldest[votes.index(max(votes))]
        if error := _find_difference(rows[first], rows[own]):
            raise Disagreement(
                f"{error} This worker leaves, because it came later or differs from most; the others go on. "
                "Start it again once it does as they do; sync.on_join is called when it joins."
            ) from None
        odd = [rank for rank, row in enumerate(rows) if _find_difference(rows[first], row)]
        if not odd:  # only later members differ, in their units, and none of them is known to be right
            raise
        raise PeerLost(
            f"The others go on without rank {', '.join(map(str, odd))}, which disagrees."
        ) from None


def _find_difference(one: Sequence[int], other: Sequence[int]) -> Disagreement | None:
    try:
        compare_headers([one, other])
    except Disagreement as error:
        return error
    return None


def _name_words(header: Sequence[int]) -> dict[str, object]:
    kind, part, round, step, lr, _, rank, weight = header
    rate, samples = struct.unpack("<2d", struct.pack("<2q", lr, weight))
    given = None if samples < 0 or kind & COUNTED else samples
    words = (KINDS[kind % 8].format(round=round), part % 2**PLACE, round, step, rate, rank % 2**31, given)
    return dict(zip(("kind", "part", "round", "step", "lr", "rank", "weight"), words, strict=True))

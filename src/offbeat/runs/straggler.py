"""Workers that are late now and then, always the same one or drawn at random."""

from dataclasses import dataclass

from offbeat.draws import uniform
from offbeat.runs.link import parse_seconds

FORM = "--straggler {!r}: write rank=1,delay=0.3,every=4, or share=0.1,delay=0.3 for random ones"


@dataclass(frozen=True)
class Straggler:
    """`delay` seconds more for a step: `rank`'s every `every`-th, or anyone's with chance `share`."""

    delay: float
    rank: int | None = None
    every: int = 1
    share: float | None = None
    seed: int = 0

    def seconds(self, rank: int, step: int) -> float:
        """How late a rank is in the step after `step` others."""
        if self.share is not None:
            return self.delay if uniform(self.seed, step, f"straggler/{rank}") < self.share else 0.0
        return self.delay if rank == self.rank and (step + 1) % self.every == 0 else 0.0


def parse_straggler(text: str, *, workers: int) -> Straggler:
    """The straggler that text such as `rank=1,delay=0.3,every=4` describes."""
    given = dict(item.partition("=")[::2] for item in text.replace(" ", "").split(","))
    form = FORM.format(text)
    if not given.keys() <= {"rank", "delay", "every", "share", "seed"} or "delay" not in given:
        raise ValueError(f"{form}.")
    if ("rank" in given) == ("share" in given):
        raise ValueError(f"{form}; one of rank and share is needed.")
    try:
        numbers = {name: int(given[name]) for name in ("rank", "every", "seed") if name in given}
        share = float(given["share"]) if "share" in given else None
    except ValueError:
        raise ValueError(f"{form}.") from None
    if not 0 <= numbers.get("rank", 0) < workers:
        raise ValueError(f"--straggler {text!r}: the ranks are 0 to {workers - 1}.")
    if numbers.get("every", 1) < 1 or (share is not None and not 0 <= share <= 1):
        raise ValueError(f"--straggler {text!r}: every must be at least 1, and share between 0 and 1.")
    delay = parse_seconds(f"--straggler {text!r}", given["delay"])
    return Straggler(delay, numbers.get("rank"), numbers.get("every", 1), share, numbers.get("seed", 0))

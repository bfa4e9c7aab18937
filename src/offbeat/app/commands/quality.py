"""What the table of losses knows about a method that was not measured exactly as it is called."""

from typing import Any

from offbeat.app.commands.catalogue import read_catalogue
from offbeat.methods.expression import Call, method

SETTING = (
    "on a GPT of 0.25 M parameters with four workers and 400 steps (docs/benchmarks.md); "
    "a longer period or more workers cost more"
)


def nearest_loss(expression: str) -> dict[str, Any] | None:
    """The measured call that shares most arguments with this one, and how far its loss was above ddp's."""
    rows = [(method(row[0]), row) for row in read_catalogue()["losses"]]
    wanted = method(expression)
    own = [(call, row) for call, row in rows if call.name == wanted.name]
    if not own:
        return None
    base = next(float(row[1]) for call, row in rows if str(call) == "ddp()")
    call, row = min(own, key=lambda pair: _distance(pair[0], wanted))
    return {"call": str(call), "above_ddp": float(row[1]) / base - 1, "seeds": int(row[3])}


def _distance(call: Call, other: Call) -> tuple[int, int]:
    """How many arguments only one of the calls has, and how many have another value."""
    ours, theirs = call.arguments, other.arguments
    return len(ours.keys() ^ theirs.keys()), sum(
        repr(ours[name]) != repr(theirs[name]) for name in ours.keys() & theirs.keys()
    )


def tell_losses(methods: list[str]) -> list[str]:
    """A line for each method."""
    width, lines = max(map(len, methods)), []
    for expression in methods:
        found = nearest_loss(expression)
        if found is None:
            text = "not measured"
        elif found["call"] == "ddp()":
            text = "the reference" if str(method(expression)) == "ddp()" else "not measured like this"
        else:
            same = str(method(expression)) == found["call"]
            seeds = f"{found['seeds']} seed{'' if found['seeds'] == 1 else 's'}"
            text = f"{found['above_ddp']:+.1%} ({'' if same else found['call'] + ', '}{seeds})"
        lines.append(f"  {expression:{width}}  {text}")
    return lines

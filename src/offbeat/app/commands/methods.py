"""`offbeat methods`"""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from rich.console import Console

from offbeat.app.cli.options import TORCH_DDP_ONLY, Refused, name_of
from offbeat.app.cli.waiting import waiting
from offbeat.app.commands import show
from offbeat.app.commands.catalogue import read_catalogue
from offbeat.base.errors import suggest

HEADINGS = {"use": "Use it", "costs": "Costs", "limits": "Limits:"}
OPTIONS = "options that most methods share, such as `buffers=` and `moments=` (docs/methods.md)"
FOOT = """`offbeat methods NAME` shows one of them: rule, arguments, costs, and measured losses.
`offbeat methods --verbose` shows the parts of each method, with its bytes and memory."""
SETTING = (
    "Validation losses of a GPT of 0.25 M parameters, four workers, 400 steps of AdamW (docs/benchmarks.md):"
)


def run(given: SimpleNamespace) -> int:
    """Print the families, one method, or the table of what every method consists of."""
    catalogue = read_catalogue()
    sections = {name: about for family in catalogue["families"].values() for name, about in family.items()}
    if given.name is not None:
        given.name = name_of(given.name)  # also of a call, such as 'diloco(every=3)'
    if given.name == "torch_ddp":
        raise Refused(TORCH_DDP_ONLY)
    if given.name is not None and given.name not in sections:
        names = ", ".join(sorted(sections))
        raise Refused(
            f"There is no method {given.name!r}{suggest(given.name, sections)}: name one of {names}."
        )
    console = show.console()
    if given.json or given.verbose:
        with waiting("loading torch"):
            from offbeat.app.commands.parts import show_parts

        show_parts(console, given.name, as_json=given.json)
    elif given.name is None:
        for line in _list(catalogue["families"], console.width):
            show.say(console, line)
    if given.name is not None and not given.json:
        _describe(console, given.name, sections[given.name], catalogue["losses"])
    return 0


def _list(families: dict[str, dict[str, Any]], width: int) -> Iterator[str]:
    names = max(len(name) for family in families.values() for name in family)
    for title, family in families.items():
        yield title
        for name, about in family.items():
            yield from show.wrap(f"  {name:{names}}  {about['summary']}", width, indent=names + 4)
        yield ""
    yield from show.wrap(" ".join(FOOT.split()), width)


def _describe(console: Console, name: str, about: dict[str, Any], losses: list[list[str]]) -> None:
    """Print the section of a method: rule, arguments, when to use it, costs, limits, losses, reference."""

    def paragraph(text: str, indent: int = 0) -> None:
        for line in show.wrap(text, console.width, indent=indent):
            show.say(console, line)

    paragraph(about["summary"])
    show.say(console, f"\n{about['rule']}\n")
    show.say(console, "Arguments")
    for argument in about["arguments"]:
        own = f"{OPTIONS}{argument.removeprefix('options')}" if argument.startswith("options") else argument
        paragraph(f"  {own}", indent=4)
    for kind, heading in HEADINGS.items():
        if kind in about:
            paragraph(f"\n{heading} {about[kind]}")
    paragraph("\nMeasured")
    if rows := _measured(name, losses):
        paragraph(SETTING)
        columns = {"method": "fold", "loss": "right", "above ddp": "right", "seeds": "right", "MB": "right"}
        show.print_table(console, "", columns, rows)
    else:
        paragraph(f"  {about['measured']}", indent=2)
    if about["reference"]:
        paragraph(f"\n{about['reference']}")


def _measured(name: str, losses: list[list[str]]) -> list[list[str]]:
    """The losses of this method, between those of ddp and local_sgd; nothing if it was not measured."""
    base = float(next(row[1] for row in losses if row[0] == "ddp()"))
    if not any(row[0].startswith(f"{name}(") for row in losses):
        return []
    kept = [
        row for row in losses if row[0].startswith(f"{name}(") or row[0] in ("ddp()", "local_sgd(every=16)")
    ]
    return [
        [call, f"{loss} ± {spread}" if spread else loss, f"{float(loss) / base - 1:.1%}", seeds, sent]
        for call, loss, spread, seeds, _, sent in kept
    ]

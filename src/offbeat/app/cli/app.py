"""The commands, and how their errors are reported."""

import os
import re
import sys
import time
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from offbeat.app.cli.compare import compare, study
from offbeat.app.cli.init import init
from offbeat.app.cli.join import join
from offbeat.app.cli.lab import lab
from offbeat.app.cli.methods import methods
from offbeat.app.cli.options import Refused, plain
from offbeat.app.cli.plan import plan
from offbeat.app.cli.report import report
from offbeat.app.cli.train import train
from offbeat.base.errors import OffbeatError

app = typer.Typer(
    name="offbeat",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

UsageError: Any = typer.BadParameter.__mro__[1]  # click's; typer may bundle its own click


def _print_version(wanted: bool) -> None:
    if wanted:
        import offbeat

        print(f"offbeat {offbeat.__version__}")
        raise typer.Exit


@app.callback()
def offbeat_command(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Train one PyTorch model on many workers that rarely communicate.

    Each command has examples in its --help.

    Examples:

        offbeat compare torch_ddp 'local_sgd(every=8)' 'diloco(every=32)' --link 100mbit

        offbeat train 'diloco(every=32)' --workers 4 --steps 500

        offbeat plan --workers 8 --step 250ms --parameters 124M --link 1gbit,5ms --steps 10000

        offbeat methods
    """


for command in (train, join, compare, study, report, plan, lab, methods, init):
    app.command()(command)


def run(arguments: Sequence[str]) -> int:
    """Run a command and return its exit code: 2 for bad input, 1 for a failed run, 130 for Ctrl-C."""
    try:
        code = app(args=list(arguments), prog_name="offbeat", standalone_mode=False)
        return code if isinstance(code, int) else 0
    except Refused as error:
        return _fail(str(error), 2, alone=error.alone)
    except OffbeatError as error:
        return _fail(str(error), 1, below=getattr(error, "below", ""))
    except (KeyboardInterrupt, typer.Abort):
        return _fail("stopped", 130)
    except UsageError as error:
        return _fail(error.format_message().replace("Value error, ", ""), 2)
    except Exception as error:
        from offbeat.app.runs.frames import describe, own_frames

        if frames := own_frames(error):  # in a file of the user, such as that of a task
            return _fail(describe(error), 1, below=frames)
        raise


def _fail(sentence: str, code: int, *, alone: bool = False, below: str = "") -> int:
    """Print the sentence, and lines below it. All ranks of torchrun fail alike, so only rank 0 prints."""
    if os.environ.get("RANK", "0") != "0" and not alone:
        time.sleep(2)  # torchrun ends all workers when the first exits; let rank 0 print first
    elif sentence:  # empty if the help has just been printed
        short = re.sub(r"(\S{100})\S{200,}(\S{50})", r"\1…\2", " ".join(sentence.split()))
        print(plain("\n".join(filter(None, [f"offbeat: {short}", below]))), file=sys.stderr)
    return code

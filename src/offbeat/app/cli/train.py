"""`offbeat train`"""

from pathlib import Path
from types import SimpleNamespace
from typing import Annotated

import typer

from offbeat.app.cli import options
from offbeat.app.cli.waiting import waiting


def train(
    context: typer.Context,
    method: Annotated[
        str | None,
        typer.Argument(help="The method, such as 'diloco(every=32)'.", autocompletion=options.complete_name),
    ] = None,
    task: options.Task = "digits",
    model: options.Model = None,
    data: options.Data = None,
    workers: Annotated[
        str | None, typer.Option(help="Number of workers, 4 by default; with --elastic such as 2:6.")
    ] = None,
    steps: options.Steps = 400,
    batch: options.Batch = None,
    lr: options.Rate = None,
    optimizer: options.Optimizer = None,
    seed: options.Seed = 0,
    evaluations: options.Evaluations = 10,
    link: options.Link = None,
    straggler: options.Straggler = None,
    checkpoint_dir: Annotated[
        Path | None,
        typer.Option(
            "--checkpoint-dir", "--out", help="Folder for logs and checkpoints; runs/... by default."
        ),
    ] = None,
    checkpoint_every: Annotated[int, typer.Option(help="Steps between checkpoints; 0 for none.")] = 100,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue the run in --checkpoint-dir, with its own settings.")
    ] = False,
    elastic: Annotated[
        bool, typer.Option("--elastic", help="Let workers come and go; start more with `offbeat join`.")
    ] = False,
    lighthouse: Annotated[
        str | None, typer.Option(help="With --elastic: the address of a running lighthouse.")
    ] = None,
    token: options.Token = None,
    tensorboard: Annotated[
        bool, typer.Option("--tensorboard", help="Also write TensorBoard files into the folder.")
    ] = False,
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
    json: options.Json = False,
) -> int:
    """Train with one method.

    Starts local workers, or joins the workers that torchrun started. Every rank writes a log of JSON lines.
    Ctrl-C saves a checkpoint and stops. A run continued with --resume equals an uninterrupted run bit for
    bit; with a larger --steps it goes on after its end, and --workers may change. The trained model is saved
    as model.pt.

    Examples:

        offbeat train 'diloco(every=32)' --workers 4 --steps 500

        offbeat train 'local_sgd(every=8, delay=4)' --task bytes --data poems.txt --link 100mbit,20ms

        offbeat train --resume --checkpoint-dir runs/mine

        offbeat train 'diloco(every=16)' --elastic --workers 2:6

        offbeat train --elastic --resume --checkpoint-dir runs/mine

        torchrun --nproc-per-node 4 -m offbeat train 'qsr(alpha=0.02)' --task images --data cifar10.zip
    """
    given = SimpleNamespace(**locals())
    if resume and method and checkpoint_dir is None and Path(method).is_dir():
        raise options.Refused(f"--resume takes no value: name the folder with --checkpoint-dir {method}.")
    options.check_names([method] if method else [], torch_ddp=True)
    with waiting("loading torch", quiet=quiet):
        from offbeat.app.commands.train import run

    return run(given)

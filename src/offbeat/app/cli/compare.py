"""`offbeat compare` and `offbeat study`"""

from types import SimpleNamespace
from typing import Annotated

import typer

from offbeat.app.cli import options
from offbeat.app.cli.waiting import waiting


def compare(
    methods: Annotated[
        list[str],
        typer.Argument(
            help="Methods, such as 'diloco(every=32)'; torch_ddp is torch's own DDP.",
            autocompletion=options.complete_name,
        ),
    ],
    task: options.Task = "digits",
    model: options.Model = None,
    data: options.Data = None,
    workers: options.Workers = 4,
    steps: options.Steps = 400,
    batch: options.Batch = None,
    lr: Annotated[
        str | None,
        typer.Option(help="Peak learning rate, or several: 0.1,0.3,1. Each method is shown at its best."),
    ] = None,
    optimizer: options.Optimizer = None,
    seeds: Annotated[int, typer.Option(help="Run each method with this many seeds: 0, 1, ...")] = 1,
    evaluations: options.Evaluations = 10,
    to_loss: options.ToLoss = None,
    link: options.Link = None,
    netns: options.Netns = False,
    simulate: options.Simulate = False,
    compute: options.Compute = None,
    straggler: options.Straggler = None,
    out: options.Out = None,
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
    json: options.Json = False,
) -> int:
    """Train with several methods on the same model, data, seeds and samples, and compare them.

    Prints a table and writes report.html. Loss and accuracy are measured on held-out data after the last
    step. Seconds, bytes and rounds count only training. `exposed` is the time a worker stood still for
    messages; `hidden` is the time that messages were in flight while it worked. `s to ref. loss` is the time
    until the loss is within 5 % of the reference's final loss with the same seed, or with --to-loss until it
    is at most the given one. The reference is torch_ddp if you name it, else ddp, else the first method. With
    several rates, every method runs at each of them, and the table shows the one with the lowest final loss.
    With an earlier --out, only the missing runs are made.

    Examples:

        offbeat compare torch_ddp 'local_sgd(every=8)' 'diloco(every=32)' --link 100mbit

        offbeat compare ddp 'local_sgd(every=8, delay=4)' --simulate --lr 0.05,0.1,0.2 --to-loss 0.2

        offbeat compare ddp 'cocod(every=8, delay=4)' --task bytes --seeds 3 --straggler share=0.1,delay=200ms

        sudo offbeat compare torch_ddp 'local_sgd(every=16)' --link 50mbit --netns

        offbeat compare ddp 'slowmo(every=12)' --workers 16 --simulate --compute 50ms --link 1gbit,5ms
    """
    given = SimpleNamespace(**locals())
    options.check_names(methods, torch_ddp=True)
    options.check_once(methods)
    with waiting("loading torch", quiet=quiet):
        from offbeat.app.commands.compare import run

    return run(given)


def study(
    methods: Annotated[
        list[str],
        typer.Argument(
            help="Methods; those that take every= get each period.", autocompletion=options.complete_name
        ),
    ],
    task: options.Task = "digits",
    model: options.Model = None,
    data: options.Data = None,
    workers: Annotated[str, typer.Option(help="Numbers of workers, separated by commas.")] = "2,4,8",
    every: Annotated[str, typer.Option(help="Periods, separated by commas.")] = "1,4,16,64",
    samples: Annotated[int, typer.Option(help="Samples of each run, over all of its workers.")] = 20_000,
    batch: options.Batch = None,
    lr: options.Rate = None,
    optimizer: options.Optimizer = None,
    seed: options.Seed = 0,
    out: options.Out = None,
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
    json: options.Json = False,
) -> int:
    """Simulate a grid of methods, workers and periods: what does less communication cost?

    All runs train on the same number of samples. Prints a table and writes report.html, which plots accuracy
    against communication. Repeat the command to continue after Ctrl-C.

    Examples:

        offbeat study local_sgd 'slowmo(momentum=0.5)' --workers 2,4,8 --every 1,4,16,64

        offbeat study ddp local_sgd diloco --task bytes --model tiny --samples 40000 --out runs/study
    """
    given = SimpleNamespace(**locals())
    options.check_names(methods)
    options.check_once(methods)
    with waiting("loading torch", quiet=quiet):
        from offbeat.app.commands.study import run

    return run(given)

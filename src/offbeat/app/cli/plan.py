"""`offbeat plan`"""

from types import SimpleNamespace

import typer

from offbeat.app.cli import plan_options as options
from offbeat.app.cli import show
from offbeat.app.cli.plan_inputs import cluster_of, job_of, read_file
from offbeat.app.cli.plan_measure import measure_all
from offbeat.app.cli.plan_output import as_dict, show_plan
from offbeat.app.cli.refusal import reading
from offbeat.plan import plan
from offbeat.plan.draw import picture

METHODS = (
    "ddp()",
    "local_sgd(every=8)",
    "cocod(every=8, delay=4)",
    "diloco(every=64)",
    "eager_diloco(every=64)",
)


def plan_command(
    context: typer.Context,
    methods: options.Methods = None,
    workers: options.Workers = None,
    step: options.Step = None,
    jitter: options.Jitter = 0.0,
    tail: options.Tail = None,
    straggler: options.Straggler = None,
    recorded: options.Recorded = None,
    link: options.Link = None,
    level: options.Level = None,
    reduce: options.Reduce = "ring",
    failures: options.Failures = 0.0,
    restart: options.Restart = "60s",
    checkpoint: options.Checkpoint = "0s",
    cluster: options.File = None,
    steps: options.Steps = None,
    parameters: options.Parameters = None,
    dtype: options.Dtype = "float32",
    layers: options.Layers = 12,
    optimizer: options.Optimizer = "adamw",
    lr: options.Rate = 1e-3,
    warmup: options.Warmup = 0,
    cosine: options.Cosine = True,
    measure: options.Measure = False,
    task: options.Task = None,
    model: options.Model = None,
    data: options.Data = None,
    batch: options.Batch = None,
    script: options.Script = None,
    draw: options.Draw = None,
    json: options.Json = False,
) -> None:
    """Predict the wall-clock time of methods on a cluster that you describe.

    Nothing is trained. Offbeat builds each method, works out when its rounds happen, and computes how long
    the workers compute and wait.

    Examples:

        offbeat plan --workers 8 --step 250ms --jitter 0.05 --parameters 124M --link 1gbit,5ms --steps 10000

        offbeat plan 'ddp()' 'diloco(every=100)' --cluster mine.py --draw plan.svg

        torchrun --nproc-per-node 4 -m offbeat plan --measure --task digits --steps 1000
    """
    given = SimpleNamespace(**locals())
    with reading():
        job, where = read_file(cluster, context)
    found = measure_all(given)
    with reading():
        where = where or cluster_of(given, found)
        job = job or job_of(given, found)
    if not found.leads:
        found.leave()
        return
    console = show.console()
    with reading(), console.status("planning", spinner="dots"):
        result = plan(methods or METHODS, job, where)
    if draw is not None:
        with reading():
            draw.write_text(picture(result))
    if json:
        show.print_json(as_dict(result, found))
    else:
        show_plan(console, result, found, draw)
    found.leave()
